"""A run without a run_dir writes the postmortem of a failure where it was started: not here."""

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
