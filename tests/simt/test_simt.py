"""The emulator itself: right kernels pass under every schedule, and each seeded bug is caught."""

import ctypes
import math
import re
import shutil
import subprocess
import sys

import pytest

from tests.simt import build

pytestmark = pytest.mark.skipif(not build.CAN_RUN, reason="needs g++ on x86-64")

SELF_TEST = build.HERE / "self_test.cpp"
RIGHT_KERNELS = ["sums", "hand_over", "warp_rotate", "copy_vectors", "ticket_sum", "scale_rows"]
ORDERS = ["forward", "reverse", "random"]

RIGHT, WRONG_RESULT, OBJECTION = 0, 1, 2  # exit statuses of self_test


def run(sanitizer, kernel, bug="none", order="random", first_seed=0, seeds=1, numel=None):
    if numel is None:
        numel = 700 if sanitizer == "tsan" else 1999  # TSan needs half a millisecond per thread
    program = build.build_program(SELF_TEST, sanitizer)
    arguments = [kernel, bug, order, str(first_seed), str(seeds), str(numel)]
    return subprocess.run(
        [str(program), *arguments],
        capture_output=True,
        text=True,
        env=build.environment(sanitizer),
        check=False,
    )


def outcome(result):
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", RIGHT_KERNELS)
def test_a_right_kernel_passes_under_every_schedule(kernel, order):
    result = run("plain", kernel, order=order, seeds=200 if order == "random" else 1)
    assert result.returncode == RIGHT, outcome(result)


@pytest.mark.parametrize("numel", [1, 31, 32, 33, 127, 128, 129, 300, 301])
@pytest.mark.parametrize("kernel", ["sums", "ticket_sum"])
def test_a_right_kernel_passes_at_every_size(kernel, numel):
    result = run("asan", kernel, seeds=3, numel=numel)
    assert result.returncode == RIGHT, outcome(result)


@pytest.mark.parametrize("sanitizer", ["asan", "tsan"])
@pytest.mark.parametrize("kernel", RIGHT_KERNELS)
def test_no_sanitizer_complains_about_a_right_kernel(kernel, sanitizer):
    if (kernel, sanitizer) == ("scale_rows", "tsan"):
        pytest.skip("4,096 threads that share nothing take TSan seconds; the wide sweep has them")
    result = run(sanitizer, kernel, seeds=20 if sanitizer == "asan" else 1)
    assert result.returncode == RIGHT, outcome(result)


# Bugs that random schedules turn into wrong results without any sanitizer. The rarest needs a warp
# that runs far ahead of the others; a scheduler that mixes too evenly finds it in few seeds.
@pytest.mark.parametrize(
    ("kernel", "bug"),
    [
        ("sums", "missing_syncthreads"),
        ("sums", "missing_reuse_barrier"),
        ("hand_over", "read_too_early"),
        ("warp_rotate", "missing_syncwarp"),
        ("ticket_sum", "missing_ticket_reset"),
    ],
)
def test_a_missing_barrier_gives_wrong_results(kernel, bug):
    result = run("plain", kernel, bug, seeds=100)
    assert result.returncode == WRONG_RESULT, outcome(result)
    assert int(re.search(r"wrong (\d+)", result.stdout)[1]) >= 40, outcome(result)


def line_of(text):
    source = (build.HERE / "sample_kernels.cuh").read_text().splitlines()
    (line,) = [number for number, code in enumerate(source, 1) if text in code]
    return f"sample_kernels.cuh:{line}"


@pytest.mark.parametrize("order", ORDERS)
def test_a_deadlock_names_the_lines_where_threads_wait(order):
    result = run("plain", "sums", "divergent_shuffle", order)
    assert result.returncode == OBJECTION, outcome(result)
    shuffle = line_of("v += __shfl_down_sync")
    assert f"thread 0 to 3: at __shfl_down_sync (mask 0xffffffff) at {shuffle}" in result.stdout
    assert "thread 4 to 127: at __syncthreads at sample_kernels.cuh:" in result.stdout


@pytest.mark.parametrize("order", ORDERS)
def test_threads_at_different_barriers_are_reported(order):
    result = run("plain", "sums", "divergent_barrier", order)
    assert result.returncode == OBJECTION, outcome(result)
    assert "stand at different barriers" in result.stdout
    assert line_of("if (warp == 0) __syncthreads();") in result.stdout


