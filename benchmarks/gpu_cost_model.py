"""Writes docs/gpu-cost-model.md: what a step should cost on a GPU, by the compiled kernels.

    python -m benchmarks.gpu_cost_model           writes the page
    python -m benchmarks.gpu_cost_model --check   says whether the page is current

Nothing here is a measurement. Registers, shared memory and instructions are what the compiler
made; launches and arguments are what the tests count; times are a model of streaming, of the tail
after the last byte and of launches, with the assumptions below.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path

from tests import cuda_toolkit

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/gpu-cost-model.md"

# Assumptions, printed on the page.
REACHED_BANDWIDTH = 0.93  # of the data sheet's; what DRAM itself gives to endless reading
SHARPNESS = 4  # of the bend where too few loads in flight begin to cost; fits an event simulation
LAUNCH_US = 2.5  # between two dependent kernels of a stream, launched ahead of time
SYNC_US = 10.0  # a host that waits for a scalar; the emptied queue costs more
CACHE_SHARE = 0.6  # of the second-level cache that holds what was read last

# Cycles.
BLOCK_SUM = 600  # two barriers and ten dependent shuffles and additions of doubles
LOOK_UP = 1000  # of a chunk's tensor: a binary search of dependent loads
SLOT_ROUND = 350  # four loads of a slot from the second-level cache, under way together
CACHE_BYTES = 64  # per cycle, from the second-level cache to one multiprocessor
ROW_ALONE = 310  # one thread that loads a row, tests it and adds it
ROW_NORM = 250  # more, if it also takes a square root
ROW_ADDED = 12  # one dependent addition of a row that is staged in shared memory
ATOMIC_US = 0.0025  # one of many on the same address

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
    gigahertz: float
    latency_us: float  # of memory
    atomic_us: float  # round trip of an atomic that others contend for
    cache_mb: int  # second level

    def us(self, cycles: float) -> float:
        return cycles / self.gigahertz / 1e3


DEVICES = [
    Device("A100 SXM 80 GB", "sm_80", 2.039, 108, 2048, 164, 1.41, 0.60, 0.245, 40),
    Device("H100 SXM", "sm_90", 3.35, 132, 2048, 228, 1.755, 0.70, 0.27, 50),
    Device("B200", "sm_100", 8.0, 148, 2048, 228, 1.85, 0.85, 0.30, 126),
    Device("RTX 4090", "sm_89", 1.008, 128, 1536, 100, 2.52, 0.65, 0.24, 72),
]
DTYPES = {2: "bfloat16", 4: "float32"}


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
    Model("7B of experts in 10,000 tensors", [673_800] * 10_000),
]


def constant(file: str, pattern: str) -> int:
    """Read a number from the source, so that the page cannot drift from it."""
    return int(re.search(pattern, (ROOT / "csrc" / file).read_text())[1])


CHUNK = 2 * constant("math/grad_stats.h", r"kChunk = (\d+);")
SLOTS_PER_WARP = constant("cuda/finish.cuh", r"kSlotsPerWarp = (\d+);")
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


@dataclass(frozen=True)
class Kernels:
    """What the two kernels of a step do, as far as their time depends on it."""

    name: str
    pass_one: dict[str, dict[str, float]]  # instructions per 64 bytes, by architecture and dtype
    scale: dict[str, dict[str, float]]
    streams: bool  # loads are under way while a chunk is looked up and added up
    shares_tail: bool  # ticket by one atomic, rows by all threads, large tensors by the block
    backwards: bool


def by_architecture(kernel: str, *, writes: bool) -> dict[str, dict[str, float]]:
    """Return the instructions per 64 bytes of a kernel as it is compiled now."""
    found = {}
    for device in DEVICES:
        code = cuda_toolkit.machine_code(device.architecture)[kernel]
        found[device.architecture] = {
            dtype: cuda_toolkit.shortest_loop(code, dtype, writes=writes)
            for dtype in DTYPES.values()
        }
    return found


def before() -> Kernels:
    """Version 0.1; its instructions were counted in its machine code by nvcc 13.0.88."""
    architectures = [device.architecture for device in DEVICES]
    pass_one = {a: {"bfloat16": 137.0, "float32": 46.0} for a in architectures}
    # 385 of bfloat16's 464 were integer instructions, which take two cycles each.
    scale = {a: {"bfloat16": 464.0 + 385.0, "float32": 76.0} for a in architectures}
    return Kernels("0.1", pass_one, scale, False, False, False)


@cache
def now() -> Kernels:
    pass_one = by_architecture(f"grad_stats_partials<{LARGE}>", writes=False)
    scale = by_architecture(f"rewrite<{LARGE}, Scale>", writes=True)
    return Kernels("0.2", pass_one, scale, True, True, True)


def reached(device: Device, supply: float) -> float:
    """Return the bytes per second that memory gives to kernels that could take `supply`."""
    memory = device.terabytes_per_s * 1e12 * REACHED_BANDWIDTH
    return (supply**-SHARPNESS + memory**-SHARPNESS) ** (-1 / SHARPNESS)


def reading_rate(device: Device, kernels: Kernels, element_bytes: int) -> float:
    """Return the bytes per second that pass 1 reads: loads under way over how long they take.

    A round of loads takes the latency, and then the instructions of the block's warps that share a
    scheduler; a block whose loads do not stream also stops between two chunks.
    """
    instructions = kernels.pass_one[device.architecture][DTYPES[element_bytes]]
    warps = THREADS / 32 / 4
    round_us = device.latency_us + device.us((warps + 1) / 2 * instructions)
    rounds = CHUNK * element_bytes / (THREADS * 64)
    stops_us = 0.0 if kernels.streams else device.us(LOOK_UP + BLOCK_SUM)
    chunk_us = rounds * round_us + stops_us
    blocks = BLOCKS * device.multiprocessors
    return reached(device, blocks * CHUNK * element_bytes / chunk_us * 1e6)


def scaling_rate(device: Device, kernels: Kernels, element_bytes: int) -> float:
    """Return the bytes per second, read and written, of pass 2."""
    instructions = kernels.scale[device.architecture][DTYPES[element_bytes]]
    per_cycle = 4 / instructions * 2048 * 2  # four schedulers, 64 bytes of 32 threads, both ways
    return reached(device, per_cycle * device.multiprocessors * device.gigahertz * 1e9)


def finish_us(device: Device, kernels: Kernels, model: Model) -> float:
    """Return how long the last block takes to make rows of slots."""
    slots = [ceil(n / CHUNK) for n in model.tensors]
    warps = THREADS // 32
    large = [s for s in slots if kernels.shares_tail and s > SLOTS_PER_WARP]
    small = [ceil(s / 128) * SLOT_ROUND + BLOCK_SUM / 2 for s in slots if s not in large]
    by_warps = max([sum(small) / warps, *small]) if small else 0.0
    by_block = sum(ceil(s / (4 * THREADS)) * SLOT_ROUND + 3 * BLOCK_SUM for s in large)
    memory = sum(slots) * SLOT_BYTES / CACHE_BYTES
    return device.us(max(by_warps + by_block, memory))


def tail_us(device: Device, kernels: Kernels, model: Model, *, norms: bool = False) -> float:
    """Return what comes after the last byte: tickets, rows and the rule, with the rest idle."""
    launches = ceil(len(model.tensors) / LARGE)
    blocks = BLOCKS * device.multiprocessors
    count = len(model.tensors)
    if kernels.shares_tail:
        ticket = 2 * device.atomic_us + 2 * blocks * ATOMIC_US
        rows = count * ROW_ADDED * (2 if norms else 1) + 5 * BLOCK_SUM
    else:
        ticket = blocks * device.atomic_us
        rows = count * (ROW_ALONE + (ROW_ALONE + ROW_NORM if norms else 0))
    return launches * ticket + finish_us(device, kernels, model) + device.us(rows)


def step_ms(
    device: Device,
    kernels: Kernels,
    model: Model,
    element_bytes: int,
    *,
    clipped: bool,
    norms: bool = False,
) -> float:
    """Return the time of a whole step: two passes, the tail between them, and launches."""
    total = sum(model.tensors) * element_bytes
    launches = 2 * ceil(len(model.tensors) / LARGE)
    stream = total / reading_rate(device, kernels, element_bytes)
    if clipped:
        kept = min(total, CACHE_SHARE * device.cache_mb * 1e6) if kernels.backwards else 0.0
        stream += (2 * total - kept) / scaling_rate(device, kernels, element_bytes)
    return (
        stream * 1e3 + (launches * LAUNCH_US + tail_us(device, kernels, model, norms=norms)) / 1e3
    )


def milliseconds(device: Device, bytes_moved: float, launches: int, other_us: float) -> float:
    """Return the time of somebody else's step, all of whose kernels stream perfectly."""
    stream = bytes_moved / (device.terabytes_per_s * 1e12 * REACHED_BANDWIDTH) * 1e3
    return stream + (launches * LAUNCH_US + other_us) / 1e3


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
                step_ms(device, now(), model, element_bytes, clipped=clipped)
                for clipped in (False, True)
            ]
            for rival in RIVALS:
                moved = rival.reads_and_writes * numel * element_bytes
                waits = rival.syncs * SYNC_US
                cells.append(milliseconds(device, moved, rival.launches(model), waits))
            row = " | ".join(f"{cell:.2f}" for cell in cells)
            lines.append(f"| {model.name} | {device.name} | {row} |")
    return lines


