"""What healing knows of a run, for checkpoints: ours, those of a trainer and those of Lightning."""

import copy
from typing import Any

from heal.hearing.listener import Listener
from heal.history import History
from heal.run import TorchRun
from heal.state.plain_values import plain
from heal.step.guarded_step import GuardedStep
from heal.treatment import Treatment

VERSION = 2


class HealingMemory:
    """What was tried, what the detectors remember, and what healing changed about the run.

    Without it a run that was resumed would have all its attempts again, and try what has failed.

    Args:
        run: the step that comes next, and what healing changed.
        guarded: clips and watches the loss.
        listener: the detectors, and what they found that is not treated yet.
        treatment: what was tried.
    """

    def __init__(
        self, run: TorchRun, guarded: GuardedStep, listener: Listener, treatment: Treatment
    ) -> None:
        self._run = run
        self._guarded = guarded
        self._listener = listener
        self._treatment = treatment

    def values(self) -> dict[str, Any]:
        """Return it as plain values, for whoever saves the tensors of clipping anyway."""
        self._listener.catch_up()  # the detectors are saved with all that they can know
        return {
            "healing": self._listener.watch.state(),
            "untreated": self._listener.untreated(),
            "history": self._treatment.history.state(),
            "run": plain(self._run.state()),
        }

    def resume(self, step: int, values: dict[str, Any]) -> None:
        """Go on at a step of another process, with what :meth:`values` returned there."""
        self._treatment.history = History.from_state(values["history"])
        self._listener.watch.load_state(values["healing"])
        self._run.resume(step, values["run"])
        self._listener.treat_later(values.get("untreated", ()))

    def state_dict(self) -> dict[str, Any]:
        """Return it with the state of clipping and of the loss, which are tensors of their own."""
        return {
            "version": VERSION,
            "step": self._run.step,
            "clip": [optimizer.clipper.state_dict() for optimizer in self._guarded.optimizers],
            "loss": self._guarded.watch.state.clone(),
            **self.values(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what :meth:`state_dict` returned; weights and optimizer are as they were then.

        Raises:
            ValueError: it is of another version of this library.
            Exception: it cannot be used. All is as it was, for who goes on then learns anew.
        """
        version = state.get("version", 1)  # that of Lightning had none
        if version != VERSION:
            raise ValueError(f"healing state is of version {version}; wanted {VERSION}")
        before = copy.deepcopy(self.state_dict())
        try:
            self._load(state)
        except Exception:
            self._load(before)
            raise

    def _load(self, state: dict[str, Any]) -> None:
        for optimizer, clip in zip(self._guarded.optimizers, state["clip"], strict=True):
            optimizer.clipper.load_state_dict(clip)
        self._guarded.watch.state.copy_(state["loss"])
        self.resume(int(state["step"]), state)
