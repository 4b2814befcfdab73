"""The CUDA kernels themselves, executed: many tensors, many schedules, sanitizers.

What each operator must compute is tested in tests/test_*.py, which run on these kernels as
``simt-forward`` and ``simt-random``.
"""

import re
import subprocess

import pytest
import torch

from tests.backends import BACKENDS
from tests.grads import DTYPES, dtype_name, exact_sumsq, make_grads
from tests.simt import build, device
from zclip import layout
from zclip.layout import INF, NAN, SUMSQ

pytestmark = pytest.mark.skipif(not build.CAN_RUN, reason="needs g++ on x86-64")

RTOL = 1e-6  # of a sum of squares against float64, for any data
CPU = BACKENDS["native-portable"]
PROGRAM = build.HERE / "kernel_check.cpp"
# The sanitized builds have the 4 KB of arguments from before CUDA 12.1, the plain one has 32 KB.
SMALL_ARGUMENTS = "-DZCLIP_LARGE_ARGUMENTS=0"
# In these, tensors of three chunks are finished by the whole block.
FEW_SLOTS = "-DZCLIP_SLOTS_PER_WARP=2"
DEFINES = {
    "plain": (),
    "asan": (SMALL_ARGUMENTS, FEW_SLOTS),
    "tsan": (SMALL_ARGUMENTS, FEW_SLOTS, "-DZCLIP_BLOCK_THREADS=64"),  # half a ms per thread
}


def run_checks(sanitizer, first_seed, seeds, *name):
    program = build.build_program(PROGRAM, sanitizer, DEFINES[sanitizer])
    return subprocess.run(
        [program, str(first_seed), str(seeds), *name],
        capture_output=True,
        text=True,
        env=build.environment(sanitizer),
        check=False,
        timeout=900,
    )


@pytest.mark.parametrize(("sanitizer", "seeds"), [("plain", 4), ("asan", 1), ("tsan", 1)])
def test_every_kernel_equals_a_plain_loop(sanitizer, seeds):
    done = run_checks(sanitizer, 0, seeds)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"passed (\d+)", done.stdout)[1]) == 12 * seeds


@pytest.mark.slow
@pytest.mark.parametrize(("sanitizer", "seeds"), [("plain", 60), ("asan", 8), ("tsan", 8)])
def test_every_kernel_equals_a_plain_loop_under_many_schedules(sanitizer, seeds):
    done = run_checks(sanitizer, 100, seeds)
    assert done.returncode == 0, done.stdout + done.stderr


def launches_of(module, call):
    """What ``call`` returns, and how many launches it took."""
    result = call()
    return result, module.counters()["launches"]


@pytest.mark.parametrize(
    ("count", "launches"), [(1, 1), (145, 1), (146, 1), (1300, 1), (1340, 1), (1341, 2), (3000, 3)]
)
def test_hundreds_of_tensors_take_as_few_launches_as_arguments_allow(count, launches):
    grads = make_grads([(i % 37,) for i in range(count)])
    module, simt = device.load(), device.backend("random")
    stats, taken = launches_of(module, lambda: simt.grad_stats(grads))
    torch.testing.assert_close(stats[:, SUMSQ], exact_sumsq(grads), rtol=RTOL, atol=0)
    assert taken == launches


@pytest.mark.parametrize("rule", ["global_norm_", "zclip_", "adagc_", "spike_skip_", "auto_clip_"])
def test_a_clipped_step_is_two_launches(rule):
    module, simt = device.load(), BACKENDS["simt-random"]
    settings = {
        "global_norm_": (3, (1.0, layout.ZERO)),
        "zclip_": (8, (0.97, 2.5, 1.0, 1e-6, 2, 0, 1.0, False, False, 0)),
        "adagc_": (3 + 150, (1.04, 0.99, 1.0, 1e-6, 2, 0, 0)),
        "spike_skip_": (5 + 8, (torch.tensor(2.0), 4, 6.0, 2, 0)),
        "auto_clip_": (4 + 10, (10.0, 10, 0)),
    }
    size, rest = settings[rule]
    grads = make_grads([(97,)] * 150)
    state = torch.zeros(size, dtype=torch.float64)
    call = getattr(simt, f"clip_by_{rule}")
    _, taken = launches_of(module, lambda: call(grads, state, *rest))
    assert taken == 2