def change_table() -> list[str]:
    """What became of a step in bfloat16 since version 0.1, by the same model."""
    columns = ("nothing to clip", "clipped", "tail, us", "AdaGC's tail, us")
    lines = [
        "| model | device | " + " | ".join(f"{c}, 0.1 | 0.2" for c in columns) + " |",
        "|---|---|" + "---:|" * (2 * len(columns)),
    ]
    for model in MODELS:
        for device in DEVICES:
            cells = []
            for clipped in (False, True):
                for kernels in (before(), now()):
                    cells.append(f"{step_ms(device, kernels, model, 2, clipped=clipped):.2f}")
            for norms in (False, True):
                for kernels in (before(), now()):
                    cells.append(f"{tail_us(device, kernels, model, norms=norms):.0f}")
            lines.append(f"| {model.name} | {device.name} | {' | '.join(cells)} |")
    return lines


def rate_table() -> list[str]:
    """Shares of the data sheet's bandwidth, and the instructions that they depend on."""
    lines = [
        "| device | dtype | pass 1, instructions, 0.1 | 0.2 | share of bandwidth, 0.1 | 0.2 | "
        "pass 2, instructions, 0.1 | 0.2 | share of bandwidth, 0.1 | 0.2 |",
        "|---|---|" + "---:|" * 8,
    ]
    for device in DEVICES:
        for element_bytes, dtype in DTYPES.items():
            cells = []
            for counts, rate in (("pass_one", reading_rate), ("scale", scaling_rate)):
                both = (before(), now())
                cells += [f"{getattr(k, counts)[device.architecture][dtype]:.0f}" for k in both]
                peak = device.terabytes_per_s * 1e12
                cells += [f"{rate(device, k, element_bytes) / peak:.0%}" for k in both]
            lines.append(f"| {device.name} | {dtype} | {' | '.join(cells)} |")
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

