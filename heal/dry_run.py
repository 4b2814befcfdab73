"""Steps that are taken on the run itself and undone: a dry run, and the last steps once more.

``train_step`` holds the model that it was made with, so that a copy of the model would not be the
one that it trains.

:func:`recompute` separates faults of the machine from those of data and model. From a snapshot,
with the same batches and random numbers, a sound machine comes to the same state to the bit. If it
does now and did not then, something happened that did not come from the program: a bit flipped, or
a unit failed for a moment.
"""

import math
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from heal.buffers import Key
from heal.data.loader_pass import loader_rewinder
from heal.data.split import own_copy
from heal.journal import Journal
from heal.micro_batch import TrainStep, check_loss
from heal.ranks import HostFacts
from heal.snapshots import Snapshot
from heal.state_checks import fingerprints
from heal.training_run import TorchRun
from heal.training_state import RngState, TrainingState


@contextmanager
def unchanged(state: TrainingState, with_frozen: bool = False) -> Iterator[ExitStack]:
    """Let the body change the run; put back every byte afterwards, also if it fails.

    With gradients, modes and generators; ``with_frozen`` also frozen weights, which a forward may
    write, as those of a teacher. Yields what else to undo, before anything else is put back.
    """
    with ExitStack() as undo:  # in reverse order
        undo.callback(RngState.now().put_back)
        tensors = state.everything() if with_frozen else state.tensors()
        saved = {key: tensor.detach().clone() for key, tensor in tensors.items()}
        undo.callback(state.restore, saved, state.values())
        for module in state.model.modules():
            undo.callback(setattr, module, "training", module.training)
        for param in state.parameters():
            undo.callback(setattr, param, "grad", param.grad)
            if with_frozen and not state.is_trainable(param):
                # Through .data: else it would count as one that is trained.
                undo.callback(param.data.copy_, param.detach().to("cpu", copy=True))
        yield undo


@contextmanager
def undone(run: TorchRun, with_frozen: bool = False) -> Iterator[ExitStack]:
    """Let the body take steps by our optimizers, and undo them; see :func:`unchanged`."""
    with unchanged(run.training_state, with_frozen) as undo:
        undo.enter_context(run.guarded.records_set_aside())
        yield undo


@dataclass(frozen=True, slots=True)
class DryRunReport:
    """What a dry run found. ``problems`` is empty if training can begin."""

    losses: list[float] = field(default_factory=list)
    seconds_per_step: float = math.nan
    snapshot_bytes: int = 0
    trained: int = 0
    """Parameters that had a gradient."""
    problems: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not self.problems

    @classmethod
    def of(
        cls, losses: list[float], began: float, num_bytes: int, trained: int, problems: list[str]
    ) -> "DryRunReport":
        """Return the report of steps that were tried since ``began``."""
        if not all(math.isfinite(loss) for loss in losses):
            problems.append(f"losses are not finite: {losses}")
        if losses and not trained:
            problems.append("no parameter has a gradient")
        seconds = (time.perf_counter() - began) / max(1, len(losses))
        return cls(losses, seconds, num_bytes, trained, problems)


def dry_run(
    run: TorchRun, train_step: TrainStep, loader: Any, steps: int, accumulate: int
) -> DryRunReport:
    """Take steps and undo them, to find mistakes before the long run; see `Healer.dry_run`."""
    if steps < 1 or accumulate < 1:
        raise ValueError(
            f"steps and accumulate: expected 1 or more of each, got {steps} and {accumulate}"
        )
    if hasattr(loader, "__next__"):
        problem = "the loader is an iterator: what a dry run draws from it would be missing later"
        return DryRunReport(problems=[problem])
    with undone(run, with_frozen=True) as undo:
        undo.callback(loader_rewinder(loader))
        return _try_steps(run, train_step, loader, steps, accumulate)


