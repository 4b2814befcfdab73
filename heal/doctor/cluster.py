"""Checks the surroundings of a rank: launcher, network, GPU, shared folder, clock."""

import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from heal.cluster.slurm import get_slurm_info
from heal.doctor.finding import Finding

CONNECT_SECONDS = 3.0
CLOCK_SECONDS = (
    5.0  # by which clocks may differ before logs of several nodes cannot be put in order
)

Environment = Mapping[str, str]


def check_cluster(
    environment: Environment | None = None, shared_dir: str | os.PathLike[str] | None = None
) -> list[Finding]:
    """Return what is right and wrong where this process runs; never raises, never hangs.

    Args:
        environment: variables of the process; its own if None.
        shared_dir: folder that all ranks write to, such as that of the checkpoints.
    """
    env = os.environ if environment is None else environment
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("launcher", lambda: check_launcher(env)),
        ("master", lambda: check_master(env)),
        ("backend", lambda: check_backend(env)),
        ("GPU", check_gpu),
        ("folder", lambda: check_folder(shared_dir)),
        ("clock", lambda: check_clock(shared_dir)),
    ]
    found: list[Finding] = []
    for name, check in checks:
        try:
            found += check()
        except Exception as error:
            found.append(Finding("warn", f"{name} could not be checked: {error!r}", "report this"))
    return found


def check_launcher(env: Environment) -> list[Finding]:
    """Who started this process, and does what it says make sense?"""
    slurm = get_slurm_info(env)
    found = []
    if slurm is not None:
        what = f"SLURM job {slurm.job_id}: {slurm.world_size} tasks on {len(slurm.nodes)} nodes"
        found.append(Finding("ok", what))
        if env.get("SLURM_JOB_ID") and slurm.rank < 0 and "RANK" not in env:
            todo = "start the program by srun, or torchrun by srun on every node"
            found.append(Finding("warn", "this is the batch script, not a task", todo))
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    there = [name for name in names if env.get(name)]
    if not there:
        if slurm is None:
            todo = "start by torchrun or srun for more than one process"
            found.append(Finding("ok", "no launcher: a single process", todo))
        return found
    missing = [name for name in names if name not in there]
    if missing:
        what = f"{', '.join(there)} set, but not {', '.join(missing)}"
        return [*found, Finding("error", what, "let torchrun set all of them, or none")]
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"):
        if not env.get(name, "0").isdecimal():
            what = f"{name} is {env[name]!r}, not a number"
            return [*found, Finding("error", what, "let torchrun set it")]
    rank, size, port = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
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
        return [Finding("warn", f"{address}:{port} is reachable, and nobody listens", todo)]
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
        wanted = env.get(name, "").lstrip("^=").split(",")[0]
        here = [interface for _, interface in socket.if_nameindex()]
        if wanted and not any(interface.startswith(wanted) for interface in here):
            what = f"{name} is {env[name]!r}, and the interfaces are {', '.join(here)}"
            found.append(Finding("error", what, "name one of these, or unset it"))
    return found


def check_gpu() -> list[Finding]:
    """What does the driver say?"""
    from heal.cluster.gpu_health import check_gpu_health

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
    found = []
    if path is not None and os.access(path, os.W_OK):
        with tempfile.NamedTemporaryFile(prefix=".heal-doctor-", dir=path) as file:
            file.write(b"heal")
            file.flush()
            apart = abs(os.stat(file.name).st_mtime - time.time())
        if apart > CLOCK_SECONDS:
            what = f"the clock is {apart:.0f} s off that of {path}"
            todo = "start chrony or ntpd: events of several ranks cannot be put in order"
            found.append(Finding("warn", what, todo))
        else:
            found.append(Finding("ok", f"the clock agrees with that of {path}"))
    return found
