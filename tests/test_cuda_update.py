"""The CUDA kernel of optimizer updates, as nvcc compiles it."""

import ctypes
import re
import subprocess

import pytest

from tests import cuda_toolkit

pytestmark = pytest.mark.skipif(not cuda_toolkit.HAS_NVCC, reason="there is no nvcc")

SOURCE = cuda_toolkit.ROOT / "csrc/cuda/update_launcher.cu"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    target = tmp_path_factory.mktemp("update") / "update.o"
    command = ["nvcc", *cuda_toolkit.FLAGS, "-gencode=arch=compute_90,code=sm_90"]
    command += ["-Xptxas", "-v", "-Xcompiler", "-fPIC", "-c", str(SOURCE), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return target, done.stderr


def test_nothing_spills_and_a_whole_block_fits(compiled):
    log = compiled[1]
    assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == 2  # for small and for large tables
    assert max(registers) * 512 <= 65536


def test_tensors_are_read_16_bytes_at_a_time(compiled):
    sass = cuda_toolkit.cuobjdump("-sass", str(compiled[0]))
    assert len(re.findall(r"\bLDG\.E\.128", sass)) >= 2 * 4  # p, g, m and v, in each kernel


def test_tensors_are_written_16_bytes_at_a_time(compiled):
    """p, m, v and the largest v of float32, and twice as many of float64, in each kernel."""
    sass = cuda_toolkit.cuobjdump("-sass", str(compiled[0]))
    assert len(re.findall(r"\bSTG\.E\.128", sass)) == 2 * (4 + 8)


@pytest.fixture(scope="module")
def runtime(compiled, tmp_path_factory):
    """The launcher as nvcc compiled it, linked to a runtime that records."""
    target = tmp_path_factory.mktemp("recording") / "update.so"
    sources = [
        cuda_toolkit.ROOT / "tests" / name for name in ("fake_cudart.cpp", "fake_update.cpp")
    ]
    objects = [*sources, compiled[0], cuda_toolkit.compile_object()[0]]
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,--no-undefined"]
    subprocess.run([*command, *map(str, objects), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.fake_launch.restype = ctypes.c_char_p
    library.fake_update.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    return library


@pytest.mark.parametrize(
    ("count", "groups", "launches"),
    [(1, 1, 1), (44, 8, 1), (45, 1, 1), (400, 8, 1), (401, 1, 2), (400, 9, 2), (10_000, 1, 25)],
)
def test_an_update_is_one_launch_for_400_tensors_in_8_groups(runtime, count, groups, launches):
    runtime.fake_clear()
    assert runtime.fake_update(count, 100_000, groups, 0x5EED0) == 0
    lines = [runtime.fake_launch(i).decode() for i in range(runtime.fake_launches())]
    assert len(lines) == launches
    assert all("optim_update_partials" in line and "stream=0x5eed0" in line for line in lines)
    assert sum(int(re.search(r"tensors=(\d+)", line)[1]) for line in lines) == count
