"""Was it the machine, or is it the data or the model? Computes the last steps again and compares.

From a snapshot, with the same batches and the same random numbers, a sound machine comes to the
same state to the bit. If it does now and did not then, something happened then that did not come
from the program: a bit flipped, a unit failed for a moment.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

import zclip
from heal.buffers import Key
from heal.checkpoint.plan import Ranks
from heal.guarded_step import GuardedStep
from heal.integrity import fingerprints
from heal.journal import Journal
from heal.micro_batch import MicroBatcher, TrainStep
from heal.ranks import HostFacts
from heal.run import TorchRun
from heal.snapshots import Snapshot
from heal.training_state import RngState, TrainingState


class CannotRecompute(RuntimeError):
    """The steps cannot be computed again; nothing was changed."""


class Origin(str, Enum):
    """Where a suspicious state comes from."""

    TRANSIENT = "transient"
    """The machine computed something else then than it does now: a passing fault."""

    REPRODUCIBLE = "reproducible"
    """It comes out the same again: the data or the model is the reason."""

    UNDECIDED = "undecided"
    """Computing it twice gave two results, or random numbers were drawn elsewhere too."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What computing some steps again has shown.

    Attributes:
        first_step: the first step that was computed again.
        last_step: the last.
        origin: the verdict.
        ranks: where then and now differ; by the losses if these were given and differ, for a
            fault in one rank's gradients is in every rank's weights after the all-reduce.
        tensor: the first of this rank's tensors that differs; empty if none does.
        reason: the verdict in words.
    """

    first_step: int
    last_step: int
    origin: Origin
    ranks: tuple[int, ...]
    tensor: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields as the journal writes them."""
        return {**asdict(self), "origin": self.origin.value, "ranks": list(self.ranks)}


@dataclass(slots=True)
class Replay:
    """Computes steps again on the run itself, and puts back every byte.

    Args:
        state: what the steps change.
        guarded: the optimizers.
        micro: runs forward and backward.
        take: takes one step of optimizers and schedulers, given its number and loss.
        ranks: who computes together; every rank has to.
    """

    state: TrainingState
    guarded: GuardedStep
    micro: MicroBatcher
    take: Callable[[int, Tensor], None]
    ranks: Ranks

    def compare(
        self,
        snapshot: Snapshot,
        train_step: TrainStep,
        steps: Sequence[Sequence[Any]],
        losses: Sequence[Tensor] | None = None,
    ) -> Recomputation:
        """Compute the steps since a snapshot again and compare with the state that is there.

        Args:
            snapshot: of before the first of them.
            train_step: computes the loss, as it did.
            steps: the batches of each.
            losses: of each, if they were kept.

        Raises:
            SnapshotCorrupt: the snapshot's own bytes have changed.
        """
        snapshot.verify()
        there = _hashes(self.state)
        generators = RngState.now()
        with self._put_back_afterwards(generators):
            first = self._run(snapshot, train_step, steps)
            known = None if losses is None else [float(loss) for loss in losses]
            differing = next(
                (key for key in first.hashes if first.hashes[key] != there.get(key)), None
            )
            lost = differing is not None or set(first.hashes) != set(there)
            other_losses = known is not None and not _same(known, first.losses)
            word = [lost, other_losses, _same_rng(first.rng, generators)]
            said = self.ranks.gather_json(word)
            suspicious = any(lost or other for lost, other, _ in said)
            agrees = True
            if suspicious:
                second = self._run(snapshot, train_step, steps)
                same = second.hashes == first.hashes and _same(second.losses, first.losses)
                agrees = all(w == b"1" for w in self.ranks.gather(b"1" if same else b"0"))
        ranks = [r for r, (_, other, _) in enumerate(said) if other]
        ranks = ranks or [r for r, (lost, _, _) in enumerate(said) if lost]
        origin, reason = _verdict(suspicious, agrees, all(same for _, _, same in said), ranks)
        last = snapshot.step + len(steps) - 1
        tensor = "" if differing is None else " ".join(map(str, differing))
        return Recomputation(snapshot.step, last, origin, tuple(ranks), tensor, reason)

    def _run(
        self, snapshot: Snapshot, train_step: TrainStep, steps: Sequence[Sequence[Any]]
    ) -> "_Outcome":
        scaler = self.guarded.scaler
        self.state.restore(snapshot.tensors, snapshot.values)
        snapshot.values["rng"].put_back()
        losses = []
        for number, batches in enumerate(steps):
            for param in self.state.parameters():
                param.grad = None
            scale = scaler.scale if scaler is not None else (lambda loss: loss)
            loss = self.micro.backward(batches, train_step, scale)
            self.take(snapshot.step + number, loss)
            losses.append(float(loss))
        return _Outcome(_hashes(self.state), losses, RngState.now())

    @contextmanager
    def _put_back_afterwards(self, generators: RngState) -> Iterator[None]:
        saved = {key: tensor.detach().clone() for key, tensor in self.state.tensors().items()}
        values = self.state.values()
        grads = [(p, p.grad) for p in self.state.parameters()]
        counts = [(o, o.steps) for o in self.guarded.optimizers]
        mailbox, attempts = self.guarded.mailbox, self.micro.attempts
        self.guarded.mailbox = zclip.Mailbox(mailbox.lag, width=mailbox.width)
        try:
            yield
        finally:
            self.guarded.mailbox, self.micro.attempts = mailbox, attempts
            for param, grad in grads:
                param.grad = grad
            self.state.restore(saved, values)
            for optimizer, count in counts:
                optimizer.steps = count
            generators.put_back()


