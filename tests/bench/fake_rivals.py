"""Stand-ins for packages that run on GPUs only: the functions that we call, in plain torch."""

import sys
from types import ModuleType

import torch


def l2norm(overflow, lists, per_tensor):
    assert not per_tensor
    return torch.stack([t.norm() for t in lists[0]]).norm(), None


def scale(overflow, lists, factor):
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


def apply(function, overflow, lists, *arguments):
    assert overflow.dtype == torch.int
    return function(overflow, lists, *arguments)


def clip_by_norm(tensors, limit):
    norm = torch.stack([t.norm() for t in tensors]).norm()
    if limit < norm:
        torch._foreach_mul_(tensors, limit / (norm + 1e-6))
    return norm


class CheckOverflow:
    def has_overflow_serial(self, params):
        return any(not p.grad.isfinite().all() for p in params)


FAKES = {
    "apex.contrib.clip_grad": {"clip_grad_norm_": torch.nn.utils.clip_grad_norm_},
    "transformer_engine.pytorch.optimizers": {
        "multi_tensor_applier": apply,
        "multi_tensor_l2norm": l2norm,
        "multi_tensor_scale": scale,
    },
    "deepspeed.runtime.utils": {
        "clip_tensors_by_global_norm": clip_by_norm,
        "CheckOverflow": CheckOverflow,
    },
}


def install(monkeypatch, **more):
    """Put the stand-ins where imports find them."""
    for path, functions in FAKES.items():
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            module = ModuleType(name)
            if name == path:
                vars(module).update(functions)
                if name.startswith("transformer_engine"):
                    vars(module).update(more)
            monkeypatch.setitem(sys.modules, name, module)
