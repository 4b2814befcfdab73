"""Settings of the healing loop. Plain data, checked when made; nothing here acts."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from heal.config_fields import (
    ConfigError,
    Removed,
    Renamed,
    accepts_old,
    checked,
    parsed,
    present_names,
    read_settings,
    setting,
    settings_of,
    shown,
    text_of,
    write_settings,
)

__all__ = ["ConfigError", "HealingConfig"]

TABLE = "heal"
"""The table of a TOML file that is ours, where the file has others."""


LEAST_SNAPSHOTS = 4  # of different ages; those that memory has no room for are on the disk
WAITS = "eight waits of 30 seconds to ten minutes are fixed; a hook may plan Backoff(seconds)"

OLD: dict[str, Renamed | Removed] = {
    "data": Renamed("after_rollback", {"skip": "skip_data", "replay": "replay_data"}),
    "max_consecutive": Renamed("max_consecutive_skips"),
    "snapshot_memory_fraction": Renamed("snapshot_memory_factor"),
    "snapshot_count": Removed("snapshot_memory_factor limits the number of snapshots"),
    "divergence_patience": Removed("an experiment decides whether a run has diverged"),
    "grad_norm_limit": Removed("an experiment decides what follows large gradients"),
    "grad_norm_patience": Removed("an experiment decides what follows large gradients"),
    "refused_patience": Removed("it is fixed"),
    "clip_factor": Removed("it is fixed; a hook may plan TightenClip(factor)"),
    "loss_spike_patience": Removed("an experiment decides whether weights are damaged"),
    "lr_spike_factor": Removed("an experiment decides what follows a large rate"),
    "lr_floor": Removed("it is fixed; a hook may plan ScaleLr(factor, floor)"),
    "drift_factor": Removed("it is fixed"),
    "plateau_improvement": Removed("it is fixed; use plateau_steps"),
    "throughput_factor": Removed('it is fixed; use disabled_detectors="throughput_collapse"'),
    "throughput_patience": Removed('it is fixed; use disabled_detectors="throughput_collapse"'),
    "backoff_seconds": Removed(WAITS),
    "backoff_cap_seconds": Removed(WAITS),
    "max_backoffs": Removed(WAITS),
    "backoff_budget_seconds": Removed(WAITS),
    "attempts_reset_steps": Removed("it is fixed; use max_recovery_attempts"),
    "skip_window": Removed("it is fixed; a hook may plan SkipBatches"),
    "skip_window_batches": Removed("it is fixed; a hook may plan SkipBatches"),
    "rollback_depth": Removed("each attempt goes one deeper; a hook may plan Rollback"),
    "activation_checkpointing": Removed("it is always tried last when memory runs out"),
    "perturb_std": Removed("a hook may plan PerturbWeights(std, seed)"),
    "anchor_strength": Removed("a hook may plan AnchorWeights(strength, steps)"),
    "anchor_steps": Removed("a hook may plan AnchorWeights(strength, steps)"),
    "forecast_false_alarms": Removed("it is fixed at 0.02"),
    "fingerprint_interval": Removed("replicas are compared every nccl_health_check_interval steps"),
    "max_consecutive_data_errors": Removed("it is fixed; use max_data_errors"),
    "nccl_timeout_seconds": Removed("it is fixed; use nccl_health_check_interval"),
    "gpu_health_check_interval": Removed("it is fixed"),
    "eval_gap": Removed('it is fixed at 2; use disabled_detectors="overfitting_gap"'),
    "chance_loss": Removed("it is fixed at ln 2, the loss of guessing in DPO"),
    "micro_batch_min": Removed("1, or 2 where the model has a BatchNorm1d"),
    "micro_batch_min_samples": Removed("1, or 2 where the model has a BatchNorm1d"),
    "micro_batch_grow_steps": Removed("pieces grow after ten times incident_steps"),
}
"""Settings of version 0.1, accepted with a warning until 0.3: their new names, or what to use."""


@accepts_old(OLD)
@dataclass(frozen=True, kw_only=True, slots=True)
class HealingConfig:
    """How patient to be, and how hard to push back.

    Every value is checked: a wrong one raises :class:`ConfigError`, which names the setting, the
    value and what was expected. All counts are of optimizer steps, whatever the accumulation.
    """

    # Budget: when healing gives up.
    max_recovery_attempts: int = setting(
        5,
        "Recovery plans that may change training; one more and the run stops.",
        group="budget",
        least=0,
    )
    incident_steps: int = setting(
        100,
        "Clean steps after which trouble counts as over, so that the next starts with the mildest "
        "plan. After ten times as many, batches cut for lack of memory are cut less.",
        least=1,
    )
    max_consecutive_skips: int = setting(
        100, "Skipped steps in a row that stop the run, whatever nan_action says.", least=1
    )
    max_data_errors: int = setting(
        100, "Batches of the whole run that may fail to load or to run.", least=0
    )

    # Detection: what is looked for, and when it is reported.
    nan_action: str = setting(
        "rollback",
        "On NaN or Inf the step is skipped. Then go on, with a warning or without (warn, skip), "
        "stop at once (raise), or check the weights after nan_patience of them (rollback).",
        group="detection",
        choices=("warn", "skip", "raise", "rollback"),
    )
    nan_patience: int = setting(
        5, "Skipped steps in a row that start a check of the weights.", least=1
    )
    zclip_enabled: bool = setting(
        True,
        "Clip gradients whose norm is unusually large for this run (ZClip); off: gradients are "
        "measured, never clipped.",
    )
    zclip_z_threshold: float = setting(
        2.5,
        "Standard deviations above its mean (z-score) from which a gradient norm is clipped.",
        above=0,
    )
    max_grad_norm: float = setting(
        0.0, "Fixed limit of the gradient norm, besides ZClip; 0: none.", least=0
    )
    loss_spike_factor: float = setting(
        5.0,
        "How far the loss must leap or climb before an experiment is asked for, in units of four "
        "times its noise. A loss of more than this many times its running mean is flagged and "
        "polled at once.",
        above=1,
    )
    plateau_steps: int = setting(
        1000, "Steps without improvement of the loss that are reported; 0: never.", least=0
    )
    check_interval: int = setting(
        50,
        "Steps between checks of weights and optimizer state for NaN, resets and leaps; 0: never.",
        least=0,
    )
    lag: int = setting(
        2,
        "Steps after which the measurements of a step are read, so that the host does not wait for "
        "the device.",
        least=0,
        most=64,
    )
    disabled_detectors: str = setting(
        "",
        "Detectors that are switched off, by name, separated by commas: host_news, skipped_steps, "
        "gradient_explosion, loss, lr, plateau, not_learning, overfitting_gap, "
        "throughput_collapse, foreign_writes, health.",
    )
    alert_only_detectors: str = setting(
        "", "Detectors that report and change nothing, by name, separated by commas."
    )
    forecast: bool = setting(
        False,
        "Forecast slow failures; a warning takes a snapshot, tightens the clip and checks more "
        "often.",
    )

    # Cure: what a recovery does.
    after_rollback: str = setting(
        "skip_data",
        "Continue with data that was not seen yet (skip_data), or feed the same data again "
        "(replay_data).",
        group="cure",
        choices=("skip_data", "replay_data"),
    )
    lr_factor: float = setting(
        0.5,
        "Factor on the learning rate, from the second rollback for the same trouble on.",
        above=0,
        most=1,
    )
    lr_ramp_steps: int = setting(
        200, "Steps over which a lowered learning rate returns to its schedule.", least=0
    )

    # Durability: copies of the run, and the health of the job.
    snapshot_interval: int = setting(50, "Steps between snapshots in host memory.", least=1)
    snapshot_memory_factor: float = setting(
        4.0,
        "Host memory for snapshots, as a multiple of the bytes of the trainable state. At least "
        "four are kept; those that memory has no room for are on the disk.",
        group="durability",
        above=0,
    )
    quarantine_steps: int = setting(
        10, "Clean steps after which a snapshot counts as good and may be returned to.", least=0
    )
    checkpoint_interval: int = setting(
        1000,
        "Steps between checkpoints on disk, in the checkpoint_dir of the healer; 0: only at the "
        "end.",
        least=0,
    )
    checkpoint_keep: int = setting(
        3, "Checkpoints to keep; the newest that was verified is never removed.", least=1
    )
    checkpoint_async: bool = setting(True, "Write checkpoints in a thread while training goes on.")
    nccl_health_check_interval: int = setting(
        100,
        "Steps between checks across ranks: pings over any backend, and a comparison of the "
        "replicas of DDP and HSDP, bit by bit; 0: never.",
        least=0,
    )
    hang_timeout_seconds: float = setting(
        600.0,
        "Time without a step, in run() or with, after which all ranks dump their stacks; 0: never.",
        least=0,
    )
    hang_exit: bool = setting(
        False, "End a rank that hangs, with exit code 50, once its stacks are dumped."
    )
    shutdown_timeout_sec: float = setting(
        600.0,
        "Time to save everything in after SIGTERM or SIGUSR1, before the process is ended; 0: no "
        "limit.",
        least=0,
    )

    # Settings of version 0.1 that are fixed: no example changed them.
    grad_norm_limit: ClassVar[float] = 100.0
    """A norm before clipping of more than this many times its recent upper range explodes."""
    grad_norm_patience: ClassVar[int] = 3
    """Explosions in a row that are suspected."""
    loss_spike_patience: ClassVar[int] = 5
    """Steps in which weights that an experiment found damaged may recover by themselves, twice."""
    drift_factor: ClassVar[float] = 1.5
    """A weight norm that left its course by this factor between two checks has drifted."""
    plateau_improvement: ClassVar[float] = 0.005
    """Least improvement within ``plateau_steps``, as a share of the loss's own level."""
    throughput_factor: ClassVar[float] = 3.0
    """Steps slower than this many times their upper range are reported."""
    throughput_patience: ClassVar[int] = 20
    """Slow steps in a row that are reported."""
    gpu_health_check_interval: ClassVar[int] = 1000
    """Steps between checks of the GPU."""
    nccl_timeout_seconds: ClassVar[float] = 10.0
    """How long a ping may take."""
    eval_gap: ClassVar[float] = 2.0
    """Evaluation loss minus training loss that is reported as overfitting."""
    chance_loss: ClassVar[float] = 0.6931
    """The loss of guessing in DPO, ln 2; a plateau there is reported as such."""
    backoff_seconds: ClassVar[float] = 30.0
    """First wait after a network error; each further one is twice as long, up to ten minutes."""

    @property
    def micro_batch_grow_steps(self) -> int:
        """Clean steps after which pieces of batches grow again."""
        return 10 * self.incident_steps

    def __post_init__(self) -> None:
        for name, (kind, _, about) in settings_of(type(self)).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), kind, about))

    @classmethod
    def aggressive(cls, **changes: Any) -> "HealingConfig":
        """Return settings for unstable training: little tolerance, many attempts.

        A first skipped step checks the weights already. A bad batch is not a bad model here either:
        only weights that hold NaN or Inf, or that an experiment finds damaged, are rolled back.
        """
        preset = {"nan_patience": 1, "zclip_z_threshold": 2.0, "max_recovery_attempts": 10}
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
        return cls(**present_names(cls, values, OLD))

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
        values = read_settings(text, TABLE, where, cls)
        return cls(**present_names(cls, values, OLD))

    def to_toml(self) -> str:
        """Return the settings as TOML, each with a comment; :meth:`from_toml` reads it back."""
        return write_settings(self)

    def override(self, assignments: str | Iterable[str]) -> "HealingConfig":
        """Return a copy changed by ``key=value`` words, as a command line has them; or by one.

        Raises:
            ConfigError: a word is no assignment, a name is unknown or a value is wrong.
        """
        changes: dict[str, Any] = {}
        for word in [assignments] if isinstance(assignments, str) else assignments:
            if not isinstance(word, str) or "=" not in word:
                raise ConfigError(f"expected key=value, a str, got {shown(word)}")
            name, _, text = (part.strip() for part in word.partition("="))
            for present, value in present_names(type(self), {name: text}, OLD).items():
                kind, _, about = settings_of(type(self))[present]
                changes[present] = parsed(present, value, kind, about)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return every setting by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
