"""Every tensor of a batch, whatever kind of container it is in."""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def change_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with ``change`` applied to its tensors; containers stay what they are.

    Dicts, dataclasses, lists, tuples, named tuples and mappings like BatchEncoding; the batch that
    was given is not touched, for a loader may give it again. What is not understood is left as it
    is.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _change_mapping(value, {k: change_tensors(v, change) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        entries = [change_tensors(entry, change) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            entry = change_tensors(getattr(value, field.name), change)
            object.__setattr__(changed, field.name, entry)  # past frozen
        return changed
    return value


def _change_mapping(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    if isinstance(value, UserDict):
        changed: Any = copy.copy(value)  # a constructor may want other things: BatchEncoding
        changed.data = entries  # the copy shares its data with the original
        return changed
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)
        changed.update(entries)
        return changed
    return type(value)(entries)  # type: ignore[call-arg]
