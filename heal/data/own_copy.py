"""A batch that its user may change: new containers, the same tensors."""

import copy
import dataclasses
from collections import UserDict
from typing import Any


def own_copy(batch: Any) -> Any:
    """Return the batch with dicts, lists and dataclasses of its own, at every depth.

    A train step that pops the labels, and then fails, must find them when it is tried again. What
    cannot be copied is returned as it is: it may fail when tried again, but not before.
    """
    try:
        return _copied(batch)
    except Exception:  # containers of other libraries
        return batch


def _copied(value: Any) -> Any:
    if isinstance(value, (dict, UserDict)):
        mapping: Any = copy.copy(value)  # for constructors want other things: BatchEncoding
        for key, entry in value.items():
            own = _copied(entry)
            if own is not entry:
                mapping[key] = own
        return mapping
    if isinstance(value, list):
        entries: Any = copy.copy(value)
        entries[:] = [_copied(entry) for entry in value]
        return entries
    if isinstance(value, tuple):
        return _copied_tuple(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        instance = copy.copy(value)
        for field in dataclasses.fields(value):
            # Past frozen: what is in a frozen one can be changed all the same.
            object.__setattr__(instance, field.name, _copied(getattr(value, field.name)))
        return instance
    return value


def _copied_tuple(value: tuple[Any, ...]) -> Any:
    entries = [_copied(entry) for entry in value]
    if all(own is entry for own, entry in zip(entries, value, strict=True)):
        return value
    return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
