"""Creeping faults do to a real run what those of the forecast's corpus do to theirs."""

import math

import numpy as np
import pytest
import torch

from heal.testing import Chaos, Fault
from heal.testing import faults as slow_faults
from tests.heal.runs import regression
from tools.forecast import scenarios

STEPS, ONSET = 12, 4


def broken(kind, size, see):
    """Train with one fault and nobody who heals; return what ``see`` saw before each step."""
    setup = regression(forecast=False, disabled_detectors="foreign_writes")  # no trials
    healer = setup.healer()
    healer.on_instability(lambda diagnosis, plan: ())
    chaos = Chaos(healer, [Fault(kind, at=ONSET, times=STEPS, size=size)])
    train_step = chaos.wrap(setup.train_step)
    seen = []

    def watched(batch):
        loss = train_step(batch)
        seen.append(see(setup, loss))
        return loss

    healer.run(watched, setup.loader, STEPS, progress=False)
    return seen


def lr_of(setup, loss):
    return setup.optimizer.param_groups[0]["lr"]


def since():
    return [max(step - ONSET, 0) for step in range(STEPS)]


def test_a_rate_grows_from_the_fault_on():
    expected = [3e-3 * 1.05**s for s in since()]
    assert broken("growing_lr", 0.05, lr_of) == pytest.approx(expected)


def test_a_rate_swings_ever_more_widely():
    expected = [3e-3 * math.exp(slow_faults.swing(s, 0.1)) for s in since()]
    assert broken("oscillating_lr", 0.1, lr_of) == pytest.approx(expected)
    assert max(expected) > 3.5e-3


def test_the_gradient_is_scaled_and_the_loss_is_not():
    weight = torch.tensor(2.0, requires_grad=True)
    chaos = Chaos(regression().healer(), [])
    chaos._attempt = ONSET + 3
    fault = Fault("creeping_scale", at=ONSET, size=0.5)
    change = slow_faults.KINDS[fault.kind].strike(chaos, fault)
    loss = change(weight**2)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(4.0)
    assert float(weight.grad) == pytest.approx(4.0 * 1.5**3)


def test_noise_creeps_into_the_gradient_once_a_step_and_only_there():
    setup = regression()
    healer = setup.healer()
    chaos = Chaos(healer, [])
    batch = next(iter(setup.loader))
    setup.model.eval()

    def gradient():
        setup.optimizer.zero_grad()
        setup.train_step(batch).backward()
        return [p.grad.clone() for p in setup.model.parameters()]

    clean = gradient()
    before = torch.get_rng_state()
    chaos._attempt = ONSET + 5
    slow_faults.KINDS["creeping_noise"].strike(chaos, Fault("creeping_noise", at=ONSET, size=0.2))
    noisy = gradient()
    level = slow_faults.noise_level(5, 0.2)
    for one, other in zip(clean, noisy, strict=True):
        assert float((other - one).norm()) == pytest.approx(level * float(one.norm()), rel=1e-3)
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(clean, gradient(), strict=True):
        assert torch.equal(one, other)


def test_weights_drift_by_more_and_more():
    def size(setup, loss):
        return float(torch.cat([p.detach().flatten() for p in setup.model.parameters()]).norm())

    calm, drifting = broken("slow_step", 0.0, size), broken("creeping_drift", 1.0, size)
    assert drifting[: ONSET + 1] == calm[: ONSET + 1]
    factors = np.cumprod([slow_faults.drift(s, 1.0) for s in since()])
    assert np.array(drifting) / np.array(calm) == pytest.approx(factors, rel=0.05)


@pytest.mark.parametrize("kind", scenarios.SLOW)
def test_the_corpus_has_the_same_faults(kind):
    made = scenarios.plan([kind], 400, np.random.default_rng(1))
    plain = scenarios.plan(["nan_batch"], 400, np.random.default_rng(1))
    onset = int(made.onset[0])
    late = np.arange(1, 400 - onset)
    lr = (made.lr / plain.lr)[0, onset:]
    if kind == "growing_lr":
        found, expected = lr, [slow_faults.grown(s, lr[1] - 1) for s in late]
    elif kind == "creeping_scale":
        found = made.scale[0, onset:]
        expected = [slow_faults.grown(s, found[1] - 1) for s in late]
    elif kind == "creeping_noise":
        found = made.noise[0, onset:]
        expected = [slow_faults.noise_level(s, 2 * found[1]) for s in late]
    elif kind == "drift":
        found = made.drift[0, onset:]
        rate = (found[1] - 1) * slow_faults.DRIFT_RAMP
        expected = [slow_faults.drift(s, rate) for s in late]
    else:
        found = np.log(lr)
        period = _period(found)
        depth = found[1] / math.sin(2 * math.pi / period)
        expected = [slow_faults.swing(s, depth, period) for s in late]
    assert found[0] in (0.0, 1.0)
    assert found[1:] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def _period(swing):
    """Of depth * t * sin(2 pi t / period), from its values at 1 and 2: sin 2x = 2 sin x cos x."""
    return 2 * math.pi / math.acos(swing[2] / (4 * swing[1]))
