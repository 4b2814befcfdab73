"""One pass over a loader: how it began, where it was left, and how it is opened again."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from heal.actions import HealingError
from heal.training_state import RngState

# What the order of an epoch hangs on: generators, and the epoch that samplers were told.


@dataclass(frozen=True, slots=True)
class EpochStart:
    """What an epoch's order hangs on: the generators just before ``iter(loader)``."""

    rng: RngState
    generators: tuple[Any, ...]
    sampler_epoch: int | None
    other_epochs: tuple[tuple[str, int], ...] = ()
    """What others than the sampler were told by ``set_epoch``; not in the first checkpoints."""

    @property
    def epochs(self) -> dict[str, int]:
        """The epoch of everyone who was told it, by the place in the loader."""
        told = {} if self.sampler_epoch is None else {"sampler": self.sampler_epoch}
        return {**told, **dict(self.other_epochs)}


def generators(loader: Any) -> list[Any]:
    """The generators that a loader and its samplers own, each once."""
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if g is not None}.values())


def generator_states(loader: Any) -> tuple[Any, ...]:
    """Return how the generators that a loader and its samplers own are now."""
    return tuple(g.get_state() for g in generators(loader))


def set_generators(loader: Any, states: tuple[Any, ...]) -> None:
    """Have the generators of a loader go on from what :func:`generator_states` returned."""
    for generator, state in zip(generators(loader), states, strict=True):
        generator.set_state(state)


def start_of(loader: Any) -> EpochStart:
    """Return how an epoch over the loader would begin now."""
    epochs = {place: owner.epoch for place, owner in _epoch_owners(loader).items()}
    own = epochs.pop("sampler", None)
    return EpochStart(RngState.now(), generator_states(loader), own, tuple(epochs.items()))


