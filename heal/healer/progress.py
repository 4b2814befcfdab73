"""The progress bar of ``Healer.run``: loss, norm, clips and heals, as late as the records are."""

import sys
from typing import TYPE_CHECKING, Any

from heal.actions import Plan, changes_training
from heal.causes import Severity
from heal.diagnose import Diagnosis

if TYPE_CHECKING:
    from heal.loop import Healer


class Progress:
    """A tqdm bar, and a line above it for everything that was healed.

    Args:
        healer: whose records are shown.
        steps: the length of the bar.
        shown: nothing is printed if False.
    """

    def __init__(self, healer: "Healer", steps: int, shown: bool) -> None:
        self._healer = healer
        self._steps = steps
        self._shown = shown
        self._heals = 0
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        if self._shown:
            from tqdm import tqdm

            begun = self._healer.last_step + 1
            self._bar = tqdm(total=self._steps, initial=begun, unit="step", file=sys.stderr)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, step: int) -> None:
        """Show where the run is; after a rollback that is further back."""
        if self._bar is None:
            return
        latest = self._healer.latest
        if latest is not None:
            self._bar.set_postfix(
                loss=f"{latest.loss:.3f}",
                norm=f"{latest.norm:.2f}",
                clips=latest.clips,
                heals=self._heals,
                refresh=False,
            )
        self._bar.update(step - self._bar.n)

    def tell(self, diagnosis: Diagnosis, plan: Plan) -> None:
        """Count and print what was done."""
        if changes_training(plan):
            self._heals += 1
        if self._bar is not None and (plan or diagnosis.severity >= Severity.WARN):
            deeds = ", ".join(type(action).__name__ for action in plan) or "noted"
            self._bar.write(
                f"step {diagnosis.step}: {diagnosis.cause.value} -> {deeds}", sys.stderr
            )
