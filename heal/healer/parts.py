"""What a healer is made of, put together.

Its methods work with these parts, and so do integrations that take the place of its loop. A
hand-written loop needs none of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.nn import Module
from torch.optim import Optimizer

from heal.cluster.watch import ClusterWatch
from heal.config import HealingConfig
from heal.data.stream import BatchStream
from heal.detect import Watch
from heal.experiment import Experiment
from heal.healer import attempts
from heal.healer.attached_probes import AttachedProbes
from heal.healer.attempts import Attempts
from heal.healer.bookkeeping import Bookkeeping
from heal.healer.healing_memory import HealingMemory
from heal.hearing.listener import Listener
from heal.journal.journal import Journal
from heal.journal.notes import Notes
from heal.run import TorchRun
from heal.state.buffer_copies import BufferCopies
from heal.state.training_state import TrainingState
from heal.step.guarded_step import GuardedStep
from heal.step.learning_rate import LearningRates
from heal.step.micro_batch import MicroBatcher
from heal.step.schedules import Schedules
from heal.treatment import Treatment
from heal.trials import BodyTrials, Forward


class Owner(attempts.Owner, Protocol):
    """What is needed of the healer."""

    def numbers(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class Given:
    """What a healer was given to work with.

    Attributes:
        schedulers: those that a step steps, and those that the caller does.
        process_group: the ranks that act alike; all if None.
        sleep: waits between retries of what the network refused.
        clock: seconds, for the duration of steps.
        forward: computes the loss of a batch, for experiments; None if only the loop can.
    """

    model: Module
    optimizers: Sequence[Optimizer]
    schedulers: tuple[Any, Any]
    config: HealingConfig
    scaler: Any
    process_group: Any
    sleep: Callable[[float], None]
    clock: Callable[[], float]
    forward: Forward | None = None


class Parts:
    """All parts of a healer; each knows those before it.

    Args:
        given: by the user.
        journal: where all is written down.
        notes: told of what healing itself could not do.
        owner: the healer.

    Attributes:
        notes: what healing itself could not do.
        guarded: clips and steps, unless the device refuses.
        schedules: the schedulers.
        state: all that training changes.
        micro: cuts batches into pieces that fit into memory.
        stream: the batches, and where in them the run is.
        run: the run as plans change it.
        treatment: makes plans and carries them out.
        listener: hears what the device said.
        experiment: tells damaged weights from other data.
        trials: has the body of a hand-written loop run once more, for experiments.
        memory: what healing knows, for checkpoints.
        attempts: tries to take a step, and heals what that raises.
        probes: looks at the run every so many steps.
        books: what is done before and after each step.
    """

    def __init__(self, given: Given, journal: Journal, notes: Notes, owner: Owner) -> None:
        model, config, note, group = given.model, given.config, notes.add, given.process_group
        buffers = BufferCopies(model, note)
        self.notes = notes
        self.guarded = guarded = GuardedStep(
            given.optimizers, config, model.named_parameters(), given.scaler, group, note, buffers
        )
        wrapped, extra = guarded.optimizers, {"loss": guarded.watch.state}
        self.schedules = Schedules(*given.schedulers, wrapped, config.data == "replay", note)
        self.state = state = TrainingState(
            model, wrapped, self.schedules.all, guarded.scaler, extra, buffers, note
        )
        smallest, grow_steps = config.micro_batch_min, config.micro_batch_grow_steps
        self.micro = MicroBatcher(model, state.parameters, smallest, grow_steps, None, buffers)
        self.stream = BatchStream(
            lambda error, epoch, index: self.attempts.loader_failed(error, epoch, index),
            lambda: self.run.step,
            lambda: self.books.begin_epoch(),
            lambda: self.books.between_steps(is_drawing=True),
            keeps_last=guarded.ranks.has_others,
            note=note,
        )
        self.run = run = TorchRun(
            state, guarded, config, self.stream, self.micro, note, given.sleep
        )
        run.schedules, notes.step = self.schedules, lambda: run.step
        self.treatment = Treatment(run, config, journal, note)
        rates = LearningRates(wrapped, self.schedules.wanted, note)
        watch = Watch(config)
        self.experiment = Experiment(
            run,
            state,
            guarded.ranks,
            watch.loss_level,
            watch.held_lr,
            2 * config.loss_spike_patience,
            note,
        )
        self.trials = BodyTrials(self.experiment, guarded, self.schedules, given.forward, note)
        self.listener = Listener(
            run,
            guarded,
            self.treatment,
            config,
            rates,
            watch,
            self.experiment,
            given.clock,
            note,
        )
        self.listener.cluster = ClusterWatch(
            model, config, journal, self.listener.report, note, group
        )
        self.memory = HealingMemory(run, guarded, self.listener, self.treatment)
        self.attempts = Attempts(
            run,
            guarded,
            self.micro,
            self.treatment,
            self.stream,
            journal,
            owner,
            self.experiment,
        )
        self.probes = AttachedProbes(model, guarded.ranks, self.treatment, journal, notes)
        self.books = Bookkeeping(
            run,
            self.listener,
            config,
            journal,
            notes,
            self.probes,
            owner.numbers,
            lambda: self.stream.is_open,
        )
