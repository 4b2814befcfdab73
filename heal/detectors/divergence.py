"""Finds losses that climb, whatever the noise, and undo what was learned."""

import math
from itertools import pairwise
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.robust import Window
from heal.verdict import Record

TINY = 1e-12
"""Keeps divisions defined; no loss is judged by it."""


class Divergence:
    """Finds a loss that climbs and undoes what was learned.

    The last ``divergence_patience`` losses are cut into blocks; a climb is a rise of their medians
    from block to block beyond the noise, with no fall. One leap (harder data, a restart of the
    schedule) is one rise, not a climb, and a loss that always wandered as much (a critic's) does
    not climb either. A climb is divergence when it has undone half of what was learned since the
    start and gradients have grown with it. Where nothing was learned yet, or the loss says little
    about learning (RL), they must have grown more, and the climb must steepen. A loss that leapt
    to where it was untrained and lies there for three times the patience has collapsed, which is
    divergence too.
    """

    BLOCKS = 5
    UNDONE, COLLAPSED = 0.5, 0.8  # shares of what was learned
    NOISE = 8.0  # spreads within a block, and usual steps between blocks, that it must have risen
    WANDER = 30.0  # usual steps between blocks that a collapse must span
    STANDARD_ERRORS = 2.0
    GREW, GREW_UNLEARNED = 1.5, 3.0  # gradient norms, against those at the best loss
    LEAP = 0.75  # share of all rises that makes one of them a leap
    FLAT_WINDOWS = 3
    STEPS_KEPT = 40  # of medians between blocks, to know how the loss wanders

    def __init__(self, config: HealingConfig) -> None:
        self.size = max(config.divergence_patience // self.BLOCKS, 4)
        self.losses = Window(self.size)
        self.norms = Window(self.size)
        self.blocks: list[list[float]] = []  # step of the first loss, median, spread, norm
        self.initial: float | None = None
        self.best: list[float] | None = None
        self.block_step = -1
        self.moves = Window(self.STEPS_KEPT)

    def observe(self, record: Record) -> Finding | None:
        if not record.has_finite_loss:
            return None
        if len(self.losses) == 0:
            self.block_step = record.step
        self.losses.push(record.loss)
        self.norms.push(record.norm)
        if len(self.losses) < self.size:
            return None
        block = [
            float(self.block_step),
            self.losses.median,
            max(self.losses.spread, TINY),
            self.norms.median if len(self.norms) else 0.0,
        ]
        self.losses.clear()
        self.norms.clear()
        if len(self.blocks) >= self.BLOCKS:
            # Moves enter late, so that those of a climb do not pass for habit.
            self.moves.push(abs(self.blocks[-self.BLOCKS + 1][1] - self.blocks[-self.BLOCKS][1]))
        self.blocks.append(block)
        del self.blocks[: -self.BLOCKS * self.FLAT_WINDOWS]
        if self.initial is None:
            self.initial = block[1]
        if self.best is None or block[1] < self.best[1]:
            self.best = block
        return self._judge(record)

    def _judge(self, record: Record) -> Finding | None:
        if len(self.blocks) < self.BLOCKS or self.best is None or self.initial is None:
            return None
        window = self.blocks[-self.BLOCKS :]
        noise = sorted(block[2] for block in window)[self.BLOCKS // 2]
        noise = max(noise, self.best[2])
        risen = window[-1][1] - self.best[1]
        learned = self.initial - self.best[1]
        wander = self.moves.median if len(self.moves) else 0.0
        kind = ""
        if self._climbs(window, noise):
            has_learned = learned > self.NOISE / 2 * noise
            grew = window[-1][3] / self.best[3] if self.best[3] > 0.0 else 0.0
            if has_learned:
                is_sick = grew > self.GREW
            else:
                is_sick = grew > self.GREW_UNLEARNED and self._steepens(window)
            if is_sick and risen > max(self.UNDONE * learned, self.NOISE * max(noise, wander)):
                kind = "climb"
        elif self._lies_flat(learned, noise, wander):
            kind = "collapse"
        if not kind:
            return None
        low = min(window, key=lambda block: block[1]) if kind == "climb" else self.best
        self.blocks.clear()  # the next verdict needs a whole window of its own
        return Finding(
            cause=Cause.DIVERGENCE,
            step=record.step,
            bad_step=int(low[0]),
            severity=Severity.ERROR,
            evidence={
                "kind": kind,
                "loss": window[-1][1],
                "best_loss": self.best[1],
                "initial_loss": self.initial,
                "noise": noise,
            },
        )

    def _climbs(self, window: list[list[float]], noise: float) -> bool:
        error = self.STANDARD_ERRORS * noise / math.sqrt(self.size)
        rises = [after[1] - before[1] for before, after in pairwise(window)]
        is_leap = max(rises) > self.LEAP * sum(r for r in rises if r > 0.0)
        return min(rises) > -error and sum(r > error for r in rises) >= 3 and not is_leap

    @staticmethod
    def _steepens(window: list[list[float]]) -> bool:
        middle = window[len(window) // 2][1]
        return window[-1][1] - middle > middle - window[0][1]

    def _lies_flat(self, learned: float, noise: float, wander: float) -> bool:
        whole = self.blocks
        if len(whole) < self.BLOCKS * self.FLAT_WINDOWS or self.best is None:
            return False
        if learned < max(self.NOISE * noise, self.WANDER * wander):
            return False
        level = self.best[1] + self.COLLAPSED * learned
        half = len(whole) // 2
        before = sorted(block[1] for block in whole[:half])[half // 2]
        after = sorted(block[1] for block in whole[-half:])[half // 2]
        is_improving = after < before - noise / math.sqrt(self.size)
        return all(block[1] > level for block in whole) and not is_improving

    def state(self) -> dict[str, Any]:
        return {
            "losses": self.losses.values(),
            "norms": self.norms.values(),
            "blocks": [list(block) for block in self.blocks],
            "initial": self.initial,
            "best": None if self.best is None else list(self.best),
            "block_step": self.block_step,
            "moves": self.moves.values(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.losses = Window(self.size, state["losses"])
        self.norms = Window(self.size, state["norms"])
        self.blocks = [list(block) for block in state["blocks"]]
        self.initial, self.best = state["initial"], state["best"]
        self.block_step = state["block_step"]
        self.moves = Window(self.STEPS_KEPT, state["moves"])
