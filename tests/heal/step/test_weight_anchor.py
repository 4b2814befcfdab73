"""The anchor: after a rollback the weights are held near the snapshot, for some steps."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zclip
from heal import Healer
from heal.actions import AnchorWeights, Rollback
from heal.dry_run import CannotRecompute
from heal.journal import read_events
from heal.testing import Chaos, Fault
from tests.heal.runs import assert_same, fingerprint, quick, regression


def batch_norm():
    layers = [nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 1)]
    return nn.Sequential(*layers)


def one_weight(make=None, size=3, **config):
    model = nn.Linear(size, 1, bias=False).double()
    make = make or (lambda params: torch.optim.SGD(params, lr=0.1))
    optimizer = make(model.parameters())
    return model.weight, Healer(model, optimizer, config=quick(**config))


def stepped(weight, healer, gradient):
    weight.grad = torch.as_tensor(gradient, dtype=weight.dtype).expand_as(weight).clone()
    healer.step(torch.tensor(1.0))


def anchored(healer, steps):
    """Let every plan with a rollback end with an anchor, as docs/probes.md shows."""

    @healer.on_instability
    def hold(diagnosis, plan):
        is_back = any(isinstance(action, Rollback) for action in plan)
        return (*plan, AnchorWeights(0.5, steps)) if is_back else None

    return healer


@pytest.mark.parametrize("model", [None, batch_norm], ids=["mlp", "batch-norm"])
def test_a_rollback_anchors_the_run_and_the_journal_tells_so(model, tmp_path):
    setup = regression(model=model)
    healer = anchored(setup.healer(run_dir=tmp_path), 15)
    chaos = Chaos(healer, [Fault("corrupt_weight", at=50)])
    held = []
    noted = lambda step: held.append(healer.training.anchor_steps)  # noqa: E731
    healer.run(chaos.wrap(setup.train_step), setup.loader, 120, progress=False, on_step=noted)
    entry = next(e for e in healer.recoveries if "rollback" in e["actions"])
    assert "anchor_weights" in entry["actions"]
    lines = read_events(tmp_path / "events.jsonl")[0]
    plans = [line["plan"] for line in lines if line["event"] == "recovery"]
    plan = next(plan for plan in plans if any(a["action"] == "Rollback" for a in plan))
    told = {"action": "AnchorWeights", "strength": 0.5, "steps": 15, "effect": True}
    assert plan[-1] == told
    assert "AnchorWeights" in (tmp_path / "postmortem.json").read_text()
    assert max(held) == 14  # after the first step; the one that was taken back is not reported
    assert sum(left > 0 for left in held) == 14
    assert held[-1] == 0
    assert healer.optimizers[0].pull is None


def test_each_rollback_sets_one_anchor_anew():
    setup = regression()
    healer = anchored(setup.healer(), 60)
    chaos = Chaos(healer, [Fault("corrupt_weight", at=50), Fault("corrupt_weight", at=70)])
    pulls, held = [], []

    def noted(step):
        held.append(healer.training.anchor_steps)
        pull = healer.optimizers[0].pull
        if pull is not None and not any(pull is known for known in pulls):
            pulls.append(pull)

    healer.run(chaos.wrap(setup.train_step), setup.loader, 200, progress=False, on_step=noted)
    plans = [e["actions"] for e in healer.recoveries if "rollback" in e["actions"]]
    assert len(plans) == 2
    assert all("anchor_weights" in plan for plan in plans)
    assert len(pulls) == 2
    assert max(held) == 59
    assert held[-1] == 0


def test_without_a_rollback_there_is_no_anchor_and_training_is_bit_by_bit_the_bare_one():
    bare = regression()
    bare.bare(60)
    expected = fingerprint(bare)
    torch.manual_seed(0)
    healed = regression()
    healer = anchored(healed.healer(), 100)
    healer.run(healed.train_step, healed.loader, 60, progress=False)
    assert_same(fingerprint(healed), expected)


def test_the_pull_is_strength_times_importance_times_the_way_back():
    weight, healer = one_weight()
    start = weight.detach().clone()
    assert healer.training.anchor_weights(0.5, 10)
    with torch.no_grad():
        weight += 2.0
    stepped(weight, healer, 0.0)
    torch.testing.assert_close(weight.detach(), start + 2.0 - 0.1 * 0.5 * 2.0)


def test_where_nothing_has_moved_the_gradient_is_bit_by_bit_as_it_was():
    weight, healer = one_weight()
    healer.training.anchor_weights(0.5, 10)
    stepped(weight, healer, 0.3)
    assert torch.equal(weight.grad, torch.full_like(weight, 0.3))


def test_important_weights_are_held_most():
    weight, healer = one_weight(lambda params: torch.optim.AdamW(params, lr=0.0, weight_decay=0.0))
    for _ in range(5):
        stepped(weight, healer, [[0.0, 1.0, 10.0]])
    fisher = healer.optimizers[0].state[weight]["exp_avg_sq"].clone()
    healer.training.anchor_weights(1.0, 10)
    with torch.no_grad():
        weight += 1.0
    stepped(weight, healer, 0.0)
    expected = 2.0 * fisher / (fisher + fisher.mean())
    torch.testing.assert_close(weight.grad, expected)
    assert float(weight.grad.max()) < 2.0
    assert float(weight.grad.min()) == 0.0


def test_a_memory_of_zeros_makes_all_weights_alike():
    weight, healer = one_weight(lambda params: torch.optim.AdamW(params, lr=0.0, weight_decay=0.0))
    stepped(weight, healer, 0.0)
    healer.training.anchor_weights(1.0, 10)
    with torch.no_grad():
        weight += 1.0
    stepped(weight, healer, 0.0)
    torch.testing.assert_close(weight.grad, torch.ones_like(weight))


def test_clipping_bounds_the_pull():
    weight, healer = one_weight(
        lambda params: zclip.ClippedOptimizer(
            torch.optim.SGD(params, lr=1.0), zclip.GlobalNorm(0.01)
        )
    )
    healer.training.anchor_weights(1e6, 10)
    with torch.no_grad():
        weight += 1.0
    before = weight.detach().clone()
    stepped(weight, healer, 0.0)
    assert float((weight.detach() - before).norm()) == pytest.approx(0.01, rel=1e-4)


def test_a_scaled_gradient_is_pulled_as_much():
    weight, healer = one_weight()
    healer.training.anchor_weights(0.5, 10)
    with torch.no_grad():
        weight += 2.0
    weight.grad = torch.zeros_like(weight)
    healer.optimizers[0].pull.add_to_gradients(torch.tensor(1024.0))
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 1024.0))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_a_grad_scaler_changes_nothing_about_the_pull(fused):
    ends = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        model = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        healer = Healer(model, optimizer, config=quick(), scaler=scaler)
        healer.training.anchor_weights(0.5, 10)
        for _ in range(3):
            loss = model(torch.ones(1, 3)).mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            healer.step(loss.detach())
            optimizer.zero_grad()
        ends.append(model.weight.detach())
    torch.testing.assert_close(ends[0], ends[1])
    # Two steps of -0.1 and a third, each drawn back by 0.05 of the way so far.
    torch.testing.assert_close(ends[0][0, 0], torch.tensor(1.0 - 0.285250))


def test_a_new_anchor_takes_the_place_of_the_old():
    weight, healer = one_weight()
    healer.training.anchor_weights(0.5, 10)
    with torch.no_grad():
        weight += 2.0
    healer.training.anchor_weights(1.0, 4)
    with torch.no_grad():
        weight += 1.0
    stepped(weight, healer, 0.0)
    torch.testing.assert_close(weight.grad, torch.ones_like(weight))
    assert healer.training.anchor_steps == 3


def test_a_rollback_lets_go():
    weight, healer = one_weight()
    stepped(weight, healer, 0.1)
    healer.training.anchor_weights(0.5, 10)
    healer.training.restore(0)
    assert healer.optimizers[0].pull is None
    assert healer.training.anchor_steps == 0


def test_a_hand_written_loop_is_anchored_and_released():
    weight, healer = one_weight()
    healer.training.anchor_weights(0.5, 3)
    pulled = []
    for _ in range(5):
        with torch.no_grad():
            weight += 1.0
        stepped(weight, healer, 0.0)
        pulled.append(bool(weight.grad.any()))
    assert pulled == [True, True, True, False, False]


class Reads(TorchDispatchMode):
    """Counts how often the host asks the device for a number."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device():
    weight, healer = one_weight(lambda params: torch.optim.AdamW(params, fused=True))
    stepped(weight, healer, 1.0)
    with Reads() as reads:
        healer.training.anchor_weights(0.5, 3)
        healer.optimizers[0].pull.add_to_gradients(torch.tensor(2.0))
    assert reads.count == 0


