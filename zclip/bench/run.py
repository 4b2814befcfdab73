"""Measures one case: checks it, times it in turns with its rivals, counts what it costs."""

import gc
import math
import os

import torch
from torch import Tensor

from zclip.bench.catalogue import DTYPES, Case
from zclip.bench.cost import Cost, cost_of
from zclip.bench.gradients import NORMAL, Gradients, bytes_needed
from zclip.bench.load import LoadMeter
from zclip.bench.measure import Timing, cpu_clock, cuda_clock, interleaved
from zclip.bench.results import Measured, Result, fastest_rival
from zclip.bench.shapes import Shape, elements
from zclip.bench.work import OURS, Run, Work, is_ours

PROBE_BYTES = 256 << 20
"""Most memory that the bandwidth is measured on; larger than any cache."""

LEAST_SECONDS = 0.2  # of timing, per case
HOST_ROUNDS, HOST_SECONDS = 5, 0.1
READ, SUM, REWRITE = "(read)", "(sum)", "(rewrite)"


class TooLarge(Exception):
    """A case does not fit into the memory that is free."""


def run_case(
    case: Case,
    shapes: list[Shape],
    device: torch.device,
    rounds: int,
    seconds: float,
    backends: list[str],
    rivals: list[str],
    left_out: list[str],
) -> Result:
    """Measure one case and let its memory go.

    A rival that raises takes no part, and ``left_out`` gets a line that says so.

    Raises:
        TooLarge: it does not fit into memory; says how much it would take.
    """
    dtype = DTYPES[case.dtype]
    _check_memory(case, shapes, dtype, device, backends)
    gradients = Gradients(shapes, dtype, device, case.values)
    work = case.work(gradients, backends, rivals)
    meter = LoadMeter(torch.get_num_threads())
    errors = _checked(case, work, left_out)
    costs = {name: cost_of(run, device) for name, run in work.contenders.items()}
    clock = cuda_clock if device.type == "cuda" else cpu_clock
    probes = _probes(gradients)
    timings = interleaved(
        {**work.contenders, **probes}, rounds, seconds, clock, work.between, LEAST_SECONDS
    )
    hosts = _host_seconds(case, shapes, device, backends, rivals, set(work.contenders))
    load = meter.read()
    probe_bytes = min(gradients.bytes, PROBE_BYTES)
    read_rate = probe_bytes / min(timings.pop(n).median_seconds for n in (READ, SUM))
    rewrite_rate = probe_bytes / timings.pop(REWRITE).median_seconds
    floor = gradients.bytes * (work.reads / read_rate + work.rewrites / rewrite_rate)
    contenders = {
        name: _measured(work, name, timing, errors[name], costs[name], floor, hosts.get(name))
        for name, timing in timings.items()
    }
    rival = fastest_rival(contenders)
    noisy = [n for n in (OURS, rival) if n and timings[n].is_noise]
    noise = load.problem or (f"the rounds of {noisy[0]} disagree" if noisy else None)
    return Result(
        case=case.name,
        op=case.op,
        shapes=case.shapes,
        dtype=case.dtype,
        rule=case.rule,
        clips=case.clips,
        values=case.values,
        tensors=len(shapes),
        bytes=gradients.bytes,
        contenders=contenders,
        rival=rival,
        ratio=contenders[rival].milliseconds / contenders[OURS].milliseconds if rival else None,
        read_gigabytes_per_second=read_rate / 1e9,
        load=load.average,
        others=load.others,
        noise=noise,
    )


def _checked(case: Case, work: Work, left_out: list[str]) -> dict[str, float]:
    """Return the error of every contender; rivals that cannot do the work leave the case."""
    errors = {}
    for name in list(work.contenders):
        try:
            errors[name] = work.check(name)
        except Exception as error:
            if is_ours(name):
                raise
            del work.contenders[name]
            reason = str(error).split("\n", 1)[0]
            left_out.append(f"{case.name}: {name} takes no part: {type(error).__name__}: {reason}")
    return errors


def _measured(
    work: Work,
    name: str,
    timing: Timing,
    error: float,
    cost: Cost,
    floor: float,
    host_seconds: float | None,
) -> Measured:
    host = timing.host_seconds if timing.host_seconds is not None else host_seconds
    return Measured(
        milliseconds=timing.median_seconds * 1e3,
        spread=timing.spread,
        rounds=timing.rounds,
        gigabytes_per_second=work.gradients.bytes / timing.median_seconds / 1e9,
        roofline=floor / timing.median_seconds if floor else None,
        host_microseconds=(host or 0.0) * 1e6,
        launches=cost.launches,
        syncs=cost.syncs,
        peak_bytes=cost.peak_bytes,
        error=error if math.isfinite(error) else 1.0,
        is_wrong=work.is_wrong(name, error),
    )


def _probes(gradients: Gradients) -> dict[str, Run]:
    """Return three ways of merely moving memory, on one block: nothing can be faster."""
    count = min(gradients.bytes, PROBE_BYTES) // gradients.dtype.itemsize
    block = torch.ones(max(1, count), dtype=gradients.dtype, device=gradients.device)

    def rewrite() -> Tensor:
        return block.mul_(1.0)

    return {
        READ: lambda: torch.ops.zclip.read_probe([block]),
        SUM: lambda: block.sum(),
        REWRITE: rewrite,
    }


def _host_seconds(
    case: Case,
    shapes: list[Shape],
    device: torch.device,
    backends: list[str],
    rivals: list[str],
    names: set[str],
) -> dict[str, float]:
    """Return what each call costs with as many tensors of one element: all that is not memory."""
    if device.type == "cuda":
        return {}  # there the clock sees it
    ones: list[Shape] = [(1,) * max(1, len(s)) for s in shapes]
    gradients = Gradients(ones, DTYPES[case.dtype], device, case.values)
    work = case.work(gradients, backends, rivals)
    contenders = {name: run for name, run in work.contenders.items() if name in names}
    timings = interleaved(contenders, HOST_ROUNDS, HOST_SECONDS, cpu_clock, work.between)
    return {name: timing.median_seconds for name, timing in timings.items()}


def _check_memory(
    case: Case,
    shapes: list[Shape],
    dtype: torch.dtype,
    device: torch.device,
    backends: list[str],
) -> None:
    gc.collect()
    count = elements(shapes)
    needed = bytes_needed(count, dtype, case.reads_params) + PROBE_BYTES
    if case.op == "step":
        needed += 2 * count * dtype.itemsize  # the moments of AdamW
    if case.values != NORMAL:
        needed += count * dtype.itemsize  # the normal ones, to compare with
    largest = max((elements([shape]) for shape in shapes), default=0)
    needed += 8 * largest * (3 if "reference" in backends else 1)  # temporaries of contenders
    free = _free_bytes(device)
    if free is not None and needed > 0.9 * free:
        raise TooLarge(
            f"{case.name}: left out, it takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} are free"
        )


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
