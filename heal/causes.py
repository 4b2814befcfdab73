"""Every cause of trouble, one row each, and the finding of a detector.

To add a cause, add a row to :class:`Cause`. Policy, diagnosis, journal, report, postmortem and the
tables of the documentation read the row; a row that lacks a column is an error at import.
"""

from dataclasses import asdict, dataclass
from enum import Enum, IntEnum
from functools import partial
from typing import Any

from heal.exit_codes import ExitCode, ExitReason
from heal.json_lines import plain
from heal.record import Flag


class Severity(IntEnum):
    """What a cause asks for. The names are those of the alerts that trackers show."""

    INFO = 0  # log it
    WARN = 1  # warn; the state is clean and training goes on
    ERROR = 2  # act
    FATAL = 3  # stop


class Family(str, Enum):
    """Causes that share one ladder: a rung tried for one counts as tried for all."""

    NUMERIC = "numeric"
    MEMORY = "memory"
    DATA = "data"
    WAIT = "wait"
    STOP = "stop"
    WARNING = "warning"
    ALERT = "alert"


class Blames(str, Enum):
    """Where the fault lies. Only data is left out by the first rollback."""

    DATA = "data"
    STATE = "state"
    MODEL = "model"
    LEARNING_RATE = "learning_rate"
    LOSS_SCALE = "loss_scale"
    MEMORY = "memory"
    SERVICE = "service"
    DEVICE = "device"
    RANKS = "ranks"
    SCHEDULER = "scheduler"
    UNKNOWN = "unknown"


class Onset(str, Enum):
    """When it begins, compared with the step in which it is found."""

    SKIPPED = "skipped"  # in that step, which the device skipped: the state is clean
    AT_ONCE = "at_once"  # in that step
    GRADUAL = "gradual"  # before it: recent snapshots may hold it
    CHECKED = "checked"  # as GRADUAL, found by a check of the state: the batch is unrelated


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What is known about a cause.

    Attributes:
        title: what happened, in a few words, for the report.
        summary: one sentence.
        family: whose ladder recovers from it.
        severity: of a finding or an exception, unless it knows better.
        blames: where the fault lies.
        is_fact: whether it is counted or signalled, and not inferred.
        onset: when it begins.
        needs_snapshot: whether nothing but a rollback undoes it.
        explains: names of symptoms that it is suspected of if they follow it shortly.
        sent_as: how one rank reports it to the others; None if no message can reach them.
        exit_code: of a run that has to stop for it.
        exit_reason: for the postmortem; None if there is no special one.
        reference: the publication that describes it; may be empty.
    """

    title: str
    summary: str
    family: Family
    severity: Severity
    blames: Blames
    is_fact: bool
    onset: Onset
    needs_snapshot: bool
    explains: tuple[str, ...]
    sent_as: Flag | None
    exit_code: ExitCode
    exit_reason: ExitReason | None
    reference: str

    @property
    def is_skipped(self) -> bool:
        """Whether the device skips the step."""
        return self.onset is Onset.SKIPPED

    @property
    def is_nonfinite(self) -> bool:
        """Whether it is NaN or Inf in a step's loss or gradients."""
        return self.exit_code is ExitCode.NONFINITE

    @property
    def is_found_late(self) -> bool:
        """Whether a check finds it some time after it happened."""
        return self.onset is Onset.CHECKED

    @property
    def may_be_in_snapshots(self) -> bool:
        """Whether snapshots from before it was found may hold it."""
        return self.onset in (Onset.GRADUAL, Onset.CHECKED)


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


