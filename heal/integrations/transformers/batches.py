"""The trainer's batches as a stream that can be rewound, skipped, and read past a bad sample."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate import skip_first_batches
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import send_to_device

from heal.data.epoch_start import EpochStart, generator_states, set_generators
from heal.data.stream import BatchStream, Place
from heal.integrations.transformers.prepared import batches_of_steps
from heal.state.rng import RngState


class TrainerBatches:
    """Stands in for ``trainer.get_batch_samples``: the same batches, drawn through the healer.

    Args:
        trainer: whose loader is read.
        stream: counts, skips and rewinds.
        waits: told of every error of the loader; True if the same batch should be tried again.
        before_step: called before anything is drawn for a step.
        skipped_first: batches of the first epoch that a resumed trainer passes over.
        is_followed: whether the trainer's loop goes back when the data does, and then begins epochs
            that were begun before: they are the stream's own already.

    Attributes:
        of_step: the batches of the step that is under way.
    """

    def __init__(
        self,
        trainer: Any,
        stream: BatchStream,
        waits: Callable[[Exception], bool],
        before_step: Callable[[], None],
        skipped_first: int,
        is_followed: bool = False,
    ) -> None:
        self._trainer = trainer
        self._is_followed = is_followed
        self._stream = stream
        self._before_step = before_step
        self._loader = EpochLoader(trainer, waits, skipped_first)
        self.of_step: list[Any] = []
        self._place_of: dict[int, Place] = {}  # by identity, of the batches of this step
        self._offered: Any = None
        self._replaced = 0
        self._is_to_begin = False
        self._epoch: Iterator[Any] | None = None
        self._first_step = trainer.state.global_step
        self._num_given = self._lost_before = 0  # in the epoch under way, and before it

    @property
    def has_lost_epoch(self) -> bool:
        """Whether the epoch gave nothing because its batches were passed over."""
        return not self._num_given and self._num_lost() > self._lost_before

    def unwanted(self) -> list[int]:
        """Return which batches will not be given out, counted from the first of the training."""
        began = self._begins_at()
        return [] if began is None else [began + number for number in self._stream.unwanted()]

    def leave_out(self, unwanted: Iterable[int]) -> None:
        """Do not give out what :meth:`unwanted` returned in another process.

        A trainer that is resumed begins at the batch that its count of steps tells.
        """
        began = self._begins_at()
        if began is not None:
            self._stream.leave_out(number - began for number in unwanted if number >= began)

    def _begins_at(self) -> int | None:
        """Return how many batches come before the first that is drawn here, if that is known."""
        if self._trainer.args.ignore_data_skip and self._first_step:
            return None
        return batches_of_steps(self._trainer, self._first_step)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """Return the batches of one step and the number of items in them."""
        self._before_step()
        self._place_of.clear()
        if epoch_iterator is not self._offered:
            self._offered = epoch_iterator
            if not (self._is_followed and self._stream.is_replaying):
                self._loader.offer(epoch_iterator)
                self._is_to_begin = True
            self._num_given, self._lost_before = 0, self._num_lost()
        batches: list[Any] = []
        while len(batches) < num_batches:
            batch = self._draw()
            if batch is None:
                break
            batches.append(batch)
        if len(batches) < num_batches and self._num_lost():
            # Batches were passed over, so that the epoch ends within a step: the trainer would
            # accumulate these into its next step without dividing by their number.
            batches = []
        self.of_step = batches
        self._num_given += len(batches)
        return batches, self._trainer._get_num_items_in_batch(batches, device)

    def _num_lost(self) -> int:
        return self._replaced + self._stream.skipped + self._loader.failed

    def replacement(self) -> Any | None:
        """Return a batch for one that could not be used; None at the end of an epoch."""
        self._replaced += 1
        return self._draw()

    def identity(self, batch: Any) -> dict[str, Any]:
        """Return epoch, number and samples of a batch of this step; empty if it is another's."""
        place = self._place_of.get(id(batch))
        return {} if place is None else place.named()

    def _draw(self) -> Any | None:
        """Return the next batch; None at the end of an epoch.

        The rest of an epoch that was rewound comes before the one that the trainer has begun.
        """
        while True:
            if self._epoch is None:
                if not self._is_to_begin:
                    return None
                self._is_to_begin = False
                self._loader.begin_offered(is_used=not self._stream.will_rewind)
                self._epoch = self._stream.epoch(self._loader)
            try:
                batch = next(self._epoch)
            except StopIteration:
                self._epoch = None
                continue
            place = self._stream.last_place
            if place is not None:
                self._place_of[id(batch)] = place
            return batch


