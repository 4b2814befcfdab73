"""A tiny corpus, trained for real: what comes out forecasts runs that it has not seen."""

import argparse
import json

import numpy as np
import pytest
import torch

from heal.commands import forecast as command
from heal.forecast import corpus, dataset, evaluate, judge, train
from heal.forecast.names import NAMES
from heal.forecast.score import from_json

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
    again = from_json(json.loads(json.dumps(model.to_json(), allow_nan=False)))
    assert np.array_equal(
        judge.logits(again, tiny.features[:2]), judge.logits(model, tiny.features[:2])
    )
    told = evaluate.reliability(model, tiny)
    assert told["error"] < 0.1
    assert 0.0 < told["base"] < 0.5


def test_held_out_architectures_are_not_trained_on(tiny, monkeypatch):
    seen = []
    real = train.fit

    def noted(part, kind, seed):
        seen.append(set(part.architecture))
        return real(part, kind, seed)

    monkeypatch.setattr(evaluate, "fit", noted)
    folds = evaluate.cross_validate(tiny, "logistic", "architecture", share=0.2)
    assert [fold.held_out for fold in folds] == ["linear", "mlp"]
    assert seen == [{"mlp"}, {"linear"}]
    total = evaluate.together(folds)
    assert total.healthy_steps > 0
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


def test_the_command_trains_a_model_from_a_corpus_file(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "dataset_of", lambda arguments: tiny)
    output = tmp_path / "model.json"
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["train", "--kind", "logistic", "--output", str(output)]
    assert command.run(parser.parse_args(words)) == 0
    assert from_json(json.loads(output.read_text())).card["kind"] == "logistic"
    assert "coverage wanted 80 %" in capsys.readouterr().out


def test_a_corpus_that_cannot_be_read_is_told(tmp_path, capsys):
    path = tmp_path / "corpus.npz"
    path.write_bytes(b"nothing")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["evaluate", "--corpus", str(path)])) == 1
    assert "heal forecast:" in capsys.readouterr().err
