"""Trackers show a run elsewhere: their interface of four methods, and those that come with us."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from heal.journal import Journal
from heal.report import words

PROJECT = "self-healing"
"""The default name of a project."""


class Level(str, Enum):
    """How loud an alert is; trackio and W&B have the same three."""

    INFO = "INFO"
    WARN = "WARN"
    ERROR = "ERROR"


@runtime_checkable
class Tracker(Protocol):
    """Shows what a run does. It may raise: the run goes on without it.

    Example:
        >>> class Printer:
        ...     def start(self, config): print("settings:", dict(config))
        ...     def log(self, metrics, step): print(step, dict(metrics))
        ...     def alert(self, level, title, text): print(level.value, title, text)
        ...     def close(self): print("the end")
        >>> healer = Healer(model, optimizer, trackers=[Printer(), "tensorboard"])
    """

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin, with the settings of healing; after ``close``, go on with the same run."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take numbers, all finite. After a rollback steps come again."""
        ...

    def alert(self, level: Level, title: str, text: str) -> None:
        """Show what was decided."""
        ...

    def close(self) -> None:
        """Send what waits to be sent, and end the run if ``start`` began it."""
        ...


METHODS = ("start", "log", "alert", "close")


def make_trackers(
    trackers: str | Tracker | Iterable[str | Tracker] | None, **settings: Any
) -> list[Tracker]:
    """Return trackers for names, and objects as they are.

    Args:
        trackers: "trackio,tensorboard", a sequence of names and objects, one object, or None.
        settings: for every tracker that is made by name: ``project`` and ``name`` of the run.

    Raises:
        ValueError: a name is not known.
        ImportError: the package of a tracker is not installed.
        TypeError: an object lacks a method of :class:`Tracker`.

    Example:
        >>> make_trackers("trackio,tensorboard", project="small-gpt")
    """
    if trackers is None:
        return []
    if isinstance(trackers, str):
        listed: list[Any] = [name.strip() for name in trackers.split(",") if name.strip()]
    elif isinstance(trackers, Tracker) or not isinstance(trackers, Iterable):
        listed = [trackers]
    else:
        listed = list(trackers)
    # A name twice would show everything twice.
    return [_made(one, settings) for one in dict.fromkeys(listed)]


def _made(tracker: Any, settings: dict[str, Any]) -> Tracker:
    known = ", ".join(KNOWN)
    if isinstance(tracker, str):
        if tracker not in KNOWN:
            raise ValueError(f"tracker: expected one of {known}, got {tracker!r}")
        if find_spec(tracker) is None:
            raise ImportError(
                f"tracker {tracker!r} needs the package {tracker}, which is not installed: "
                f"pip install {tracker}"
            )
        return KNOWN[tracker](**settings)
    missing = [name for name in METHODS if not callable(getattr(tracker, name, None))]
    if missing or isinstance(tracker, type):
        lacks = f"lacks {', '.join(missing)}" if missing else "is a class, not an object of it"
        raise TypeError(
            f"tracker: expected an object with {', '.join(METHODS)}, or one of the names {known}, "
            f"got {tracker!r}, which {lacks}"
        )
    made: Tracker = tracker
    return made


# Passes every line of the journal on to the trackers; none of them can hurt the run.

PATIENCE = 3
"""Failures in a row after which a method is left alone: each may cost a network timeout."""

END_LEVELS = {
    "completed": Level.INFO,
    **dict.fromkeys(("sigterm", "sigint", "exited"), Level.WARN),
}
"""How loud the end of a run is, by its reason; any other is an error."""

OUR_NUMBERS = ("healing/", "zclip/")
PLACE = ("v", "time", "rank", "step", "event")

FACTS = ("started", "goal", "resumed")  # events that need no alert


