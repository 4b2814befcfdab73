"""Which length the fields of a batch agree on, as that of its samples.

The first tensor need not tell: it may have time for its first axis, or weights of classes. A wrong
cut would train on something else without a word, so that without a majority there is no cut.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from heal.data.batch_fields import CannotSplit, is_array, rows


def agreed_length(fields: Sequence[Any]) -> int | None:
    """Return the length that more than half of the fields have; None if no field is a tensor.

    A list that holds tensors may mean its own length or theirs; texts are heard only where they
    agree. Empty tensors and those of one number say nothing, unless there are no others.

    Args:
        fields: tensors, arrays and lists.

    Raises:
        CannotSplit: no length has a majority; names them.
    """
    tensors = [v for v in fields if isinstance(v, Tensor) and v.dim() > 0]
    if not tensors:
        return None
    telling = [t for t in tensors if t.numel() > 1 and not _serves_all_samples(t, tensors)]
    said = [{len(t)} for t in telling or tensors]
    candidates = set().union(*said)
    said += [{len(v)} for v in fields if is_array(v)]
    for entries in (v for v in fields if isinstance(v, (list, tuple))):
        lengths = rows(entries)
        if lengths or len(entries) in candidates:
            said.append({len(entries), *lengths})
    agreed = [n for n in candidates if 2 * sum(n in meant for meant in said) > len(said)]
    if len(agreed) == 1:
        return agreed[0]
    raise CannotSplit(
        f"tensors are of the lengths {', '.join(map(str, sorted(set().union(*said))))} and it is "
        "not clear which is the number of samples; wanted samples along the first axis of most "
        "tensors, as collating with batch_first makes it"
    )


def _serves_all_samples(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Tell whether a tensor is made for inner axes of others, as masks [T, T] or [1, T] are."""
    if tensor.is_nested or tensor.dim() < 2:
        return False
    is_square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]
    if not is_square and len(tensor) > 1:
        return False
    longer = [t for t in others if not t.is_nested and len(t) not in (1, len(tensor))]
    inner = {size for t in longer for size in t.shape[1:]}
    return inner.issuperset(tensor.shape[1:])
