"""What holds for every clip rule: backends agree, fused is separate, fakes work, nothing waits."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.backends import BACKENDS, steps_for
from tests.grads import DTYPES, dtype_name, make_grads
from tests.rule_runs import (
    DEFAULTS,
    NO_LOSS,
    fresh_state,
    noisy_norms,
    run,
    settings_of,
    takes_loss,
)
from zclip import reference
from zclip.layout import NORM, NUM_LOSS_STATE, NUM_VERDICT, ON_NONFINITE

COMPILED = [name for name in BACKENDS if name != "reference"]
SHORT = {  # settings that reach every branch in a short run
    "zclip_": [
        {"warmup_steps": 5, "clip_mode": mode, "max_grad_norm": limit, "skip_step_on_spike": skip}
        for mode in range(3)
        for limit, skip in ((math.inf, False), (1.2, True))
    ],
    "adagc_": [{"warmup_steps": 10, "seed": seed} for seed in range(3)],
    "spike_skip_": [{"window": 16, "sigma": 2.0, "min_count": 4}],
    "auto_clip_": [{"history": 20, "percentile": p} for p in (0.0, 30.0, 100.0)],
}
CASES = [(rule, settings) for rule in DEFAULTS for settings in SHORT.get(rule, [{}])]


def rough_history(count, seed):
    """Norms of three tensors with zeros, overflows and bad ones among them."""
    history = list(zip(*(noisy_norms(count, seed=seed + i) for i in range(3)), strict=True))
    for at, norms in ((3, (0.0, 1.0, 0.0)), (17, (0.0, 0.0, 0.0)), (30, (1.0, 1e250, 1.0))):
        history[at] = norms
    for at, norms in ((5, (1.0, math.nan, 1.0)), (24, (math.inf, 1.0, 1.0)), (40, (math.nan,) * 3)):
        history[at] = norms
    return history


@pytest.mark.parametrize("official", [False, True])
@pytest.mark.parametrize(("rule", "settings"), CASES)
@pytest.mark.parametrize("name", COMPILED)
def test_every_backend_equals_the_reference(name, rule, settings, official):
    settings = settings | {"on_nonfinite": int(official)}
    history = rough_history(80, seed=3)[: steps_for(BACKENDS[name], 80, 26)]
    losses = noisy_norms(80, seed=9)
    losses[20], losses[60] = math.nan, -math.inf
    ours = run(BACKENDS[name], rule, history, losses, **settings)
    theirs = run(BACKENDS["reference"], rule, history, losses, **settings)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        close = {"equal_nan": True, "atol": 1e-20, "msg": lambda text, i=i: f"step {i}: {text}"}
        coefs = torch.tensor([a.coefs, b.coefs], dtype=torch.float64)
        torch.testing.assert_close(*coefs, rtol=1e-12, **close)
        torch.testing.assert_close(a.state, b.state, rtol=1e-12, **close)
        torch.testing.assert_close(a.verdict, b.verdict, rtol=1e-6, **close)


def test_every_loss_watch_equals_the_reference():
    ends_badly = [math.nan, 1.0, -math.inf, 2.0, 3.0, 4.0, 5.0]
    for name in COMPILED:
        losses = noisy_norms(200, seed=4)[: steps_for(BACKENDS[name], 200, 40)] + ends_badly
        states = [torch.zeros(NUM_LOSS_STATE, dtype=torch.float64) for _ in range(2)]
        verdicts = [torch.zeros(NUM_VERDICT) for _ in range(2)]
        for loss in losses:
            for backend, state, verdict in zip(
                (BACKENDS[name], reference), states, verdicts, strict=True
            ):
                backend.watch_loss_(state, torch.tensor(loss), verdict, 3.0, 3, 0.95, 20)
            torch.testing.assert_close(*states, rtol=1e-12, atol=1e-20)
            torch.testing.assert_close(*verdicts, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("rule", DEFAULTS)
def test_the_fused_operator_is_the_separate_ones(backend, rule, dtype):
    settings = SHORT.get(rule, [{}])[0]
    fused_state, state = (fresh_state(rule, 3, **settings) for _ in range(2))
    extra = [NO_LOSS] if takes_loss(rule) else []
    for i in range(steps_for(backend, 30)):
        scale = 100.0 if i % 11 == 10 else 1.0
        fused_grads = make_grads([(5, 7), (), (16385,)], dtype, seed=i, scale=scale)
        if i in (2, 19):
            fused_grads[2][16384] = math.nan
        grads = [g.clone() for g in fused_grads]
        norm, fused_stats, fused_coefs, fused_verdict = getattr(backend, f"clip_by_{rule}")(
            fused_grads, fused_state, *extra, *settings_of(rule, **settings)
        )
        stats = backend.grad_stats(grads)
        coefs, verdict = getattr(backend, rule)(
            state, stats, *extra, *settings_of(rule, **settings)
        )
        backend.scale_(grads, coefs)
        assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert norm.item() == pytest.approx(verdict[NORM].item(), rel=1e-6, nan_ok=True)
        for ours, want in (
            (fused_stats, stats),
            (fused_coefs, coefs),
            (fused_verdict, verdict),
            (fused_state, state),
            *zip(fused_grads, grads, strict=True),
        ):
            assert torch.equal(ours.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rule", DEFAULTS)
def test_a_run_with_bad_steps_learns_what_a_clean_one_does(backend, rule, bad):
    """Injected at random steps, the first included, in any of three tensors."""
    settings = SHORT.get(rule, [{}])[0]
    generator = torch.Generator().manual_seed(5)
    history = list(zip(*(noisy_norms(60, seed=i) for i in range(3)), strict=True))
    history = history[: steps_for(backend, 60, 8)]
    clean = run(backend, rule, history, **settings)
    injected, is_bad = [], []
    for i, norms in enumerate(history):
        if i == 0 or torch.rand((), generator=generator) < 0.3:
            where = int(torch.randint(3, (), generator=generator))
            injected.append(tuple(bad if j == where else 1.0 for j in range(3)))
            is_bad.append(True)
        injected.append(norms)
        is_bad.append(False)
    steps = run(backend, rule, injected, **settings)
    good = [step for step, was_bad in zip(steps, is_bad, strict=True) if not was_bad]
    assert [s.coefs for s in good] == [s.coefs for s in clean]
    assert torch.equal(steps[-1].state[3:], clean[-1].state[3:])
    assert steps[-1].state[0] == len(injected)
    assert steps[-1].state[1] == clean[-1].state[1]
    assert steps[-1].state[2] == clean[-1].state[2] + sum(is_bad)


def operator_calls(device):
    """Every new operator with arguments on a device."""
    grads = [torch.zeros(5, 7, device=device), torch.zeros(3, device=device)]
    stats = torch.zeros(2, 3, dtype=torch.float64, device=device)
    loss = torch.zeros((), device=device)

    def wide(size):
        return torch.zeros(size, dtype=torch.float64, device=device)

    for rule in DEFAULTS:
        for official in ON_NONFINITE.values():
            size = fresh_state(rule, 2).numel()
            given = loss if takes_loss(rule) else None
            which = (reference.IDS[rule[:-1]], settings_of(rule, on_nonfinite=official), given)
            yield "rule_", (wide(size), stats, *which)
            yield "clip_by_", (grads, wide(size), *which)
    yield "agc_", (grads, [g.clone() for g in grads], wide(3), 0.01, 1e-3, 0)
    verdict = torch.zeros(NUM_VERDICT, device=device)
    yield "watch_loss_", (wide(NUM_LOSS_STATE), loss, verdict, 3.0, 5, 0.99, 10)
    yield "fingerprint", (grads,)


def shapes(results):
    results = results if isinstance(results, tuple) else (results,)
    return [(tuple(t.shape), t.dtype) for t in results if t is not None]


def test_fake_cuda_tensors_pass_through_every_operator():
    real = [shapes(getattr(torch.ops.zclip, name)(*args)) for name, args in operator_calls("cpu")]
    with FakeTensorMode():
        for (name, args), wanted in zip(operator_calls("cuda"), real, strict=True):
            results = getattr(torch.ops.zclip, name)(*args)
            assert shapes(results) == wanted, name
            for result in results if isinstance(results, tuple) else (results,):
                assert result is None or result.device.type == "cuda", name


def test_the_reference_never_reads_a_value():
    """A fake tensor has none, so reading one raises, on whatever device it pretends to be."""
    with FakeTensorMode():
        for name, args in operator_calls("cpu"):
            getattr(reference, name)(*args)
        with pytest.raises(DataDependentOutputException):
            torch.zeros(()).item()
