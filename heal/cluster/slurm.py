"""What SLURM says about the job, and where to go on after a requeue. Needs no torch."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from heal.checkpoint.files import COMMIT, committed

MOST_HOSTS = 100_000  # more is a slip of the pen, and would fill memory
HOST = r"(?:[^,\[\]]|\[[^\]]*\])+"
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Return every host of SLURM's short form ``gpu[01-03,07],login``, in its order.

    Raises:
        ValueError: it is not a list of hosts.
    """
    text = text.strip()
    if text and not re.fullmatch(rf"{HOST}(,{HOST})*", text):
        raise ValueError(f"expected a list of hosts such as gpu[01-03,07],login, got {text!r}")
    names = (name for part in re.findall(HOST, text) for name in _expand(part, text))
    hosts = tuple(islice(names, MOST_HOSTS + 1))
    if len(hosts) > MOST_HOSTS:
        raise ValueError(f"{text[:80]!r} stands for more than {MOST_HOSTS} hosts")
    return hosts


def _expand(part: str, text: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield head
        return
    inside, _, tail = rest.partition("]")
    for piece in inside.split(","):
        match = RANGE.fullmatch(piece.strip())
        if match is None:
            raise ValueError(f"{text!r}: expected a range such as 01-03, got {piece!r}")
        first, last = match.group(1), match.group(2) or match.group(1)
        for number in range(int(first), int(last) + 1):
            for end in _expand(tail, text):
                yield f"{head}{number:0{len(first)}d}{end}"


FIRST_PORT, PORTS = 20_000, 20_000
"""Ports for jobs that name none: below those that the system hands out by itself on Linux."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SLURMInfo:
    """One task of a job.

    Attributes:
        job_id: of the job, or of this element of an array.
        job_name: as given to sbatch.
        partition: where it runs.
        nodes: the names of all nodes, first to last.
        rank: of this task among all; -1 in the batch script, which is none.
        world_size: how many tasks there are.
        local_rank: of this task on its node.
        restart_count: how often the job was requeued.
        array_task_id: index in an array of jobs; None outside of one.
        end_time: seconds since 1970 at which the time limit ends the job; None if unknown.
    """

    job_id: str
    job_name: str = ""
    partition: str = ""
    nodes: tuple[str, ...] = ()
    rank: int = -1
    world_size: int = 1
    local_rank: int = 0
    restart_count: int = 0
    array_task_id: int | None = None
    end_time: float | None = None

    def as_torchrun(self) -> dict[str, str]:
        """Return what torchrun would set; the port follows from the job, so that jobs differ."""
        if self.rank < 0 or not self.nodes:
            return {}
        digits = re.sub(r"\D", "", self.job_id) or "0"
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.nodes[0],
            "MASTER_PORT": str(FIRST_PORT + int(digits) % PORTS),
        }


def get_slurm_info(environment: Mapping[str, str] | None = None) -> SLURMInfo | None:
    """Return what SLURM says in the environment; None outside of a job."""
    env = os.environ if environment is None else environment
    job_id = env.get("SLURM_JOB_ID", "")
    if not job_id:
        return None
    return SLURMInfo(
        job_id=job_id,
        job_name=env.get("SLURM_JOB_NAME", ""),
        partition=env.get("SLURM_JOB_PARTITION", ""),
        nodes=expand_hostlist(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")),
        rank=_whole(env, "SLURM_PROCID", -1),
        world_size=_whole(env, "SLURM_STEP_NUM_TASKS", _whole(env, "SLURM_NTASKS", 1)),
        local_rank=_whole(env, "SLURM_LOCALID", 0),
        restart_count=_whole(env, "SLURM_RESTART_COUNT", 0),
        array_task_id=_whole(env, "SLURM_ARRAY_TASK_ID", -1)
        if "SLURM_ARRAY_TASK_ID" in env
        else None,
        end_time=float(_whole(env, "SLURM_JOB_END_TIME", 0)) or None,
    )


def log_job_info(
    info: SLURMInfo | None = None, log: Callable[[str], object] | None = None
) -> SLURMInfo | None:
    """Write one line about the job, from its first task only; nothing outside of a job.

    Args:
        info: the job; the environment's if None.
        log: takes the line; standard error if None.
    """
    info = info if info is not None else get_slurm_info()
    if info is not None and info.rank <= 0:
        again = f", requeued {info.restart_count} times" if info.restart_count else ""
        line = (
            f"SLURM job {info.job_id} ({info.job_name or 'no name'}) on {len(info.nodes)} nodes of "
            f"{info.partition or 'no partition'}, {info.world_size} tasks{again}"
        )
        if log is None:
            print(f"heal: {line}", file=sys.stderr, flush=True)
        else:
            log(line)
    return info


def resolve_resume_path(
    checkpoint_dir: str | os.PathLike[str],
    resume: str | os.PathLike[str] | None = "auto",
    *,
    resolver: Callable[[Path], Path | None] | None = None,
) -> Path | None:
    """Return the checkpoint to go on from; None to start afresh.

    Args:
        checkpoint_dir: where checkpoints are written, a folder ``step-000123`` each.
        resume: a checkpoint, ``"auto"`` for the newest complete one, or None to start afresh.
        resolver: finds the newest in another way. Ours reads no bytes: loading compares them with
            their checksums, and falls back to an older one by itself.

    Raises:
        FileNotFoundError: ``resume`` names a folder that is missing or has no COMMIT.
    """
    if resume is None:
        return None
    if str(resume) != "auto":
        path = Path(resume)
        if not (path / COMMIT).is_file():
            state = "has no COMMIT: its save was cut short" if path.is_dir() else "is not there"
            raise FileNotFoundError(
                f"expected a complete checkpoint, got {path}, which {state}; resume='auto' takes "
                "the newest"
            )
        return path
    if resolver is not None:
        return resolver(Path(checkpoint_dir))
    found = committed(Path(checkpoint_dir))
    return found[-1].path if found else None


def _whole(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else otherwise
