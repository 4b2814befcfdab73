"""One pass over a loader: how it began, where it was left, and how it is opened again."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from heal.data.epoch_start import (
    EpochStart,
    generator_states,
    return_to,
    set_generators,
    start_of,
)
from heal.data.sample_indices import is_map_style, sample_indices
from heal.state.rng import RngState


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
