"""PythonRule: a rule in ten lines of torch is a clipper like any other."""

import copy
import gc
import math
import pickle

import pytest
import torch

import zclip
from tests.backends import BACKENDS
from tests.models import make_model, norms_of, parameters_with_norms, set_norms
from tests.own_rules import each_to_one, skip_above_ten, twice_the_average
from zclip import layout, reference

OWN = layout.NUM_COUNTERS


def numbered(rule, **settings):
    """A clipper, which has to be held, and what the operators get from it."""
    clipper = zclip.PythonRule(rule, **settings)
    return clipper, clipper.rule_id(), clipper.settings({})


def test_one_coefficient_serves_all_and_state_follows(backend):
    _held, number, settings = numbered(twice_the_average, state_size=1)
    state, mean = torch.zeros(OWN + 1, dtype=torch.float64), None
    for norm in (1.0, 1.5, 9.0, 0.5):
        grads = [torch.tensor([0.6 * norm, 0.0]), torch.tensor([0.8 * norm])]
        total, _, coefs, verdict = backend.clip_by_(grads, state, number, settings)
        want = 1.0 if mean is None else min(1.0, 2 * mean / norm)
        mean = norm if mean is None else 0.99 * mean + 0.01 * norm * want
        assert total.item() == pytest.approx(norm, rel=1e-6)
        assert coefs.tolist() == pytest.approx([want, want], rel=1e-6)
        assert state[OWN].item() == pytest.approx(mean, rel=1e-6)
        assert verdict[layout.CLIPPED_NORM].item() == pytest.approx(norm * want, rel=1e-6)
        assert torch.cat(grads).norm().item() == pytest.approx(norm * want, rel=1e-6)
    assert state[: layout.NUM_COUNTERS].tolist() == [4, 1, 0]


def test_each_tensor_may_have_its_own(backend):
    _held, number, settings = numbered(each_to_one)
    state, stats = torch.zeros(OWN).double(), torch.tensor([[4.0, 0, 0], [0.25, 0, 0]]).double()
    coefs, verdict = backend.rule_(state, stats, number, settings)
    assert coefs.tolist() == [0.5, 1.0]
    assert verdict[layout.FLAGS] == layout.CLIPPED
    assert verdict[layout.CLIPPED_NORM].item() == pytest.approx(math.hypot(1.0, 0.5))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_step_is_skipped_and_teaches_nothing(backend, bad):
    _held, number, settings = numbered(twice_the_average, state_size=1)
    state = torch.zeros(OWN + 1, dtype=torch.float64)
    grads = [torch.tensor([3.0, bad]), torch.ones(2)]
    _, _, coefs, verdict = backend.clip_by_(grads, state, number, settings)
    assert coefs.tolist() == [layout.REFUSE] * 2
    assert verdict[layout.BLOCKED] == 1
    assert state.tolist() == [1, 0, 1, 0]
    assert not any(g.any() for g in grads)


def test_official_leaves_a_bad_step_to_the_rule(backend):
    _held, number, settings = numbered(each_to_one, on_nonfinite="official")
    state, stats = torch.zeros(OWN).double(), torch.tensor([[4.0, 1, 0]]).double()
    coefs, verdict = backend.rule_(state, stats, number, settings)
    assert coefs.tolist() == [0.5]
    assert verdict[layout.BLOCKED] == 0


def test_a_negative_coefficient_skips_the_step_and_the_state_stays_as_the_rule_left_it(backend):
    _held, number, settings = numbered(skip_above_ten, state_size=1)
    state = torch.zeros(OWN + 1, dtype=torch.float64)
    for norm, blocked in ((1.0, 0), (11.0, 1), (2.0, 0)):
        stats = torch.tensor([[norm**2, 0, 0]] * 1, dtype=torch.float64)
        _, verdict = backend.rule_(state, stats, number, settings)
        assert verdict[layout.BLOCKED] == blocked
    assert state.tolist() == [3, 0, 1, 3]


def test_every_backend_measures_and_scales_around_it_by_itself():
    """The rule is torch, but the two passes over the gradients are the backend's own."""
    _held, number, settings = numbered(each_to_one)
    results = {}
    for name, backend in BACKENDS.items():
        grads, same = ([torch.linspace(-3, 3, 100_001), torch.ones(5)] for _ in range(2))
        _, stats, _, _ = backend.clip_by_(grads, torch.zeros(OWN).double(), number, settings)
        assert torch.equal(stats, backend.grad_stats(same))
        results[name] = torch.cat(grads)
    for result in results.values():
        torch.testing.assert_close(result, results["reference"], rtol=1e-6, atol=0)


