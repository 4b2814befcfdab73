"""The trainer's batches as a stream that can be rewound, skipped, and read past a bad sample."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate import skip_first_batches
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import send_to_device
from torch import Tensor
from torch.optim import Optimizer

from heal.actions import HealingError, Plan, ScaleLr
from heal.causes import Cause
from heal.config import HealingConfig
from heal.data.loader_pass import EpochStart, generator_states, set_generators
from heal.data.stream import BatchStream, Place
from heal.diagnose import Diagnosis
from heal.exit_codes import ExitCode
from heal.integrations.patches import Patches
from heal.policy import LR_FLOOR
from heal.recovery import Hook
from heal.training_state import RngState

# Small questions about a trainer that is ready to train, and small answers for it.


def batches_passed_over(trainer: Any) -> int:
    """Return how many batches of its first epoch a trainer leaves out because it was resumed."""
    args = trainer.args
    loader: Any = getattr(trainer.callback_handler, "train_dataloader", None)
    if args.ignore_data_skip or not trainer.state.global_step:
        return 0
    try:
        steps = max(1, -(-len(loader) // args.gradient_accumulation_steps))
    except TypeError:  # a loader without a length has one long epoch
        steps = trainer.state.max_steps
    return int(trainer.state.global_step % steps * args.gradient_accumulation_steps)


def batches_of_steps(trainer: Any, steps: int) -> int | None:
    """Return how many batches so many steps take from the first one on; None if nobody can say."""
    loader: Any = getattr(trainer.callback_handler, "train_dataloader", None)
    try:
        length = len(loader)
    except TypeError:
        return None
    per_step = trainer.args.gradient_accumulation_steps
    epochs, rest = divmod(steps, max(1, -(-length // per_step)))
    return int(epochs * length + rest * per_step)


def raise_lr_at_chance(factor: float, config: HealingConfig) -> Hook:
    """Return a hook that answers a plateau at chance with a higher learning rate."""

    def hook(diagnosis: Diagnosis, plan: Plan) -> Plan | None:
        if diagnosis.cause is Cause.PLATEAU and diagnosis.evidence.get("at_chance"):
            return (ScaleLr(factor, LR_FLOOR, config.lr_ramp_steps),)
        return None

    return hook


def known_to_schedulers(step: Callable[..., None]) -> Callable[..., None]:
    """Mark a step as one that notes that it was called, or schedulers warn that it does not."""

    def noted(closure: Any = None) -> None:
        step(closure)

    noted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return noted


def inner_optimizer(trainer: Any) -> Optimizer:
    """Return the torch optimizer within what accelerate made of it.

    Raises:
        TypeError: it is not one that can be guarded.
    """
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"the trainer's optimizer is {type(optimizer).__name__}; expected a torch Optimizer, "
            "whose steps can be refused. DeepSpeed steps by itself and cannot be healed"
        )
    return optimizer


def is_preemption(error: BaseException | None) -> bool:
    """Tell whether a run was stopped from outside and would go on if started again."""
    return isinstance(error, HealingError) and error.exit_code == int(ExitCode.PREEMPTED)


class TrainerBatches:
    """Stands in for ``trainer.get_batch_samples``: the same batches, drawn through the healer.

    Args:
        trainer: whose loader is read.
        stream: counts, skips and rewinds.
        waits: told of every error of the loader; True if the same batch should be tried again.
        before_step: called before anything is drawn for a step.
        skipped_first: batches of the first epoch that a resumed trainer passes over.
        is_followed: whether the trainer's loop goes back when the data does, and then begins epochs
            that were begun before: they are the stream's own already.

    Attributes:
        of_step: the batches of the step that is under way.
    """

    def __init__(
        self,
        trainer: Any,
        stream: BatchStream,
        waits: Callable[[Exception], bool],
        before_step: Callable[[], None],
        skipped_first: int,
        is_followed: bool = False,
    ) -> None:
        self._trainer = trainer
        self._is_followed = is_followed
        self._stream = stream
        self._before_step = before_step
        self._loader = EpochLoader(trainer, waits, skipped_first)
        self.of_step: list[Any] = []
        self._place_of: dict[int, Place] = {}  # by identity, of the batches of this step
        self._offered: Any = None
        self._replaced = 0
        self._is_to_begin = False
        self._epoch: Iterator[Any] | None = None
        self._first_step = trainer.state.global_step
        self._num_given = self._lost_before = 0  # in the epoch under way, and before it

    @property
    def has_lost_epoch(self) -> bool:
        """Whether the epoch gave nothing because its batches were passed over."""
        return not self._num_given and self._num_lost() > self._lost_before

    def unwanted(self) -> list[int]:
        """Return which batches will not be given out, counted from the first of the training."""
        began = self._begins_at()
        return [] if began is None else [began + number for number in self._stream.unwanted()]

    def leave_out(self, unwanted: Iterable[int]) -> None:
        """Do not give out what :meth:`unwanted` returned in another process.

        A trainer that is resumed begins at the batch that its count of steps tells.
        """
        began = self._begins_at()
        if began is not None:
            self._stream.leave_out(number - began for number in unwanted if number >= began)

    def _begins_at(self) -> int | None:
        """Return how many batches come before the first that is drawn here, if that is known."""
        if self._trainer.args.ignore_data_skip and self._first_step:
            return None
        return batches_of_steps(self._trainer, self._first_step)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """Return the batches of one step and the number of items in them."""
        self._before_step()
        self._place_of.clear()
        if epoch_iterator is not self._offered:
            self._offered = epoch_iterator
            if not (self._is_followed and self._stream.is_replaying):
                self._loader.offer(epoch_iterator)
                self._is_to_begin = True
            self._num_given, self._lost_before = 0, self._num_lost()
        batches: list[Any] = []
        while len(batches) < num_batches:
            batch = self._draw()
            if batch is None:
                break
            batches.append(batch)
        if len(batches) < num_batches and self._num_lost():
            # Batches were passed over, so that the epoch ends within a step: the trainer would
            # accumulate these into its next step without dividing by their number.
            batches = []
        self.of_step = batches
        self._num_given += len(batches)
        return batches, self._trainer._get_num_items_in_batch(batches, device)

    def _num_lost(self) -> int:
        return self._replaced + self._stream.skipped + self._loader.failed

    def replacement(self) -> Any | None:
        """Return a batch for one that could not be used; None at the end of an epoch."""
        self._replaced += 1
        return self._draw()

    def identity(self, batch: Any) -> dict[str, Any]:
        """Return epoch, number and samples of a batch of this step; empty if it is another's."""
        place = self._place_of.get(id(batch))
        return {} if place is None else place.named()

    def _draw(self) -> Any | None:
        """Return the next batch; None at the end of an epoch.

        The rest of an epoch that was rewound comes before the one that the trainer has begun.
        """
        while True:
            if self._epoch is None:
                if not self._is_to_begin:
                    return None
                self._is_to_begin = False
                self._loader.begin_offered(is_used=not self._stream.will_rewind)
                self._epoch = self._stream.epoch(self._loader)
            try:
                batch = next(self._epoch)
            except StopIteration:
                self._epoch = None
                continue
            place = self._stream.last_place
            if place is not None:
                self._place_of[id(batch)] = place
            return batch