def awkward_grads(dtype):
    """Lengths around everything, at every alignment, with bad elements at the edges."""
    module = device.load()
    lengths = [1, 31, 33, 511, 513, module.CHUNK - 1, module.CHUNK, module.CHUNK + 1, 70_001]
    whole = make_grads([(n + 8,) for n in lengths], dtype)
    grads = [g[offset : offset + n] for g, n, offset in zip(whole, lengths, range(9), strict=True)]
    for i, grad in enumerate(grads):
        grad[(0, -1, grad.numel() // 2)[i % 3]] = (float("nan"), float("inf"))[i % 2]
    return grads


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_counts_equal_those_of_the_cpu_and_no_schedule_changes_a_bit(dtype):
    module = device.load()
    grads = awkward_grads(dtype)
    want = CPU.grad_stats(grads)
    bits = set()
    for multiprocessors, order in [(1, "forward"), (2, "reverse"), (3, "random"), (40, "random")]:
        module.set_multiprocessors(multiprocessors)
        stats = device.backend(order).grad_stats(grads)
        assert torch.equal(stats[:, [NAN, INF]], want[:, [NAN, INF]])
        torch.testing.assert_close(stats[:, SUMSQ], want[:, SUMSQ], rtol=RTOL, atol=0)
        bits.add(stats.numpy().tobytes())
    module.set_multiprocessors(2)
    assert len(bits) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_scaling_has_the_bits_of_the_cpu(dtype):
    coefs = torch.tensor([0.3, 1.0, -1.0, 1e-41, 0.0, 0.7, 1.0, 3e-3, 0.9], dtype=torch.float64)
    ours, cpus = awkward_grads(dtype), awkward_grads(dtype)
    device.backend("random").scale_(ours, coefs)
    CPU.scale_(cpus, coefs)
    for a, b in zip(ours, cpus, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_rules_have_the_bits_of_the_cpu_for_the_same_stats():
    simt = BACKENDS["simt-random"]
    generator = torch.Generator().manual_seed(0)
    rules = {
        "global_norm_": (3, (1.0, layout.SKIP)),
        "zclip_": (6 + 5, (0.97, 2.5, 1.0, 1e-6, 5, 0, 1.0, False, False, 0)),
        "adagc_": (3 + 700, (1.04, 0.99, 1.0, 1e-6, 3, 0, 0)),
        "spike_skip_": (5 + 16, (torch.tensor(2.0), 8, 6.0, 2, 0)),
        "auto_clip_": (4 + 600, (10.0, 600, 0)),
    }
    for name, (size, settings) in rules.items():
        ours, cpus = (torch.zeros(size, dtype=torch.float64) for _ in range(2))
        for step in range(9):
            stats = torch.zeros(700, 3, dtype=torch.float64)
            stats[:, 0] = torch.rand(700, generator=generator, dtype=torch.float64)
            if step == 6:
                stats[17, 1] = 2
            if step == 7:
                stats[:, 0] *= 100
            got = getattr(simt, name)(ours, stats, *settings)
            want = getattr(CPU, name)(cpus, stats, *settings)
            for a, b in zip((*got, ours), (*want, cpus), strict=True):
                assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), (name, step)


def test_every_operator_of_the_cpu_exists_here_but_those_of_host_memory():
    from zclip.backends import OF_HOST_MEMORY, OPS

    assert set(OPS) - set(device.OPS) == set(OF_HOST_MEMORY)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda op: op.scale_([torch.ones(2)], torch.ones(1)),
            "coefs: expected a contiguous float64",
        ),
        (
            lambda op: op.rule_(torch.ones(2).double(), torch.ones(1, 3).double(), 0, (1.0, 0)),
            "state: expected a contiguous float64 tensor of 3 elements on the CPU, got 2",
        ),
        (
            lambda op: op.rule_(torch.ones(3).double(), torch.ones(1, 2).double(), 0, (1.0, 0)),
            r"stats: expected a contiguous float64 tensor of shape \[N, 3\]",
        ),
        (
            lambda op: op.zero_nonfinite_([torch.ones(2)], torch.ones(2, 3).double()),
            "stats: expected a contiguous float64 tensor of shape",
        ),
        (
            # An empty state counts nothing, but its dtype and device are checked like any other.
            lambda op: op.clip_by_([torch.ones(2)], torch.empty(0), 0, (1.0, 0)),
            "state: expected a contiguous float64 tensor of 0 elements on the CPU",
        ),
        (
            lambda op: op.clip_by_([torch.ones(2)], torch.ones(3).double(), 0, (1.0,)),
            "global_norm: expected 2 settings, got 1",
        ),
        (
            lambda op: op.grad_stats([torch.ones(2, dtype=torch.int64)]),
            r"grads\[0\]: expected float32",
        ),
        (
            lambda op: op.clamp_([torch.ones(2), torch.ones(1).expand(3)], 0.1),
            r"grads\[1\]: expected memory of its own",
        ),
    ],
)
def test_the_binding_checks_as_that_of_the_cpu_does(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(device.backend("forward"))
