"""Nested state as JSON and tensors, and back, exactly; no pickle, so no loaded file can run code.

What JSON has stands as it is. The rest is an object with the key ``"$"``, which names its type, as
listed in :data:`CODECS`. A type that is not on that list raises an error that names it, when saving
and when loading.
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
NUMBERS = "biufc"  # kinds of numpy's dtypes


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
    return _Encoder(tensors, where).encode(value), tensors


def decode(value: Any, tensors: Mapping[str, Tensor], path: Path) -> Any:
    """Return what :func:`encode` was given.

    Args:
        value: the JSON.
        tensors: by name.
        path: where it comes from, for messages.

    Raises:
        CheckpointRefused: a type is not on the list, a field is missing or of the wrong kind, or
            a tensor is missing.
    """
    return _Decoder(tensors, path).decode(value)


@dataclass(frozen=True, slots=True)
class _Encoder:
    """Encodes one value; the tensors in it are added to ``tensors``."""

    tensors: dict[str, Tensor]
    where: str
    depth: int = 0

    def encode(self, value: Any) -> Any:
        if self.depth > MAX_DEPTH:
            raise CannotEncode(
                f"{self.where} is nested more than {MAX_DEPTH} deep; does it hold itself?"
            )
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int and abs(value) < SAFE_INT:
            return value
        if kind is float and math.isfinite(value):
            return value
        if kind is list:
            return self.items(value)
        if kind is dict and all(type(key) is str for key in value) and TAG not in value:
            return {key: self.inner(entry, f"[{key!r}]") for key, entry in value.items()}
        tag = "tensor" if isinstance(value, Tensor) else TAGS.get(kind)
        dtype = value.dtype if kind.__module__ == "numpy" and hasattr(value, "dtype") else None
        if dtype is not None and dtype.kind in NUMBERS and dtype.isnative:
            tag = "ndarray" if hasattr(value, "__len__") else "numpy"
        if tag is not None:
            return {TAG: tag, **CODECS[tag].encode(self, value)}
        raise CannotEncode(
            f"{self.where}: expected numbers, texts, tensors and plain containers of these, got a "
            f"{kind.__module__}.{kind.__qualname__}, which has no safe form on disk; leave it out "
            "of the state_dict, or save what makes it again"
        )

    def inner(self, value: Any, at: str) -> Any:
        """Encode a part of the value."""
        return _Encoder(self.tensors, self.where + at, self.depth + 1).encode(value)

    def items(self, values: Any) -> list[Any]:
        return [self.inner(entry, f"[{i}]") for i, entry in enumerate(values)]

    def sorted_items(self, values: Any) -> list[Any]:
        return self.items(sorted(values, key=repr))

    def pairs(self, value: Mapping[Any, Any]) -> list[Any]:
        return [
            [self.inner(k, f": key {k!r}"), self.inner(v, f"[{k!r}]")] for k, v in value.items()
        ]

    def tensor(self, value: Tensor) -> str:
        """Put a tensor aside; return its name."""
        if value.layout is not torch.strided or value.is_quantized:
            raise CannotEncode(f"{self.where}: expected a dense tensor, got a {value.layout} one")
        name = f"value/{len(self.tensors)}"
        self.tensors[name] = getattr(value, "_local_tensor", value).detach()
        return name


@dataclass(frozen=True, slots=True)
class _Decoder:
    tensors: Mapping[str, Tensor]
    path: Path
    depth: int = 0

    def decode(self, value: Any) -> Any:
        if self.depth > MAX_DEPTH:
            raise CheckpointRefused(f"{self.path}: a value is nested more than {MAX_DEPTH} deep")
        if isinstance(value, list):
            return self.items(value)
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.inner(entry) for key, entry in value.items()}
        tag = value[TAG]
        codec = CODECS.get(tag) if isinstance(tag, str) else None
        if codec is None:
            raise CheckpointRefused(f"{self.path}: {str(tag)[:100]!r} is no type that we save")
        try:
            return codec.decode(self, value)
        except CheckpointRefused:
            raise
        except Exception as error:  # whatever a constructor makes of hostile arguments
            raise CheckpointRefused(f"{self.path}: a {tag} cannot be made: {error}") from None

    def inner(self, value: Any) -> Any:
        """Decode a part of the value."""
        return _Decoder(self.tensors, self.path, self.depth + 1).decode(value)

    def items(self, values: Any) -> list[Any]:
        if not isinstance(values, list):
            raise TypeError(f"expected a list of items, got a {type(values).__name__}")
        return [self.inner(entry) for entry in values]

    def tensor(self, name: Any) -> Tensor:
        if name not in self.tensors:
            raise CheckpointRefused(f"{self.path}: tensor {str(name)[:100]!r} is not there")
        return self.tensors[name]


@dataclass(frozen=True, slots=True)
class Codec:
    """How values of one type become the fields of a JSON object, and back."""

    kind: type | None
    encode: Callable[[_Encoder, Any], dict[str, Any]]
    decode: Callable[[_Decoder, dict[str, Any]], Any]


def _container(kind: type, listed: Callable[[_Encoder, Any], list[Any]], make: Any = None) -> Codec:
    return Codec(
        kind, lambda e, v: {"items": listed(e, v)}, lambda d, f: (make or kind)(d.items(f["items"]))
    )


def _record(kind: type) -> Codec:
    """A dataclass of ours, field by field, without fields that are of use in one process only."""
    fields = [f for f in dataclasses.fields(kind) if f.metadata.get("is_saved", True)]
    names = [f.name for f in fields]
    # Fields with a default came later: older checkpoints do not have them.
    needed = {f.name for f in fields if f.default is dataclasses.MISSING}

    def decoded(d: _Decoder, saved: dict[str, Any]) -> Any:
        found = saved["fields"]
        if not needed <= set(found) <= set(names):
            raise CheckpointRefused(f"{d.path}: the fields of {kind.__name__} are {list(found)}")
        return kind(**{name: d.inner(entry) for name, entry in found.items()})

    return Codec(
        kind,
        lambda e, v: {"fields": {n: e.inner(getattr(v, n), f"[{n!r}]") for n in names}},
        decoded,
    )


def _encode_array(e: _Encoder, value: Any) -> dict[str, Any]:
    raw = torch.empty(0, dtype=torch.uint8)
    if value.size:
        raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
    return {"name": e.tensor(raw), "dtype": value.dtype.name, "shape": list(value.shape)}


def _decode_array(d: _Decoder, fields: dict[str, Any]) -> Any:
    raw = d.tensor(fields["name"]).numpy().tobytes()
    return _numbers(raw, fields["dtype"]).reshape([int(n) for n in fields["shape"]]).copy()


def _numbers(raw: bytes, dtype: Any) -> Any:
    """Return an array of these bytes; numpy need not be installed where none was saved."""
    import numpy as np

    if not isinstance(dtype, str) or np.dtype(dtype).kind not in NUMBERS:
        raise ValueError(f"{str(dtype)[:40]!r} is no dtype of numbers")
    return np.frombuffer(raw, dtype=np.dtype(dtype))


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _from_bits(text: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name; nothing else that torch has is reached by it."""
    found = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{str(name)[:40]!r} is no dtype of this torch")
    return found


