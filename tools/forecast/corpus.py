"""The labelled corpus: which runs are made, how damage is defined, and where it is kept.

Only records are kept, in one compressed file. A run of a slow fault is *damaged* from the step at
which the median of its last losses has doubled; features for training are taken before that step.
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from tools.forecast.architectures import ARCHITECTURES
from tools.forecast.scenarios import HEALTHY, INSTANT, SLOW
from tools.forecast.simulate import OPTIMIZERS, Streams, critical_lr, simulate

STEPS = 500
BATCH_SIZES = (4, 16, 32)
LARGEST_BATCH = {"attention": 8}  # eight tokens a sample: as many predictions as others have
MEDIAN_OF = 9  # losses whose median must have doubled: one bad batch is no damage
LEVEL_OF = 32  # losses before the fault whose median is the level
NOISE_STEPS = 64
NOISES = 4.0  # a loss near zero has not doubled as long as it stays within so much noise


@dataclass(frozen=True)
class Group:
    """Runs that are trained together."""

    architecture: str
    optimizer: str
    kinds: tuple[str, ...]
    steps: int
    batch_size: int
    seed: int


def groups(
    *,
    healthy: int,
    slow: int,
    instant: int,
    seed: int = 0,
    steps: int = STEPS,
    architectures: Sequence[str] = tuple(ARCHITECTURES),
    optimizers: Sequence[str] = OPTIMIZERS,
) -> list[Group]:
    """Return one group per architecture and optimizer, with so many runs of each sort.

    The kinds of a sort take turns. ``policy`` has healthy runs only: its loss has no level that
    could double.
    """
    made = []
    for i, architecture in enumerate(architectures):
        for j, optimizer in enumerate(optimizers):
            turn = seed + 17 * i + 5 * j
            kinds = [HEALTHY[(turn + k) % len(HEALTHY)] for k in range(healthy)]
            if architecture != "policy":
                kinds += [SLOW[(turn + k) % len(SLOW)] for k in range(slow)]
                kinds += [INSTANT[(turn + k) % len(INSTANT)] for k in range(instant)]
            size = min(BATCH_SIZES[turn % 3], LARGEST_BATCH.get(architecture, BATCH_SIZES[-1]))
            made.append(
                Group(architecture, optimizer, tuple(kinds), steps, size, 1000 * seed + turn)
            )
    return made


def make(wanted: Sequence[Group], processes: int = 1) -> Streams:
    """Train all groups and return their records together."""
    if processes == 1:
        parts = [_make_group(group) for group in wanted]
    else:
        context = multiprocessing.get_context("spawn")
        with context.Pool(processes) as pool:
            made = pool.imap(_make_group, wanted)
            parts = list(tqdm(made, "groups of runs", len(wanted), disable=None))
    return joined(parts)


def _make_group(group: Group) -> Streams:
    with _quick_arithmetic():
        lr = critical_lr(group.architecture, group.optimizer, group.batch_size)
        return simulate(
            group.architecture,
            group.optimizer,
            list(group.kinds),
            steps=group.steps,
            batch_size=group.batch_size,
            critical_lr=lr,
            seed=group.seed,
        )


@contextmanager
def _quick_arithmetic() -> Iterator[None]:
    """Compute by one thread and without subnormal numbers; put both back as they were."""
    threads = torch.get_num_threads()
    was_flushing = bool(torch.tensor(1e-20).square() == 0.0)  # subnormal in float32
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(was_flushing)


def joined(parts: Sequence[Streams]) -> Streams:
    """Return several streams as one."""
    return Streams(
        np.concatenate([p.records for p in parts]),
        [a for p in parts for a in p.architecture],
        [o for p in parts for o in p.optimizer],
        [k for p in parts for k in p.kind],
        np.concatenate([p.onset for p in parts]),
        [s for p in parts for s in p.seed],
    )


def save(streams: Streams, path: str | os.PathLike[str]) -> None:
    """Write the corpus: arrays and text, no pickle."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        np.savez_compressed(
            file,
            records=streams.records,
            architecture=np.array(streams.architecture),
            optimizer=np.array(streams.optimizer),
            kind=np.array(streams.kind),
            onset=streams.onset,
            seed=np.array(streams.seed),
        )


def load(path: str | os.PathLike[str]) -> Streams:
    """Read what :func:`save` wrote."""
    with np.load(path, allow_pickle=False) as file:
        return Streams(
            file["records"],
            [str(a) for a in file["architecture"]],
            [str(o) for o in file["optimizer"]],
            [str(k) for k in file["kind"]],
            file["onset"],
            [int(s) for s in file["seed"]],
        )


def check(streams: Streams, wanted: Sequence[Group], path: str | os.PathLike[str]) -> None:
    """Make sure that a file holds the runs of these groups, and not those of an older corpus.

    Raises:
        ValueError: it holds others.
    """
    expected = [(g.architecture, g.optimizer, kind, g.seed) for g in wanted for kind in g.kinds]
    found = list(
        zip(streams.architecture, streams.optimizer, streams.kind, streams.seed, strict=True)
    )
    if found != expected:
        raise ValueError(
            f"{path} holds {len(found)} runs that are not the {len(expected)} asked for; "
            f"wanted it out of the way"
        )


def damaged_at(losses: NDArray[np.float32], onset: int) -> int:
    """Return the first step at which the loss has doubled since the fault; -1 if it never does.

    Doubled is: the median of the last nine losses exceeds the level before the fault by that level
    itself, or by four times the noise where the level is near zero. A loss that is NaN or Inf
    counts as above everything.
    """
    before = losses[max(onset - LEVEL_OF, 0) : onset].astype(np.float64)
    level = float(np.nanmedian(before))
    recent = losses[max(onset - NOISE_STEPS, 0) : onset].astype(np.float64)
    noise = float(np.nanmedian(np.abs(np.diff(recent)))) / 0.954  # of normal noise: its deviation
    limit = level + max(abs(level), NOISES * noise)
    values = np.where(np.isfinite(losses), losses, np.inf)
    begin = max(onset - MEDIAN_OF + 1, 0)
    windows = np.lib.stride_tricks.sliding_window_view(values[begin:], MEDIAN_OF)
    above = np.flatnonzero(np.median(windows, axis=1) > limit)
    return int(above[0]) + begin + MEDIAN_OF - 1 if len(above) else -1


def failed(streams: Streams) -> NDArray[np.bool_]:
    """Return which runs end without a number, or far above where they began.

    Settings are chosen at random, so that a few runs without a fault fail too. They are judged by
    their end alone: a healthy run may be as rough on its way as it likes.
    """
    losses = streams.records[:, :, 0].astype(np.float64)
    losses = np.where(np.isfinite(losses), losses, np.inf)
    first, last = np.median(losses[:, :10], 1), np.median(losses[:, -30:], 1)
    spread = np.median(np.abs(losses[:, :10] - first[:, None]), 1)
    policies = np.array([a == "policy" for a in streams.architecture])
    worse = last > first + np.maximum(0.2 * np.abs(first), 4.0 * spread)
    return np.asarray(~np.isfinite(last) | (worse & ~policies))
