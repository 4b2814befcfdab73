"""One pass over a loader: how it began, where it was left, and how it is opened again."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from heal.actions import HealingError
from heal.training_state import RngState

# What the order of an epoch depends on: generators, and the epoch that samplers were given.


@dataclass(frozen=True, slots=True)
class EpochStart:
    """What the order of an epoch depends on, as it was just before ``iter(loader)``."""

    rng: RngState
    generators: tuple[Any, ...]
    sampler_epoch: int | None
    other_epochs: tuple[tuple[str, int], ...] = ()
    """What other owners than the sampler got from ``set_epoch``; not in the first checkpoints."""

    @property
    def epochs(self) -> dict[str, int]:
        """The epoch of each owner, by its place in the loader."""
        own = {} if self.sampler_epoch is None else {"sampler": self.sampler_epoch}
        return {**own, **dict(self.other_epochs)}


def _samplers(loader: Any) -> dict[str, Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return {
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batch_sampler,
        "sampler of batch_sampler": getattr(batch_sampler, "sampler", None),
    }


def generators(loader: Any) -> list[Any]:
    """Return the generators that a loader and its samplers own, each once."""
    found = [getattr(owner, "generator", None) for owner in (loader, *_samplers(loader).values())]
    return list({id(g): g for g in found if g is not None}.values())


def generator_states(loader: Any) -> tuple[Any, ...]:
    """Return the states of the generators that a loader and its samplers own."""
    return tuple(g.get_state() for g in generators(loader))


def set_generators(loader: Any, states: tuple[Any, ...]) -> None:
    """Set the generators of a loader to what :func:`generator_states` returned."""
    for generator, state in zip(generators(loader), states, strict=True):
        generator.set_state(state)


@contextmanager
def undisturbed(loader: Any = None) -> Iterator[None]:
    """Put the process's generators back after the body, and those of a loader if one is given."""
    now, states = RngState.now(), generator_states(loader)
    try:
        yield
    finally:
        set_generators(loader, states)
        now.put_back()


def start_of(loader: Any) -> EpochStart:
    """Return how an epoch over the loader would begin now."""
    epochs = {place: owner.epoch for place, owner in _epoch_owners(loader).items()}
    own = epochs.pop("sampler", None)
    return EpochStart(RngState.now(), generator_states(loader), own, tuple(epochs.items()))


def _epoch_owners(loader: Any) -> dict[str, Any]:
    """Return, each once, what has both ``set_epoch`` and an ``epoch`` to read."""
    found: dict[int, tuple[str, Any]] = {}
    places = {**_samplers(loader), "dataset": getattr(loader, "dataset", None)}
    for place, owner in places.items():
        has_epoch = isinstance(getattr(owner, "epoch", None), int)
        if has_epoch and callable(getattr(owner, "set_epoch", None)):
            found.setdefault(id(owner), (place, owner))
    return dict(found.values())


def set_epochs(loader: Any, epochs: Mapping[str, int]) -> None:
    """Call ``set_epoch`` of the owners in these places whose epoch is another one."""
    for place, owner in _epoch_owners(loader).items():
        # Only if it changes: ``set_epoch`` of a dataset may be expensive.
        if place in epochs and owner.epoch != epochs[place]:
            owner.set_epoch(epochs[place])


def set_next_epoch(loader: Any, before: EpochStart) -> None:
    """Move owners on to the epoch after ``before``, unless the caller's loop has set theirs."""
    owners = _epoch_owners(loader)
    due = {p: e + 1 for p, e in before.epochs.items() if p in owners and owners[p].epoch == e}
    set_epochs(loader, due)


def return_to(loader: Any, start: EpochStart) -> None:
    """Have the next epoch begin like an earlier one."""
    start.rng.put_back()
    set_generators(loader, start.generators)
    set_epochs(loader, start.epochs)


# Which samples of a dataset a batch was made of, found out after the fact.


OWN_VALUES = (str, bytes, list, tuple, dict, set, Tensor)
"""What a sampler may shuffle in place; other things that have a length are data, and not copied."""


def is_map_style(loader: Any) -> bool:
    """Return whether a loader looks samples up in its dataset, by indices of a sampler."""
    dataset = getattr(loader, "dataset", None)
    return hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)


