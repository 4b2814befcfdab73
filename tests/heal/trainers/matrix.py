"""Every failure of the table for every trainer: what is injected, what must be found, what ends."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback

from tests.heal.trainers import failures, tiny
from tests.heal.trainers.runs import Healed, is_finite, losses

STEPS = 70
AT = 40  # long enough for what is learned from the run itself
LAST = 10  # logged losses whose mean is the final loss

CONFIG = {
    "zclip_enabled": True,
    "snapshot_interval": 10,
    "snapshot_memory_factor": 8.0,  # tiny models: memory for snapshots of every age
    "quarantine_steps": 5,
    "check_interval": 10,
    "lr_ramp_steps": 10,
    "plateau_steps": 0,
}


@dataclass(frozen=True)
class Failure:
    """One column of the table."""

    inject: Callable[[Any], Any]
    found: tuple[str, ...]  # causes, any of which says that it was noticed
    config: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    ends: bool = False  # whether the run must end with its exception


@dataclass(frozen=True)
class Cell:
    """What came of one failure in one trainer."""

    detected: bool
    healed: bool
    final_loss: float
    causes: tuple[str, ...]
    actions: tuple[str, ...]


def _rows(trainer: Any) -> int:
    """Half of what the loss is computed of at once."""
    whole = trainer.args.per_device_train_batch_size
    is_paired = type(trainer.data_collator).__name__ == "DataCollatorForPreference"
    return whole if is_paired else whole // 2


class Bend(TrainerCallback):
    """Multiplies gradients before they are clipped, in some steps, until the run is set back."""

    def __init__(self, factor: float, times: int) -> None:
        self.calls = 0
        self.newest = 0
        self.factor = factor
        self.window = range(AT, AT + times)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for p in model.parameters():
            if p.requires_grad:
                p.register_hook(lambda g: g * self.factor if self.calls in self.window else g)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step < self.newest:
            self.window = range(0)
        self.newest = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        self.calls += 1


def _evaluates_badly(trainer: Any) -> None:
    sound = trainer.prediction_step

    def prediction_step(*args: Any, **kwargs: Any) -> Any:
        loss, *rest = sound(*args, **kwargs)
        return (loss + 3.0, *rest)

    trainer.prediction_step = prediction_step
    trainer.eval_dataset = trainer.train_dataset.select(range(8))
    trainer.args.eval_strategy = type(trainer.args.eval_strategy)("steps")
    trainer.args.eval_steps = STEPS // 2


FAILURES: dict[str, Failure] = {
    "NaN loss": Failure(
        lambda t: failures.nan_loss(t, AT), ("nonfinite_loss", "nonfinite_gradient")
    ),
    "out of memory": Failure(lambda t: failures.oom_above(t, _rows(t), AT), ("oom",)),
    "loss spike": Failure(
        lambda t: failures.scaled_loss(t, 200.0, AT, 3),
        ("loss_spike", "gradient_spike", "gradient_explosion"),
    ),
    "divergence": Failure(
        lambda t: t.add_callback(Bend(-1.0, 1000)),
        ("divergence", "loss_spike", "weight_corruption", "reward_collapse"),
        settings={"max_steps": 2 * STEPS},
    ),
    "explosion": Failure(
        lambda t: t.add_callback(Bend(1e4, 4)), ("gradient_explosion", "gradient_spike")
    ),
    "plateau": Failure(
        lambda t: None, ("plateau",), {"plateau_steps": 50}, {"learning_rate": 1e-12}
    ),
    "overfitting": Failure(_evaluates_badly, ("overfitting",)),
    "network": Failure(
        lambda t: failures.raises(t, lambda: ConnectionError("no answer"), AT, 3),
        ("network_error",),
    ),
    "bad batch": Failure(
        lambda t: failures.raises(t, lambda: ValueError("shape mismatch"), AT), ("data_error",)
    ),
    "crash": Failure(
        lambda t: failures.raises(t, lambda: AttributeError("a bug"), AT), ("unknown",), ends=True
    ),
}


def run(name: str, failure: str | None, folder: Any) -> Cell:
    """Train one trainer with one failure, or none; return what came of it."""
    kind = FAILURES[failure] if failure else Failure(lambda t: None, ())
    settings = {"max_steps": STEPS, "lr_scheduler_type": "constant", **kind.settings}
    trainer = tiny.TRAINERS[name](folder, **settings)
    kind.inject(trainer)
    healed = Healed(trainer, **{**CONFIG, **kind.config})
    decisions = healed.decisions
    causes = tuple(dict.fromkeys(cause for cause, _ in decisions))
    actions = tuple(dict.fromkeys(action for _, actions in decisions for action in actions))
    return Cell(
        detected=bool(set(kind.found) & set(causes)),
        healed=_is_well(healed, folder, kind.ends),
        final_loss=_final_loss(trainer),
        causes=causes,
        actions=actions,
    )


def _is_well(healed: Healed, folder: Any, ends: bool) -> bool:
    postmortem = (folder / "postmortem.json").is_file()
    if ends:
        return isinstance(healed.error, AttributeError) and postmortem
    finished = healed.error is None and healed.output.global_step == healed.trainer.args.max_steps
    return finished and is_finite(healed.trainer) and postmortem


def _final_loss(trainer: Any) -> float:
    last = losses(trainer)[-LAST:]
    return sum(last) / len(last) if last else math.nan
