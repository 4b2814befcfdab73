"""What a healer knows and tells: numbers to log, what was done, where one could return to."""

from collections.abc import Sequence
from typing import Any

from heal.actions import Plan
from heal.diagnose import Diagnosis
from heal.healer.parts import Parts
from heal.journal.journal import Journal
from heal.state.snapshots import Snapshot
from heal.verdict import Record
from zclip import ClippedOptimizer


class Readout:
    """The half of a Healer that only answers."""

    journal: Journal
    parts: Parts

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log; those of the device are ``lag`` steps old."""
        history, listener = self.parts.treatment.history, self.parts.listener
        unheard = listener.unheard
        latest = listener.latest if unheard is None else unheard
        metrics = {
            "healing/recovery_attempts": float(history.total_attempts),
            "healing/nan_count": float(history.nan_count),
            **listener.watch.metrics(unheard),
            **self.parts.probes.metrics(),
        }
        if latest is not None:
            metrics |= {
                "zclip/raw_grad_norm": latest.norm,
                "zclip/clipped_grad_norm": latest.clipped_norm,
                "zclip/z_score": latest.z,
                "zclip/threshold": latest.threshold,
                "zclip/total_clips": float(latest.clips),
                "zclip/total_skips": float(latest.skips),
            }
        return metrics

    def numbers(self) -> dict[str, Any]:
        """Return what a plot needs: the newest record, and the series since the last call."""
        latest = self.latest
        seen = {} if latest is None else {"seen_at": latest.step, "loss": latest.loss}
        series = self.parts.listener.series.take()
        return {**seen, "lr_scale": self.parts.run.lr_scale, **self.metrics(), **series}

    @property
    def last_step(self) -> int:
        """The number of the last step taken, from 0; -1 before the first."""
        return self.parts.run.step - 1

    @property
    def is_in_loop(self) -> bool:
        """Whether a loop over :meth:`batches` is under way."""
        return self.parts.stream.is_open

    @property
    def left_loop_early(self) -> bool:
        """Whether the newest loop over :meth:`batches` was left before its end, or is not over."""
        return self.parts.stream.was_left

    @property
    def has_others(self) -> bool:
        """Whether there are other ranks to agree with."""
        return self.parts.guarded.ranks.has_others

    @property
    def latest(self) -> Record | None:
        """The newest record that may be read, a calm one also before the detectors hear of it."""
        return self.parts.listener.latest

    @property
    def lr_scale(self) -> float:
        """The factor on the learning rate, 1 unless healing lowered it."""
        return self.parts.run.lr_scale

    @property
    def attempts(self) -> int:
        """How often ``run`` tried to take a step, those that were repeated included."""
        return self.parts.micro.attempts

    @property
    def micro_batches(self) -> int:
        """Into how many pieces to cut batches; :meth:`run` and :meth:`pieces` do it for you."""
        return self.parts.micro.count_for_caller()

    @property
    def history(self) -> Sequence[tuple[int, Diagnosis, Plan]]:
        """Every diagnosis: the step that came next, what it was, and what was done."""
        return self.parts.treatment.log

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """What was done about trouble, as the postmortem lists it."""
        return self.journal.recoveries

    @property
    def optimizers(self) -> Sequence[ClippedOptimizer]:
        """The optimizers as they are stepped: those that were given, wrapped."""
        return self.parts.guarded.optimizers

    def snapshots(self) -> list[int]:
        """Return the steps that this rank could return to, newest first."""
        self.parts.listener.catch_up()
        return self.parts.run.ring.good_steps()

    def newest_snapshot(self) -> Snapshot | None:
        """Return the newest good snapshot itself, for drills; None if there is none."""
        self.parts.listener.catch_up()
        return self.parts.run.ring.newest_good()
