"""From the first step to the last word: entering, leaving, closing, and being forgotten."""

from typing import Any, TypeVar

from heal.healer.exits import Exits
from heal.healer.readout import Readout
from heal.journal.journal import Journal

Entered = TypeVar("Entered", bound="Lifetime")


class Lifetime(Readout):
    """The part of a Healer that begins and ends."""

    exits: Exits
    journal: Journal

    def close(self, error: BaseException | None = None) -> None:
        """Hear the last records and write the postmortem; ``run`` and ``with`` do it for you."""
        if self.parts.listener.cluster is not None:
            self.parts.listener.cluster.stop()
        self.parts.trials.close()
        self.exits.close(error)

    def __enter__(self: Entered) -> Entered:
        self.exits.catch_signals()
        if self.parts.listener.cluster is not None:
            self.parts.listener.cluster.start(self.exits.leaving)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        halt = self.exits.late_stop() if error is None else None
        if halt is None:
            self.close(error)
            return
        self.exits.draft(halt)
        if self.parts.books.durable is not None:
            # Other ranks are past saving: what this one saved last has to do.
            halt = self.parts.books.durable.saved_before(halt, may_save=not self.has_others)
        self.close(halt)
        raise halt

    def __del__(self) -> None:
        exits = vars(self).get("exits")  # none where the arguments were refused
        if exits is not None:
            exits.collected(self)

    def hear_the_rest(self, hurries: bool = False) -> None:
        """Read the last records, when no step is to come that a plan could serve.

        Args:
            hurries: the run ends by an error, perhaps because a rank died: do not wait for others
                to finish a save.
        """
        if self.parts.books.durable is not None:
            if hurries:
                self.parts.books.durable.store.hurry()
            self.parts.notes.contain(self.parts.books.durable.finish)
        self.parts.notes.contain(self.parts.listener.hear_the_rest)
        if len(self.parts.listener.series):
            self.journal.metrics(self.last_step, self.parts.listener.series.take())
