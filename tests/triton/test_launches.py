"""How many kernels a call launches, and what they may assume about one another."""

from pathlib import Path

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from tests.backends import BACKENDS
from tests.grads import DTYPES, dtype_name, exact_sumsq, make_grads
from tests.rule_runs import DEFAULTS, NO_LOSS, fresh_state, settings_of, stats_of, takes_loss
from zclip.backends import triton as triton_backend
from zclip.layout import ADAM, KEEP, NUM_LEDGER, PROPAGATE, SUMSQ, ZERO

TRITON = BACKENDS["triton-interpret"]


def has_kernel(rule):
    return (Path(triton_backend.__file__).parent / f"{rule[:-1]}.py").exists()


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that were launched, in order."""
    names = []
    run = InterpretedFunction.run

    def note_and_run(self, *args, **kwargs):
        names.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", note_and_run)
    return names


def state():
    return torch.zeros(3, dtype=torch.float64)


@pytest.mark.parametrize("nonfinite", [PROPAGATE, ZERO])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_clipping_takes_three_launches_for_any_number_of_tensors(launches, count, nonfinite):
    TRITON.clip_by_global_norm_(make_grads([(9,)] * count), state(), 1.0, nonfinite)
    assert launches == ["grad_stats_partials", "clip_by_global_norm_finish", "scale_chunks"]


@pytest.mark.parametrize("count", [1, 12])
def test_other_operators_take_one_or_two(launches, count):
    grads = make_grads([(9,)] * count)
    TRITON.grad_stats(grads)
    TRITON.power_stats(grads, 3.0)
    TRITON.clamp_(grads, 0.1)
    TRITON.scale_(grads, torch.full((count,), 0.5, dtype=torch.float64))
    assert launches == [
        "grad_stats_partials",
        "grad_stats_finish",
        "power_stats_partials",
        "grad_stats_finish",
        "clamp_chunks",
        "scale_chunks",
    ]


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize("rule", [r for r in DEFAULTS if has_kernel(r)])
def test_an_adaptive_rule_takes_one_launch_and_fused_four(launches, rule, count):
    memory, extra = fresh_state(rule, count), [NO_LOSS] if takes_loss(rule) else []
    grads = make_grads([(9,)] * count)
    getattr(TRITON, f"clip_by_{rule}")(grads, memory, *extra, *settings_of(rule))
    kernel = rule.rstrip("_")
    assert launches == ["grad_stats_partials", "grad_stats_finish", kernel, "scale_chunks"]
    launches.clear()
    getattr(TRITON, rule)(memory, stats_of(*[1.0] * count), *extra, *settings_of(rule))
    assert launches == [kernel]


@pytest.mark.parametrize("count", [1, 12])
def test_rows_and_hashes_take_four_and_two(launches, count):
    grads = make_grads([(2, 5)] * count)
    TRITON.agc_(grads, [g.clone() for g in grads], state(), 0.01, 1e-3, 0)
    assert launches == ["agc_rows", "agc_tensors", "agc", "agc_scale"]
    launches.clear()
    TRITON.fingerprint(grads)
    assert launches == ["fingerprint_partials", "fingerprint_finish"]


def test_a_further_dtype_costs_one_launch_per_pass(launches):
    grads = [make_grads([(9,)], dtype)[0] for dtype in DTYPES] * 3
    TRITON.clip_by_global_norm_(grads, state(), 1.0, PROPAGATE)
    assert len(launches) == 2 * len(DTYPES) + 1


def test_nothing_but_empty_tensors(launches):
    grads = [torch.empty(0), torch.empty(0, dtype=torch.float16)]
    norm, stats, coefs, _ = TRITON.clip_by_global_norm_(grads, state(), 1.0, PROPAGATE)
    assert norm == 0
    assert not stats.any()
    assert coefs.tolist() == [KEEP, KEEP]
    assert launches == ["clip_by_global_norm_finish"]


@pytest.fixture
def poisoned_memory():
    """Fresh memory holds NaN and the largest integers instead of whatever was there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_nothing_is_read_that_this_call_did_not_write(poisoned_memory):
    grads = make_grads([(9,), (0,), (20_000,)])
    assert torch.empty(1, dtype=torch.int32).item() == 2**31 - 1
    norm, stats, coefs, verdict = TRITON.clip_by_global_norm_(grads, state(), 1e9, PROPAGATE)
    torch.testing.assert_close(norm.double(), exact_sumsq(grads).sum().sqrt(), rtol=1e-6, atol=0)
    for tensor in (stats, coefs, verdict):
        assert tensor.isfinite().all()


def worst_cases(dtype):
    """Data chosen so that roundings add up instead of cancelling."""
    just_above = 1 + 2 * torch.finfo(torch.float32).eps
    yield torch.full((16384,), 1.1).to(dtype)
    yield torch.full((16384,), just_above).to(dtype)
    ramp = torch.full((8, 2048), 2.0**-6)  # one large term per lane, then ones that round away
    ramp[0] = 1.0
    yield ramp.flatten().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_the_error_bound_holds_for_unkind_data(dtype):
    grads = list(worst_cases(dtype))
    stats = TRITON.grad_stats(grads)
    torch.testing.assert_close(stats[:, SUMSQ], exact_sumsq(grads), rtol=9e-7, atol=0)


def test_bfloat16_is_rounded_to_nearest_even_in_the_interpreter_too():
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()].clone()
    scaled = finite.clone()
    TRITON.scale_([scaled], torch.tensor([0.7], dtype=torch.float64))
    assert torch.equal(scaled, (finite.float() * torch.tensor(0.7)).to(torch.bfloat16))


WAITS = (".item(", ".cpu(", ".tolist(", ".numpy(", "synchronize(")


def test_nothing_on_the_step_path_waits_for_the_device():
    folder = Path(triton_backend.__file__).parent
    found = {
        (path.name, wait)
        for path in folder.glob("*.py")
        for wait in WAITS
        if wait in path.read_text()
    }
    # The table is cut on the host, before it is uploaded.
    assert found == {("table.py", ".tolist(")}


@pytest.mark.parametrize("count", [1, 12])
def test_an_update_takes_three_launches_for_any_number_of_tensors(launches, count):
    params, grads, firsts, seconds = ([torch.ones(9) for _ in range(count)] for _ in range(4))
    steps = [torch.zeros(()) for _ in range(count)]
    ledger = torch.zeros(count, NUM_LEDGER, dtype=torch.int64)
    nothing = torch.empty(0, dtype=torch.float64)
    lists = (params, grads, firsts, seconds, [], steps, ledger, nothing, nothing, nothing, nothing)
    TRITON.optim_update_(*lists, ADAM, [count], [0.1, 0.9, 0.99, 1e-8, 0.0, 0.0], 0, True, 0)
    assert launches == ["update_chunks", "update_finish", "update_summary"]
