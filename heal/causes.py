"""Every cause of trouble that healing knows: what it means, how grave it is, who described it."""

from dataclasses import asdict, dataclass
from enum import Enum, IntEnum
from typing import Any

from heal.plain import plain


class Severity(IntEnum):
    """What a cause asks for. The names are those of the alerts that trackers show."""

    INFO = 0  # write it down
    WARN = 1  # tell somebody; the state is clean and training goes on
    ERROR = 2  # act
    FATAL = 3  # stop


class Family(str, Enum):
    """Causes that share one ladder: going up it for one counts for all of the family."""

    NUMERIC = "numeric"
    MEMORY = "memory"
    DATA = "data"
    WAIT = "wait"
    STOP = "stop"
    WARNING = "warning"
    ALERT = "alert"


class Cause(str, Enum):
    """Why a run is in trouble."""

    NONFINITE_GRADIENT = "nonfinite_gradient"
    NONFINITE_LOSS = "nonfinite_loss"
    SCALER_OVERFLOW = "scaler_overflow"
    GRADIENT_SPIKE = "gradient_spike"
    GRADIENT_EXPLOSION = "gradient_explosion"
    LOSS_SPIKE = "loss_spike"
    DIVERGENCE = "divergence"
    LR_SPIKE = "lr_spike"
    WEIGHT_CORRUPTION = "weight_corruption"
    OPTIMIZER_CORRUPTION = "optimizer_corruption"
    OPTIMIZER_RESET = "optimizer_reset"
    WEIGHT_DRIFT = "weight_drift"
    INSTABILITY_AHEAD = "instability_ahead"
    PLATEAU = "plateau"
    NOT_LEARNING = "not_learning"
    OVERFITTING = "overfitting"
    REWARD_COLLAPSE = "reward_collapse"
    KL_BLOWUP = "kl_blowup"
    PREFERENCE_INVERSION = "preference_inversion"
    LIKELIHOOD_COLLAPSE = "likelihood_collapse"
    THROUGHPUT_COLLAPSE = "throughput_collapse"
    PROBE_ALARM = "probe_alarm"
    OUT_OF_MEMORY = "oom"
    MEMORY_PRESSURE = "memory_pressure"
    DATA_ERROR = "data_error"
    NETWORK_ERROR = "network_error"
    STORAGE_ERROR = "storage_error"
    DESYNC = "desync"
    COLLECTIVE_ERROR = "collective_error"
    DEVICE_ERROR = "device_error"
    PREEMPTED = "preempted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class About:
    """What there is to say about a cause whatever the run."""

    family: Family
    summary: str
    reference: str = ""


ZCLIP = "ZClip, arXiv:2504.02507"
ADAGC = "AdaGC, arXiv:2502.11034"
PALM = "PaLM section 5.1, arXiv:2204.02311"
OPT = "OPT-175B logbook, arXiv:2205.01068"
UNICRON = "Unicron, arXiv:2401.00134"
SILENT_ERRORS = "Llama 3 section 3.3.4, arXiv:2407.21783"
DPO = "Rafailov et al. 2023, arXiv:2305.18290"
GRPO = "DeepSeekMath, arXiv:2402.03300"
DAPO = "DAPO, arXiv:2503.14476"
ORPO = "Hong et al. 2024, arXiv:2403.07691"
EDGE = "Cohen et al. 2021, arXiv:2103.00065"
DISPLACEMENT = "Razin et al. 2024, arXiv:2410.08847"