class EpochLoader:
    """The trainer's loader as :class:`BatchStream` wants it: iterable again and again.

    The first pass over an epoch uses the very iterator that the trainer made.
    """

    def __init__(
        self, trainer: Any, waits: Callable[[Exception], bool], skipped_first: int
    ) -> None:
        self.epoch = 0
        self.failed = 0
        self.sampler = self  # BatchStream asks the sampler for the epoch, and sets it
        self._trainer = trainer
        self.waits = waits
        self._first_epoch: int | None = None
        self._skipped_first = skipped_first
        self._offered: Any = None  # by the trainer, for the epoch that it begins
        self._begun: Any = None  # the same, once that is the epoch to be drawn
        self._offered_epoch = 0

    @property
    def batch_sampler(self) -> Any:
        """That of the loader: its generators belong to the position in the data.

        None if the order hangs on the number of the epoch alone, as it does by default.
        """
        batch_sampler = getattr(self._loader(), "batch_sampler", None)
        is_seeded = isinstance(getattr(batch_sampler, "sampler", None), SeedableRandomSampler)
        return None if is_seeded else batch_sampler

    def offer(self, iterator: Any) -> None:
        """Give the iterator that the trainer made for the epoch that begins."""
        self._offered = iterator
        self._offered_epoch = int(getattr(self._loader(), "iteration", self.epoch + 1))

    def begin_offered(self, is_used: bool) -> None:
        """Return to the epoch of that iterator: the end of the one before has moved the loader.

        Args:
            is_used: whether the next pass is that epoch, and not an earlier one drawn again.
        """
        self._begun, self._offered = self._offered if is_used else None, None
        self.set_epoch(self._offered_epoch)
        if self._first_epoch is None:
            self._first_epoch = self.epoch

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass be that of another epoch."""
        self.epoch = epoch
        if hasattr(self._loader(), "set_epoch"):
            self._loader().set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        return _EpochIterator(self, begun)

    def __len__(self) -> int:
        is_first = self.epoch == self._first_epoch
        return len(self._loader()) - (self._skipped_first if is_first else 0)

    def sample_indices(self, start: EpochStart, index: int) -> list[Any] | None:
        """Ask the sampler again for one batch of a pass; generators are put back.

        None if the pass is over, for the order may hang on the number of the epoch, or if the
        sampler gives another order when it is asked twice.
        """
        if start.sampler_epoch not in (None, self.epoch):
            return None
        now, states = RngState.now(), generator_states(self)
        try:
            first, again = (self._drawn(start, index + 1) for _ in range(2))
            return list(first[index]) if first == again and index < len(first) else None
        except Exception:  # a sampler of somebody else's making; identity is a courtesy
            return None
        finally:
            set_generators(self, states)
            now.put_back()

    def _drawn(self, start: EpochStart, count: int) -> list[Any]:
        start.rng.put_back()
        set_generators(self, start.generators)
        loader = self.pass_over()
        # A loader draws the seed of its workers before its sampler draws anything.
        own = getattr(loader, "generator", None)
        torch.empty((), dtype=torch.int64).random_(generator=own)
        return list(itertools.islice(iter(loader.batch_sampler), count))

    def pass_over(self) -> Any:
        """Return the loader for the present epoch, without what a resumed trainer left out."""
        loader = self._loader()
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)
        if self.epoch == self._first_epoch and self._skipped_first:
            return skip_first_batches(loader, self._skipped_first)
        return loader

    def _loader(self) -> Any:
        return self._trainer.callback_handler.train_dataloader


class _EpochIterator:
    """One pass. A failure ends accelerate's generator, so that the pass goes on beneath it."""

    def __init__(self, loader: EpochLoader, offered: Any) -> None:
        self._loader = loader
        self._rng = RngState.now()
        self._iterator: Iterator[Any] = iter(loader.pass_over()) if offered is None else offered
        self._given = 0
        self._is_beneath = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise
            except Exception as error:
                if not self._loader.waits(error) and self._is_beneath:
                    self._given += 1
                    self._loader.failed += 1
                    raise
                self._go_beneath()
                continue
            self._given += 1
            return batch

    def _go_beneath(self) -> None:
        """Start the pass again without look-ahead, which would lose the batch before a bad one."""
        now = RngState.now()
        self._rng.put_back()
        loader = self._loader.pass_over()
        base = getattr(loader, "base_dataloader", loader)
        device = getattr(loader, "device", None)
        rest = iter(base)
        for _ in range(self._given):
            _drop(rest)
        self._iterator = rest if device is None else _Moved(rest, device)
        self._is_beneath = True
        now.put_back()


