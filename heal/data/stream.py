"""The stream of batches: it counts, goes on after a bad batch, and can be rewound or skipped.

It draws from a loader exactly as a ``for`` loop would, and from no generator of its own, so that
a run that needs no healing sees the same batches with it as without.
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from heal.actions import HealingError
from heal.data.loader_pass import (
    AfterError,
    DataPosition,
    LoaderPass,
    OnError,
    is_stateful,
    set_epochs,
    set_next_epoch,
    start_of,
)
from heal.training_state import RngState

LOG_LENGTH = 10_000  # batches whose step is remembered, to find those that did harm
NUM_PLACES = 256  # batches whose place is remembered, to name the samples of one that fails

TWO_AT_ONCE = (
    "expected one loop over batches() at a time, because a run has one position in its data, got "
    "two. Iterate the loader of an evaluation itself, without batches(); to train on two loaders, "
    "use one batches(zip(first, second))"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a batch came from."""

    ordinal: int
    epoch: int
    number: int  # in the epoch, from 0
    origin: LoaderPass = field(repr=False)

    def named(self) -> dict[str, Any]:
        """Return epoch, number and samples; the latter are None where they are unknown."""
        return {
            "epoch": self.epoch,
            "batch": self.number,
            "samples": self.origin.samples_of(self.number),
        }

    def bad_numbers(self) -> str | None:
        """Read the batch again and return which of its tensors holds NaN or Inf.

        Empty if none does, None if the batch cannot be read again.
        """
        return self.origin.bad_numbers(self.number)


