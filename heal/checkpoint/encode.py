"""Nested state as JSON and tensors, and back, exactly; no pickle, so no loaded file can run code.

What JSON has stands as it is. The rest is an object with the key ``"$"``, which names its type, one
of :data:`CODECS`.
"""

import base64
import collections
import dataclasses
import math
import struct
from collections.abc import Callable, ItemsView, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heal.buffers import local_part
from heal.checkpoint.files import CannotEncode, CheckpointRefused
from heal.data.loader_pass import DataPosition, EpochStart
from heal.training_state import RngState

TAG = "$"
MAX_DEPTH = 64  # values in values; a state dict has about ten
SAFE_INT = 2**63  # whole numbers from here on are written as hexadecimal text
NUMBERS = "biufc"  # kinds of numpy's dtypes


def encode(value: Any, where: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Return a value as JSON, and the tensors that it mentions, by name.

    Raises:
        CannotEncode: names the first value of a type that is not in :data:`CODECS`, and where in
            ``where``, the name of the whole, it is.
    """
    tensors: dict[str, Tensor] = {}

    def encoded(value: Any, where: str, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise CannotEncode(
                f"{where} is nested more than {MAX_DEPTH} deep; does it hold itself?"
            )
        kind = type(value)
        if value is None or kind in (bool, str) or _is_plain_number(value):
            return value
        if kind is list:
            return [encoded(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
        if kind is dict and TAG not in value and all(type(key) is str for key in value):
            return {k: encoded(v, f"{where}[{k!r}]", depth + 1) for k, v in value.items()}
        tag = _tag_of(value)
        if tag is None:
            raise CannotEncode(
                f"{where}: expected numbers, texts, tensors and plain containers of these, got a "
                f"{kind.__module__}.{kind.__qualname__}, which has no safe form on disk; leave it "
                "out of the state_dict, or save what makes it again"
            )
        made: dict[str, Any] = {TAG: tag}
        for name, part in CODECS[tag].split(value).items():
            if isinstance(part, Tensor):
                if part.layout is not torch.strided or part.is_quantized:
                    raise CannotEncode(f"{where}: expected a dense tensor, got a {part.layout} one")
                made[name] = f"value/{len(tensors)}"
                tensors[made[name]] = local_part(part)
            elif isinstance(part, ItemsView):
                made[name] = [
                    [
                        encoded(k, f"{where}: key {k!r}", depth + 1),
                        encoded(v, f"{where}[{k!r}]", depth + 1),
                    ]
                    for k, v in part
                ]
            else:
                made[name] = encoded(part, where, depth)
        return made

    return encoded(value, where), tensors


def decode(value: Any, tensors: Mapping[str, Tensor], path: Path) -> Any:
    """Return what :func:`encode` was given, or raise CheckpointRefused.

    Errors name ``path``, where it comes from.
    """

    def decoded(value: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise CheckpointRefused(f"{path}: a value is nested more than {MAX_DEPTH} deep")
        if isinstance(value, list):
            return [decoded(entry, depth + 1) for entry in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: decoded(entry, depth + 1) for key, entry in value.items()}
        tag = value[TAG]
        codec = CODECS.get(tag) if isinstance(tag, str) else None
        if codec is None:
            raise CheckpointRefused(f"{path}: {str(tag)[:100]!r} is no type that we save")
        try:
            parts = {name: decoded(part, depth) for name, part in value.items() if name != TAG}
            if tag in HAS_TENSOR:
                if parts["name"] not in tensors:
                    name = str(parts["name"])[:100]
                    raise CheckpointRefused(f"{path}: tensor {name!r} is not there")
                parts["name"] = tensors[parts["name"]]
            return codec.join(**parts)
        except CheckpointRefused:
            raise
        except Exception as error:  # whatever a constructor makes of hostile arguments
            raise CheckpointRefused(f"{path}: a {tag} cannot be made: {error}") from None

    return decoded(value)


def _is_plain_number(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and abs(value) < SAFE_INT


def _tag_of(value: Any) -> str | None:
    if isinstance(value, Tensor):
        return "tensor"
    dtype = getattr(value, "dtype", None) if type(value).__module__ == "numpy" else None
    if dtype is not None and dtype.kind in NUMBERS and dtype.isnative:
        return "ndarray" if hasattr(value, "__len__") else "numpy"
    return TAGS.get(type(value))


class Codec(NamedTuple):
    """How values of one type become the fields of a JSON object, and back.

    Fields may be tensors, which are put aside, and any values that can be encoded themselves.
    """

    kind: type | None
    split: Callable[[Any], dict[str, Any]]
    join: Callable[..., Any]


def _sequence(kind: type, ordered: Callable[[Any], list[Any]] = list) -> Codec:
    return Codec(kind, lambda v: {"items": ordered(v)}, lambda items: kind(_list(items)))


def _mapping(kind: type) -> Codec:
    return Codec(kind, lambda v: {"items": v.items()}, lambda items: kind(dict(_list(items))))


def _list(items: Any) -> list[Any]:
    if type(items) is not list:
        raise TypeError(f"expected a list of items, got a {type(items).__name__}")
    return items


def _sorted(values: Any) -> list[Any]:
    return sorted(values, key=repr)


def _bytes(kind: type) -> Codec:
    return Codec(kind, lambda v: {"base64": _to_base64(v)}, lambda base64: kind(_raw(base64)))


def _record(kind: type) -> Codec:
    """A dataclass of ours, field by field, without fields that are of use in one process only."""
    fields = [f for f in dataclasses.fields(kind) if f.metadata.get("is_saved", True)]
    names = [f.name for f in fields]
    # Fields with a default came later: older checkpoints do not have them.
    needed = {f.name for f in fields if f.default is dataclasses.MISSING}

    def join(fields: dict[str, Any]) -> Any:
        if not needed <= set(fields) <= set(names):
            raise ValueError(f"the fields of {kind.__name__} are {list(fields)}")
        return kind(**fields)

    return Codec(kind, lambda v: {"fields": {n: getattr(v, n) for n in names}}, join)


def _split_array(value: Any) -> dict[str, Any]:
    raw = torch.empty(0, dtype=torch.uint8)
    if value.size:
        raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
    return {"name": raw, "dtype": value.dtype.name, "shape": list(value.shape)}


def _join_array(name: Tensor, dtype: Any, shape: list[int]) -> Any:
    return _numbers(name.numpy().tobytes(), dtype).reshape([int(n) for n in shape]).copy()


def _numbers(raw: bytes, dtype: Any) -> Any:
    """Return an array of these bytes; numpy need not be installed where none was saved."""
    import numpy as np

    if not isinstance(dtype, str) or np.dtype(dtype).kind not in NUMBERS:
        raise ValueError(f"{str(dtype)[:40]!r} is no dtype of numbers")
    return np.frombuffer(raw, dtype=np.dtype(dtype))


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _raw(text: str) -> bytes:
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
    "int": Codec(int, lambda v: {"hex": hex(v)}, lambda hex: int(hex, 16)),
    "float": Codec(float, lambda v: {"bits": _bits(v)}, lambda bits: _from_bits(bits)),
    "complex": Codec(
        complex,
        lambda v: {"bits": [_bits(v.real), _bits(v.imag)]},
        lambda bits: complex(*map(_from_bits, bits)),
    ),
    "bytes": _bytes(bytes),
    "bytearray": _bytes(bytearray),
    "tuple": _sequence(tuple),
    "Size": _sequence(torch.Size),
    "set": _sequence(set, _sorted),
    "frozenset": _sequence(frozenset, _sorted),
    "dict": _mapping(dict),
    "OrderedDict": _mapping(collections.OrderedDict),
    "Counter": _mapping(collections.Counter),
    "deque": Codec(
        collections.deque,
        lambda v: {"items": list(v), "maxlen": v.maxlen},
        lambda items, maxlen: collections.deque(_list(items), maxlen=maxlen),
    ),
    "dtype": Codec(torch.dtype, lambda v: {"name": str(v).removeprefix("torch.")}, torch_dtype),
    "device": Codec(torch.device, lambda v: {"name": str(v)}, lambda name: torch.device(name)),
    "tensor": Codec(Tensor, lambda v: {"name": v}, lambda name: name),
    "ndarray": Codec(None, _split_array, _join_array),
    "numpy": Codec(
        None,
        lambda v: {"dtype": v.dtype.name, "base64": _to_base64(v.tobytes())},
        lambda dtype, base64: _numbers(_raw(base64), dtype)[0],
    ),
    "RngState": _record(RngState),
    "EpochStart": _record(EpochStart),
    "DataPosition": _record(DataPosition),
}
"""The closed list of types, by their tag on disk."""

HAS_TENSOR = ("tensor", "ndarray")  # their field ``name`` is that of a tensor
TAGS = {codec.kind: tag for tag, codec in CODECS.items()}