class _Moved:
    """An iterator whose batches are sent to a device; a failure does not end it."""

    def __init__(self, batches: Iterator[Any], device: Any) -> None:
        self._batches = batches
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return send_to_device(next(self._batches), self._device)


def _drop(batches: Iterator[Any]) -> None:
    """Draw a batch that was seen before; if it failed then, it may fail again."""
    try:
        next(batches)
    except StopIteration:
        raise
    except Exception:
        return


# The trainer's loop over an epoch, begun again at the place that a rollback returned to.
#
# How many batches a step has, when gradients are synchronised and when an epoch is over follows
# from counters that are local to that loop. With ``data = "replay"`` the data goes back, and so
# must they: else a step of the replay would have other batches than it had the first time.


RESUMED = "a rollback"  # where a path of a checkpoint would stand; nothing is read from it


class ReplayedEpochs:
    """Stands in for ``trainer._run_epoch``; after a rollback it runs the epochs since once more.

    Args:
        trainer: whose loop it is.
        patches: where changes to the trainer are noted, to be undone by the owner.
    """

    def __init__(self, trainer: Any, patches: Patches) -> None:
        self._trainer = trainer
        self._run_epoch: Callable[..., None] = trainer._run_epoch
        self._on_epoch_end: Callable[..., Any] = trainer.callback_handler.on_epoch_end
        self._returns = False
        patches.set(trainer, "_run_epoch", self.run)
        patches.set(trainer.callback_handler, "on_epoch_end", self.on_epoch_end)

    def leave(self, control: Any) -> None:
        """Leave the loop after this step, because the trainer was returned to an earlier one."""
        self._returns = control.should_epoch_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any) -> Any:
        """Tell the callbacks, unless the epoch was left for a replay and did not end."""
        return control if self._returns else self._on_epoch_end(args, state, control)

    def run(self, *, epoch: int, steps_in_epoch: int, **given: Any) -> None:
        """Run an epoch, and those before it that a rollback took back, to their ends."""
        trainer = self._trainer
        self._run_epoch(epoch=epoch, steps_in_epoch=steps_in_epoch, **given)
        while self._returns and not trainer.control.should_training_stop:
            self._returns = trainer.control.should_epoch_stop = False
            place = trainer.state.epoch or 0.0
            first = int(place)
            passed = round((place - first) * steps_in_epoch)
            self._run_rest(first, passed, steps_in_epoch, given)
            for number in range(first + 1, epoch + 1):
                if self._returns or trainer.control.should_training_stop:
                    break
                trainer.control = trainer.callback_handler.on_epoch_begin(
                    trainer.args, trainer.state, trainer.control
                )
                self._run_rest(number, 0, steps_in_epoch, given)
        self._returns = False

    def _run_rest(self, epoch: int, passed: int, steps_in_epoch: int, given: Any) -> None:
        """Run an epoch from a batch on, as a trainer does that was resumed there."""
        patches = Patches()
        patches.set(self._trainer, "_load_rng_state", lambda checkpoint: None)  # we put it back
        patches.set(self._trainer.args, "ignore_data_skip", False)
        own = {
            "resume_from_checkpoint": RESUMED if passed else None,
            "epochs_trained": epoch,
            "steps_trained_in_current_epoch": passed,
        }
        try:
            self._run_epoch(epoch=epoch, steps_in_epoch=steps_in_epoch, **{**given, **own})
        finally:
            patches.put_back()


