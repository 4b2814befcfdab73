"""Builds the compiled kernels where torch and a compiler are at hand, else a pure-Python package.

``ZCLIP_BUILD``: ``auto`` (CUDA if torch has it and nvcc is found, else CPU, else pure Python),
``cuda``, ``cpu`` (both fail if they cannot), ``none``. See ``zclip/kernel_build.py``.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
MODES = ("auto", "cuda", "cpu", "none")

# By its path, because importing zclip would import torch, which an isolated build does not have.
_spec = importlib.util.spec_from_file_location("zclip_kernel_build", ROOT / "zclip/kernel_build.py")
build = sys.modules["zclip_kernel_build"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)


def say(line: str) -> None:
    """Print a line that pip shows with -v and on failure."""
    print(f"zclip-heal: {line}", file=sys.stderr)


def mode() -> str:
    """Return what ``ZCLIP_BUILD`` asks for."""
    wanted = os.environ.get("ZCLIP_BUILD", "auto")
    if wanted not in MODES:
        raise SystemExit(f"ZCLIP_BUILD: expected auto, cuda, cpu or none, got {wanted!r}")
    return wanted


class BuildKernels(build_ext):
    """Compiles the kernels; in mode "auto" it gives up CUDA first, then the kernels."""

    def run(self) -> None:
        try:
            super().run()
        except build.BuildError as error:
            if mode() != "auto":
                raise SystemExit(f"zclip-heal: ZCLIP_BUILD={mode()}: {error}") from error
            say(f"pure Python, no compiled kernels: {error}")
            self.extensions = self.distribution.ext_modules = []

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.unlink(missing_ok=True)  # one from an earlier build must not pass for this one's
        work, torch = Path(self.build_temp), build.find_torch()
        if mode() == "cuda" or (mode() == "auto" and torch.cuda):
            try:
                toolkit = build.find_toolkit(torch)
                say(f"building the kernels for the CPU and CUDA ({' '.join(toolkit.flags)})")
                build.compile_library(target, ROOT / "csrc", work, torch, toolkit)
            except build.BuildError as error:
                if mode() == "cuda":
                    raise
                say(f"no CUDA kernels: {error}")
        if not target.exists():
            say("building the kernels for the CPU")
            build.compile_library(target, ROOT / "csrc", work, torch)


class SourcesBesideKernels(build_py):
    """Ships ``csrc`` in the package, so that a first import can compile what a build could not."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(ROOT / "csrc", Path(self.build_lib) / "zclip/csrc", dirs_exist_ok=True)


class WheelNamedByContent(bdist_wheel):
    """Builds the kernels first: a wheel has a platform in its name only if it holds them."""

    def run(self) -> None:
        self.run_command("build_ext")
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()


if mode() == "none":
    say("ZCLIP_BUILD=none: pure Python, no compiled kernels")
setup(
    ext_modules=[] if mode() == "none" else [Extension("zclip._C", [], py_limited_api=True)],
    cmdclass={
        "bdist_wheel": WheelNamedByContent,
        "build_ext": BuildKernels,
        "build_py": SourcesBesideKernels,
    },
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
