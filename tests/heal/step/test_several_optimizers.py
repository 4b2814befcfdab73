"""Several optimizers are one step: judged together, refused together, reported together."""

import math

import pytest
import torch
from torch import nn

import zclip
from heal import Healer
from heal.actions import HealingError
from heal.causes import Cause
from heal.exit_codes import ExitCode
from tests.heal.runs import quick

BAD = 40


class Pair:
    """Two layers with an optimizer each; ``disturb(step)`` may change gradients before a step."""

    def __init__(self, scaler=False, fused=True, **config):
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 1)})
        self.optimizers = [
            torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=fused)
            for layer in self.model.values()
        ]
        self.scaler = torch.amp.GradScaler("cpu") if scaler else None
        self.healer = Healer(
            self.model, self.optimizers, config=quick(**config), scaler=self.scaler
        )
        self.healer.exits.dismiss()
        self.moved = []  # for each step, whether a and b were changed

    def run(self, steps=60, disturb=lambda step: None, sees=lambda loss: loss):
        for step, x in enumerate(self.healer.batches([torch.randn(8, 4) for _ in range(steps)])):
            hidden = self.model["a"](x).tanh()
            loss = (self.model["b"](hidden) - x.sum(1, keepdim=True)).square().mean()
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            disturb(step)
            before = [layer.weight.detach().clone() for layer in self.model.values()]
            self.healer.step(sees(loss))
            after = [layer.weight for layer in self.model.values()]
            self.moved.append([not torch.equal(*pair) for pair in zip(before, after, strict=True)])
            self.model.zero_grad()
        return self.healer

    def found(self):
        return [(d.cause, d.evidence.get("tensor")) for _, d, _ in self.healer.history]


def spoil(layer, steps=(BAD,), value=math.nan):
    def disturb(step):
        if step in steps:
            layer.weight.grad[0, 0] = value

    return disturb


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("layer", ["a", "b"])
@pytest.mark.filterwarnings("ignore:.*is not fused")
def test_nan_under_any_optimizer_is_named_and_refused_by_all(layer, fused):
    pair = Pair(fused=fused)
    healer = pair.run(disturb=spoil(pair.model[layer]))
    assert pair.found() == [(Cause.NONFINITE_GRADIENT, f"{layer}.weight")]
    assert healer.metrics()["healing/nan_count"] == 1
    assert pair.moved.pop(BAD) == [False, False]
    assert all(moved == [True, True] for moved in pair.moved)


def test_nan_under_the_second_optimizer_is_subject_to_nan_action_and_counted():
    pair = Pair(nan_action="raise")
    with pytest.raises(HealingError) as halt:
        pair.run(disturb=spoil(pair.model["b"]))
    assert halt.value.exit_code == ExitCode.NONFINITE
    pair = Pair(max_consecutive_skips=3)
    with pytest.raises(HealingError, match="3 steps in a row") as halt:
        pair.run(disturb=spoil(pair.model["b"], range(BAD, BAD + 3)))
    assert halt.value.exit_code == ExitCode.NONFINITE


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("layer", ["a", "b"])
@pytest.mark.filterwarnings("ignore:.*is not fused")
def test_an_overflow_under_any_optimizer_is_refused_by_all_and_backs_the_scale_off(layer, fused):
    pair = Pair(scaler=True, fused=fused)
    pair.run(disturb=spoil(pair.model[layer], value=math.inf))
    assert pair.found() == [(Cause.SCALER_OVERFLOW, None)]
    assert pair.scaler.get_scale() == 2.0**15
    assert pair.moved.pop(BAD) == [False, False]
    assert all(moved == [True, True] for moved in pair.moved)


@pytest.mark.parametrize("scaler", [False, True], ids=["plain", "scaled"])
def test_a_bad_loss_is_refused_by_all_and_is_no_matter_of_the_scale(scaler):
    pair = Pair(scaler=scaler)
    told = iter(range(60))
    pair.run(sees=lambda loss: loss * math.nan if next(told) == BAD else loss)
    assert [cause for cause, _ in pair.found()] == [Cause.NONFINITE_LOSS]
    assert pair.moved[BAD] == [False, False]
    if scaler:
        assert pair.scaler.get_scale() == 2.0**16


def test_nan_that_does_not_end_lowers_the_scale_to_its_end_and_is_then_told():
    pair = Pair(scaler=True)
    pair.run(BAD + 25, spoil(pair.model["b"], range(BAD, 999)))
    assert (Cause.NONFINITE_GRADIENT, "b.weight") in pair.found()


@pytest.mark.parametrize("scaler", [False, True], ids=["plain", "scaled"])
def test_an_explosion_under_the_second_optimizer_is_found(scaler):
    pair = Pair(scaler=scaler, zclip_enabled=True)

    def enlarge(step):
        if step == BAD:
            pair.model["b"].weight.grad.mul_(1e8)

    pair.run(disturb=enlarge)
    assert (Cause.GRADIENT_EXPLOSION, "b.weight") in pair.found()


def test_metrics_are_those_of_all():
    pair = Pair(zclip_enabled=True, max_grad_norm=1e-3, lag=0)
    norms = []

    def note(step):
        grads = [p.grad for p in pair.model.parameters()]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))

    healer = pair.run(32, note)
    metrics = healer.metrics()
    assert metrics["zclip/raw_grad_norm"] == pytest.approx(norms[-1], rel=1e-5)
    assert metrics["zclip/clipped_grad_norm"] == pytest.approx(2**0.5 * 1e-3, rel=1e-3)
    assert metrics["zclip/total_clips"] == 64


@pytest.mark.parametrize("frozen", ["a", "b"])
def test_an_optimizer_without_gradients_does_not_hide_the_others_nor_the_loss(frozen):
    pair = Pair(lag=0)
    other = "b" if frozen == "a" else "a"
    pair.model[frozen].requires_grad_(False)
    losses = []

    def sees(loss):
        losses.append(float(loss.detach()))
        return loss

    healer = pair.run(BAD + 2, spoil(pair.model[other]), sees)
    assert pair.found() == [(Cause.NONFINITE_GRADIENT, f"{other}.weight")]
    assert healer.latest.loss == pytest.approx(losses[-1])


def test_a_clipper_that_lets_nan_pass_makes_no_half_step():
    pair = Pair()
    layers = pair.model.values()
    healer = pair.healer = Healer(
        pair.model,
        [
            zclip.wrap(
                torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True),
                zclip.GlobalNorm(1.0, on_nonfinite="official"),
            )
            for layer in layers
        ],
        config=quick(),
    )
    healer.exits.dismiss()
    pair.run(BAD + 2, spoil(pair.model["b"]))
    assert pair.moved[BAD] == [False, False]


def test_two_optimizers_undisturbed_are_the_bare_two():
    pair, bare = Pair(), Pair()
    torch.manual_seed(1)
    pair.run(30)
    torch.manual_seed(1)
    for x in [torch.randn(8, 4) for _ in range(30)]:
        hidden = bare.model["a"](x).tanh()
        (bare.model["b"](hidden) - x.sum(1, keepdim=True)).square().mean().backward()
        for optimizer in bare.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(pair.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
