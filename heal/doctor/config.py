"""Checks a heal.toml: can it be read, and do its settings go together?"""

import os
from pathlib import Path

from heal.config import ConfigError, HealingConfig
from heal.doctor.finding import Finding


def check_config(path: str | os.PathLike[str]) -> list[Finding]:
    """Return what is right and wrong with a file of settings; never raises."""
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
    told = ", ".join(changed) if changed else "none"
    return [Finding("ok", f"{path} is read; settings that differ: {told}"), *_pairs(config)]


def _pairs(config: HealingConfig) -> list[Finding]:
    """Settings that are right by themselves and wrong together."""
    found = []
    reach = config.snapshot_interval * config.snapshot_count
    if config.quarantine_steps >= reach:
        found.append(
            Finding(
                "error",
                f"quarantine_steps = {config.quarantine_steps}, but the {config.snapshot_count} "
                f"snapshots reach back {reach} steps: none ever counts as good",
                f"set quarantine_steps below {reach}",
            )
        )
    if config.quarantine_steps < config.lag:
        found.append(
            Finding(
                "warn",
                f"quarantine_steps = {config.quarantine_steps} is less than lag = {config.lag}: a "
                "snapshot counts as good before the step after it is heard of",
                f"set quarantine_steps to {config.lag} or more",
            )
        )
    if config.max_recovery_attempts == 0:
        found.append(
            Finding(
                "warn",
                "max_recovery_attempts = 0: the first trouble ends the run",
                "set it to 1 or more, unless that is what you want",
            )
        )
    if config.nan_action == "rollback" and config.nan_patience >= config.max_consecutive:
        found.append(
            Finding(
                "warn",
                f"nan_patience = {config.nan_patience} is not below max_consecutive = "
                f"{config.max_consecutive}: the run stops before it would roll back",
                "set nan_patience below max_consecutive",
            )
        )
    if not config.nccl_health_check_interval:
        found.append(
            Finding(
                "warn",
                "nccl_health_check_interval = 0: a rank that is gone is noticed by a timeout only",
                "set it to 100 for runs on several ranks",
            )
        )
    return found
