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
FLAGS = (
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

VARIANTS = {
    "plain": (),
    "small_arguments": ("-DZCLIP_LARGE_ARGUMENTS=0",),  # 4 KB, as before CUDA 12.1
}
"""Builds of the backend, by their defines."""

_libraries: list[torch.library.Library] = []  # a namespace lives as long as its Library


def namespace(variant: str) -> str:
    return f"zclip_simt_{variant}"


@functools.cache
def load(variant: str) -> ModuleType:
    """Build the backend, declare its operators in a namespace of torch.ops, and return it."""
    library = torch.library.Library(namespace(variant), "DEF")
    _libraries.append(library)
    for name in OPS:
        schema = str(getattr(torch.ops.zclip, name).default._schema)
        library.define(schema.removeprefix("zclip::"))
    defines = (*VARIANTS[variant], f"-DZCLIP_SIMT_NAMESPACE={namespace(variant)}")
    return build.load_module(SOURCE, "plain", (*defines, *FLAGS))


def backend(order: str, variant: str = "plain") -> SimpleNamespace:
    """Return the operators as functions; each call runs under another seed of one order."""
    seeds = itertools.count()

    def call(name, *args):
        load(variant).set_schedule(order, seed=next(seeds))
        return getattr(getattr(torch.ops, namespace(variant)), name)(*args)

    return SimpleNamespace(**{name: functools.partial(call, name) for name in OPS})