def sample_indices(loader: Any, start: EpochStart, batch: int) -> list[Any] | None:
    """Return the indices that batch number ``batch`` of an epoch had in its dataset.

    A copy of the sampler draws again, from the state of the generators in which the epoch began.
    None where the order is unknown: for an iterable dataset, a loader that is no DataLoader or that
    keeps its own position, and for a sampler whose order differs when it draws twice.
    """
    if not is_map_style(loader) or hasattr(loader, "state_dict"):
        return None
    try:
        copied = _copied_samplers(loader)
    except Exception:  # a sampler of the user's; naming samples is only a convenience
        return None

    def restart() -> Any:
        return_to(copied, start)
        return copied

    return drawn_twice(loader, restart, batch)


def drawn_twice(loader: Any, restart: Callable[[], Any], batch: int) -> list[Any] | None:
    """Return the indices of one batch, if the samplers draw the same ones twice; else None.

    ``restart`` returns what has the samplers of the loader, ready to draw an epoch.
    """
    with undisturbed(loader):
        try:
            first, again = (_drawn(restart(), batch + 1) for _ in range(2))
        except Exception:  # as above
            return None
    if first != again or len(first) <= batch:
        return None
    found = first[batch]
    return found if isinstance(found, list) else [found]


def _drawn(loader: Any, count: int) -> list[Any]:
    # A loader draws the seed of its workers before its sampler draws anything.
    own = getattr(loader, "generator", None)
    torch.empty((), dtype=torch.int64).random_(generator=own)
    index_sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return list(itertools.islice(iter(index_sampler), count))


def _copied_samplers(loader: Any) -> SimpleNamespace:
    """Return a stand-in for the loader with copied samplers; data and generators are shared.

    Generators are put back afterwards; data may be large, and sampling does not change it.
    """
    samplers = _samplers(loader)
    shared = [loader.dataset, *generators(loader)]
    for owner in samplers.values():
        shared += [value for value in getattr(owner, "__dict__", {}).values() if _is_data(value)]
    memo = {id(value): value for value in shared}
    pair = (samplers["sampler"], samplers["batch_sampler"])
    sampler, batch_sampler = copy.deepcopy(pair, memo)
    own = getattr(loader, "generator", None)
    return SimpleNamespace(sampler=sampler, batch_sampler=batch_sampler, generator=own)


def _is_data(value: Any) -> bool:
    is_own = isinstance(value, OWN_VALUES) or type(value).__module__ == "numpy"
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not is_own


class AfterError(Enum):
    """What becomes of a batch that the loader could not read."""

    PASS_OVER = "pass over"
    STAND_IN = "stand in"
    """Give out the last good one in its place, so that ranks stay together."""
    TRY_AGAIN = "try again"


OnError = Callable[[Exception, int, int | None], AfterError]
"""Takes an exception, the epoch, and the batch; None for that if the epoch did not open."""


