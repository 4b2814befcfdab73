"""Plain words for causes, actions and evidence, for readers who have never seen the project."""

import math
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from heal.actions import RENAMED
from heal.causes import Cause, Family
from heal.json_lines import number

EVIDENCE = {
    "norm": "gradient norm",
    "lr": "learning rate",
    "ratio": "times the baseline",
    "usual_norm": "baseline norm",
    "usual_loss": "baseline loss",
    "usual_lr": "baseline learning rate",
    "usual_seconds": "baseline seconds per step",
    "seconds": "seconds per step",
    "type": "exception",
    "phase": "raised in",
    "elements": "bad elements",
    "tensors": "bad tensors",
    "counter": "step counter",
    "counter_before": "step counter before",
    "suspect": "suspected cause",
    "suspect_step": "suspected since step",
    "kind": "found",
}
"""Names of evidence that is shown; other entries are shown under their own names."""

HIDDEN = {"tensor_index", "matched", "measured", "also", "applied", "blames"}
KINDS_OF_NUMBER = {"HAS_NAN": "NaN", "HAS_INF": "Inf", "OVERFLOW": "overflow", "LOSS_NAN": "NaN"}
UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of Unicode
MAX_TEXT = 400  # characters of any one value of a journal


def title(failure: str) -> str:
    """Return what happened, in four or five words."""
    try:
        return Cause(failure).about.title
    except ValueError:  # of another version
        return shorten(failure.replace("_", " ").capitalize(), 60)


NUMERIC = {cause.value for cause in Cause if cause.about.family is Family.NUMERIC}
"""Causes that explain each other."""


