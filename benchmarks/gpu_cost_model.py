"""Writes docs/gpu-cost-model.md: what a step should cost on a GPU, by the compiled kernels.

    python -m benchmarks.gpu_cost_model           writes the page
    python -m benchmarks.gpu_cost_model --check   says whether the page is current

Nothing here is a measurement. Registers and shared memory are what ptxas says; launches and
arguments are what the tests count; times are bytes over bandwidth, plus the assumptions below.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from tests import cuda_toolkit

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/gpu-cost-model.md"

# Assumptions, printed on the page.
REACHED_BANDWIDTH = 0.9  # of the data sheet's; what good streaming kernels reach
LAUNCH_US = 2.5  # between two dependent kernels of a stream, launched ahead of time
FINISH_GB_PER_S = 80.0  # what one multiprocessor reads from the second-level cache
FINISH_US_PER_TENSOR = 0.02  # rows added up by one thread
SYNC_US = 10.0  # a host that waits for a scalar; the emptied queue costs more

SLOT_BYTES = 16
REGISTERS, RESERVED_SHARED = 65536, 1024  # per multiprocessor; per block


@dataclass(frozen=True)
class Device:
    name: str
    architecture: str
    terabytes_per_s: float
    multiprocessors: int
    threads: int  # per multiprocessor
    shared_kb: int  # per multiprocessor


DEVICES = [
    Device("A100 SXM 80 GB", "sm_80", 2.039, 108, 2048, 164),
    Device("H100 SXM", "sm_90", 3.35, 132, 2048, 228),
    Device("B200", "sm_100", 8.0, 148, 2048, 228),
]


@dataclass(frozen=True)
class Model:
    name: str
    tensors: list[int]  # elements of each


def transformer(name, layers, width, vocabulary, *, positions=0, gated_width=0, biases=True):
    """A decoder's parameter tensors; gated_width > 0 means Llama's block, else GPT's."""
    tensors = [vocabulary * width] + ([positions * width] if positions else [])
    for _ in range(layers):
        if gated_width:
            tensors += [width * width] * 4 + [width * gated_width] * 3 + [width] * 2
        else:
            tensors += [3 * width * width, width * width, 4 * width * width, 4 * width * width]
            tensors += [3 * width, width, 4 * width, width] if biases else []
            tensors += [width] * 4
    tensors += [width] + ([] if gated_width else [width])
    return Model(name, tensors + ([vocabulary * width] if gated_width else []))


MODELS = [
    transformer("GPT-2 125M", 12, 768, 50257, positions=1024),
    transformer("GPT-3 XL 1.3B", 24, 2048, 50257, positions=2048),
    transformer("Llama 7B", 32, 4096, 32000, gated_width=11008),
]


def constant(file: str, pattern: str) -> int:
    """Read a number from the source, so that the page cannot drift from it."""
    return int(re.search(pattern, (ROOT / "csrc" / file).read_text())[1])


CHUNK = 2 * constant("math/grad_stats.h", r"kChunk = (\d+);")
SMALL = constant("cuda/tensor_table.cuh", r"SmallTable = TensorTable<(\d+)>")
LARGE = constant("cuda/tensor_table.cuh", r"LargeTable = TensorTable<(\d+)>")
THREADS = constant("cuda/block_join.cuh", r"kThreads = (\d+);")
BLOCKS = constant("cuda/launch_grid.cuh", r"kBlocksPerMultiprocessor = (\d+);")
ENTRY_BYTES = 24


def table_bytes(count: int) -> int:
    return 8 + ENTRY_BYTES * (SMALL if count <= SMALL else LARGE)


