"""The CUDA kernel of optimizer updates, as nvcc compiles it: what it moves, and at what cost."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from tests import cuda_toolkit
from tests.cuda_toolkit import SLOW_ARCHITECTURES, UPDATE, UPDATE_ARCHITECTURES

pytestmark = pytest.mark.skipif(not cuda_toolkit.HAS_NVCC, reason="there is no nvcc")

ALL_ARCHITECTURES = [
    *UPDATE_ARCHITECTURES,
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_ARCHITECTURES),
]
WIDTH = 4  # elements of a thread in one turn of a float32 loop
TABLES = (44, 400)
PARAMETER = {"float32": 4, "bfloat16": 2, "float16": 2}
# Moments of 4 bytes that an algorithm reads and writes. Those of SGD with momentum and of Lion are
# alike, so that their loops are told apart by nothing but their length.
MOMENTS = {"AMSGrad": 3, "Adam": 2, "SGD with momentum, Lion": 1, "SGD": 0}
# Instructions of a thread per turn, at most, with everything that is seldom needed: float64 sums of
# what float32 cannot square, coefficients that float32 cannot hold, stochastic rounding. At 90 % of
# its bandwidth a B200 issues up to 530 of Adam in float32 while it moves four elements.
BUDGETS = {
    "AMSGrad": {"float32": 480, "bfloat16": 620, "float16": 500},
    "Adam": {"float32": 470, "bfloat16": 590, "float16": 490},
    "SGD with momentum, Lion": {"float32": 320, "bfloat16": 440, "float16": 340},
    "SGD": {"float32": 235, "bfloat16": 360, "float16": 255},
}


def update_loops(architecture, table, algorithm, dtype):
    """Return the loops over several elements of gradients and parameters of this format."""
    size, moments = PARAMETER[dtype], MOMENTS[algorithm]
    code = cuda_toolkit.machine_code(architecture, UPDATE)
    return [
        loop
        for loop in cuda_toolkit.innermost_loops(code[f"optim_update_partials<float, {table}>"])
        if loop.moved("LDG") == WIDTH * (2 * size + 4 * moments)
        and loop.count("LDG") == 2 + moments
        and (loop.count("HADD2") > 0) == (dtype == "float16")
    ]


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_nothing_spills_and_two_blocks_fit_every_multiprocessor(architecture):
    found = cuda_toolkit.kernels(UPDATE, architecture)
    kernels = [kernel for kernel in found if kernel.architecture == architecture]
    assert len(kernels) == 4  # two tables, two arithmetics
    for kernel in kernels:
        blocks = 1 if "double" in kernel.name else 2
        assert kernel.spilled_bytes == 0, kernel
        assert blocks * kernel.registers * 512 <= 65536, kernel


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_no_update_uses_local_memory(architecture):
    for name, code in cuda_toolkit.machine_code(architecture, UPDATE).items():
        assert not re.findall(r"\b(?:LDL|STL)\b", code), name


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
@pytest.mark.parametrize("dtype", PARAMETER)
@pytest.mark.parametrize("algorithm", MOMENTS)
def test_a_loop_reads_and_writes_everything_once_16_bytes_at_a_time(architecture, algorithm, dtype):
    size, moments = PARAMETER[dtype], MOMENTS[algorithm]
    for table in TABLES:
        loops = update_loops(architecture, table, algorithm, dtype)
        assert len(loops) >= 1
        for loop in loops:
            own = ".E.128" if size == 4 else ".E.64"  # four elements of 16 bits are 8 bytes
            assert loop.count(f"LDG{own}") >= 2
            assert loop.count(f"STG{own}") >= 1
            assert loop.count("LDG.E.128") == moments + (2 if size == 4 else 0)
            assert loop.count("STG.E.128") == moments + (1 if size == 4 else 0)
            assert loop.moved("STG") == WIDTH * (size + 4 * moments)


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
@pytest.mark.parametrize("dtype", PARAMETER)
@pytest.mark.parametrize("algorithm", MOMENTS)
def test_no_loop_takes_more_instructions_than_its_budget(architecture, algorithm, dtype):
    for table in TABLES:
        lengths = [len(loop) for loop in update_loops(architecture, table, algorithm, dtype)]
        assert max(lengths) <= BUDGETS[algorithm][dtype]


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_all_loads_of_a_turn_are_under_way_before_the_first_is_used(architecture):
    for algorithm in MOMENTS:
        for loop in update_loops(architecture, 44, algorithm, "float32"):
            first = next(i for i, o in enumerate(loop.opcodes) if o.startswith(("FADD", "FMUL")))
            loads = [o for o in loop.opcodes[:first] if o.startswith("LDG.E.128")]
            assert len(loads) == loop.count("LDG.E.128")


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_a_float32_step_of_adamw_moves_32_bytes_per_element(architecture):
    """The norm reads 4, the update 16, and writes 12; a coefficient changes nothing about it."""
    measured = cuda_toolkit.machine_code(architecture)["grad_stats_partials<145>"]
    rounds = [
        loop
        for loop in cuda_toolkit.loops(measured)
        if loop.count("FMUL") == 16 * (loop.count("LDG.E.128") / 4) > 0  # a square per element
    ]
    norms = {loop.moved("LDG") / loop.count("FMUL") for loop in rounds}
    assert norms == {4.0}
    assert not any(loop.count("STG") for loop in rounds)
    updates = update_loops(architecture, 44, "Adam", "float32")
    moved = {(loop.moved("LDG") + loop.moved("STG")) / WIDTH for loop in updates}
    assert moved == {28.0}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    """The launchers as nvcc compiled them, linked to a runtime that records."""
    target = tmp_path_factory.mktemp("recording") / "update.so"
    sources = [
        cuda_toolkit.ROOT / "tests" / name for name in ("fake_cudart.cpp", "fake_update.cpp")
    ]
    objects = [*sources, cuda_toolkit.compile_object(UPDATE)[0], cuda_toolkit.compile_object()[0]]
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,--no-undefined"]
    subprocess.run([*command, *map(str, objects), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.fake_launch.restype = ctypes.c_char_p
    library.fake_update.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    library.fake_clip_and_update.argtypes = [ctypes.c_int64] * 2 + [ctypes.c_void_p]
    return library


def launches(runtime):
    return [runtime.fake_launch(i).decode() for i in range(runtime.fake_launches())]


@pytest.mark.parametrize(
    ("count", "groups", "expected"),
    [(1, 1, 1), (44, 8, 1), (45, 1, 1), (400, 8, 1), (401, 1, 2), (400, 9, 2), (10_000, 1, 25)],
)
def test_an_update_is_one_launch_for_400_tensors_in_8_groups(runtime, count, groups, expected):
    runtime.fake_clear()
    assert runtime.fake_update(count, 100_000, groups, 0x5EED0) == 0
    lines = launches(runtime)
    assert len(lines) == expected
    assert all("optim_update_partials" in line and "stream=0x5eed0" in line for line in lines)
    assert sum(int(re.search(r"tensors=(\d+)", line)[1]) for line in lines) == count


@pytest.mark.parametrize("count", [1, 44, 45, 145, 146, 400])
def test_a_clipped_step_is_two_launches(runtime, count):
    runtime.fake_clear()
    assert runtime.fake_clip_and_update(count, 100_000, 0x5EED0) == 0
    first, second = launches(runtime)
    assert "grad_stats_partials" in first
    assert "optim_update_partials" in second


def test_a_driver_that_refuses_large_arguments_gets_small_ones(runtime, tmp_path):
    copy = tmp_path / "old.so"  # a library of its own, which has not asked yet
    copy.write_bytes(Path(runtime._name).read_bytes())
    old = ctypes.CDLL(str(copy))
    old.fake_launch.restype = ctypes.c_char_p
    old.fake_update.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    old.fake_driver(12000)
    assert old.fake_update(100, 1000, 1, None) == 0
    assert [re.search(r"tensors=(\d+)", line)[1] for line in launches(old)] == ["44", "44", "12"]
