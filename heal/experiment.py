"""The counterfactual check: is it the weights that went bad, or did the data change?

Loss and gradient curves cannot answer that. An experiment can: compute the loss of today's batch
with the weights of a good snapshot from before the suspicion, with the same random numbers and
without an update, and compare it with the loss that today's weights have on the same batch. If
the old weights do much better on today's data, today's weights are damaged. If they do as badly,
the data changed and no rollback can help.

:class:`Experiment` asks one question at a time. Whoever can run a forward pass (``run``, the
loop over ``batches``, a trainer) looks at :attr:`Experiment.is_due` before each step and runs one
:class:`Trial`; the loss of the real step that follows is the other half of the pair.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heal.buffers import Key, local_part
from heal.causes import NOT_FINITE, PROOF, UNTRAINED, Cause, Family, Finding, Severity
from heal.detectors.foreign_writes import WRITTEN_BY
from heal.detectors.robust import SAME, STANDARD_ERRORS
from heal.detectors.watch import Watch
from heal.lr_schedules import number_of
from heal.record import Record
from heal.snapshots import Snapshot, SnapshotCorrupt
from heal.training_run import TorchRun
from heal.trials import Trial

CLEAR_NOISE, CLEAR_RATIO = 1.0, 1.5
"""Today's weights lose a batch clearly if their loss is higher by this much noise and factor."""

STEADY_RATIO = 1.1
"""The factor that is enough if they lose every batch, and none of them is hard for both."""

LEARNED_NOISE = 0.5
"""They have learned something if their loss is lower than that of the first weights by this."""

GREAT_NOISE, GREAT_RATIO = 10.0, 3.0
"""They lose it by so much that one batch is enough."""

HARD_NOISE = 3.0
"""A batch is hard if both weights have a loss so much noise above the usual level on it."""

BATCHES = 3
"""Batches whose mean must be lost clearly where none is lost by far or hard for both."""

BUDGET, BUDGET_STEPS = 20, 1000
"""Forward passes that experiments may cost within so many steps."""

LONGEST_WAIT, SHORTEST_WAIT = 50, 4
"""Steps for which a loss that comes down by itself is given time; a quarter of a run between."""

LATEST = 5
"""Losses whose median says whether the loss comes down."""

UNANSWERED_STEPS = 3
"""Steps after which a question is given up if no forward pass could be run for it."""


class Answer(str, Enum):
    """What an experiment has shown."""

    DAMAGED = "damaged"
    OTHER_DATA = "other data"
    RECOVERED = "recovered"  # damaged at first, and no worse by now
    UNDECIDED = "undecided"


class Pair(NamedTuple):
    """The losses of one batch: with today's weights, and with those of a snapshot."""

    now: float
    old: float


def judge(
    pairs: Sequence[Pair],
    noise: float,
    baseline: float = math.nan,
    is_of_evaluation: bool = False,
    is_no_update: bool = False,
) -> Answer | None:
    """Compare paired losses; None if another batch is needed.

    Sequential. One batch that today's weights lose by far is enough, and so is one that is hard for
    both, if those before it were. A batch on which today's weights do as usual says little, because
    damage need not show on every batch: then the means of :data:`BATCHES` decide. Losses at or
    below zero have no ratio and are judged by differences beside the noise alone.

    Pairs share their batch and their random numbers, so that their differences vary far less than
    losses do: today's weights that lose every batch are worse, though it be by a tenth. Not in
    evaluation mode, where all pairs share the noise of the running statistics too. They must lose
    by more than the noise of the losses, because a higher rate makes weights a little worse as
    well, until it falls. Where no update can have made of the weights what they are, it is enough
    to lose by the noise of the differences, and more batches are taken as long as each is lost.

    Args:
        pairs: at least one.
        noise: the usual spread of the loss from batch to batch.
        baseline: the level of the loss before it was suspected; NaN if there was none.
        is_of_evaluation: whether the losses are those of a forward in evaluation mode.
        is_no_update: whether no update can have made of the weights what they are.
    """
    newest = pairs[-1]
    if not math.isfinite(newest.old):
        return Answer.OTHER_DATA  # whatever the weights, this batch has no finite loss
    if not math.isfinite(newest.now) or _loses(newest, GREAT_NOISE * noise, GREAT_RATIO):
        return Answer.DAMAGED
    are_hard = all(is_hard(pair, noise, baseline) for pair in pairs)
    if are_hard and not _loses(newest, CLEAR_NOISE * noise, CLEAR_RATIO):
        return Answer.OTHER_DATA
    if len(pairs) < BATCHES:
        return None
    mean = _mean(pairs)
    is_steady = not is_of_evaluation and all(pair.now > pair.old for pair in pairs)
    is_lost = _loses(mean, CLEAR_NOISE * noise, STEADY_RATIO if is_steady else CLEAR_RATIO)
    if not is_lost and is_steady and is_no_update:
        error = stdev(pair.now - pair.old for pair in pairs) / math.sqrt(len(pairs))
        if mean.now - mean.old <= STANDARD_ERRORS * error:
            return None
        is_lost = _loses(mean, 0.0, 1.0 + SAME)
    return Answer.DAMAGED if is_lost else Answer.OTHER_DATA


