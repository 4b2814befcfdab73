"""What can be done to a sick run. An action says what it does; the policy says when.

Each action is a small frozen value, so that plans can be compared in tests and written to the
journal as they are. ``apply`` changes the run and nothing else, and returns whether it had an
effect.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from heal.exit_codes import ExitCode
from heal.former import names_of
from heal.json_lines import encodable, plain

RENAMED = {"CannotHeal": "HealingError", "Refuse": "Skip"}
"""Names of version 0.1: importable until 0.3, and read in old journals for good."""

__getattr__ = names_of(__name__, {}, RENAMED)


class Run(Protocol):
    """The parts of a training run that actions may change.

    Steps count from 0. The snapshot of step ``s`` is the state *before* step ``s`` was taken: it
    holds the updates of steps 0 to s - 1, so that a step that did damage at ``s`` is undone by it.
    """

    step: int
    lr_scale: float
    micro_batches: int

    def snapshots(self) -> Sequence[int]:
        """Return the steps of the snapshots known to be good, newest first."""

    def restore(self, step: int) -> None:
        """Return to the snapshot of ``step``: all of it, or raise and change nothing."""

    def scale_lr(self, factor: float, floor: float, ramp_steps: int) -> None:
        """Multiply ``lr_scale``, no lower than ``floor``; return to 1 over ``ramp_steps`` steps."""

    def hold_lr(self, limit: float) -> None:
        """Hold every learning rate at ``limit``, until it comes to that or less by itself."""

    def tighten_clip(self, factor: float) -> None:
        """Multiply the thresholds of clipping."""

    def relearn_clip(self) -> None:
        """Reset the statistics of clipping, so that it learns the present level."""

    def skip_batches(self, first_step: int, last_step: int) -> None:
        """Never again feed the batches that these steps had, both ends included.

        The numbers are those of the timeline before any rollback of the same plan; a batch that
        lies behind the data position anyhow needs nothing, one not yet reached is passed over.
        """

    def shrink_micro_batch(self) -> bool:
        """Halve the micro-batch, same effective batch; False if it is at its minimum."""

    def checkpoint_activations(self) -> bool:
        """Recompute activations in backward; False if the model cannot or already does."""

    def clear_cache(self) -> None:
        """Give memory that the allocator holds back to the device."""

    def sleep(self, seconds: float) -> None:
        """Wait."""

    def take_snapshot(self) -> bool:
        """Take a snapshot now, out of turn; False if there is no room for it."""

    def watch_closely(self, steps: int) -> None:
        """Check weights and optimizer state ten times as often for so many steps."""

    def perturb_weights(self, std: float, seed: int) -> None:
        """Add normal noise of ``std`` times each tensor's own spread; alike on every rank."""

    def anchor_weights(self, strength: float, steps: int) -> bool:
        """Pull weights to where they are now for so many steps; False if there are none."""


@runtime_checkable
class Action(Protocol):
    """One change to a run; a hook may return actions of its own in a plan.

    ``apply`` makes the change and returns whether it had an effect. An exception becomes a note and
    the journal's event ``action_failed``, and the rest of the plan is carried out; a
    :class:`HealingError` ends the run. The journal writes the name of the class, with the fields of
    a dataclass or the dict that a method ``to_json`` returns.

    Example:
        >>> class ClearReplayBuffer:
        ...     def apply(self, run):
        ...         replay.clear()
        ...         return True
        >>> @healer.on_instability
        ... def also_clear(diagnosis, plan):
        ...     return (*plan, ClearReplayBuffer()) if Rollback in map(type, plan) else None
    """

    def apply(self, run: Run) -> bool:
        """Do it; return whether it had an effect."""


Plan = tuple[Action, ...]


class HealingError(RuntimeError):
    """The run must stop. The postmortem is written; ``exit_code`` says why."""

    def __init__(self, reason: str, exit_code: int = ExitCode.UNRECOVERABLE) -> None:
        super().__init__(reason)
        self.exit_code = int(exit_code)


RANGES = {
    "factor": (math.nextafter(0.0, 1.0), math.inf),  # a factor of 0 could never be undone
    "limit": (math.nextafter(0.0, 1.0), math.inf),
    "floor": (0.0, 1.0),
    "std": (0.0, 1.0),
    "exit_code": (0, 255),  # a shell sees one byte of it
}
"""Smallest and largest value of a field, where they are not 0 and infinity."""