# Where a trainer is: the counters, sums and buffers that it keeps beside weights and optimizer.


SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "current_flos")
"""What the trainer adds up between two lines of its log."""

BEST = ("best_metric", "best_model_checkpoint", "best_global_step")
"""What the trainer's state holds of its best evaluation, which may be of a step that is undone."""

ONLINE = (
    "_step",
    "_buffered_inputs",
    "_metrics",
    "_current_train_step_time",
    "_total_train_tokens",
)
"""What trainers of TRL keep from step to step: generations to train on, numbers to log."""


class TrainerPosition:
    """Saves the place of a trainer as plain values, and returns it to such a place.

    Args:
        trainer: whose ``state`` and sums are meant.
        replays: whether data are rewound as well, so that epochs are counted back.

    Attributes:
        replays: whether data are rewound as well.
        was_set_back: whether the trainer was returned since the last :meth:`settle`.
    """

    def __init__(self, trainer: Any, replays: bool) -> None:
        self._trainer = trainer
        self.replays = replays
        self._epochs_ahead = 0.0  # the loop's own count of epochs cannot be set back
        self._ahead = 0.0  # by the rollback of this step
        self.was_set_back = False

    def save(self) -> dict[str, Any]:
        """Return the place; a sum on the device is copied there."""
        trainer, state = self._trainer, self._trainer.state
        running = getattr(trainer, "_tr_loss", None)
        return {
            "global_step": state.global_step,
            "epoch": state.epoch,
            "tokens": state.num_input_tokens_seen,
            "flos": state.total_flos,
            "logged": len(state.log_history),
            "best": {name: getattr(state, name) for name in BEST if hasattr(state, name)},
            "running_loss": running.detach().clone() if isinstance(running, Tensor) else None,
            "sums": {name: getattr(trainer, name) for name in SUMS if hasattr(trainer, name)},
            "online": {
                name: _copied(getattr(trainer, name)) for name in ONLINE if hasattr(trainer, name)
            },
        }

    @torch.no_grad()
    def put_back(self, saved: dict[str, Any]) -> None:
        """Return to a place. Lines of the log about steps that are undone are taken out."""
        trainer, state = self._trainer, self._trainer.state
        if self.replays and state.epoch is not None:
            self._ahead += state.epoch - (saved["epoch"] or 0.0)
        state.global_step, state.epoch = saved["global_step"], saved["epoch"]
        state.num_input_tokens_seen, state.total_flos = saved["tokens"], saved["flos"]
        del state.log_history[saved["logged"] :]
        for name, value in saved["best"].items():
            setattr(state, name, value)
        if saved["running_loss"] is not None:
            trainer._tr_loss.copy_(saved["running_loss"])
        for name, value in saved["sums"].items():
            setattr(trainer, name, value)
        for name, value in saved["online"].items():
            setattr(trainer, name, _copied(value))
        self.was_set_back = True

    def correct_epoch(self) -> None:
        """Count epochs by the data seen: the trainer's loop counts what was undone as well."""
        state = self._trainer.state
        self._epochs_ahead, self._ahead = self._epochs_ahead + self._ahead, 0.0
        if self._epochs_ahead and state.epoch is not None:
            state.epoch -= self._epochs_ahead

    def settle(self, control: Any, is_loop_set_back: bool = False) -> bool:
        """After a step: tell whether it was undone, and if so keep it from being logged or saved.

        A stop that the undone step had reached is taken back too.

        Args:
            control: of the trainer.
            is_loop_set_back: whether the trainer's loop follows, so that it counts epochs right.
        """
        if not self.was_set_back:
            return False
        self.was_set_back = False
        if is_loop_set_back:
            self._ahead = 0.0
        control.should_log = control.should_save = control.should_evaluate = False
        if self._trainer.state.global_step < self._trainer.state.max_steps:
            control.should_training_stop = False
        return True


def _copied(value: Any) -> Any:
    """Containers anew, tensors shared: buffered generations are replaced, never written to."""
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update((key, _copied(item)) for key, item in value.items())
        return made
    return value
