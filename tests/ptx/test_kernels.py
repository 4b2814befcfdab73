"""nvcc's own output, executed: its PTX on the arguments that its host code passes.

The emulator of tests/simt runs the source of the kernels. This runs what the compiler made of it:
inline assembly, conversions, the layout of parameters, unrolled loops and their tails.
"""

import math

import pytest
import torch

from tests.backends import BACKENDS
from tests.grads import DTYPES, dtype_name, exact_sumsq, make_grads
from tests.ptx import device
from tests.rule_runs import clipper_of, stats_of
from zclip import layout, reference
from zclip.layout import INF, NAN, SUMSQ

pytestmark = pytest.mark.skipif(not device.HAS_NVCC, reason="needs nvcc")

CPU = BACKENDS.get("native-portable", BACKENDS["reference"])
CHUNK = 32768


@pytest.fixture(scope="module")
def machine():
    return device.Machine()


@pytest.fixture
def ptx(machine):
    machine.ran.clear()
    return device.backend(machine)


def same(ours, theirs):
    return torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(
        ours.nan_to_num(7.0), theirs.nan_to_num(7.0)
    )


def awkward_grads(dtype):
    """Lengths around everything, at every alignment, with bad elements at the edges."""
    lengths = [0, 1, 31, 513, CHUNK - 1, CHUNK + 1, 4001]
    whole = make_grads([(n + 8,) for n in lengths], dtype)
    grads = [g[at : at + n] for at, (g, n) in enumerate(zip(whole, lengths, strict=True))]
    for i, grad in enumerate(grads[1:]):
        grad[(0, -1, grad.numel() // 2)[i % 3]] = (math.nan, math.inf)[i % 2]
    return grads


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_measuring(ptx, machine, dtype):
    grads = awkward_grads(dtype)
    stats, want = ptx.grad_stats(grads), CPU.grad_stats(grads)
    assert torch.equal(stats[:, [NAN, INF]], want[:, [NAN, INF]])
    torch.testing.assert_close(stats[:, SUMSQ], want[:, SUMSQ], rtol=1e-6, atol=0)
    assert machine.ran == ["grad_stats_partials<145>"]


@pytest.mark.parametrize("scale", [0.0, 1e-25, 1e-41, 3e25])
def test_measuring_what_a_quick_sum_cannot(ptx, scale):
    grads = make_grads([(3000,), (5,)], scale=scale)
    stats = ptx.grad_stats(grads)
    torch.testing.assert_close(stats[:, SUMSQ], exact_sumsq(grads), rtol=1e-6, atol=0)


def test_more_tensors_than_the_small_table_has_room_for(ptx, machine):
    grads = make_grads([(i % 7,) for i in range(150)])
    torch.testing.assert_close(
        ptx.grad_stats(grads)[:, SUMSQ], exact_sumsq(grads), rtol=1e-6, atol=0
    )
    assert machine.ran == ["grad_stats_partials<1340>"]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_scaling_has_the_bits_of_the_cpu(ptx, dtype):
    coefs = torch.tensor([0.5, 0.3, 1.0, -1.0, 0.7, 1e-41, 0.0], dtype=torch.float64)
    ours, cpus = awkward_grads(dtype), awkward_grads(dtype)
    ptx.scale_(ours, coefs)
    CPU.scale_(cpus, coefs)
    for a, b in zip(ours, cpus, strict=True):
        assert same(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("coef", [0.7, 1 / 3, 1e-3])
def test_every_number_of_sixteen_bits_is_converted_as_on_the_cpu(ptx, dtype, coef):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    ours, cpus = every.clone(), every.clone()
    coefs = torch.tensor([coef], dtype=torch.float64)
    ptx.scale_([ours], coefs)
    CPU.scale_([cpus], coefs)
    assert same(ours, cpus)
    stats, want = ptx.grad_stats([every.clone()]), CPU.grad_stats([every.clone()])
    assert torch.equal(stats[:, [NAN, INF]], want[:, [NAN, INF]])
    torch.testing.assert_close(stats[:, SUMSQ], want[:, SUMSQ], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_clamping_and_dropping_have_the_bits_of_the_cpu(ptx, dtype):
    ours, cpus = awkward_grads(dtype)[:4], awkward_grads(dtype)[:4]
    stats = CPU.grad_stats(ours)
    for backend, grads in ((ptx, ours), (CPU, cpus)):
        backend.zero_nonfinite_(grads[2:], stats[2:].contiguous())
        backend.clamp_(grads, 0.25)
    for a, b in zip(ours, cpus, strict=True):
        assert same(a, b)


@pytest.mark.parametrize("p", [1.0, 3.0, 0.5, math.inf])
def test_other_norms(ptx, p):
    grads = [g.abs() + 0.1 for g in make_grads([(700,), (3,)])]
    stats, want = ptx.power_stats(grads, p), CPU.power_stats(grads, p)
    torch.testing.assert_close(stats, want, rtol=1e-6, atol=0)


def test_hashes_are_those_of_the_cpu(ptx):
    tensors = [torch.arange(9001), torch.ones(7, dtype=torch.bool), make_grads([(70_000,)])[0]]
    assert torch.equal(ptx.fingerprint(tensors), CPU.fingerprint(tensors))


@pytest.mark.parametrize("official", [0, 1])
@pytest.mark.parametrize("name", reference.IDS)
def test_rules_have_the_bits_of_the_cpu_for_the_same_stats(ptx, machine, name, official):
    short = {"zclip": {"warmup_steps": 3}, "adagc": {"warmup_steps": 2}}
    short |= {"auto_clip": {"history": 6, "percentile": 30.0}, "spike_skip": {"window": 4}}
    how = "official" if official else "skip"
    clipper = clipper_of(name, on_nonfinite=how, **short.get(name, {}))
    settings = clipper.settings({})
    ours, cpus = (torch.zeros(clipper.state_size(3)).double() for _ in range(2))
    for step, norms in enumerate(
        [(1.0, 2.0, 0.5), (1.1, 1.9, 0.6), (0.9, 2.1, 0.0), (1.0, 2.0, 0.5), (30.0, 2.0, 0.5),
         (1.0, math.nan, 1.0), (1.0, 1.0, math.inf), (1e200, 1.0, 1.0), (1.0, 2.2, 0.4)]
    ):  # fmt: skip
        loss = torch.tensor(2.0 + step, dtype=torch.bfloat16) if clipper.watches_loss else None
        stats = stats_of(*norms)
        got = ptx.rule_(ours, stats, reference.IDS[name], settings, loss)
        want = CPU.rule_(cpus, stats, reference.IDS[name], settings, loss)
        for a, b in zip((*got, ours), (*want, cpus), strict=True):
            assert same(a, b), step
    assert set(machine.ran) == {"apply_rule_kernel"}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", reference.IDS)
def test_a_clipped_step_is_measuring_the_rule_and_scaling(ptx, machine, name, dtype):
    clipper = clipper_of(name)
    settings, number = clipper.settings({}), reference.IDS[name]
    ours, cpus = (torch.zeros(clipper.state_size(3)).double() for _ in range(2))
    for step in range(2):
        grads = make_grads([(5, 7), (600,), (3,)], dtype, seed=step, scale=50.0)
        copies = [g.clone() for g in grads]
        norm, stats, coefs, verdict = ptx.clip_by_(grads, ours, number, settings)
        want, judged = CPU.rule_(cpus, stats, number, settings)
        CPU.scale_(copies, want)
        pairs = [(coefs, want), (verdict, judged), (ours, cpus), *zip(grads, copies, strict=True)]
        assert all(same(a, b) for a, b in pairs)
        assert norm.item() == pytest.approx(verdict[layout.NORM].item(), rel=1e-6)
    assert machine.ran == ["grad_stats_partials<145>", "rewrite<145, Scale>"] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_rows_bounded_by_their_weights(ptx, dtype):
    shapes = [(5, 70), (9,), (2, 3, 4)]
    results = []
    for backend in (ptx, CPU):
        grads, params = make_grads(shapes, dtype, seed=1), make_grads(shapes, dtype, seed=2)
        state = torch.zeros(3).double()
        norm, stats, coefs, verdict = backend.agc_(grads, params, state, 0.01, 1e-3, 0)
        results.append([norm, stats, coefs, verdict, state, *grads])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6 if a.dtype != torch.bfloat16 else 0.01, atol=0)


def test_the_loss_is_watched_as_on_the_cpu(ptx):
    ours, cpus = (torch.zeros(layout.NUM_LOSS_STATE).double() for _ in range(2))
    for loss in (3.0, 2.9, 3.1, 50.0, math.nan, 3.0, 3.5, 4.0):
        verdicts = [torch.zeros(layout.NUM_VERDICT) for _ in range(2)]
        for backend, state, verdict in ((ptx, ours, verdicts[0]), (CPU, cpus, verdicts[1])):
            value = torch.tensor(loss, dtype=torch.float16)
            backend.watch_loss_(state, value, verdict, 3.0, 2, 0.9, 2)
        assert same(ours, cpus)
        assert same(*verdicts)


@pytest.mark.parametrize("architecture", ["compute_80", "compute_100", "compute_120"])
def test_other_architectures(architecture):
    ptx = device.backend(device.Machine(architecture))
    for dtype in DTYPES:
        ours, cpus = make_grads([(700,), (0,)], dtype), make_grads([(700,), (0,)], dtype)
        state = torch.zeros(3).double()
        norm, _, coefs, _ = ptx.clip_by_(ours, state, 0, (1.0, layout.SKIP))
        CPU.scale_(cpus, coefs)
        assert same(ours[0], cpus[0])
        assert coefs[0].item() == pytest.approx(1.0 / (norm.item() + 1e-6), rel=1e-5)


@pytest.mark.parametrize(
    ("written", "bent"),
    [
        ("cvt.rn.f16.f32", "cvt.rz.f16.f32"),  # rounds the wrong way
        ("cvt.f32.f16", "cvt.rn.f32.u16"),  # takes bits for a number
    ],
)
def test_a_bent_conversion_is_noticed(written, bent):
    def change(text):
        assert written in text
        return text.replace(written, bent)

    ours, cpus = (make_grads([(700,)], torch.float16) for _ in range(2))
    coefs = torch.tensor([0.7], dtype=torch.float64)
    device.backend(device.Machine(change=change)).scale_(ours, coefs)
    CPU.scale_(cpus, coefs)
    assert not same(ours[0], cpus[0])
