"""The checks of ``heal doctor``: a folder of checkpoints, a heal.toml, and the cluster.

Each yields findings. What collects them never raises.
"""

import math
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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
    write_file,
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


fine = partial(Finding, "ok")
warn = partial(Finding, "warn")
fault = partial(Finding, "error")


def check_checkpoints(directory: str | os.PathLike[str], *, quick: bool = False) -> list[Finding]:
    """Is there a checkpoint to resume from, and what is wrong with the rest?

    Args:
        directory: as it was given to the healer or the store.
        quick: do not read the tensors.
    """
    path = Path(directory)
    if not path.is_dir():
        todo = "give the folder that was named checkpoint_dir, or start a run that saves there"
        return [fault(f"{path} is no folder", todo)]
    found: list[Finding] = []
    checks = (check_unfinished, check_links, check_space, check_permissions)
    for check in (partial(check_bytes, quick=quick), *checks):
        try:
            found += check(path)
        except OSError as error:
            found.append(fault(f"{path}: {error}", "check disk and permissions"))
    return found


def check_bytes(directory: Path, quick: bool = False) -> Iterator[Finding]:
    """Read every checkpoint, newest first, and name the one that a run would resume from."""
    folders = committed(directory)[::-1]
    if not folders:
        todo = "a run that resumes here starts afresh; is this the right folder?"
        yield fault(f"{directory} has no finished checkpoint", todo)
        return
    whole = []
    for folder in folders:
        finding = _read_checkpoint(folder, quick)
        yield finding
        whole += [folder.step] * (finding.level == "ok")
    if whole:
        yield fine(f"a run resumes from step {whole[0]}")
    else:
        todo = "bring one back from a copy; a run that resumes here starts afresh"
        yield fault("no checkpoint is whole", todo)


def _read_checkpoint(folder: StepFolder, quick: bool) -> Finding:
    from heal.checkpoint.reading import CheckpointReader

    name = folder.path.name
    try:
        reader = CheckpointReader(folder.path)
        tensors = {tensor for manifest in reader.manifests() for tensor in manifest.entries}
        if not quick:
            reader.check()
    except (CheckpointError, OSError) as error:
        todo = f"remove {folder.path}, or bring it back from a copy; resuming passes it over"
        return fault(f"{name} is damaged: {error}", todo)
    state = "manifests are whole" if quick else "every byte is what was saved"
    held = f"{len(tensors)} tensors of {reader.commit.world_size} ranks"
    return fine(f"{name}: {state}; {held}, {_size(folder) / 2**20:.1f} MiB")


def check_unfinished(directory: Path) -> Iterator[Finding]:
    """Name what crashes and rollbacks left."""
    for folder in list_folders(directory):
        if not folder.is_committed:
            failed = sorted(path.name[7:] for path in folder.path.glob("failed-*"))
            why = f"rank {int(failed[0])} failed" if failed else "a crash, or a save under way"
            todo = "the next save removes it; if no run is on, remove it yourself"
            yield warn(f"{folder.path.name} is not finished: {why}", todo)
    aside = sorted(path.name for path in directory.glob(f"step-*{ABANDONED}*"))
    if aside:
        what = f"{len(aside)} checkpoints were abandoned by a rollback: {', '.join(aside[-3:])}"
        yield fine(what, "remove them when they are no longer needed")


def check_links(directory: Path) -> Iterator[Finding]:
    """Name links, which resuming does not follow."""
    for path in sorted(directory.iterdir()):
        if path.is_symlink() and NAME.fullmatch(path.name):
            todo = "copy what it points to, or give that folder itself"
            yield warn(f"{path.name} is a link, which is not followed", todo)


def check_space(directory: Path) -> Iterator[Finding]:
    """Is there room for the next save?"""
    sizes = [_size(folder) for folder in committed(directory)]
    if not sizes:
        return
    free = free_bytes(directory)
    what = f"{free / GIB:.2f} GiB are free, a checkpoint takes {sizes[-1] / GIB:.2f} GiB"
    if free < sizes[-1]:
        yield fault(what, "free space, or set checkpoint_keep lower; until then nothing is saved")
    elif free < 2 * sizes[-1]:
        yield warn(what, "room for one more save: free space")
    else:
        yield fine(what)