class FanOut:
    """A subscriber of the journal: metrics are logged, decisions become alerts.

    Trackers start with the first line, and again if lines come after they were closed.

    ``note`` takes a text, once, about each tracker that raises.
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
        self._is_sending = False

    def __call__(self, kind: str, line: Mapping[str, Any]) -> None:
        """Send a line of the journal on: "metrics", "events" or "postmortem"."""
        if self._is_sending:  # a note about a tracker that failed, on its way to the journal
            return
        self._is_sending = True
        try:
            if kind == "metrics":
                self.log(line, int(line["step"]))
            elif kind == "postmortem":
                self._end(line)
            elif line.get("event") not in FACTS:
                self.alert(*alert_for(line))
        finally:
            self._is_sending = False

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log what is a finite number; the loss and the factor on the LR go under ``healing/``."""
        numbers = finite_numbers(metrics)
        if numbers:
            self._send("log", numbers, step)

    def alert(self, level: Level, title: str, text: str) -> None:
        self._send("alert", level, title, text)

    def close(self) -> None:
        """Close the trackers that have started."""
        for tracker in self.trackers:
            if id(tracker) in self._started:
                self._attempt(tracker, "close")
        self._started.clear()

    def _end(self, page: Mapping[str, Any]) -> None:
        final = {
            name: v for name, v in page.get("final_metrics", {}).items() if name != "grad_norm"
        }
        self.log(final, max(0, int(page.get("last_step", 0))))  # the norm is zclip/raw_grad_norm
        self.alert(*_alert_for_the_end(page))
        self.close()

    def _send(self, method: str, *what: Any) -> None:
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
    """Send all lines of a journal to trackers; on rank 0 only, None elsewhere.

    Errors of :func:`make_trackers` are raised on every rank.
    """
    made = make_trackers(trackers)
    if not made or journal.rank != 0:
        return None
    fan_out = FanOut(made, config, note)
    journal.subscribe(fan_out)
    return fan_out


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return what trackers can take: not every store has NaN, and a text is no metric."""
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
    if kind in ("experiment", "outcome"):
        is_good = kind == "experiment" or event.get("healed")
        text = f"step {step}: {words.event_words(event)}"
        return Level.INFO if is_good else Level.ERROR, f"healing: {kind}", text
    if kind not in ("recovery", "alert"):
        facts = [f"{name}: {words.show(v)}" for name, v in event.items() if name not in PLACE]
        return Level.WARN, f"healing: {kind}", f"step {step}: {'; '.join(facts)}"
    level = Level.__members__.get(str(event.get("severity")), Level.ERROR)
    resumed_at = event.get("resumed_at")
    done = [words.action_words(action, resumed_at) for action in event.get("plan", ())]
    text = f"step {step}: {event.get('diagnosis', '')} Action: {'; '.join(done) or 'logged only'}."
    if resumed_at is not None:
        text += f" Next step: {resumed_at}."
    return level, f"healing: {event.get('failure', kind)}", text


def _alert_for_the_end(page: Mapping[str, Any]) -> tuple[Level, str, str]:
    reason = str(page.get("exit_reason", ""))
    level = END_LEVELS.get(reason, Level.ERROR)
    count = len(page.get("recovery_actions", ()))
    text = f"last step {page.get('last_step')}, {words.count(count, 'recovery', 'recoveries')}"
    if page.get("exception") is not None:
        text += f"; {page['exception']!r}"
    return level, f"healing: run ended, {reason}", text


# The trackers themselves. A run that is already active is used, and not ended.


class TensorBoardTracker:
    """Writes scalars to event files, and alerts as text under ``healing/alerts``.

    Args:
        log_dir: of the event files; ``runs/<project>/<name>`` if None.
        project: see ``log_dir``.
        name: see ``log_dir``; left out if None.
        writer: a SummaryWriter that is already open, such as that of a logger; used, not closed.
    """

    def __init__(
        self,
        log_dir: str | Path | None = None,
        project: str = PROJECT,
        name: str | None = None,
        writer: Any = None,
    ) -> None:
        self.log_dir = Path("runs", project, name or "") if log_dir is None else Path(log_dir)
        self._writer = writer
        self._is_ours = writer is None
        self._step = 0

    def start(self, config: Mapping[str, Any]) -> None:
        """Open a file of events in ``log_dir``, beside those of earlier starts."""
        if self._is_ours:
            module = import_module("torch.utils.tensorboard")
            self._writer = module.SummaryWriter(str(self.log_dir))
        rows = [f"| {name} | {value} |" for name, value in config.items()]
        self._writer.add_text("healing/config", "\n".join(["| setting | value |", "|-|-|", *rows]))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._step = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def alert(self, level: Level, title: str, text: str) -> None:
        """Write text at the step that was logged last, to the disk at once."""
        self._writer.add_text("healing/alerts", f"**{level.value}** {title}: {text}", self._step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file if it is ours, else send it to the disk."""
        if self._is_ours:
            self._writer.close()
        else:
            self._writer.flush()


class _RunTracker:
    """What trackio and W&B have in common: a run object that logs, alerts and finishes."""

    package = ""

    def __init__(self, project: str = PROJECT, name: str | None = None, **settings: Any) -> None:
        self.project = project
        self.name = name
        self.settings = settings
        self._run: Any = None
        self._is_ours = False

    def alert(self, level: Level, title: str, text: str) -> None:
        levels = import_module(self.package).AlertLevel
        self._run.alert(title=title, text=text, level=levels[level.value])

    def close(self) -> None:
        if self._is_ours:
            self._run.finish()


