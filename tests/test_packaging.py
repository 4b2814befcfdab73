"""The package installs with a compiler, without one, with torch in sight and without."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tree(tmp_path):
    """A copy of what git would ship, so that builds leave no trace here."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def parts_beside_python():
    """What is no Python in the package, and easily forgotten."""
    parts = {str(path.relative_to(ROOT)) for path in (ROOT / "heal/report/web").iterdir()}
    assert len(parts) >= 6
    return parts | {"heal/forecast/model.json", "heal/forecast/CARD.md"}


def build(tree, *, hide_torch=False, command="bdist_wheel", **environment):
    """Run setup.py bdist_wheel; return the process and the wheel, if there is one."""
    hide = "sys.modules['torch'] = None;" if hide_torch else ""
    source = f"import runpy, sys; {hide} sys.argv = ['setup.py', {command!r}];"
    done = subprocess.run(
        [sys.executable, "-c", source + "runpy.run_path('setup.py', run_name='__main__')"],
        cwd=tree,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, next(iter((tree / "dist").glob("*.whl")), None)


def test_the_wheel_is_one_abi3_file_on_the_stable_abi(tree):
    done, wheel = build(tree, ZCLIP_BUILD="cpu")
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.match(r"zclip_heal-.*-cp310-abi3-linux", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        assert {"zclip/_C.abi3.so", "zclip/__init__.py", "heal/__init__.py"} <= set(
            archive.namelist()
        )
        archive.extract("zclip/_C.abi3.so", tree)
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", tree / "zclip/_C.abi3.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # Only C functions of torch: these keep their meaning from version to version.
    assert "aoti_torch_" in symbols
    assert not re.findall(r"_ZN?K?\w*(?:3c10|2at|5torch)\w*", symbols)
    assert not re.findall(r"\bPy\w+", symbols)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ZCLIP_BUILD": "none"}, "ZCLIP_BUILD=none: pure Python"),
        ({"hide_torch": True}, "torch is not importable in the build environment"),
    ],
    ids=["asked for", "no torch in sight"],
)
def test_a_pure_python_wheel_says_that_it_is_one(tree, options, message):
    done, wheel = build(tree, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert message in done.stderr
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) >= parts_beside_python()


def test_the_source_archive_has_what_is_no_python(tree):
    done, _ = build(tree, command="sdist", ZCLIP_BUILD="none")
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= parts_beside_python()


def test_without_a_compiler_the_install_still_succeeds_and_says_so(tree):
    done, wheel = build(tree, CXX="no-such-compiler", CC="no-such-compiler")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the extension did not build" in done.stderr
    with zipfile.ZipFile(wheel) as archive:
        assert not [n for n in archive.namelist() if n.endswith(".so")]


def test_asking_for_the_extension_without_a_compiler_fails(tree):
    done, wheel = build(tree, CXX="no-such-compiler", CC="no-such-compiler", ZCLIP_BUILD="cpu")
    assert done.returncode != 0
    assert wheel is None


def test_an_unknown_build_mode_is_refused(tree):
    done, _ = build(tree, ZCLIP_BUILD="fast")
    assert "ZCLIP_BUILD is 'fast'; wanted auto, cuda, cpu or none" in done.stderr


def test_cuda_without_a_toolkit_is_refused(tree):
    done, _ = build(tree, ZCLIP_BUILD="cuda", PATH="", CUDA_HOME="")
    assert "no nvcc on the path and no CUDA_HOME" in done.stderr


@pytest.mark.slow
def test_one_wheel_has_the_cuda_kernels_and_loads_without_cuda(tree):
    done, wheel = build(tree, ZCLIP_BUILD="cuda")
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.match(r"zclip_heal-.*-cp310-abi3-linux", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree / "installed")
    source = (
        "import zclip, zclip.backends as b; print(zclip.__file__, b.answering('scale_', 'cuda'))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", source],
        cwd=tree / "installed",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "installed" in loaded.stdout
    assert loaded.stdout.split()[-1] == "native"


def test_the_extras_are_those_we_promise():
    text = (ROOT / "pyproject.toml").read_text()
    for extra in ("triton", "hf", "lightning", "trackers", "plot", "test", "dev"):
        assert re.search(rf"^{extra} = \[", text, re.MULTILINE), extra
    assert 'name = "zclip-heal"' in text
    requires = re.search(r"^requires = (.*)$", text, re.MULTILINE).group(1)
    assert "torch" not in requires
