"""How a run ended, for schedulers and scripts: one number per reason to stop."""

from enum import Enum, IntEnum


class ExitCode(IntEnum):
    """Exit codes of a healed run.

    They avoid 1 and 2 (Python and argparse), 16 and 17 (Megatron's rerun machine), 64 to 78
    (sysexits) and 128 and above (signals). 75 is the exception: by convention it means "try again
    later", which is what a preempted job asks of its scheduler.
    """

    OK = 0
    """The run finished, with or without healing."""

    UNRECOVERABLE = 40
    """A plan could not be carried out, or trouble had no cure."""

    BUDGET_SPENT = 41
    """Every attempt of ``max_recovery_attempts`` was used."""

    NO_SNAPSHOT = 42
    """A rollback was called for and no good snapshot was old enough."""

    NONFINITE = 43
    """NaN or Inf: ``nan_action`` is "raise", or ``max_consecutive_skips`` steps were skipped."""

    OUT_OF_MEMORY = 44
    """Out of memory at the smallest micro-batch."""

    BAD_DATA = 45
    """More data errors, in all or in a row, than the configuration allows."""

    NETWORK = 46
    """A service stayed away longer than all backoffs together."""

    DISTRIBUTED = 47
    """A collective failed or timed out: the process group is broken; restart the job."""

    HARDWARE = 48
    """The device reports an error that poisons the process; restart, better elsewhere."""

    SHUTDOWN_TIMEOUT = 49
    """A signal came, and saving took over ``shutdown_timeout_sec``; the last checkpoint counts."""

    HUNG = 50
    """No step ended within the timeout; ``hang.rank*.txt`` has the stacks and the missing ranks."""

    REPLICAS_DIFFER = 51
    """Copies of a parameter differ between ranks: memory or arithmetic of one is at fault."""

    NOT_SAVED = 52
    """Stopped by a signal, and the last state could not be saved; an older checkpoint counts."""

    PREEMPTED = 75
    """Stopped by a signal, and the last state is on the disk; run again to go on.

    Without a ``checkpoint_dir`` saving is up to the caller, and this code says only "stopped".
    """


class ExitReason(str, Enum):
    """Why a run ended, in one word of the postmortem."""

    COMPLETED = "completed"
    EXCEPTION = "exception"
    OOM = "oom"
    NAN = "nan"
    DIVERGENCE = "divergence"
    SIGTERM = "sigterm"
    SIGINT = "sigint"
    UNRECOVERABLE = "unrecoverable"
    HUNG = "hung"
    """No step ended in time, and ``hang_exit`` ended the process."""
    EXITED = "exited"
    """Left before its end without an error: by ``sys.exit``, or by ``break``."""
