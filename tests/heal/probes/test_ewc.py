import pytest
import torch
from torch import nn

from heal.lab.probes import Anchor, AnchoredRecovery
from heal.testing import Chaos, Fault
from tests.heal.probes.problems import Quadratic
from tests.heal.runs import regression


def test_the_anchored_minimum_is_where_both_pulls_balance():
    model = Quadratic([1.0, 4.0, 0.5], centre=2.0)
    start = model.w.detach().clone()
    fisher = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    anchor = Anchor(model, {"w": fisher}, strength=3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    for _ in range(3000):
        optimizer.zero_grad()
        anchor(model()).backward()
        optimizer.step()
    pull = torch.diag(3.0 * fisher)
    expected = torch.linalg.solve(model.hessian + pull, model.hessian @ model.centre + pull @ start)
    torch.testing.assert_close(model.w.detach(), expected, rtol=1e-6, atol=1e-8)


def test_the_reported_loss_is_that_of_the_data():
    model = Quadratic([1.0, 4.0])
    anchor = Anchor(model, {"w": torch.ones(2, dtype=torch.float64)}, strength=100.0)
    with torch.no_grad():
        model.w += 1.0
    assert float(anchor.penalty().detach()) == pytest.approx(100.0)
    assert torch.equal(anchor(model()), model())


def test_a_strength_of_zero_changes_no_gradient():
    model = Quadratic([1.0, 4.0])
    anchor = Anchor(model, {"w": torch.ones(2, dtype=torch.float64)}, strength=0.0)
    with torch.no_grad():
        model.w += 1.0
    (plain,) = torch.autograd.grad(model(), [model.w])
    (anchored,) = torch.autograd.grad(anchor(model()), [model.w])
    assert torch.equal(plain, anchored)


def test_a_fisher_of_another_model_is_refused():
    with pytest.raises(ValueError, match="no parameter 'v'"):
        Anchor(Quadratic([1.0]), {"v": torch.ones(1)}, 1.0)


def test_a_rollback_sets_the_anchor_and_the_steps_release_it():
    setup = regression()
    healer = setup.healer()
    recovery = AnchoredRecovery(healer, strength=1.0, steps=15)
    chaos = Chaos(healer, [Fault("corrupt_weight", at=50)])
    held = []

    def noted(batch):
        held.append(recovery.is_holding)
        return setup.train_step(batch)

    healer.run(recovery.wrap(chaos.wrap(noted)), setup.loader, 120, progress=False)
    assert any("rollback" in entry["actions"] for entry in healer.recoveries)
    assert not any(held[:50])
    assert not recovery.is_holding
    assert recovery._anchor is not None


def batch_norm():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def without_statistics():
    norm = nn.BatchNorm1d(16, track_running_stats=False)
    return nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 1))


def test_batch_norm_is_anchored_too():
    setup = regression(model=batch_norm)
    healer = setup.healer()
    recovery = AnchoredRecovery(healer, strength=1.0, steps=15)
    chaos = Chaos(healer, [Fault("corrupt_weight", at=50)])
    healer.run(recovery.wrap(chaos.wrap(setup.train_step)), setup.loader, 120, progress=False)
    assert recovery._anchor is not None
    assert not healer.notes


def test_a_run_that_cannot_be_anchored_goes_on_without_and_says_so():
    setup = regression(model=without_statistics)
    healer = setup.healer()
    recovery = AnchoredRecovery(healer, strength=1.0, steps=15)
    chaos = Chaos(healer, [Fault("corrupt_weight", at=50)])
    healer.run(recovery.wrap(chaos.wrap(setup.train_step)), setup.loader, 120, progress=False)
    assert healer.last_step == 119
    assert not recovery.is_holding
    assert "the run is not anchored after its rollback: ValueError" in healer.notes[0]
