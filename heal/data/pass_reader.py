"""Reads the batches of one pass over a loader, and gets past what cannot be read."""

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from heal.actions import CannotHeal
from heal.data.epoch_start import generator_states, return_to, set_generators
from heal.data.loader_pass import LoaderPass
from heal.state.rng import RngState


class AfterError(Enum):
    """What becomes of a batch that the loader could not read."""

    PASS_OVER = "pass over"
    STAND_IN = "stand in"
    """Give out the last good one in its place, so that ranks stay together."""
    TRY_AGAIN = "try again"


OnError = Callable[[Exception, int, int | None], AfterError]
"""Told of an exception, the epoch, and the batch; None for that if the epoch did not open."""


class PassReader:
    """Where a stream is in a pass, and the iterator that it reads from.

    If an error ends the iterator, as it does a generator, the pass is opened anew behind the bad
    batch. What fails there again cannot be got past, and is told of.

    Args:
        origin: the pass.
        epoch: its number.
        on_error: asked what to do when the loader cannot be opened.
        note: told of batches that an error has cost beyond the bad one.

    Attributes:
        index: the number of the batch that comes next.
    """

    def __init__(
        self, origin: LoaderPass, epoch: int, on_error: OnError, note: Callable[[str], None]
    ) -> None:
        self.origin = origin
        self.epoch = epoch
        self.index = 0
        self._on_error = on_error
        self._note = note
        self._iterator: Iterator[Any] | None = None
        self._failed_at: int | None = None
        self._tries_again = False

    def begin(self) -> None:
        """Open the pass as a ``for`` loop does."""
        loader, start = self.origin.loader, self.origin.start
        self._iterator = self._opened(lambda: iter(loader), lambda: return_to(loader, start))

    def go_to(
        self, index: int, loader_state: Any, generators: tuple[Any, ...] | None, is_over: bool
    ) -> None:
        """Open the pass at another place.

        Args:
            index: the number of the batch that comes next there.
            loader_state: given to a loader that keeps its own position; None for any other.
            generators: of such a loader, at that place; None if they are not known.
            is_over: whether the pass had ended there.
        """
        self.index = index
        if loader_state is not None:
            self._load(loader_state, generators)
            if is_over:
                self._iterator = None  # the loader took what follows its end for the next epoch
        elif index == self.origin.ended_at:
            # Samplers draw once more at their end: what comes after it follows from that.
            set_generators(self.origin.loader, self.origin.generators_at_end)
        else:
            self._reopen()

    def _load(self, loader_state: Any, generators: tuple[Any, ...] | None) -> None:
        """Give a loader its own position. Its samplers may not keep one: they are drawn again."""
        loader, start, now = self.origin.loader, self.origin.start, RngState.now()

        def load() -> None:
            return_to(loader, start)
            loader.load_state_dict(loader_state)

        try:
            load()
            self._iterator = self._opened(lambda: iter(loader), load)
            if generators is not None:
                set_generators(loader, generators)
        finally:
            now.put_back()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to read, and the loader was asked."""
        return self._iterator is None

    @property
    def was_left_here(self) -> bool:
        """Whether the pass, drawn for the first time, was left before the batch that comes next."""
        return self.origin.was_left and self.index == self.origin.ended_at

    def end(self) -> None:
        """The pass is exhausted, or left for good."""
        if self._iterator is not None:
            self.origin.was_left = True
            self._iterator = None
        self.origin.ended_at = self.index
        self.origin.generators_at_end = generator_states(self.origin.loader)

    def try_again(self) -> bool:
        """Have the next :meth:`read` be for the batch that just failed; False if it is lost."""
        self._tries_again = self.origin.can_read_again(self.index)
        if not self._tries_again:
            place = f"batch {self.index} of epoch {self.epoch}"
            self._note(f"{place} cannot be read again: its sampler gives another order when asked")
        return self._tries_again

    def pass_over(self) -> None:
        """Count the batch that just failed, and see that the rest can be read."""
        self._failed_at = self.index
        self.index += 1
        if self.origin.loses_a_worker and self._reopen():
            self._tell_loss("what its worker would have read after it is lost")

    def read(self) -> Any:
        """Read the batch that comes next, without counting it.

        Raises:
            StopIteration: the pass is over.
            Exception: the batch cannot be read.
        """
        try:
            return self._read()
        except StopIteration:
            self._iterator, self.origin.was_left = None, False
            raise

    def _read(self) -> Any:
        if self._iterator is None:
            raise StopIteration
        if self._tries_again:
            self._tries_again = False
            return self._read_again()
        try:
            return next(self._iterator)
        except StopIteration:
            if self._failed_at != self.index - 1 or self.origin.is_over(self.index):
                raise
        failed_again = not self.origin.can_reopen or self._reopen()
        try:
            return next(self._iterator)
        except StopIteration:
            if failed_again:  # else the bad batch was the last one
                self._tell_loss("the rest of the epoch is lost")
            raise

    def _read_again(self) -> Any:
        """Read the batch that failed once more. The iterator has moved past it, or is dead."""
        if self.origin.can_fetch(self.index):
            return self.origin.fetched(self.index)
        if self.origin.can_reopen:
            self._reopen()
        assert self._iterator is not None
        try:
            return next(self._iterator)
        except StopIteration:
            if not self.origin.can_reopen:
                self._failed_at = self.index
                self._tell_loss("the rest of the epoch is lost")
            raise

    def _tell_loss(self, what: str) -> None:
        why = "failed again when the loader was opened anew"
        if not self.origin.can_reopen:
            why = "failed, and an iterator cannot be opened anew"
        self._note(f"batch {self._failed_at} of epoch {self.epoch} {why}: {what}")

    def _opened(self, open_it: Callable[[], Any], before_retry: Callable[[], None]) -> Any:
        """Open the loader, again and again while that is what we are told to do."""
        while True:
            try:
                return open_it()
            except (StopIteration, CannotHeal):
                raise
            except Exception as error:
                if self._on_error(error, self.epoch, None) is not AfterError.TRY_AGAIN:
                    raise
                before_retry()

    def _reopen(self) -> bool:
        """Open the pass anew where we are; return whether the batch before this failed again."""
        now = RngState.now()
        try:
            self._iterator, failed = self._opened(
                lambda: self.origin.reopened(self.index), lambda: None
            )
            return bool(failed)
        finally:
            now.put_back()