# fmt: off
# What the rows of one kind have in common; a row may say otherwise.
_stops = partial(  # ends the run at once
    About,
    family=Family.STOP, severity=Severity.FATAL, onset=Onset.AT_ONCE, needs_snapshot=False,
    explains=(), exit_reason=None,
)
_raised = partial(  # an exception: the step was not taken
    About,
    severity=Severity.ERROR, is_fact=False, onset=Onset.AT_ONCE, needs_snapshot=False,
    explains=(),
)
_damage = partial(  # found by a check of weights and optimizer state
    About,
    family=Family.NUMERIC, blames=Blames.STATE, onset=Onset.CHECKED, explains=(),
    sent_as=Flag.UNKNOWN_ERROR, exit_code=ExitCode.UNRECOVERABLE, exit_reason=None,
    reference=SILENT_ERRORS,
)
_skipped = partial(  # the device skips the step
    About,
    family=Family.NUMERIC, severity=Severity.WARN, blames=Blames.DATA, onset=Onset.SKIPPED,
    needs_snapshot=False, explains=(), sent_as=Flag.UNKNOWN_ERROR, reference=ZCLIP,
)
_symptom = partial(  # of damage, or of other data: an experiment decides
    About,
    family=Family.NUMERIC, severity=Severity.WARN, blames=Blames.DATA, is_fact=False,
    onset=Onset.GRADUAL, needs_snapshot=False, explains=(), sent_as=Flag.UNKNOWN_ERROR,
    exit_code=ExitCode.UNRECOVERABLE, exit_reason=ExitReason.DIVERGENCE,
)
_alert = partial(  # reported, never acted upon
    About,
    family=Family.ALERT, severity=Severity.WARN, is_fact=False, onset=Onset.AT_ONCE,
    needs_snapshot=False, explains=(), sent_as=Flag.UNKNOWN_ERROR,
    exit_code=ExitCode.UNRECOVERABLE, exit_reason=None,
)
# fmt: on


