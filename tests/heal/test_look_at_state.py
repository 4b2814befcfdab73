"""Corrupt weights and buffers show first as something else: they are looked at before that is."""

import pytest
import torch
from torch import nn

from heal import HealingConfig
from heal.actions import HealingError, ScaleLr
from heal.causes import Cause, Severity
from heal.detectors.watch import Watch
from heal.diagnose import Diagnosis
from heal.journal import Journal
from heal.policy import decide
from heal.recovery import Recovery
from heal.state_checks import find_corruption
from heal.testing import Fault
from tests.heal.fake_run import FakeRun
from tests.heal.runs import regression, strike
from tests.heal.state.snapshot_states import build, train


def failures(healer):
    return [(entry["failure"], entry["actions"]) for entry in healer.recoveries]


def sampling_run():
    """A run whose train_step samples from the model's output, as RL fine-tuning does."""
    setup = regression()

    def train_step(batch):
        output = setup.model(batch[0])
        chances = torch.cat([output, -output], dim=1).softmax(dim=1)
        torch.multinomial(chances, 1)  # raises: probability tensor contains either inf or nan
        return nn.functional.mse_loss(output, batch[1])

    setup.train_step = train_step
    return setup


def test_an_exception_where_a_model_samples_from_nan_weights_is_a_rollback():
    healer = strike(sampling_run(), [Fault("corrupt_weight", at=45)], 80)
    ((failure, actions),) = failures(healer)
    assert failure == "weight_corruption"
    assert "rollback" in actions
    assert "scale_lr" not in actions
    assert healer.last_step == 79


def test_the_evidence_names_the_tensor_and_what_was_raised():
    healer = strike(sampling_run(), [Fault("corrupt_weight", at=45)], 60)
    evidence = healer.recoveries[0]["evidence"]
    assert evidence["tensor"] in dict(healer.model.named_parameters())
    assert "probability tensor" in evidence["message"]
    assert evidence["seen_as"] == "unknown"


def test_the_same_exception_with_sound_weights_still_ends_the_run():
    setup = regression()

    def train_step(batch):
        loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
        if healer.last_step == 20:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return loss

    healer = setup.healer()
    with pytest.raises(RuntimeError, match="probability tensor"):
        healer.run(train_step, setup.loader, 40, progress=False)
    assert not any("rollback" in actions for _, actions in failures(healer))


def test_a_nan_loss_from_nan_weights_is_rolled_back_at_once_and_keeps_the_learning_rate():
    healer = strike(regression(check_interval=0), [Fault("corrupt_weight", at=45)], 80)
    ((failure, actions),) = failures(healer)
    assert failure == "weight_corruption"
    assert "rollback" in actions
    assert healer.lr_scale == 1.0
    assert healer.recoveries[0]["noticed_at"] <= 45 + 4  # the lag, not nan_patience


def test_nan_batches_with_sound_weights_are_skipped_as_before():
    healer = strike(regression(check_interval=0), [Fault("nan_batch", at=45, times=3)], 80)
    assert {failure for failure, _ in failures(healer)} == {"nonfinite_loss"}
    assert {tuple(actions) for _, actions in failures(healer)} == {("skip",)}


class QuietMonitor:
    """Has nothing to report."""

    def __init__(self):
        self.watch = Watch(HealingConfig())

    def poll(self):
        return iter(())


def diagnosis(cause, step, severity=Severity.ERROR):
    return Diagnosis(cause, {}, 0.9, severity, bad_step=step, step=step)


SETTINGS = HealingConfig()


def carry_out(recovery, run, diagnosis, config=SETTINGS):
    """What ``Healer._recover`` does with a diagnosis."""
    diagnosis = recovery.examine(diagnosis)
    plan = decide(diagnosis, recovery.history, config, run.snapshots(), run.lr_scale)
    return recovery.execute(recovery.ask_hook(diagnosis, plan), diagnosis).plan


