"""Errors name the place, what was expected and what came, and nothing is modified before."""

import math
import os
import subprocess
import sys

import pytest
import torch

import zclip
from zclip import ops


class WithGrad(torch.nn.Parameter):
    """A parameter whose gradient torch would not have let us assign."""

    grad = None


def holding(grad):
    result = WithGrad(torch.zeros(2))
    result.grad = grad
    return result


BAD_GRADS = {
    "sparse": (
        torch.eye(3).to_sparse(),
        TypeError,
        "expected a dense tensor, got torch.sparse_coo",
    ),
    "csr": (
        torch.eye(3).to_sparse_csr(),
        TypeError,
        "expected a dense tensor, got torch.sparse_csr",
    ),
    "integer": (
        torch.ones(3, dtype=torch.int64),
        TypeError,
        "expected float32, .*, got torch.int64",
    ),
    "bool": (torch.ones(3, dtype=torch.bool), TypeError, "expected float32, .*, got torch.bool"),
    "complex": (
        torch.ones(3, dtype=torch.complex64),
        TypeError,
        "expected float32, .*, got torch.complex64",
    ),
    "meta": (torch.ones(3, device="meta"), ValueError, "on the meta device"),
    "expanded": (torch.ones(1).expand(3), ValueError, "share memory"),
}
FUNCTIONS = {
    "clip_grad_norm_": lambda params: zclip.clip_grad_norm_(params, 0.1),
    "clip_grad_norm_ inf": lambda params: zclip.clip_grad_norm_(params, 0.1, math.inf),
    "clip_grad_value_": lambda params: zclip.clip_grad_value_(params, 0.1),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", BAD_GRADS)
def test_a_bad_gradient_is_named_and_the_good_ones_stay(function, place, kind):
    bad, error, message = BAD_GRADS[kind]
    good = [torch.ones(4), torch.ones(5)]
    grads = [*good[:place], bad, *good[place:]]
    with pytest.raises(error, match=rf"the gradient of parameters\[{place + 1}\].*{message}"):
        FUNCTIONS[function]([torch.nn.Parameter(torch.ones(2)), *map(holding, grads)])
    assert all(bool((g == 1).all()) for g in good)


@pytest.mark.parametrize("kind", [k for k in BAD_GRADS if k != "expanded"])
def test_measuring_a_bad_tensor_names_it(kind):
    bad, error, message = BAD_GRADS[kind]
    for function in (zclip.grad_stats, zclip.get_total_norm):
        with pytest.raises(error, match=rf"\[1\].*{message}"):
            function([torch.ones(2), bad])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("junk", ["weight", 3.0, None, ["nested"], (1, torch.ones(2))], ids=repr)
def test_what_is_not_a_tensor_is_named(function, junk):
    with pytest.raises(TypeError, match=r"parameters\[1\]: expected a Tensor, got "):
        FUNCTIONS[function]([holding(torch.ones(2)), junk])


def test_a_loss_that_is_no_tensor_is_named():
    with pytest.raises(TypeError, match="loss: expected a Tensor of one element, got float"):
        zclip.SpikeSkip().step(holding(torch.ones(2)), loss=1.0)


def test_a_state_without_groups_is_named():
    with pytest.raises(ValueError, match="state: expected groups, got only clipper"):
        zclip.ZClip().load_state_dict({"clipper": "ZClip"})


def test_a_non_tensor_among_measured_tensors_is_named():
    with pytest.raises(TypeError, match=r"grads\[1\]: expected a Tensor, got str 'x'"):
        zclip.grad_stats([torch.ones(2), "x"])


@pytest.mark.parametrize("limit", [-1.0, math.nan, -math.inf])
def test_a_limit_must_be_a_number_from_zero_up(limit):
    param = holding(torch.ones(3))
    with pytest.raises(ValueError, match=f"max_norm: expected a number >= 0, got {limit}"):
        zclip.clip_grad_norm_(param, limit)
    with pytest.raises(ValueError, match=f"clip_value: expected a number >= 0, got {limit}"):
        zclip.clip_grad_value_(param, limit)
    assert param.grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize("norm_type", [0.0, -2.0, math.nan, -math.inf])
def test_a_norm_type_must_be_positive(norm_type):
    with pytest.raises(ValueError, match="norm_type: expected a positive number or inf"):
        zclip.clip_grad_norm_(holding(torch.ones(3)), 1.0, norm_type)


def test_an_unknown_mode_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="expected one of propagate, skip, zero, error, got 'ignore'"
    ):
        zclip.clip_grad_norm_(holding(torch.ones(3)), 1.0, nonfinite="ignore")


def test_coefficients_must_match_the_tensors():
    with pytest.raises(
        ValueError, match=r"coefs: expected one per tensor: \(2,\), got shape \(3,\)"
    ):
        ops.scale_([torch.ones(2)] * 2, torch.ones(3, dtype=torch.float64))


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
    ],
)
def test_the_compiled_operators_check_their_own_arguments(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(torch.ops.zclip)


def run_python(source, **environment):
    return subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ZCLIP_BACKEND": "cuda"}, "ZCLIP_BACKEND: expected one of auto, native, triton"),
        ({"ZCLIP_CPU": "sse9"}, "ZCLIP_CPU: expected auto, avx2 or portable, got 'sse9'"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(environment, message):
    clip = "import torch, zclip; zclip.grad_stats([torch.ones(3)])"
    done = run_python(clip, **environment)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_forced_backend_that_is_not_there_raises(tmp_path):
    hide = "import pathlib; pathlib.Path.glob = lambda self, pattern: []\n"
    done = run_python(hide + "import zclip", ZCLIP_BACKEND="native", ZCLIP_BUILD="none")
    assert "ZCLIP_BACKEND=native, but no compiled kernels: ZCLIP_BUILD=none" in done.stderr
    show = "import zclip; print(zclip.BACKEND_REASONS['native'])"
    done = run_python(hide + show, CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert "no C++ compiler found (no-such-compiler); install a C++ compiler" in done.stdout


def test_without_the_extension_everything_still_works():
    source = (
        "import torch, zclip; p = torch.nn.Parameter(torch.ones(4)); p.grad = torch.ones(4);"
        "print(zclip.clip_grad_norm_(p, 1.0).item(), p.grad.norm().item())"
    )
    done = run_python(source, ZCLIP_BACKEND="reference")
    norm, clipped = map(float, done.stdout.split())
    assert norm == pytest.approx(2.0)
    assert clipped == pytest.approx(1.0, rel=1e-5)
