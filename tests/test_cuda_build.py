"""What nvcc makes of csrc/cuda: no spills, wide loads, no waiting; and the real host code, run."""

import ctypes
import os
import re
import subprocess
import sys

import pytest

from tests import cuda_toolkit
from tests.cuda_toolkit import ARCHITECTURES, ROOT
from zclip import kernel_build

pytestmark = pytest.mark.skipif(not cuda_toolkit.HAS_NVCC, reason="needs nvcc")

REGISTERS = 64  # with 512 threads, two blocks fit a multiprocessor of 65,536 registers
LOADS_IN_FLIGHT = 4
FORMATS = 4


def test_no_kernel_spills_and_two_blocks_fit_every_multiprocessor():
    kernels = cuda_toolkit.kernels()
    assert {k.architecture for k in kernels} == set(ARCHITECTURES)
    for kernel in kernels:
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.registers <= REGISTERS, kernel
        assert kernel.shared_bytes <= 16 * 1024, kernel


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_memory_is_read_and_written_16_bytes_at_a_time(architecture):
    code = cuda_toolkit.machine_code(architecture)
    for capacity in (145, 1340):
        wide = re.findall(r"LDG\.E\.128", code[f"grad_stats_partials<{capacity}>"])
        assert len(wide) >= FORMATS * LOADS_IN_FLIGHT
        for change in ("Scale", "Clamp"):
            rewrite = code[f"rewrite<{capacity}, {change}>"]
            assert len(re.findall(r"LDG\.E\.128", rewrite)) >= FORMATS * LOADS_IN_FLIGHT
            assert len(re.findall(r"STG\.E\.128", rewrite)) >= FORMATS * LOADS_IN_FLIGHT
        assert "LDG.E.128" in code[f"fingerprint_partials<{capacity}>"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loads_are_under_way_before_the_first_is_used(architecture):
    code = cuda_toolkit.machine_code(architecture)["grad_stats_partials<145>"]
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z0-9_.]+)", code)
    memory_or_arithmetic = [o for o in opcodes if o.startswith(("LDG.E.128", "FADD", "DADD"))]
    runs = re.findall(
        r"L+", "".join("L" if o.startswith("LDG") else "a" for o in memory_or_arithmetic)
    )
    assert sum(len(run) >= LOADS_IN_FLIGHT for run in runs) >= 2, runs


# Instructions per 64 bytes of a thread, at most. More than 150 or so would bind B200's pass 1 to
# arithmetic.
PASS_ONE = {"bfloat16": 110, "float16": 110, "float32": 46, "float64": 44}
SCALE = {"bfloat16": 130, "float16": 130, "float32": 32, "float64": 24}
SCALE_WITHOUT_BF16_HARDWARE = {**SCALE, "bfloat16": 330}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_loop_takes_more_instructions_than_its_budget(architecture):
    code = cuda_toolkit.machine_code(architecture)
    scale = SCALE_WITHOUT_BF16_HARDWARE if architecture == "sm_75" else SCALE
    for capacity in (145, 1340):
        for dtype, budget in PASS_ONE.items():
            measured = code[f"grad_stats_partials<{capacity}>"]
            assert cuda_toolkit.shortest_loop(measured, dtype, writes=False) <= budget, dtype
        for dtype, budget in scale.items():
            rewritten = code[f"rewrite<{capacity}, Scale>"]
            assert cuda_toolkit.shortest_loop(rewritten, dtype, writes=True) <= budget, dtype


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_are_read_as_global_memory_and_no_ticket_is_tried_twice(architecture):
    code = cuda_toolkit.machine_code(architecture)["grad_stats_partials<145>"]
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z0-9_.]+)", code)
    assert not [o for o in opcodes if re.match(r"LD\.", o)]  # generic: slower, and unsure
    loops = cuda_toolkit.loops(code)
    assert any(o.startswith("ATOM") and "CAS" in o for o in opcodes)
    assert not [loop for loop in loops if any("CAS" in o for o in loop.opcodes)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_next_chunk_is_under_way_while_a_block_adds_up(architecture):
    """Between the last whole round of a format and its block reduction stand loads."""
    code = cuda_toolkit.machine_code(architecture)["grad_stats_partials<145>"]
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z0-9_.]+)", code)
    first_sum = next(i for i, o in enumerate(opcodes) if o.startswith("SHFL.BFLY"))
    first_round = next(i for i, o in enumerate(opcodes) if o.startswith("LDG.E.128"))
    before = [o for o in opcodes[first_round:first_sum] if o.startswith("LDG.E.128")]
    # The block's first round, that of the loop, and two kinds of rounds that lead to a next chunk.
    assert len(before) >= 4 * LOADS_IN_FLIGHT


