"""All set-ups by name, and what one costs."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.healed_runs import cause_of_end
from benchmarks.healthy import changes, games, objectives, ways
from benchmarks.healthy.guards import Bare, Healed

SETUPS = {**changes.SETUPS, **ways.SETUPS, **objectives.SETUPS, **games.SETUPS}


@dataclass
class Looked:
    """What a healer did to a healthy run.

    Attributes:
        identical: whether weights, buffers and torch's generator are those of the bare run.
        halted: what ended the run; empty if it came to its end.
        events: everything beyond routine in the journal, by kind.
        causes: how often each was reported.
    """

    setup: str
    seed: int
    mode: str
    identical: bool
    halted: str
    rollbacks: int
    lr_changes: int
    experiments: int
    events: dict[str, int]
    causes: dict[str, int]

    @property
    def ok(self) -> bool:
        """Whether the run was left alone."""
        return self.identical and not (self.halted or self.rollbacks or self.lr_changes)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def fingerprint(modules: list[nn.Module]) -> list[Tensor]:
    """Return copies of all weights and buffers, and of the state of torch's generator."""
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    return [*(t.detach().clone() for t in tensors), torch.get_rng_state()]


def look(name: str, seed: int, mode: str = "loop", **settings: Any) -> Looked:
    """Train a set-up bare and healed, and compare.

    Args:
        name: of the set-up.
        seed: of everything random about it.
        mode: "loop", or "run" where the set-up has no loop of its own.
        settings: of the healers.
    """
    torch.set_num_threads(1)
    with Bare() as bare:
        expected = fingerprint(SETUPS[name](seed, bare))
    found: list[Tensor] = []
    halted = ""
    healed = Healed(mode, **settings)
    try:
        with healed:
            found = fingerprint(SETUPS[name](seed, healed))
    except Exception as error:  # a halt, or what the healer broke
        halted = cause_of_end(error)
    same = len(found) == len(expected) and all(map(_same_bits, found, expected))
    rollbacks, lr_changes = healed.changes()
    events = healed.events()
    return Looked(
        name,
        seed,
        mode,
        same,
        halted,
        rollbacks,
        lr_changes,
        events["experiment"],
        dict(events),
        dict(healed.causes()),
    )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def look_at(key: tuple[str, int, str, bool]) -> Looked:
    """Look at one run; with clipping, only changes of training count."""
    name, seed, mode, clips = key
    found = look(name, seed, mode, zclip_enabled=clips)
    found.identical = found.identical or clips
    return found
