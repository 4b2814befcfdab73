"""The failures: what strikes, when, and where the seeds of this project name it."""

from typing import Any, NamedTuple

from heal.testing import Fault

AT = 50  # of 120 steps: well into training, with time left to recover


class Row(NamedTuple):
    """One failure: its name, the faults that make it, and a learning rate that creeps, if any."""

    name: str
    faults: tuple[Fault, ...]
    creep: float = 1.0  # factor on the schedule, every step from AT on
    creep_steps: int = 0


ROWS = (
    Row("undisturbed", ()),
    Row("NaN gradient, one batch", (Fault("nan_gradient", at=AT),)),
    Row("Inf gradient, one batch", (Fault("inf_gradient", at=AT),)),
    Row("NaN loss, one batch", (Fault("nan_loss", at=AT),)),
    Row("NaN loss, six batches in a row", (Fault("nan_loss", at=AT, times=6),)),
    Row(
        "NaN in one batch of twenty", tuple(Fault("nan_gradient", at=s) for s in range(7, 120, 20))
    ),
    Row("gradient x 1e6, one batch", (Fault("exploding_gradient", at=AT),)),
    Row("gradient x 1e6, five in a row", (Fault("exploding_gradient", at=AT, times=5),)),
    Row("loss x 100, one batch", (Fault("loss_spike", at=AT),)),
    Row("loss x 100, five in a row", (Fault("loss_spike", at=AT, times=5),)),
    Row("LR x 1000 for a step", (Fault("lr_spike", at=AT),)),
    Row("LR x 100 for a step", (Fault("lr_spike", at=AT, size=100.0),)),
    Row("LR creeps up, 20 % a step", (), creep=1.2, creep_steps=40),
    Row("NaN in a weight", (Fault("corrupt_weight", at=AT),)),
    Row("a weight becomes 1e4", (Fault("corrupt_weight", at=AT, size=1e4),)),
    Row("all weights x 4", (Fault("weight_drift", at=AT),)),
    Row("NaN in the optimizer's state", (Fault("corrupt_optimizer", at=AT),)),
    Row("optimizer's state lost", (Fault("reset_optimizer", at=AT),)),
    Row("out of memory in forward", (Fault("oom_forward", at=AT, times=2),)),
    Row("out of memory in backward", (Fault("oom_backward", at=AT, times=2),)),
    Row("out of memory in the step", (Fault("oom_step", at=AT),)),
    Row("batch of a wrong shape", (Fault("bad_batch", at=AT),)),
    Row("batch of NaN (images only)", (Fault("nan_batch", at=AT),)),
    Row("loader raises", (Fault("loader_error", at=AT),)),
    Row("network error, twice", (Fault("network_error", at=AT, times=2),)),
    Row(
        "bit flip in a snapshot, then NaN",
        (Fault("flip_snapshot_bit", at=AT - 1), Fault("corrupt_weight", at=AT)),
    ),
)


def creeping(row: Row, scheduler: Any, attempt: int) -> None:
    """Raise the schedule of a LambdaLR, as a bug in it would."""
    if row.creep_steps and AT <= attempt < AT + row.creep_steps:
        scheduler.base_lrs = [base * row.creep for base in scheduler.base_lrs]