class BatchStream:
    """Batches of one or more epochs over a loader.

    A loader with ``state_dict`` and ``load_state_dict``, as torchdata's StatefulDataLoader, is
    rewound to the exact position; its workers begin with new seeds. A plain one is started again as
    its epoch was and drawn from until the place is reached: the same batches, if they follow from
    the generators at the start of the epoch, as shuffling and worker seeds do. They do not if the
    dataset draws random numbers in the main process, or is an iterator that cannot restart.

    An epoch that is left early, by ``break``, ends there when it is drawn again.

    Args:
        on_error: decides about every exception of the loader; raises if the run should end.
        keeps_last: hold on to the last good batch.
        note: takes a text about batches that an error has cost beyond the bad one.

    Attributes:
        ordinal: how many batches were drawn, the skipped and the failed ones included.
        skipped: how many were not given out: to be left out, or impossible to read.
        is_open: whether a loop is drawing from an epoch.
        was_left: whether the newest epoch was left before its end, as by ``break`` or an exception.
    """

    def __init__(
        self,
        on_error: OnError,
        keeps_last: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._on_error = on_error
        self._keeps_last = keeps_last
        self._note = note
        self._last: Any = None
        self.ordinal = 0
        self.skipped = 0
        self.is_open = self.was_left = False
        self._num_opened = 0
        self._last_epoch = 0  # the epoch that the loop under way ends with
        self._pass: LoaderPass | None = None  # None before the first epoch
        self._furthest = -1  # the newest epoch that was begun; we are before it in a replay
        self._passes: weakref.WeakValueDictionary[int, LoaderPass] = weakref.WeakValueDictionary()
        self._rewind_to: DataPosition | None = None
        self._step_of: dict[int, int] = {}  # ordinal of a batch -> step that it was for
        self._places: deque[Place] = deque(maxlen=NUM_PLACES)
        self._unwanted: set[int] = set()  # ordinals
        self._abandoned_from: int | None = None

    def begin(self, loader: Any, *, sets_epoch: bool = False) -> int:
        """Begin a pass over the loader, and return its number for :meth:`draw`.

        After a rewind into an earlier epoch the rest of that one comes first. ``sets_epoch``: call
        ``set_epoch`` of its samplers and dataset, from the second pass on, unless the caller did.
        """
        self._num_opened += 1
        self.is_open = self.was_left = True
        self._last_epoch = self._furthest + 1
        before = self._pass
        if before is None and self._rewind_to is not None:
            self._last_epoch = self._rewind_to.epoch  # resumed: an epoch that was begun elsewhere
            self._carry_out_rewind(self._rewind_to, loader)
        elif not self._is_replaying():
            if before is not None:
                before.end()  # where a ``break`` has left it, it ends when drawn again
            if self._rewind_to is None:
                if sets_epoch and before is not None and before.loader is loader:
                    set_next_epoch(loader, before.start)
                self._begin_epoch(loader)
        # Else the loop was left while something earlier was to be drawn again: that comes first.
        return self._num_opened

    def draw(self, loader: Any, number: int, step: int) -> Any:
        """Return the next batch, for a step, of the pass that :meth:`begin` gave a number.

        Raises:
            NoMoreBatches: the pass is over.
            RuntimeError: another pass was begun since the last batch, whose batches would come. A
                loop that was left for good, as by ``break``, never draws again.
        """
        while True:
            if number != self._num_opened:
                raise RuntimeError(TWO_AT_ONCE)
            try:
                return self._draw(loader, step)
            except StopIteration:
                if self._pass is not None:
                    self._pass.end()
            if self.newest[0] >= self._last_epoch:
                self.was_left = False
                raise NoMoreBatches
            self._begin_next(loader)

    def leave(self, number: int) -> None:
        """Note that the loop over a pass has ended, or was left."""
        if number == self._num_opened:  # else it was left, and is only now collected
            self.is_open = False

    def position(self) -> DataPosition:
        """Return where the stream is, to return to later."""
        if self._rewind_to is not None:
            return self._rewind_to  # it will be there before the next batch is drawn
        if self._pass is None:
            return DataPosition(-1, 0, self.ordinal, None)
        return self._pass.position(self.ordinal)

    def rewind(self, position: DataPosition) -> None:
        """Return to a position; the loader is touched when the next batch is drawn."""
        self._rewind_to = position

    @property
    def will_rewind(self) -> bool:
        """Whether the next batch is one of an earlier position."""
        return self._rewind_to is not None

    @property
    def is_replaying(self) -> bool:
        """Whether the next batch is one of an epoch before the newest, or will be."""
        return self._rewind_to is not None or self._is_replaying()

    def resume(self, position: DataPosition, unwanted: Iterable[int]) -> None:
        """Begin where another process was, which no batch was drawn from yet."""
        self._rewind_to = position if position.start is not None else None
        self.leave_out(unwanted)

    def leave_out(self, unwanted: Iterable[int]) -> None:
        """Never give out batches of these numbers, see :attr:`ordinal`."""
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
        per_step = max(Counter(self._step_of.values()).values())  # several if they accumulate
        self._unwanted.update(range(newest + 1, newest + 1 + to_come * per_step))

    def identity(self, back: int = 0) -> dict[str, Any]:
        """Return epoch, number and samples of the batch given out ``back`` batches before the last.

        Empty if it did not come from here; samples are None where they are unknown.
        """
        return {} if back >= len(self._places) else self._places[-1 - back].named()

    @property
    def last_place(self) -> "Place | None":
        """The place of the batch that was given out last; None if there was none."""
        return self._places[-1] if self._places else None

    def batch_of(self, step: int) -> "Place | None":
        """Return the place of the batch that a step was given, the last if it had several.

        None if it did not come from here, or is long past.
        """
        theirs = [p for p in reversed(self._places) if self._step_of.get(p.ordinal) == step]
        return theirs[0] if theirs else None

    def samples_of(self, index: int) -> list[Any] | None:
        """Return which samples a batch of this epoch has, by their index; None if unknown."""
        return None if self._pass is None else self._pass.samples_of(index)

    @property
    def newest(self) -> tuple[int, int]:
        """The epoch and the number in it of the batch that was last drawn."""
        return (-1, -1) if self._pass is None else (self._pass.epoch, self._pass.index - 1)

    def _is_replaying(self) -> bool:
        return self.newest[0] < self._furthest

    def _begin_epoch(self, loader: Any) -> None:
        num_workers: int = getattr(loader, "num_workers", 0)
        if num_workers and is_stateful(loader):
            self._note(
                f"the workers of a {type(loader).__name__} begin with new seeds when it is "
                "rewound or resumed: a dataset that draws random numbers in them draws others"
            )
        if self._pass is None:
            self._enter(LoaderPass(loader, 0, self._on_error, self._note)).begin(start_of(loader))
        else:  # if it is drawn again, it ends where it ended
            self._enter(self._pass.next_over(loader)).begin(start_of(loader))

    def _begin_next(self, loader: Any) -> None:
        """Begin the epoch after one that was drawn again, over the loader that it had."""
        before = self._pass
        following = None if before is None else before.following
        if following is not None:
            loader = following.loader
        if before is not None and before.loader is loader:
            if following is None:  # that one was drawn in another process
                set_next_epoch(loader, before.start)
            else:
                set_epochs(loader, following.start.epochs)
        self._begin_epoch(loader)

    def _enter(self, origin: LoaderPass) -> LoaderPass:
        self._passes[origin.epoch] = self._pass = origin
        self._furthest = max(self._furthest, origin.epoch)
        return origin

    def _draw(self, loader: Any, step: int) -> Any:
        """Return the next batch that is to be given out and can be read."""
        while True:
            if self._rewind_to is not None:
                self._carry_out_rewind(self._rewind_to, loader)
            if self._abandoned_from is not None or len(self._step_of) > LOG_LENGTH:
                self._prune_log()
            now_in, ordinal = self._pass, self.ordinal
            if now_in is None or now_in.was_left_here:
                raise StopIteration
            place = Place(ordinal, now_in.epoch, now_in.index, now_in)
            try:
                batch = now_in.read()
            except (StopIteration, HealingError):
                raise
            except Exception as error:
                error.__traceback__ = None  # it would keep the loader's frames alive
                then = self._on_error(error, place.epoch, place.number)
                if then is AfterError.TRY_AGAIN and now_in.try_again():
                    continue
                now_in.pass_over()
                is_given_out = then is AfterError.STAND_IN and self._last is not None
                batch = self._last
            else:
                is_given_out = ordinal not in self._unwanted
                self._unwanted.discard(ordinal)
            self.ordinal += 1
            if not is_given_out:
                self.skipped += 1
                continue
            self._step_of[ordinal] = step
            self._places.append(place)
            if self._keeps_last:
                self._last = batch
            return batch

    def _prune_log(self) -> None:
        if self._abandoned_from is not None:
            kept = {o: s for o, s in self._step_of.items() if s < self._abandoned_from}
            self._step_of, self._abandoned_from = kept, None
        if len(self._step_of) > LOG_LENGTH:
            newest = max(self._step_of)
            kept = {o: s for o, s in self._step_of.items() if o > newest - LOG_LENGTH // 2}
            self._step_of = kept

    def _carry_out_rewind(self, position: DataPosition, loader: Any) -> None:
        """Return to a position, in the loader that it was in, as far as that is known."""
        self._rewind_to = None
        self.ordinal = position.ordinal
        now_in, self._pass = self._pass, None
        if now_in is not None:
            now_in.close()
            loader = now_in.loader
        if position.start is None:
            return  # no epoch had begun
        origin = position.origin or self._passes.get(position.epoch)  # none, if it is of the disk
        if origin is None:
            origin = LoaderPass(loader, position.epoch, self._on_error, self._note)
        self._enter(origin).go_to(position, position.start)


# The batches of one step, drawn one by one as a bare loop draws them.


class NoMoreBatches(Exception):
    """A step needs a batch, and there is none."""


class StepBatches:
    """Draws each batch when it is computed, and keeps it in case the step is tried again.

    A shuffle, or a dataset, may draw from the generators that dropout draws from: all batches drawn
    before the first forward would change the random numbers of a step.

    ``count`` is how many the step has, ``drawn`` holds those that were drawn.
    """

    def __init__(self, source: Iterator[Any], count: int) -> None:
        self.count = count
        self.drawn: list[Any] = []
        self._source = source
        self._rng: list[RngState] = []  # as each batch was drawn, before its forward

    def turn(self, at: int) -> RngState:
        """Draw a batch; or, in another attempt, put generators back to when it was drawn.

        Returns the generators as the forward of the batch finds them, or raises NoMoreBatches.
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
