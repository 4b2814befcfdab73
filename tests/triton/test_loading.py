"""When Triton is loaded, when not, and what is said if it cannot be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zclip.backends import triton

ROOT = Path(__file__).parents[2]

MEASURE = "import torch, zclip; print(zclip.grad_stats([torch.ones(3)])[0, 0].item())"


def run_python(source, **environment):
    """Run a program in a fresh process, outside the interpreter unless told otherwise."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", source],
        env={**inherited, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def fake_triton(tmp_path):
    """Make a package named triton that says it is of some version and cannot be imported."""

    def make(version):
        package = tmp_path / "triton"
        package.mkdir()
        (package / "__init__.py").write_text(
            f"raise ImportError('made up')\n__version__ = '{version}'\n"
        )
        return f"{tmp_path}{os.pathsep}{ROOT}"

    return make


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_importing_zclip_does_not_import_triton(backend):
    source = (
        "import sys, torch; before = set(sys.modules); import zclip;"
        "print([m for m in set(sys.modules) - before if m.split('.')[0] == 'triton'])"
    )
    assert run_python(source, ZCLIP_BACKEND=backend).stdout.strip() == "[]"


def test_forced_it_serves_cpu_tensors_in_the_interpreter():
    done = run_python(MEASURE, ZCLIP_BACKEND="triton", TRITON_INTERPRET="1")
    assert done.stdout.strip() == "3.0", done.stderr


def test_forced_outside_the_interpreter_cpu_tensors_are_refused():
    done = run_python(MEASURE, ZCLIP_BACKEND="triton")
    assert done.returncode != 0
    told = "zclip::grad_stats: expected CUDA or HIP tensors, got tensors on the CPU; use"
    assert f"{told} ZCLIP_BACKEND=auto" in done.stderr


def test_forced_every_operator_goes_through_the_dispatcher():
    source = """
import torch, zclip
from zclip import ops
p = torch.nn.Parameter(torch.ones(4))
p.grad = torch.full((4,), 2.0)
print(zclip.clip_grad_norm_(p, 1.0).item(), zclip.get_total_norm([p.grad], 1.0).item())
zclip.clip_grad_value_(p, 0.25)
ops.scale_([p.grad], torch.tensor([2.0], dtype=torch.float64))
ops.zero_nonfinite_([p.grad], ops.grad_stats([p.grad]))
own = set(zclip.backends.OPS) - set(zclip.backends.OF_HOST_MEMORY)
print(*{zclip.backends.answering(op, "cpu") for op in own})
print(*p.grad.tolist(), zclip.backends.answering("scale_", "cpu"))
"""
    done = run_python(source, ZCLIP_BACKEND="triton", TRITON_INTERPRET="1")
    first, answering, second = done.stdout.splitlines()
    assert answering == "triton"
    assert [float(x) for x in first.split()] == pytest.approx([4.0, 2.0], rel=1e-6)
    assert second == "0.5 0.5 0.5 0.5 triton"


def test_a_missing_triton_is_one_line_and_the_reference_answers():
    hide = "import importlib.util as u; u.find_spec = lambda name: None\n"
    source = hide + (
        "import zclip; print(zclip.BACKEND_REASONS['triton']);"
        "print(zclip.backends.answering('grad_stats', 'cuda'))"
    )
    reason, answering = run_python(source).stdout.splitlines()
    assert reason == "expected triton >= 3.6, got none; pip install -U triton"
    assert answering == "reference"
    done = run_python(hide + "import zclip", ZCLIP_BACKEND="triton")
    assert "RuntimeError: ZCLIP_BACKEND=triton, but expected triton >= 3.6, got none" in done.stderr


def test_a_triton_that_is_too_old_is_one_line(fake_triton):
    path = fake_triton("3.1.0")
    show = "import zclip; print(zclip.BACKEND_REASONS['triton'])"
    done = run_python(show, PYTHONPATH=path)
    assert done.stdout.startswith("expected triton >= 3.6, got 3.1.0"), done.stderr
    done = run_python(show, PYTHONPATH=path, ZCLIP_BACKEND="triton")
    assert (
        "RuntimeError: ZCLIP_BACKEND=triton, but expected triton >= 3.6, got 3.1.0" in done.stderr
    )


def test_a_broken_triton_says_so_when_it_is_needed(fake_triton):
    done = run_python(MEASURE, PYTHONPATH=fake_triton("3.9.0"), ZCLIP_BACKEND="triton")
    assert "zclip::grad_stats: triton is installed but does not import (made up)" in done.stderr


def test_reference_leaves_triton_alone():
    source = "import zclip; print(zclip.BACKEND_REASONS['triton'])"
    done = run_python(source, ZCLIP_BACKEND="reference")
    assert done.stdout.strip() == "not loaded: ZCLIP_BACKEND=reference"


def test_the_real_triton_is_new_enough():
    assert triton.problem() is None
