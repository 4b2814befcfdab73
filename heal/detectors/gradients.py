"""Detectors over gradients: NaN and Inf, skipped steps, explosions."""

import math
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import UpperRange
from heal.record import FAILED, NO_FLAG, NONFINITE_GRADIENT, Flag, Record


class SkippedSteps:
    """Counts skipped steps in a row, whatever the reason, and names the tensor.

    NaN losses and NaN gradients share the streak: they often alternate and are one problem. A
    skipped step has changed nothing, so that it is no reason for a rollback by itself. Where
    ``nan_action`` is "rollback", ``nan_patience`` of them raise a suspicion: the experiment finds
    weights that overflow from data that is NaN. A gradient scaler that still searches its scale
    overflows on purpose; that ends by itself because each overflow halves the scale.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.patience = config.nan_patience if config.nan_action == "rollback" else 0
        self.streak = 0
        self.first_step = -1
        self._data_is_nan = False  # so the experiment has shown, in this streak

    def note_bad_data(self) -> None:
        """Attribute this streak to the data: sound weights give NaN on it too."""
        self._data_is_nan = True

    def observe(self, record: Record) -> Finding | None:
        if record.flags is NO_FLAG and not record.blocked:
            self.streak = 0  # as below, sooner
            self._data_is_nan = False
            return None
        if record.has(FAILED):
            return None  # some rank had nothing to give; that is reported by itself
        loss_is_bad = record.has(Flag.LOSS_NAN)
        is_nonfinite = record.has_nonfinite_gradient or loss_is_bad
        if not is_nonfinite and not record.blocked:
            self.streak = 0
            return None
        if not loss_is_bad and record.loss_scale is not None and record.loss_scale > 1.0:
            scale: dict[str, object] = {"loss_scale": record.loss_scale}
            return _finding(Cause.SCALER_OVERFLOW, record, Severity.INFO, scale)
        self.first_step = record.step if self.streak == 0 else self.first_step
        self.streak += 1
        cause = Cause.GRADIENT_SPIKE
        if loss_is_bad:
            cause = Cause.NONFINITE_LOSS
        elif is_nonfinite:
            cause = Cause.NONFINITE_GRADIENT
        was_applied = is_nonfinite and not record.blocked
        evidence = _blame(record) | ({"applied": True} if was_applied else {})
        if self._data_is_nan:
            evidence["blames"] = "the data: sound weights give NaN on it too"
        return Finding(
            cause=cause,
            step=record.step,
            bad_step=self.first_step,
            severity=Severity.ERROR if was_applied else Severity.WARN,
            evidence=evidence,
            streak=self.streak,
            wants_proof=is_nonfinite and not was_applied and self._is_patience_spent(),
        )

    def _is_patience_spent(self) -> bool:
        """Whether to look into it now: after ``patience`` steps, then each time twice as many."""
        count, rest = divmod(self.streak, self.patience) if self.patience else (0, 1)
        return rest == 0 and count & (count - 1) == 0

    def state(self) -> dict[str, Any]:
        return {"streak": self.streak, "first_step": self.first_step}

    def load_state(self, state: dict[str, Any]) -> None:
        self.streak, self.first_step = state["streak"], state["first_step"]


class GradientExplosion:
    """Suspects norms before clipping far above their recent upper range.

    Clipping has dealt with a lone explosion, so that it is only reported; ``grad_norm_patience``
    in a row are a suspicion, which the experiment settles.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.norms = UpperRange(config.grad_norm_limit, config.grad_norm_patience)
        self.first_step = -1

    def observe(self, record: Record) -> Finding | None:
        norm = record.norm
        if not -math.inf < norm < math.inf:
            return None
        if record.flags is not NO_FLAG and record.has(NONFINITE_GRADIENT):
            return None
        streak, patience = self.norms.push(norm), self.norms.patience
        if streak == 1:
            self.first_step = record.step
        if streak not in (1, patience):
            return None
        wants_proof = streak == patience
        return Finding(
            cause=Cause.GRADIENT_EXPLOSION,
            step=record.step,
            bad_step=max(self.first_step - 1, 0) if wants_proof else self.first_step,
            severity=Severity.WARN,
            evidence=_blame(record)
            | {"usual_norm": self.norms.usual, "ratio": norm / self.norms.usual},
            streak=streak,
            wants_proof=wants_proof,
        )

    def limit(self) -> float:
        """Return the highest norm that is not suspected; 0 while it is not known."""
        return self.norms.limit * self.norms.level()

    def rebase(self) -> None:
        """Take what comes from now on as usual."""
        self.norms.clear()

    def state(self) -> dict[str, Any]:
        return {
            "norms": self.norms.values.values(),
            "streak": self.norms.streak,
            "first_step": self.first_step,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.norms.load(state["norms"], state["streak"])
        self.first_step = state["first_step"]


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
    # A NaN loss makes every gradient NaN: the first one says nothing about where it came from.
    if record.worst >= 0 and not record.has(Flag.LOSS_NAN):
        evidence["tensor"] = record.worst_name or f"tensor {record.worst}"
        evidence["tensor_index"] = record.worst
    return evidence


def _finding(
    cause: Cause, record: Record, severity: Severity, evidence: dict[str, object]
) -> Finding:
    return Finding(
        cause=cause, step=record.step, bad_step=record.step, severity=severity, evidence=evidence
    )
