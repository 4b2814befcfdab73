"""A tiny corpus, trained for real: what comes out forecasts runs that it has not seen."""

import json

import numpy as np
import pytest
import torch

from heal.lab.forecast.features import NAMES
from heal.lab.forecast.forecast_watch import from_json
from tools.forecast import calibration, corpus, dataset, evaluate, judge, results, train
from tools.forecast.card import to_json

pytest.importorskip("sklearn")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """Enough for a hundred runs."""
    monkeypatch.setattr(train, "POSITIVES", 3_000)
    monkeypatch.setattr(train, "NEGATIVES", 6_000)
    monkeypatch.setattr(train, "PASSES", 9)


@pytest.fixture(scope="module")
def tiny():
    torch.set_num_threads(1)
    wanted = corpus.groups(
        healthy=42,
        slow=20,
        instant=2,
        steps=320,
        seed=1,
        architectures=["linear", "mlp"],
        optimizers=["momentum"],
    )
    return dataset.build(corpus.make(wanted))


def test_both_models_find_most_slow_failures_of_runs_they_have_not_seen(tiny):
    half = np.arange(len(tiny)) % 2 == 0
    for kind in train.KINDS:
        model = train.fit(tiny.part(half), kind)
        unseen = tiny.part(~half)
        scores = judge.logits(model, unseen.features)
        labels = np.stack([unseen.labels(run) for run in range(len(unseen))])
        sick, well = scores[labels == 1], scores[labels == 0]
        assert len(sick) > 20
        # The chance that a sick step scores above a healthy one: 0.5 knows nothing.
        assert np.mean(sick[:, None] > np.random.default_rng(0).choice(well, 500)) > 0.8, kind


def test_a_model_is_calibrated_on_runs_and_survives_json(tiny):
    model = train.calibrate(train.fit(tiny), tiny)
    assert list(model.limits) == [0.2, 0.1, 0.05, 0.02]  # 84 healthy runs cannot promise 1 %
    again = from_json(json.loads(json.dumps(to_json(model), allow_nan=False)))
    assert np.array_equal(
        judge.logits(again, tiny.features[:2]), judge.logits(model, tiny.features[:2])
    )
    scores = judge.evidence(model, tiny.features)
    told = calibration.told([calibration.reliability(model, scores, tiny)])
    assert told["error"][0] < 0.02  # on the runs that made the table
    assert told["skill"][0] > 0.2
    assert 0.0 < told["base"][0] < 0.5


def test_held_out_architectures_are_not_trained_on(tiny, monkeypatch):
    seen = []
    real = train.fit

    def noted(part, kind, seed):
        seen.append(set(part.architecture))
        return real(part, kind, seed)

    monkeypatch.setattr(evaluate, "fit", noted)
    folds = evaluate.cross_validate(tiny, "logistic", "architecture")
    assert [fold.held_out for fold in folds] == ["linear", "mlp"]
    assert seen == [{"mlp"}, {"linear"}]
    total = evaluate.together(folds, share=0.2)
    assert total.healthy_steps > 0
    told = results.results_of(folds, share=0.2)
    low, high = told["total"]["detection_interval"]
    assert low <= told["total"]["detection"] <= high
    covered = told["by_share"]["0.2"]
    assert covered["healthy_runs"] == tiny.healthy.sum()
    worst, *_, best = covered["coverage_low_p10_p90_high"]
    assert worst <= covered["coverage"] <= best
    with pytest.raises(ValueError, match="by is 'luck'"):
        evaluate.cross_validate(tiny, "logistic", "luck")


def test_warnings_before_the_fault_or_too_late_to_be_heard_do_not_count():
    steps = 200
    features = np.zeros((1, steps, len(NAMES)), np.float32)
    runs = dataset.Dataset(
        features,
        np.array(["mlp"]),
        np.array(["drift"]),
        np.array([100]),
        np.array([150]),
        np.array([False]),
    )

    def told(at):
        scores = np.full((1, steps), -5.0)
        scores[0, at : at + 3] = 5.0
        return judge.judge(runs, scores, 0.0)

    assert told(120).detection == 1.0
    assert told(120).median_lead == 150 - judge.LAG - 120
    assert told(149).detection == 0.0
    early = told(60)
    assert early.false_warnings == 1
    assert early.detection == 0.0


def test_the_time_that_a_healthy_run_stands_warned_is_counted():
    steps = 300
    features = np.zeros((1, steps, len(NAMES)), np.float32)
    none = np.array([-1])
    runs = dataset.Dataset(
        features, np.array(["mlp"]), np.array(["plain"]), none, none, np.array([True])
    )
    scores = np.full((1, steps), -5.0)
    scores[0, 100:110] = 5.0
    told = judge.judge(runs, scores, 0.0)
    assert told.false_warnings == 1
    # On at step 100; fifty quiet steps, the first of which is 110, end it with step 159.
    assert told.falsely_warned_steps == 59
    scores[0, 280:] = 5.0
    assert judge.judge(runs, scores, 0.0).falsely_warned_steps == 59 + 20
