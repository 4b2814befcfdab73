"""Clipping what was read, and watching the loss in the same call, is clipping, then watching."""

import math

import pytest
import torch
from torch import nn

import zclip
from tests.grads import make_grads
from zclip import layout
from zclip.layout import BLOCKED, FLAGS, LOSS, LOSS_NAN, NUM_LOSS_STATE
from zclip.reading import Reader, native
from zclip.reference import IDS

op = torch.ops.zclip
RULES = {
    "global_norm": (3, [0.5, layout.SKIP]),
    "zclip": (8, [0.97, 2.5, 1.0, 1e-6, 2, 0, 1.0, 0, 0, 0]),
    "adagc": (6, [1.04, 0.99, 1.0, 1e-6, 2, 0, 0]),
}
WATCH = 2.0, 3, 0.9, 4
LOSSES = [1.0, 1.1, 0.9, 1.0, 1.2, 1.3, 1.4, 9.0, math.nan, math.inf, 1.0]


needs_reading = pytest.mark.skipif(
    not native.is_loaded, reason="nothing is read without the extension"
)


def wide(size):
    return torch.zeros(size, dtype=torch.float64)


@needs_reading
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("name", RULES)
def test_it_is_both_operators_one_after_the_other(name, dtype):
    size, settings = RULES[name]
    reader = Reader()
    states, watches = [wide(size), wide(size)], [wide(NUM_LOSS_STATE), wide(NUM_LOSS_STATE)]
    for step, value in enumerate(LOSSES):
        ours, theirs = (make_grads([(3, 4), (70,), (0,)], seed=step) for _ in range(2))
        if step == 5:
            ours[1][3] = theirs[1][3] = math.nan
        loss = torch.tensor(value, dtype=dtype)
        reading = native.read_to_write(reader.number, ours, False)
        at_once = op.clip_read_(
            reading,
            states[0],
            IDS[name],
            settings,
            None,
            watches[0],
            loss,
            WATCH,
        )
        apart = op.clip_by_(theirs, states[1], IDS[name], settings)
        op.watch_loss_(watches[1], loss, apart[3], *WATCH)
        pairs = zip([*at_once, *ours, *states], [*apart, *theirs, *states[::-1]], strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(watches[0], watches[1])
        assert at_once[3][LOSS] == loss.float() or not math.isfinite(value)


WRONG = {
    "two losses": (wide(NUM_LOSS_STATE), torch.ones(2), WATCH),
    "a short state": (wide(3), torch.tensor(1.0), WATCH),
    "three settings": (wide(NUM_LOSS_STATE), torch.tensor(1.0), WATCH[:3]),
}


@needs_reading
@pytest.mark.parametrize("wrong", WRONG)
def test_a_watch_that_does_not_fit_is_an_error_before_anything_is_written(wrong):
    grads, state, reader = make_grads([(3, 4), (70,)]), wide(3), Reader()
    before = [g.clone() for g in grads]
    reading = native.read_to_write(reader.number, grads, False)
    with pytest.raises(RuntimeError):
        op.clip_read_(
            reading,
            state,
            0,
            [0.5, layout.SKIP],
            None,
            *WRONG[wrong],
        )
    assert not state.any()
    assert all(torch.equal(g, b) for g, b in zip(grads, before, strict=True))


CLIPPERS = {
    "ZClip": lambda: zclip.ZClip(max_grad_norm=0.5, warmup_steps=2),
    "AdaGC": lambda: zclip.AdaGC(warmup_steps=2),
    "AGC": zclip.AGC,
    "SpikeSkip": lambda: zclip.SpikeSkip(min_count=2),
    "two groups": lambda: zclip.GlobalNorm(0.5, per_group=True),
    "attached": lambda: zclip.GlobalNorm(0.5),
}


def watch():
    return zclip.LossWatch(wide(NUM_LOSS_STATE), WATCH)


@pytest.mark.parametrize("name", CLIPPERS)
def test_a_clipper_judges_the_loss_it_is_given_a_watch_for(name):
    torch.manual_seed(0)
    models = [nn.Linear(5, 3), nn.Linear(5, 3)]
    models[1].load_state_dict(models[0].state_dict())
    clippers, watches = [CLIPPERS[name](), CLIPPERS[name]()], [watch(), watch()]
    groups = [[{"params": [p]} for p in model.parameters()] for model in models]
    if name == "attached":
        clippers[0].attach(models[0])
    for step, value in enumerate(LOSSES):
        x, loss = torch.randn(8, 5) * (1 + step), torch.tensor(value, requires_grad=True)
        for model in models:
            model.zero_grad()
            model(x).square().mean().backward()
        clippers[0].step(groups[0], loss=loss, watch=watches[0])
        clippers[1].step(groups[1], loss=loss)
        watches[1].judge(loss, clippers[1].result.verdict)
        verdicts = [clipper.result.verdict for clipper in clippers]
        torch.testing.assert_close(*verdicts, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(watches[0].state, watches[1].state)
        assert watches[0].state[layout.STEPS] == step + 1
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one.grad, other.grad)
        if not math.isfinite(value):
            assert verdicts[0][BLOCKED] == 1
            assert int(verdicts[0][FLAGS]) & LOSS_NAN


def test_without_a_loss_or_a_gradient_a_watch_sees_nothing():
    model, clipper, seen = nn.Linear(2, 2), zclip.GlobalNorm(1.0), watch()
    clipper.step(model, loss=torch.tensor(1.0), watch=seen)
    model(torch.ones(1, 2)).sum().backward()
    for _ in range(3):
        clipper.step(model, watch=seen)
    assert not seen.state.any()
    clipper.step(model, loss=torch.tensor(1.0), watch=seen)
    assert seen.state[layout.STEPS] == 1


def test_a_loss_of_another_shape_is_judged_by_its_mean_and_clipped_once():
    model, clipper, seen = nn.Linear(2, 2), zclip.GlobalNorm(math.inf), watch()
    model(torch.ones(1, 2)).sum().backward()
    for _ in range(3):
        clipper.step(model, loss=torch.tensor([1.0, 3.0]), watch=seen)
    assert clipper.result.verdict[LOSS] == 2.0
    assert clipper.result.verdict[layout.STEP] == 3
    assert seen.state[layout.STEPS] == 3
