"""Detectors over gradients: NaN and Inf, refused spikes, explosions."""

import math
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import Window
from heal.verdict import FAILED, NO_FLAG, NONFINITE_GRADIENT, Flag, Record


class RefusedSteps:
    """Counts refused steps in a row, whatever they were refused for, and names the tensor.

    NaN losses and NaN gradients share the streak: they often alternate and are one trouble. A
    gradient scaler that still searches its scale overflows on purpose; as long as the scale can
    fall this is routine, and it ends by itself because each overflow halves the scale.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.streak = 0
        self.first_step = -1

    def observe(self, record: Record) -> Finding | None:
        if record.flags is NO_FLAG and not record.blocked:
            self.streak = 0  # as below, sooner
            return None
        if record.has(FAILED):
            return None  # some rank had nothing to give; that is told by itself
        loss_is_bad = record.has(Flag.LOSS_NAN)
        is_nonfinite = record.has_nonfinite_gradient or loss_is_bad
        if not is_nonfinite and not record.blocked:
            self.streak = 0
            return None
        if not loss_is_bad and record.loss_scale is not None and record.loss_scale > 1.0:
            evidence: dict[str, object] = {"loss_scale": record.loss_scale}
            return _finding(Cause.SCALER_OVERFLOW, record, Severity.INFO, evidence)
        self.first_step = record.step if self.streak == 0 else self.first_step
        self.streak += 1
        cause = Cause.GRADIENT_SPIKE
        if loss_is_bad:
            cause = Cause.NONFINITE_LOSS
        elif is_nonfinite:
            cause = Cause.NONFINITE_GRADIENT
        was_applied = is_nonfinite and not record.blocked
        return Finding(
            cause=cause,
            step=record.step,
            bad_step=self.first_step,
            severity=Severity.ERROR if was_applied else Severity.WARN,
            evidence=_blame(record) | ({"applied": True} if was_applied else {}),
            streak=self.streak,
        )

    def state(self) -> dict[str, Any]:
        return {"streak": self.streak, "first_step": self.first_step}

    def load_state(self, state: dict[str, Any]) -> None:
        self.streak, self.first_step = state["streak"], state["first_step"]


class GradientExplosion:
    """Finds norms before clipping of many times their recent upper range.

    The reference is the 90 % quantile: runs whose gradient is exactly zero most of the time (RL
    with equal rewards) have no useful median. It must also be well above the highest such range of
    the whole run: one that has memorised its data has gradients of nearly zero, and whatever comes
    next is many times that. Less than the limit is written down and left alone. Clipping has dealt
    with a lone explosion, so that it is only a warning; it becomes an error when it lasts and the
    loss suffers from it and does not come down: new data is learned, damage is not. A loss that
    leapt together with the norm, not after it, did not suffer from that. Values that last enter the
    window: a new regime is learned, not fought.
    """

    NORMS, FEWEST = 128, 32
    UPPER = 0.9
    NOTABLE = 20.0  # times that range: clipping deals with it, but someone may want to know
    SLOW = 3  # times the patience for norms that are not the limit above that range as well
    BEYOND = 10.0  # times the highest upper range of the run
    LOSSES = 64
    HARM = 3.0  # spreads above its median at which a loss suffers
    AT_ONCE = 0.5  # share of the leap of the loss that came with the norm, not after it

    def __init__(self, config: HealingConfig) -> None:
        self.limit = config.grad_norm_limit
        self.patience = config.grad_norm_patience
        self.norms = Window(self.NORMS)
        self.losses = Window(self.LOSSES)
        self.highest = 0.0
        self.first_loss = 0.0
        self.streak = 0
        self.first_step = -1
        self.was_notable = False

    def observe(self, record: Record) -> Finding | None:
        norm = record.norm
        if not -math.inf < norm < math.inf:
            return None
        if record.flags is not NO_FLAG and record.has(NONFINITE_GRADIENT):
            return None
        usual = self.norms.quantile(self.UPPER)
        is_armed = usual > 0.0 and len(self.norms) >= self.FEWEST
        if not is_armed or norm <= max(self.limit * usual, self.BEYOND * self.highest):
            self.streak = 0
            note = None
            if is_armed:
                if self.was_notable or norm > self.NOTABLE * usual:
                    note = self._note(record, usual)
                if usual > self.highest:
                    self.highest = usual
            self.norms.push(norm)
            self.losses.push(record.loss)
            return note
        if self.streak == 0:
            self.first_step, self.first_loss = record.step, record.loss
        self.streak += 1
        if self.streak > self.SLOW * self.patience:
            self.norms.push(norm)
        is_due = self.streak % self.patience == 0 and (
            norm > self.limit * self.highest or self.streak >= self.SLOW * self.patience
        )
        is_harm = is_due and self._suffers(record.loss)
        if self.streak > 1 and not is_harm:
            return None
        return Finding(
            cause=Cause.GRADIENT_EXPLOSION,
            step=record.step,
            bad_step=self.first_step,
            severity=Severity.ERROR if is_harm else Severity.WARN,
            evidence=_blame(record) | {"usual_norm": usual, "ratio": norm / usual},
            streak=self.streak,
        )

    def level(self) -> float:
        """Return the upper range of norms; 0 while it is not known."""
        return self.norms.quantile(self.UPPER) if len(self.norms) >= self.FEWEST else 0.0

    def _note(self, record: Record, usual: float) -> Finding | None:
        """Tell of the first of several norms that are unusual and no explosion."""
        told, norm = self.was_notable, record.norm
        self.was_notable = norm > self.NOTABLE * usual and norm > self.BEYOND * self.highest
        if told or not self.was_notable:
            return None
        evidence = _blame(record) | {"usual_norm": usual, "ratio": record.norm / usual}
        return _finding(Cause.GRADIENT_EXPLOSION, record, Severity.INFO, evidence)

    def _suffers(self, loss: float) -> bool:
        usual = self.losses.median
        is_high = loss > usual + self.HARM * max(self.losses.spread, 0.0)
        return is_high and self.AT_ONCE * (loss - usual) > self.first_loss - usual

    def state(self) -> dict[str, Any]:
        return {
            "norms": self.norms.values(),
            "losses": self.losses.values(),
            "highest": self.highest,
            "first_loss": self.first_loss if math.isfinite(self.first_loss) else 0.0,
            "streak": self.streak,
            "first_step": self.first_step,
            "was_notable": self.was_notable,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.was_notable = state.get("was_notable", False)
        self.norms = Window(self.NORMS, state["norms"])
        self.losses = Window(self.LOSSES, state["losses"])
        self.highest, self.first_loss = state["highest"], state["first_loss"]
        self.streak, self.first_step = state["streak"], state["first_step"]


def _blame(record: Record) -> dict[str, object]:
    evidence: dict[str, object] = {"norm": record.norm, "loss": record.loss}
    kinds = [
        flag.name for flag in (Flag.HAS_NAN, Flag.HAS_INF, Flag.OVERFLOW) if record.flags & flag
    ]
    if kinds:
        evidence["kind"] = kinds
    if record.flags & Flag.STATISTICS_BAD:
        blames = "NaN or Inf that the batch left in running statistics, which were put back"
        evidence["blames"] = blames
    if record.worst >= 0:
        evidence["tensor"] = record.worst_name or f"tensor {record.worst}"
        evidence["tensor_index"] = record.worst
    return evidence


def _finding(
    cause: Cause, record: Record, severity: Severity, evidence: dict[str, object]
) -> Finding:
    return Finding(
        cause=cause, step=record.step, bad_step=record.step, severity=severity, evidence=evidence
    )
