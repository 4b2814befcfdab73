"""The compiled extension: finds it, loads it, and explains itself if it cannot."""

import ctypes
from pathlib import Path

import torch

from zclip import reading
from zclip.backends import local_build
from zclip.kernel_build import BuildError

USES_AVX2, HAS_CUDA, USES_AVX512 = 1, 2, 4
"""Bits of ``zclip::native_features``, as in csrc/library.cpp."""

HINT = "install a C++ compiler (such as g++), then run: python -m zclip.build"
"""What helps in every case but one: a compiler that is there and failed."""

_loaded = False
_path: Path | None = None


def load() -> str | None:
    """Load the extension, compiled here if the package brought none; return what is missing."""
    global _loaded, _path
    shipped = next(iter(sorted(Path(__file__).parents[1].glob("_C*.so"))), None)
    try:
        found = local_build.library_with_cuda() or shipped or local_build.library()
        torch.ops.load_library(found)
    except BuildError as error:
        return f"no compiled kernels: {error}; {HINT}"
    except OSError as error:
        return f"{found} does not load with torch {torch.__version__}: {error}"
    _loaded, _path = True, Path(found)
    reading.native.load(_path)
    return None


def is_loaded() -> bool:
    """Return whether the extension answers."""
    return _loaded


def has_cuda() -> bool:
    """Return whether the extension is loaded and has CUDA kernels."""
    return _loaded and bool(torch.ops.zclip.native_features() & HAS_CUDA)


def devices_without_image() -> list[int]:
    """Return the CUDA devices that the extension holds neither code nor PTX for.

    Asks the driver, so CUDA must have been initialised, or there must be no device.
    """
    has_image = ctypes.CDLL(str(_path)).zclip_has_image
    missing = []
    for device in range(torch.cuda.device_count()):
        with torch.cuda.device(device):
            if not has_image():
                missing.append(device)
    return missing


def cpu_path() -> str:
    """Return the widest instructions that the kernels for the CPU use here."""
    features = torch.ops.zclip.native_features()
    if features & USES_AVX512:
        return "AVX-512"
    return "AVX2" if features & USES_AVX2 else "portable"


def describe() -> str:
    """Return one line about what the loaded extension can do here."""
    features = torch.ops.zclip.native_features()
    cuda = "with" if features & HAS_CUDA else "without"
    return f"CPU path {cpu_path()}, built {cuda} CUDA"