def _epoch_owners(loader: Any) -> dict[str, Any]:
    """Return who is told the epoch and tells what it was, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    places = {
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batch_sampler,
        "sampler of batch_sampler": getattr(batch_sampler, "sampler", None),
        "dataset": getattr(loader, "dataset", None),
    }
    found: dict[int, tuple[str, Any]] = {}
    for place, owner in places.items():
        knows = isinstance(getattr(owner, "epoch", None), int)
        if knows and callable(getattr(owner, "set_epoch", None)):
            found.setdefault(id(owner), (place, owner))
    return dict(found.values())


def set_epochs(loader: Any, epochs: Mapping[str, int]) -> None:
    """Tell those in these places of a loader their epoch, if it is news to them."""
    for place, owner in _epoch_owners(loader).items():
        # A dataset may have much to do when it is told.
        if place in epochs and owner.epoch != epochs[place]:
            owner.set_epoch(epochs[place])


def advance_epochs(loader: Any, start: EpochStart, following: EpochStart | None) -> None:
    """Do between two epochs what the user's loop did when these came for the first time.

    Args:
        loader: of both.
        start: how the first of them began.
        following: how the second did; None if that was in another process.
    """
    if following is not None:
        set_epochs(loader, following.epochs)
    else:
        set_epochs(loader, {place: epoch + 1 for place, epoch in start.epochs.items()})


def tell_next_epoch(loader: Any, before: EpochStart) -> None:
    """Tell those who were not told otherwise since an epoch began that the next one does."""
    owners = _epoch_owners(loader)
    waiting = {p: e + 1 for p, e in before.epochs.items() if p in owners and owners[p].epoch == e}
    set_epochs(loader, waiting)


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


def sample_indices(loader: Any, start: EpochStart | None, batch: int) -> list[Any] | None:
    """Return the indices that the batch number ``batch`` of an epoch had in its dataset.

    A copy of the sampler is asked again, from the state of the generators in which the epoch began;
    they are put back afterwards, and the sampler itself is never asked. Asked twice, it must give
    the same order: one that draws from a generator that only it knows does not, and what it gave
    is past. None there, and where the loader cannot tell: an iterable dataset, a loader that is no
    DataLoader, or one that keeps its own position.

    Args:
        loader: a torch DataLoader, or what looks like one.
        start: how the epoch began.
        batch: counted from 0.
    """
    if start is None or not is_map_style(loader) or hasattr(loader, "state_dict"):
        return None
    now = RngState.now()
    put_back = [(g, g.get_state()) for g in generators(loader)]
    try:
        copied = _copied_samplers(loader)
        first, again = (_drawn(copied, start, batch + 1) for _ in range(2))
        if first != again or len(first) <= batch:
            return None
        found = first[batch]
        return found if isinstance(found, list) else [found]
    except Exception:  # a sampler of somebody else's making; identity is a courtesy
        return None
    finally:
        for generator, state in put_back:
            generator.set_state(state)
        now.put_back()


def _drawn(loader: Any, start: EpochStart, count: int) -> list[Any]:
    """Return the first of what the samplers of an epoch give out."""
    return_to(loader, start)
    # A loader draws the seed of its workers before its sampler draws anything.
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    index_sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return list(itertools.islice(iter(index_sampler), count))


def _copied_samplers(loader: Any) -> SimpleNamespace:
    """Return what looks like the loader, with samplers of its own; data and generators are shared.

    Generators are known and put back; data may be large, and is not changed by being sampled.
    """
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    shared = [loader.dataset, *generators(loader)]
    for owner in (sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        shared += [value for value in getattr(owner, "__dict__", {}).values() if _is_data(value)]
    memo = {id(value): value for value in shared}
    sampler, batch_sampler = copy.deepcopy((sampler, batch_sampler), memo)
    own = getattr(loader, "generator", None)
    return SimpleNamespace(sampler=sampler, batch_sampler=batch_sampler, generator=own)


def _is_data(value: Any) -> bool:
    is_own = isinstance(value, OWN_VALUES) or type(value).__module__ == "numpy"
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not is_own


class LoaderPass:
    """An epoch as it was drawn. It knows the one after it, so that both can be drawn again.

    Whoever remembers a position in it keeps it and its loader alive; nobody else does.

    Attributes:
        loader: what is passed over.
        start: how the generators were just before.
        ended_at: how many batches it had when it was exhausted or left; None until then.
        was_left: whether it was left, as by ``break``, and not asked for more than it has.
        generators_at_end: how those of its loader were when it had ended.
        following: the pass that came next, None until then.
    """

    def __init__(self, loader: Any, start: EpochStart) -> None:
        self.loader = loader
        self.start = start
        self.ended_at: int | None = None
        self.was_left = False
        self.generators_at_end: tuple[Any, ...] = ()
        self.following: LoaderPass | None = None

    @property
    def can_reopen(self) -> bool:
        """Whether the loader begins anew when asked; an iterator would only go on."""
        return not hasattr(self.loader, "__next__")

    @property
    def loses_a_worker(self) -> bool:
        """Whether an error may end the share of one worker, while the others go on unharmed."""
        is_iterable = isinstance(getattr(self.loader, "dataset", None), IterableDataset)
        return is_iterable and getattr(self.loader, "num_workers", 0) > 0

    def is_over(self, index: int) -> bool:
        """Return whether the loader says that it has no more than ``index`` batches."""
        try:
            return index >= len(self.loader)
        except Exception:  # most loaders of streams have no length, and each says so differently
            return False

    def reopened(self, index: int) -> tuple[Iterator[Any], bool]:
        """Begin as the pass began and draw ``index`` batches, which may fail if they did before.

        Returns:
            The iterator, and whether the last of these batches failed.

        Raises:
            StopIteration: there are fewer.
        """
        return_to(self.loader, self.start)
        iterator = iter(self.loader)
        failed = False
        for _ in range(index):
            failed = not _pass_over(iterator)
        return iterator, failed

    def samples_of(self, index: int) -> list[Any] | None:
        """Return which samples a batch has, by their index in the dataset; None if unknown.

        A loader that stands in for another may answer by itself, by its ``sample_indices``.
        """
        own = getattr(self.loader, "sample_indices", None)
        if own is not None:
            found: list[Any] | None = own(self.start, index)
            return found
        return sample_indices(self.loader, self.start, index)

    def can_fetch(self, index: int) -> bool:
        """Return whether a batch can be read past the iterator, which then stays whole."""
        has_batches = isinstance(self.loader, DataLoader) and self.loader.batch_sampler is not None
        return has_batches and self.samples_of(index) is not None

    def can_read_again(self, index: int) -> bool:
        """Return whether a batch that failed could be found again.

        Where a sampler draws another order each time it is asked, the batch cannot; and its loader
        must not be opened anew, for the rest of the epoch would be of that other order.
        """
        hangs_on_sampler = isinstance(self.loader, DataLoader) and is_map_style(self.loader)
        if hangs_on_sampler and not is_stateful(self.loader):
            return self.samples_of(index) is not None
        return True

    def fetched(self, index: int) -> Any:
        """Read a batch in this process, past the iterator. It is not pinned, which costs time only.

        Call it only if :meth:`can_fetch`.
        """
        samples, dataset = self.samples_of(index), self.loader.dataset
        now = RngState.now()
        try:
            read_many = getattr(dataset, "__getitems__", None)
            found = read_many(samples) if read_many else [dataset[i] for i in samples or ()]
            return self.loader.collate_fn(found)
        finally:
            if self.loader.num_workers:  # else the loader itself draws from these generators
                now.put_back()

    def bad_numbers(self, index: int) -> str | None:
        """Read a batch again and return which of its tensors holds NaN or Inf.

        Generators are put back, whatever reading draws from them. Empty if all is finite, None if
        the batch cannot be read.
        """
        now = RngState.now()
        states = generator_states(self.loader)
        try:
            return bad_tensor(self.fetched(index)) if self.can_fetch(index) else None
        except Exception:  # the batch was read once; that it cannot be now is not what was asked
            return None
        finally:
            set_generators(self.loader, states)
            now.put_back()


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


def _pass_over(iterator: Iterator[Any]) -> bool:
    """Draw a batch that was seen before; return whether it could be read."""
    try:
        next(iterator)
    except StopIteration:
        raise
    except Exception:
        return False
    return True


def is_stateful(loader: Any) -> bool:
    """Return whether a loader keeps its own position, and can be given one."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def loader_rewinder(loader: Any) -> Callable[[], None]:
    """Return a function that undoes what drawing from a loader does to its own state."""
    start = start_of(loader)
    # A stateful loader begins an epoch when it is asked for its state; one not begun needs none.
    has_begun = getattr(loader, "_iterator", None) is not None
    state = loader.state_dict() if has_begun and is_stateful(loader) else None

    def rewind() -> None:
        return_to(loader, start)
        if state is not None:
            loader.load_state_dict(state)
        elif not has_begun and hasattr(loader, "_iterator"):
            loader._iterator = None

    return rewind


# Reads the batches of one pass over a loader, and gets past what cannot be read.


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
            except (StopIteration, HealingError):
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