def test_a_write_past_a_shared_array_is_seen_without_a_sanitizer():
    result = run("plain", "sums", "shared_off_by_one")
    assert result.returncode == OBJECTION, outcome(result)
    assert "write outside shared array per_warp" in result.stdout


@pytest.mark.parametrize(
    ("bug", "report"),
    [
        ("global_off_by_one", "heap-buffer-overflow"),
        ("shared_off_by_one", "use-after-poison"),
        ("shared_read_off_by_one", "use-after-poison"),
    ],
)
def test_an_access_out_of_bounds_by_one_is_seen_by_asan(bug, report):
    result = run("asan", "sums", bug)
    assert result.returncode == build.ADDRESS_ERROR, outcome(result)
    assert f"AddressSanitizer: {report}" in result.stderr


def test_a_misaligned_vector_load_is_seen_by_ubsan():
    result = run("asan", "copy_vectors", "misaligned_load")
    assert result.returncode not in (RIGHT, WRONG_RESULT, OBJECTION), outcome(result)
    assert "misaligned address" in result.stderr


# One seed each: TSan follows what is ordered, not what happened to go wrong.
@pytest.mark.parametrize("order", ["forward", "random"])
@pytest.mark.parametrize(
    ("kernel", "bug"),
    [
        ("sums", "missing_syncthreads"),
        ("sums", "missing_reuse_barrier"),
        ("hand_over", "read_too_early"),
        ("warp_rotate", "missing_syncwarp"),
        ("warp_rotate", "shuffle_for_syncwarp"),
        ("ticket_sum", "missing_release"),
        ("ticket_sum", "early_release"),
        ("ticket_sum", "missing_acquire"),
        ("ticket_sum", "missing_last_barrier"),
        ("ticket_sum", "plain_ticket"),
    ],
)
def test_a_missing_barrier_or_fence_is_a_race_under_tsan(kernel, bug, order):
    result = run("tsan", kernel, bug, order)
    assert result.returncode == build.RACE, outcome(result)
    assert "ThreadSanitizer: data race" in result.stderr
    assert "sample_kernels.cuh" in result.stderr


