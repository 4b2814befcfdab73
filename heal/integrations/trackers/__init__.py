"""Where numbers and alerts of a healing run are shown: trackio, TensorBoard, W&B and MLflow.

One interface, :class:`Tracker`; an adapter per file. A package is imported when its tracker starts.
"""

from heal.integrations.trackers.choose import KNOWN, make_trackers
from heal.integrations.trackers.fan_out import FanOut, attach
from heal.integrations.trackers.tracker import Level, Tracker

__all__ = ["KNOWN", "FanOut", "Level", "Tracker", "attach", "make_trackers"]
