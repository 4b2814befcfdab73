"""The promise of the limit: at most so many of unseen runs exceed it, and not far fewer."""

import numpy as np
import pytest

from tools.forecast import conformal


@pytest.mark.parametrize("share", conformal.SHARES)
@pytest.mark.parametrize("draw", ["normal", "heavy", "ties"])
def test_unseen_runs_exceed_the_limit_as_often_as_promised(share, draw):
    g = np.random.default_rng(0)
    runs, unseen, trials = 499, 2000, 40
    made = {
        "normal": lambda n: g.standard_normal(n),
        "heavy": lambda n: g.standard_cauchy(n),
        "ties": lambda n: np.round(g.standard_normal(n), 1),
    }[draw]
    exceeded = [
        conformal.exceeding(made(unseen).tolist(), conformal.limit(made(runs).tolist(), share))
        for _ in range(trials)
    ]
    # The mean over calibrations is share, or up to 1/(n + 1) less; ties can only make it less.
    slack = 4 * np.std(exceeded) / np.sqrt(trials)
    assert np.mean(exceeded) < share + slack
    if draw != "ties":
        assert np.mean(exceeded) > share - 1 / (runs + 1) - slack


def test_the_limit_is_a_score_of_the_calibration_and_exact_for_few():
    assert conformal.limit(list(range(1, 20)), 0.05) == 19
    assert conformal.limit(list(range(1, 20)), 0.5) == 10


def test_too_few_runs_promise_nothing():
    with pytest.raises(
        ValueError, match=r"expected at least 19 to promise a share of 0\.05, got 18"
    ):
        conformal.limit([0.0] * 18, 0.05)
    with pytest.raises(ValueError, match=r"share: expected a number between 0 and 1, got 1.5"):
        conformal.limit([0.0], 1.5)


@pytest.mark.parametrize("runs", [1, 4, 9, 18, 19, 98, 99, 1000])
def test_what_is_affordable_is_what_has_a_limit(runs):
    for share in conformal.SHARES:
        if share in conformal.affordable(runs):
            conformal.limit([0.0] * runs, share)
        else:
            with pytest.raises(ValueError, match="to promise a share"):
                conformal.limit([0.0] * runs, share)


def test_no_runs_exceed_nothing():
    assert conformal.exceeding([], 0.0) == 0.0
    assert conformal.exceeding([1.0, 2.0], 1.0) == 0.5