def test_wrapped_it_skips_what_it_skips_and_clips_what_it_clips():
    model = make_model()
    params = list(model.parameters())
    optimizer = zclip.wrap(
        torch.optim.SGD(params, lr=1.0, fused=True),
        zclip.PythonRule(twice_the_average, state_size=1),
        lag=0,
    )
    set_norms(params, [1.0] + [0.0] * (len(params) - 1))
    optimizer.step()
    before = [p.detach().clone() for p in params]
    set_norms(params, [8.0] + [0.0] * (len(params) - 1))
    optimizer.step()
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(params, before, strict=True)])
    assert moved.norm().item() == pytest.approx(2.0, rel=1e-5)
    assert optimizer.metrics()["zclip/total_clips"] == 1
    before = [p.detach().clone() for p in params]
    params[0].grad[0] = math.nan
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert optimizer.metrics()["zclip/total_skips"] == 1


def test_its_state_is_saved_and_loaded():
    params = parameters_with_norms([3.0, 4.0])
    clipper = zclip.PythonRule(twice_the_average, state_size=1)
    clipper.step(params)
    saved = clipper.state_dict()
    assert saved["groups"][0]["state"].tolist() == [5.0]
    again = zclip.PythonRule(twice_the_average, state_size=1)
    again.load_state_dict(saved)
    for one in (clipper, again):
        set_norms(params, [30.0, 40.0])
        one.step(params)
        assert norms_of(params) == pytest.approx([6.0, 8.0], rel=1e-5)
    assert str(again.state_dict()) == str(clipper.state_dict())


def test_a_state_of_another_length_is_named():
    params = parameters_with_norms([1.0])
    clipper = zclip.PythonRule(twice_the_average, state_size=1)
    clipper.step(params)
    longer = zclip.PythonRule(twice_the_average, state_size=2)
    longer.load_state_dict(clipper.state_dict())
    with pytest.raises(ValueError, match=r"expected 5 entries .*, got 4; state_size is 2"):
        longer.step(params)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_is_a_rule_of_its_own(copied):
    params = parameters_with_norms([5.0])
    clipper = zclip.PythonRule(twice_the_average, state_size=1)
    clipper.step(params)
    twin = copied(clipper)
    assert twin.rule_id() != clipper.rule_id()
    del clipper
    gc.collect()
    set_norms(params, [20.0])
    twin.step(params)
    assert norms_of(params) == pytest.approx([10.0], rel=1e-5)


def test_a_rule_that_is_gone_is_not_called(backend):
    clipper, number, settings = numbered(each_to_one)
    del clipper
    gc.collect()
    with pytest.raises(RuntimeError):  # compiled backends cannot pass on what Python said
        backend.rule_(torch.zeros(3).double(), torch.zeros(1, 3).double(), number, settings)
    with pytest.raises(RuntimeError, match=f"rule: expected 0 to 4, .*, got {number}"):
        reference.rules.find_rule(number)


def test_each_group_has_a_state_of_its_own():
    params = parameters_with_norms([1.0, 10.0])
    groups = [{"params": [p]} for p in params]
    clipper = zclip.PythonRule(twice_the_average, state_size=1, per_group=True)
    clipper.step(groups)
    set_norms(params, [4.0, 15.0])
    clipper.step(groups)
    assert norms_of(params) == pytest.approx([2.0, 15.0], rel=1e-5)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda stats: 1.0, "expected a tensor .*, got float"),
        (lambda stats: torch.ones(7), r"expected .* \(\) or \(2,\), .*, got \(7,\)"),
    ],
)
def test_what_is_no_coefficient_is_named(returned, message):
    clipper = zclip.PythonRule(lambda stats, state: returned(stats))
    with pytest.raises(ValueError, match=message):
        clipper.step(parameters_with_norms([1.0, 2.0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: zclip.PythonRule(3), "function: expected a function of stats and state, got 3"),
        (lambda: zclip.PythonRule(each_to_one, -1), "state_size: expected 0 or more, got -1"),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_rule_without_compiled_code_is_answered_by_its_reference(backend, monkeypatch):
    """As if somebody had added only the reference: the row stands in Python alone."""
    rule = reference.Rule("halving", halving_)
    monkeypatch.setattr(reference.rules, "RULES", (*reference.RULES, rule))
    number, state = len(reference.RULES), torch.zeros(OWN).double()
    grads = [torch.full((3,), 2.0)]
    _, _, coefs, _ = backend.clip_by_(grads, state, number, (0.5, 2.0))
    assert coefs.tolist() == [0.25]
    assert grads[0].tolist() == [0.5] * 3
    assert state.tolist() == [1, 1, 0]
    with pytest.raises(RuntimeError):
        backend.rule_(state, torch.zeros(1, 3).double(), number, (0.5,))
    with pytest.raises(RuntimeError, match=r"expected 2 settings \(factor, times\), got 1"):
        rule.typed((0.5,))


def halving_(state, stats, factor: float, times: int):
    health = reference.report.health_of(stats)
    coef = torch.full_like(health.norm, factor**times)
    assert isinstance(times, int)
    verdict = reference.report.report(
        state,
        stats,
        health,
        blocked=health.has_nan,
        clipped=~health.has_nan,
        clipped_norm=health.norm * coef,
    )
    return coef.expand(len(stats)).clone(), verdict