@dataclass(frozen=True)
class Rival:
    """How a library clips: passes over memory and launches."""

    name: str
    reads_and_writes: int  # per element, whether clipped or not
    tensors_per_launch: int
    chunks_per_launch: int
    small_launches: int
    syncs: int

    def launches(self, model: Model) -> int:
        chunks = sum(ceil(n / 65536) for n in model.tensors)
        one_pass = max(
            ceil(len(model.tensors) / self.tensors_per_launch),
            ceil(chunks / self.chunks_per_launch),
        )
        return 2 * one_pass + self.small_launches


RIVALS = [
    Rival("torch foreach, CUDA 13", 3, 770, 2240, 10, 0),
    Rival("torch foreach, CUDA 12", 3, 110, 320, 10, 0),
    Rival("TransformerEngine", 3, 110, 320, 6, 0),
    Rival("apex", 3, 110, 320, 6, 1),
]


def milliseconds(device: Device, bytes_moved: float, launches: int, other_us: float) -> float:
    stream = bytes_moved / (device.terabytes_per_s * 1e12 * REACHED_BANDWIDTH) * 1e3
    return stream + (launches * LAUNCH_US + other_us) / 1e3


def finish_us(model: Model) -> float:
    slots = sum(ceil(n / CHUNK) for n in model.tensors)
    return slots * SLOT_BYTES / FINISH_GB_PER_S / 1e3 + len(model.tensors) * FINISH_US_PER_TENSOR