def test_the_lower_rate_of_a_misdiagnosis_is_taken_back():
    run = FakeRun(snapshots=[90])
    recovery = Recovery(run, QuietMonitor(), HealingConfig(), Journal(None))
    for _ in range(2):  # the second rollback lowers the rate
        plan = carry_out(recovery, run, diagnosis(Cause.GRADIENT_EXPLOSION, 100))
    assert any(isinstance(action, ScaleLr) for action in plan)
    assert run.lr_scale == 0.5
    run.step = 110
    run.corrupt = {"cause": "weight_corruption", "tensor": "head", "tensors": 1}
    carry_out(recovery, run, diagnosis(Cause.NONFINITE_LOSS, 110, Severity.WARN))
    assert ("restore", 90) in run.done
    assert run.lr_scale == 1.0


@pytest.mark.parametrize("proof", [{}, {"loss_with_old_weights": 0.1}], ids=["open", "proven"])
def test_nan_is_not_searched_elsewhere_once_an_experiment_has_found_the_weights_damaged(proof):
    run = FakeRun(snapshots=[90])
    recovery = Recovery(run, QuietMonitor(), HealingConfig(nan_patience=5), Journal(None))
    found = dict(proof)
    nan = Diagnosis(Cause.NONFINITE_LOSS, found, 0.9, Severity.ERROR, 90, step=100, streak=5)
    carry_out(recovery, run, nan)
    ((_, diagnosis, _),) = recovery.log
    assert ("hint" in diagnosis.evidence) == (not proof)


def test_damage_that_an_experiment_found_while_weights_hold_nan_is_no_fault_of_the_data():
    run = FakeRun(snapshots=[90])
    run.step, run.corrupt = 110, {"cause": "weight_corruption", "tensor": "head", "tensors": 1}
    config = HealingConfig(after_rollback="replay_data")
    recovery = Recovery(run, QuietMonitor(), config, Journal(None))
    spike = diagnosis(Cause.LOSS_SPIKE, 100)
    spike.evidence["loss_with_old_weights"] = 0.1
    plan = carry_out(recovery, run, spike, config)
    ((_, found, _),) = recovery.log
    assert (found.cause, found.evidence["seen_as"]) == (Cause.WEIGHT_CORRUPTION, "loss_spike")
    assert [type(action).__name__ for action in plan] == ["Rollback"]


def test_a_frozen_weight_that_became_nan_is_named_when_patience_ends():
    setup = regression(check_interval=0)
    frozen = setup.model[0].weight.requires_grad_(False)
    healer, calls = setup.healer(), iter(range(10_000))

    def train_step(batch):
        if next(calls) == 45:
            frozen.data[0, 0] = float("nan")
        return nn.functional.mse_loss(setup.model(batch[0]), batch[1])

    with pytest.raises(HealingError, match=r"0\.weight"):
        healer.run(train_step, setup.loader, 80, progress=False)
    assert healer.recoveries[-1]["failure"] == "weight_corruption"


def test_a_finite_weight_that_makes_the_loss_nan_is_named_and_no_other_is():
    """A weight of 1e30 overflows in forward: every gradient is NaN, that of the first layer too."""
    setup = regression(check_interval=0)
    layers = [name for name, _ in setup.model.named_parameters() if name.endswith("weight")]
    first, broken = layers[0], layers[-1]
    weight, calls = setup.model.get_parameter(broken), iter(range(10_000))

    def train_step(batch):
        if next(calls) == 45:
            weight.data.mul_(1e30)
        return nn.functional.mse_loss(setup.model(batch[0]), batch[1])

    healer = setup.healer()
    healer.run(train_step, setup.loader, 80, progress=False)
    named = [entry["evidence"].get("tensor") for entry in healer.recoveries]
    (healed,) = [e for e in healer.recoveries if "rollback" in e["actions"]]
    assert healed["evidence"]["tensor"] == broken
    assert broken in healed["diagnosis"]
    assert first not in named


def test_corrupt_weights_come_before_the_moments_that_they_explain():
    state, _ = build()
    train(state, 2)
    moments = state.optimizers[0].state[state.model.norm.bias]
    moments["exp_avg"].fill_(torch.nan)
    assert find_corruption(state)["tensor"] == "exp_avg of norm.bias"
    with torch.no_grad():
        state.model.head.bias[:2] = torch.inf
    found = find_corruption(state)
    assert found["cause"] == Cause.WEIGHT_CORRUPTION.value
    assert (found["tensor"], found["tensors"], found["elements"]) == ("head.bias", 1, 2)
