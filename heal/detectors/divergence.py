"""Finds losses that climb, whatever the noise, and undo what was learned."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any, NamedTuple

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import Window
from heal.verdict import Record

TINY = 1e-12
"""Keeps divisions defined; no loss is judged by it."""


class Block(NamedTuple):
    """Some steps in a row: the first one, and medians of what they had."""

    step: float
    loss: float
    spread: float
    norm: float


class Divergence:
    """Finds a loss that climbs and undoes what was learned.

    The last ``divergence_patience`` losses are cut into blocks, and a climb is a rise of their
    medians from block to block beyond the noise, with no fall: slow, over one to three times the
    patience, or steep, over the last blocks and to above where the run began. One leap (harder
    data, a restart of the schedule) is one rise, two if it falls into a block, and no climb; a loss
    that always wandered as much (a critic's) does not climb either. A climb is divergence when it
    has undone half of what was learned since the start and gradients are no longer what they were
    at the best: grown, or vanished in a network that died. Where nothing was learned yet, or the
    loss says little about learning (RL, critics: it goes from below zero to it or across), they
    must have grown more, the loss must have doubled and the climb steepen; one about zero must be
    above its beginning, too. A loss that leapt to where it was untrained and lies there for three
    times the patience has collapsed, which is divergence too; so has one that crept there if the
    gradients vanished. In a game of two networks the loss of one goes back to chance as the other
    learns, and gradients shrink with it: that is none of these.
    """

    BLOCKS, LEVELS, STEEP_BLOCKS = 10, 5, 4
    UNDONE, COLLAPSED, ABOUT_ZERO = 0.5, 0.8, 0.2  # shares of what was learned
    NOISE = 4.0  # spreads within a block that it must have risen, and must have learned before
    WANDER, WANDER_FLAT = 8.0, 30.0  # usual moves between blocks that a climb, a collapse must span
    WANDER_LONG = 5.0  # the same, times the root of all blocks: so far a walk without aim may get
    STANDARD_ERRORS = 4.0  # of a median; the two that a rise compares make about 2.3 of them
    GROWN, GROWN_MUCH = 1.5, 3.0  # gradient norms, against those at the best loss and the usual
    SHRUNK, VANISHED = 3.0, 15.0  # times smaller than these
    LEAP_BLOCKS = 3  # from where it was good to where it was untrained: what takes longer creeps
    GOOD = 0.3  # share of what was learned that may be undone while it is good
    MOVE_OF_NOISE = 1.2  # median distance of two medians of normal noise, in standard errors
    WINDOWS = 3  # times the patience that is looked back
    HABIT = 60  # blocks from which noise and moves are known

    def __init__(self, config: HealingConfig) -> None:
        self.size = max(config.divergence_patience // self.BLOCKS, 4)
        self.losses = Window(self.size)
        self.norms = Window(self.size)
        self.block_step = -1
        self.blocks: list[Block] = []
        self.count = 0  # blocks so far
        self.initial: float | None = None
        self.best: Block | None = None
        self.moves = Window(self.HABIT)
        self.spreads = Window(self.HABIT)
        self.habit_norms = Window(self.HABIT)
        self.good_at = self.fell_at = 0  # blocks so far when it was good, and first as if untrained

    def observe(self, record: Record) -> Finding | None:
        if not record.has_finite_loss:
            return None
        if len(self.losses) == 0:
            self.block_step = record.step
        self.losses.push(record.loss)
        self.norms.push(record.norm)
        if len(self.losses) < self.size:
            return None
        norm = self.norms.median if len(self.norms) else 0.0
        spread = max(self.losses.spread, TINY)
        block = Block(float(self.block_step), self.losses.median, spread, norm)
        self.losses.clear()
        self.norms.clear()
        self._append(block)
        kind = self._kind()
        if not kind or self.best is None:
            return None
        low = self.best if kind == "collapse" else min(self.blocks, key=lambda b: b.loss)
        evidence: dict[str, object] = {
            "kind": kind,
            "loss": block.loss,
            "best_loss": self.best.loss,
            "initial_loss": self.initial,
            "norm": norm,
            "norm_at_best": self.best.norm,
        }
        self.blocks.clear()  # the next verdict needs blocks of its own
        return Finding(
            cause=Cause.DIVERGENCE,
            step=record.step,
            bad_step=int(low.step),
            severity=Severity.ERROR,
            evidence=evidence,
        )

    def _append(self, block: Block) -> None:
        if len(self.blocks) >= self.BLOCKS:
            # Habits enter a window late, so that those of a climb do not pass for them.
            before, after = self.blocks[-self.BLOCKS :][:2]
            self.moves.push(abs(after.loss - before.loss))
            self.spreads.push(before.spread)
            self.habit_norms.push(before.norm)
        self.blocks.append(block)
        self.count += 1
        del self.blocks[: -self.BLOCKS * self.WINDOWS]
        self.initial = block.loss if self.initial is None else self.initial
        if self.best is None or block.loss < self.best.loss:
            self.best = block

    def _kind(self) -> str:
        """Return how the loss diverges; empty if it does not."""
        if self.best is None or self.initial is None or len(self.blocks) < self.STEEP_BLOCKS:
            return ""
        # Where the loss has leapt to another level, its noise is that of the new one.
        now = median(block.spread for block in self.blocks[-self.STEEP_BLOCKS :])
        noise = max(self.spreads.median if len(self.spreads) else 0.0, self.best.spread, now)
        wander = self._wander(noise)
        learned = self.initial - self.best.loss
        risen = self.blocks[-1].loss - self.best.loss
        margin = max(self.NOISE * noise, self.WANDER * wander)
        highest = max(self.initial, self.blocks[-1].loss)
        is_about_zero = self.best.loss < 0.0 and highest > -self.ABOUT_ZERO * learned
        if risen > max(self.UNDONE * learned, margin):
            has_learned = learned > self.NOISE * noise and not is_about_zero
            says_much = not is_about_zero or self.blocks[-1].loss > self.initial + margin
            change = self._norm_change(self.best) if says_much else 1.0
            is_sick = change > (self.GROWN if has_learned else self.GROWN_MUCH)
            has_doubled = risen > abs(self.initial)
            is_sick = is_sick and (has_learned or (has_doubled and self._steepens()))
            if is_sick and self._climbs(noise, wander):
                return "climb"
            is_worse = risen > (1.0 + self.UNDONE) * learned + margin
            if is_worse and change > self.GROWN_MUCH and self._climbs_steeply(noise):
                return "steep climb"
        walk = max(self.WANDER_FLAT, self.WANDER_LONG * math.sqrt(self.count)) * wander
        has_learned_much = learned > max(2.0 * self.NOISE * noise, walk)
        level = self.best.loss + self.COLLAPSED * learned
        self._note_fall(level, self.best.loss + self.GOOD * learned)
        if is_about_zero or not has_learned_much or not self._lies_flat(level, noise):
            return ""
        change = self._norm_change(self.best)
        has_leapt = self.fell_at - self.good_at <= self.LEAP_BLOCKS and change > 1.0 / self.SHRUNK
        return "collapse" if has_leapt or math.isinf(change) else ""

    def _note_fall(self, untrained: float, good: float) -> None:
        """Note how long it takes from a good loss to one as if untrained."""
        loss = self.blocks[-1].loss
        if loss <= good:
            self.good_at = self.fell_at = self.count
        elif loss >= untrained and self.fell_at == self.good_at:
            self.fell_at = self.count

    def _wander(self, noise: float) -> float:
        """Return how far the level usually moves from block to block, noise taken off."""
        if not len(self.moves):
            return 0.0
        by_noise = self.MOVE_OF_NOISE * noise / math.sqrt(self.size)
        return math.sqrt(max(self.moves.median**2 - by_noise**2, 0.0))

    def _norm_change(self, best: Block) -> float:
        """Return the least factor between the norms of late and those before; inf if vanished."""
        now = median(block.norm for block in self.blocks[-self.STEEP_BLOCKS :])
        habit = self.habit_norms.median if len(self.habit_norms) else best.norm
        least, most = min(best.norm, habit), max(best.norm, habit)
        if least <= 0.0:
            return 1.0
        return math.inf if self.VANISHED * now < least else now / most

    def _climbs(self, noise: float, wander: float) -> bool:
        """Look at one, two and three times the patience: the more noise, the longer it takes."""
        for windows in range(1, len(self.blocks) // self.BLOCKS + 1):
            whole = self.blocks[-self.BLOCKS * windows :]
            size = len(whole) // self.LEVELS
            parts = [whole[at : at + size] for at in range(0, len(whole), size)]
            levels = [mean(block.loss for block in part) for part in parts]
            error = self._error(noise) / math.sqrt(size)
            rises = [after - before for before, after in pairwise(levels)]
            # A walk without aim goes as far as the square root of its steps.
            is_aimed = levels[-1] - levels[0] > self.WANDER * wander * math.sqrt(windows)
            is_rise = min(rises) > -error and sum(r > error for r in rises) >= len(rises) - 1
            if is_rise and is_aimed:
                return True
        return False

    def _climbs_steeply(self, noise: float) -> bool:
        last = self.blocks[-self.STEEP_BLOCKS :]
        return all(
            after.loss - before.loss > self._error(noise) for before, after in pairwise(last)
        )

    def _steepens(self) -> bool:
        window = self.blocks[-self.BLOCKS :]
        middle = window[len(window) // 2].loss
        return window[-1].loss - middle > middle - window[0].loss

    def _lies_flat(self, level: float, noise: float) -> bool:
        whole = self.blocks
        if len(whole) < self.BLOCKS * self.WINDOWS:
            return False
        if any(block.loss < level for block in whole):
            return False
        half = len(whole) // 2
        before, after = (median(b.loss for b in part) for part in (whole[:half], whole[-half:]))
        return after > before - noise / math.sqrt(self.size)

    def _error(self, noise: float) -> float:
        return self.STANDARD_ERRORS * noise / math.sqrt(self.size)

    def state(self) -> dict[str, Any]:
        windows = ("losses", "norms", "moves", "spreads", "habit_norms")
        return {
            **{name: getattr(self, name).values() for name in windows},
            "block_step": self.block_step,
            "count": self.count,
            "good_at": self.good_at,
            "fell_at": self.fell_at,
            "blocks": [list(block) for block in self.blocks],
            "initial": self.initial,
            "best": None if self.best is None else list(self.best),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.losses = Window(self.size, state["losses"])
        self.norms = Window(self.size, state["norms"])
        self.moves = Window(self.HABIT, state["moves"])
        self.spreads = Window(self.HABIT, state["spreads"])
        self.habit_norms = Window(self.HABIT, state["habit_norms"])
        self.block_step = state["block_step"]
        self.count = state.get("count", len(state["blocks"]))
        self.good_at, self.fell_at = state.get("good_at", 0), state.get("fell_at", 0)
        self.blocks = [_block(block) for block in state["blocks"]]
        self.initial = state["initial"]
        self.best = None if state["best"] is None else _block(state["best"])


def _block(values: Sequence[float]) -> Block:
    step, loss, spread, norm = values
    return Block(step, loss, spread, norm)
