import pytest
import torch

from heal.lab.probes import fisher_diagonal, importance
from tests.heal.probes.problems import Line, Noisy


def line(samples=4096, noise=0.5):
    torch.manual_seed(0)
    x = torch.randn(samples, 3, dtype=torch.float64) * torch.tensor([1.0, 2.0, 0.1])
    model = Line([1.0, -1.0, 3.0])
    y = x @ model.w.detach() + noise * torch.randn(samples, dtype=torch.float64)
    return model, (x, y)


def test_the_fisher_of_linear_regression_is_the_mean_squared_residual_times_input():
    model, (x, y) = line(samples=64)
    residual = x @ model.w.detach() - y
    expected = (residual.unsqueeze(1) * x).square().mean(0)
    fisher = fisher_diagonal(model, model.loss, (x, y))
    torch.testing.assert_close(fisher["w"], expected)


def test_at_the_truth_it_is_the_noise_times_the_power_of_the_input():
    model, batch = line(noise=0.5)
    fisher = fisher_diagonal(model, model.loss, batch)
    expected = 0.25 * torch.tensor([1.0, 4.0, 0.01], dtype=torch.float64)
    torch.testing.assert_close(fisher["w"], expected, rtol=0.15, atol=0)  # 4 errors of 4096 samples


def test_pieces_of_many_samples_are_too_small_by_as_much():
    model, batch = line()
    alone = fisher_diagonal(model, model.loss, batch)["w"]
    eights = fisher_diagonal(model, model.loss, batch, pieces=512)["w"]
    torch.testing.assert_close(8 * eights, alone, rtol=0.35, atol=0)


def test_what_the_loss_does_not_use_has_no_importance():
    torch.manual_seed(0)
    model = Noisy().eval()
    fisher = fisher_diagonal(model, model.loss, torch.randn(8, 4))
    shares = importance(model, fisher)
    assert float(shares["unused"]) == 0.0
    assert float(sum(shares.values())) == pytest.approx(1.0)


def test_importance_is_fisher_times_the_square_of_the_weight():
    model = Line([3.0, 1.0])
    shares = importance(torch.nn.ModuleDict({"a": model}), {"a.w": torch.tensor([1.0, 2.0])})
    assert float(shares["a.w"]) == pytest.approx(1.0)
    pair = torch.nn.ModuleDict({"a": Line([3.0]), "b": Line([1.0])})
    shares = importance(pair, {"a.w": torch.tensor([1.0]), "b.w": torch.tensor([1.0])})
    assert float(shares["a.w"]) == pytest.approx(0.9)


def test_batch_norm_does_not_keep_a_sample_from_being_looked_at_alone():
    torch.manual_seed(0)
    model = Noisy()
    model.layers[3].p = 0.0
    batch = torch.randn(8, 4)
    model.loss(batch)  # statistics that are not those of the beginning
    statistics = [b.clone() for b in model.buffers()]
    fisher = fisher_diagonal(model, model.loss, batch)
    assert model.layers[1].training
    assert all(torch.equal(a, b) for a, b in zip(statistics, model.buffers(), strict=True))
    expected = fisher_diagonal(model.eval(), model.loss, batch)
    assert all(torch.equal(fisher[name], expected[name]) for name in fisher)
    assert float(fisher["layers.0.weight"].sum()) > 0.0


def test_a_batch_that_does_not_divide_is_refused():
    model, (x, y) = line(samples=10)
    with pytest.raises(
        ValueError, match="pieces: expected a number that divides 10 samples, got 3"
    ):
        fisher_diagonal(model, model.loss, (x, y), pieces=3)
