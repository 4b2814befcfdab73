"""Staying alive on a cluster: signals, restarts, health, and ranks that drift apart.

Every part works by itself, in a loop with or without :class:`heal.Healer`; ``docs/cluster.md`` has
recipes.
"""

from heal.cluster.slurm import SLURMInfo, get_slurm_info, log_job_info, resolve_resume_path
from heal.former import names_of

NEEDS_TORCH: dict[str, str] = {
    "Attempt": "heal.cluster.launch",
    "GpuHealth": "heal.cluster.hardware",
    "GroupHealth": "heal.cluster.hardware",
    "HangReport": "heal.cluster.watchdog",
    "HangWatchdog": "heal.cluster.watchdog",
    "Mismatch": "heal.cluster.fingerprints",
    "ReplicaCheck": "heal.cluster.fingerprints",
    "ShutdownHandler": "heal.cluster.shutdown",
    "Straggler": "heal.cluster.checks",
    "StragglerWatch": "heal.cluster.checks",
    "check_gpu_health": "heal.cluster.hardware",
    "check_nccl_health": "heal.cluster.hardware",
    "init_process_group": "heal.cluster.launch",
}
"""Names that need torch, and their modules: loaded on first use."""

__all__ = ["SLURMInfo", "get_slurm_info", "log_job_info", "resolve_resume_path", *NEEDS_TORCH]

__getattr__ = names_of(__name__, NEEDS_TORCH)
