"""Checks between steps: GPU, replicas and ping for the healing loop, stragglers for any loop."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from heal.causes import Cause, Finding, Severity
from heal.cluster.fingerprints import ReplicaCheck
from heal.cluster.hardware import GroupPing, check_gpu_health
from heal.cluster.launch import cannot_come_back, has_peers, side_group
from heal.cluster.watchdog import HangReport, HangWatchdog
from heal.config import HealingConfig
from heal.exit_codes import ExitCode
from heal.journal import Journal
from heal.record import Flag
from heal.snapshots import NEVER, next_due
from zclip.parallel.placement import is_dtensor

HARDWARE_XIDS = frozenset({48, 64, 74, 79, 95, 119, 120, 140})
"""Double-bit ECC, failed remapping, NVLink, off the bus, uncontained ECC, GSP, unrecovered ECC.
Others are often the program's own doing, and come with an exception."""


class ClusterWatch:
    """Runs the checks after every step; on the healthy path nothing waits.

    What only this rank knows goes to ``report``, and reaches all ranks in the record of the next
    step; what cannot be checked goes to ``note``.

    Attributes:
        watchdog: expects a beat at every step; None while hangs are not watched for.
    """

    def __init__(
        self,
        model: Module,
        config: HealingConfig,
        journal: Journal,
        report: Callable[[Flag], None],
        note: Callable[[str], None],
        group: "dist.ProcessGroup | None" = None,
    ) -> None:
        self._config = config
        self._journal = journal
        self._report = report
        self._note = note
        self._group = group
        self._ping = GroupPing(group, config.nccl_timeout_seconds)
        if config.nccl_health_check_interval:
            self._ping.connect()
        self._ping_read_at: int | None = None
        replicated, over = find_replicas(model, group)
        self._replicas = ReplicaCheck(replicated, group=over, lag=config.lag)
        self._compares = bool(replicated and config.nccl_health_check_interval)
        self._ecc_errors: int | None = None
        trouble = cannot_come_back(os.environ) if not journal.rank else ""
        if trouble:
            note(trouble)
        self.watchdog: HangWatchdog | None = None

    def next_due(self, step: int) -> int:
        """Return after which step :meth:`look` has anything to do."""
        if self._compares or self._ping_read_at is not None:
            return step + 1
        config = self._config
        ping = config.nccl_health_check_interval if has_peers(self._group) else 0
        due = [
            next_due(step + ahead, interval, False) - ahead
            for interval, ahead in ((config.gpu_health_check_interval, 0), (ping, config.lag))
            if interval
        ]
        return min(due, default=NEVER)

    def look(self, step: int) -> list[Finding]:
        """Do what is due before ``step``; return what must be acted upon here and now.

        A ping is sent ``lag`` steps ahead, so that its answer comes before the comparison, which
        would wait for a rank that is gone.
        """
        if _is_due(step, self._config.gpu_health_check_interval):
            self._look_at_gpu(step)
        found = self._ping_ranks(step)
        if self._compares and not found:
            self._compare(step)
        return found

    def clear(self) -> None:
        """Forget what is under way: after a rollback it is of another state."""
        self._replicas.clear()
        self._ping_read_at = None

    def start(self, before_exit: Callable[[int], object] = lambda code: None) -> None:
        """Watch for hangs; the thread that ends the process passes the code to ``before_exit``."""
        seconds = self._config.hang_timeout_seconds
        if not seconds or self.watchdog is not None:
            return
        code = ExitCode.HUNG if self._config.hang_exit else None

        def on_hang(report: HangReport) -> None:
            self._journal.event("hang", -1, suspects=report.suspects, report=str(report))
            if code is not None:
                before_exit(int(code))

        self.watchdog = HangWatchdog.for_group(
            seconds, run_dir=self._journal.run_dir, exit_code=code, on_hang=on_hang
        )
        self.watchdog.start()

    def stop(self) -> None:
        """End the watch for hangs."""
        watchdog, self.watchdog = self.watchdog, None
        if watchdog is not None:
            watchdog.stop()

    def _ping_ranks(self, step: int) -> list[Finding]:
        ahead = step + self._config.lag
        if self._ping_read_at is None and _is_due(ahead, self._config.nccl_health_check_interval):
            self._ping.start()
            self._ping_read_at = ahead
        if self._ping_read_at is None or step < self._ping_read_at:
            return []
        self._ping_read_at = None
        health = self._ping.finish()
        if health.ok:
            return []
        finding = Finding(
            cause=Cause.COLLECTIVE_ERROR,
            step=step,
            bad_step=step,
            severity=Severity.FATAL,
            evidence={"type": health.reason, "missing": health.missing},
        )
        return [finding]

    def _compare(self, step: int) -> None:
        if _is_due(step, self._config.nccl_health_check_interval):
            self._replicas.post(step)
        mismatches = self._replicas.read()
        if not mismatches:
            return
        if self._replicas.agreed_at is None:
            self._compares = False
            self._note(
                f"replicas differ from the start ({mismatches[0]}), so that this is how they are "
                "trained; they are not compared"
            )
            return
        for mismatch in mismatches:
            self._journal.event(
                "replicas_differ",
                step,
                tensor=mismatch.name,
                checked_at=mismatch.step,
                odd_ranks=mismatch.odd_ranks,
                hashes={str(rank): f"{value:#x}" for rank, value in mismatch.hashes},
            )
        self._note(f"replicas differ: {'; '.join(map(str, mismatches))}")
        self._report(Flag.WEIGHTS_BAD)

    def _look_at_gpu(self, step: int) -> None:
        health = check_gpu_health()
        if not health.available:
            return
        before, self._ecc_errors = self._ecc_errors, health.ecc_errors
        has_new_errors = before is not None and (health.ecc_errors or 0) > before
        if health.ok and not has_new_errors:
            return
        self._journal.event("gpu_health", step, reason=health.reason, xids=health.xids)
        self._note(f"the GPU of this rank is not well: {health.reason}")
        if has_new_errors or HARDWARE_XIDS & set(health.xids):
            self._report(Flag.DEVICE_ERROR)