class BuiltIn:
    """An action of this library: one call of the run, with the fields of a dataclass as arguments.

    It checks its fields, because a hook may have computed them.

    Attributes:
        calls: the method of :class:`Run`; what it returns is the effect, and nothing means "yes".
        is_harmless: whether weights, learning rate, clipping, batches and data stay as they are.
    """

    __slots__ = ()
    calls: ClassVar[Callable[..., object]]
    is_harmless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            if field.type in (int, float):
                check_number(self, field.name, field.type, *RANGES.get(field.name, ()))

    def apply(self, run: Run) -> bool:
        """Do it; return whether it had an effect."""
        values = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return getattr(run, type(self).calls.__name__)(*values) is not False


def check_number(
    owner: Any, name: str, kind: Any, least: float = 0, most: float = math.inf
) -> None:
    """Check that a field is a finite number from ``least`` to ``most``, of whatever library.

    Raises:
        ValueError: it is not, or it is no whole number and ``kind`` is ``int``.
    """
    value = plain(getattr(owner, name))
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and least <= value <= most:
        return
    expected = "a whole number" if kind is int else "a finite number"
    if math.isfinite(most):
        expected += f" from {least:g} to {most:g}"
    else:
        expected += " > 0" if 0 < least < 1 else f" >= {least:g}"
    raise ValueError(f"{type(owner).__name__}: {name}: expected {expected}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Skip(BuiltIn):
    """Do nothing: the device has skipped the step already and the state is clean."""

    is_harmless = True

    def apply(self, run: Run) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class TightenClip(BuiltIn):
    """Multiply the thresholds of clipping by ``factor``, for gradients that keep exploding."""

    calls = Run.tighten_clip
    factor: float


@dataclass(frozen=True, slots=True)
class RelearnClip(BuiltIn):
    """Reset a clip rule that skips finite gradients step after step.

    A rule that learns only from the steps it accepts never accepts a new level by itself.
    """

    calls = Run.relearn_clip


@dataclass(frozen=True, slots=True)
class ScaleLr(BuiltIn):
    """Multiply the learning rate by ``factor``, never below ``floor`` of the scheduled one.

    The factor is kept beside the schedule and applied at step time, so no scheduler can undo
    it and no rollback can lose it. It returns to 1 over ``ramp_steps`` steps.
    """

    factor: float
    floor: float = 0.01
    ramp_steps: int = 200

    def apply(self, run: Run) -> bool:
        before = run.lr_scale
        run.scale_lr(self.factor, self.floor, self.ramp_steps)
        return run.lr_scale != before


@dataclass(frozen=True, slots=True)
class HoldLr(BuiltIn):
    """Hold the learning rate at ``limit``, until the incident is over and it is no higher.

    For a rate that something other than a schedule has changed, and changes again after a rollback.
    """

    calls = Run.hold_lr
    limit: float


@dataclass(frozen=True, slots=True)
class Rollback(BuiltIn):
    """Return to the newest snapshot taken before ``before_step`` was.

    The snapshot restores parameters, optimizer moments, clip statistics, RNG and data position
    together: restoring only some of them replays the failure or trains on a mixture.
    """

    before_step: int

    def apply(self, run: Run) -> bool:
        good_step = newest_snapshot(run.snapshots(), self.before_step)
        if good_step is None:
            raise HealingError(
                f"no good snapshot from before step {self.before_step}", ExitCode.NO_SNAPSHOT
            )
        run.restore(good_step)
        return True


@dataclass(frozen=True, slots=True)
class SkipBatches(BuiltIn):
    """Do not feed the batches of these steps again, both ends included."""

    calls = Run.skip_batches
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class ShrinkBatch(BuiltIn):
    """Halve the micro-batch; the effective batch stays.

    ``halving`` counts within one incident: no two plans for it are the same.
    """

    halving: int = 1

    def apply(self, run: Run) -> bool:
        return run.shrink_micro_batch()


@dataclass(frozen=True, slots=True)
class CheckpointActivations(BuiltIn):
    """Trade time for memory: recompute activations in the backward pass."""

    calls = Run.checkpoint_activations


@dataclass(frozen=True, slots=True)
class ClearCache(BuiltIn):
    """Give unused memory back before the retry, so that it is not lost to fragments."""

    calls = Run.clear_cache
    is_harmless = True


@dataclass(frozen=True, slots=True)
class Backoff(BuiltIn):
    """Wait for a service or a network to come back."""

    calls = Run.sleep
    is_harmless = True
    seconds: float


@dataclass(frozen=True, slots=True)
class TakeSnapshot(BuiltIn):
    """Keep the state as it is now, because trouble is expected."""

    calls = Run.take_snapshot
    is_harmless = True


@dataclass(frozen=True, slots=True)
class WatchClosely(BuiltIn):
    """Check weights and optimizer state more often for a while."""

    calls = Run.watch_closely
    is_harmless = True
    steps: int


@dataclass(frozen=True, slots=True)
class PerturbWeights(BuiltIn):
    """Nudge the weights off a point that fails every time; off unless asked for."""

    calls = Run.perturb_weights
    std: float
    seed: int


@dataclass(frozen=True, slots=True)
class AnchorWeights(BuiltIn):
    """Hold the weights near those of the snapshot for ``steps`` steps; off unless asked for.

    Elastic weight consolidation (arXiv:1612.00796): the important weights are held most.
    """

    calls = Run.anchor_weights
    strength: float
    steps: int


@dataclass(frozen=True, slots=True)
class Halt(BuiltIn):
    """Stop the run and give the reason."""

    is_harmless = True
    reason: str
    exit_code: int = ExitCode.UNRECOVERABLE

    def apply(self, run: Run) -> bool:
        raise HealingError(self.reason, self.exit_code)


ACTIONS: tuple[type[BuiltIn], ...] = tuple(
    kind
    for kind in globals().values()
    if isinstance(kind, type) and issubclass(kind, BuiltIn) and kind is not BuiltIn
)
"""The actions of this library."""


def is_custom(action: Action) -> bool:
    """Return whether an action is a user's own."""
    return type(action) not in ACTIONS


def check_action(action: Any) -> None:
    """Check what a hook put into its plan.

    Raises:
        TypeError: it has no method ``apply``, or is a class.
        ValueError: it is a user's own and has the name of one of ours, which the history counts.
    """
    kind = type(action)
    if kind in ACTIONS:
        return
    if kind is type or not callable(getattr(action, "apply", None)):
        raise TypeError(f"expected actions with a method apply(run) -> bool, got {action!r}")
    if kind.__name__ in {known.__name__ for known in ACTIONS}:
        raise ValueError(
            f"expected an action with a name of its own, got {kind.__module__}.{kind.__name__}; "
            "rename the class"
        )


def newest_snapshot(snapshots: Sequence[int], before_step: int) -> int | None:
    """Return the newest snapshot that knows nothing of ``before_step``, None if there is none."""
    return max((step for step in snapshots if step <= before_step), default=None)


def action_to_json(action: Action) -> dict[str, Any]:
    """Return an action as the journal writes it: its name, then its values.

    Plain values: a hook may have computed them with numpy or torch. A ``to_json`` that fails leaves
    the name and the error.
    """
    name = {"action": type(action).__name__}
    try:
        return {**name, **_values(action), **name}
    except Exception as error:
        return {**name, "error": repr(error)}


def _values(action: Any) -> dict[str, Any]:
    to_json = getattr(action, "to_json", None)
    if to_json is None:
        to_json = functools.partial(asdict, action) if is_dataclass(action) else dict
    values: dict[str, Any] = plain(dict(to_json()))
    return dict(encodable(values)) if is_custom(action) else values


SEED_WORDS = {
    "ShrinkBatch": "halve_batch_size",
    "CheckpointActivations": "enable_gradient_checkpointing",
}
"""The first seed's names for actions, where ours differ by more than their spelling."""


def action_in_words(name: str) -> str:
    """Return an action's name as the postmortem lists it: ``rollback`` for ``Rollback``."""
    return SEED_WORDS.get(name) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def changes_training(plan: Plan) -> bool:
    """Return whether a plan touches weights, learning rate, clipping, batches or data."""
    return not all(isinstance(action, BuiltIn) and action.is_harmless for action in plan)
