"""Stands in for W&B 0.31: the calls that we make, with its signatures; notes what it hears.

Recorded from the real package, which is too large for the tests.
"""

from enum import Enum

CALLS = []
run = None


class AlertLevel(Enum):
    INFO = "INFO"
    WARN = "WARN"
    ERROR = "ERROR"


class Run:
    def __init__(self, run_id):
        self.id = run_id

    def define_metric(
        self, name, step_metric=None, step_sync=None, hidden=None, summary=None, overwrite=None
    ):
        CALLS.append(("define_metric", name, step_metric))

    def log(self, data, step=None, commit=None):
        CALLS.append(("log", dict(data), step))

    def alert(self, title, text, level=None, wait_duration=None):
        CALLS.append(("alert", title, text, AlertLevel(level)))

    def finish(self, exit_code=None):
        global run
        run = None
        CALLS.append(("finish",))


def init(
    entity=None, project=None, dir=None, id=None, name=None, notes=None, config=None, resume=None
):
    global run
    run = Run(id or "made-up")
    CALLS.append(("init", project, run.id, resume, config))
    return run
