"""What healing did in a run, as numbers for ``TrainOutput.metrics``."""

from heal.actions import Backoff, Halt, Refuse, Rollback, ScaleLr, ShrinkBatch, SkipBatches
from heal.loop import Healer

COUNTED = {
    "healing/refusals": Refuse,
    "healing/rollbacks": Rollback,
    "healing/lr_cuts": ScaleLr,
    "healing/skips": SkipBatches,
    "healing/batch_cuts": ShrinkBatch,
    "healing/waits": Backoff,
    "healing/halts": Halt,
}


def summary(healer: Healer) -> dict[str, float]:
    """Return the healer's metrics, and how often it did what."""
    actions = [action for _, _, plan in healer.history for action in plan]
    counts = {
        name: float(sum(isinstance(action, kind) for action in actions))
        for name, kind in COUNTED.items()
    }
    alerts = sum(not plan for _, _, plan in healer.history)
    return {
        **healer.metrics(),
        **counts,
        "healing/alerts": float(alerts),
        "healing/lr_scale": healer.lr_scale,
        "healing/micro_batches": float(healer.parts.run.micro_batches),
    }
