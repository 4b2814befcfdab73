"""The whole loop: epochs, accumulation, attempts and the progress bar."""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from heal.data.step_batches import NoMoreBatches, StepBatches
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
        with closing(self._all_epochs()) as source:
            while self.run.step < self.steps:
                try:
                    self._step(StepBatches(source, self.accumulate))
                except NoMoreBatches:
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

    def _step(self, batches: StepBatches) -> None:
        before = self.run.step
        if self.attempts.take_step(self.train_step, batches):
            self.bar.update(self.run.step)
            if self.on_step is not None and self.run.step > before:  # else it was taken back
                self.on_step(self.run.step - 1)

    def _all_epochs(self) -> Generator[Any, None, None]:
        """Yield batches without end, unless an epoch has none: a step may begin in one epoch."""
        before = -1
        while self.stream.ordinal != before:
            before = self.stream.ordinal
            yield from self.stream.epoch(self.loader, tells_epoch=True)
