"""Builds the extension for the torch that is installed, or nothing at all if that cannot be.

``ZCLIP_BUILD``: ``auto`` (CUDA if torch has it and nvcc is found, else CPU, else pure Python),
``cuda``, ``cpu`` (both raise if they cannot), ``none``.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]
# Sums must have the same bits on every machine, so no multiply-add may be contracted.
OPTIMISE = [
    "-O3",
    "-g0",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wno-psabi",
    "-fvisibility=hidden",
]
NVCC = ["-O3", "-std=c++17", "-fmad=false", "-Xcompiler", "-fvisibility=hidden"]
# libtorch must stay in NEEDED, or the weak stream symbol is silently null under CUDA torch.
LINK = ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", "-Wl,--exclude-libs,ALL"]


def say(line: str) -> None:
    """Print a line that pip shows with -v and on failure."""
    print(f"zclip-heal: {line}", file=sys.stderr)


def cuda_home() -> str | None:
    """Return the folder of the CUDA toolkit, by CUDA_HOME or by the nvcc on the path."""
    nvcc = shutil.which("nvcc")
    if os.environ.get("CUDA_HOME") or not nvcc:
        return os.environ.get("CUDA_HOME")
    beside = Path(os.path.realpath(nvcc)).parents[1]
    if (beside / "include/cuda_runtime.h").exists():
        return str(beside)
    # A script that calls the real one, as some distributions have: nvcc itself knows where it is.
    asked = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    )
    top = re.search(r"TOP=(.+)", asked.stderr)
    return os.path.realpath(top[1].strip()) if top else None


def extension_arguments(wanted: str) -> dict:
    """Return the arguments of setup() that build the extension; none for pure Python."""
    if wanted not in ("auto", "cuda", "cpu", "none"):
        raise SystemExit(f"ZCLIP_BUILD is {wanted!r}; wanted auto, cuda, cpu or none")
    if wanted == "none":
        say("ZCLIP_BUILD=none: pure Python, no compiled kernels")
        return {}
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        if wanted != "auto":
            raise
        say(
            "torch is not importable in the build environment (build isolation?): pure Python, no "
            "compiled kernels. For these: pip install --no-build-isolation ."
        )
        return {}

    home = cuda_home()
    with_cuda = wanted == "cuda" or (wanted == "auto" and bool(home and torch.version.cuda))
    if with_cuda and not home:
        raise SystemExit("ZCLIP_BUILD=cuda: no nvcc on the path and no CUDA_HOME")

    sources = ["csrc/library.cpp", *map(str, sorted(Path("csrc/cpu").glob("*.cpp")))]
    defines = [*STABLE_ABI]
    options: dict = {"include_dirs": [], "library_dirs": [], "libraries": []}
    if with_cuda:
        cpp_extension.CUDA_HOME = home  # a CPU-only torch leaves it unset
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0;12.0+PTX")
        sources += [str(path) for path in sorted(Path("csrc/cuda").glob("*.c*")) if path.is_file()]
        sources = [s for s in sources if not s.endswith(".cuh")]
        defines.append("-DZCLIP_WITH_CUDA")
        options = {
            "include_dirs": [f"{home}/include"],
            "library_dirs": [f"{home}/lib64", f"{home}/lib"],
            "libraries": ["cudart_static", "rt", "dl", "pthread"],
        }

    class BuildOrFallBack(cpp_extension.BuildExtension):
        """In auto mode a machine with no working compiler gets the pure-Python package."""

        def run(self) -> None:
            try:
                super().run()
            except Exception as error:
                if wanted != "auto":
                    raise
                say(f"the extension did not build ({error}): pure Python, no compiled kernels")
                self.extensions = self.distribution.ext_modules = []

    extension = cpp_extension.CppExtension(
        "zclip._C",
        sources,
        py_limited_api=True,
        extra_link_args=LINK,
        extra_compile_args={"cxx": [*OPTIMISE, *defines], "nvcc": [*NVCC, *defines]},
        **options,
    )
    say(f"building the extension for the CPU{' and CUDA' if with_cuda else ''}")
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildOrFallBack.with_options(no_python_abi_suffix=False)},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**extension_arguments(os.environ.get("ZCLIP_BUILD", "auto")))