def check_permissions(directory: Path) -> Iterator[Finding]:
    """Can others write what a run will load?"""
    if stat.S_IMODE(directory.stat().st_mode) & 0o002:
        yield warn(f"any user may write to {directory}", f"chmod o-w {directory}")
    if not os.access(directory, os.W_OK):
        yield warn(f"{directory} cannot be written", f"chown or chmod {directory}")


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
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "launcher": partial(check_launcher, env),
        "master": partial(check_master, env),
        "backend": partial(check_backend, env),
        "GPU": check_gpu,
        "folder": partial(check_folder, shared_dir),
        "clock": partial(check_clock, shared_dir),
    }
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            found += check()
        except Exception as error:
            found.append(warn(f"{name} could not be checked: {error!r}", "report this"))
    return found


def check_launcher(env: Environment) -> Iterator[Finding]:
    """Does what the launcher set make sense?"""
    from heal.cluster.launch import find_place

    slurm = get_slurm_info(env)
    if slurm is not None:
        yield fine(
            f"SLURM job {slurm.job_id}: {slurm.world_size} tasks on {len(slurm.nodes)} nodes"
        )
        if env.get("SLURM_JOB_ID") and slurm.rank < 0 and "RANK" not in env:
            todo = "start the program by srun, or torchrun by srun on every node"
            yield warn("this is the batch script, not a task", todo)
    if not any(env.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        if slurm is None:
            todo = "start by torchrun or srun for more than one process"
            yield fine("no launcher: a single process", todo)
        return
    try:
        place = find_place(env)
    except RuntimeError as error:
        yield fault(str(error), "let torchrun set all of them, or none")
        return
    rank, size, port = place.rank, place.world_size, place.master_port
    if rank >= size:
        what = f"RANK {rank} is not below WORLD_SIZE {size}"
        yield fault(what, "ranks count from 0; let torchrun set both")
    if not 0 < port < 2**16:
        yield fault(f"MASTER_PORT {port} is no port", "take one below 65536")
    if env.get("TORCHELASTIC_RUN_ID"):
        restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "0")
        what = f"torchrun: rank {rank} of {size}, at most {restarts} restarts"
        todo = "--max-restarts=3 lets a run survive the loss of a rank"
        yield fine(what) if restarts != "0" else warn(what, todo)


def check_master(env: Environment) -> Iterator[Finding]:
    """Is the rendezvous reachable?"""
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        return
    try:
        socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        todo = "use the address by which all nodes know the first node"
        yield fault(f"MASTER_ADDR {address!r} does not resolve: {error}", todo)
        return
    try:
        socket.create_connection((address, int(port)), CONNECT_SECONDS).close()
        yield fine(f"{address}:{port} answers")
    except ConnectionRefusedError:
        todo = "right before a start; during a run rank 0 or torchrun's agent should listen there"
        yield warn(f"{address}:{port} is reachable, and no process listens", todo)
    except OSError as error:
        todo = "open the port in the firewall, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        yield fault(f"{address}:{port} cannot be reached: {error}", todo)


def check_backend(env: Environment) -> Iterator[Finding]:
    """Can torch talk to other ranks, and by what?"""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        todo = "install a torch that was built with USE_DISTRIBUTED=1"
        yield fault("this torch has no distributed package", todo)
        return
    if not torch.cuda.is_available():
        yield fine("no GPU: gloo")
    elif dist.is_nccl_available():
        yield fine(f"{torch.cuda.device_count()} GPUs, NCCL is there")
    else:
        todo = "install a torch with NCCL; gloo copies every gradient to the host"
        yield warn("there is a GPU and no NCCL", todo)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        first = env.get(name, "").lstrip("^=").split(",")[0]
        here = [interface for _, interface in socket.if_nameindex()]
        if first and not any(interface.startswith(first) for interface in here):
            what = f"{name} is {env[name]!r}, and the interfaces are {', '.join(here)}"
            yield fault(what, "name one of these, or unset it")


