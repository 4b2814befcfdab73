"""Every implementation of the operators that this machine can run, by name.

Each value has the same functions as ``zclip.reference``, and for every rule two more, called as its
reference is: ``zclip_(state, stats, *settings)`` and ``clip_by_zclip_(grads, state, *settings)``. A
new backend is one new entry.
"""

import functools
import os
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.simt import build, device
from zclip import reference
from zclip.backends import OF_HOST_MEMORY, OPS, answering, native, triton


def _with_rules(functions: dict) -> SimpleNamespace:
    """Add the two functions of every rule."""

    def call(name, number, takes_loss, first, second, *rest):
        loss, settings = (rest[0], rest[1:]) if takes_loss else (None, rest)
        return functions[name](first, second, number, settings, loss)

    rules = {
        f"{prefix}{rule.name}_": functools.partial(call, op, number, rule.takes_loss)
        for number, rule in enumerate(reference.RULES)
        for prefix, op in (("", "rule_"), ("clip_by_", "clip_by_"))
    }
    return SimpleNamespace(**{**functions, **rules})


def _native(path: str) -> SimpleNamespace:
    """The compiled operators, forced onto one of their CPU paths."""

    def call(name, *args):
        before = os.environ.get("ZCLIP_CPU")
        os.environ["ZCLIP_CPU"] = path
        try:
            return getattr(torch.ops.zclip, name)(*args)
        finally:
            os.environ.pop("ZCLIP_CPU")
            if before is not None:
                os.environ["ZCLIP_CPU"] = before

    return _with_rules({name: functools.partial(call, name) for name in OPS})


def _triton() -> SimpleNamespace:
    """The Triton kernels on CPU tensors, run by Triton's interpreter.

    An operator that has none is the reference's, as it would be for a tensor on a GPU.
    """

    def call(name, *args):
        return triton.implementation_of(name, "CPU")(*args)

    ours = {name: functools.partial(call, name) for name in triton.MODULE_OF}
    return _with_rules({name: ours.get(name, getattr(reference, name)) for name in OPS})


CPU_PATHS = {path: _native(path) for path in ("portable", "avx2", "auto")}
"""Where there is AVX-512, "auto" is a path of its own to the operators that hash."""

BACKENDS = {"reference": _with_rules(vars(reference))}
if native.is_loaded():
    BACKENDS["native-portable"] = CPU_PATHS["portable"]
    BACKENDS["native-avx2"] = CPU_PATHS["avx2"]
if triton.problem() is None and os.environ.get("TRITON_INTERPRET") == "1":
    BACKENDS["triton-interpret"] = _triton()


def steps_for(backend, count: int, interpreted: int = 3) -> int:
    """How many steps a test of a whole run takes: the interpreter is a thousand times slower."""
    return min(count, interpreted) if backend is BACKENDS.get("triton-interpret") else count


if build.CAN_RUN:
    # The CUDA kernels, executed on the CPU. What they leave out, the reference answers.
    for order in ("forward", "random"):  # reverse order: tests/simt/test_kernels.py
        BACKENDS[f"simt-{order}"] = _with_rules({**vars(reference), **vars(device.backend(order))})


def _cuda(name, *args):
    """Run an operator on the GPU, on copies of the arguments, and bring back what it wrote."""
    moved = tree_map_only(torch.Tensor, lambda t: t.cuda(), list(args))
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = getattr(torch.ops.zclip, name)(*moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for here, there in zip(tree_leaves(list(args)), tree_leaves(moved), strict=True):
        if isinstance(here, torch.Tensor) and here.numel():
            here.copy_(there)
    return tree_map_only(torch.Tensor, lambda t: t.cpu(), result)


if torch.cuda.is_available() and answering("grad_stats", "cuda") != "reference":
    on_device = [name for name in OPS if name not in OF_HOST_MEMORY]
    served = {name: functools.partial(_cuda, name) for name in on_device}
    BACKENDS["cuda"] = _with_rules({**vars(reference), **served})