def find_replicas(
    model: Module, group: "dist.ProcessGroup | None" = None
) -> tuple[list[tuple[str, Any]], "dist.ProcessGroup | None"]:
    """Return the parameters that several ranks hold copies of, and the group of the plain ones.

    Plain parameters are replicas only where DDP says so: elsewhere they may be the shards of FSDP1
    or the stages of a pipeline. DTensors know it themselves.
    """
    found: dict[int, tuple[str, Any]] = {}
    over = group
    for prefix, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            over = module.process_group
            ignored = set(getattr(module, "parameters_to_ignore", ()))
            for name, parameter in module.module.named_parameters():
                if name not in ignored and not is_dtensor(parameter):
                    whole = ".".join(part for part in (prefix, "module", name) if part)
                    found[id(parameter)] = (whole, parameter)
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            found[id(parameter)] = (name, parameter)
    return list(found.values()), over


def _is_due(step: int, interval: int) -> bool:
    return bool(interval) and step % interval == 0


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than the others, again and again.

    Attributes:
        rank: which one.
        seconds: its median time per step in the last window.
        others: the median of the medians of all other ranks.
        windows: for how many windows in a row.
    """

    rank: int
    seconds: float
    others: float
    windows: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} takes {self.seconds:.4g} s of its own per step, the others "
            f"{self.others:.4g} s, for {self.windows} windows in a row"
        )


class StragglerWatch:
    """Gathers the ranks' own times every ``every`` steps, and compares them.

    In a synchronous run all steps last equally long, because the fast ranks wait for the slow one.
    What distinguishes them is the time that each spends on its own work, without the waiting. The
    gathering runs beside training and is read at the next step; all ranks call :meth:`note` once
    per step, and all get the same answer in the same call.

    Args:
        every: steps in a window.
        factor: a rank that takes this many times as long as the others is slow.
        patience: windows in a row before a slow rank is named.
        group: the ranks to compare; all of them if None.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> stragglers = StragglerWatch(every=50)
        >>> for batch in loader:
        ...     with stragglers.working():  # without the part that waits for others
        ...         loss = model(prepare(batch))
        ...     loss.backward()
        ...     optimizer.step()
        ...     for straggler in stragglers.note():
        ...         print(straggler)
    """

    def __init__(
        self,
        every: int = 50,
        factor: float = 1.5,
        patience: int = 2,
        group: "dist.ProcessGroup | None" = None,
    ) -> None:
        for name, value in (("every", every), ("patience", patience)):
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")
        if not factor > 1:
            raise ValueError(f"factor: expected more than 1, got {factor}")
        self._every = every
        self._factor = factor
        self._patience = patience
        self._group = group
        self._own = 0.0
        self._times: list[float] = []
        self._under_way: tuple[Any, list[Tensor]] | None = None
        self._slow_for: dict[int, int] = {}

    @contextmanager
    def working(self) -> Iterator[None]:
        """Time a part of the step that waits for no other rank; may be entered several times."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._own += time.perf_counter() - began

    def note(self, seconds: float | None = None) -> list[Straggler]:
        """End a step; return the stragglers of the window that was gathered since.

        Args:
            seconds: that this rank worked in the step; what :meth:`working` timed if None.
        """
        found = self._compare()
        self._times.append(self._own if seconds is None else seconds)
        self._own = 0.0
        if len(self._times) >= self._every:
            self._gather(statistics.median(self._times))
            self._times.clear()
        return found

    def _gather(self, median: float) -> None:
        if not has_peers(self._group):
            return
        group = side_group(self._group)
        mine = torch.tensor([median], dtype=torch.float64)
        all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        work = dist.all_gather(all_of_them, mine, group=group, async_op=True)
        self._under_way = work, all_of_them

    def _compare(self) -> list[Straggler]:
        if self._under_way is None:
            return []
        work, gathered = self._under_way
        self._under_way = None
        work.wait()
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        return self.judge(dict(zip(ranks, (t.item() for t in gathered), strict=True)))

    def judge(self, medians: dict[int, float]) -> list[Straggler]:
        """Return the ranks that were slow in this window and in enough before it."""
        found = []
        for rank, seconds in medians.items():
            others = statistics.median(s for r, s in medians.items() if r != rank)
            if seconds <= self._factor * others:
                self._slow_for.pop(rank, None)
                continue
            self._slow_for[rank] = windows = self._slow_for.get(rank, 0) + 1
            if windows >= self._patience:
                found.append(Straggler(rank, seconds, others, windows))
        return found