@dataclass(frozen=True, slots=True)
class _Outcome:
    hashes: Mapping[Key, int]
    losses: list[float]
    rng: RngState


def _verdict(
    suspicious: bool, agrees: bool, same_rng: bool, ranks: Sequence[int]
) -> tuple[Origin, str]:
    if not suspicious:
        return Origin.REPRODUCIBLE, "the same state comes out again: look at the data or the model"
    if not agrees:
        return Origin.UNDECIDED, (
            "computing it twice gave two results: use torch.use_deterministic_algorithms, or "
            "suspect the hardware if that was on"
        )
    if not same_rng:
        return Origin.UNDECIDED, (
            "random numbers were drawn outside of train_step, so that these steps cannot be "
            "computed as they were"
        )
    where = ", ".join(map(str, ranks))
    return Origin.TRANSIENT, (
        f"rank {where} computed something else then than now: a passing fault of the machine"
    )


def _hashes(state: TrainingState) -> dict[Key, int]:
    tensors = state.tensors()
    return dict(zip(tensors, fingerprints(tensors.values()).tolist(), strict=True))


def _same(first: Sequence[float], second: Sequence[float]) -> bool:
    return torch.equal(
        torch.tensor(first, dtype=torch.float64).view(torch.int64),
        torch.tensor(second, dtype=torch.float64).view(torch.int64),
    )


def _same_rng(first: RngState, second: RngState) -> bool:
    if first.python != second.python or not torch.equal(first.torch, second.torch):
        return False
    if len(first.cuda) != len(second.cuda):
        return False
    cuda = zip(first.cuda, second.cuda, strict=True)
    return all(torch.equal(a, b) for a, b in cuda) and _plain(first.numpy) == _plain(second.numpy)


def _plain(state: Any) -> list[Any]:
    """The state of numpy's generator as lists, which compare as a whole."""
    return [part.tolist() if hasattr(part, "tolist") else part for part in state or ()]


def recompute(
    state: TrainingState,
    guarded: GuardedStep,
    micro: MicroBatcher,
    run: TorchRun,
    schedulers: Sequence[Any],
    journal: Journal,
    train_step: TrainStep,
    steps: Sequence[Sequence[Any]],
    losses: Sequence[Tensor] | None,
) -> Recomputation:
    """Compute the last steps of a run again; see :meth:`heal.Healer.recompute`."""
    begin = run.step - len(steps)
    snapshot = run.ring.of_step(begin) if steps else None
    if snapshot is None:
        raise CannotRecompute(
            f"there is no snapshot of step {begin}, where the batches given begin; call "
            "request_snapshot() before steps that may have to be computed again"
        )
    if run.lr_scale != 1.0:
        raise CannotRecompute(
            f"healing has the learning rate at {run.lr_scale:g} of its schedule, and had it "
            "elsewhere in these steps; wait until it is back"
        )
    if run.anchor.steps_left:
        raise CannotRecompute(
            f"healing holds the weights for {run.anchor.steps_left} more steps, and may not have "
            "in all of these; wait until it is over"
        )

    def take(step: int, loss: Tensor) -> None:
        guarded.step(step, loss, HostFacts())
        for scheduler in schedulers:
            scheduler.step()

    found = Replay(state, guarded, micro, take, Ranks(guarded.ranks.group)).compare(
        snapshot, train_step, steps, losses
    )
    journal.event("recompute", run.step - 1, **found.to_json())
    return found
