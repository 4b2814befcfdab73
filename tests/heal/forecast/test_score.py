"""The scorer needs nothing, agrees with numpy, and refuses what is not a model."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from heal.lab.forecast import forecast_watch as score
from heal.lab.forecast.features import NAMES
from heal.lab.forecast.forecast_watch import SHIPPED, Model, shipped
from tests.heal.forecast.models import model_of
from tools.forecast.calibration import chances
from tools.forecast.card import digest, to_json
from tools.forecast.command import CORPUS_SEED
from tools.forecast.corpus import STEPS
from tools.forecast.judge import logits
from tools.forecast.model_file import ModelError, checked, read
from tools.forecast.train import LEFT_OUT


def random_model(hidden=(5, 3)):
    g = np.random.default_rng(0)
    sizes = [len(NAMES), *hidden, 1]
    layers = tuple(
        (
            tuple(map(tuple, g.standard_normal((after, before)).tolist())),
            tuple(g.standard_normal(after).tolist()),
        )
        for before, after in pairwise(sizes)
    )
    return model_of(
        names=NAMES,
        means=tuple(g.standard_normal(len(NAMES)).tolist()),
        scales=tuple(np.exp(g.standard_normal(len(NAMES))).tolist()),
        layers=layers,
    )


@pytest.mark.parametrize("hidden", [(), (4,), (5, 3)])
def test_plain_floats_and_numpy_agree(hidden):
    model = random_model(hidden)
    features = np.random.default_rng(1).standard_normal((50, len(NAMES))).astype(np.float32)
    by_hand = [model.logit(row) for row in features.astype(np.float64).tolist()]
    assert by_hand == pytest.approx(logits(model, features).tolist(), rel=1e-4, abs=1e-4)
    assert all(type(value) is float for value in by_hand)


def test_a_model_survives_its_file(tmp_path):
    model = random_model()
    path = tmp_path / "model.json"
    path.write_text(json.dumps(to_json(model), allow_nan=False))
    assert read(path) == model


def test_the_probability_is_read_from_the_table_and_never_falls():
    model = model_of(levels=(-2.0, 0.0, 4.0), chances=(0.01, 0.1, 0.9))
    assert model.probability(-math.inf) == model.probability(-30.0) == 0.01
    assert model.probability(-1.0) == pytest.approx(0.055)
    assert model.probability(0.0) == pytest.approx(0.1)
    assert model.probability(1.0) == pytest.approx(0.3)
    assert model.probability(4.0) == model.probability(30.0) == 0.9
    levels = np.linspace(-5, 8, 300)
    assert np.allclose([model.probability(x) for x in levels], chances(model, levels))


def test_the_limit_is_that_of_the_largest_share_not_above_the_one_asked_for():
    model = model_of(limit=2.0)
    assert model.limit(0.02) == model.limit(0.1) == 2.0
    assert model.limit(0.2) == model.limit(0.5) == 1.0
    with pytest.raises(ValueError, match=r"share: expected one .*\(0.02, 0.2\), got 0.01"):
        model.limit(0.01)


def spoiled(**changes):
    return {**to_json(model_of()), **changes}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({}, "format: expected 2, got None"),
        (spoiled(format=99), "format: expected 2, got 99"),
        (spoiled(names=["charm"]), "feature: expected one of .*, got 'charm'"),
        (spoiled(means=[0.0, 1.0]), "one mean and one scale per feature .* got 2 means, 1 scales"),
        (
            spoiled(layers=[{"weights": [[1.0, 2.0]], "biases": [0.0]}]),
            r"layer 0: expected rows of 1 .* got 1 rows of \[2\] weights and 1 biases",
        ),
        (spoiled(layers=[{"weights": [[math.nan]], "biases": [0.0]}]), "a weight is NaN or Inf"),
        (spoiled(layers=7), "not a model of heal"),
        (
            {k: v for k, v in spoiled().items() if k != "calibration"},
            "not a model of heal: KeyError",
        ),
        (
            spoiled(calibration={"levels": [0.0, 0.0], "chances": [0.0, 1.0]}),
            "expected levels that rise",
        ),
        (
            spoiled(calibration={"levels": [0.0, 1.0], "chances": [0.5, 0.4]}),
            r"a chance for each, never less, got \[0.0, 1.0\] and \[0.5, 0.4\]",
        ),
        (spoiled(calibration={"levels": [], "chances": []}), "expected levels that rise"),
        (
            spoiled(calibration={"levels": [0.0, 1.0], "chances": [0.0, 1.5]}),
            "expected chances from 0 to 1, got 0 to 1.5",
        ),
    ],
)
def test_what_is_no_model_is_refused_by_name(content, told):
    with pytest.raises(ModelError, match=told):
        checked(content)


def test_a_file_that_is_not_json_is_refused(tmp_path):
    path = tmp_path / "model.json"
    path.write_text("cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ModelError, match="not JSON"):
        read(path)
    path.write_text("[1]")
    with pytest.raises(ModelError, match="expected a JSON object, got list"):
        read(path)


def test_the_shipped_model_is_small_plain_and_says_where_it_comes_from():
    model = shipped()
    assert isinstance(model, Model)
    assert SHIPPED.stat().st_size < 100_000
    assert not {"throughput", "lr_override"} & set(model.names)
    assert list(model.limits) == [0.2, 0.1, 0.05, 0.02, 0.01]
    assert list(model.limits.values()) == sorted(model.limits.values())
    assert model.card["training_runs"] > 1000
    assert model.card["calibration_runs"] > 1000
    assert model.card["corpus"]["seed"] == CORPUS_SEED
    assert len(model.card["corpus"]["sha256"]) == 64
    assert {"python", "torch", "numpy", "scikit-learn"} == set(model.card["versions"])
    assert model.card["metrics"]["held_out_architectures"]["detection"] > 0.9


def test_the_shipped_model_is_one():
    """The package reads it without these checks."""
    assert read(SHIPPED) == shipped()


def test_the_shipped_model_is_of_this_format_and_has_every_feature_that_may_be_learned():
    """Whoever changes features or format trains anew, or this fails."""
    content = json.loads(SHIPPED.read_text(encoding="utf-8"))
    assert content["format"] == score.FORMAT
    assert content["names"] == [name for name in NAMES if name not in LEFT_OUT]
    assert content["stretch_steps"] == STEPS


def test_the_published_results_are_those_of_the_shipped_model():
    results = Path(__file__).parents[3] / "benchmarks" / "results" / "forecast.json"
    told = json.loads(results.read_text(encoding="utf-8"))
    assert told["fresh"]["judges"] == digest(shipped())
    total = told["network by architecture"]["total"]
    told_by_card = shipped().card["metrics"]["held_out_architectures"]
    assert told_by_card["detection"] == total["detection"]


def test_both_sums_of_products_agree():
    """One of them is not that of the Python that runs the tests."""
    for sumprod in (score.plain_sumprod, score.SUMPROD):
        assert sumprod((1.0, -2.0, 0.5), [1.0, 2.0, 4.0]) == -1.0
