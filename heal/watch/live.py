"""What is known of a run that is under way."""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heal.journal.json_lines import number
from heal.report import words
from heal.report.incident import KINDS, Event
from heal.report.read import (
    Damage,
    NotARun,
    find_files,
    read_postmortem,
    seconds_of,
    whole,
)
from heal.report.summary import ENDINGS
from heal.watch.tail import Tail

MAX_NEWS = 200  # events kept


@dataclass(slots=True)
class RankState:
    """The newest numbers of one rank; None where nothing was told."""

    step: int | None = None
    loss: str = "-"
    norm: str = "-"
    lr_scale: str = "-"
    pieces: str = "-"
    steps_per_second: float | None = None
    time: float | None = None
    nans: int = 0


@dataclass(slots=True)
class LiveRun:
    """Polls the files of a run.

    Attributes:
        news: what happened, the newest last, as sentences.
        ending: why the run ended; empty while it has not.
    """

    folder: Path
    ranks: dict[int, RankState] = field(default_factory=dict)
    goal: int | None = None
    began: float | None = None
    acted: int = 0
    noted: int = 0
    news: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_NEWS))
    ending: str = ""
    ended: bool = False
    _tails: dict[str, Tail] = field(default_factory=dict)

    def poll(self) -> list[str]:
        """Read what is new; return the sentences about new events."""
        try:
            files = find_files(self.folder)
        except (NotARun, OSError):
            return []
        fresh: list[str] = []
        for rank in sorted(files.events):
            for line in self._tail(f"events{_suffix(rank)}").lines():
                fresh += self._hear(rank, line)
        for rank in sorted(files.metrics):
            for line in self._tail(f"metrics{_suffix(rank)}").lines():
                self._measure(rank, line)
        self._look_for_ending(files.postmortems)
        self.news.extend(fresh)
        return fresh

    @property
    def exists(self) -> bool:
        """Whether there is anything of a run."""
        return bool(self.ranks) or bool(self._tails) or self.ended

    @property
    def bad_lines(self) -> int:
        return sum(tail.bad_lines for tail in self._tails.values())

    @property
    def step(self) -> int | None:
        """The last step of the rank that is furthest behind."""
        return min((r.step for r in self.ranks.values() if r.step is not None), default=None)

    @property
    def last_time(self) -> float | None:
        return max((r.time for r in self.ranks.values() if r.time is not None), default=self.began)

    def _tail(self, name: str) -> Tail:
        return self._tails.setdefault(name, Tail(self.folder / f"{name}.jsonl"))

    def _hear(self, rank: int, line: dict[str, Any]) -> list[str]:
        event = Event.of_line(rank, line)
        if event.name == "goal":
            self.goal = whole(line.get("steps"))
            return []
        if event.name == "started":
            self.began, self.ending, self.ended = event.time, "", False
            return [_sentence(rank, f"started on {words.show(line.get('host'))}")]
        if not event.is_trouble:
            told = words.show(line.get("text") or line.get("error") or event.name)
            return [_sentence(rank, f"step {event.step}: {told}")]
        if event.kind in ("alert", "refused"):
            self.noted += event.kind == "alert"
        else:
            self.acted += 1
        done = "; ".join(words.action_words(a, event.resumed_at) for a in event.plan)
        what = words.title(event.failure)
        return [_sentence(rank, f"step {event.step}: {what}. {done or KINDS[event.kind]}")]

    def _measure(self, rank: int, line: dict[str, Any]) -> None:
        step = whole(line.get("step"))
        if step is None:
            return
        state = self.ranks.setdefault(rank, RankState())
        time = seconds_of(line.get("time"))
        if None not in (state.step, state.time, time) and state.step != step:
            seconds, steps = time - state.time, step - state.step  # type: ignore[operator]
            if seconds > 0 and steps > 0:
                state.steps_per_second = steps / seconds
        state.step, state.time = step, time if time is not None else state.time
        series = line.get("series")
        if not isinstance(series, dict):
            series = {"norm": line.get("zclip/raw_grad_norm"), **line}
        state.loss = words.show(_newest(series.get("loss")))
        state.norm = words.show(_newest(series.get("norm")))
        state.lr_scale = words.show(_newest(series.get("lr_scale")))
        state.pieces = words.show(_newest(series.get("micro_batches")))
        nans = number(line.get("healing/nan_count"))
        state.nans = int(nans) if abs(nans) < 2**53 else state.nans

    def _look_for_ending(self, postmortems: dict[int, Path]) -> None:
        """Believe a postmortem unless the run has started again since."""
        if not postmortems or self.ended:
            return
        page = read_postmortem(postmortems[min(postmortems)], Damage())
        written = seconds_of(page.get("timestamp")) if page is not None else None
        if page is None or (self.began or 0.0) > (written or 0.0):
            return
        reason = str(page.get("exit_reason", ""))
        self.ended = True
        self.ending = ENDINGS.get(reason, f"ended ({words.shorten(reason, 40)})")
        if reason != "completed":
            message = words.show(page.get("exception_message"))
            self.ending += f" (exit code {words.show(page.get('exit_code'))}: {message})"


def _newest(column: Any) -> Any:
    return column[-1] if isinstance(column, list) and column else column


def _suffix(rank: int) -> str:
    return f".rank{rank}" if rank else ""


def _sentence(rank: int, text: str) -> str:
    return f"rank {rank}, {text}" if rank else text
