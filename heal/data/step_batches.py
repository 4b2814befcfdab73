"""The batches of one step, drawn one by one as a bare loop draws them."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from heal.state.rng import RngState


class NoMoreBatches(Exception):
    """A step asks for a batch, and there is none."""


class StepBatches:
    """Draws each batch when its turn comes, and keeps it in case the step is tried again.

    A shuffle, or a dataset, may draw from the generators that dropout draws from: all batches drawn
    before the first forward would change the random numbers of a step.

    Args:
        source: yields batches.
        count: how many the step has.

    Attributes:
        drawn: those that had their turn.
    """

    def __init__(self, source: Iterator[Any], count: int) -> None:
        self.count = count
        self.drawn: list[Any] = []
        self._source = source
        self._rng: list[RngState] = []  # as each batch was drawn, before its forward

    def turn(self, at: int) -> RngState:
        """Draw a batch; or, in another attempt, put generators back to when it was drawn.

        Returns:
            The generators as the forward of the batch finds them.

        Raises:
            NoMoreBatches: the source has no more.
        """
        if at < len(self.drawn):
            self._rng[at].put_back()
        else:
            self.drawn.extend(islice(self._source, 1))
            if at == len(self.drawn):
                raise NoMoreBatches
            self._rng.append(RngState.now())
        return self._rng[at]

    def draw_rest(self) -> None:
        """Draw what the step would still have had: it is given up as a whole."""
        for at in range(len(self.drawn), self.count):
            self.turn(at)
