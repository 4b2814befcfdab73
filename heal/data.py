"""The stream of batches: it counts, goes on after a bad batch, and can be rewound or skipped.

It draws from a loader exactly as a ``for`` loop would, and from no generator of its own, so that
a run that needs no healing sees the same batches with it as without.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from heal.actions import CannotHeal
from heal.epoch_start import EpochStart, advance_sampler, return_to, start_of
from heal.rng import RngState
from heal.sample_indices import sample_indices

LOG_LENGTH = 10_000  # batches whose step is remembered, to find those that did harm


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Where a stream is: so many batches into an epoch that began like this."""

    epoch: int
    index: int
    ordinal: int
    start: EpochStart | None
    loader_state: Any = field(default=None, repr=False)


class BatchStream:
    """Batches of one or more epochs over a loader.

    A loader with ``state_dict`` and ``load_state_dict``, as torchdata's StatefulDataLoader, is
    rewound to the exact position. A plain one is started again as its epoch was and drawn from
    until the place is reached: the same batches, provided they follow from the generators at the
    start of the epoch, as shuffling and worker seeds do. They do not if the dataset itself draws
    random numbers in the main process (``num_workers=0``), or is an iterator that cannot restart.

    Args:
        on_error: told of every exception of the loader, with the epoch and the number of the
            batch; it raises if the run should end, and returns whether the last good batch should
            be given out in its place, so that ranks stay together.
        step: returns the number of the step that the next batch is for.
        on_begin: called when an epoch was begun and nothing was drawn from it yet.
        keeps_last: hold on to the last good batch.

    Attributes:
        ordinal: how many batches were drawn, the skipped and the failed ones included.
        skipped: how many were drawn and not given out.
        is_open: whether a loop is drawing from an epoch.
        was_left: whether the newest epoch was left before its end, as by ``break`` or an exception.
    """

    def __init__(
        self,
        on_error: Callable[[Exception, int, int], bool],
        step: Callable[[], int],
        on_begin: Callable[[], None],
        keeps_last: bool = False,
    ) -> None:
        self._on_error = on_error
        self._step = step
        self._on_begin = on_begin
        self._keeps_last = keeps_last
        self._last: Any = None
        self.ordinal = 0
        self.skipped = 0
        self.is_open = self.was_left = False
        self._epoch = -1
        self._index = 0
        self._start: EpochStart | None = None
        self._loader: Any = None
        self._iterator: Iterator[Any] | None = None
        self._rewind_to: DataPosition | None = None
        self._step_of: dict[int, int] = {}  # ordinal of a batch -> step that it was for
        self._unwanted: set[int] = set()  # ordinals
        self._abandoned_from: int | None = None
        self._length_of: dict[int, int] = {}  # batches in each epoch that was exhausted

    def epoch(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of one pass over the loader.

        After a rewind into an earlier epoch the rest of that one comes first.
        """
        self.is_open = self.was_left = True
        try:
            yield from self._rest_of_epoch(loader)
            self.was_left = False
        finally:
            self.is_open = False

    def _rest_of_epoch(self, loader: Any) -> Iterator[Any]:
        if self._loader is None and self._rewind_to is not None:
            self._loader = loader  # resumed: an epoch that was begun elsewhere
            self._carry_out_rewind(self._rewind_to)
        else:
            self._begin_epoch(loader)
        own = self._epoch
        self._on_begin()
        while True:
            try:
                batch = self._draw()
            except StopIteration:
                self._length_of[self._epoch] = self._index
                if self._epoch >= own:
                    self._iterator = None
                    return
                advance_sampler(loader, self._start)
                self._begin_epoch(loader)
                continue
            yield batch

    def position(self) -> DataPosition:
        """Return where the stream is, to return to later."""
        if self._rewind_to is not None:
            return self._rewind_to  # it will be there before the next batch is drawn
        state = None
        if self._loader is not None and _is_stateful(self._loader):
            state = self._loader.state_dict()
        return DataPosition(self._epoch, self._index, self.ordinal, self._start, state)

    def rewind(self, position: DataPosition) -> None:
        """Return to a position; the loader is touched when the next batch is asked for."""
        self._rewind_to = position

    def resume(self, position: DataPosition, unwanted: Iterable[int]) -> None:
        """Begin where another process was, which no batch was drawn from yet."""
        self._rewind_to = position if position.start is not None else None
        self._unwanted.update(unwanted)

    def unwanted(self) -> list[int]:
        """Return the numbers of batches to come that will not be given out."""
        return sorted(self._unwanted)

    def abandon_from(self, step: int) -> None:
        """Forget, with the next batch, which batches went to steps from ``step`` on."""
        self._abandoned_from = step

    def skip(self, first_step: int, last_step: int) -> None:
        """Never give out the batches of these steps, be they drawn again or not drawn yet."""
        theirs = [o for o, step in self._step_of.items() if first_step <= step <= last_step]
        self._unwanted.update(theirs)
        if not self._step_of:
            return
        newest = max(self._step_of)
        to_come = max(0, last_step - max(first_step - 1, self._step_of[newest]))
        ahead = to_come * self._batches_per_step()
        self._unwanted.update(range(newest + 1, newest + 1 + ahead))

    def samples_of(self, index: int) -> list[Any] | None:
        """Return which samples a batch of this epoch has, by their index; None if unknown."""
        return sample_indices(self._loader, self._start, index)

    @property
    def newest(self) -> tuple[int, int]:
        """The epoch and the number in it of the batch that was last drawn."""
        return self._epoch, self._index - 1

    def _begin_epoch(self, loader: Any) -> None:
        self._loader = loader
        self._epoch += 1
        self._index = 0
        self._start = start_of(loader)
        self._iterator = iter(loader)

    def _draw(self) -> Any:
        """Return the next batch that is wanted and can be read."""
        while True:
            if self._rewind_to is not None:
                self._carry_out_rewind(self._rewind_to)
            self._prune_log()
            if self._iterator is None:
                raise StopIteration
            ordinal = self.ordinal
            try:
                batch = next(self._iterator)
            except (StopIteration, CannotHeal):
                raise
            except Exception as error:
                failed_at = (self._epoch, self._index)
                self._count()
                error.__traceback__ = None  # it would keep the loader's frames alive
                if not self._on_error(error, *failed_at) or self._last is None:
                    continue
                self._step_of[ordinal] = self._step()
                return self._last
            self._count()
            if ordinal in self._unwanted:
                self._unwanted.discard(ordinal)
                self.skipped += 1
                continue
            self._step_of[ordinal] = self._step()
            if self._keeps_last:
                self._last = batch
            return batch

    def _count(self) -> None:
        self.ordinal += 1
        self._index += 1

    def _prune_log(self) -> None:
        if self._abandoned_from is not None:
            kept = {o: s for o, s in self._step_of.items() if s < self._abandoned_from}
            self._step_of, self._abandoned_from = kept, None
        if len(self._step_of) > LOG_LENGTH:
            newest = max(self._step_of)
            kept = {o: s for o, s in self._step_of.items() if o > newest - LOG_LENGTH // 2}
            self._step_of = kept

    def _batches_per_step(self) -> int:
        """How many batches the last whole step took; more than one if gradients accumulate."""
        counts: dict[int, int] = {}
        for step in self._step_of.values():
            counts[step] = counts.get(step, 0) + 1
        return max(counts.values(), default=1)

    def _carry_out_rewind(self, position: DataPosition) -> None:
        self._rewind_to = None
        self._epoch, self._index = position.epoch, position.index
        self.ordinal, self._start = position.ordinal, position.start
        if position.start is None or position.index == self._length_of.get(position.epoch):
            self._iterator = None  # this epoch has nothing left, or none has begun
            return
        now = RngState.now()
        try:
            if position.loader_state is not None:
                self._loader.load_state_dict(position.loader_state)
                self._iterator = iter(self._loader)
                return
            return_to(self._loader, position.start)
            self._iterator = iter(self._loader)
            for _ in range(position.index):
                _pass_over(self._iterator)
        finally:
            now.put_back()


def _pass_over(iterator: Iterator[Any]) -> None:
    """Draw a batch that was seen before; if it failed then, it may fail again."""
    try:
        next(iterator)
    except StopIteration:
        raise
    except Exception:
        return


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def loader_rewinder(loader: Any) -> Callable[[], None]:
    """Return a function that undoes what drawing from a loader does to its own state."""
    start = start_of(loader)
    # A stateful loader begins an epoch when it is asked for its state; one not begun needs none.
    has_begun = getattr(loader, "_iterator", None) is not None
    state = loader.state_dict() if has_begun and _is_stateful(loader) else None

    def rewind() -> None:
        return_to(loader, start)
        if state is not None:
            loader.load_state_dict(state)
        elif not has_begun and hasattr(loader, "_iterator"):
            loader._iterator = None

    return rewind