**Nothing on this page was timed on a GPU.** No GPU was available. Registers, shared memory and
instructions are read from what nvcc compiled; launches and arguments are counted by the tests;
times are arithmetic. `python -m benchmarks.gpu_cost_model` writes the page, and a test fails if it
is not current.

## Bytes

For a gradient element of b bytes:

| step | bytes | why |
|---|---|---|
| nothing to clip | b | pass 1 reads it; pass 2 sees a coefficient of 1 and returns |
| clipped | 3b | read, read, write; pass 2 walks backwards and finds some of it in the cache |
| skipped | 2b | zeros are written without reading |
| torch, TransformerEngine, apex | 3b | always |
| Megatron's host path | b or 3b | the host waits for the norm in every step |

A chunk with NaN, Inf, zeros or only tiny or huge numbers is read twice by pass 1, the second time
from the cache. Scratch memory is {slot} bytes for every {chunk:,} elements.

## Launches and arguments

One launch carries up to {small} tensors in 4 KB of arguments or {large:,} in 32 KB (CUDA 12.1 and
later, with a driver of that age), {entry} bytes each. There is no copy to the device, no memset and
no host sync. `agc_` takes five launches. A gradient with gaps adds one launch for the copy, and one
more if it is written back.

{launch_table}

Launches of the others are computed from their tensors and chunks per launch, plus their small
kernels (stack, norm, add, divide, clamp). In apex, the host waits once a step, because a device
scalar is passed as a `float`.

