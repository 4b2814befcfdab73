"""One line per action for people, through the logger ``heal``.

Recoveries are warnings: without any handler Python prints them to standard error. The logging
module is the only switch: ``logging.getLogger("heal").setLevel(logging.ERROR)`` silences them.
"""

import logging
from collections.abc import Mapping
from typing import Any

LOG = logging.getLogger("heal")
MOST_SAMPLES = 8  # indices of samples in a line; the journal has them all
MAX_MESSAGE = 120  # characters of an exception's message


def line_for(entry: Mapping[str, Any]) -> str:
    """Return what happened and what was done, from an entry of ``recovery_actions``."""
    evidence = entry.get("evidence") or {}
    text = f"step {entry.get('step')}"
    place = place_of(evidence)
    text += f" ({place})" if place else ""
    text += f": {entry.get('failure')}"
    detail = _detail(str(entry.get("failure")), evidence)
    text += f" ({detail})" if detail else ""
    done = ", ".join(_done(action) for action in entry.get("plan", ()))
    return f"{text} -> {done}" if done else text


def place_of(evidence: Mapping[str, Any]) -> str:
    """Return which batch it was, and the number of the call of ``step``; empty if unknown."""
    parts = []
    if evidence.get("call") is not None:
        parts.append(f"call {evidence['call']}")
    if evidence.get("batch") is not None:
        parts.append(f"epoch {evidence.get('epoch')} batch {evidence['batch']}")
    samples = evidence.get("samples")
    if samples:
        shown = ", ".join(map(str, samples[:MOST_SAMPLES]))
        more = ", ..." if len(samples) > MOST_SAMPLES else ""
        parts.append(f"samples {shown}{more}")
    return ", ".join(parts)


def _detail(failure: str, evidence: Mapping[str, Any]) -> str:
    if evidence.get("blames"):
        return str(evidence["blames"])
    if evidence.get("type"):
        message = " ".join(str(evidence.get("message", "")).split())
        shown = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."
        return f"{evidence['type']}: {shown}" if shown else str(evidence["type"])
    tensor = str(evidence.get("tensor", ""))
    # A NaN loss has NaN gradients all over; the first tensor is not to blame for it.
    return f"first in the gradient of {tensor}" if tensor and "nonfinite" in failure else tensor


def _done(action: Mapping[str, Any]) -> str:
    """Name an action with the number that matters; one without effect says so."""
    name = str(action.get("action", ""))
    try:
        words = WORDS.get(name, name).format(**action)
    except (KeyError, ValueError, IndexError):  # of another version of this library
        words = name
    return f"{words} (no effect)" if action.get("effect") is False else words


WORDS = {
    "Refuse": "step skipped",
    "Rollback": "rolled back to step {before_step}",
    "ScaleLr": "learning rate x {factor:g}",
    "TightenClip": "clip limits x {factor:g}",
    "RelearnClip": "clip statistics reset",
    "SkipBatches": "batches of steps {first_step} to {last_step} dropped",
    "ShrinkBatch": "micro-batch halved",
    "CheckpointActivations": "activations checkpointed",
    "ClearCache": "cache cleared",
    "Backoff": "waited {seconds:g} s",
    "TakeSnapshot": "snapshot taken",
    "WatchClosely": "weights checked more often",
    "PerturbWeights": "weights perturbed",
    "AnchorWeights": "weights anchored",
    "Halt": "halted with exit code {exit_code}: {reason}",
}
"""How a line names each action."""
