"""The whole loop: epochs, accumulation, attempts and the progress bar."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from heal.data.stream import BatchStream
from heal.healer.attempts import Attempts
from heal.healer.progress import Progress
from heal.run import TorchRun
from heal.step.micro_batch import TrainStep


@dataclass(frozen=True, slots=True)
class WholeLoop:
    """Trains until so many steps are done, over as many epochs as that takes."""

    run: TorchRun
    stream: BatchStream
    attempts: Attempts
    train_step: TrainStep
    loader: Any
    steps: int
    accumulate: int
    bar: Progress
    on_step: Callable[[int], None] | None

    def train(self) -> str | None:
        """Train to the end; return why not all steps could be done, None if they were."""
        waiting: list[Any] = []  # batches of a step that an epoch ended in go into the next
        while self.run.step < self.steps:
            before = self.stream.ordinal
            self._epoch(waiting)
            if self.stream.ordinal == before:
                return self._shortfall()
        return None

    def _shortfall(self) -> str:
        done = f"{self.run.step} of {self.steps} steps were done"
        if not self.stream.ordinal:
            return f"the loader has no batches; {done}"
        return (
            f"the loader gave {self.stream.ordinal} batches and then none; {done}. Iterables that "
            "can be passed over once, such as generators, end a run with their first epoch: wanted "
            "a loader that begins anew, or fewer steps"
        )

    def _epoch(self, waiting: list[Any]) -> None:
        for batch in self.stream.epoch(self.loader):
            waiting.append(batch)
            if len(waiting) < self.accumulate:
                continue
            batches = waiting.copy()
            waiting.clear()
            if self.attempts.take_step(self.train_step, batches):
                self.bar.update(self.run.step)
                if self.on_step is not None:
                    self.on_step(self.run.step - 1)
            if self.run.step >= self.steps:
                return