def is_hard(pair: Pair, noise: float, baseline: float) -> bool:
    """Return whether a batch is hard for both weights, or nothing is known of the usual level."""
    return not min(pair) <= baseline + HARD_NOISE * noise


def _loses(pair: Pair, margin: float, ratio: float) -> bool:
    return pair.now - pair.old > margin and (pair.old <= 0.0 or pair.now > ratio * pair.old)


def _mean(pairs: Sequence[Pair]) -> Pair:
    return Pair(fmean(pair.now for pair in pairs), fmean(pair.old for pair in pairs))


class _Change(NamedTuple):
    """Norms of a tensor: in a snapshot, today, and of the difference."""

    old: float
    now: float
    moved: float


@dataclass(frozen=True, slots=True)
class Settled:
    """The answer to a suspicion, with the numbers that it rests on.

    Attributes:
        finding: the suspicion; if the weights are damaged, as a proven finding to act upon.
        findings: what is known now: damage, or what no experiment could settle.
        takes_level: whether the present level becomes the baseline of the detectors.
        answer: what was shown.
        why: the answer in words.
        pairs: all losses that were compared, today's first.
        snapshots: the steps of the snapshots that they were compared with.
        forwards: passes that it cost.
    """

    finding: Finding
    answer: Answer
    why: str
    pairs: tuple[Pair, ...] = ()
    snapshots: tuple[int, ...] = ()
    forwards: int = 0
    findings: list[Finding] = field(default_factory=list)
    takes_level: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return what the journal writes."""
        return {
            "suspicion": self.finding.cause.value,
            "since": self.finding.bad_step,
            "answer": self.answer.value,
            "why": self.why,
            "losses_now": [pair.now for pair in self.pairs],
            "losses_old": [pair.old for pair in self.pairs],
            "snapshots": list(self.snapshots),
            "forwards": self.forwards,
        }


@dataclass(slots=True)
class _Question:
    """One suspicion that is being looked into."""

    finding: Finding
    noise: float
    baseline: float
    due_at: int
    patient_until: int
    arms: list[tuple[int, int | None]]  # step of a snapshot, optimizer to swap (None: all)
    is_no_update: bool  # whether the differences decide, see judge
    arm: int = 0
    pairs: list[Pair] = field(default_factory=list)
    all_pairs: list[Pair] = field(default_factory=list)
    forwards: int = 0
    fresh: int | None = None  # the snapshot of right before the damage, once that was shown
    shown: Pair | None = None  # the losses that have shown the damage
    excess: float | None = None  # of the loss when the weights were last found damaged
    trial_step: int = -1
    old_loss: float = math.nan
    now_loss: float | None = None

    @property
    def needs_gradients(self) -> bool:
        """Whether the loss is finite and the gradients are not: a forward pass shows nothing."""
        return self.finding.cause is Cause.NONFINITE_GRADIENT

    @property
    def is_of_evaluation(self) -> bool:
        """Whether the losses are those of a forward in evaluation mode."""
        return self.finding.is_of_evaluation


class Experiment:
    """Settles suspicions, one at a time, at a bounded cost.

    With one optimizer today's weights are compared with the newest good snapshot, and if they do
    not lose, with the newest from before the suspicion. With several (GANs, actor-critic) only one
    player is swapped at a time, a climb is never enough, and damage is called only if that player
    loses by far to two snapshots of different ages: a player's loss rises when the other one
    learns. A loss that comes down by itself is given time before anything is called damage.

    Args:
        run: whose snapshots are used, and whose step counts.
        watch: knows the level of the loss and its noise, and the highest rate that was held.
        patience: steps that weights found damaged are given to recover by themselves.

    Attributes:
        forwards: passes that experiments have cost so far.
        settled: questions answered so far.
    """

    def __init__(self, run: TorchRun, watch: Watch, patience: int) -> None:
        self._patience = patience
        self._run = run
        self._state = run.training_state
        self._ranks = run.guarded.ranks
        self._watch = watch
        self._note = run.note
        self._question: _Question | None = None
        self._unprovable: set[Cause] = set()  # reported once for lack of a forward pass
        self._spent: deque[int] = deque()
        self._recent: deque[float] = deque(maxlen=LATEST)
        self._data_changed_at = -1  # whose batch was the first that is hard for all weights
        self.forwards = 0
        self.settled = 0

    @property
    def is_open(self) -> bool:
        """Whether a question waits for its answer."""
        return self._question is not None

    @property
    def is_due(self) -> bool:
        """Whether a trial should be run before the step that comes next; alike on every rank."""
        question = self._question
        if question is None or question.trial_step >= 0:
            return False
        return self._run.step >= question.due_at

    @property
    def suspicion(self) -> Finding | None:
        """What is being looked into; None if nothing is."""
        return None if self._question is None else self._question.finding

    def ask(self, finding: Finding) -> bool:
        """Look into a suspicion, unless one is being looked into or the budget is spent."""
        if self._question is not None or not self._can_afford():
            return False
        arms = self._arms(finding)
        if not arms:
            return False
        step = self._run.step
        level, spread = self._watch.loss_level()
        baseline = _number(finding.evidence.get("usual_loss"), level)
        noise = _number(finding.evidence.get("noise"), spread)
        noise = 0.0 if math.isnan(noise) else noise
        wait = min(LONGEST_WAIT, max(SHORTEST_WAIT, step // 4))
        # The noise distinguishes a write on purpose from damage, unless it is a guess.
        is_guess = WRITTEN_BY in finding.evidence and not self._watch.knows_noise
        is_no_update = finding.is_kept or is_guess
        self._question = _Question(finding, noise, baseline, step, step + wait, arms, is_no_update)
        self._run.ring.pin({step for step, _ in arms})
        return True

    def hurry(self) -> None:
        """Ask now what only evaluation reads: no more steps will be taken."""
        question = self._question
        if question is not None and question.is_of_evaluation:
            question.due_at = self._run.step

    def stop_waiting(self) -> Settled | None:
        """Answer the question if it waits for a loss to come down; None if it does not.

        For the end of a run: weights that lost clearly and whose loss is still high are damaged.
        """
        question = self._question
        if question is None or question.is_of_evaluation or not self._waits_in_vain(question):
            return None
        return self._settle(Answer.DAMAGED, WHY[Answer.DAMAGED])

    def unanswered(self) -> Finding | None:
        """Return, as a report, a suspicion that the end of the run leaves open.

        Of what was found damaged and had not come down by itself, and of what only evaluation
        reads: the loss of the last steps says nothing about it.
        """
        question = self._question
        if question is None:
            return None
        return as_report(question.finding, was_shown=self._waits_in_vain(question))

    def clear(self) -> None:
        """Forget the question: the run has returned to another state."""
        self._question = None
        self._run.ring.pin(set())
        self._recent.clear()

    @contextmanager
    def trial(self) -> Iterator[Trial]:
        """Put the old weights in place for the body; every bit is put back afterwards."""
        trial = self.begin_trial()
        try:
            yield trial
        finally:
            trial.end()

    def compare(
        self,
        compute: Callable[[], Tensor | float],
        level: tuple[float, float] | None = None,
    ) -> None:
        """Run a whole trial: note the loss with the old weights, and that with today's.

        Args:
            compute: returns the loss.
            level: the usual value of what ``compute`` returns and its noise, if it is not the loss
                that the run is trained with.
        """
        question = self._question
        if level is not None and question is not None:
            question.baseline, question.noise = level
        with self.trial() as trial:
            old = trial.forward(compute)
            trial.put_back()
            now = trial.forward(compute)
        self.note_losses(old, now)

    def begin_trial(self) -> Trial:
        """Put the old weights in place until :meth:`Trial.end`. Only where :attr:`is_due`."""
        question = self._question
        assert question is not None
        step, player = question.arms[question.arm]
        question.trial_step = self._run.step
        question.old_loss, question.now_loss = math.nan, None
        try:
            is_proven = step != question.fresh
            snapshot: Snapshot | None = self._run.ring.take(step, is_proven)
        except (SnapshotCorrupt, KeyError) as error:
            self._note(f"experiment: {error}")
            snapshot = None
        return Trial(
            self._state,
            snapshot,
            player,
            question.needs_gradients,
            question.is_of_evaluation,
            self._note,
        )

    def note_losses(self, old: Tensor | float | None, now: Tensor | float | None = None) -> None:
        """Take in what a trial has shown.

        Args:
            old: the loss with the old weights; None if it could not be computed.
            now: that with today's weights, if computed as well; else the real step has it.
        """
        question = self._question
        if question is None:
            return
        passes = 1 if now is None else 2
        self.forwards += passes
        question.forwards += passes
        self._spent.extend([self._run.step] * passes)
        question.old_loss = self._reduced(old)
        question.now_loss = None if now is None else self._reduced(now)

    def observe(self, record: Record) -> Settled | None:
        """Take in the record of a step; return the answer if there is one now."""
        if record.has_finite_loss:
            self._recent.append(record.loss)
        question = self._question
        if question is None:
            return None
        if question.trial_step < 0:
            if record.step >= question.due_at + UNANSWERED_STEPS:
                return self._settle(Answer.UNDECIDED, NO_FORWARD)
            return None
        now = question.now_loss
        if now is None:
            if record.step < question.trial_step:
                return None
            if record.step > question.trial_step:
                return self._settle(Answer.UNDECIDED, "the step of the trial left no record")
            is_bad = question.needs_gradients and record.has_nonfinite_gradient
            now = record.loss if record.has_finite_loss and not is_bad else math.inf
        return self._take(question, now)

    def observe_trial(self) -> Settled | None:
        """Take in a trial that no step followed, which has computed both losses."""
        question = self._question
        if question is None or question.now_loss is None:
            return None
        settled = self._take(question, question.now_loss)
        if settled is None and (question.fresh is not None or question.is_of_evaluation):
            question.due_at = self._run.step  # the same batches will do
        return settled

    def _take(self, question: _Question, now: float) -> Settled | None:
        """Take in the two losses of a trial; return the answer if there is one now."""
        step, question.trial_step = question.trial_step, -1
        question.due_at = step + 1
        if math.isnan(question.old_loss):
            return self._settle(Answer.UNDECIDED, "the forward pass with old weights failed")
        pair = Pair(now, question.old_loss)
        question.pairs.append(pair)
        question.all_pairs.append(pair)
        return self._next(question, step)

    def _next(self, question: _Question, step: int) -> Settled | None:
        """Go on to the next batch, the next arm or the answer."""
        if question.finding.cause is Cause.NOT_LEARNING:
            pair = question.pairs[-1]
            if pair.now < pair.old - LEARNED_NOISE * question.noise:
                return self._settle(Answer.OTHER_DATA, "today's weights do better than the first")
            return self._settle(Answer.UNDECIDED, NOT_LEARNING)
        if question.fresh is not None:
            pair, older = question.pairs[-1], question.shown or question.all_pairs[0]
            beside = Pair(pair.old, older.old)  # of two batches: only by far
            is_worse = _loses(beside, GREAT_NOISE * question.noise, GREAT_RATIO)
            if is_worse or not _loses(pair, CLEAR_NOISE * question.noise, CLEAR_RATIO):
                return self._settle(Answer.UNDECIDED, "")  # of this snapshot only
            question.shown = pair
            self._run.ring.prove(question.fresh)
            return self._settle(Answer.DAMAGED, WHY[Answer.DAMAGED])
        answer = judge(
            question.pairs,
            question.noise,
            question.baseline,
            question.is_of_evaluation,
            question.is_no_update,
        )
        is_game = question.arms[0][1] is not None
        # What one player gains the other loses, and what was trained on the data that has come
        # back does better on it than what has learned others since: only by far.
        by_far = is_game or question.arms[question.arm][0] <= self._data_changed_at
        if answer is None and by_far:
            answer = Answer.OTHER_DATA
        if answer is None:
            if self._can_afford():
                return None
            return self._settle(Answer.UNDECIDED, "the budget of forward passes is spent")
        if is_game:
            return self._next_player(question, answer)
        if answer is Answer.OTHER_DATA and question.arm + 1 < len(question.arms):
            question.arm += 1
            question.pairs.clear()
            return None
        if answer is Answer.DAMAGED and math.isfinite(question.pairs[-1].now):
            wait = self._wait(question, step)
            if wait:
                question.pairs.clear()
                question.due_at = step + wait
                return None
        question.shown = question.pairs[-1]
        if answer is Answer.DAMAGED and self._goes_on_with_fresh(question):
            return None
        if answer is Answer.OTHER_DATA and question.excess is not None:
            answer = Answer.RECOVERED
        return self._settle(answer, WHY[answer])

    def _goes_on_with_fresh(self, question: _Question) -> bool:
        """Try the snapshot that was taken right before the damage, if there is one.

        It was in quarantine, because too few clean steps came after it. If today's weights lose to
        it as well, and it is not far worse than the older one, fewer steps are undone.
        """
        last = question.arms[question.arm][0]
        newest = min(question.finding.bad_step + 1, self._sound_until())
        fresh = [s for s in self._run.ring.finite_steps() if last < s <= newest]
        fresh = [s for s in self._ranks.common(fresh) if self._fits(s)]
        if not fresh or not self._can_afford():
            return False
        question.fresh = fresh[0]
        question.arm += 1
        question.arms.insert(question.arm, (fresh[0], None))
        question.pairs.clear()
        return True

    def _next_player(self, question: _Question, answer: Answer) -> Settled | None:
        """Ask the other snapshot about a player who lost; one who did not is acquitted."""
        player = question.arms[question.arm][1]
        goes_on = answer is Answer.DAMAGED
        rest = range(question.arm + 1, len(question.arms))
        fitting = (i for i in rest if (question.arms[i][1] == player) is goes_on)
        following = next(fitting, None)
        if following is None:
            return self._settle(answer, WHY[answer])
        question.arm = following
        question.pairs.clear()
        return None

    def _wait(self, question: _Question, step: int) -> int:
        """Return for how many steps to wait before the question is asked again; 0 for none.

        The first time, because Adam's slingshots, a layer that was reset on purpose and a few hard
        batches pass by themselves, and running statistics that were reset on purpose are soon what
        they should be. Later only if the excess of the loss has come down by half meanwhile.

        Never for weights that have grown to a multiple. Whoever resets, prunes, merges or averages
        weights makes none larger, and though the loss may come down, the steps before are lost.
        """
        patience = self._patience
        if question.is_of_evaluation:
            patience //= 2  # training takes no harm meanwhile, but the run may end
            excess = fmean(pair.now - pair.old for pair in question.pairs)
        else:
            excess = self._excess(question)
        before, question.excess = question.excess, excess
        recovers = before is None or excess < 0.5 * before
        if not recovers or step >= question.patient_until:
            return 0
        snapshot_step = question.arms[question.arm][0]
        if not question.is_of_evaluation and self._have_grown(snapshot_step):
            return 0
        return max(1, min(patience, step // 8))

    def _excess(self, question: _Question) -> float:
        """Return by how much the loss is higher than before it was suspected."""
        return (median(self._recent) if self._recent else math.nan) - question.baseline

    def _waits_in_vain(self, question: _Question) -> bool:
        """Return whether the weights were found damaged and the loss is still high."""
        return question.excess is not None and self._excess(question) > question.noise

    def _settle(self, answer: Answer, why: str) -> Settled:
        question = self._question
        assert question is not None
        self._question = None
        self._run.ring.pin(set())
        self.settled += 1
        if answer is Answer.UNDECIDED and question.fresh is not None:  # an older one has shown it
            question.arms.remove((question.fresh, None))
            question.arm -= 1
            if question.pairs:
                question.all_pairs.pop()  # it is of that snapshot
            answer, why = Answer.DAMAGED, WHY[Answer.DAMAGED]
        finding, cause = question.finding, question.finding.cause
        snapshots = tuple(dict.fromkeys(s for s, _ in question.arms[: question.arm + 1]))
        findings: list[Finding] = []
        asks_for_level = cause is not Cause.NOT_LEARNING and not finding.is_of_evaluation
        is_sound = answer in (Answer.OTHER_DATA, Answer.RECOVERED)
        takes_level = is_sound and asks_for_level
        has_level = takes_level and math.isfinite(question.baseline)
        if has_level and is_hard(question.pairs[-1], question.noise, question.baseline):
            self._data_changed_at = finding.bad_step + 1
        if answer is Answer.DAMAGED:
            finding = self._proven(question, snapshots[-1])
            findings = [finding]
        elif why is NOT_LEARNING:
            findings = [self._nothing_learned(question)]
        elif is_sound and finding.is_kept and cause is not Cause.NOT_LEARNING:
            hint = "the loss is no higher than with the weights from before, so they were kept"
            evidence = {**finding.evidence, "hint": hint}
            drift = Cause.WEIGHT_DRIFT
            findings = [replace(finding, cause=drift, evidence=evidence, wants_proof=False)]
        elif why is NO_FORWARD and cause is Cause.NOT_LEARNING:
            if finding.is_kept:
                evidence = {**finding.evidence, "hint": BY_LOSS_ALONE}
                findings = [replace(finding, evidence=evidence, wants_proof=False)]
        elif why is NO_FORWARD:
            self._note(why)
            if not cause.about.is_nonfinite:  # else each skipped step was reported already
                takes_level = asks_for_level  # unexplained; later ones are measured against it
                if cause not in self._unprovable:
                    findings = [replace(finding, wants_proof=False)]
                self._unprovable.add(cause)
        pairs = tuple(question.all_pairs)
        return Settled(
            finding, answer, why, pairs, snapshots, question.forwards, findings, takes_level
        )

    def _nothing_learned(self, question: _Question) -> Finding:
        """Return the suspicion as a report, with what the first weights would do."""
        finding, pair = question.finding, question.all_pairs[-1]
        evidence = {**finding.evidence, "loss_now": pair.now, "loss_with_first_weights": pair.old}
        if 0.0 < GREAT_RATIO * pair.old < pair.now:
            evidence["advice"] = START_AGAIN
        return replace(finding, evidence=evidence, wants_proof=False)

    def _proven(self, question: _Question, snapshot_step: int) -> Finding:
        """Return the suspicion as a fact; blamed on the learning rate if nothing explains that."""
        finding, pair = question.finding, question.shown or question.all_pairs[-1]
        evidence: dict[str, object] = {
            **finding.evidence,
            "loss_now": pair.now,
            PROOF: pair.old,
            "snapshot": snapshot_step,
            **self._changed_most(snapshot_step, finding.is_of_evaluation),
        }
        first = self._watch.first_loss() - LEARNED_NOISE * question.noise
        is_no_lower = question.baseline >= first and not finding.is_of_evaluation
        if is_no_lower or snapshot_step == 0:  # the first weights themselves
            evidence |= {UNTRAINED: True, "lr": self._run.learning_rate()}
        # An alert has led to the proof: what is proven is that the weights are damaged.
        is_alert = finding.cause.about.family is Family.ALERT
        cause = Cause.WEIGHT_CORRUPTION if is_alert else finding.cause
        rates = self._unexplained_lr()
        if rates is not None and not finding.is_of_evaluation:
            evidence["lr"], evidence["usual_lr"] = rates
            cause = Cause.LR_SPIKE if rates[0] > 0.0 else Cause.LR_DROP
        if math.isinf(pair.now):
            evidence["loss_now"] = NOT_FINITE
        return replace(
            finding,
            cause=cause,
            severity=Severity.ERROR,
            bad_step=snapshot_step,
            evidence=evidence,
            wants_proof=False,
        )

    @torch.no_grad()
    def _changes(self, snapshot_step: int, with_buffers: bool) -> dict[Key, _Change]:
        """Return how the weights have changed since a snapshot; of sharded ones the local part.

        Args:
            snapshot_step: of the snapshot.
            with_buffers: whether buffers are meant as well.
        """
        snapshot = self._run.ring.of_step(snapshot_step)
        changes: dict[Key, _Change] = {}
        if snapshot is None:
            return changes
        for key, tensor in self._state.tensors().items():
            is_meant = key[0] == "parameter" or (with_buffers and key[0] == "buffer")
            if is_meant and key in snapshot.tensors and tensor.is_floating_point():
                now = local_part(tensor).double()
                old = local_part(snapshot.tensors[key]).to(now.device, torch.float64)
                norms = torch.stack([old.norm(), now.norm(), (now - old).norm()])
                changes[key] = _Change(*norms.nan_to_num(nan=math.inf).tolist())
        return changes

    def _changed_most(self, snapshot_step: int, with_buffers: bool) -> dict[str, object]:
        """Return which weights have changed by more than their norm since a snapshot, as evidence.

        Returns:
            The ``tensor`` that changed most, by what multiple of its norm, and how many ``tensors``
            have; empty if none has.
        """
        changes = self._changes(snapshot_step, with_buffers).items()
        ratios = {key: change.moved / change.old for key, change in changes if change.old > 0.0}
        changed = [key for key, ratio in ratios.items() if ratio > 1.0]
        if not changed:
            return {}
        most = max(changed, key=lambda key: ratios[key])
        name = self._state.name_of(most).removeprefix("parameter ")
        how = f"changed by {ratios[most]:.3g} times its norm since step {snapshot_step}"
        blames = f"{name}, which {how}"
        if len(changed) > 1:
            blames = f"a change of {len(changed)} tensors; most of all {name} {how}"
        return {"tensor": name, "tensors": len(changed), "blames": blames}

    def _have_grown(self, snapshot_step: int) -> bool:
        """Return whether the weights as a whole are far larger than in a snapshot.

        As a whole, because biases and adapters that begin at zero grow to a multiple by themselves.
        Alike on every rank: each has its part of sharded weights.
        """
        changes = self._changes(snapshot_step, False).values()
        old, now = (math.hypot(*(getattr(c, name) for c in changes)) for name in ("old", "now"))
        has_grown = torch.full((), float(now > GREAT_RATIO * old > 0.0), dtype=torch.float64)
        if self._ranks.has_others:
            has_grown = self._ranks.mean(has_grown.to(self._ranks.device))
        return float(has_grown) > 0.0

    def _arms(self, finding: Finding) -> list[tuple[int, int | None]]:
        """Return which snapshots to compare with, and which optimizer's parameters to swap."""
        good = [s for s in self._run.ring.good_steps() if self._fits(s)]
        good = list(self._ranks.common(good))
        if finding.cause is Cause.NOT_LEARNING:  # a player's loss is no measure of progress
            return [(step, None) for step in good[-1:]] if len(self._state.optimizers) == 1 else []
        is_of_schedule = self._watch.has_schedule() and self._unexplained_lr() is None
        if finding.cause is Cause.DIVERGENCE and is_of_schedule:
            good = [s for s in good if not self._is_explained(s)]
        before = [s for s in good if s <= finding.bad_step] or good[-1:]
        players = len(self._state.optimizers)
        if players > 1 and finding.is_of_evaluation:
            return []  # players are swapped without buffers
        if players == 1:
            # When a slow change began is a guess: where the newest one wins, less is undone. But
            # under a rate that nothing explains, snapshots may hold what it has done.
            sound = [s for s in good if s <= self._sound_until()]
            tried = dict.fromkeys([*sound[:1], *good[:1], *before[:1]])
            return [(step, None) for step in tried]
        if len(before) < 2 or finding.cause is Cause.DIVERGENCE:
            return []
        return [(step, player) for player in range(players) for step in before[:2]]

    def _is_explained(self, step: int) -> bool:
        """Return whether the schedule explains that the loss has climbed since a snapshot.

        It has raised the rate since, and with a higher rate the loss is higher for a while. That is
        so as long as the loss is lower than at the start; a question that has to wait for the rate
        to come back is asked again then, because the climb goes on.
        """
        snapshot = self._run.ring.of_step(step)
        assert snapshot is not None
        before = number_of(snapshot.values["groups"][0][0].get("lr"))
        has_learned = bool(self._recent) and median(self._recent) < self._watch.first_loss()
        return has_learned and self._run.learning_rate() > (1.0 + SAME) * before

    def _unexplained_lr(self) -> tuple[float, float] | None:
        """Return the present rate and the highest one explained, if that is clearly lower."""
        (held, _), lr = self._watch.held_lr(), self._run.learning_rate()
        return (lr, held) if held > 0.0 and not 0.0 < lr < CLEAR_RATIO * held else None

    def _sound_until(self) -> float:
        """Return the newest step whose snapshot has no update at a rate that nothing explains."""
        return math.inf if self._unexplained_lr() is None else self._watch.held_lr()[1] + 1

    def _fits(self, step: int) -> bool:
        snapshot = self._run.ring.of_step(step)
        return snapshot is not None and snapshot.is_of(self._state.parameters())

    def _can_afford(self) -> bool:
        while self._spent and self._spent[0] <= self._run.step - BUDGET_STEPS:
            self._spent.popleft()
        return len(self._spent) < BUDGET

    def _reduced(self, loss: Tensor | float | None) -> float:
        """Return the mean over ranks, which all must ask for; NaN if one could not compute it."""
        value = torch.full((), math.nan, dtype=torch.float64)
        if loss is not None:
            number = float(loss.detach() if isinstance(loss, Tensor) else loss)
            value.fill_(math.inf if math.isnan(number) else number)
        if self._ranks.has_others:
            value = self._ranks.mean(value.to(self._ranks.device))
        return float(value)