def _try_steps(
    run: TorchRun, train_step: TrainStep, loader: Any, steps: int, accumulate: int
) -> DryRunReport:
    state, guarded = run.training_state, run.guarded
    losses: list[float] = []
    problems: list[str] = []
    trained = 0
    num_bytes = sum(tensor.nbytes for tensor in state.everything().values())
    params = state.parameters()
    began = time.perf_counter()
    try:
        batches = iter(loader)
        for step in range(steps):
            for param in params:
                param.grad = None  # taken out, not zeroed: the gradients that were there stay whole
            total = 0.0
            for _ in range(accumulate):
                loss = train_step(own_copy(next(batches)))
                check_loss(loss)
                scaled = loss if guarded.scaler is None else guarded.scaler.scale(loss)
                (scaled / accumulate).backward()
                total += float(loss.detach()) / accumulate
            trained = sum(param.grad is not None for param in params)
            guarded.step(step, torch.tensor(total))
            losses.append(total)
    except StopIteration:
        problems.append(f"the loader has fewer than {steps * accumulate} batches")
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
    return DryRunReport.of(losses, began, num_bytes, trained, problems)


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
    """What computing the steps from ``first_step`` to ``last_step`` again has shown.

    ``ranks`` are those where then and now differ: by the losses if these were given and differ,
    because a fault in one rank's gradients is in every rank's weights after the all-reduce.
    """

    first_step: int
    last_step: int
    origin: Origin
    ranks: tuple[int, ...]
    tensor: str  # the first of this rank's that differs; empty if none does
    reason: str  # the verdict in words

    def to_json(self) -> dict[str, Any]:
        """Return the fields as the journal writes them."""
        return {**asdict(self), "origin": self.origin.value, "ranks": list(self.ranks)}


def recompute(
    run: TorchRun,
    journal: Journal,
    train_step: TrainStep,
    steps: Sequence[Sequence[Any]],
    losses: Sequence[Tensor] | None,
) -> Recomputation:
    """Compute the last steps of a run again; see :meth:`heal.Healer.recompute`."""
    snapshot = _snapshot_before(run, len(steps))
    snapshot.verify()
    state, guarded, micro = run.training_state, run.guarded, run.micro
    scale = guarded.scaler.scale if guarded.scaler is not None else (lambda loss: loss)

    def compute() -> _Outcome:
        state.restore(snapshot.tensors, snapshot.values)
        snapshot.values["rng"].put_back()
        computed = []
        for step, batches in enumerate(steps, snapshot.step):
            for param in state.parameters():
                param.grad = None
            loss = micro.backward(batches, train_step, scale)
            guarded.step(step, loss, HostFacts())
            for scheduler in run.schedules.stepped:
                scheduler.step()
            computed.append(float(loss))
        return _Outcome(_hashes(state), computed, RngState.now())

    known = [] if losses is None else [float(loss) for loss in losses]
    there = _Outcome(_hashes(state), known, RngState.now())
    with undone(run) as undo:
        undo.enter_context(micro.uncounted())
        first = compute()
        keys = (key for key in first.hashes if first.hashes[key] != there.hashes.get(key))
        differing = next(keys, None)
        has_other_state = differing is not None or set(first.hashes) != set(there.hashes)
        has_other_losses = losses is not None and not _same(there.losses, first.losses)
        mine = [has_other_state, has_other_losses, _same_rng(first.rng, there.rng)]
        facts = guarded.ranks.gather(mine)
        suspicious = any(other_state or other_losses for other_state, other_losses, _ in facts)
        agrees = True
        if suspicious:
            second = compute()
            same = second.hashes == first.hashes and _same(second.losses, first.losses)
            agrees = all(guarded.ranks.gather(same))
    faulty = [rank for rank, (_, other_losses, _) in enumerate(facts) if other_losses]
    faulty = faulty or [rank for rank, (other_state, _, _) in enumerate(facts) if other_state]
    origin, reason = _verdict(suspicious, agrees, all(same for _, _, same in facts), faulty)
    found = Recomputation(
        snapshot.step,
        snapshot.step + len(steps) - 1,
        origin,
        tuple(faulty),
        "" if differing is None else state.name_of(differing),
        reason,
    )
    journal.event("recompute", run.step - 1, **found.to_json())
    return found


@dataclass(frozen=True, slots=True)
class _Outcome:
    hashes: Mapping[Key, int]
    losses: list[float]
    rng: RngState


def _snapshot_before(run: TorchRun, num_steps: int) -> Snapshot:
    begin = run.step - num_steps
    snapshot = run.ring.of_step(begin) if num_steps else None
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
    if run.anchor_steps:
        raise CannotRecompute(
            f"healing holds the weights for {run.anchor_steps} more steps, and may not have "
            "in all of these; wait until it is over"
        )
    return snapshot


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
    """Whether two lists of losses are alike to the bit."""
    return array("d", first).tobytes() == array("d", second).tobytes()


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
