"""The trainer's batches as a stream that can be rewound, skipped, and read past a bad sample."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from accelerate import skip_first_batches
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import send_to_device

from heal.causes import Family
from heal.data.loader_pass import EpochStart, drawn_twice, drop, return_to, undisturbed
from heal.data.stream import Place
from heal.healer import Healer
from heal.integrations.patches import Patches
from heal.training_state import RngState


def batches_of_steps(trainer: Any, steps: int) -> tuple[int | None, int]:
    """Return how many batches so many steps take, and how many of them are of the last epoch.

    The first is None for a loader without a length, which has one long epoch.
    """
    per_step = int(trainer.args.gradient_accumulation_steps)
    try:
        length = len(trainer.callback_handler.train_dataloader)
    except TypeError:
        return None, steps * per_step
    epochs, rest = divmod(steps, max(1, -(-length // per_step)))
    return epochs * length + rest * per_step, rest * per_step


class TrainerBatches:
    """Stands in for ``trainer.get_batch_samples``: the same batches, drawn through the healer.

    ``of_step`` holds the batches of the step that is under way. If ``is_followed``, the trainer's
    loop goes back when the data does, and begins epochs again that the stream has begun already.
    """

    def __init__(self, trainer: Any, healer: Healer, is_followed: bool = False) -> None:
        self._trainer = trainer
        self._healer = healer
        self._stream = healer.stream
        self._is_followed = is_followed
        self.of_step: list[Any] = []
        self._place_of: dict[int, Place] = {}  # by identity, of the batches of this step
        self._offered: Any = None  # the iterator that the trainer made last
        self._to_begin: int | None = None  # the number of its epoch, until that is begun
        self._epoch: Iterator[Any] | None = None
        self._replaced = 0
        self._num_given = self._lost_before = 0  # in the epoch under way, and before it
        first_step = trainer.state.global_step
        self._begins_at, skipped_first = batches_of_steps(trainer, first_step)
        if trainer.args.ignore_data_skip and first_step:
            self._begins_at, skipped_first = None, 0
        self._loader = EpochLoader(trainer, skipped_first, self._has_waited)

    @property
    def has_lost_epoch(self) -> bool:
        """Whether the epoch gave nothing because its batches were passed over."""
        return not self._num_given and self._num_lost() > self._lost_before

    def unwanted(self) -> list[int]:
        """Return which batches will not be given out, counted from the first of the training."""
        began = self._begins_at
        return [] if began is None else [began + number for number in self._stream.unwanted()]

    def leave_out(self, unwanted: Iterable[int]) -> None:
        """Do not give out what :meth:`unwanted` returned in another process.

        A trainer that is resumed begins at the batch that follows from its count of steps.
        """
        began = self._begins_at
        if began is not None:
            self._stream.leave_out(number - began for number in unwanted if number >= began)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """Return the batches of one step and the number of items in them."""
        self._place_of.clear()
        if epoch_iterator is not self._offered:
            self._offered = epoch_iterator
            if not (self._is_followed and self._stream.is_replaying):
                self._to_begin = self._loader.next_epoch
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
        return self._replaced + self._stream.skipped

    def replacement(self) -> Any | None:
        """Return a batch for one that could not be used; None at the end of an epoch."""
        self._replaced += 1
        return self._draw()

    def identity(self, batch: Any) -> dict[str, Any]:
        """Return epoch, number and samples of a batch of this step; empty for any other."""
        place = self._place_of.get(id(batch))
        return {} if place is None else place.named()

    def _has_waited(self, error: Exception) -> bool:
        """Wait if that may cure an error of the loader; return whether it was waited."""
        diagnosis, error = self._healer.failures.judge_read(error)
        return diagnosis.family is Family.WAIT and self._healer.heal(diagnosis, error)

    def _draw(self) -> Any | None:
        """Return the next batch, first of an epoch that was rewound; None at the end of one."""
        while True:
            if self._epoch is None:
                if self._to_begin is None:
                    return None
                is_used = not self._stream.will_rewind  # else an earlier epoch is drawn again
                self._loader.begin(self._to_begin, self._offered if is_used else None)
                self._to_begin = None
                self._epoch = self._healer.epoch(self._loader)
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
    """The trainer's loader as the stream needs it: iterable again and again.

    The first pass over an epoch uses the very iterator that the trainer made. ``has_waited``
    returns whether a batch that raised an error should be read again.
    """

    def __init__(
        self, trainer: Any, skipped_first: int, has_waited: Callable[[Exception], bool]
    ) -> None:
        self.epoch = 0
        self.has_waited = has_waited
        self.sampler = self  # the stream reads the epoch from the sampler, and sets it there
        self._trainer = trainer
        self._first_epoch: int | None = None
        self._skipped_first = skipped_first
        self._begun: Any = None  # the trainer's iterator, until it is used

    @property
    def batch_sampler(self) -> Any:
        """That of the loader: its generators belong to the position in the data.

        None if the order depends on the number of the epoch alone, as it does by default.
        """
        batch_sampler = getattr(self._loader(), "batch_sampler", None)
        is_seeded = isinstance(getattr(batch_sampler, "sampler", None), SeedableRandomSampler)
        return None if is_seeded else batch_sampler

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that the trainer begins."""
        return int(getattr(self._loader(), "iteration", self.epoch + 1))

    def begin(self, epoch: int, iterator: Any) -> None:
        """Return to an epoch, because the end of the one before has moved the loader.

        The first pass uses ``iterator``, unless that is None.
        """
        self._begun = iterator
        self.set_epoch(epoch)
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
        """Have the sampler draw one batch of the present pass again; None if that is unknown."""
        if start.sampler_epoch not in (None, self.epoch):
            return None  # the order may depend on the number of the epoch

        def restart() -> Any:
            return_to(self, start)
            return self.pass_over()

        return drawn_twice(self, restart, index)

    def pass_over(self) -> Any:
        """Return the loader for the present epoch, without what a resumed trainer left out."""
        self.set_epoch(self.epoch)
        if self.epoch == self._first_epoch and self._skipped_first:
            return skip_first_batches(self._loader(), self._skipped_first)
        return self._loader()

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
        self._device: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise
        except Exception as error:
            if self._loader.has_waited(error) or not self._is_beneath:
                self._go_beneath()
                return next(self)
            self._given += 1
            raise
        self._given += 1
        return batch if self._device is None else send_to_device(batch, self._device)

    def _go_beneath(self) -> None:
        """Start the pass again without look-ahead, which would lose the batch before a bad one."""
        self._is_beneath = True
        with undisturbed():
            self._rng.put_back()
            loader = self._loader.pass_over()
            self._device = getattr(loader, "device", None)
            self._iterator = iter(getattr(loader, "base_dataloader", loader))
            for _ in range(self._given):
                drop(self._iterator)


# The trainer's loop over an epoch, begun again at the place that a rollback returned to.
#
# How many batches a step has, when gradients are synchronised and when an epoch is over follows
# from counters that are local to that loop. With ``after_rollback="replay_data"`` the data goes
# back, and so must they: else a step of the replay would have other batches than the first time.

RESUMED = "a rollback"  # where a path of a checkpoint would stand; nothing is read from it


class ReplayedEpochs:
    """Stands in for ``trainer._run_epoch``; after a rollback it runs the epochs since once more."""

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
        """Call the callbacks, unless the epoch was left for a replay and did not end."""
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