## Occupancy and instructions

Blocks have {threads} threads, {blocks} per multiprocessor by design. Each thread has 4 loads of 16
bytes in flight, {in_flight} KB per multiprocessor, also between two chunks. Bandwidth times latency
requires {wanted}.

Compiled by nvcc {nvcc}:

{compiled_table}

Instructions of the innermost loops per 64 bytes of a thread, and the share of the data sheet's
bandwidth that a pass can reach with them ({reached:.0%} is the most that DRAM gives):

{rate_table}

## Predicted times, milliseconds

Assumptions:

- A round of loads takes the memory's latency ({latencies} µs) and the instructions of the warps
  that share a scheduler.
- {launch_us} µs pass from one kernel to the next.
- After the last byte, version 0.1 takes {cas} µs for each block's ticket,
  because each success makes all others try again. Version 0.2 takes {atomic} ns for each of two
  atomics.
- A row takes {alone} cycles if one thread loads it and {added} if it is staged.
  Four loads of a slot take {slot_round} cycles.
- A host sync costs {sync_us:.0f} µs, not counting the queue that it empties.
- Kernels of others stream perfectly and have no tail, which favours them.

bfloat16 gradients:

{two_bytes}

float32 gradients:

{four_bytes}

## What changed since version 0.1

The page of version 0.1 ignored the tail and latency: it predicted 0.04 ms for GPT-2 on B200, where
this model gives {old_promise:.2f}. By this model, in bfloat16:

{change_table}

## What could be wrong

- Latencies and cycles are assumed, from published microbenchmarks of similar devices. Times may be
  off by 40 %. Which of two designs is faster is more certain than by how much.
- The last block works alone: for the 7B model that is {finish:.0f} µs on an H100, in every step,
  and {finish_moe:.0f} µs for 10,000 tensors, most of it a warp's reduction for each of them.
- 64 registers are the limit for two blocks. A compiler that needs more would spill, and a test
  would fail.
- The host needs about 0.5 µs per tensor to build the table while the device works. For 10,000
  tensors that is longer than the device takes.
"""


def page() -> str:
    """Return the text of the page."""
    wanted = [
        f"{d.terabytes_per_s * 1e12 * d.latency_us / d.multiprocessors / 1024e6:.0f} KB ({d.name})"
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
        rate_table="\n".join(rate_table()),
        reached=REACHED_BANDWIDTH,
        latencies=", ".join(f"{d.latency_us:.2f}" for d in DEVICES),
        launch_us=LAUNCH_US,
        cas=", ".join(f"{d.atomic_us:.2f}" for d in DEVICES),
        atomic=ATOMIC_US * 1e3,
        alone=ROW_ALONE,
        added=ROW_ADDED,
        slot_round=SLOT_ROUND,
        sync_us=SYNC_US,
        two_bytes="\n".join(time_table(2)),
        four_bytes="\n".join(time_table(4)),
        old_promise=step_ms(DEVICES[2], before(), MODELS[0], 2, clipped=False),
        change_table="\n".join(change_table()),
        finish=tail_us(DEVICES[1], now(), MODELS[2]),
        finish_moe=tail_us(DEVICES[1], now(), MODELS[3]),
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