def as_report(finding: Finding, was_shown: bool = False) -> Finding | None:
    """Return a suspicion as a report, for the end of a run; None if the loss would show it.

    Args:
        finding: the suspicion.
        was_shown: whether the weights were found damaged, and only the wait was not over.
    """
    if not finding.is_of_evaluation and not was_shown:
        return None
    hint = "the run ended before this was settled; evaluate the model before you use it"
    evidence = {**finding.evidence, "hint": hint}
    return replace(finding, severity=Severity.WARN, evidence=evidence, wants_proof=False)


NO_FORWARD = (
    "no forward pass could be run: iterate healer.batches(loader), or give Healer a forward="
)

BY_LOSS_ALONE = (
    f"neither the loss nor the gradient norm has changed since the first steps, which is no proof; "
    f"{NO_FORWARD}"
)

NOT_LEARNING = "today's weights do no better than those the run began with"

START_AGAIN = (
    "the first weights do far better: start again, and with a lower learning rate unless something "
    "else has damaged the weights"
)

WHY = {
    Answer.DAMAGED: "the weights of the snapshot do far better on the same batches",
    Answer.OTHER_DATA: "the weights of the snapshot do no better on the same batches",
    Answer.RECOVERED: "the weights of the snapshot did far better at first, but the loss came down "
    "by itself",
}


def _number(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) else otherwise