class EpochLoader:
    """The trainer's loader as :class:`BatchStream` wants it: iterable again and again.

    The first pass over an epoch uses the very iterator that the trainer made.
    """

    def __init__(
        self, trainer: Any, waits: Callable[[Exception], bool], skipped_first: int
    ) -> None:
        self.epoch = 0
        self.failed = 0
        self.sampler = self  # BatchStream asks the sampler for the epoch, and sets it
        self._trainer = trainer
        self.waits = waits
        self._first_epoch: int | None = None
        self._skipped_first = skipped_first
        self._offered: Any = None  # by the trainer, for the epoch that it begins
        self._begun: Any = None  # the same, once that is the epoch to be drawn
        self._offered_epoch = 0

    @property
    def batch_sampler(self) -> Any:
        """That of the loader: its generators belong to the position in the data.

        None if the order hangs on the number of the epoch alone, as it does by default.
        """
        batch_sampler = getattr(self._loader(), "batch_sampler", None)
        is_seeded = isinstance(getattr(batch_sampler, "sampler", None), SeedableRandomSampler)
        return None if is_seeded else batch_sampler

    def offer(self, iterator: Any) -> None:
        """Give the iterator that the trainer made for the epoch that begins."""
        self._offered = iterator
        self._offered_epoch = int(getattr(self._loader(), "iteration", self.epoch + 1))

    def begin_offered(self, is_used: bool) -> None:
        """Return to the epoch of that iterator: the end of the one before has moved the loader.

        Args:
            is_used: whether the next pass is that epoch, and not an earlier one drawn again.
        """
        self._begun, self._offered = self._offered if is_used else None, None
        self.set_epoch(self._offered_epoch)
        if self._first_epoch is None:
            self._first_epoch = self.epoch

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass be that of another epoch."""
        self.epoch = epoch
        if hasattr(self._loader(), "set_epoch"):
            self._loader().set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        return _EpochIterator(self, begun)

    def __len__(self) -> int:
        is_first = self.epoch == self._first_epoch
        return len(self._loader()) - (self._skipped_first if is_first else 0)

    def sample_indices(self, start: EpochStart, index: int) -> list[Any] | None:
        """Ask the sampler again for one batch of a pass; generators are put back.

        None if the pass is over, for the order may hang on the number of the epoch, or if the
        sampler gives another order when it is asked twice.
        """
        if start.sampler_epoch not in (None, self.epoch):
            return None
        now, states = RngState.now(), generator_states(self)
        try:
            first, again = (self._drawn(start, index + 1) for _ in range(2))
            return list(first[index]) if first == again and index < len(first) else None
        except Exception:  # a sampler of somebody else's making; identity is a courtesy
            return None
        finally:
            set_generators(self, states)
            now.put_back()

    def _drawn(self, start: EpochStart, count: int) -> list[Any]:
        start.rng.put_back()
        set_generators(self, start.generators)
        loader = self.pass_over()
        # A loader draws the seed of its workers before its sampler draws anything.
        own = getattr(loader, "generator", None)
        torch.empty((), dtype=torch.int64).random_(generator=own)
        return list(itertools.islice(iter(loader.batch_sampler), count))

    def pass_over(self) -> Any:
        """Return the loader for the present epoch, without what a resumed trainer left out."""
        loader = self._loader()
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)
        if self.epoch == self._first_epoch and self._skipped_first:
            return skip_first_batches(loader, self._skipped_first)
        return loader

    def _loader(self) -> Any:
        return self._trainer.callback_handler.train_dataloader


class _EpochIterator:
    """One pass. A failure ends accelerate's generator, so that the pass goes on beneath it."""

    def __init__(self, loader: EpochLoader, offered: Any) -> None:
        self._loader = loader
        self._rng = RngState.now()
        self._iterator: Iterator[Any] = iter(loader.pass_over()) if offered is None else offered
        self._given = 0
        self._is_beneath = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise
            except Exception as error:
                if not self._loader.waits(error) and self._is_beneath:
                    self._given += 1
                    self._loader.failed += 1
                    raise
                self._go_beneath()
                continue
            self._given += 1
            return batch

    def _go_beneath(self) -> None:
        """Start the pass again without look-ahead, which would lose the batch before a bad one."""
        now = RngState.now()
        self._rng.put_back()
        loader = self._loader.pass_over()
        base = getattr(loader, "base_dataloader", loader)
        device = getattr(loader, "device", None)
        rest = iter(base)
        for _ in range(self._given):
            _drop(rest)
        self._iterator = rest if device is None else _Moved(rest, device)
        self._is_beneath = True
        now.put_back()


class _Moved:
    """An iterator whose batches are sent to a device; a failure does not end it."""

    def __init__(self, batches: Iterator[Any], device: Any) -> None:
        self._batches = batches
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return send_to_device(next(self._batches), self._device)


def _drop(batches: Iterator[Any]) -> None:
    """Draw a batch that was seen before; if it failed then, it may fail again."""
    try:
        next(batches)
    except StopIteration:
        raise
    except Exception:
        return