def test_the_host_code_neither_waits_nor_copies_nor_allocates():
    symbols = subprocess.run(
        ["nm", "--undefined-only", cuda_toolkit.compile_object()[0]],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    called = set(re.findall(r"U (_*cuda\w+)", symbols))
    assert "cudaGetLastError" in called
    assert not [s for s in called if re.search("Synchronize|Memcpy|Memset|Malloc|Free|Wait", s)]


def test_the_flags_are_those_of_the_wheel():
    assert kernel_build.NVCC == cuda_toolkit.FLAGS


@pytest.fixture(scope="module")
def recording():
    """The launchers as nvcc compiled them, linked to a runtime that records."""
    compiled = cuda_toolkit.compile_object()[0]
    source = ROOT / "tests/fake_cudart.cpp"
    target = compiled.with_suffix(".recording.so")
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,--no-undefined"]
    subprocess.run([*command, str(source), str(compiled), "-o", str(target)], check=True)
    return target


@pytest.fixture(scope="module")
def runtime(recording):
    return load_runtime(recording)


def load_runtime(path):
    library = ctypes.CDLL(str(path))
    library.fake_launch.restype = ctypes.c_char_p
    library.fake_clip.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    return library


def launches_of(runtime, count, numel, stream=0x5EED0):
    runtime.fake_clear()
    assert runtime.fake_clip(count, numel, stream) == 0
    lines = [runtime.fake_launch(i).decode() for i in range(runtime.fake_launches())]
    names = [cuda_toolkit.plain_name(line.split()[0]) for line in lines]
    fields = [dict(re.findall(r"(\w+)=(\w+)", line)) for line in lines]
    return names, fields


@pytest.mark.parametrize(("count", "capacity"), [(1, 145), (145, 145), (150, 1340), (1000, 1340)])
def test_a_step_is_two_launches_on_the_callers_stream(runtime, count, capacity):
    names, fields = launches_of(runtime, count, 1_000_000)
    assert names == [f"grad_stats_partials<{capacity}>", f"rewrite<{capacity}, Scale>"]
    for launch in fields:
        assert launch["stream"] == "0x5eed0"
        assert (launch["block"], launch["shared"]) == ("512", "0")
        assert int(launch["tensors"]) == count
        work = count * -(-1_000_000 // 32768)
        assert int(launch["grid"]) == min(work, 132 * 2)


def test_a_small_step_gets_no_more_blocks_than_chunks(runtime):
    _, fields = launches_of(runtime, 3, 40_000)
    assert [launch["grid"] for launch in fields] == ["6", "6"]


def test_the_device_is_asked_about_itself_once(runtime):
    launches_of(runtime, 2, 10)
    before = runtime.fake_attribute_questions()
    launches_of(runtime, 2, 10)
    assert runtime.fake_attribute_questions() == before


def test_a_driver_that_refuses_large_arguments_gets_small_ones(recording, tmp_path):
    """A runtime of CUDA 12 or 13 may meet a driver of 12.0. It is asked once."""
    copy = tmp_path / recording.name  # a library of its own, which has not asked yet
    copy.write_bytes(recording.read_bytes())
    old = load_runtime(copy)
    old.fake_driver(12000)
    names, fields = launches_of(old, 300, 1000)
    assert set(names) == {"grad_stats_partials<145>", "rewrite<145, Scale>"}
    assert [f["tensors"] for f in fields] == ["145", "145", "10", "10", "145", "145"]
    launches_of(old, 300, 1000)
    assert old.fake_driver_questions() == 1


def test_a_device_that_the_wheel_has_no_code_for_is_known_before_the_first_launch(runtime):
    assert runtime.zclip_has_image() == 1
    runtime.fake_function_error(209)  # cudaErrorNoKernelImageForDevice
    assert runtime.zclip_has_image() == 0
    runtime.fake_function_error(0)


def test_3000_tensors_are_split_and_scaled_in_reverse_order(runtime):
    names, fields = launches_of(runtime, 3000, 100)
    assert [f["tensors"] for f in fields] == ["1340", "1340", "320", "320", "1340", "1340"]
    assert names == ["grad_stats_partials<1340>"] * 3 + ["rewrite<1340, Scale>"] * 3


def test_the_cost_model_is_current():
    from benchmarks import gpu_cost_model

    written = gpu_cost_model.PAGE.read_text()
    assert "was timed on a GPU" in written
    if gpu_cost_model.nvcc_version() not in written:  # another compiler, other registers
        about_the_compiler = r"Compiled by nvcc.*?\n\n\|.*?\n\n"
        parts = [
            re.split(about_the_compiler, text, maxsplit=1, flags=re.DOTALL)
            for text in (written, gpu_cost_model.page())
        ]
        assert parts[0] == parts[1]
    else:
        assert gpu_cost_model.page() == written


def test_the_cost_model_knows_the_size_of_an_entry():
    from benchmarks import gpu_cost_model

    code = cuda_toolkit.cuobjdump("--dump-resource-usage", str(cuda_toolkit.compile_object()[0]))
    measured = set()
    for mangled, constant in re.findall(r"Function (\w+):\s+.*?CONSTANT\[0\]:(\d+)", code):
        name = cuda_toolkit.plain_name(mangled)
        if name.startswith("fingerprint_partials"):
            measured.add((name, int(constant)))
    small, large = ({c for n, c in measured if f"<{n_}>" in n} for n_ in (145, 1340))
    difference = gpu_cost_model.table_bytes(1340) - gpu_cost_model.table_bytes(145)
    assert {b - a for a in small for b in large} & {difference}


LOADED = """
import torch, zclip
from zclip.backends import OF_HOST_MEMORY, OPS, answering, native
assert torch.ops.zclip.native_features() & native.HAS_CUDA
assert [op for op in OPS if answering(op, "cuda") != "native"] == list(OF_HOST_MEMORY)
assert zclip.grad_stats([torch.full((3,), 2.0)])[0, 0] == 12
assert native.devices_without_image() == []
from zclip import backends
backends.fall_back_from_native([0])
assert [op for op in OPS if answering(op, "cuda") != "triton"] == list(OF_HOST_MEMORY)
assert "device 0" in backends.REASONS["triton"]
print("built with CUDA", zclip.BACKEND_REASONS["native"])
"""


def check_build(tmp_path, architectures):
    environment = {
        **os.environ,
        "ZCLIP_BUILD": "cuda",
        "TORCH_CUDA_ARCH_LIST": architectures,
        "PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}",
    }
    library = tmp_path / "library"
    command = [sys.executable, "setup.py", "build", "--build-base", str(tmp_path / "base")]
    done = subprocess.run(
        [*command, "--build-lib", str(library)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    extension = library / "zclip/_C.abi3.so"
    needed = subprocess.run(
        ["readelf", "-d", extension], capture_output=True, text=True, check=True
    ).stdout
    # Without libtorch the weak stream symbol would be null under a torch that has CUDA.
    assert "[libtorch.so]" in needed
    assert "libcudart" not in needed
    weak = subprocess.run(["nm", "-D", extension], capture_output=True, text=True, check=True)
    assert re.search(r" w aoti_torch_get_current_cuda_stream", weak.stdout)
    loaded = subprocess.run(
        [sys.executable, "-c", LOADED], cwd=library, capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    assert "built with CUDA CPU path" in loaded.stdout.replace("loaded, ", "")


def test_the_cuda_extension_builds_and_loads_under_a_torch_without_cuda(tmp_path):
    check_build(tmp_path, "8.0")


@pytest.mark.slow
def test_the_same_with_every_architecture(tmp_path):
    check_build(tmp_path, "8.0;9.0;10.0;12.0+PTX")
