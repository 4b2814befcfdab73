"""Detectors over weights and optimizer state, measured every ``check_interval`` steps."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from statistics import median
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import FAR, FIRST, NEGLIGIBLE, SAME
from heal.record import HealthRow


class StateHealth:
    """Finds NaN and Inf in weights and moments, which is a fact; suspects leaps, reports resets.

    A weight norm that changed by ``drift_factor`` and by far more than between any two earlier
    checks is a suspicion; where more steps lie between, it may have changed by as much more. Fast
    early training, a schedule that raises the rate and weights that
    something else has written look alike, and the experiment distinguishes them. What no norm
    shows, such as one flipped bit in a large tensor, shows in the loss if it matters. The same
    holds for running statistics and other buffers that forward writes, but for the experiment:
    it runs in evaluation mode, because training does not read them.

    An optimizer that has lost its moments or step counts is reported and left alone: ReLoRA
    (arXiv:2307.05695) clears them on purpose, moments grow back, and harm shows in the loss.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.drift_factor = config.drift_factor
        self.clean_step = self.longest = 0
        self.names: list[str] = []
        self.weights: list[float] = []
        self.changes: list[float] = []
        self.intervals: list[int] = []
        self.counters: list[float] = []
        self.moments: list[float] = []
        self.largest_moments: list[float] = []
        self.buffers: dict[str, list[float]] = {}  # norm, its largest change, checks between

    def observe_health(self, row: HealthRow) -> Finding | None:
        """Judge a check. What is bad is not learned from."""
        finding = self._nonfinite(row)
        if finding is None:
            if self.weights and self._has_other_tensors(row):
                self._follow(row)
            finding = self._lost(row) or self._leap(row) or self._leap_of_buffers(row)
        if finding is None or finding.severity < Severity.ERROR:
            self._learn(row)
        return finding

    def _nonfinite(self, row: HealthRow) -> Finding | None:
        for cause, counts in (
            (Cause.WEIGHT_CORRUPTION, row.weight_bad),
            (Cause.OPTIMIZER_CORRUPTION, row.moment_bad),
        ):
            bad = [index for index, count in enumerate(counts) if count > 0]
            if bad:
                evidence = {"tensors": len(bad), "elements": counts[bad[0]], "measured": True}
                # Snapshots with NaN are never good, so that any good one is from before.
                return self._found(cause, row, bad[0], Severity.ERROR, evidence, row.step)
        bad = [index for index, count in enumerate(row.buffer_bad) if count > 0]
        if not bad:
            return None
        # A finite loss can do this: the batch is one of those since the last sound check.
        return Finding(
            cause=Cause.WEIGHT_CORRUPTION,
            step=row.step,
            bad_step=self.clean_step,
            severity=Severity.ERROR,
            evidence={
                "tensor": f"buffer {row.buffer_names[bad[0]]}",
                "tensors": len(bad),
                "elements": row.buffer_bad[bad[0]],
                "measured": True,
            },
        )

    def _lost(self, row: HealthRow) -> Finding | None:
        pairs = list(zip(self.counters, row.step_counters, strict=False))
        back = [i for i, (before, now) in enumerate(pairs) if before > 0 and now < before]
        if back:
            before, now = pairs[back[0]]
            evidence = {"counter_before": before, "counter": now, "measured": True}
            return self._found(Cause.OPTIMIZER_RESET, row, back[0], Severity.WARN, evidence)
        pairs = list(zip(self.moments, row.moment_norms, strict=False))
        # Moments of a tensor that gets no gradients fade away by themselves; only a fall from
        # their usual size is a loss.
        had = [i for i, (b, _) in enumerate(pairs) if b > NEGLIGIBLE * self.largest_moments[i] > 0]
        gone = [i for i in had if pairs[i][1] <= 0.0]
        if 2 * len(gone) > len(had):
            evidence = {"tensors": len(gone), "measured": True}
            return self._found(Cause.OPTIMIZER_RESET, row, gone[0], Severity.WARN, evidence)
        return None

    def _leap(self, row: HealthRow) -> Finding | None:
        """Suspect the tensor whose norm changed most against what it did before, if any did."""
        known = zip(self.weights, self.changes, self.intervals, strict=True)
        worst = self._leaps_most(row, list(known), row.weight_norms)
        if worst is None:
            return None
        before, now = self.weights[worst], row.weight_norms[worst]
        evidence = {"norm_before": before, "norm": now}
        found = self._found(Cause.WEIGHT_CORRUPTION, row, worst, Severity.WARN, evidence)
        # No update makes of a tensor a thousand times what it was, whatever the loss says of it.
        return replace(found, wants_proof=True, is_kept=0.0 < before < NEGLIGIBLE * now)

    def _leap_of_buffers(self, row: HealthRow) -> Finding | None:
        """As :meth:`_leap`, for the buffers that forward writes."""
        norms = dict(zip(row.buffer_names, row.buffer_norms, strict=False))
        names = [name for name in norms if name in self.buffers]
        known = [tuple(self.buffers[name]) for name in names]
        worst = self._leaps_most(row, known, [norms[name] for name in names])
        if worst is None:
            return None
        name, before = names[worst], known[worst][0]
        return Finding(
            cause=Cause.WEIGHT_CORRUPTION,
            step=row.step,
            bad_step=self.clean_step,
            severity=Severity.WARN,
            evidence={"tensor": f"buffer {name}", "norm_before": before, "norm": norms[name]},
            wants_proof=True,
            is_of_evaluation=True,
        )

    def _leaps_most(
        self,
        row: HealthRow,
        known: Sequence[tuple[float, ...]],
        norms: Sequence[float],
    ) -> int | None:
        """Return which norm changed most against what it did before; None if none has leapt."""
        if not known:
            return None
        typical = median(before for before, *_ in known)
        stretch = max(1.0, (row.step - self.clean_step) / max(self.longest, 1))
        worst, most = None, 0.0
        for index, ((before, largest, count), now) in enumerate(zip(known, norms, strict=True)):
            change, usual = abs(now - before), stretch * largest
            if count < FIRST or change <= SAME * typical:
                continue
            if before / self.drift_factor <= now <= before * self.drift_factor:
                continue
            if usual > 0.0 and change > max(FAR, most) * usual:
                worst, most = index, change / usual
        return worst

    def _found(
        self,
        cause: Cause,
        row: HealthRow,
        index: int,
        severity: Severity,
        evidence: Mapping[str, object],
        bad_step: int | None = None,
    ) -> Finding:
        return Finding(
            cause=cause,
            step=row.step,
            bad_step=self.clean_step if bad_step is None else bad_step,  # done since
            severity=severity,
            evidence={"tensor": row.name(index), "tensor_index": index, **evidence},
        )

    def _learn(self, row: HealthRow) -> None:
        if self.weights:
            self.longest = max(self.longest, row.step - self.clean_step)
            changes = [abs(n - b) for b, n in zip(self.weights, row.weight_norms, strict=True)]
            self.changes = [max(pair) for pair in zip(self.changes, changes, strict=True)]
            self.intervals = [count + 1 for count in self.intervals]
        else:
            self.changes = [0.0] * len(row.weight_norms)
            self.intervals = [0] * len(row.weight_norms)
        self.names = list(row.names)
        for name, norm in zip(row.buffer_names, row.buffer_norms, strict=False):
            before, largest, count = self.buffers.get(name, (norm, 0.0, -1))
            self.buffers[name] = [norm, max(largest, abs(norm - before)), count + 1]
        self.weights = _floats(row.weight_norms)
        self.counters = _floats(row.step_counters)
        self.moments = _floats(row.moment_norms)
        if len(self.largest_moments) == len(self.moments):
            pairs = zip(self.largest_moments, self.moments, strict=True)
            self.largest_moments = [max(pair) for pair in pairs]
        else:
            self.largest_moments = list(self.moments)
        self.clean_step = row.step

    def _has_other_tensors(self, row: HealthRow) -> bool:
        """Whether tensors were added, frozen or unfrozen, be they as many as before."""
        return len(row.weight_norms) != len(self.weights) or list(row.names) != self.names

    def _follow(self, row: HealthRow) -> None:
        """Keep what is known of tensors that are still there; of others begin with this check."""
        places = {name: i for i, name in enumerate(self.names)}
        before = [places.get(name) for name in row.names]
        if len(before) != len(row.weight_norms):  # without names they cannot be matched
            before = [None] * len(row.weight_norms)

        def kept(old: list[Any], new: Iterable[Any]) -> list[Any]:
            pairs = zip(before, new, strict=False)
            return [old[i] if i is not None and i < len(old) else value for i, value in pairs]

        nothing = [0] * len(before)
        self.changes = kept(self.changes, [0.0] * len(before))
        self.intervals = kept(self.intervals, nothing)
        self.weights = kept(self.weights, _floats(row.weight_norms))
        self.counters = kept(self.counters, _floats(row.step_counters))
        self.largest_moments = kept(self.largest_moments, _floats(row.moment_norms))
        self.moments = kept(self.moments, _floats(row.moment_norms))
        self.names = list(row.names)

    def start_over(self) -> None:
        """Learn the level of weights and moments again from the next check."""
        for name in ("names", "weights", "changes", "intervals", "counters", "moments"):
            setattr(self, name, [])
        self.largest_moments, self.longest, self.buffers = [], 0, {}

    def state(self) -> dict[str, Any]:
        lists = ("names", "weights", "changes", "intervals", "counters", "moments")
        state = {name: list(getattr(self, name)) for name in (*lists, "largest_moments")}
        buffers = {name: list(known) for name, known in self.buffers.items()}
        return {
            "clean_step": self.clean_step,
            "longest": self.longest,
            "buffers": buffers,
            **state,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if name != "resets":  # of version 0.1
                setattr(self, name, deepcopy(value))
        if not isinstance(self.intervals, list):  # saved when all tensors had one count
            self.intervals = [self.intervals] * len(self.weights)


def _floats(values: Iterable[float]) -> list[float]:
    return [float(value) for value in values]