class Cause(str, Enum):
    """Why a run is in trouble.

    The order matters: of findings that are equally severe, the cause of the earlier row explains
    the later ones. Corrupt weights make NaN losses, not the other way round.
    """

    about: About
    _value_: str

    def __new__(cls, value: str, *row: About) -> "Cause":
        """Make a row: the name in journals, and what is known."""
        cause = str.__new__(cls, value)
        cause._value_, (cause.about,) = value, row
        return cause

    # fmt: off
    PREEMPTED = "preempted", _stops(
        title="The job was asked to stop", summary="The job received a signal to stop.",
        blames=Blames.SCHEDULER, is_fact=True, sent_as=Flag.UNKNOWN_ERROR,
        exit_code=ExitCode.PREEMPTED, reference="",
    )
    DEVICE_ERROR = "device_error", _stops(
        title="The device failed", summary="The device reported an error that poisons the process.",
        blames=Blames.DEVICE, is_fact=False, sent_as=None, exit_code=ExitCode.HARDWARE,
        reference=UNICRON,
    )
    COLLECTIVE_ERROR = "collective_error", _stops(
        title="Ranks lost contact",
        summary="A collective failed or timed out; the process group is broken.",
        blames=Blames.RANKS, is_fact=False, sent_as=None, exit_code=ExitCode.DISTRIBUTED,
        reference=UNICRON,
    )
    UNKNOWN = "unknown", _stops(
        title="An unknown error", summary="An error that healing has no cure for.",
        blames=Blames.UNKNOWN, is_fact=False, sent_as=Flag.UNKNOWN_ERROR,
        exit_code=ExitCode.UNRECOVERABLE, reference="",
    )
    OUT_OF_MEMORY = "oom", _raised(
        title="Memory ran out", summary="Out of memory: the micro-batch exceeds what is free.",
        family=Family.MEMORY, blames=Blames.MEMORY, sent_as=Flag.OUT_OF_MEMORY,
        exit_code=ExitCode.OUT_OF_MEMORY, exit_reason=ExitReason.OOM, reference=UNICRON,
    )
    DESYNC = "desync", About(
        title="Ranks fell out of step", summary="Ranks that should be at the same step are not.",
        family=Family.NUMERIC, severity=Severity.ERROR, blames=Blames.RANKS, is_fact=True,
        onset=Onset.AT_ONCE, needs_snapshot=True, explains=(), sent_as=Flag.UNKNOWN_ERROR,
        exit_code=ExitCode.DISTRIBUTED, exit_reason=None, reference=SILENT_ERRORS,
    )
    WEIGHT_CORRUPTION = "weight_corruption", _damage(
        title="Weights were damaged",
        summary="Weights hold NaN or Inf, or changed as no update could change them.",
        severity=Severity.ERROR, is_fact=False, needs_snapshot=True,
    )
    OPTIMIZER_CORRUPTION = "optimizer_corruption", _damage(
        title="The optimizer's state was damaged",
        summary="The optimizer's state holds NaN or Inf.",
        severity=Severity.ERROR, is_fact=True, needs_snapshot=True,
    )
    OPTIMIZER_RESET = "optimizer_reset", _damage(
        title="The optimizer lost its state",
        summary="The optimizer lost its moments or its step count.",
        severity=Severity.WARN, is_fact=False, needs_snapshot=False,
    )
    INSTABILITY_AHEAD = "instability_ahead", _alert(
        title="Instability was forecast",
        summary="The forecast expects the loss to double soon; nothing is damaged yet.",
        family=Family.WARNING, blames=Blames.MODEL, reference="",
    )
    LR_SPIKE = "lr_spike", _symptom(
        title="The learning rate jumped",
        summary="The learning rate is above its schedule, or far above all before.",
        blames=Blames.LEARNING_RATE, explains=("divergence", "loss_spike", "gradient_explosion"),
        exit_reason=None, reference=OPT,
    )
    LR_DROP = "lr_drop", _symptom(
        title="The learning rate fell",
        summary="The learning rate is below its schedule, far below the one before, or not above "
        "zero.",
        blames=Blames.LEARNING_RATE, explains=("divergence", "loss_spike", "gradient_explosion"),
        exit_reason=None, reference=OPT,
    )
    NONFINITE_LOSS = "nonfinite_loss", _skipped(
        title="The loss was NaN or Inf",
        summary="The loss is NaN or Inf; the device skipped the step.",
        is_fact=True, exit_code=ExitCode.NONFINITE, exit_reason=ExitReason.NAN,
    )
    NONFINITE_GRADIENT = "nonfinite_gradient", _skipped(
        title="Gradients held NaN or Inf",
        summary="NaN or Inf in the gradients; the device skipped the step.",
        is_fact=True, exit_code=ExitCode.NONFINITE, exit_reason=ExitReason.NAN,
    )
    DIVERGENCE = "divergence", _symptom(
        title="The loss kept rising", summary="The loss rises above the best level it had.",
        reference=OPT,
    )
    LOSS_SPIKE = "loss_spike", _symptom(
        title="The loss jumped", summary="The loss jumped far above its level.",
        reference=PALM,
    )
    GRADIENT_EXPLOSION = "gradient_explosion", _symptom(
        title="Gradients exploded",
        summary="Gradient norms are far above all before.",
        reference=ADAGC,
    )
    GRADIENT_SPIKE = "gradient_spike", _skipped(
        title="A gradient was unusually large",
        summary="A gradient norm out of the ordinary; the clip rule dealt with it.",
        is_fact=False, exit_code=ExitCode.UNRECOVERABLE, exit_reason=None,
    )
    DATA_ERROR = "data_error", _raised(
        title="A batch of data could not be used", summary="A batch could not be read or used.",
        family=Family.DATA, blames=Blames.DATA, sent_as=Flag.DATA_ERROR,
        exit_code=ExitCode.BAD_DATA, exit_reason=None,
        reference="Deep Researcher, arXiv:2604.05854",
    )
    NETWORK_ERROR = "network_error", _raised(
        title="The network did not answer", summary="A service or network did not answer.",
        family=Family.WAIT, blames=Blames.SERVICE, sent_as=Flag.NETWORK_ERROR,
        exit_code=ExitCode.NETWORK, exit_reason=None, reference=UNICRON,
    )
    STORAGE_ERROR = "storage_error", _raised(
        title="The disk could not be written", summary="The disk is full or cannot be written.",
        family=Family.WAIT, blames=Blames.SERVICE, sent_as=Flag.NETWORK_ERROR,
        exit_code=ExitCode.UNRECOVERABLE, exit_reason=None, reference=UNICRON,
    )
    MEMORY_PRESSURE = "memory_pressure", _raised(
        title="Memory was nearly used up", summary="Memory is nearly used up.",
        family=Family.MEMORY, severity=Severity.WARN, blames=Blames.MEMORY,
        sent_as=Flag.UNKNOWN_ERROR, exit_code=ExitCode.UNRECOVERABLE, exit_reason=None,
        reference=UNICRON,
    )
    SCALER_OVERFLOW = "scaler_overflow", _alert(
        title="Gradients overflowed in half precision",
        summary="Gradients overflowed under a loss scale that is still being searched.",
        severity=Severity.INFO, blames=Blames.LOSS_SCALE, reference="",
    )
    PLATEAU = "plateau", _alert(
        title="The loss stopped improving", summary="The loss has stopped improving.",
        blames=Blames.MODEL, reference=DPO,
    )
    NOT_LEARNING = "not_learning", _alert(
        title="Nothing is learned",
        summary="No gradient reaches the weights, or they do no better than those of the first "
        "step.",
        blames=Blames.MODEL, reference=OPT,
    )
    OVERFITTING = "overfitting", _alert(
        title="Evaluation fell behind training",
        summary="The evaluation loss is far above the training loss.",
        blames=Blames.MODEL, reference="",
    )
    THROUGHPUT_COLLAPSE = "throughput_collapse", _alert(
        title="Steps became slow", summary="Steps take much longer than they used to.",
        blames=Blames.DEVICE, reference=UNICRON,
    )
    WEIGHT_DRIFT = "weight_drift", _alert(
        title="A weight left its course",
        summary="A weight norm left its course faster than before.",
        blames=Blames.STATE, onset=Onset.CHECKED, explains=("divergence", "loss_spike"),
        reference=SILENT_ERRORS,
    )
    REWARD_COLLAPSE = "reward_collapse", _alert(
        title="Rewards collapsed",
        summary="Rewards of a group are all alike, or fell: nothing is learned.",
        blames=Blames.MODEL, reference=DAPO,
    )
    KL_BLOWUP = "kl_blowup", _alert(
        title="The policy left its reference", summary="The policy ran away from its reference.",
        blames=Blames.MODEL, reference=GRPO,
    )
    PREFERENCE_INVERSION = "preference_inversion", _alert(
        title="The model prefers rejected answers",
        summary="The model prefers the rejected answers to the chosen ones.",
        blames=Blames.MODEL, reference=ORPO,
    )
    LIKELIHOOD_COLLAPSE = "likelihood_collapse", _alert(
        title="Chosen answers became unlikely",
        summary="Chosen answers become far less likely than they were.",
        blames=Blames.MODEL, reference=DISPLACEMENT,
    )
    PROBE_ALARM = "probe_alarm", _alert(
        title="A probe raised its alarm",
        summary="A probe that was attached to the run found what it should warn of.",
        blames=Blames.MODEL, reference=EDGE,
    )
    # fmt: on


