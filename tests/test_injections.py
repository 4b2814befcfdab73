"""A thousand bad gradients: none leaves a trace in parameters, state or statistics."""

import math
import random

import pytest
import torch

import zclip

INJECTIONS = 1000
STEPS = 25

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, fused=True),
    "SGD-momentum": lambda params: torch.optim.SGD(
        params, lr=0.01, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True
    ),
    "SGD-dampening": lambda params: torch.optim.SGD(
        params, lr=0.01, momentum=0.9, dampening=0.3, fused=True
    ),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, fused=True),
}
CLIPPERS = {
    "ZClip": lambda: zclip.ZClip(warmup_steps=5),
    "AdaGC": lambda: zclip.AdaGC(warmup_steps=5),
    "SpikeSkip": lambda: zclip.SpikeSkip(window=8, sigma=50.0),
}
SHAPES = [(3, 4), (5,), ()]


class Run:
    """Parameters, their optimizer and gradients that depend only on the step."""

    def __init__(self, make_optimizer, make_clipper):
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]
        self.optimizer = zclip.ClippedOptimizer(make_optimizer(self.params), make_clipper())

    def set_grads(self, step):
        generator = torch.Generator().manual_seed(1000 + step)
        for param in self.params:
            param.grad = torch.randn(param.shape, generator=generator)

    def step(self, step):
        self.set_grads(step)
        self.optimizer.step()
        return float(self.optimizer.result.blocked) == 1

    def inject(self, step, rng):
        """Take a step with one bad element; return whether it was refused."""
        self.set_grads(step)
        grad = rng.choice(self.params).grad.view(-1)
        grad[rng.randrange(grad.numel())] = rng.choice([math.nan, math.inf, -math.inf])
        self.optimizer.step()
        return float(self.optimizer.result.blocked) == 1

    def everything(self):
        """Parameters and optimizer state; what does not exist yet is what it will start from."""
        values = {("param", i): p.detach().clone() for i, p in enumerate(self.params)}
        for i, param in enumerate(self.params):
            for name, value in self.optimizer.state.get(param, {}).items():
                if value is not None and bool((value != 0).any()):
                    values[name, i] = value.clone()
        return values

    def statistics(self):
        group = self.optimizer.clipper.state_dict()["groups"][0]
        return {n: t for n, t in group.items() if n not in ("steps", "skips", "names")}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


PAIRS = [(o, c) for o in OPTIMIZERS for c in CLIPPERS]


@pytest.mark.parametrize(("optimizer", "clipper"), PAIRS, ids=[f"{o}-{c}" for o, c in PAIRS])
def test_bad_gradients_leave_no_trace(optimizer, clipper):
    rng = random.Random(f"{optimizer} {clipper}")
    injections = math.ceil(INJECTIONS / len(PAIRS))
    shaken = Run(OPTIMIZERS[optimizer], CLIPPERS[clipper])
    calm = Run(OPTIMIZERS[optimizer], CLIPPERS[clipper])
    bad_steps = sorted([0, *(rng.randrange(STEPS) for _ in range(injections - 1))])
    for step in range(STEPS):
        for _ in range(bad_steps.count(step)):
            before, learned = shaken.everything(), shaken.statistics() if step else None
            assert shaken.inject(step, rng), "a bad step was taken"
            assert_equal(shaken.everything(), before)
            if learned is not None:
                assert_equal(shaken.statistics(), learned)
        assert not shaken.step(step), "a good step was refused"
        assert not calm.step(step)
        assert_equal(shaken.everything(), calm.everything())
    assert_equal(shaken.statistics(), calm.statistics())
    group = shaken.optimizer.clipper.state_dict()["groups"][0]
    assert float(group["skips"]) == injections
