"""Passes every line of the journal on to the trackers; none of them can hurt the run."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from heal.integrations.trackers.choose import make_trackers
from heal.integrations.trackers.tracker import Level, Tracker
from heal.journal.journal import Journal

PATIENCE = 3
"""Failures in a row after which a method is left alone: each may cost a network timeout."""

QUIET_ENDS = ("completed",)
EXPECTED_ENDS = ("sigterm", "sigint", "exited")
OUR_NUMBERS = ("healing/", "zclip/")
PLACE = ("v", "time", "rank", "step", "event")

FACTS = ("started", "goal")  # events that are no news: nobody is alerted of them


class FanOut:
    """A subscriber of the journal: metrics are logged, decisions become alerts.

    Trackers start with the first line, and again if lines come after they were closed.

    Args:
        trackers: who is told.
        config: the settings of healing, shown beside the run.
        note: told once of each tracker that raises.
    """

    def __init__(
        self, trackers: Iterable[Tracker], config: Mapping[str, Any], note: Callable[[str], None]
    ) -> None:
        self.trackers = list(trackers)
        self._config = dict(config)
        self._note = note
        self._started: set[int] = set()
        self._failures: dict[tuple[int, str], int] = {}
        self._noted: set[int] = set()
        self._is_telling = False

    def __call__(self, kind: str, line: Mapping[str, Any]) -> None:
        """Hear a line of the journal: "metrics", "events" or "postmortem"."""
        if self._is_telling:  # a note about a tracker that failed, on its way to the journal
            return
        self._is_telling = True
        try:
            if kind == "metrics":
                self.log(line, int(line["step"]))
            elif kind == "events":
                if line.get("event") not in FACTS:
                    self.alert(*alert_for(line))
            else:
                self._end(line)
        finally:
            self._is_telling = False

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log what is a finite number; the loss and the factor on the LR go under ``healing/``."""
        numbers = finite_numbers(metrics)
        if numbers:
            self._tell("log", numbers, step)

    def alert(self, level: Level, title: str, text: str) -> None:
        """Alert on every tracker."""
        self._tell("alert", level, title, text)

    def close(self) -> None:
        """Close the trackers that have started."""
        for tracker in self.trackers:
            if id(tracker) in self._started:
                self._attempt(tracker, "close")
        self._started.clear()

    def _end(self, page: Mapping[str, Any]) -> None:
        self.log(page.get("final_metrics", {}), max(0, int(page.get("last_step", 0))))
        self.alert(*_alert_for_the_end(page))
        self.close()

    def _tell(self, method: str, *what: Any) -> None:
        for tracker in self.trackers:
            if id(tracker) not in self._started and self._attempt(tracker, "start", self._config):
                self._started.add(id(tracker))
            if id(tracker) in self._started:
                self._attempt(tracker, method, *what)

    def _attempt(self, tracker: Tracker, method: str, *what: Any) -> bool:
        key = (id(tracker), method)
        if self._failures.get(key, 0) >= PATIENCE:
            return False
        try:
            getattr(tracker, method)(*what)
        except Exception as error:
            self._failures[key] = self._failures.get(key, 0) + 1
            if id(tracker) not in self._noted:
                self._noted.add(id(tracker))
                name = f"{type(tracker).__name__}.{method}"
                self._note(f"{name} failed: {error!r}; after {PATIENCE} times it is left out")
            return False
        self._failures[key] = 0
        return True


def attach(
    journal: Journal,
    trackers: str | Tracker | Iterable[str | Tracker] | None,
    config: Mapping[str, Any],
    note: Callable[[str], None],
) -> FanOut | None:
    """Have trackers hear all that a journal is told; those of rank 0 only, None elsewhere.

    Args:
        journal: subscribed to.
        trackers: see :func:`make_trackers`, whose errors are raised on every rank.
        config: settings to show.
        note: told of trackers that fail.
    """
    made = make_trackers(trackers)
    if not made or journal.rank != 0:
        return None
    fan_out = FanOut(made, config, note)
    journal.subscribe(fan_out)
    return fan_out


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return what trackers can take: not every store has NaN, and words are no metrics."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if name in ("time", "step", "seen_at") or isinstance(value, bool):
            continue
        if isinstance(value, (int, float)) and math.isfinite(value):
            ours = name if name.startswith(OUR_NUMBERS) else f"healing/{name}"
            numbers[ours] = float(value)
    return numbers


def alert_for(event: Mapping[str, Any]) -> tuple[Level, str, str]:
    """Return level, title and text for a line of ``events.jsonl``."""
    kind, step = str(event.get("event", "")), event.get("step")
    if kind not in ("recovery", "alert"):
        told = "; ".join(f"{name}: {v}" for name, v in event.items() if name not in PLACE)
        return Level.WARN, f"healing: {kind}", f"step {step}: {told}"
    level = {"INFO": Level.INFO, "WARN": Level.WARN}.get(
        str(event.get("severity", "ERROR")), Level.ERROR
    )
    done = ", ".join(map(str, event.get("actions", ()))) or "told only"
    text = [f"step {step}: {event.get('diagnosis', '')}", f"Done: {done}."]
    if event.get("resumed_at") is not None:
        text.append(f"Next step: {event['resumed_at']}.")
    return level, f"healing: {event.get('failure', kind)}", " ".join(text)


def _alert_for_the_end(page: Mapping[str, Any]) -> tuple[Level, str, str]:
    reason = str(page.get("exit_reason", ""))
    level = Level.ERROR
    if reason in QUIET_ENDS:
        level = Level.INFO
    elif reason in EXPECTED_ENDS:
        level = Level.WARN
    count = len(page.get("recovery_actions", ()))
    text = f"last step {page.get('last_step')}, {count} recoveries"
    if page.get("exception") is not None:
        text += f"; {page['exception']!r}"
    return level, f"healing: run ended, {reason}", text