PROOF = "loss_with_old_weights"
"""Evidence that an experiment has found the weights damaged, and those of ``bad_step`` sound."""

AT_ONCE = "leapt_at_once"
"""Evidence that the loss went from its level to a suspicion in one step, not by a climb."""

UNTRAINED = "nothing_learned"
"""Evidence that the loss before the damage was no lower than that of the first weights."""

NOT_FINITE = "not finite"
"""A loss, as evidence: JSON has no number for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one detector found.

    Attributes:
        cause: why, as far as this detector can know.
        step: where it was seen.
        bad_step: the first step that may have done damage; a snapshot of it or before is clean.
        severity: that of the cause, or what the evidence asks for.
        evidence: numbers and names, for the journal.
        streak: how often in a row it was seen.
        wants_proof: whether it is a suspicion, which the experiment settles before anything acts.
            It depends on the evidence: weights that hold NaN need no proof, a leap of theirs does.
        is_of_evaluation: whether it concerns what only a forward in evaluation mode reads, such as
            running statistics, so that the experiment has to use that mode.
        is_kept: whether a suspicion is reported without a proof. A leap of weights that the
            experiment finds no worse than before is a ``weight_drift`` then; that nothing is
            learned is reported where no experiment can be run.
    """

    cause: Cause
    step: int
    bad_step: int
    severity: Severity
    evidence: dict[str, object]
    streak: int = 1
    wants_proof: bool = False
    is_of_evaluation: bool = False
    is_kept: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as values that JSON has."""
        values: dict[str, Any] = plain(asdict(self))
        return {**values, "cause": self.cause.value, "severity": self.severity.name}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Finding":
        """Return the finding that :meth:`to_json` wrote."""
        named = {"cause": Cause(values["cause"]), "severity": Severity[values["severity"]]}
        return cls(**{**values, **named})
