"""The checks of ``heal doctor``: a folder of checkpoints, a heal.toml, and the cluster.

Each returns findings and never raises.
"""

import math
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heal.checkpoint.files import (
    ABANDONED,
    NAME,
    CheckpointError,
    StepFolder,
    committed,
    free_bytes,
    list_folders,
)
from heal.cluster.slurm import get_slurm_info
from heal.config import LEAST_SNAPSHOTS, ConfigError, HealingConfig

GIB = 2**30
CONNECT_SECONDS = 3.0
CLOCK_SECONDS = 5.0  # by which clocks may differ before logs of several nodes cannot be ordered

Level = Literal["ok", "warn", "error"]
Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report: how severe it is, what was seen, what to do about it.

    Args:
        level: ``"ok"``, ``"warn"`` (it works, but not as well as it could) or ``"error"``.
        what: the thing that was looked at and how it is.
        todo: what to do next; "" where there is nothing to do.
    """

    level: Level
    what: str
    todo: str = ""


def check_checkpoints(directory: str | os.PathLike[str], *, quick: bool = False) -> list[Finding]:
    """Is there a checkpoint to resume from, and what is wrong with the rest?

    Args:
        directory: as it was given to the healer or the store.
        quick: do not read the tensors.
    """
    path = Path(directory)
    if not path.is_dir():
        todo = "give the folder that was named checkpoint_dir, or start a run that saves there"
        return [Finding("error", f"{path} is no folder", todo)]
    found = []
    for check in (
        lambda folder: check_bytes(folder, quick),
        check_unfinished,
        check_links,
        check_space,
        check_permissions,
    ):
        try:
            found += check(path)
        except OSError as error:
            found.append(Finding("error", f"{path}: {error}", "check disk and permissions"))
    return found


def check_bytes(directory: Path, quick: bool = False) -> list[Finding]:
    """Read every checkpoint, newest first, and name the one that a run would resume from."""
    folders = committed(directory)[::-1]
    if not folders:
        todo = "a run that resumes here starts afresh; is this the right folder?"
        return [Finding("error", f"{directory} has no finished checkpoint", todo)]
    found = [_read_checkpoint(folder, quick) for folder in folders]
    whole = [f.step for f, finding in zip(folders, found, strict=True) if finding.level == "ok"]
    if whole:
        return [*found, Finding("ok", f"a run resumes from step {whole[0]}")]
    todo = "bring one back from a copy; a run that resumes here starts afresh"
    return [*found, Finding("error", "no checkpoint is whole", todo)]


def _read_checkpoint(folder: StepFolder, quick: bool) -> Finding:
    from heal.checkpoint.reading import CheckpointReader

    name = folder.path.name
    try:
        reader = CheckpointReader(folder.path)
        ranks = reader.commit.world_size
        tensors = {tensor for rank in range(ranks) for tensor in reader.manifest(rank).entries}
        if not quick:
            reader.check()
    except (CheckpointError, OSError) as error:
        todo = f"remove {folder.path}, or bring it back from a copy; resuming passes it over"
        return Finding("error", f"{name} is damaged: {error}", todo)
    state = "manifests are whole" if quick else "every byte is what was saved"
    size = f"{_size(folder) / 2**20:.1f} MiB"
    return Finding("ok", f"{name}: {state}; {len(tensors)} tensors of {ranks} ranks, {size}")


def check_unfinished(directory: Path) -> list[Finding]:
    """Name what crashes and rollbacks left."""
    found = []
    for folder in list_folders(directory):
        if not folder.is_committed:
            failed = sorted(path.name[7:] for path in folder.path.glob("failed-*"))
            why = f"rank {int(failed[0])} failed" if failed else "a crash, or a save under way"
            todo = "the next save removes it; if no run is on, remove it yourself"
            found.append(Finding("warn", f"{folder.path.name} is not finished: {why}", todo))
    aside = sorted(path.name for path in directory.glob(f"step-*{ABANDONED}*"))
    if aside:
        what = f"{len(aside)} checkpoints were abandoned by a rollback: {', '.join(aside[-3:])}"
        found.append(Finding("ok", what, "remove them when they are no longer needed"))
    return found


def check_links(directory: Path) -> list[Finding]:
    """Name links, which resuming does not follow."""
    todo = "copy what it points to, or give that folder itself"
    return [
        Finding("warn", f"{path.name} is a link, which is not followed", todo)
        for path in sorted(directory.iterdir())
        if path.is_symlink() and NAME.fullmatch(path.name)
    ]


def check_space(directory: Path) -> list[Finding]:
    """Is there room for the next save?"""
    sizes = [_size(folder) for folder in committed(directory)]
    free = free_bytes(directory)
    if not sizes:
        return []
    what = f"{free / GIB:.2f} GiB are free, a checkpoint takes {sizes[-1] / GIB:.2f} GiB"
    if free < sizes[-1]:
        todo = "free space, or set checkpoint_keep lower; until then nothing is saved"
        return [Finding("error", what, todo)]
    if free < 2 * sizes[-1]:
        return [Finding("warn", what, "room for one more save: free space")]
    return [Finding("ok", what)]


def check_permissions(directory: Path) -> list[Finding]:
    """Can others write what a run will load?"""
    mode = stat.S_IMODE(directory.stat().st_mode)
    found = []
    if mode & 0o002:
        todo = f"chmod o-w {directory}"
        found.append(Finding("warn", f"any user may write to {directory}", todo))
    if not os.access(directory, os.W_OK):
        todo = f"chown or chmod {directory}"
        found.append(Finding("warn", f"{directory} cannot be written", todo))
    return found


def _size(folder: StepFolder) -> int:
    return sum(path.lstat().st_size for path in folder.path.iterdir())


def check_cluster(
    environment: Environment | None = None, shared_dir: str | os.PathLike[str] | None = None
) -> list[Finding]:
    """Check launcher, network, GPU, shared folder and clock of this process; never hangs.

    Args:
        environment: variables of the process; its own if None.
        shared_dir: folder that all ranks write to, such as that of the checkpoints.
    """
    env = os.environ if environment is None else environment
    checks: dict[str, Callable[[], list[Finding]]] = {
        "launcher": lambda: check_launcher(env),
        "master": lambda: check_master(env),
        "backend": lambda: check_backend(env),
        "GPU": check_gpu,
        "folder": lambda: check_folder(shared_dir),
        "clock": lambda: check_clock(shared_dir),
    }
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            found += check()
        except Exception as error:
            found.append(Finding("warn", f"{name} could not be checked: {error!r}", "report this"))
    return found


def check_launcher(env: Environment) -> list[Finding]:
    """Does what the launcher set make sense?"""
    from heal.cluster.launch import find_place

    slurm = get_slurm_info(env)
    found = []
    if slurm is not None:
        what = f"SLURM job {slurm.job_id}: {slurm.world_size} tasks on {len(slurm.nodes)} nodes"
        found.append(Finding("ok", what))
        if env.get("SLURM_JOB_ID") and slurm.rank < 0 and "RANK" not in env:
            todo = "start the program by srun, or torchrun by srun on every node"
            found.append(Finding("warn", "this is the batch script, not a task", todo))
    if not any(env.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        if slurm is None:
            todo = "start by torchrun or srun for more than one process"
            found.append(Finding("ok", "no launcher: a single process", todo))
        return found
    try:
        place = find_place(env)
    except RuntimeError as error:
        return [*found, Finding("error", str(error), "let torchrun set all of them, or none")]
    rank, size, port = place.rank, place.world_size, place.master_port
    if rank >= size:
        what = f"RANK {rank} is not below WORLD_SIZE {size}"
        found.append(Finding("error", what, "ranks count from 0; let torchrun set both"))
    if not 0 < port < 2**16:
        found.append(Finding("error", f"MASTER_PORT {port} is no port", "take one below 65536"))
    if env.get("TORCHELASTIC_RUN_ID"):
        restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "0")
        what = f"torchrun: rank {rank} of {size}, at most {restarts} restarts"
        todo = "" if restarts != "0" else "--max-restarts=3 lets a run survive the loss of a rank"
        found.append(Finding("ok" if restarts != "0" else "warn", what, todo))
    return found


def check_master(env: Environment) -> list[Finding]:
    """Is the rendezvous reachable?"""
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        return []
    try:
        socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        todo = "use the address by which all nodes know the first node"
        return [Finding("error", f"MASTER_ADDR {address!r} does not resolve: {error}", todo)]
    try:
        with socket.create_connection((address, int(port)), CONNECT_SECONDS):
            return [Finding("ok", f"{address}:{port} answers")]
    except ConnectionRefusedError:
        todo = "right before a start; during a run rank 0 or torchrun's agent should listen there"
        return [Finding("warn", f"{address}:{port} is reachable, and no process listens", todo)]
    except OSError as error:
        todo = "open the port in the firewall, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return [Finding("error", f"{address}:{port} cannot be reached: {error}", todo)]


def check_backend(env: Environment) -> list[Finding]:
    """Can torch talk to other ranks, and by what?"""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        todo = "install a torch that was built with USE_DISTRIBUTED=1"
        return [Finding("error", "this torch has no distributed package", todo)]
    has_gpu = torch.cuda.is_available()
    found = []
    if has_gpu and not dist.is_nccl_available():
        todo = "install a torch with NCCL; gloo copies every gradient to the host"
        found.append(Finding("warn", "there is a GPU and no NCCL", todo))
    elif has_gpu:
        found.append(Finding("ok", f"{torch.cuda.device_count()} GPUs, NCCL is there"))
    else:
        found.append(Finding("ok", "no GPU: gloo"))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        first = env.get(name, "").lstrip("^=").split(",")[0]
        here = [interface for _, interface in socket.if_nameindex()]
        if first and not any(interface.startswith(first) for interface in here):
            what = f"{name} is {env[name]!r}, and the interfaces are {', '.join(here)}"
            found.append(Finding("error", what, "name one of these, or unset it"))
    return found


def check_gpu() -> list[Finding]:
    """Does the driver report faults?"""
    from heal.cluster.hardware import check_gpu_health

    health = check_gpu_health()
    if not health.available:
        return [Finding("ok", f"GPU health: {health.reason}")]
    if not health.ok:
        todo = "take the node out of service, or reset the GPU"
        return [Finding("error", f"GPU: {health.reason}", todo)]
    return [Finding("ok", "GPU: no ECC errors, no XID, not throttled")]


def check_folder(path: str | os.PathLike[str] | None) -> list[Finding]:
    """Can files be written there, whole and renamed?"""
    if path is None:
        return []
    try:
        descriptor, name = tempfile.mkstemp(prefix=".heal-doctor-", dir=path)
        try:
            os.write(descriptor, b"heal")
            os.fsync(descriptor)
            os.replace(name, f"{name}.renamed")
        finally:
            os.close(descriptor)
            for left in (name, f"{name}.renamed"):
                Path(left).unlink(missing_ok=True)
    except OSError as error:
        todo = "make the folder, check its permissions and the space on it"
        return [Finding("error", f"{path} cannot be written: {error}", todo)]
    return [Finding("ok", f"{path} can be written, synced and renamed in")]


def check_clock(path: str | os.PathLike[str] | None) -> list[Finding]:
    """Does the clock agree with that of the file server?"""
    if path is None or not os.access(path, os.W_OK):
        return []
    with tempfile.NamedTemporaryFile(prefix=".heal-doctor-", dir=path) as file:
        file.write(b"heal")
        file.flush()
        apart = abs(os.stat(file.name).st_mtime - time.time())
    if apart <= CLOCK_SECONDS:
        return [Finding("ok", f"the clock agrees with that of {path}")]
    todo = "start chrony or ntpd: events of several ranks cannot be put in order"
    return [Finding("warn", f"the clock is {apart:.0f} s off that of {path}", todo)]


def check_config(path: str | os.PathLike[str]) -> list[Finding]:
    """Can a heal.toml be read, and do its settings go together?"""
    try:
        config = HealingConfig.from_toml(Path(path))
    except FileNotFoundError:
        return [Finding("error", f"{path} is not there", f"heal init > {path}")]
    except (OSError, UnicodeDecodeError) as error:
        return [Finding("error", f"{path} cannot be read: {error}", "check path and permissions")]
    except ConfigError as error:
        return [Finding("error", f"{path}: {error}", "heal init prints every setting it may have")]
    default = HealingConfig()
    changed = [k for k, v in config.to_dict().items() if v != getattr(default, k)]
    names = ", ".join(changed) if changed else "none"
    return [Finding("ok", f"{path} is read; settings that differ: {names}"), *_pairs(config)]


def _pairs(config: HealingConfig) -> list[Finding]:
    """Settings that are right by themselves and wrong together."""
    count = max(LEAST_SNAPSHOTS, math.ceil(config.snapshot_memory_factor))
    reach = config.snapshot_interval * count
    quarantine = f"quarantine_steps = {config.quarantine_steps}"
    skips, patience = config.max_consecutive_skips, config.nan_patience
    rules: tuple[tuple[bool, Level, str, str], ...] = (
        (
            config.quarantine_steps >= reach,
            "error",
            f"{quarantine}, but the {count} snapshots reach back {reach} steps: none ever counts "
            "as good",
            f"set quarantine_steps below {reach}",
        ),
        (
            config.quarantine_steps < config.lag,
            "warn",
            f"{quarantine} is less than lag = {config.lag}: a snapshot counts as good before the "
            "record of the step after it is polled",
            f"set quarantine_steps to {config.lag} or more",
        ),
        (
            config.max_recovery_attempts == 0,
            "warn",
            "max_recovery_attempts = 0: the first trouble ends the run",
            "set it to 1 or more, unless that is what you want",
        ),
        (
            config.nan_action == "rollback" and patience >= skips,
            "warn",
            f"nan_patience = {patience} is not below max_consecutive_skips = {skips}: the run "
            "stops before it would roll back",
            "set nan_patience below max_consecutive_skips",
        ),
        (
            not config.nccl_health_check_interval,
            "warn",
            "nccl_health_check_interval = 0: a rank that is gone is noticed by a timeout only",
            "set it to 100 for runs on several ranks",
        ),
    )
    return [Finding(level, what, todo) for is_wrong, level, what, todo in rules if is_wrong]
