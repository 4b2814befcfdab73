"""Plain words for causes, actions and evidence, for readers who have never seen the project."""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from heal.actions import RENAMED
from heal.causes import Cause, Family
from heal.json_lines import number

EVIDENCE = {
    "tensor": "tensor",
    "norm": "gradient norm",
    "loss": "loss",
    "lr": "learning rate",
    "ratio": "times the usual",
    "usual_norm": "usual norm",
    "usual_loss": "usual loss",
    "usual_lr": "usual learning rate",
    "usual_seconds": "usual seconds per step",
    "seconds": "seconds per step",
    "type": "exception",
    "message": "message",
    "phase": "raised in",
    "elements": "bad elements",
    "tensors": "bad tensors",
    "norm_before": "norm before",
    "counter": "step counter",
    "counter_before": "step counter before",
    "suspect": "suspected cause",
    "suspect_step": "suspected since step",
    "kind": "found",
    "epoch": "epoch",
    "batch": "batch",
}
"""Names of evidence that is shown; other entries are shown under their own names."""

HIDDEN = {"tensor_index", "matched", "measured", "also", "applied"}
KINDS_OF_NUMBER = {"HAS_NAN": "NaN", "HAS_INF": "Inf", "OVERFLOW": "overflow", "LOSS_NAN": "NaN"}
UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of Unicode
MAX_TEXT = 400  # characters of any one thing that a journal says


def title(failure: str) -> str:
    """Return what happened, in four or five words."""
    try:
        return Cause(failure).about.title
    except ValueError:  # of another version
        return shorten(failure.replace("_", " ").capitalize(), 60)


def family(failure: str) -> str:
    """Return the family of a cause; its own name if it is none of ours."""
    try:
        return Cause(failure).about.family.value
    except ValueError:
        return failure


def is_numeric(failure: str) -> bool:
    """Tell whether a cause is one of those that explain each other."""
    return family(failure) == Family.NUMERIC.value


def evidence_words(evidence: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what was measured, as names and values."""
    told = []
    for name, value in evidence.items():
        if name in HIDDEN:
            continue
        if name == "kind" and isinstance(value, Sequence) and not isinstance(value, str):
            value = ", ".join(KINDS_OF_NUMBER.get(str(flag), str(flag)) for flag in value)
        told.append((EVIDENCE.get(name, shorten(str(name), 40).replace("_", " ")), show(value)))
    return told


def action_words(action: Mapping[str, Any], resumed_at: int | None) -> str:
    """Return what was done, as a phrase."""
    name = str(action.get("action", ""))
    name = RENAMED.get(name, name)
    first, last = show(action.get("first_step")), show(action.get("last_step"))
    phrase = {
        "Skip": "skipped the step on the device; nothing was changed",
        "TightenClip": f"clipped harder (limit x {show(action.get('factor'))})",
        "RelearnClip": "let the clipping rule learn its statistics anew",
        "HoldLr": f"held the learning rate at {show(action.get('limit'))}",
        "ScaleLr": f"lowered the learning rate (x {show(action.get('factor'))}, "
        f"back within {show(action.get('ramp_steps'))} steps)",
        "Rollback": "returned to the snapshot of step "
        + show(action.get("before_step") if resumed_at is None else resumed_at),
        "SkipBatches": f"skipped the data of step {first}"
        + (f" to {last}" if last != first else ""),
        "ShrinkBatch": "cut batches into twice as many pieces",
        "CheckpointActivations": "traded time for memory (activation checkpointing)",
        "ClearCache": "cleared the cache",
        "Backoff": f"waited {show(action.get('seconds'))} s and tried again",
        "TakeSnapshot": "took a snapshot",
        "WatchClosely": "checked every step for a while",
        "PerturbWeights": "nudged the weights",
        "AnchorWeights": f"held the weights near the snapshot (strength "
        f"{show(action.get('strength'))}, for {show(action.get('steps'))} steps)",
        "Halt": f"stopped the run: {show(action.get('reason'))}",
    }.get(name, shorten(name, 60))
    return phrase if action.get("effect", True) else f"{phrase} (without effect)"


def show(value: Any) -> str:
    """Return a value of the journal for people: numbers short, text not endless."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if value in ("NaN", "Infinity", "-Infinity"):
        return f"{number(value):.4g}".replace("nan", "NaN").replace("inf", "Inf")
    if isinstance(value, Mapping):
        value = ", ".join(f"{name} {show(entry)}" for name, entry in value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str):
        value = ", ".join(show(entry) for entry in value)
    return shorten(str(value), MAX_TEXT)


def shorten(text: str, length: int) -> str:
    """Return a text cut to a length, without what could steer a terminal or a page."""
    return clean(text if len(text) <= length else text[: length - 3] + "...")


def clean(text: str) -> str:
    """Return a text without control characters, direction marks and halves of characters."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        " " if c in "\n\r\t" else "\ufffd" if unicodedata.category(c) in UNSAFE else c for c in text
    )


def duration(seconds: float) -> str:
    """Return a time span as people say it."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def count(number: int, one: str, many: str = "") -> str:
    """Return "1 step", "2 steps", "1,000 steps"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
