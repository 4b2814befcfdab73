"""A lowered learning rate reaches the optimizer under every scheduler, and no schedule notices."""

import pytest
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType

import zclip
from tests.heal.trainers import failures, tiny
from tests.heal.trainers.runs import Healed, bare

NEEDS = {
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
    "warmup_stable_decay": {"num_decay_steps": 4},
    "polynomial": {"lr_end": 1e-5},
}
METRIC = ("reduce_lr_on_plateau", "greedy")  # stepped with evaluations only
QUICK_ONES = ("linear",)
KINDS = [kind.value for kind in SchedulerType if kind.value not in METRIC]


def rates(make):
    """Train and return what the optimizer was stepped with, and what the log says."""
    trainer = make()
    trainer.create_optimizer()
    used = []
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"])
    )
    return trainer, used


@pytest.mark.parametrize(
    "kind", [k if k in QUICK_ONES else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_a_cut_reaches_the_live_optimizer_and_the_schedule_goes_on(kind, tmp_path):
    settings = {
        "max_steps": 16,
        "lr_scheduler_type": kind,
        "lr_scheduler_kwargs": NEEDS.get(kind, {}),
        "warmup_steps": 2,
    }
    scheduled, _ = rates(lambda: tiny.plain(tmp_path / "alone", **settings))
    bare(scheduled)
    logged = [line["learning_rate"] for line in scheduled.state.log_history if "loss" in line]

    trainer, used = rates(lambda: tiny.plain(tmp_path / "healed", **settings))
    failures.nan_loss(trainer, at=7, times=1)
    healed = Healed(trainer, rolls_back_after=1, lr_ramp_steps=0, lr_factor=0.25)
    assert healed.error is None
    now = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert now == logged  # the schedule is where it would have been, step by step
    (step, _, _), *_ = [entry for entry in healed.healer.history if len(entry[2]) > 1]
    assert used[:5] == logged[:5]
    lowered = used[step:]  # the first steps after the rollback, which went back some
    assert len(lowered) >= 8
    for rate, planned in zip(reversed(lowered), reversed(logged), strict=False):
        assert rate == pytest.approx(0.25 * planned)


@pytest.mark.parametrize(
    "kind", ["reduce_lr_on_plateau", pytest.param("greedy", marks=pytest.mark.slow)]
)
def test_so_it_does_under_a_scheduler_that_waits_for_a_metric(kind, tmp_path):
    trainer, used = rates(
        lambda: tiny.plain(
            tmp_path,
            max_steps=16,
            lr_scheduler_type=kind,
            eval_strategy="steps",
            eval_steps=4,
            metric_for_best_model="eval_loss",
            eval_dataset=tiny.tokens(8),
        )
    )
    failures.nan_loss(trainer, at=7, times=1)
    healed = Healed(trainer, rolls_back_after=1, lr_ramp_steps=0, lr_factor=0.25)
    assert healed.error is None
    assert healed.output.global_step == 16
    assert used[-1] == pytest.approx(0.25 * trainer.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("clips", [False, True])
def test_the_rate_that_the_trainers_scheduler_wants_is_known(clips, tmp_path):
    """It got the optimizer as accelerate wraps it, the healer the one within."""
    trainer = tiny.plain(tmp_path, max_steps=6, lr_scheduler_type="linear")
    if clips:
        trainer.create_optimizer()
        trainer.optimizer = zclip.wrap(trainer.optimizer, "zclip")
    latest = Healed(trainer).healer.latest
    assert latest.scheduled_lr == latest.lr
    assert 0 < latest.lr < tiny.arguments(TrainingArguments, tmp_path).learning_rate