def check_gpu() -> Iterator[Finding]:
    """Does the driver report faults?"""
    from heal.cluster.hardware import check_gpu_health

    health = check_gpu_health()
    if not health.available:
        yield fine(f"GPU health: {health.reason}")
    elif not health.ok:
        yield fault(f"GPU: {health.reason}", "take the node out of service, or reset the GPU")
    else:
        yield fine("GPU: no ECC errors, no XID, not throttled")


def check_folder(path: str | os.PathLike[str] | None) -> Iterator[Finding]:
    """Can files be written there, whole and renamed?"""
    if path is None:
        return
    probe = Path(path, f".heal-doctor-{os.getpid()}")
    try:
        write_file(probe, [b"heal"])
        probe.unlink()
        yield fine(f"{path} can be written, synced and renamed in")
    except OSError as error:
        todo = "make the folder, check its permissions and the space on it"
        yield fault(f"{path} cannot be written: {error}", todo)


def check_clock(path: str | os.PathLike[str] | None) -> Iterator[Finding]:
    """Does the clock agree with that of the file server?"""
    if path is None or not os.access(path, os.W_OK):
        return
    with tempfile.NamedTemporaryFile(prefix=".heal-doctor-", dir=path) as file:
        file.write(b"heal")
        file.flush()
        apart = abs(os.stat(file.name).st_mtime - time.time())
    if apart <= CLOCK_SECONDS:
        yield fine(f"the clock agrees with that of {path}")
    else:
        todo = "start chrony or ntpd: events of several ranks cannot be put in order"
        yield warn(f"the clock is {apart:.0f} s off that of {path}", todo)


def check_config(path: str | os.PathLike[str]) -> list[Finding]:
    """Can a heal.toml be read, and do its settings go together?"""
    try:
        config = HealingConfig.from_toml(Path(path))
    except FileNotFoundError:
        return [fault(f"{path} is not there", f"heal init > {path}")]
    except (OSError, UnicodeDecodeError) as error:
        return [fault(f"{path} cannot be read: {error}", "check path and permissions")]
    except ConfigError as error:
        return [fault(f"{path}: {error}", "heal init prints every setting it may have")]
    default = HealingConfig()
    changed = [k for k, v in config.to_dict().items() if v != getattr(default, k)]
    names = ", ".join(changed) if changed else "none"
    return [fine(f"{path} is read; settings that differ: {names}"), *_pairs(config)]


def _pairs(config: HealingConfig) -> Iterator[Finding]:
    """Settings that are right by themselves and wrong together."""
    count = max(LEAST_SNAPSHOTS, math.ceil(config.snapshot_memory_factor))
    reach = config.snapshot_interval * count
    quarantine = f"quarantine_steps = {config.quarantine_steps}"
    skips, patience = config.max_consecutive_skips, config.nan_patience
    if config.quarantine_steps >= reach:
        yield fault(
            f"{quarantine}, but the {count} snapshots reach back {reach} steps: none ever counts "
            "as good",
            f"set quarantine_steps below {reach}",
        )
    if config.quarantine_steps < config.lag:
        yield warn(
            f"{quarantine} is less than lag = {config.lag}: a snapshot counts as good before the "
            "record of the step after it is polled",
            f"set quarantine_steps to {config.lag} or more",
        )
    if config.max_recovery_attempts == 0:
        yield warn(
            "max_recovery_attempts = 0: the first trouble ends the run",
            "set it to 1 or more, unless that is what you want",
        )
    if config.nan_action == "rollback" and patience >= skips:
        yield warn(
            f"nan_patience = {patience} is not below max_consecutive_skips = {skips}: the run "
            "stops before it would roll back",
            "set nan_patience below max_consecutive_skips",
        )
    if not config.nccl_health_check_interval:
        yield warn(
            "nccl_health_check_interval = 0: a rank that is gone is noticed by a timeout only",
            "set it to 100 for runs on several ranks",
        )
