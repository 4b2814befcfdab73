"""CUDA tensors on a machine with no CUDA: devices, dtypes and shapes exist, values do not.

Whoever asks for a value, or copies in a way that would make the host wait, gets :class:`HostWait`.
"""

import ctypes
import functools
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves

ROOT = Path(__file__).parent.parent


class HostWait(RuntimeError):
    """Something on the step path would have waited for the device."""


WAITS = (HostWait, DataDependentOutputException, DynamicOutputShapeException)
"""What a wait looks like, seen by our guard or by torch's fake tensors."""

# Ops that read values without saying so in their tags.
READS = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::equal",
    "aten::is_nonzero",
    "aten::allclose",
    "aten::nonzero",
    "aten::masked_select",
}
COPIES = {"aten::copy_", "aten::_to_copy"}
# Kernels of torch's that have no fake; they write in place and return nothing.
NO_FAKE = {"aten::_fused_sgd_", "aten::_fused_adagrad_"}


class NoWait(TorchDispatchMode):
    """Raises on any op that would make the host wait for a tensor that is not on the CPU."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        self.ops.append(name)
        if self._touches_device(args, kwargs) and self._reads(func, name):
            raise HostWait(f"{name} reads a value")
        if name in NO_FAKE:
            return None
        result = func(*args, **kwargs)
        if name in COPIES:
            self._check_copy(name, args, kwargs, result)
        return result

    @staticmethod
    def _touches_device(args, kwargs):
        leaves = arg_tree_leaves(*args, **kwargs)
        return any(isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in leaves)

    @staticmethod
    def _reads(func, name):
        tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        return name in READS or any(tag in func.tags for tag in tags)

    @staticmethod
    def _check_copy(name, args, kwargs, result):
        source, target = (args[1], args[0]) if name == "aten::copy_" else (args[0], result)
        default = args[2] if name == "aten::copy_" and len(args) > 2 else False
        crosses = source.device.type != target.device.type
        if crosses and not kwargs.get("non_blocking", default):
            raise HostWait(f"{name} from {source.device} to {target.device} blocks")


@functools.cache
def _install_guard():
    """Build and load the device guard, unless torch has a real one. It stays for good.

    Autograd looks for devices once, at the first backward pass of a process, and starts a thread
    for each; after that no forked child can train. So it looks before there is one to be found.
    """
    if torch.version.cuda:
        return
    torch.ones((), requires_grad=True).backward()
    built = ROOT / "build" / "cuda_guard.so"
    source = Path(__file__).with_name("cuda_guard.cpp")
    if not built.exists() or built.stat().st_mtime < source.stat().st_mtime:
        built.parent.mkdir(exist_ok=True)
        includes = [f"-I{path}" for path in cpp_extension.include_paths()]
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10"]
        temporary = built.with_suffix(f".{os.getpid()}")  # workers may race
        command = ["g++", "-shared", "-fPIC", "-std=c++20", "-O0", *includes, str(source)]
        subprocess.run(
            [*command, *libraries, "-o", str(temporary)], check=True, capture_output=True
        )
        temporary.replace(built)
    ctypes.CDLL(str(built))


@contextmanager
def fake_cuda():
    """Inside, ``torch.empty(3, device="cuda")`` works and any wait for it raises.

    Yields the mode; its ``ops`` lists what was called.
    """
    _install_guard()
    with FakeTensorMode(), NoWait() as mode:
        yield mode


def fake_parameters(shapes, dtype=torch.float32):
    """Parameters on the fake device, with gradients."""
    params = [torch.nn.Parameter(torch.empty(s, device="cuda", dtype=dtype)) for s in shapes]
    for param in params:
        param.grad = torch.empty_like(param)
    return params