def evidence_words(evidence: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what was measured, as names and values."""
    pairs = []
    names = EVIDENCE | ({"norm": "norm after"} if "norm_before" in evidence else {})  # of weights
    for name, value in evidence.items():
        if name in HIDDEN or value is None:
            continue
        if name == "kind" and isinstance(value, Sequence) and not isinstance(value, str):
            value = ", ".join(KINDS_OF_NUMBER.get(str(flag), str(flag)) for flag in value)
        pairs.append((names.get(name, shorten(str(name), 40).replace("_", " ")), show(value)))
    return pairs


ACTIONS = {
    "Halt": ("halt", "stopped the run with exit code {exit_code}: {reason}"),
    "Rollback": ("rollback", "rolled back to the snapshot of step {before_step}"),
    "PerturbWeights": ("rollback", "perturbed the weights"),
    "TightenClip": ("soften", "clipped harder (limit x {factor})"),
    "AnchorWeights": (
        "soften",
        "held the weights near the snapshot (strength {strength}, for {steps} steps)",
    ),
    "ScaleLr": ("soften", "lowered the learning rate (x {factor}, back within {ramp_steps} steps)"),
    "HoldLr": ("soften", "held the learning rate at {limit}"),
    "ShrinkBatch": ("memory", "split batches into twice as many micro-batches"),
    "CheckpointActivations": ("memory", "traded time for memory (activation checkpointing)"),
    "ClearCache": ("memory", "cleared the cache"),
    "Backoff": ("wait", "waited {seconds} s and retried"),
    "SkipBatches": ("data", "skipped the data of step {steps}"),
    "Skip": ("refused", "skipped the step on the device"),
    "RelearnClip": ("note", "reset the statistics of the clipping rule"),
    "TakeSnapshot": ("note", "took a snapshot"),
    "WatchClosely": ("note", "checked every step for a while"),
}
"""What each action did: its kind on the charts, and a phrase with the numbers of the journal."""


def action_kind(action: Mapping[str, Any]) -> str:
    """Return what kind of thing an action is; a note if it is unknown."""
    return ACTIONS.get(_action_name(action), ("note", ""))[0]


def action_words(action: Mapping[str, Any], resumed_at: Any = None) -> str:
    """Return what was done, as a phrase; ``resumed_at`` is where a rollback has led."""
    name = _action_name(action)
    numbers: dict[str, str] = defaultdict(lambda: show(None))
    numbers |= {str(key): show(value) for key, value in action.items()}
    if name == "Rollback" and resumed_at is not None:
        numbers["before_step"] = show(resumed_at)
    if name == "SkipBatches":
        first, last = numbers["first_step"], numbers["last_step"]
        numbers["steps"] = first if last == first else f"{first} to {last}"
    phrase = ACTIONS[name][1].format_map(numbers) if name in ACTIONS else shorten(name, 60)
    return phrase if action.get("effect", True) else f"{phrase} (no effect)"


def _action_name(action: Mapping[str, Any]) -> str:
    name = str(action.get("action", ""))
    return RENAMED.get(name, name)


MOST_SAMPLES = 8  # indices of samples in a line; the journal has them all
MAX_MESSAGE = 120  # characters of an exception's message in a line
MEASURED = {
    *("lr", "loss", "first_loss", "eval_loss", "train_loss", "norm_before", "norm", "seconds"),
    *("usual_lr", "usual_loss", "usual_norm", "usual_seconds"),
}
"""Numbers of a finding that its line has. The journal has the others too."""

ADVICE = ("advice", "hint")
"""Evidence that says what the reader can do."""


def recovery_line(entry: Mapping[str, Any]) -> str:
    """Return what happened and what was done as a line of the log, from a recovery action."""
    evidence = entry.get("evidence") or {}
    failure = str(entry.get("failure"))
    done = [action_words(action, entry.get("resumed_at")) for action in entry.get("plan", ())]
    details = [_origin(failure, evidence)]
    if not done:  # an alert: what it rests on is all that it has to say
        numbers = {k: v for k, v in evidence.items() if k in MEASURED and v is not None}
        details.append(", ".join(f"{name} {value}" for name, value in evidence_words(numbers)))
    details += [str(evidence[name]) for name in ADVICE if evidence.get(name)]
    place, detail = _place(evidence), "; ".join(filter(None, details))
    where = f"step {entry.get('step')}" + (f" ({place})" if place else "")
    text = f"{where}: {failure}" + (f" ({detail})" if detail else "")
    return f"{text} -> {', '.join(done)}" if done else text


def _place(evidence: Mapping[str, Any]) -> str:
    """Return which batch it was, and the number of the call of ``step``; empty if unknown."""
    parts = []
    if evidence.get("call") is not None:
        parts.append(f"call {evidence['call']}")
    if evidence.get("batch") is not None:
        parts.append(f"epoch {evidence.get('epoch')} batch {evidence['batch']}")
    samples = evidence.get("samples") or ()
    if samples:
        more = ", ..." if len(samples) > MOST_SAMPLES else ""
        parts.append(f"samples {', '.join(map(str, samples[:MOST_SAMPLES]))}{more}")
    return ", ".join(parts)


def _origin(failure: str, evidence: Mapping[str, Any]) -> str:
    """Return what is to blame: something that is known, an exception, or a tensor."""
    if evidence.get("blames"):
        return str(evidence["blames"])
    if evidence.get("type"):
        message = shorten(" ".join(str(evidence.get("message", "")).split()), MAX_MESSAGE)
        return f"{evidence['type']}: {message}" if message else str(evidence["type"])
    tensor = str(evidence.get("tensor", ""))
    # NaN spreads to the gradients of all layers below: the first tensor may not be its origin.
    return f"first in the gradient of {tensor}" if tensor and "nonfinite" in failure else tensor


ANSWERS = {
    "damaged": "damaged weights",
    "other data": "other data",
    "recovered": "damage that passed by itself",
    "learned": "that the weights have learned",
    "not learned": "that the weights have learned nothing",
    "undecided": "no answer",
}
"""What an experiment has shown."""


def answer_of(line: Mapping[str, Any]) -> str:
    """Return what an experiment has shown, as a key of :data:`ANSWERS` where it is known.

    A suspicion that nothing is learned is answered by the losses with the first weights.
    """
    answer = str(line.get("answer", ""))
    if line.get("suspicion") == "not_learning" and not math.isnan(_last(line.get("losses_old"))):
        return "learned" if answer == "other data" else "not learned"
    return answer


def experiment_words(line: Mapping[str, Any]) -> str:
    """Return what an experiment compared and what it showed, as a sentence."""
    now, old = (_last(line.get(name)) for name in ("losses_now", "losses_old"))
    answer = answer_of(line)
    found = f"Experiment: {ANSWERS.get(answer, shorten(answer, 40))}"
    if math.isnan(now) or math.isnan(old):
        return f"{found} ({show(line.get('why'))})."
    steps = line.get("snapshots")
    compared = steps[-1:] if isinstance(steps, list) else steps  # the losses are of the last one
    return (
        f"{found}. On the same batch the loss was {show(now)} with the current weights and "
        f"{show(old)} with those of step {show(compared)}."
    )


def _last(values: Any) -> float:
    return number(values[-1]) if isinstance(values, list) and values else math.nan


def outcome_words(line: Mapping[str, Any]) -> str:
    """Return whether the loss came back, with figures."""
    found = "The loss came back" if line.get("healed") else "Not recovered"
    why = "; nothing has been learned since the run began" * bool(line.get("has_learned") is False)
    numbers = f"{show(line.get('loss_before'))} before, {show(line.get('loss'))} after"
    return f"{found}: {numbers}{why}."


def event_words(line: Mapping[str, Any]) -> str:
    """Return what any event of the journal says, as a sentence."""
    kind = str(line.get("event", "note"))
    if kind == "experiment":
        return experiment_words(line)
    if kind == "outcome":
        return outcome_words(line)
    diagnosis = line.get("diagnosis")
    summary = diagnosis.get("summary") if isinstance(diagnosis, Mapping) else None
    text = line.get("text") or line.get("error") or line.get("reason") or summary
    return show(text or title(str(line.get("failure") or kind)))


def show(value: Any) -> str:
    """Return a value of the journal for people: numbers short, text not endless."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) or value in ("NaN", "Infinity", "-Infinity"):
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
    """Return a time span for people."""
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


def sentence(*texts: str, link: str = ", ") -> str:
    """Join texts to one that begins with a capital letter, and has no other of theirs."""
    joined = link.join(text[:1].lower() + text[1:] for text in texts)
    return joined[:1].upper() + joined[1:]


def cost(steps: int, batches: int, seconds: float) -> str:
    """Return what an incident cost."""
    parts = [
        count(steps, "step") if steps else "",
        count(batches, "batch", "batches") if batches else "",
        duration(seconds) if seconds >= 0.005 else "",
    ]
    return ", ".join(filter(None, parts)) or "nothing"


def times(text: str, number: int) -> str:
    """Return a text, and how often if more than once."""
    return f"{text} ({number} times)" if number > 1 else text


BARS = " .:-=+*#"


def sparkline(values: Sequence[float | None], bars: str = BARS) -> str:
    """Return a line of marks, one per value, the first of ``bars`` where there is none.

    The largest 2 % share the highest mark, so that one spike does not flatten all others.
    """
    finite = sorted(v for v in values if v is not None and math.isfinite(v))
    if not finite:
        return ""
    low, high = finite[0], finite[min(len(finite) - 1, int(0.98 * len(finite)))]
    scale = (len(bars) - 2) / ((high - low) or 1.0)

    def mark(value: float | None) -> str:
        if value is None or math.isnan(value):
            return bars[0]
        return bars[1 + int(max(0.0, min(high, value) - low) * scale)]

    return "".join(map(mark, values))
