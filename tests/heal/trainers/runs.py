"""Runs of trainers, bare and healed, and what they leave behind."""

import random
from typing import Any

import torch
from transformers import TrainerCallback

from heal import HealingConfig, SelfHealingTrainer
from tests.heal.runs import roll_back_after_skipped
from tests.heal.trainers.tiny import set_seed

QUICK = {"snapshot_interval": 3, "quarantine_steps": 2, "check_interval": 10, "lr_ramp_steps": 20}
"""Settings for runs of ten steps instead of ten thousand."""

OPTIONS = ("plateau_lr_factor", "trackers")  # of the wrapper; all else are settings
CLOCKS = ("runtime", "per_second", "time")


def quick(**changes: Any) -> HealingConfig:
    return HealingConfig(**{**QUICK, "zclip_enabled": False, **changes})


class Healed:
    """A trainer that was healed: what came out, and how long it waited.

    With ``rolls_back_after`` so many skipped steps in a row are rolled back, for tests that need
    some rollback.
    """

    def __init__(
        self,
        trainer: Any,
        run_dir: Any = None,
        resume: Any = None,
        rolls_back_after: int = 0,
        **config: Any,
    ):
        set_seed(1)
        if rolls_back_after:
            trainer.add_callback(_RollsBack(self, rolls_back_after))
        self.trainer = trainer
        self.waits: list[float] = []
        options = {name: config.pop(name) for name in OPTIONS if name in config}
        self.wrapper = SelfHealingTrainer(
            trainer, quick(**config), run_dir, sleep=self.waits.append, **options
        )
        self.output: Any = None
        self.error: BaseException | None = None
        try:
            self.output = self.wrapper.train(resume_from_checkpoint=resume)
        except Exception as error:
            self.error = error

    @property
    def healer(self) -> Any:
        return self.wrapper.healer

    @property
    def decisions(self) -> list[tuple[str, list[str]]]:
        """Every cause and the actions taken, in order."""
        return [
            (diagnosis.cause.value, [type(action).__name__ for action in plan])
            for _, diagnosis, plan in self.healer.history
        ]

    @property
    def causes(self) -> set[str]:
        return {cause for cause, _ in self.decisions}


class _RollsBack(TrainerCallback):
    """Registers the hook once there is a healer."""

    def __init__(self, healed: Healed, patience: int) -> None:
        self._healed, self._patience, self._healer = healed, patience, None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._healer is not self._healed.healer:
            self._healer = self._healed.healer
            roll_back_after_skipped(self._healer, self._patience)


def bare(trainer: Any, resume: Any = None) -> Any:
    set_seed(1)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: Any) -> list[torch.Tensor]:
    model = trainer.model
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def fingerprint(trainer: Any) -> list[Any]:
    """All that training changes, and the generators, as something that can be compared."""
    optimizer = trainer.optimizer
    state = [
        value.detach().clone()
        for group in optimizer.param_groups
        for p in group["params"]
        for value in optimizer.state.get(p, {}).values()
    ]
    rng = [torch.get_rng_state(), torch.tensor(random.getstate()[1])]
    rates = [torch.as_tensor(group["lr"]) for group in optimizer.param_groups]
    return [*weights(trainer), *state, *rates, *rng]


def log(trainer: Any) -> list[dict[str, Any]]:
    """The trainer's log without what the clock says."""
    return [
        {name: value for name, value in line.items() if not any(c in name for c in CLOCKS)}
        for line in trainer.state.log_history
    ]


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def is_finite(trainer: Any) -> bool:
    return all(bool(torch.isfinite(w).all()) for w in weights(trainer))


def assert_same(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(a, b), f"item {i} differs"