class TrackioTracker(_RunTracker):
    """Logs to trackio, a local store unless a Space is named, and alerts by ``trackio.alert``.

    trackio decides where the store is (``TRACKIO_DIR``, ``space_id``).

    Args:
        project: of the run that is begun if none is active.
        name: of that run; trackio makes one up if None.
        settings: further arguments of ``trackio.init``, such as ``space_id``.
    """

    package = "trackio"

    def start(self, config: Mapping[str, Any]) -> None:
        self._run = import_module("trackio.context_vars").current_run.get()
        self._is_ours = self._run is None
        if self._is_ours:
            self._run = import_module("trackio").init(
                project=self.project,
                name=self.name,
                config=dict(config),
                resume="never" if self.name is None else "allow",
                **self.settings,
            )
            self.name = self._run.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        super().close()
        if self._is_ours:
            import_module("trackio.context_vars").current_run.set(None)


STEP = "healing/step"
"""Our own axis: W&B drops what comes with a smaller step than before, as after a rollback."""


class WandbTracker(_RunTracker):
    """Logs to W&B, and alerts by ``run.alert``; ``WANDB_MODE=offline`` keeps it on this machine.

    Args:
        project: of the run that is begun if none is active.
        name: of that run; W&B makes one up if None.
        settings: further arguments of ``wandb.init``.
    """

    package = "wandb"
    _id: str | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        wandb = import_module("wandb")
        self._run = wandb.run
        self._is_ours = self._run is None
        if self._is_ours:
            resumed = {} if self._id is None else {"id": self._id, "resume": "allow"}
            self._run = wandb.init(
                project=self.project,
                name=self.name,
                config={"healing": dict(config)},
                **{**self.settings, **resumed},
            )
            self._id = self._run.id
        for numbers in ("healing/*", "zclip/*"):
            self._run.define_metric(numbers, step_metric=STEP)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers along our own axis, ``healing/step``."""
        self._run.log({**metrics, STEP: step})


ALERTS_FILE = "healing_alerts.txt"
MAX_ALERTS = 1000  # lines kept in the file, which is sent whole each time
MAX_TAG = 5000  # characters that MLflow takes for a tag


class MlflowTracker:
    """Logs metrics by MLflow's client: the fluent interface has one active run, maybe the user's.

    MLflow has no alerts: they go into the artifact ``healing_alerts.txt``, the newest one into the
    tag ``healing.alert``, and their numbers into ``healing/alerts/warn`` and so on.

    Args:
        project: the experiment of the run that is begun if none is active.
        name: of that run; MLflow makes one up if None.
        tracking_uri: of the server or database; that of the environment if None.
    """

    def __init__(
        self, project: str = PROJECT, name: str | None = None, tracking_uri: str | None = None
    ) -> None:
        self.project = project
        self.name = name
        self.tracking_uri = tracking_uri
        self.run_id: str | None = None
        self._client: Any = None
        self._is_ours = False
        self._alerts: deque[str] = deque(maxlen=MAX_ALERTS)
        self._counts = {level: 0 for level in Level}
        self._step = 0

    def start(self, config: Mapping[str, Any]) -> None:
        mlflow = import_module("mlflow")
        self._client = client = mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        if self.run_id is not None:
            if self._is_ours:
                client.update_run(self.run_id, status="RUNNING")
            return
        active = mlflow.active_run()
        self._is_ours = active is None
        if active is None:
            known = client.get_experiment_by_name(self.project)
            experiment = (
                client.create_experiment(self.project) if known is None else known.experiment_id
            )
            active = client.create_run(experiment, run_name=self.name)
        self.run_id = active.info.run_id
        entities = import_module("mlflow.entities")
        params = [entities.Param(f"healing.{name}", str(value)) for name, value in config.items()]
        client.log_batch(self.run_id, params=params)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._step = step
        entities, now = import_module("mlflow.entities"), int(time.time() * 1000)
        rows = [entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=rows)

    def alert(self, level: Level, title: str, text: str) -> None:
        """Write an alert where MLflow can show it."""
        line = f"{level.value} {title}: {text}"
        self._alerts.append(line)
        self._counts[level] += 1
        self._client.log_text(self.run_id, "\n".join(self._alerts) + "\n", ALERTS_FILE)
        self._client.set_tag(self.run_id, "healing.alert", line[:MAX_TAG])
        self.log({f"healing/alerts/{level.value.lower()}": self._counts[level]}, self._step)

    def close(self) -> None:
        if self._is_ours:
            self._client.set_terminated(self.run_id)


KNOWN: dict[str, Callable[..., Tracker]] = {
    "trackio": TrackioTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}
"""Trackers by name, which is also that of the package."""
