"""The benchmark of costs leaves no probe out, and measures the forecast as a healer calls it."""

import importlib.util
from pathlib import Path

import pytest

import heal.lab.probes
from heal.lab.forecast.forecast_watch import ForecastWatch

PATH = Path(__file__).parents[3] / "benchmarks" / "bench_probes.py"
NOT_MEASURED = {  # what probes return, and what only arranges them
    "NoiseScale",
    "OptimizerHealth",
    "Oscillation",
    "Sharpness",
    "every",
    "undisturbed",
}


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_probes", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_probe_and_the_action_has_its_cost_measured(bench):
    told = bench.measure(rounds=1)
    for name in {*heal.lab.probes.__all__, "AnchorWeights", "forecast"} - NOT_MEASURED:
        assert any(row.startswith(name) for row in told), name
    assert all(row["cpu_us"] > 0 for row in told.values())


def test_the_forecast_is_measured_on_a_stream_that_varies(bench, monkeypatch):
    heard = []
    monkeypatch.setattr(ForecastWatch, "observe", lambda self, record: heard.append(record))
    forecast = bench.forecast_step()
    for _ in range(50):
        forecast()
    assert len({record.loss for record in heard}) == len(heard) == 150
    assert len({record.norm for record in heard}) == 150
