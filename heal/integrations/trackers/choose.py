"""From the names of trackers to trackers."""

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from heal.integrations.trackers.tracker import Tracker

KNOWN: dict[str, str] = {
    "trackio": "TrackioTracker",
    "tensorboard": "TensorBoardTracker",
    "wandb": "WandbTracker",
    "mlflow": "MlflowTracker",
}
"""Trackers by name, which is also that of the package and of our file; and the class in there."""

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
    wanted = list(dict.fromkeys(_listed(trackers)))  # a name twice would show everything twice
    return [_made(one, settings) for one in wanted]


def _listed(trackers: Any) -> list[Any]:
    if trackers is None:
        return []
    if isinstance(trackers, str):
        return [name.strip() for name in trackers.split(",") if name.strip()]
    if isinstance(trackers, Tracker) or not isinstance(trackers, Iterable):
        return [trackers]
    return list(trackers)


def _made(wanted: Any, settings: dict[str, Any]) -> Tracker:
    known = ", ".join(KNOWN)
    if isinstance(wanted, str):
        if wanted not in KNOWN:
            raise ValueError(f"tracker {wanted!r} is not known; wanted one of {known}")
        if find_spec(wanted) is None:
            raise ImportError(
                f"tracker {wanted!r} needs the package {wanted}, which is not installed: "
                f"pip install {wanted}"
            )
        module = import_module(f"heal.integrations.trackers.{wanted}")
        make: Callable[..., Tracker] = getattr(module, KNOWN[wanted])
        return make(**settings)
    missing = [name for name in METHODS if not callable(getattr(wanted, name, None))]
    if missing or isinstance(wanted, type):
        lacks = f"lacks {', '.join(missing)}" if missing else "is a class, not an object of it"
        raise TypeError(
            f"tracker {wanted!r} {lacks}; wanted an object with {', '.join(METHODS)}, or one of "
            f"the names {known}"
        )
    tracker: Tracker = wanted
    return tracker
