"""What the Triton compiler makes of the kernels, for GPUs that need not be here."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.triton import kernels
from tests.triton.kernels import CASES, PER_DTYPE, PER_LIST, TARGETS, UPDATES, VECTORISED

# A thread moves 16 bytes at a time, and 256 threads share a chunk of 16384 elements.
WIDE_PER_CHUNK = {"float32": 16, "bfloat16": 8, "float16": 8, "float64": 32}
# With more, a multiprocessor's 65,536 registers would not hold two programs of 256 threads.
MOST_REGISTERS = 128


@pytest.fixture(scope="module")
def compiled():
    """Compiled in another process: in this one the interpreter has replaced the compiler."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.triton.kernels"],
        env=environment,
        cwd=kernels.PAGE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES, ids="/".join)
def test_nothing_spills_and_order_is_fixed(compiled, case):
    result = compiled["results"]["/".join(case)]
    assert result["spilled_bytes"] == 0
    assert result["registers"] <= MOST_REGISTERS
    assert result["float_atomics"] == 0
    if not (case[0].startswith("update_") and case[2].startswith("gfx")):
        # AMD's division and square root, rounded to nearest, are made of them.
        assert result["fused_multiply_adds"] == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", WIDE_PER_CHUNK)
@pytest.mark.parametrize("kernel", VECTORISED)
def test_a_full_chunk_moves_in_128_bit_accesses(compiled, kernel, dtype, target):
    result = compiled["results"][f"{kernel}/{dtype}/{target}"]
    # The second reading, of tiny and of huge numbers, is as wide as the first.
    readings = 3 if kernel == "grad_stats_partials" and dtype != "float64" else 1
    assert result["wide_loads"] == readings * WIDE_PER_CHUNK[dtype]
    if kernel != "grad_stats_partials":
        assert result["wide_stores"] >= WIDE_PER_CHUNK[dtype]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", WIDE_PER_CHUNK)
@pytest.mark.parametrize("kernel", UPDATES)
def test_a_full_chunk_of_an_update_moves_in_128_bit_accesses(compiled, kernel, dtype, target):
    """Moments do, and gradients and parameters in the format of the arithmetic."""
    result = compiled["results"][f"{kernel}/{dtype}/{target}"]
    moments = {"adam": 2, "amsgrad": 3}.get(kernel.split(", ")[1], 1)
    is_narrow = dtype in ("bfloat16", "float16")
    assert result["wide_loads"] == moments + (0 if is_narrow else 2)
    assert result["wide_stores"] == moments + (0 if is_narrow else 1)


@pytest.mark.parametrize("target", TARGETS)
def test_the_last_program_to_arrive_sees_what_the_others_wrote(compiled, target):
    assert compiled["results"][f"clip_by_global_norm_finish/-/{target}"]["acquire_release"] == 1


def test_what_is_launched_is_what_was_compiled_and_never_anew(compiled):
    """A new size or setting must not make Triton compile again in the middle of training."""
    assert set(compiled["launched"]) == {name.split(",")[0] for name in PER_DTYPE + PER_LIST}
    for kernel, variants in compiled["launched"].items():
        assert len(variants) == 1, kernel
        for argument, kind in variants[0].items():
            wanted = kernels.TYPES[argument]
            assert kind == (f"{wanted} D" if wanted.startswith("*") else wanted), argument


def test_the_table_in_the_docs_is_current(compiled):
    text = kernels.PAGE.read_text()
    if f"with Triton {compiled['version']};" in text:
        assert text == kernels.page(compiled["results"], compiled["version"])
    else:  # another Triton allocates other registers; the rows must be the same
        fresh = kernels.page(compiled["results"], compiled["version"])
        assert [row.split("|")[1:3] for row in text.splitlines()[6:]] == [
            row.split("|")[1:3] for row in fresh.splitlines()[6:]
        ]


def test_every_kernel_is_in_the_list():
    folder = kernels.PAGE.parents[1] / "zclip/backends/triton"
    written = {
        name
        for path in folder.glob("*.py")
        for name in re.findall(r"^@triton\.jit\([^)]*\)\ndef (\w+)", path.read_text(), re.MULTILINE)
    }
    assert written == {name.split(",")[0] for name in PER_DTYPE + PER_LIST}
