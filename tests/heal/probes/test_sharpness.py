import math

import pytest
import torch

from heal.lab.probes import sharpness
from tests.heal.probes.problems import Diagonal, Line, Noisy, Quadratic


@pytest.mark.parametrize("spectrum", [[1.0, 3.0, 10.0], [0.5, 0.5, 7.0, 1.0], [100.0, 1e-3]])
def test_on_a_quadratic_it_is_the_largest_eigenvalue(spectrum):
    model = Quadratic(spectrum)
    found = sharpness(model, model.forward, None, iterations=100, tolerance=1e-8)
    assert found.eigenvalue == pytest.approx(max(spectrum), rel=1e-5)
    assert found.residual < 1e-2 * max(spectrum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("spectrum", [[1.0] * 10_000 + [2.0], [1.0] * 300_000 + [2.0]])
def test_one_sharp_direction_among_many_alike_is_not_missed(spectrum, dtype):
    model = Diagonal(spectrum, dtype)
    found = sharpness(model, model.forward, None)
    assert found.eigenvalue == pytest.approx(2.0, rel=1e-3)
    assert found.is_converged


def test_two_directions_as_sharp_with_opposite_signs_do_not_cancel():
    model = Quadratic([5.0, -5.0] * 3)
    found = sharpness(model, model.forward, None)
    assert found.eigenvalue == pytest.approx(5.0, rel=1e-6)
    assert found.is_converged


def test_it_says_that_it_has_not_converged():
    model = Diagonal(torch.linspace(0.0, 1.0, 300).tolist())
    short = sharpness(model, model.forward, None, iterations=4)
    assert not short.is_converged
    assert short.residual > 0.01 * short.eigenvalue
    assert 0.5 < short.eigenvalue < 0.99
    long = sharpness(model, model.forward, None, iterations=100)
    assert long.is_converged
    assert long.iterations < 100
    assert long.eigenvalue == pytest.approx(1.0, rel=1e-2)
    with pytest.raises(ValueError, match="iterations: expected at least 1, got 0"):
        sharpness(model, model.forward, None, iterations=0)


def test_a_loss_that_is_not_finite_has_no_sharpness():
    model = Diagonal([math.inf, 1.0])
    found = sharpness(model, model.forward, None)
    assert math.isnan(found.eigenvalue)
    assert not found.is_converged


def test_weights_of_half_precision_are_measured_in_single():
    model = Diagonal([1.0] * 500 + [8.0], torch.bfloat16)
    found = sharpness(model, model.forward, None)
    assert found.eigenvalue == pytest.approx(8.0, rel=0.02)


def test_a_saddle_shows_its_sign():
    model = Quadratic([1.0, 2.0, -5.0])
    found = sharpness(model, model.forward, None, iterations=200, tolerance=1e-9)
    assert found.eigenvalue == pytest.approx(-5.0, rel=1e-5)
    assert found.largest_stable_lr == math.inf


def test_gradient_descent_is_stable_just_below_the_limit_and_not_above():
    for factor, is_stable in ((0.98, True), (1.02, False)):
        model = Quadratic([1.0, 4.0, 25.0])
        limit = sharpness(model, model.forward, None, iterations=200, tolerance=1e-10)
        optimizer = torch.optim.SGD(model.parameters(), lr=factor * limit.largest_stable_lr)
        first = float(model())
        for _ in range(300):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        assert (float(model()) < first) is is_stable


def test_linear_regression_has_the_curvature_of_its_inputs():
    torch.manual_seed(0)
    x = torch.randn(50, 4, dtype=torch.float64)
    model = Line([1.0, 2.0, 3.0, 4.0])
    found = sharpness(model, model.loss, (x, x[:, 0]), iterations=300, tolerance=1e-10)
    expected = torch.linalg.eigvalsh(x.T @ x / 50).max()
    assert found.eigenvalue == pytest.approx(float(expected), rel=1e-5)


def test_dropout_does_not_make_it_a_different_hessian_every_time():
    torch.manual_seed(0)
    model = Noisy()
    batch = torch.randn(8, 4)
    found = sharpness(model, model.loss, batch, iterations=60, tolerance=1e-4)
    assert found.is_converged
    assert found.iterations < 60
    assert found.residual < 1e-4 * abs(found.eigenvalue)


def test_a_linear_loss_has_no_curvature():
    weight = torch.nn.Linear(3, 1)
    found = sharpness(weight, lambda batch: weight(batch).mean(), torch.randn(5, 3))
    assert found.eigenvalue == 0.0
