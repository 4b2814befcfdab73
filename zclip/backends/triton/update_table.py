"""Where parameters, gradients and optimizer state lie: one table for a whole update."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from zclip.backends.triton.table import ALIGNMENT, CHUNK, Upload, kept
from zclip.backends.triton.tensor_list import layout_of
from zclip.layout import ADAM, AMSGRAD, LION, NESTEROV, SGD

ADAM_KIND, AMSGRAD_KIND, SGD_KIND, MOMENTUM_KIND, NESTEROV_KIND, LION_KIND = range(6)
"""Which loop a parameter needs; as Loop in csrc/cpu/update_block.h."""

_NOWHERE = 0


class UpdateGroup(NamedTuple):
    """A run of chunks that one launch can serve."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    kind: int
    group: int
    """Of the parameters, whose settings the launch takes."""
    first_chunk: int
    num_chunks: int


class Lists(NamedTuple):
    """The lists of one call, as the operator takes them."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    firsts: Sequence[Tensor]
    seconds: Sequence[Tensor]
    maxima: Sequence[Tensor]
    steps: Sequence[Tensor]


class UpdateTable(Upload):
    """Addresses of everything, by tensor, and the chunks of the parameters that have a gradient."""

    def __init__(self, lists: Lists, kinds: list[int], groups: list[int]):
        params, grads = lists.params, lists.grads
        served = [(p.dtype, g.dtype) for p, g in zip(params, grads, strict=True)]
        keys = [(str(d), k, g) for d, k, g in zip(served, kinds, groups, strict=True)]
        # Tensors of one kind stand together, so that one launch serves them.
        order = sorted(range(len(params)), key=lambda i: keys[i])
        chunks_of = [-(-grads[i].numel() // CHUNK) for i in order]
        ends = [0, *accumulate(chunks_of)]
        counts = torch.tensor(chunks_of, dtype=torch.int64)
        tensor_chunks = torch.tensor(ends, dtype=torch.int64)
        owners = torch.tensor(order, dtype=torch.int64)
        chunk_tensor = owners.repeat_interleave(counts)
        place = torch.arange(len(chunk_tensor)) - tensor_chunks[:-1].repeat_interleave(counts)
        numels = torch.tensor([p.numel() for p in params], dtype=torch.int64)
        lengths = (numels[chunk_tensor] - place * CHUNK).clamp(max=CHUNK)
        addresses = [_addresses(entries, len(params)) for entries in lists]
        aligned = torch.stack([column % ALIGNMENT == 0 for column in addresses[:5]]).all(0)
        lengths = torch.where(aligned[chunk_tensor], lengths, -lengths)
        takes_part = [
            int(g.numel() > 0 or p.numel() == 0) for p, g in zip(params, grads, strict=True)
        ]
        is_double = [int(s.dtype == torch.float64) for s in lists.steps] or [0] * len(params)
        parts = [
            *addresses,
            torch.tensor(takes_part),
            torch.tensor(is_double),
            torch.tensor([int(p.dtype == torch.float64) for p in params]),
            tensor_chunks,
            owners,
            chunk_tensor,
            place * CHUNK,
            lengths,
        ]
        super().__init__([t for entries in lists for t in entries], parts)
        # Of tensors, but for the last three and tensor_chunks [num_tensors + 1].
        (
            self.params,
            self.grads,
            self.firsts,
            self.seconds,
            self.maxima,
            self.steps,
            self.takes_part,
            self.is_double,
            self.is_wide,
            self.tensor_chunks,
            self.owners,
            self.tensors,
            self.begins,
            self.lengths,
        ) = self.columns
        self.num_chunks = len(chunk_tensor)
        self.groups: list[UpdateGroup] = []
        in_order = [keys[i] for i in order]
        for key in dict.fromkeys(in_order):
            begin, end = in_order.index(key), len(in_order) - in_order[::-1].index(key)
            first, last = ends[begin], ends[end]
            if last > first:
                i = order[begin]
                self.groups.append(
                    UpdateGroup(*served[i], kinds[i], groups[i], first, last - first)
                )


def _addresses(entries: Sequence[Tensor], count: int) -> Tensor:
    found = [t.data_ptr() if t.numel() else _NOWHERE for t in entries]
    return torch.tensor(found or [_NOWHERE] * count, dtype=torch.int64)


def kind_of(algorithm: int, flags: int, has_first: bool) -> int:
    """Return which loop a parameter needs.

    Raises:
        RuntimeError: there is no such algorithm.
    """
    if algorithm == ADAM:
        return AMSGRAD_KIND if flags & AMSGRAD else ADAM_KIND
    if algorithm == LION:
        return LION_KIND
    if algorithm != SGD:
        raise RuntimeError(
            f"zclip::optim_update_: algorithm: expected {ADAM}, {SGD} or {LION}, got {algorithm}"
        )
    if not has_first:
        return SGD_KIND
    return NESTEROV_KIND if flags & NESTEROV else MOMENTUM_KIND


def check_lists(lists: Lists) -> None:
    """Raise RuntimeError unless state and gradients lie in memory as their parameters do."""
    count = len(lists.params)
    for name, entries in lists._asdict().items():
        if len(entries) != count and (entries or name == "grads"):
            raise RuntimeError(
                f"zclip::optim_update_: {name}: expected an entry for each of {count} params"
                f"{'' if name == 'grads' else ', or none'}, got {len(entries)}"
            )
    for i, param in enumerate(lists.params):
        if not layout_of(param)[0]:
            raise RuntimeError(
                f"zclip::optim_update_: params[{i}]: expected a dense tensor, got one that does "
                "not fill one run of memory"
            )
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        for name, entries in list(lists._asdict().items())[1:5]:
            entry = entries[i] if entries else None
            if entry is None or entry.numel() == 0:
                continue
            dtype_fits = (
                (entry.dtype == torch.float64) == (param.dtype == torch.float64)
                if name == "grads"
                else entry.dtype == wide
            )
            if not dtype_fits or entry.numel() != param.numel():
                raise RuntimeError(
                    f"zclip::optim_update_: {name}[{i}]: expected the {param.numel()} elements "
                    f"of {param.dtype} of params[{i}], got {entry.numel()} of {entry.dtype}"
                )
            if entry.stride() != param.stride() and param.numel() > 1:
                raise RuntimeError(
                    f"zclip::optim_update_: {name}[{i}]: expected the strides of params[{i}], "
                    f"{param.stride()}, got {entry.stride()}"
                )


def update_table_of(
    lists: Lists, algorithm: int, sizes: Sequence[int], flags: Sequence[int]
) -> UpdateTable:
    """Return the table of an update, built now unless an earlier one still fits."""
    check_lists(lists)
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    has_first = [bool(lists.firsts) and lists.firsts[i].numel() > 0 for i in range(len(groups))]
    kinds = [kind_of(algorithm, flags[g], h) for g, h in zip(groups, has_first, strict=True)]
    tensors = [t for entries in lists for t in entries]
    key = ("update", *map(Tensor.data_ptr, tensors), *kinds, *groups)
    return kept(key, tensors, lambda _: UpdateTable(lists, kinds, groups))