def resident_blocks(device: Device, kernel: cuda_toolkit.Kernel) -> int:
    registers = ceil(kernel.registers / 8) * 8 * THREADS
    shared = kernel.shared_bytes + RESERVED_SHARED
    return min(REGISTERS // registers, device.threads // THREADS, device.shared_kb * 1024 // shared)


def compiled_table() -> list[str]:
    """Registers, shared memory and occupancy of the two kernels of a step."""
    lines = [
        "| device | kernel | registers | spilled | shared bytes | blocks per multiprocessor | "
        "threads of those it holds |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for device in DEVICES:
        for kernel in cuda_toolkit.kernels():
            if kernel.architecture != device.architecture:
                continue
            if kernel.name not in {f"grad_stats_partials<{LARGE}>", f"rewrite<{LARGE}, Scale>"}:
                continue
            blocks = min(BLOCKS, resident_blocks(device, kernel))
            share = blocks * THREADS / device.threads
            lines.append(
                f"| {device.name} | `{kernel.name}` | {kernel.registers} | "
                f"{kernel.spilled_bytes} | {kernel.shared_bytes} | {blocks} | {share:.0%} |"
            )
    return lines


def time_table(element_bytes: int) -> list[str]:
    lines = [
        "| model | device | ours, nothing to clip | ours, clipped | "
        + " | ".join(rival.name for rival in RIVALS)
        + " |",
        "|---|---|" + "---:|" * (2 + len(RIVALS)),
    ]
    for model in MODELS:
        numel = sum(model.tensors)
        for device in DEVICES:
            cells = [
                milliseconds(device, passes * numel * element_bytes, 2, finish_us(model))
                for passes in (1, 3)
            ]
            for rival in RIVALS:
                moved = rival.reads_and_writes * numel * element_bytes
                waits = rival.syncs * SYNC_US
                cells.append(milliseconds(device, moved, rival.launches(model), waits))
            row = " | ".join(f"{cell:.2f}" for cell in cells)
            lines.append(f"| {model.name} | {device.name} | {row} |")
    return lines


def launch_table() -> list[str]:
    lines = [
        "| model | tensors | parameters | chunks | our launches | argument bytes | "
        + " | ".join(f"{rival.name}" for rival in RIVALS)
        + " |",
        "|---|" + "---:|" * (5 + len(RIVALS)),
    ]
    for model in MODELS:
        count = len(model.tensors)
        chunks = sum(ceil(n / CHUNK) for n in model.tensors)
        others = " | ".join(str(rival.launches(model)) for rival in RIVALS)
        lines.append(
            f"| {model.name} | {count} | {sum(model.tensors) / 1e9:.3f} G | {chunks:,} | "
            f"{2 * ceil(count / LARGE)} | {table_bytes(count):,} | {others} |"
        )
    return lines


def nvcc_version() -> str:
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True)
    return re.search(r"V([\d.]+)", text.stdout)[1]


PROSE = """\
# What clipping should cost on a GPU

**Nothing on this page was timed on a GPU.** No GPU was at hand. Registers and shared memory are
what ptxas reports; launches and arguments are counted by the tests; times are arithmetic. The
page is written by `python -m benchmarks.gpu_cost_model`, and a test fails if it is not current.

## Bytes

A gradient element of b bytes costs b where nothing is to be clipped: pass 1 reads it, pass 2 sees
a coefficient of 1 and returns. Clipped, it costs 3b: read, read, write. A refused step costs 2b:
zeros are written without reading. A chunk with NaN, Inf or only tiny numbers is read twice by
pass 1, the second time from the cache. Scratch memory is {slot} bytes for every {chunk:,}
elements. The others move 3b always.

## Launches and arguments

One launch carries up to {small} tensors in 4 KB of arguments or {large:,} in 32 KB (CUDA 12.1 and
later), {entry} bytes each. No copy to the device, no memset, no host wait. `agc_` takes five
launches; a gradient with gaps adds one for the copy, and one more if it is written back.

{launch_table}

Launches of the others are worked out from their tensors and chunks per launch, plus their small
kernels (stack, norm, add, divide, clamp and the like); apex waits for the host once a step,
because it hands a device scalar to a `float`.

## Occupancy

Blocks of {threads} threads, {blocks} per multiprocessor by design: each thread has 4 loads of 16
bytes under way, {in_flight} KB per multiprocessor. Bandwidth times a latency of 0.8 µs asks for
{wanted}.

Compiled by nvcc {nvcc}:

{compiled_table}

## Predicted times, milliseconds

Assumed: {reached:.0%} of the data sheet's bandwidth; {launch_us} µs from one kernel to the next;
the last block reads slots at {finish_rate:.0f} GB/s and needs {per_tensor:.0f} ns per tensor; a
host wait costs {sync_us:.0f} µs, not counting the queue it empties. The second-level cache is
ignored, which is unkind to all where gradients fit it.

bfloat16 gradients:

{two_bytes}

float32 gradients:

{four_bytes}

## What could be wrong

- The last block works alone: for the 7B model that is {finish:.0f} µs by the assumptions above,
  in every step.
- 64 registers are the limit for two blocks; a compiler that needs more would spill, and a test
  would say so.
- Finding a chunk's tensor by binary search is not free: ten steps for every {chunk:,} elements.
- The host needs about 0.5 µs per tensor to build the table, while the device works.
"""


def page() -> str:
    """Return the text of the page."""
    wanted = [
        f"{d.terabytes_per_s * 1e12 * 0.8e-6 / d.multiprocessors / 1024:.0f} KB ({d.name})"
        for d in DEVICES
    ]
    return PROSE.format(
        slot=SLOT_BYTES,
        chunk=CHUNK,
        small=SMALL,
        large=LARGE,
        entry=ENTRY_BYTES,
        launch_table="\n".join(launch_table()),
        threads=THREADS,
        blocks=BLOCKS,
        in_flight=4 * 16 * THREADS * BLOCKS // 1024,
        wanted=", ".join(wanted),
        nvcc=nvcc_version(),
        compiled_table="\n".join(compiled_table()),
        reached=REACHED_BANDWIDTH,
        launch_us=LAUNCH_US,
        finish_rate=FINISH_GB_PER_S,
        per_tensor=FINISH_US_PER_TENSOR * 1e3,
        sync_us=SYNC_US,
        two_bytes="\n".join(time_table(2)),
        four_bytes="\n".join(time_table(4)),
        finish=finish_us(MODELS[-1]),
    )


def main() -> int:
    text = page()
    if "--check" in sys.argv:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
