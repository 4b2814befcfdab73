"""Kernels compiled on this machine, into a cache of the user, where the wheel brought none.

pip cannot compile them where torch is not yet installed when it builds the package, so the first
``import zclip`` does: about 15 seconds, once per user and machine type. Only the CPU kernels,
because nvcc takes minutes and Triton serves GPUs until then; ``python -m zclip.build`` compiles
both. ``ZCLIP_BUILD=none`` prevents it.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from zclip.kernel_build import (
    BuildError,
    Torch,
    compile_library,
    find_compiler,
    find_toolkit,
    recipe_digest,
)

LIBRARY, WITH_CUDA, LOG, NOTED = "_C.abi3.so", "_C_cuda.abi3.so", "failed.txt", "noted.txt"
PACKAGE = Path(__file__).resolve().parents[1]

logger = logging.getLogger("zclip")


def library() -> Path:
    """Return the library in the cache; compile it if this is the first import that needs it.

    Of several processes that start at once, one compiles and the others wait for it. A build that
    failed is not tried again until ``python -m zclip.build``.

    Raises:
        BuildError: with what is missing.
    """
    if os.environ.get("ZCLIP_BUILD") == "none":
        raise BuildError("ZCLIP_BUILD=none")
    folder = cache()
    target, log = folder / LIBRARY, folder / LOG
    if not target.exists():
        find_compiler()
        with _alone(folder):
            if log.exists():
                raise BuildError(f"the kernels did not compile, see {log}")
            if not target.exists():
                logger.warning("zclip: compiling the CPU kernels into %s, once", folder)
                _compile(with_cuda=False)
    return target


def library_with_cuda() -> Path | None:
    """Return the library that ``python -m zclip.build`` compiled with CUDA; None if it did not."""
    if torch.version.cuda is None:
        return None
    with contextlib.suppress(BuildError):
        target = cache() / WITH_CUDA
        return target if target.exists() else None
    return None


def rebuild() -> str:
    """Compile the library again, with CUDA where torch has it; return what was built.

    Raises:
        BuildError: the CPU kernels did not compile.
    """
    find_compiler()
    with _alone(cache()):
        (cache() / LOG).unlink(missing_ok=True)
        if torch.version.cuda:
            try:
                return _compile(with_cuda=True)
            except BuildError as error:
                logger.warning("zclip: no CUDA kernels: %s", error)
        return _compile(with_cuda=False)


def cache() -> Path:
    """Return the folder of this user for libraries built from these sources on such a machine.

    Raises:
        BuildError: the sources were not installed with the package.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "zclip-heal" / recipe_digest(_sources())


def note_once(line: str) -> None:
    """Log ``line`` as a warning, unless it was logged before for this user and these sources."""
    with contextlib.suppress(OSError, BuildError):  # a cache that cannot be written: every time
        noted = cache() / NOTED
        if noted.exists() and noted.read_text() == line:
            return
        noted.parent.mkdir(parents=True, exist_ok=True)
        noted.write_text(line)
    logger.warning(line)


def _sources() -> Path:
    for folder in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if (folder / "library.cpp").exists():
            return folder
    raise BuildError("the package was installed without its C++ sources")


def _compile(with_cuda: bool) -> str:
    folder = cache()
    flags = getattr(torch._C, "_cuda_getArchFlags", str)() or ""
    ours = Torch(Path(torch.__file__).parent, torch.version.cuda, tuple(flags.split()))
    toolkit = find_toolkit(ours) if with_cuda else None
    target = folder / (WITH_CUDA if with_cuda else LIBRARY)
    try:
        compile_library(target, _sources(), folder / "objects", ours, toolkit)
    except BuildError as error:
        if not with_cuda:
            (folder / LOG).write_text(str(error))
        raise
    return f"{target}: kernels for the CPU{' and CUDA' if with_cuda else ''}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock that the other processes of this user wait for."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise BuildError(f"cannot write to {folder} ({error}); set XDG_CACHE_HOME") from error
    import fcntl  # not on Windows, where find_compiler has raised

    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