class LoaderPass:
    """An epoch over a loader: how it began, where it is being read, and which pass came next.

    If an error ends the iterator, as it does a generator, the pass is opened again behind the bad
    batch. If that fails once more, the rest of the pass is lost, and a note says so. Only the
    positions in a pass that is over keep it and its loader alive.

    Attributes:
        loader: what is passed over.
        epoch: the number of the pass.
        start: how the generators were just before.
        index: the number of the batch that comes next.
        following: the pass that came next, None until then.
    """

    start: EpochStart

    def __init__(
        self, loader: Any, epoch: int, on_error: OnError, note: Callable[[str], None]
    ) -> None:
        self.loader = loader
        self.epoch = epoch
        self.index = 0
        self.following: LoaderPass | None = None
        self._on_error = on_error
        self._note = note
        self._iterator: Iterator[Any] | None = None
        self._failed_at: int | None = None
        self._tries_again = False
        self._ended_at: int | None = None  # how many batches it had when it was exhausted or left
        self._was_left = False  # before its end, as by ``break``
        self._generators_at_end: tuple[Any, ...] = ()

    def next_over(self, loader: Any) -> "LoaderPass":
        """Return the pass that came next, if it was over this loader; else make one."""
        if self.following is None or self.following.loader is not loader:
            self.following = LoaderPass(loader, self.epoch + 1, self._on_error, self._note)
        return self.following

    def begin(self, start: EpochStart) -> None:
        """Open it as a ``for`` loop does, with generators as they are just before."""
        self._leave_for(start, 0)
        self._iterator, _ = self._opened(self._open)

    def go_to(self, position: "DataPosition", start: EpochStart) -> None:
        """Open it where a batch comes next."""
        self._leave_for(start, position.index)
        set_epochs(self.loader, start.epochs)  # not in the state that a loader keeps
        if position.loader_state is not None:
            self._load(position)
        elif self.index == self._ended_at:
            # Samplers draw once more at their end, and the next epoch depends on that.
            set_generators(self.loader, self._generators_at_end)
        else:
            self._reopen()

    def position(self, ordinal: int) -> "DataPosition":
        """Return where it is being read, to go to later."""
        state = self.loader.state_dict() if is_stateful(self.loader) else None
        own = state, generator_states(self.loader), self._iterator is None
        return DataPosition(self.epoch, self.index, ordinal, self.start, *own, self)

    @property
    def was_left_here(self) -> bool:
        """Whether it was left, when it was drawn first, before the batch that comes next."""
        return self._was_left and self.index == self._ended_at

    def end(self) -> None:
        """Note that it is exhausted, or left for good."""
        if self._iterator is not None:
            self._was_left = True
        self.close()
        self._ended_at = self.index
        self._generators_at_end = generator_states(self.loader)

    def close(self) -> None:
        """Stop reading."""
        self._iterator = None

    def read(self) -> Any:
        """Read the batch that comes next, and count it unless that raises.

        Raises:
            StopIteration: the pass is over.
            Exception: the batch cannot be read.
        """
        try:
            batch = self._read()
        except StopIteration:
            self._iterator, self._was_left = None, False
            raise
        self.index += 1
        return batch

    def try_again(self) -> bool:
        """Have the next :meth:`read` be for the batch that just failed; False if it is lost.

        Where a sampler draws another order each time, the batch cannot be found, and the loader
        must not be opened again: the rest of the epoch would have that other order.
        """
        has_sampler = isinstance(self.loader, DataLoader) and is_map_style(self.loader)
        is_ordered = not has_sampler or is_stateful(self.loader)
        self._tries_again = is_ordered or self.samples_of(self.index) is not None
        if not self._tries_again:
            place = f"batch {self.index} of epoch {self.epoch}"
            self._note(f"{place} cannot be read again: its sampler gives another order each time")
        return self._tries_again

    def pass_over(self) -> None:
        """Count the batch that just failed, and make sure that the rest can be read."""
        self._failed_at = self.index
        self.index += 1
        # An error may end the share of one worker, while the other workers go on.
        is_iterable = isinstance(getattr(self.loader, "dataset", None), IterableDataset)
        if is_iterable and getattr(self.loader, "num_workers", 0) > 0 and self._reopen():
            self._note_loss(self._failed_at, "what its worker would have read after it is lost")

    def samples_of(self, index: int) -> list[Any] | None:
        """Return which samples a batch has, by their index in the dataset; None if unknown.

        A loader that stands in for another has a ``sample_indices`` of its own.
        """
        own = getattr(self.loader, "sample_indices", None)
        if own is None:
            return sample_indices(self.loader, self.start, index)
        found: list[Any] | None = own(self.start, index)
        return found

    def bad_numbers(self, index: int) -> str | None:
        """Read a batch again and return which of its tensors holds NaN or Inf.

        Generators are put back. Empty if all is finite, None if the batch cannot be read.
        """
        with undisturbed(self.loader):
            try:
                samples = self._samples_to_fetch(index)
                return None if samples is None else bad_tensor(self._fetched(samples))
            except Exception:  # it was read once; that it cannot be now is another question
                return None

    def _leave_for(self, start: EpochStart, index: int) -> None:
        self.start, self.index = start, index
        self._iterator = self._failed_at = None
        self._tries_again = False

    def _load(self, position: "DataPosition") -> None:
        """Give a loader its position. Its samplers may not keep one: they are drawn again."""

        def load() -> Iterator[Any]:
            return_to(self.loader, self.start)
            self.loader.load_state_dict(position.loader_state)
            return iter(self.loader)

        with undisturbed():
            self._iterator = self._opened(load)
            if position.generators is not None:
                set_generators(self.loader, position.generators)
        if position.is_over:
            self._iterator = None  # the loader would continue with its next epoch

    def _read(self) -> Any:
        if self._iterator is None:
            raise StopIteration
        tries_again, self._tries_again = self._tries_again, False
        failed_at = self.index if tries_again else self.index - 1
        if not tries_again:
            try:
                return next(self._iterator)
            except StopIteration:
                if self._failed_at != failed_at or self._has_ended():
                    raise
        else:
            samples = self._samples_to_fetch(self.index)
            if samples is not None:
                return self._fetched(samples)
        # The iterator has moved past the batch that failed, or is dead.
        is_lost = not self._can_reopen or (self._reopen() and not tries_again)
        try:
            return next(self._iterator)
        except StopIteration:
            if is_lost:  # else the bad batch was the last one
                self._note_loss(failed_at, "the rest of the epoch is lost")
            raise

    @property
    def _can_reopen(self) -> bool:
        """Whether ``iter(loader)`` starts over; an iterator would only go on."""
        return not hasattr(self.loader, "__next__")

    def _has_ended(self) -> bool:
        """Return whether the loader says that it has no more batches."""
        try:
            return self.index >= len(self.loader)
        except Exception:  # most loaders of streams have no length, and raise different errors
            return False

    def _samples_to_fetch(self, index: int) -> list[Any] | None:
        """Return the samples of a batch, if it can be read past the iterator."""
        has_batches = isinstance(self.loader, DataLoader) and self.loader.batch_sampler is not None
        return self.samples_of(index) if has_batches else None

    def _fetched(self, samples: list[Any]) -> Any:
        """Read samples in this process; they are not pinned, which costs only time."""
        dataset = self.loader.dataset
        # Without workers the loader itself draws from the generators of this process.
        with undisturbed() if self.loader.num_workers else nullcontext():
            read_many = getattr(dataset, "__getitems__", None)
            found = read_many(samples) if read_many else [dataset[i] for i in samples]
            return self.loader.collate_fn(found)

    def _note_loss(self, index: int, what: str) -> None:
        why = "failed again when the loader was opened again"
        if not self._can_reopen:
            why = "failed, and an iterator cannot be opened again"
        self._note(f"batch {index} of epoch {self.epoch} {why}: {what}")

    def _opened(self, open_it: Callable[[], Any]) -> Any:
        """Open the loader, again and again while that is what to do after its error."""
        while True:
            try:
                return open_it()
            except (StopIteration, HealingError):
                raise
            except Exception as error:
                if self._on_error(error, self.epoch, None) is not AfterError.TRY_AGAIN:
                    raise

    def _reopen(self) -> bool:
        """Open the pass where we are; return whether the batch before this failed again."""
        with undisturbed():
            self._iterator, was_read = self._opened(self._open)
        return not was_read

    def _open(self) -> tuple[Iterator[Any], bool]:
        """Begin as the pass began, and draw up to where we are; was the last of these read?"""
        return_to(self.loader, self.start)
        iterator, was_read = iter(self.loader), True
        for _ in range(self.index):
            was_read = drop(iterator)
        return iterator, was_read


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Where a stream is: so many batches into an epoch that began like this."""

    epoch: int
    index: int
    ordinal: int
    start: EpochStart | None
    loader_state: Any = field(default=None, repr=False)
    generators: tuple[Any, ...] | None = field(default=None, repr=False)
    """The loader's own, here: its state leaves out what it drew from them besides its order."""
    is_over: bool = False
    origin: LoaderPass | None = field(
        default=None, repr=False, compare=False, metadata={"is_saved": False}
    )
    """The pass itself, in the process that made it: a loader has no form on disk."""


