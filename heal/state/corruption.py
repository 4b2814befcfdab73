"""A look at the whole state for NaN and Inf, when something says that there may be some.

Corrupt weights show first as something else: a NaN loss, an exception where a model samples from
its output, an index out of range. Skipping such a batch, or lowering the learning rate, cures
nothing. Unlike the checks in between steps this waits for the device.
"""

from typing import Any

import torch

import zclip
from heal.causes import Cause
from heal.state.distinct import Key, local_part
from heal.state.measured import MEASURED
from heal.state.training_state import TrainingState
from zclip.layout import NAN


@torch.no_grad()
def find_corruption(state: TrainingState) -> dict[str, Any] | None:
    """Return where a state holds NaN or Inf that must not be there; None if it holds none.

    Of several the one that explains the others comes first: weights, then buffers, then moments.

    Returns:
        ``cause``, the name of the first ``tensor``, how many ``tensors`` and how many ``elements``
        of the first are bad.
    """
    strict = {("buffer", name) for name in state.buffers.statistics()}
    lenient = state.without_nan()
    kinds: dict[Key, int] = {}
    tensors = {}
    for key, tensor in state.tensors().items():
        part = local_part(tensor)
        if part.dtype not in MEASURED or not part.numel():
            continue
        if key[0] in ("parameter", "state") or key in strict or key in lenient:
            tensors[key] = part
            kinds[key] = ("parameter", "buffer", "state").index(str(key[0]))
    if not tensors:
        return None
    rows = zclip.grad_stats(list(tensors.values()))[:, NAN:].tolist()
    bad: list[tuple[int, Key, int]] = []
    for (key, tensor), (num_nan, num_inf) in zip(tensors.items(), rows, strict=True):
        count = num_nan if key in lenient else num_nan + num_inf
        if count and not (key in lenient and bool(lenient[key].to(tensor.device))):
            bad.append((kinds[key], key, int(count)))
    if not bad:
        return None
    kind, key, count = min(bad, key=lambda entry: entry[0])
    is_state = key[0] == "state"
    cause = Cause.OPTIMIZER_CORRUPTION if is_state else Cause.WEIGHT_CORRUPTION
    return {
        "cause": cause.value,
        "tensor": _shown(state, key),
        "tensors": sum(entry[0] == kind for entry in bad),
        "elements": count,
    }


def _shown(state: TrainingState, key: Key) -> str:
    if key[0] == "state":
        groups = state.optimizers[int(key[1])].param_groups
        param = [p for group in groups for p in group["params"]][int(key[2])]
        names = (name for name, p in state.model.named_parameters() if p is param)
        return f"{key[3]} of {next(names, f'parameter {key[2]}')}"
    return state.name_of(key).removeprefix("parameter ")