def test_an_anchor_that_cannot_be_made_is_no_reason_to_stop(monkeypatch, tmp_path):
    setup = regression()
    healer = anchored(setup.healer(run_dir=tmp_path), 100)

    def fails(optimizer, mean):
        raise torch.OutOfMemoryError("no room for a copy")

    monkeypatch.setattr("heal.lab.weight_anchor._held", fails)
    chaos = Chaos(healer, [Fault("corrupt_weight", at=50)])
    healer.run(chaos.wrap(setup.train_step), setup.loader, 80, progress=False)
    events = read_events(tmp_path / "events.jsonl")[0]
    failed = [line for line in events if line["event"] == "action_failed"]
    assert failed
    assert failed[0]["action"] == "AnchorWeights"
    assert healer.optimizers[0].pull is None
    assert healer.last_step == 79


def test_an_anchor_that_cannot_be_made_leaves_none_of_before(monkeypatch):
    _, healer = one_weight()
    healer.training.anchor_weights(0.5, 10)
    monkeypatch.setattr("heal.lab.weight_anchor._held", lambda optimizer, mean: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        healer.training.anchor_weights(0.5, 10)
    assert healer.optimizers[0].pull is None


def test_a_model_that_was_changed_is_pulled_where_it_still_fits():
    weight, healer = one_weight()
    healer.training.anchor_weights(0.5, 10)
    weight.data = torch.ones(2, 2, dtype=torch.float64)
    weight.grad = torch.zeros(2, 2, dtype=torch.float64)
    healer.optimizers[0].pull.add_to_gradients(None)
    assert not weight.grad.any()


def test_a_resumed_run_says_that_the_anchor_is_gone():
    _, healer = one_weight()
    healer.training.anchor_weights(0.5, 10)
    saved = healer.training.state()
    _, other = one_weight()
    other.training.resume(7, saved)
    assert other.notes == ["an anchor held for 10 more steps; it was not saved"]
    del saved["anchor_steps"]  # as in a checkpoint of before there were anchors
    other.training.resume(7, saved)


def test_steps_that_were_pulled_are_not_recomputed():
    setup = regression()
    healer = setup.healer()
    batches = []
    noted = lambda batch: batches.append(batch) or setup.train_step(batch)  # noqa: E731
    healer.run(noted, setup.loader, 10, progress=False)
    healer.training.anchor_weights(0.5, 10)
    with pytest.raises(CannotRecompute, match="holds the weights for 10 more steps"):
        healer.recompute(setup.train_step, batches[healer.snapshots()[0] :])


def test_with_nothing_to_train_there_is_no_anchor():
    weight, healer = one_weight()
    weight.requires_grad_(False)
    assert not AnchorWeights(1.0, 10).apply(healer.training)
    assert healer.training.anchor_steps == 0
    assert math.isfinite(float(weight.detach().sum()))