def test_a_schedule_is_reproduced_by_its_seed():
    first, again, other = (run("plain", "ticket_sum", first_seed=s).stdout for s in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.slow
@pytest.mark.parametrize("kernel", RIGHT_KERNELS)
@pytest.mark.parametrize(("sanitizer", "seeds"), [("plain", 5000), ("asan", 300), ("tsan", 20)])
def test_a_right_kernel_passes_a_wide_sweep(kernel, sanitizer, seeds):
    result = run(sanitizer, kernel, first_seed=1000, seeds=seeds)
    assert result.returncode == RIGHT, outcome(result)


SCRIPT = """
import ctypes, sys
from tests.simt import build
spellings = build.load_module(build.HERE / "spellings.cpp", sys.argv[1])
x, out = ((ctypes.c_float * int(sys.argv[2]))() for _ in range(2))
spellings.warp_rotate(ctypes.addressof(x), ctypes.addressof(out), sys.argv[3] == "bug")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizer", "numel", "bug", "status"),
    [
        ("asan", 128, "none", RIGHT),
        ("asan", 127, "none", build.ADDRESS_ERROR),
        ("tsan", 128, "none", RIGHT),
        ("tsan", 128, "bug", build.RACE),
    ],
)
def test_sanitizers_see_kernels_called_from_python(sanitizer, numel, bug, status):
    build.build_module(build.HERE / "spellings.cpp", sanitizer)  # g++ runs without the preload
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, sanitizer, str(numel), bug],
        capture_output=True,
        text=True,
        cwd=build.ROOT,
        env=build.environment(sanitizer, for_python=True) | {"PYTHONMALLOC": "malloc"},
        check=False,
    )
    assert result.returncode == status, outcome(result)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("header", ["sample_kernels.cuh", "spelling_kernels.cuh"])
def test_the_same_kernels_are_valid_cuda(header, tmp_path):
    source = tmp_path / "kernels.cu"
    source.write_text(
        f'#include "{build.HERE / header}"\n'
        "void use(float* x) { (void)zclip::cuda::launch(%s, 1, 64, nullptr, %s); }\n"
        % {
            "sample_kernels.cuh": ("samples::warp_rotate<samples::Bug::kNone>", "x, x"),
            "spelling_kernels.cuh": ("samples::unwritten_shared", "x"),
        }[header]
    )
    command = ["nvcc", "-std=c++17", "-arch=sm_80", "-c", str(source), "-o", "kernels.o"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(params=ORDERS)
def spellings(request):
    module = build.load_module(build.HERE / "spellings.cpp")
    module.set_schedule(request.param, seed=1)
    return module


def zeros(ctype, count):
    array = (ctype * count)()
    return array, ctypes.addressof(array)


def test_shuffles_and_ballots_return_what_cuda_documents(spellings):
    out, address = zeros(ctypes.c_int, 64 * spellings.ANSWERS)
    spellings.shuffles(address)
    thirds = sum(1 << lane for lane in range(0, 32, 3))
    for thread in range(64):
        lane = thread % 32
        warp = thread // 32
        row = out[thread * spellings.ANSWERS : (thread + 1) * spellings.ANSWERS]
        xor_of_segment = lane ^ 5  # a lane of a later segment cannot be read, an earlier one can
        assert row == [
            lane + 3 if lane + 3 < 32 else lane,
            lane + 3 if lane % 8 + 3 < 8 else lane,
            lane - 3 if lane >= 3 else lane,
            lane ^ 16,
            lane if xor_of_segment // 4 > lane // 4 else xor_of_segment,
            7,
            lane // 8 * 8 + 1,
            ctypes.c_int(thirds).value,
            int(warp == 1),
            int(warp == 0),
            0b10101010 if lane < 8 else ctypes.c_int(0xFFFFFF00).value,
            2 * (lane ^ 1) + 1,
        ]


@pytest.mark.parametrize("stays", [1, 32, 33, 96])
def test_votes_of_a_block_ignore_threads_that_left(spellings, stays):
    out, address = zeros(ctypes.c_int, 96 * spellings.ANSWERS)
    spellings.votes(96, stays, address)
    for thread in range(stays):
        row = out[thread * spellings.ANSWERS :][:5]
        assert row == [1, 0, 1, 0, stays // 2]
    assert not any(out[stays * spellings.ANSWERS :])


def test_atomics_count_every_thread_once(spellings):
    blocks, threads = 5, 96
    total = blocks * threads
    (counter, ring, wide, highest, bits) = arrays = [
        zeros(ctype, 1)
        for ctype in (ctypes.c_int, ctypes.c_uint, ctypes.c_ulonglong, ctypes.c_int, ctypes.c_uint)
    ]
    spellings.counters_kernel(blocks, threads, *(address for _, address in arrays))
    assert counter[0][0] == total // 2 * 3 - total // 2
    assert ring[0][0] == total % 7
    assert wide[0][0] == total << 32
    assert highest[0][0] == total - 1
    assert bits[0][0] == 0xFFFFFFFF
    assert spellings.counters()["blocks"] == blocks
    assert spellings.counters()["launches"] == 1


def test_every_thread_of_a_three_dimensional_grid_runs_once(spellings):
    cells, address = zeros(ctypes.c_int, 6 * 16)
    spellings.places(address)
    assert list(cells) == [1] * (6 * 16)


def test_shared_memory_begins_as_nan(spellings):
    out, address = zeros(ctypes.c_float, 65)
    spellings.unwritten_shared(address)
    assert all(math.isnan(x) for x in out[:64])
    assert out[64] == 10.0


def test_misuse_is_refused_with_a_reason(spellings):
    out, address = zeros(ctypes.c_int, 32)
    with pytest.raises(RuntimeError, match="no room in 48 KB of shared memory for second"):
        spellings.too_much_shared(address)
    with pytest.raises(RuntimeError, match=r"mask names lanes that the block lacks: .*\.cuh:\d+"):
        spellings.lanes_outside(16, 0xFFFFFFFF, address)
    with pytest.raises(RuntimeError, match="caller is not in the mask"):
        spellings.lanes_outside(32, 0x0000FFFF, address)
    with pytest.raises(ValueError, match="1 to 1024 threads"):
        spellings.lanes_outside(2048, 0xFFFFFFFF, address)
    with pytest.raises(ValueError, match="forward, reverse or random"):
        spellings.set_schedule("sideways")
    spellings.lanes_outside(16, 0x0000FFFF, address)  # an error leaves nothing behind
    assert list(out[:16]) == [lane ^ 1 for lane in range(16)]
