"""Settings of the healing loop. Plain data, checked when made; nothing here acts."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from heal.lab.forecast.score import DEFAULT_SHARE
from heal.settings import (
    ConfigError,
    check_names,
    checked,
    parsed,
    read_settings,
    refuses_unknown,
    setting,
    settings_of,
    shown,
    text_of,
    write_settings,
)

__all__ = ["ConfigError", "HealingConfig"]

TABLE = "heal"
"""The table of a TOML file that is ours, where the file has others."""


@refuses_unknown
@dataclass(frozen=True, kw_only=True, slots=True)
class HealingConfig:
    """How patient to be, and how hard to push back.

    Every value is checked: a wrong one raises :class:`ConfigError`, which names the setting, the
    value and what was wanted. All counts are of optimizer steps, whatever the accumulation.
    """

    # The budget.
    max_recovery_attempts: int = setting(
        5, "Plans that change training before the run is stopped.", group="budget", least=0
    )
    attempts_reset_steps: int = setting(
        1000,
        "Steps beyond the furthest one reached that win the attempts back; 0: never.",
        group="budget",
        least=0,
    )
    incident_steps: int = setting(
        100,
        "Clean steps past the trouble until an incident is over and its ladder starts again.",
        group="budget",
        least=1,
    )

    # NaN and Inf.
    nan_action: str = setting(
        "rollback",
        "On NaN or Inf the step is skipped; then go on, with a warning or without (warn, skip), "
        "stop at once (raise), or check the weights after nan_patience of them (rollback).",
        group="NaN and Inf",
        choices=("warn", "skip", "raise", "rollback"),
    )
    nan_patience: int = setting(
        5, "Skipped steps in a row that start a check of the weights.", group="NaN and Inf", least=1
    )
    max_consecutive: int = setting(
        100,
        "Skipped steps in a row that stop the run, whatever nan_action says.",
        group="NaN and Inf",
        least=1,
    )

    # Clipping.
    zclip_enabled: bool = setting(
        True, "Clip by z-score (ZClip); off: watch and skip only.", group="clipping"
    )
    zclip_z_threshold: float = setting(
        2.5, "z-score from which a gradient norm is clipped.", group="clipping", above=0
    )
    max_grad_norm: float = setting(
        0.0,
        "Largest gradient norm after clipping; 0: no fixed limit, only norms out of the ordinary "
        "are clipped.",
        group="clipping",
        least=0,
    )
    grad_norm_limit: float = setting(
        100.0,
        "A norm before clipping of more than this many times its recent upper range explodes.",
        group="clipping",
        above=1,
    )
    grad_norm_patience: int = setting(
        3, "Explosions in a row that tighten the clip.", group="clipping", least=1
    )
    refused_patience: int = setting(
        20,
        "Finite gradients skipped in a row, as by a rule that skips spikes, until that rule starts "
        "over.",
        group="clipping",
        least=1,
    )
    clip_factor: float = setting(
        0.5,
        "Factor on the thresholds of clipping when it is tightened.",
        group="clipping",
        above=0,
        most=1,
    )

    # The loss.
    loss_spike_factor: float = setting(
        5.0,
        "A loss of more than this many times its usual level is a spike.",
        group="loss",
        above=1,
    )
    loss_spike_patience: int = setting(
        5,
        "Steps in which weights that an experiment found damaged may recover by themselves, twice.",
        group="loss",
        least=1,
    )
    divergence_patience: int = setting(
        100, "Steps over which the loss must rise to be called divergent.", group="loss", least=20
    )
    lr_spike_factor: float = setting(
        10.0,
        "A learning rate of more than this many times its recent peak is a spike.",
        group="loss",
        above=1,
    )

    # The cure.
    rollback_depth: int = setting(
        1,
        "Which snapshot from before the trouble to return to: 1 is the newest.",
        group="cure",
        least=1,
    )
    lr_factor: float = setting(
        0.5, "Factor on the learning rate after a rollback.", group="cure", above=0, most=1
    )
    lr_floor: float = setting(
        0.01, "Least share of the scheduled learning rate.", group="cure", above=0, most=1
    )
    lr_ramp_steps: int = setting(
        200, "Steps in which the learning rate returns to its schedule.", group="cure", least=0
    )
    data: str = setting(
        "skip",
        "After a rollback: go on with data not yet seen (skip), or with the same again (replay).",
        group="cure",
        choices=("skip", "replay"),
    )
    skip_window: int = setting(
        1,
        "Batches skipped around those that did harm; doubles with each attempt, up to 500.",
        group="cure",
        least=0,
    )
    perturb_std: float = setting(
        0.0,
        "Noise on the weights at the last rung, in units of their spread; 0: never.",
        group="cure",
        least=0,
        most=1,
    )
    anchor_strength: float = setting(
        0.0,
        "Pull of the weights to those of the snapshot after a rollback, the important ones most; "
        "0: never.",
        group="cure",
        least=0,
    )
    anchor_steps: int = setting(100, "Steps for which that pull holds.", group="cure", least=1)

    # Snapshots.
    snapshot_interval: int = setting(
        50, "Steps between snapshots in host memory.", group="snapshots", least=1
    )
    snapshot_count: int = setting(
        4, "Most snapshots kept, memory permitting.", group="snapshots", least=1
    )
    snapshot_memory_fraction: float = setting(
        4.0,
        "Most host memory for snapshots, as a multiple of the trainable state's bytes.",
        group="snapshots",
        above=0,
    )
    quarantine_steps: int = setting(
        10, "Clean steps after which a snapshot counts as good.", group="snapshots", least=0
    )
    lag: int = setting(
        2, "Steps after which the record of a step is read.", group="snapshots", least=0, most=64
    )

    # Checks that look further than one step. 0 switches off.
    check_interval: int = setting(
        50,
        "Steps between checks of weights and optimizer state; 0: never.",
        group="checks",
        least=0,
    )
    drift_factor: float = setting(
        1.5,
        "A weight norm that left its course by this factor between two checks has drifted.",
        group="checks",
        above=1,
    )
    eval_gap: float = setting(
        2.0, "Evaluation loss minus training loss that is worth an alert.", group="checks", above=0
    )
    plateau_steps: int = setting(
        1000,
        "Steps without improvement that are worth an alert; 0: never.",
        group="checks",
        least=0,
    )
    plateau_improvement: float = setting(
        0.005,
        "Least improvement within plateau_steps, as a share of the loss's own level.",
        group="checks",
        least=0,
        most=1,
    )
    chance_loss: float = setting(
        0.6931,
        "A loss that says chance; a plateau there is named so (DPO: ln 2). 0: none.",
        group="checks",
        least=0,
    )
    throughput_factor: float = setting(
        3.0,
        "Steps slower than this many times their upper range are worth an alert.",
        group="checks",
        above=1,
    )
    throughput_patience: int = setting(
        20, "Slow steps in a row that make the alert.", group="checks", least=1
    )
    forecast: bool = setting(
        False,
        "Forecast slow failures; a warning takes a snapshot, tightens the clip and checks more "
        "often.",
        group="checks",
    )
    forecast_false_alarms: float = setting(
        DEFAULT_SHARE,
        "Share of healthy stretches of 500 steps that may have a false warning.",
        group="checks",
        least=0.01,
        most=0.5,
    )
    nccl_health_check_interval: int = setting(
        100, "Steps between pings of the process group; 0: never.", group="checks", least=0
    )
    nccl_timeout_seconds: float = setting(
        10.0, "How long a ping may take.", group="checks", above=0
    )
    gpu_health_check_interval: int = setting(
        1000, "Steps between checks of the GPU; 0: never.", group="checks", least=0
    )
    fingerprint_interval: int = setting(
        100,
        "Steps between comparisons of the bits of replicas, under DDP and HSDP; 0: never.",
        group="checks",
        least=0,
    )
    hang_timeout_seconds: float = setting(
        600.0,
        "Time without a step, in run() or with, after which all ranks dump their stacks; 0: never.",
        group="checks",
        least=0,
    )
    hang_exit: bool = setting(
        False,
        "End a rank that hangs, with exit code 50, once its stacks are dumped.",
        group="checks",
    )
    shutdown_timeout_sec: float = setting(
        600.0,
        "Seconds from SIGTERM or SIGUSR1 to save all in, before the process is ended; 0: no limit.",
        group="checks",
        least=0,
    )

    disabled_detectors: str = setting(
        "",
        "Detectors that are switched off, by name, separated by commas: host_news, skipped_steps, "
        "gradient_explosion, loss, lr, plateau, not_learning, overfitting_gap, "
        "throughput_collapse, health.",
        group="checks",
    )
    alert_only_detectors: str = setting(
        "",
        "Detectors that only report, by name, separated by commas.",
        group="checks",
    )

    # Exceptions.
    backoff_seconds: float = setting(
        30.0, "First wait after a network error; doubles each time.", group="exceptions", least=0
    )
    backoff_cap_seconds: float = setting(600.0, "Longest single wait.", group="exceptions", least=0)
    backoff_budget_seconds: float = setting(
        3600.0, "All waits of one incident together.", group="exceptions", least=0
    )
    max_backoffs: int = setting(
        8, "Waits of one incident before the run is stopped.", group="exceptions", least=0
    )
    max_data_errors: int = setting(
        100, "Batches that may fail in the whole run.", group="exceptions", least=0
    )
    max_consecutive_data_errors: int = setting(
        3,
        "Batches that may fail in a row: more is a fault of the model, not of the data.",
        group="exceptions",
        least=0,
    )
    micro_batch_min: int = setting(
        1, "Smallest micro-batch, in samples.", group="exceptions", least=1
    )
    micro_batch_grow_steps: int = setting(
        1000,
        "Clean steps after which a shrunk micro-batch grows again; 0: never.",
        group="exceptions",
        least=0,
    )
    activation_checkpointing: bool = setting(
        True,
        "Recompute activations when out of memory at the smallest micro-batch.",
        group="exceptions",
    )

    # Checkpoints on disk, where the healer was given a checkpoint_dir.
    checkpoint_interval: int = setting(
        1000, "Steps between checkpoints; 0: only at the end.", group="checkpoints", least=0
    )
    checkpoint_keep: int = setting(
        3,
        "Checkpoints to keep; the newest that was verified is never removed.",
        group="checkpoints",
        least=1,
    )
    checkpoint_async: bool = setting(
        True, "Write in a thread, beside the training.", group="checkpoints"
    )

    def __post_init__(self) -> None:
        for name, (kind, _, about) in settings_of(type(self)).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), kind, about))
        if self.backoff_cap_seconds < self.backoff_seconds:
            raise ConfigError(
                f"backoff_cap_seconds is {self.backoff_cap_seconds!r}; wanted at least "
                f"backoff_seconds, {self.backoff_seconds!r}"
            )

    @classmethod
    def aggressive(cls, **changes: Any) -> "HealingConfig":
        """Return settings for unstable training: little tolerance, many attempts.

        A bad batch is not a bad model here either. Where one batch in twenty is bad, two follow
        each other every four hundred steps, three every eight thousand; a model that is broken
        gives NaN in every step.
        """
        preset = {"nan_patience": 3, "zclip_z_threshold": 2.0, "max_recovery_attempts": 10}
        return cls.from_dict({**preset, **changes})

    @classmethod
    def conservative(cls, **changes: Any) -> "HealingConfig":
        """Return settings that intervene on clear failures only."""
        preset = {
            "nan_patience": 10,
            "loss_spike_factor": 10.0,
            "zclip_z_threshold": 4.0,
            "max_recovery_attempts": 2,
        }
        return cls.from_dict({**preset, **changes})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "HealingConfig":
        """Return settings from plain values.

        Raises:
            ConfigError: a name is unknown or a value is wrong.
        """
        check_names(cls, values)
        return cls(**values)

    @classmethod
    def from_toml(cls, path_or_text: str | os.PathLike[str]) -> "HealingConfig":
        """Return settings from a TOML file or its text; what it does not name has its default.

        The keys stand at the top, or in a table ``[heal]`` of a file that others use too; then none
        may stand at the top. A string with a line break or an equals sign is text, unless it ends
        in ``.toml`` or a file has that name.

        Raises:
            ConfigError: not TOML or not UTF-8, a name is unknown, a value is wrong, or a setting
                stands outside of the table.
            OSError: there is no such file.
        """
        text, where = text_of(path_or_text)
        return cls.from_dict(read_settings(text, TABLE, where, cls))

    def to_toml(self) -> str:
        """Return the settings as TOML, each with a comment; :meth:`from_toml` reads it back."""
        return write_settings(self)

    def override(self, assignments: str | Iterable[str]) -> "HealingConfig":
        """Return a copy changed by ``key=value`` words, as a command line has them; or by one.

        Raises:
            ConfigError: a word is no assignment, a name is unknown or a value is wrong.
        """
        known = settings_of(type(self))
        changes: dict[str, Any] = {}
        for word in [assignments] if isinstance(assignments, str) else assignments:
            if not isinstance(word, str) or "=" not in word:
                raise ConfigError(f"{shown(word)} is no assignment; wanted a str, key=value")
            name, _, text = (part.strip() for part in word.partition("="))
            check_names(type(self), {name: text})
            kind, _, about = known[name]
            changes[name] = parsed(name, text, kind, about)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return every setting by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
