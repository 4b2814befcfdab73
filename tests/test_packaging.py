"""The package installs with a compiler, without one, with torch in sight and without."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import heal
import zclip
from zclip import kernel_build

ROOT = Path(__file__).parent.parent
NO_COMPILER = {"CXX": "no-such-compiler"}
SHOW_INFO = "from zclip import info; i = info.collect(); print(info.summary(i)); print(i.advice[0])"


def run(*command, cwd, **environment):
    """Run a command with a small timetable of its own; return the finished process."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "ZCLIP_BUILD")}
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def files_in_git(folder=""):
    listed = run(
        *("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder or "."),
        cwd=ROOT,
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def copy_tree(target):
    """Copy what git would ship, so that builds leave no trace here."""
    for name in files_in_git():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes((ROOT / name).read_bytes())
    return target


@pytest.fixture
def tree(tmp_path):
    return copy_tree(tmp_path / "tree")


def build(tree, command="bdist_wheel", **environment):
    """Run setup.py; return the process and the wheel, if there is one."""
    done = run(sys.executable, "setup.py", "-q", command, cwd=tree, **environment)
    return done, next(iter((tree / "dist").glob("*.whl")), None)


def names_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def install(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def parts_beside_python():
    """What is no Python in the package, and easily forgotten."""
    parts = {str(path.relative_to(ROOT)) for path in (ROOT / "heal/report/web").iterdir()}
    assert len(parts) >= 6
    forecast = {f"heal/lab/forecast/{name}" for name in ("model.json", "CARD.md")}
    data = {*forecast, "heal/py.typed", "zclip/py.typed"}
    return parts | data


def fake_cuda_torch(folder):
    """A torch with CUDA, as far as a build can see: the headers and libraries of this one."""
    package = folder / "torch"
    package.mkdir(parents=True)
    for part in ("include", "lib"):
        (package / part).symlink_to(Path(torch.__file__).parent / part)
    (package / "__init__.py").write_text(
        "class version: cuda = '12.6'\n"
        "class _C: _cuda_getArchFlags = staticmethod(lambda: 'sm_75 sm_90 compute_90')\n"
    )
    return str(folder)


def failing_cuda_toolkit(folder):
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n[ $1 = --list-gpu-code ] && echo sm_90 && exit 0\nexit 1\n")
    nvcc.chmod(0o755)
    return str(folder)


@pytest.fixture(scope="module")
def platform_wheel(tmp_path_factory):
    """The tree that a wheel with kernels was built in, the wheel, and what the build printed.

    Built beside a torch with CUDA and a toolkit that fails, so that one build shows both.
    """
    tree = copy_tree(tmp_path_factory.mktemp("platform"))
    beside = tmp_path_factory.mktemp("beside")
    done, wheel = build(
        tree,
        PYTHONPATH=fake_cuda_torch(beside / "site"),
        CUDA_HOME=failing_cuda_toolkit(beside / "cuda"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return tree, wheel, done.stderr


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory):
    tree = copy_tree(tmp_path_factory.mktemp("pure"))
    done, wheel = build(tree, ZCLIP_BUILD="none")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ZCLIP_BUILD=none: pure Python" in done.stderr
    return wheel


def test_the_wheel_is_one_abi3_file_on_the_stable_abi(platform_wheel, tmp_path):
    _, wheel, _ = platform_wheel
    assert re.match(r"zclip_heal-.*-cp310-abi3-(linux|macosx)", wheel.name)
    folder = install(wheel, tmp_path)
    assert (folder / "heal/__init__.py").exists()
    symbols = run("nm", "-D", "--undefined-only", folder / "zclip/_C.abi3.so", cwd=tmp_path).stdout
    # Only C functions of torch: these keep their meaning from version to version.
    assert "aoti_torch_" in symbols
    assert not re.findall(r"_ZN?K?\w*(?:3c10|2at|5torch)\w*", symbols)
    # Of Python a few functions of its stable ABI, weak: a process may hide them.
    declared = re.findall(
        r"ZCLIP_IF_PRESENT .*?(Py\w+)\(", (ROOT / "csrc/cpu/reading.cpp").read_text()
    )
    assert set(re.findall(r"\b(\w) (Py\w+)", symbols)) == {("w", name) for name in declared}


def test_every_wheel_and_the_source_archive_hold_all_of_the_sources(
    platform_wheel, pure_wheel, tree
):
    sources = set(files_in_git("csrc"))
    assert len(sources) > 50
    for wheel in (platform_wheel[1], pure_wheel):
        assert names_in(wheel) >= parts_beside_python() | {f"zclip/{name}" for name in sources}
    done, _ = build(tree, "sdist", ZCLIP_BUILD="none")
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= parts_beside_python() | sources | {"LICENSE", "README.md", "setup.py"}


def test_what_only_maintainers_need_is_not_in_the_wheel(pure_wheel):
    tops = {name.partition("/")[0] for name in names_in(pure_wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"heal", "zclip"}
    modules = {name for name in names_in(pure_wheel) if name.startswith("heal/lab/forecast/")}
    assert {Path(name).stem for name in modules if name.endswith(".py")} == {
        *("__init__", "features", "forecast_watch"),
    }


def test_a_pure_python_wheel_is_named_as_one(pure_wheel):
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names_in(pure_wheel) if name.endswith(".so")]


def test_without_a_compiler_the_wheel_is_pure_python_and_is_named_as_one(platform_wheel, tmp_path):
    # In a tree with a library of an earlier build, which must not get into this wheel.
    tree = Path(shutil.copytree(platform_wheel[0], tmp_path / "tree"))
    shutil.rmtree(tree / "dist")
    done, wheel = build(tree, **NO_COMPILER)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "pure Python, no compiled kernels: no C++ compiler found" in done.stderr
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names_in(wheel) if name.endswith(".so")]


def test_asking_for_the_kernels_without_a_compiler_fails(tree):
    done, wheel = build(tree, ZCLIP_BUILD="cpu", **NO_COMPILER)
    assert done.returncode != 0
    assert "ZCLIP_BUILD=cpu: no C++ compiler found (no-such-compiler)" in done.stderr
    assert wheel is None


def test_an_unknown_build_mode_is_refused(tree):
    done, _ = build(tree, ZCLIP_BUILD="fast")
    assert "ZCLIP_BUILD: expected auto, cuda, cpu or none, got 'fast'" in done.stderr


def test_cuda_without_a_toolkit_is_refused(tree):
    done, _ = build(tree, ZCLIP_BUILD="cuda", PATH="", CUDA_HOME="")
    assert "no nvcc on the path and no CUDA_HOME" in done.stderr


def test_an_isolated_build_finds_the_torch_of_the_interpreter_that_pip_runs_in(tmp_path):
    # As pip isolates: PYTHONPATH with a sitecustomize that hides what is installed.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None")
    ask = "from zclip_kernel_build import find_torch; print(find_torch().home)"
    shutil.copy(ROOT / "zclip/kernel_build.py", tmp_path / "zclip_kernel_build.py")
    done = run(sys.executable, "-c", ask, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout.strip() == str(Path(torch.__file__).parent), done.stderr


def test_a_failed_cuda_build_keeps_the_cpu_kernels(platform_wheel):
    _, wheel, printed = platform_wheel
    assert "building the kernels for the CPU and CUDA" in printed
    assert "no CUDA kernels: " in printed
    assert "zclip/_C.abi3.so" in names_in(wheel)


NVCC_12_6 = "sm_50 sm_60 sm_61 sm_70 sm_75 sm_80 sm_86 sm_87 sm_89 sm_90"
NVCC_13_0 = "sm_75 sm_80 sm_86 sm_87 sm_88 sm_89 sm_90 sm_100 sm_110 sm_103 sm_120 sm_121"


@pytest.mark.parametrize(
    ("nvcc", "torch_has", "codes"),
    [
        (NVCC_12_6, "", "sm_75 sm_80 sm_90 compute_90"),
        (NVCC_13_0, "", "sm_75 sm_80 sm_90 sm_100 sm_110 sm_120 compute_120"),
        (NVCC_13_0, "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", None),
        (NVCC_12_6, "sm_50 sm_80 sm_90", "sm_80 sm_90 compute_90"),
        ("sm_90", "sm_80", ""),
    ],
)
def test_architectures_are_those_of_nvcc_that_torch_runs_on(nvcc, torch_has, codes):
    codes = codes if codes is not None else "sm_75 sm_80 sm_90 sm_100 sm_120 compute_120"
    flags = kernel_build.architectures(nvcc.split(), tuple(torch_has.split()))
    assert [flag.rpartition("code=")[2] for flag in flags] == codes.split()


def test_the_first_import_compiles_what_the_wheel_did_not_bring_and_the_second_finds_it(
    pure_wheel, tmp_path
):
    folder = install(pure_wheel, tmp_path / "site")
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = [sys.executable, "-W", "error", "-c", SHOW_INFO]
    env = {**os.environ, **cache, "PYTHONPATH": str(folder)}
    env.pop("ZCLIP_BUILD", None)
    together = [
        subprocess.Popen(code, cwd=folder, env=env, text=True, stdout=-1, stderr=-1)
        for _ in range(2)  # as the ranks of a job do
    ]
    printed = [process.communicate() for process in together]
    for out, err in printed:
        assert out.startswith("Gradients on the CPU: compiled kernels ("), err
    assert sum(err.count("compiling the CPU kernels") for _, err in printed) == 1
    again = run(*code, cwd=folder, **cache)
    assert again.stdout.startswith("Gradients on the CPU: compiled kernels (")
    assert again.stderr == ""


def test_without_a_compiler_the_first_import_says_in_one_line_what_is_missing(pure_wheel, tmp_path):
    folder = install(pure_wheel, tmp_path / "site")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), **NO_COMPILER}
    clip = "p = torch.nn.Parameter(torch.ones(4)); p.grad = torch.ones(4)\n"
    clip = f"import torch, zclip\n{clip}assert zclip.clip_grad_norm_(p, 1.0) == 2\n{SHOW_INFO}"
    first = run(sys.executable, "-W", "error", "-c", clip, cwd=folder, **environment)
    assert first.returncode == 0, first.stderr
    (line,) = first.stderr.splitlines()
    assert "no C++ compiler found" in line
    assert "python -m zclip.build" in line
    assert "torch's foreach operators" in first.stdout
    assert "python -m zclip.build" in first.stdout
    second = run(sys.executable, "-c", clip, cwd=folder, **environment)
    assert second.stderr == ""
    assert second.stdout == first.stdout


def test_a_build_that_fails_is_not_tried_at_every_import(pure_wheel, tmp_path):
    folder = install(pure_wheel, tmp_path / "site")
    broken = min((folder / "zclip/csrc/cpu").glob("*.cpp"))
    broken.write_text("this is not C++\n")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    first = run(sys.executable, "-c", SHOW_INFO, cwd=folder, **environment)
    assert "compiling the CPU kernels" in first.stderr
    second = run(sys.executable, "-c", SHOW_INFO, cwd=folder, **environment)
    assert "compiling" not in second.stderr
    assert "the kernels did not compile, see" in second.stdout
    command = run(sys.executable, "-m", "zclip.build", cwd=folder, **environment)
    assert command.returncode == 1
    assert broken.name in command.stderr


def test_types_are_seen_from_outside(pure_wheel, tmp_path):
    site = tmp_path / f"venv/lib/python3.{sys.version_info.minor}/site-packages"
    made = run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    install(pure_wheel, site)
    (tmp_path / "user.py").write_text(
        "import heal\nimport zclip\n"
        "reveal_type(zclip.__version__)\n"
        "reveal_type(heal.HealingConfig().lag)\n"
        "zclip.grad_stats(3)\n"
    )
    python = tmp_path / "venv/bin/python"
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "--strict", "user.py"]
    printed = run(*command, cwd=tmp_path).stdout
    assert 'Revealed type is "str"' in printed, printed
    assert 'Revealed type is "int"' in printed
    assert 'incompatible type "int"; expected "Sequence' in printed
    assert "py.typed" not in printed


def test_both_packages_and_both_commands_have_one_version(tmp_path):
    assert heal.__version__ == zclip.__version__
    for module, name in (("heal", "heal"), ("zclip.bench", "zclip-bench")):
        done = run(sys.executable, "-m", module, "--version", cwd=ROOT)
        assert done.stdout == f"{name} {zclip.__version__}\n"
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[(.+?)\]", changelog, re.MULTILINE)[1] == zclip.__version__


def test_the_extras_are_those_we_promise():
    text = (ROOT / "pyproject.toml").read_text()
    for extra in ("triton", "hf", "lightning", "trackers", "plot", "test", "dev"):
        assert re.search(rf"^{extra} = \[", text, re.MULTILINE), extra
    assert 'name = "zclip-heal"' in text
    requires = re.search(r"^requires = (.*)$", text, re.MULTILINE).group(1)
    assert "torch" not in requires


@pytest.mark.slow
def test_one_wheel_has_the_cuda_kernels_and_loads_without_cuda(tree):
    done, wheel = build(tree, ZCLIP_BUILD="cuda")
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.match(r"zclip_heal-.*-cp310-abi3-linux", wheel.name)
    folder = install(wheel, tree / "installed")
    ask = "import zclip, zclip.backends as b; print(zclip.__file__, b.answering('scale_', 'cuda'))"
    loaded = run(sys.executable, "-c", ask, cwd=folder)
    assert "installed" in loaded.stdout
    assert loaded.stdout.split()[-1] == "native"


def fresh_environment(folder, *, with_torch=True):
    """A new environment; torch and our dependencies are those of the one that runs the tests."""
    run(sys.executable, "-m", "venv", folder, cwd=ROOT)
    if with_torch:
        lend_torch(folder)
    return folder / "bin/python"


def lend_torch(folder):
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "lent.pth").write_text(str(Path(torch.__file__).parents[1]))


ROUTES = {
    "folder": lambda tree: str(tree),
    "git": lambda tree: f"git+file://{tree}",
    "sdist": lambda tree: str(next((tree / "dist").glob("*.tar.gz"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("machine", ["compiler", "no compiler", "torch comes later"])
def test_a_fresh_environment_gets_the_kernels_by_every_route(tree, tmp_path, route, machine):
    """Needs an index with setuptools: pip isolates the build, as it does by default."""
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "all")):
        assert run(*git, *words, cwd=tree).returncode == 0
    build(tree, "sdist", ZCLIP_BUILD="none")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    if machine == "no compiler":
        environment |= NO_COMPILER
    python = fresh_environment(tmp_path / "venv", with_torch=machine != "torch comes later")
    pip = (python, "-m", "pip", "install", "-q", "--no-deps", ROUTES[route](tree))
    done = run(*pip, cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lend_torch(tmp_path / "venv")
    told = run(python, "-c", SHOW_INFO, cwd=tmp_path, **environment)
    measures = "torch's foreach" if machine == "no compiler" else "compiled kernels"
    assert told.stdout.startswith(f"Gradients on the CPU: {measures}"), told.stderr
    assert ("compiling the CPU kernels" in told.stderr) == (machine == "torch comes later")