ABOUT: dict[Cause, About] = {
    Cause.NONFINITE_GRADIENT: About(
        Family.NUMERIC, "NaN or Inf in the gradients; the device skipped the step.", ZCLIP
    ),
    Cause.NONFINITE_LOSS: About(
        Family.NUMERIC, "The loss is NaN or Inf; the device skipped the step.", ZCLIP
    ),
    Cause.SCALER_OVERFLOW: About(
        Family.ALERT, "Gradients overflowed under a loss scale that is still being searched."
    ),
    Cause.GRADIENT_SPIKE: About(
        Family.NUMERIC, "A gradient norm out of the ordinary; the clip rule dealt with it.", ZCLIP
    ),
    Cause.GRADIENT_EXPLOSION: About(
        Family.NUMERIC, "Gradient norms far above all before, and the loss suffers.", ADAGC
    ),
    Cause.LOSS_SPIKE: About(Family.NUMERIC, "The loss leapt far above its level.", PALM),
    Cause.DIVERGENCE: About(Family.NUMERIC, "The loss rises above the best level it had.", OPT),
    Cause.LR_SPIKE: About(
        Family.NUMERIC,
        "The learning rate is not what the schedule says, or far above all before and the loss "
        "suffers.",
        OPT,
    ),
    Cause.WEIGHT_CORRUPTION: About(
        Family.NUMERIC, "Weights hold NaN or Inf, or leapt as no update could.", SILENT_ERRORS
    ),
    Cause.OPTIMIZER_CORRUPTION: About(
        Family.NUMERIC, "The optimizer's state holds NaN or Inf.", SILENT_ERRORS
    ),
    Cause.OPTIMIZER_RESET: About(
        Family.NUMERIC, "The optimizer lost its moments or its step count.", SILENT_ERRORS
    ),
    Cause.WEIGHT_DRIFT: About(
        Family.ALERT, "A weight norm left its course faster than before.", SILENT_ERRORS
    ),
    Cause.INSTABILITY_AHEAD: About(
        Family.WARNING, "The forecast expects the loss to double soon; nothing is damaged yet."
    ),
    Cause.PLATEAU: About(Family.ALERT, "The loss has stopped improving.", DPO),
    Cause.NOT_LEARNING: About(
        Family.ALERT, "The weights do no better than those the run began with.", OPT
    ),
    Cause.OVERFITTING: About(Family.ALERT, "The evaluation loss is far above the training loss."),
    Cause.REWARD_COLLAPSE: About(
        Family.ALERT, "Rewards of a group are all alike, or fell: nothing is learned.", DAPO
    ),
    Cause.KL_BLOWUP: About(Family.ALERT, "The policy ran away from its reference.", GRPO),
    Cause.PREFERENCE_INVERSION: About(
        Family.ALERT, "The model prefers the rejected answers to the chosen ones.", ORPO
    ),
    Cause.LIKELIHOOD_COLLAPSE: About(
        Family.ALERT, "Chosen answers become far less likely than they were.", DISPLACEMENT
    ),
    Cause.THROUGHPUT_COLLAPSE: About(
        Family.ALERT, "Steps take much longer than they used to.", UNICRON
    ),
    Cause.PROBE_ALARM: About(
        Family.ALERT, "A probe that was attached to the run found what it should warn of.", EDGE
    ),
    Cause.OUT_OF_MEMORY: About(
        Family.MEMORY, "Out of memory: the micro-batch exceeds what is free.", UNICRON
    ),
    Cause.MEMORY_PRESSURE: About(Family.MEMORY, "Memory is nearly used up.", UNICRON),
    Cause.DATA_ERROR: About(
        Family.DATA, "A batch could not be read or used.", "Deep Researcher, arXiv:2604.05854"
    ),
    Cause.NETWORK_ERROR: About(Family.WAIT, "A service or network did not answer.", UNICRON),
    Cause.STORAGE_ERROR: About(Family.WAIT, "The disk is full or cannot be written.", UNICRON),
    Cause.DESYNC: About(
        Family.NUMERIC, "Ranks that should be at the same step are not.", SILENT_ERRORS
    ),
    Cause.COLLECTIVE_ERROR: About(
        Family.STOP, "A collective failed or timed out; the process group is broken.", UNICRON
    ),
    Cause.DEVICE_ERROR: About(
        Family.STOP, "The device reported an error that poisons the process.", UNICRON
    ),
    Cause.PREEMPTED: About(Family.STOP, "The job received a signal to stop."),
    Cause.UNKNOWN: About(Family.STOP, "An error that healing has no cure for."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one detector saw.

    ``step`` is where it was seen; ``bad_step`` the first step that may have done damage: a
    snapshot of that step or before is clean. ``streak`` counts how often in a row. With
    ``wants_proof`` it is a suspicion: the experiment settles it before anything is done.
    """

    cause: Cause
    step: int
    bad_step: int
    severity: Severity
    evidence: dict[str, object]
    streak: int = 1
    wants_proof: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as values that JSON has."""
        named = {"cause": self.cause.value, "severity": self.severity.name}
        told: dict[str, Any] = plain(asdict(self))
        return {**told, **named}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "Finding":
        """Return what :meth:`to_json` told of."""
        named = {"cause": Cause(told["cause"]), "severity": Severity[told["severity"]]}
        return cls(**{**told, **named})
