"""How many samples a batch has, and whether the entries of a list are samples or fields.

Collating makes ``[inputs, targets]``, fields that each hold all samples; a ``collate_fn`` of the
user's may leave ``[image, image, image, image]``. Both are lists of tensors.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from torch import Tensor

from heal.data.agreed_length import agreed_length
from heal.data.batch_fields import CannotSplit, outside_lists, rows, tensors_in

MOST_FIELDS = 3  # anchor, positive and negative are alike; more entries of one kind may be samples
MOST_CHANNELS = 4  # tensors of three dimensions with no more rows than this may be images


class Guess(Enum):
    """What the entries of a list are."""

    SAMPLES = "samples"
    FIELDS = "fields"
    UNCLEAR = "unclear"


def count_samples(batch: Any) -> int:
    """Return the number of samples; 1 for a batch without tensors.

    The tensors that are in no list tell, by their majority. If there are none, the lists do: their
    entries are samples if the tensors in them cannot be fields, having several lengths.

    Raises:
        CannotSplit: names what is not understood.
    """
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        if are_samples(batch):
            return len(batch)
        fields: list[Any] = list(batch)
    else:
        fields = [batch]
    found = list(outside_lists(fields))
    agreed = agreed_length(found)
    if agreed is not None:
        return agreed
    lists = [v for v in found if isinstance(v, (list, tuple)) and has_tensors(v)]
    if _can_only_be_samples(lists):
        return len(lists[0])
    for entries in lists:
        _refuse_unclear(entries, guess(entries))
    agreed = agreed_length([t for entries in lists for t in tensors_in(entries)])
    return 1 if agreed is None else agreed


def are_samples(batch: Sequence[Any]) -> bool:
    """Return whether the entries of an outermost list are samples and not fields.

    Those of a tuple never are: that is what fields come in.

    Raises:
        CannotSplit: they may be either.
    """
    if hasattr(batch, "_fields") or (isinstance(batch, tuple) and len(rows(batch)) > 1):
        return False
    if _can_only_be_samples([entry for entry in batch if isinstance(entry, (list, tuple))]):
        return False  # a list of lists of samples: (images, targets)
    answer = guess(batch)
    _refuse_unclear(batch, answer)
    return answer is Guess.SAMPLES


def guess(entries: Sequence[Any]) -> Guess:
    """Guess from kinds and lengths of the tensors what the entries of a list are."""
    firsts = [next(tensors_in(entry), None) for entry in entries]
    if len(entries) < 2 or any(t is None for t in firsts) or not _are_alike(entries):
        return Guess.FIELDS
    if len(rows(entries)) > 1:
        shapes = {t.shape[1:] for t in entries if isinstance(t, Tensor)}
        return Guess.SAMPLES if len(shapes) <= 1 else Guess.UNCLEAR
    may_be_images = all(t is not None and t.dim() == 3 and len(t) <= MOST_CHANNELS for t in firsts)
    return Guess.UNCLEAR if may_be_images or len(entries) > MOST_FIELDS else Guess.FIELDS


def has_tensors(batch: Any) -> bool:
    """Return whether there is a tensor in a batch."""
    return next(tensors_in(batch), None) is not None


def _can_only_be_samples(lists: Sequence[Sequence[Any]]) -> bool:
    """Tell whether lists of one length hold tensors that cannot all be fields."""
    answers = [guess(entries) for entries in lists]
    if not lists or len({len(entries) for entries in lists}) > 1 or Guess.FIELDS in answers:
        return False
    differ = len(set().union(*map(rows, lists))) > 1
    return Guess.SAMPLES in answers or (differ and len(lists[0]) > MOST_FIELDS)


def _refuse_unclear(entries: Sequence[Any], answer: Guess) -> None:
    if answer is Guess.UNCLEAR:
        raise CannotSplit(
            f"a {type(entries).__name__} of {len(entries)} entries of the type "
            f"{type(entries[0]).__name__} may be samples or fields; wanted a tensor beside it that "
            "tells the number of samples, or one tensor for all samples"
        )


def _are_alike(entries: Sequence[Any]) -> bool:
    """Tell whether entries are of one kind, as samples are."""
    return len({_kind(entry) for entry in entries}) == 1


def _kind(entry: Any) -> tuple[Any, ...]:
    if isinstance(entry, Tensor):
        return Tensor, entry.dim(), entry.dtype
    if isinstance(entry, Mapping):
        return type(entry), frozenset(entry)
    if isinstance(entry, (list, tuple)):
        return type(entry), len(entry)
    return (type(entry),)
