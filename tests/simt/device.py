"""The CUDA backend on the emulator, as an entry of tests/backends.py would like it."""

import functools
import itertools
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

import zclip  # noqa: F401  declares the schemas
from tests.simt import build

OPS = tuple(re.findall(r'm\.impl\("(\w+)"', (build.ROOT / "csrc/cuda/register_ops.h").read_text()))
"""What the CUDA backend implements; the rest is answered by the reference."""

TORCH = Path(torch.__file__).parent
# Blocks of 128 threads: every thread costs a fiber and rules are tested over thousands of launches.
# kernel_check.cpp runs the same kernels with the 512 that a GPU gets.
FLAGS = (
    "-DZCLIP_BLOCK_THREADS=128",
    "-DZCLIP_SLOTS_PER_WARP=2",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    "-DTORCH_STABLE_ONLY",
    f"-isystem{TORCH / 'include'}",
    f"-isystem{TORCH / 'include/torch/csrc/api/include'}",
    f"-L{TORCH / 'lib'}",
    "-Wl,--no-as-needed",
    "-ltorch",
    "-ltorch_cpu",
    "-lc10",
)
SOURCE = build.HERE / "module.cpp"

NAMESPACE = "zclip_simt"
_libraries: list[torch.library.Library] = []  # a namespace lives as long as its Library


@functools.cache
def load() -> ModuleType:
    """Build the backend, declare its operators in a namespace of torch.ops, and return it."""
    library = torch.library.Library(NAMESPACE, "DEF")
    _libraries.append(library)
    for name in OPS:
        schema = str(getattr(torch.ops.zclip, name).default._schema)
        library.define(schema.removeprefix("zclip::"))
    return build.load_module(SOURCE, "plain", FLAGS)


def backend(order: str) -> SimpleNamespace:
    """Return the operators as functions; each call runs under another seed of one order."""
    seeds = itertools.count()

    def call(name, *args):
        load().set_schedule(order, seed=next(seeds))
        return getattr(getattr(torch.ops, NAMESPACE), name)(*args)

    return SimpleNamespace(**{name: functools.partial(call, name) for name in OPS})
