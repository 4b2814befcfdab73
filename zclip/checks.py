"""Names precisely what is wrong with a list of tensors. Not on the step path.

Compiled backends check as they read, in nanoseconds; only when one of them rejects it is the list
walked here, in Python, to raise the error that names the index, what was expected and what it got.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_EXPECTED = "float32, bfloat16, float16 or float64"


Name = Callable[[int], str]
"""From an index in the list to what a user calls that element."""

PLACE: Name = "grads[{}]".format


def check_tensors(tensors: Sequence[object], name: Name = PLACE) -> None:
    """Raise if one of ``tensors`` cannot be measured.

    Raises:
        TypeError: an element is not a tensor, or is sparse, a DTensor, integer or complex.
        ValueError: an element has no memory (the meta device).
    """
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            what = f"{type(tensor).__name__} {tensor!r:.60}"
            raise TypeError(f"{name(i)}: expected a Tensor, got {what}")
        if type(tensor).__name__ == "DTensor":
            raise TypeError(f"{name(i)}: expected a plain Tensor, got a DTensor; pass .to_local()")
        if tensor.layout != torch.strided:
            raise TypeError(
                f"{name(i)}: expected a dense tensor, got {tensor.layout}; use .to_dense(), or "
                "build the embedding with sparse=False"
            )
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name(i)}: expected {_EXPECTED}, got {tensor.dtype}")
        if tensor.device.type == "meta":
            raise ValueError(f"{name(i)}: expected values, got a tensor on the meta device")


def check_one_device(tensors: Sequence[Tensor], name: Name = PLACE) -> None:
    """Raise ValueError if ``tensors`` do not share a device."""
    for i, tensor in enumerate(tensors):
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"{name(i)}: expected {tensors[0].device}, the device of {name(0)}, got "
                f"{tensor.device}; call once for each device"
            )


def check_writable(tensors: Sequence[Tensor], name: Name = PLACE) -> None:
    """Raise ValueError if an element of a tensor shares memory with another of the same tensor."""
    for i, tensor in enumerate(tensors):
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(
                f"{name(i)} of shape {tuple(tensor.shape)}: expected memory of its own, got "
                "elements that share memory (expand()?); pass a clone()"
            )


def check_dense(tensors: Sequence[Tensor], name: Name = PLACE) -> None:
    """Raise ValueError if the elements of a tensor do not fill one run of memory."""
    for i, tensor in enumerate(tensors):
        # A tensor made alike has the same strides only if there are no gaps to leave out.
        if tensor.numel() > 1 and torch.empty_like(tensor).stride() != tensor.stride():
            raise ValueError(
                f"{name(i)} of shape {tuple(tensor.shape)}: expected elements that fill one run of "
                f"memory, got the strides {tensor.stride()}; make it of a clone()"
            )


def check_limit(name: str, value: float | Tensor) -> float:
    """Return ``value`` as a float if it can bound a norm.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative or NaN.
    """
    number = as_number(name, value)
    if not number >= 0.0:
        raise ValueError(f"{name}: expected a number >= 0, got {number}")
    return number


def as_number(name: str, value: Any) -> float:
    """Return ``value`` as a float.

    Raises:
        TypeError: it is no number.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {value!r}") from None


def check_fraction(name: str, value: float) -> float:
    """Return ``value`` as a float if it can weigh the past.

    Raises:
        TypeError: it is no number.
        ValueError: it is not between 0 and 1.
    """
    number = as_number(name, value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name}: expected a number from 0 to 1, got {number}")
    return number


def check_count(name: str, value: int, least: int = 1) -> int:
    """Return ``value`` as an int if it can be the length of something.

    Raises:
        TypeError: it is no number.
        ValueError: it is not a whole number >= ``least``.
    """
    number = as_number(name, value)
    if not number.is_integer() or number < least:
        raise ValueError(f"{name}: expected a whole number >= {least}, got {value}")
    return int(number)
