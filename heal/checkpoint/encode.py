"""Nested state as JSON and tensors, and back, exactly; no pickle, so that nothing in it can act.

What JSON has stands as it is. The rest is an object with the key ``"$"``, which names its type:
the closed list of :data:`DECODERS`. A type that is not on it is refused by name, when saving and
when loading.
"""

import base64
import collections
import dataclasses
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heal.checkpoint.files import CannotEncode, CheckpointRefused
from heal.data.loader_pass import EpochStart
from heal.data.stream import DataPosition
from heal.training_state import RngState

TAG = "$"
MAX_DEPTH = 64  # values in values; a state dict has about ten
SAFE_INT = 2**63  # whole numbers from here on are written as hexadecimal text

RECORDS: dict[str, type] = {
    "RngState": RngState,
    "EpochStart": EpochStart,
    "DataPosition": DataPosition,
}
"""Our own records: saved and made again field by field."""


def encode(value: Any, where: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Return a value as JSON, and the tensors that it mentions, by name.

    Args:
        value: numbers, texts, bytes, None, tensors, numpy arrays, torch dtypes and devices, in
            dicts, lists, tuples, sets, deques and counters.
        where: what the value is, for messages.

    Raises:
        CannotEncode: names the first value of another type, and where it is.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(value, where, tensors, 0), tensors


def _encode(value: Any, where: str, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CannotEncode(f"{where} is nested more than {MAX_DEPTH} deep; does it hold itself?")
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < SAFE_INT else {TAG: "int", "hex": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "bits": _bits(value)}

    def inner(entry: Any, at: Any) -> Any:
        return _encode(
            entry, f"{where}[{at!r}]" if kind is not list else f"{where}[{at}]", tensors, depth + 1
        )

    def all_of(entries: Any) -> list[Any]:
        return [inner(entry, i) for i, entry in enumerate(entries)]

    if kind is list:
        return all_of(value)
    if kind is dict and all(type(key) is str for key in value) and TAG not in value:
        return {key: inner(entry, key) for key, entry in value.items()}
    if isinstance(value, Mapping) and kind in _MAPPINGS:
        pairs = [
            [_encode(k, f"{where}: key {k!r}", tensors, depth + 1), inner(v, k)]
            for k, v in value.items()
        ]
        return {TAG: _MAPPINGS[kind], "items": pairs}
    if kind in _SEQUENCES:
        return {TAG: _SEQUENCES[kind], "items": all_of(value)}
    if kind is collections.deque:
        return {TAG: "deque", "items": all_of(value), "maxlen": value.maxlen}
    if kind in (set, frozenset):
        return {TAG: kind.__name__, "items": all_of(sorted(value, key=repr))}
    if kind in (bytes, bytearray):
        return {TAG: kind.__name__, "base64": base64.b64encode(value).decode()}
    if kind is complex:
        return {TAG: "complex", "bits": [_bits(value.real), _bits(value.imag)]}
    if kind is torch.dtype:
        return {TAG: "dtype", "name": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {TAG: "device", "name": str(value)}
    if isinstance(value, Tensor):
        return _tensor(value, where, tensors)
    for name, record in RECORDS.items():
        if kind is record:
            fields = {f: inner(getattr(value, f), f) for f in _saved_fields(record)}
            return {TAG: name, "fields": fields}
    numpy = _encode_numpy(value, where, tensors)
    if numpy is not None:
        return numpy
    raise CannotEncode(
        f"{where}: expected numbers, texts, tensors and plain containers of these, got a "
        f"{kind.__module__}.{kind.__qualname__}, which has no safe form on disk; leave it out "
        "of the state_dict, or save what makes it again"
    )


def _saved_fields(record: type) -> list[str]:
    """All but those that mean something in their own process only."""
    return [f.name for f in dataclasses.fields(record) if f.metadata.get("is_saved", True)]


def _needed_fields(record: type) -> set[str]:
    """Those without a default. The others came later: older checkpoints do not have them."""
    found = dataclasses.fields(record)
    return {f.name for f in found if f.default is dataclasses.MISSING}


_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "OrderedDict",
    collections.Counter: "Counter",
}
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "Size"}


def _tensor(value: Tensor, where: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if value.layout is not torch.strided or value.is_quantized:
        raise CannotEncode(f"{where}: expected a dense tensor, got a {value.layout} one")
    name = f"value/{len(tensors)}"
    tensors[name] = getattr(value, "_local_tensor", value).detach()
    return {TAG: "tensor", "name": name}


def _encode_numpy(value: Any, where: str, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    """Numpy is looked at only where a value comes from it: it need not be installed."""
    if type(value).__module__ != "numpy":
        return None
    import numpy as np

    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.isnative:
        raw = (
            torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
            if value.size
            else (torch.empty(0, dtype=torch.uint8))
        )
        named = _tensor(raw, where, tensors)
        return {**named, TAG: "ndarray", "dtype": value.dtype.name, "shape": list(value.shape)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        raw_bytes = base64.b64encode(value.tobytes()).decode()
        return {TAG: "numpy", "dtype": value.dtype.name, "base64": raw_bytes}
    return None


def decode(value: Any, tensors: Mapping[str, Tensor], path: Path) -> Any:
    """Return what :func:`encode` was given.

    Args:
        value: the JSON.
        tensors: by name.
        path: where it comes from, for messages.

    Raises:
        CheckpointRefused: a type is not on the list, a field is missing or of the wrong kind, or
            a tensor is not there.
    """
    return _Decoder(tensors, path).decode(value, 0)


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        self.tensors = tensors
        self.path = path
        self.depth = 0

    def decode(self, value: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CheckpointRefused(f"{self.path}: a value is nested more than {MAX_DEPTH} deep")
        if isinstance(value, list):
            return [self.decode(entry, depth + 1) for entry in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.decode(entry, depth + 1) for key, entry in value.items()}
        tag = value[TAG]
        decoder = DECODERS.get(tag) if isinstance(tag, str) else None
        if decoder is None:
            raise CheckpointRefused(f"{self.path}: {str(tag)[:100]!r} is no type that we save")
        self.depth = depth + 1
        try:
            return decoder(self, value)
        except CheckpointRefused:
            raise
        except Exception as error:  # whatever a constructor thinks of hostile arguments
            raise CheckpointRefused(f"{self.path}: a {tag} cannot be made: {error}") from None

    def items(self, value: Mapping[str, Any]) -> list[Any]:
        depth, found = self.depth, value["items"]
        if not isinstance(found, list):
            raise CheckpointRefused(f"{self.path}: the items of a {value[TAG]} are no list")
        return [self.decode(entry, depth) for entry in found]

    def pairs(self, value: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        return [(_hashable(key), entry) for key, entry in self.items(value)]

    def tensor(self, value: Mapping[str, Any]) -> Tensor:
        name = value["name"]
        if name not in self.tensors:
            raise CheckpointRefused(f"{self.path}: tensor {str(name)[:100]!r} is not there")
        return self.tensors[name]

    def record(self, value: Mapping[str, Any]) -> Any:
        kind, depth, fields = RECORDS[value[TAG]], self.depth, value["fields"]
        if not _needed_fields(kind) <= set(fields) <= set(_saved_fields(kind)):
            raise CheckpointRefused(f"{self.path}: the fields of {value[TAG]} are {list(fields)}")
        return kind(**{name: self.decode(entry, depth) for name, entry in fields.items()})

    def ndarray(self, value: Mapping[str, Any]) -> Any:
        import numpy as np

        dtype = _numpy_dtype(value["dtype"])
        raw = self.tensor(value).numpy().tobytes()
        return np.frombuffer(raw, dtype=dtype).reshape([int(n) for n in value["shape"]]).copy()

    def numpy_scalar(self, value: Mapping[str, Any]) -> Any:
        import numpy as np

        raw = base64.b64decode(value["base64"], validate=True)
        return np.frombuffer(raw, dtype=_numpy_dtype(value["dtype"]), count=1)[0]


DECODERS: dict[str, Callable[[_Decoder, dict[str, Any]], Any]] = {
    "int": lambda d, v: int(v["hex"], 16),
    "float": lambda d, v: _from_bits(v["bits"]),
    "complex": lambda d, v: complex(*(_from_bits(bits) for bits in v["bits"])),
    "bytes": lambda d, v: base64.b64decode(v["base64"], validate=True),
    "bytearray": lambda d, v: bytearray(base64.b64decode(v["base64"], validate=True)),
    "tuple": lambda d, v: tuple(d.items(v)),
    "Size": lambda d, v: torch.Size(d.items(v)),
    "set": lambda d, v: set(map(_hashable, d.items(v))),
    "frozenset": lambda d, v: frozenset(map(_hashable, d.items(v))),
    "deque": lambda d, v: collections.deque(d.items(v), maxlen=v["maxlen"]),
    "dict": lambda d, v: dict(d.pairs(v)),
    "OrderedDict": lambda d, v: collections.OrderedDict(d.pairs(v)),
    "Counter": lambda d, v: collections.Counter(dict(d.pairs(v))),
    "dtype": lambda d, v: torch_dtype(v["name"]),
    "device": lambda d, v: torch.device(v["name"]),
    "tensor": _Decoder.tensor,
    "ndarray": _Decoder.ndarray,
    "numpy": _Decoder.numpy_scalar,
    **dict.fromkeys(RECORDS, _Decoder.record),
}


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name; nothing else that torch has is reached by it."""
    found = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{str(name)[:40]!r} is no dtype of this torch")
    return found


def _numpy_dtype(name: Any) -> Any:
    import numpy as np

    dtype = np.dtype(name) if isinstance(name, str) else None
    if dtype is None or dtype.kind not in "biufc":
        raise ValueError(f"{str(name)[:40]!r} is no dtype of numbers")
    return dtype


def _hashable(value: Any) -> Any:
    hash(value)
    return value


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _from_bits(text: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


# Which part of which whole a tensor is, under any of torch's ways to cut one into shards.


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box within a larger tensor."""

    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """Return where the part is in the whole."""
        return tuple(slice(b, b + n) for b, n in zip(self.start, self.shape, strict=True))

    def overlap(self, other: "Chunk") -> tuple[tuple[slice, ...], tuple[slice, ...], int] | None:
        """Return where both boxes meet, in coordinates of each, and how many elements that is."""
        mine, theirs, count = [], [], 1
        for begin, size, their_begin, their_size in zip(
            self.start, self.shape, other.start, other.shape, strict=True
        ):
            low, high = max(begin, their_begin), min(begin + size, their_begin + their_size)
            if high <= low:
                return None
            mine.append(slice(low - begin, high - begin))
            theirs.append(slice(low - their_begin, high - their_begin))
            count *= high - low
        return tuple(mine), tuple(theirs), count


def all_of(tensor: Tensor) -> Chunk:
    """Return the box that is the whole tensor."""
    return Chunk(tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))


def chunk_of(tensor: Any) -> Chunk | None:
    """Return which part of a DTensor this rank has; None for a tensor that is no part.

    Raises:
        NotImplementedError: it is cut in a way that no box describes.
    """
    if not hasattr(tensor, "_local_tensor") or not hasattr(tensor, "placements"):
        return None
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if all(isinstance(p, Replicate) for p in tensor.placements):
        return all_of(tensor)
    for placement in tensor.placements:
        if not isinstance(placement, (Replicate, Shard)):
            raise NotImplementedError(f"a tensor with placement {placement} is in no single place")
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local: Tensor = tensor._local_tensor
    if tuple(shape) != tuple(local.shape):
        raise NotImplementedError(
            f"a part of shape {tuple(local.shape)} lies where {tuple(shape)} was expected"
        )
    if local.numel() == 0:
        start = tuple(0 for _ in shape)
    return Chunk(tuple(tensor.shape), tuple(int(s) for s in start), tuple(local.shape))
