"""What healing itself could not do: told once, and never a reason to stop training."""

from collections.abc import Callable

from heal.actions import CannotHeal
from heal.journal.journal import Journal
from heal.journal.log_lines import LOG

LEFT_OUT = "healing failed and was left out"
MAX_NOTES = 100  # different things that may go wrong with healing itself before we fall silent


class Notes:
    """Collects notes, logs them, and runs our own code so that its failures become notes.

    Args:
        journal: where they are written too.

    Attributes:
        texts: what was told.
        step: returns the number of the present step; 0 while there is no run yet.
    """

    def __init__(self, journal: Journal) -> None:
        self.texts: list[str] = []
        self.step: Callable[[], int] = lambda: 0
        self._journal = journal

    def add(self, text: str) -> None:
        """Tell something, once."""
        if text not in self.texts and len(self.texts) < MAX_NOTES:
            self.texts.append(text)
            self._journal.event("note", self.step(), text=text)
            where = f"rank {self._journal.rank}: " if self._journal.rank else ""
            LOG.warning("heal: %s%s", where, text)

    def contain(self, action: Callable[[], None]) -> None:
        """Run our own code. If it fails, training goes on without what it was for, and hears so."""
        try:
            action()
        except CannotHeal:
            raise
        except Exception as error:
            self.add(f"{LEFT_OUT}: {error!r}")
