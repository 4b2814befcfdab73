"""The pointer table: where the chunks of a list of tensors lie, in device memory.

Triton kernels take no arrays, so addresses must be uploaded. A table is kept while a list has the
same addresses, sizes and dtypes, which is looked at on every call: an allocator hands the address
of a freed gradient to another of another size.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from zclip.checks import check_one_device, check_tensors

CHUNK = 16384
"""Elements per program, as kChunk in csrc/math/grad_stats.h."""

ALIGNMENT = 16
"""Bytes. Full chunks begin at a multiple of this; what lies before is a chunk of its own."""

MAX_BYTES = 64 << 20
"""Of device memory that tables may take together; those used last are kept. A step needs one table
per list of gradients, of 24 bytes for every 16,384 elements: 10 MB for 7 billion."""

_dtype_of = operator.attrgetter("dtype")


class Group(NamedTuple):
    """A run of chunks that one launch can serve."""

    dtype: torch.dtype
    first_chunk: int
    num_chunks: int


class Upload:
    """Columns of int64 on the device, and the tensors they were made for. Immutable."""

    def __init__(self, tensors: Sequence[Tensor], parts: list[Tensor]):
        self.device = tensors[0].device
        self.numels = list(map(Tensor.numel, tensors))
        self.dtypes = list(map(_dtype_of, tensors))
        parts = [_padded(part) for part in parts]
        self._memory = _upload(torch.cat(parts), self.device)
        self.columns = self._memory.split([len(part) for part in parts])
        self.nbytes = self._memory.nbytes
        self._stream = _current_stream(self.device)
        self._uploaded = self._stream.record_event() if self._stream else None
        self.is_captured = False

    def join_stream(self) -> None:
        """Let the current stream wait, on the device, for an upload that another one made."""
        stream = _current_stream(self.device)
        if stream is None:
            return
        if torch.cuda.is_current_stream_capturing():
            self.is_captured = True  # the graph holds these addresses: never to be freed
        elif stream != self._stream and self._uploaded is not None:
            stream.wait_event(self._uploaded)
            self._memory.record_stream(stream)


class Table(Upload):
    """Where the chunks of a list of tensors lie."""

    def __init__(self, tensors: Sequence[Tensor]):
        dtypes = list(map(_dtype_of, tensors))
        # Tensors of one dtype stand together, so that one launch serves them.
        order = sorted(range(len(tensors)), key=lambda i: str(dtypes[i]))
        columns, counts = _cut_into_chunks([tensors[i] for i in order])
        tensor_chunks = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        owners = torch.tensor(order)
        owner_of_chunk = owners.repeat_interleave(counts)
        super().__init__(tensors, [*columns, owner_of_chunk, tensor_chunks, owners])
        self.has_float64 = torch.float64 in dtypes
        self.num_chunks = len(owner_of_chunk)
        self.groups = _group([dtypes[i] for i in order], tensor_chunks.tolist())
        # [num_chunks] three times, [num_tensors + 1], [num_tensors]
        self.addresses, self.lengths, self.tensors, self.tensor_chunks, self.owners = self.columns


AnyUpload = TypeVar("AnyUpload", bound=Upload)

_tables: OrderedDict[Hashable, Any] = OrderedDict()
_captured: list[Upload] = []


def table_of(tensors: Sequence[Tensor]) -> Table:
    """Return the table of dense tensors, built now unless an earlier one still fits.

    Raises:
        RuntimeError: a CUDA graph is being captured, and there is no table yet.
        TypeError, ValueError: a tensor cannot be served; see :mod:`zclip.checks`.
    """
    return kept(tuple(map(Tensor.data_ptr, tensors)), tensors, Table)


def kept(
    key: Hashable, tensors: Sequence[Tensor], make: Callable[[Sequence[Tensor]], AnyUpload]
) -> AnyUpload:
    """Return what ``make(tensors)`` once returned for this key, if it still fits them."""
    numels = list(map(Tensor.numel, tensors))
    dtypes = list(map(_dtype_of, tensors))
    table: AnyUpload | None = _tables.get(key)
    if table is None or table.numels != numels or table.dtypes != dtypes:
        check_tensors(tensors)
        check_one_device(tensors)
        refuse_during_capture(tensors[0].device)
        table = _tables[key] = make(tensors)
        _tables.move_to_end(key)
        _forget_oldest()
    _tables.move_to_end(key)
    was_captured = table.is_captured
    table.join_stream()
    if table.is_captured and not was_captured:
        _captured.append(table)
    return table


def _forget_oldest() -> None:
    """Drop the tables that were not used for longest, until the others fit; never the newest."""
    total = sum(table.nbytes for table in _tables.values())
    while total > MAX_BYTES and len(_tables) > 1:
        total -= _tables.popitem(last=False)[1].nbytes


def forget_tables() -> None:
    """Drop every table that no CUDA graph was captured with."""
    _tables.clear()


def _cut_into_chunks(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return address and length of every chunk, and the number of chunks of each tensor."""
    address = torch.tensor([t.data_ptr() for t in tensors])
    numel = torch.tensor([t.numel() for t in tensors])
    itemsize = torch.tensor([t.element_size() for t in tensors])
    head = torch.minimum(-address % ALIGNMENT // itemsize, numel)
    has_head = (head > 0).long()
    counts = has_head + (numel - head + CHUNK - 1) // CHUNK

    first = counts.cumsum(0) - counts
    place = torch.arange(int(counts.sum())) - first.repeat_interleave(counts)
    head, has_head, numel = (x.repeat_interleave(counts) for x in (head, has_head, numel))
    in_head = place < has_head
    begin = torch.where(in_head, 0, head + (place - has_head) * CHUNK)
    length = torch.where(in_head, head, (numel - begin).clamp(max=CHUNK))
    start = address.repeat_interleave(counts) + begin * itemsize.repeat_interleave(counts)
    return [start, length], counts


def _padded(part: Tensor) -> Tensor:
    """An odd number of int64 would misalign what follows, for which Triton compiles again."""
    return torch.nn.functional.pad(part, (0, len(part) % 2))


def _group(dtypes: list[torch.dtype], tensor_chunks: list[int]) -> list[Group]:
    """Return the runs of equal dtype that have any chunk."""
    groups: list[Group] = []
    for dtype in dict.fromkeys(dtypes):
        begin = tensor_chunks[dtypes.index(dtype)]
        end = tensor_chunks[len(dtypes) - dtypes[::-1].index(dtype)]
        if end > begin:
            groups.append(Group(dtype, begin, end - begin))
    return groups


def _upload(host: Tensor, device: torch.device) -> Tensor:
    """A copy from pageable memory would wait for the stream; one from pinned memory does not."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def refuse_during_capture(device: torch.device) -> None:
    """Raise RuntimeError if nothing may be uploaded now."""
    if _has_graphs(device) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured, but zclip has not seen these gradients at these "
            "addresses before, and their addresses cannot be uploaded during a capture. Run one "
            "warm-up step outside the capture, and keep its gradients: "
            "zero_grad(set_to_none=False)"
        )