def bad_tensor(batch: Any, where: str = "") -> str:
    """Return the first floating point tensor in a batch that holds NaN or Inf; empty if none."""
    if isinstance(batch, Tensor):
        num_bad = int(batch.isfinite().logical_not().sum()) if batch.is_floating_point() else 0
        name = where or "the batch"
        return f"{num_bad} of {batch.numel()} numbers of {name} are NaN or Inf" if num_bad else ""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(batch, Mapping):
        entries = batch.items()
    elif isinstance(batch, (list, tuple)):
        entries = enumerate(batch)
    found = (bad_tensor(entry, f"batch{where[5:]}[{key!r}]") for key, entry in entries)
    return next(filter(None, found), "")


def drop(batches: Iterator[Any]) -> bool:
    """Draw a batch that was drawn before; return whether it could be read."""
    try:
        next(batches)
    except StopIteration:
        raise
    except Exception:
        return False
    return True


def is_stateful(loader: Any) -> bool:
    """Return whether a loader keeps its own position, and can be given one.

    The adapters of accelerate have the methods whatever they adapt, and pass the calls on.
    """
    adapted = getattr(loader, "base_dataloader", loader)
    return all(callable(getattr(adapted, n, None)) for n in ("state_dict", "load_state_dict"))


def loader_rewinder(loader: Any) -> Callable[[], None]:
    """Return a function that undoes what drawing from a loader does to its own state."""
    start = start_of(loader)
    # ``state_dict`` of a stateful loader begins an epoch; one that has not begun needs no state.
    has_begun = getattr(loader, "_iterator", None) is not None
    state = loader.state_dict() if has_begun and is_stateful(loader) else None

    def rewind() -> None:
        return_to(loader, start)
        if state is not None:
            loader.load_state_dict(state)
        elif not has_begun and hasattr(loader, "_iterator"):
            loader._iterator = None

    return rewind