CODECS: dict[str, Codec] = {
    "int": Codec(int, lambda e, v: {"hex": hex(v)}, lambda d, f: int(f["hex"], 16)),
    "float": Codec(float, lambda e, v: {"bits": _bits(v)}, lambda d, f: _from_bits(f["bits"])),
    "complex": Codec(
        complex,
        lambda e, v: {"bits": [_bits(v.real), _bits(v.imag)]},
        lambda d, f: complex(*map(_from_bits, f["bits"])),
    ),
    "bytes": Codec(
        bytes, lambda e, v: {"base64": _to_base64(v)}, lambda d, f: _from_base64(f["base64"])
    ),
    "bytearray": Codec(
        bytearray,
        lambda e, v: {"base64": _to_base64(v)},
        lambda d, f: bytearray(_from_base64(f["base64"])),
    ),
    "tuple": _container(tuple, _Encoder.items),
    "Size": _container(torch.Size, _Encoder.items),
    "set": _container(set, _Encoder.sorted_items),
    "frozenset": _container(frozenset, _Encoder.sorted_items),
    "dict": _container(dict, _Encoder.pairs),
    "OrderedDict": _container(collections.OrderedDict, _Encoder.pairs),
    "Counter": _container(
        collections.Counter, _Encoder.pairs, lambda pairs: collections.Counter(dict(pairs))
    ),
    "deque": Codec(
        collections.deque,
        lambda e, v: {"items": e.items(v), "maxlen": v.maxlen},
        lambda d, f: collections.deque(d.items(f["items"]), maxlen=f["maxlen"]),
    ),
    "dtype": Codec(
        torch.dtype,
        lambda e, v: {"name": str(v).removeprefix("torch.")},
        lambda d, f: torch_dtype(f["name"]),
    ),
    "device": Codec(
        torch.device, lambda e, v: {"name": str(v)}, lambda d, f: torch.device(f["name"])
    ),
    "tensor": Codec(Tensor, lambda e, v: {"name": e.tensor(v)}, lambda d, f: d.tensor(f["name"])),
    "ndarray": Codec(None, _encode_array, _decode_array),
    "numpy": Codec(
        None,
        lambda e, v: {"dtype": v.dtype.name, "base64": _to_base64(v.tobytes())},
        lambda d, f: _numbers(_from_base64(f["base64"]), f["dtype"])[0],
    ),
    "RngState": _record(RngState),
    "EpochStart": _record(EpochStart),
    "DataPosition": _record(DataPosition),
}
"""The closed list of types, by their tag on disk."""

TAGS = {codec.kind: tag for tag, codec in CODECS.items()}
