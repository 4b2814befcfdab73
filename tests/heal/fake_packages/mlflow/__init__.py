"""Stands in for MLflow 3.17: the calls that we make, with its signatures; notes what it hears.

Recorded from the real package, which is too large for the tests.
"""

from types import SimpleNamespace

CALLS = []
ACTIVE = None


def active_run():
    return ACTIVE


class MlflowClient:
    def __init__(self, tracking_uri=None, registry_uri=None, workspace_store_uri=None):
        CALLS.append(("client", tracking_uri))

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name, artifact_location=None, tags=None):
        CALLS.append(("create_experiment", name))
        return "7"

    def create_run(self, experiment_id, start_time=None, tags=None, run_name=None):
        CALLS.append(("create_run", experiment_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="run-1"))

    def update_run(self, run_id, status=None, name=None):
        CALLS.append(("update_run", run_id, status))

    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None):
        CALLS.append(("log_batch", run_id, list(metrics), list(params)))

    def log_text(self, run_id, text, artifact_file):
        CALLS.append(("log_text", run_id, text, artifact_file))

    def set_tag(self, run_id, key, value, synchronous=None):
        CALLS.append(("set_tag", run_id, key, value))

    def set_terminated(self, run_id, status=None, end_time=None):
        CALLS.append(("set_terminated", run_id))
