"""The state of clipping and healing in a checkpoint of Lightning's."""

from typing import Any

from heal.history import History
from heal.loop import Healer


def healing_state(healer: Healer) -> dict[str, Any]:
    """Return what a checkpoint needs: plain values, and tensors as they are on the device."""
    run = healer._run
    return {
        "step": healer.last_step + 1,
        "lr_scale": run.lr_scale,
        "lr_ramp": None if run._ramp is None else list(run._ramp),
        "clip": [optimizer.clipper.state_dict() for optimizer in healer.optimizers],
        "loss": healer._guarded.watch.state.clone(),
        "detectors": healer._listener.watch.state(),
        "history": healer._treatment.history.state(),
    }


def resume(healer: Healer, saved: dict[str, Any]) -> None:
    """Go on where a checkpoint was made; weights and optimizer have been restored by Lightning."""
    run = healer._run
    run.step = int(saved["step"])
    run.lr_scale = float(saved["lr_scale"])
    ramp = saved["lr_ramp"]
    run._ramp = None if ramp is None else (float(ramp[0]), int(ramp[1]), int(ramp[2]))
    for optimizer, state in zip(healer.optimizers, saved["clip"], strict=True):
        optimizer.clipper.load_state_dict(state)
    healer._guarded.watch.state.copy_(saved["loss"])
    healer._listener.watch.load_state(saved["detectors"])
    healer._treatment.history = History.from_state(saved["history"])
