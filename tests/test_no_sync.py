"""The promise in the README: between backward() and the end of step(), nothing waits.

Three proofs: fake CUDA tensors that raise when asked for a value; a guard against blocking copies,
itself tested with leaks; and a search of the sources for the names of things that wait.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zclip
from tests.fake_cuda import WAITS, fake_cuda, fake_parameters
from tests.own_rules import twice_the_average
from tests.rule_runs import clipper_of
from zclip import layout, mailbox, reference

ROOT = Path(__file__).parent.parent
SHAPES = [(4, 3), (7,), (), (0,)]

CLIPPERS = {
    "GlobalNorm": lambda: zclip.GlobalNorm(1.0),
    "GlobalNorm-official": lambda: zclip.GlobalNorm(1.0, on_nonfinite="official"),
    "ZClip": zclip.ZClip,
    "ZClip-percentile": lambda: zclip.ZClip(mode="percentile", skip_step_on_spike=True),
    "ZClip-official": lambda: zclip.ZClip(on_nonfinite="official"),
    "ZClip-per-group": lambda: zclip.ZClip(per_group=True),
    "AdaGC": zclip.AdaGC,
    "AdaGC-per-group": lambda: zclip.AdaGC(per_group=True),
    "SpikeSkip": zclip.SpikeSkip,
    "AutoClip": zclip.AutoClip,
    "AGC": zclip.AGC,
    "PythonRule": lambda: zclip.PythonRule(twice_the_average, state_size=1),
    "PythonRule-per-group": lambda: zclip.PythonRule(
        twice_the_average, state_size=1, per_group=True
    ),
}
OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, fused=True),
    "Adam-amsgrad": lambda groups: torch.optim.Adam(groups, amsgrad=True, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True, fused=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, fused=True),
}


@pytest.fixture
def pinned(monkeypatch):
    """Stand-ins for what no fake device has: pinned memory and events. Notes what was asked."""
    asked = []

    class Event:
        def synchronize(self):
            asked.append("synchronize")

    def empty(self, pinned):
        asked.append("pinned" if pinned else "pageable")
        return torch.empty(self.width)

    monkeypatch.setattr(mailbox.Mailbox, "_new_slot", empty)
    monkeypatch.setattr(mailbox, "record_event", lambda device: Event())
    return asked


@pytest.fixture(params=CLIPPERS, ids=str)
def clipper(request):
    return CLIPPERS[request.param]()


@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "zero"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm_(norm_type, nonfinite):
    with fake_cuda():
        params = fake_parameters(SHAPES)
        norm = zclip.clip_grad_norm_(params, 1.0, norm_type, nonfinite=nonfinite)
        assert norm.device.type == "cuda"


def test_the_other_functions():
    with fake_cuda():
        params = fake_parameters(SHAPES)
        zclip.clip_grad_value_(params, 1.0)
        assert zclip.get_total_norm([p.grad for p in params]).device.type == "cuda"
        assert zclip.grad_stats([p.grad for p in params]).device.type == "cuda"
        model = torch.nn.ParameterList(params)
        zclip.apply_in_place_clipping(model, torch.empty((), device="cuda"), 1.0)
        zclip.apply_in_place_clipping(model, 2.0, 1.0)


def test_every_clipper(clipper):
    with fake_cuda():
        params = fake_parameters(SHAPES)
        for loss in (None, torch.empty((), device="cuda")):
            norm = clipper.step(params, loss=loss)
        results = (norm, *clipper.norms_by_name().values(), *_tensors(clipper.state_dict()))
        assert all(t.device.type == "cuda" for t in results)
        params[0].grad = None
        clipper.step(params)
        clipper.reset()


@pytest.mark.parametrize("rule", reference.IDS)
def test_every_rule_as_the_reference_computes_it(rule):
    """Fakes of our own operators compute nothing, so here the real code sees fake tensors."""
    clipper = clipper_of(rule)
    clipper.operators = lambda: (reference.rule_, reference.clip_by_)
    with fake_cuda():
        params = fake_parameters(SHAPES)
        for _ in range(2):
            clipper.step(params, loss=torch.empty((), device="cuda"))
            clipper.decide(params)


def test_a_python_rule_as_it_runs_on_a_device():
    clipper = zclip.PythonRule(twice_the_average, state_size=1)
    clipper.operators = lambda: (reference.rule_, reference.clip_by_)
    with fake_cuda():
        params = fake_parameters(SHAPES)
        for _ in range(2):
            clipper.step(params)
            clipper.decide(params)


def test_a_python_rule_that_reads_a_value_is_noticed():
    clipper = zclip.PythonRule(lambda stats, state: stats[:, 0].sum() if stats[0, 0] > 1 else state)
    clipper.operators = lambda: (reference.rule_, reference.clip_by_)
    with fake_cuda(), pytest.raises(WAITS):
        clipper.step(fake_parameters(SHAPES))


def test_agc_as_the_reference_computes_it():
    with fake_cuda():
        params = fake_parameters(SHAPES[:3])
        state = torch.empty(3, device="cuda", dtype=torch.float64)
        reference.agc_([p.grad for p in params], list(params), state, 0.01, 1e-3, 0)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_wrapper(clipper, make_optimizer, pinned):
    with fake_cuda():
        params = fake_parameters(SHAPES)
        inner = make_optimizer([{"params": params[:2]}, {"params": params[2:]}])
        optimizer = zclip.ClippedOptimizer(inner, clipper)
        optimizer.lr_scale = 0.5
        for _ in range(3):
            optimizer.step(loss=torch.empty((), device="cuda"))
        assert optimizer.result.verdict.device.type == "cuda"
    assert pinned.count("pinned") == len(pinned)


@pytest.mark.parametrize("name", ["GlobalNorm", "ZClip", "SpikeSkip", "AutoClip"])
def test_the_wrapper_that_folds_the_clip_into_the_step(name, pinned):
    with fake_cuda() as mode:
        inner = OPTIMIZERS["AdamW"](fake_parameters(SHAPES))
        optimizer = zclip.ClippedOptimizer(inner, CLIPPERS[name](), apply="grad_scale")
        optimizer.step()
    assert "zclip::grad_stats" in mode.ops
    assert "zclip::scale_" not in mode.ops


@pytest.mark.parametrize("apply", ["inplace", "grad_scale"])
def test_the_wrapper_under_a_grad_scaler(apply, pinned):
    with fake_cuda():
        inner = OPTIMIZERS["AdamW"](fake_parameters(SHAPES))
        optimizer = zclip.ClippedOptimizer(inner, zclip.ZClip(), apply=apply)
        optimizer.grad_scale = torch.empty((), device="cuda")  # as GradScaler.step does
        optimizer.found_inf = torch.empty((), device="cuda")
        optimizer.step()


def test_sgd_with_dampening_is_the_documented_exception(pinned):
    with fake_cuda():
        inner = torch.optim.SGD(fake_parameters(SHAPES), momentum=0.9, dampening=0.5, fused=True)
        optimizer = zclip.ClippedOptimizer(inner, zclip.ZClip())
        with pytest.raises(WAITS):
            optimizer.step()


def test_an_optimizer_that_is_not_fused_is_the_documented_exception(pinned):
    with fake_cuda():
        inner = torch.optim.AdamW(fake_parameters(SHAPES), foreach=True)
        optimizer = zclip.ClippedOptimizer(inner, zclip.ZClip())
        with pytest.raises(WAITS), pytest.warns(UserWarning, match="fused=True"):
            optimizer.step()


LEAKS = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t.sum()),
    "bool": lambda t: bool((t > 0).any()),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "to cpu": lambda t: t.to("cpu"),
    "blocking upload": lambda t: t.mul_(torch.ones(4).to("cuda")),
    "blocking copy_": lambda t: torch.empty(4).copy_(t),
    "mask": lambda t: t[t > 0],
    "nonzero": lambda t: t.nonzero(),
    "equal": lambda t: torch.equal(t, t),
    "unique": lambda t: t.unique(),
    "repeat_interleave": lambda t: t.repeat_interleave(t.long()),
    "torch's own check": lambda t: _clip_with_check(t),
}


FUSED = {
    "AdamW": lambda groups, **more: zclip.optim.AdamW(groups, amsgrad=True, **more),
    "SGD": lambda groups, **more: zclip.optim.SGD(groups, momentum=0.9, dampening=0.1, **more),
    "Lion": lambda groups, **more: zclip.optim.Lion(groups, stochastic_rounding=True, **more),
}


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("clipper", [None, "zclip", "adagc", "agc"])
def test_a_fused_step(make, clipper):
    with fake_cuda():
        optimizer = make(fake_parameters(SHAPES), clipper=clipper)
        for _ in range(2):
            optimizer.grad_scale = torch.empty((), device="cuda")
            optimizer.found_inf = torch.empty((), device="cuda")
            optimizer.step()
        assert optimizer.result.rows.device.type == "cuda"
        assert optimizer.result.weight_norm.device.type == "cuda"


def test_a_fused_step_whose_rate_is_on_the_device():
    with fake_cuda():
        params = fake_parameters(SHAPES)
        optimizer = zclip.optim.AdamW(params, lr=1e-3, capturable=True)
        optimizer.param_groups[0]["lr"] = torch.empty((), device="cuda")
        optimizer.step()


@pytest.mark.parametrize("algorithm", [layout.ADAM, layout.SGD, layout.LION])
def test_an_update_as_the_reference_computes_it(algorithm):
    with fake_cuda():
        one = [torch.empty(5, device="cuda") for _ in range(5)]
        lists = [[tensor] for tensor in one]
        steps = [torch.empty((), device="cuda")]
        ledger = torch.empty(1, layout.NUM_LEDGER, dtype=torch.int64, device="cuda")
        coefs = torch.empty(1, dtype=torch.float64, device="cuda")
        blocked = torch.empty((), device="cuda")
        rates = torch.empty(0, dtype=torch.float64, device="cuda")
        settings = [0.1, 0.9, 0.9, 1e-8, 0.1, float(layout.STOCHASTIC)]
        numbers = (ledger, coefs, blocked, blocked, rates, algorithm, [1], settings, 3, True, 0)
        rows, summary = reference.optim_update_(*lists, steps, *numbers)
        assert rows.device.type == summary.device.type == "cuda"


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_the_guard_notices_a_leak(leak):
    with fake_cuda(), pytest.raises(WAITS):
        leak(torch.empty(4, device="cuda"))


def test_the_guard_lets_pass_what_does_not_wait():
    with fake_cuda():
        value = torch.empty(4, device="cuda")
        torch.empty(4).copy_(value, non_blocking=True)
        torch.empty(4).to("cuda", non_blocking=True)
        torch.where(value > 0, value, 0.0).sum().sqrt()


# Functions that read values on purpose, and say so in their docstrings.
MAY_WAIT = {
    # Registered for CPU tensors only, whose values are in host memory.
    "zclip/backends/foreach.py": {"zero_nonfinite_", "_measure", "_multiply_", "_is_zero"},
    "zclip/backends/triton/table.py": {"__init__"},  # of tables that are still on the host
    "zclip/backends/triton/fingerprint.py": {"_cut_into_parts"},  # a table on the host
    "zclip/backends/triton/launch.py": {"bits_of"},  # of a Python float
    "zclip/parallel/placement.py": {"ranks_of"},  # of a mesh, on the host, once
    "zclip/functional.py": {"_raise_if_nonfinite"},
    "zclip/mailbox.py": {"poll"},
    "zclip/verdict_ring.py": {"poll"},
    "zclip/optim/clipped.py": {"step_if_allowed", "_waiting_step", "was_skipped"},
    "zclip/optim/fused.py": {"_settings", "_step_natively"},  # numbers of groups; CPU tensors
    "zclip/optim/adam.py": {"settings_of"},  # this and the next: numbers of groups
    "zclip/optim/sgd.py": {"settings_of"},
    "zclip/optim/lion.py": {"settings_of"},
    "zclip/optim/result.py": {"_named"},
    "zclip/reference/optim_update.py": {"_update"},  # a setting
    "zclip/clippers/clipper.py": {"worst"},
    "zclip/clippers/adagc.py": {"steps_accepted"},
    "zclip/clippers/zscore.py": {
        "_read",
        "buffer",
        "_compute_grad_norm",
        "_compute_clip_val",
        "_clip_at_once",
    },
}
OFF_THE_STEP_PATH = ("zclip/bench", "zclip/info.py")
WAITING_CALLS = {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero", "masked_select"}
WAITING_BUILTINS = {"float", "bool", "int"}
WAITING_CUDA = re.compile(
    r"\b(cuda(Device|Stream|Event)Synchronize|cudaMemcpy|cudaMalloc|cudaFree|\.item\s*[<(])"
)


def _waiting_lines(path):
    """Calls, outside of the allowed functions, that would wait if their argument is a tensor."""
    allowed = MAY_WAIT.get(str(path.relative_to(ROOT)), set())
    found = []

    def visit(node, names):
        if isinstance(node, ast.FunctionDef):
            names = [*names, node.name]
        if isinstance(node, ast.Call) and not allowed & set(names):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr in WAITING_CALLS:
                found.append((node.lineno, ast.unparse(node)))
            # On numbers these are harmless; on an element of a tensor they wait.
            if isinstance(called, ast.Name) and called.id in WAITING_BUILTINS:
                subscripts = [x for a in node.args for x in ast.walk(a)]
                if any(isinstance(x, ast.Subscript) for x in subscripts):
                    found.append((node.lineno, ast.unparse(node)))
        for child in ast.iter_child_nodes(node):
            visit(child, names)

    visit(ast.parse(path.read_text()), [])
    return found


def _python_sources():
    paths = sorted((ROOT / "zclip").rglob("*.py"))
    return [p for p in paths if not str(p.relative_to(ROOT)).startswith(OFF_THE_STEP_PATH)]


def test_no_python_source_waits_outside_of_the_documented_functions():
    assert {str(p): found for p in _python_sources() if (found := _waiting_lines(p))} == {}


def test_the_allowed_functions_exist():
    for path, names in MAY_WAIT.items():
        tree = ast.parse((ROOT / path).read_text())
        defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        assert names <= defined, path


def test_the_source_check_notices_a_leak(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    source = tmp_path / "leak.py"
    source.write_text("def f(t):\n    float(t[0])\n    return t.item()\n")
    assert [line for line, _ in _waiting_lines(source)] == [2, 3]


def test_no_native_source_waits():
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}]
    assert sources
    found = {str(p): m.group() for p in sources if (m := WAITING_CUDA.search(p.read_text()))}
    assert found == {}


def _tensors(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [t for child in children for t in _tensors(child)]


def _clip_with_check(tensor):
    param = torch.nn.Parameter(torch.empty_like(tensor))
    param.grad = tensor
    torch.nn.utils.clip_grad_norm_([param], 1.0, error_if_nonfinite=True)


FORKING = """
import torch
from tests.fake_cuda import fake_cuda
from tests.forked import run_forked

def train():
    torch.ones((), requires_grad=True).backward()

with fake_cuda():
    pass
train()
assert run_forked(train) == 0
"""


def test_a_forked_child_can_train_beside_the_fake_device():
    """In a process of its own: it depends on what was the first backward pass."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def one_stream(monkeypatch):
    """A stream for a device that has none."""
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "the stream")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)


def _backward(params):
    """Call what a backward pass calls as gradients become final."""
    for param in reversed(params):
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            hook(param)


FREE = ("profiler::", "prim::", "aten::slice", "aten::select", "aten::empty", "aten::view")
MANY = [(1024, 1024)] * 12 + [(64,)] * 3  # 4 MiB each, of which four make a batch


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", sorted(set(CLIPPERS) - {"AGC"}))
def test_clipping_what_was_measured_during_backward(name, one_stream):
    with fake_cuda():
        params = fake_parameters(MANY)
        clipper = CLIPPERS[name]()
        with clipper.attach(params) as handle:
            for grad_scale in (None, torch.empty((), device="cuda")):
                _backward(params)
                clipper.step(params, grad_scale=grad_scale)
                assert (handle.early, handle.late) == (12, 3)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_launches_of_a_step_whose_gradients_were_measured_during_backward(one_stream):
    """Each operator but those of FREE is one launch."""
    with fake_cuda() as guard:
        params = fake_parameters(MANY)
        optimizer = zclip.optim.AdamW(params, clipper="zclip")
        with optimizer.clipper.attach(params):
            for _ in range(2):  # the first makes plans and the order of rows
                guard.ops.clear()
                _backward(params)
                in_backward = [op for op in guard.ops if not op.startswith(FREE)]
                guard.ops.clear()
                optimizer.step()
                in_step = [op for op in guard.ops if not op.startswith(FREE)]
    assert in_backward == ["zclip::grad_stats"] * 3
    rows = ["zclip::grad_stats", "aten::cat", "aten::index_select"]  # of small ones; put in order
    assert in_step == [*rows, "zclip::rule_", "aten::clone", "zclip::optim_update_"]


def test_a_step_in_backward_does_not_wait(one_stream):
    with fake_cuda() as guard:
        params = fake_parameters(MANY)
        named = [(f"p{i}", param) for i, param in enumerate(params)]
        clipper = zclip.AdaGC(warmup_steps=0)
        optimizer = zclip.optim.step_in_backward(named, zclip.optim.AdamW, clipper)
        for _ in range(2):
            for param in params:
                param.grad = torch.empty_like(param)
            guard.ops.clear()
            _backward(params)
            launched = [op for op in guard.ops if not op.startswith(FREE)]
            assert all(param.grad is None for param in params)
            optimizer.step()
        assert optimizer.result.taken.device.type == "cuda"
    assert launched == ["zclip::decide_by_", "zclip::optim_update_"] * len(params)


def test_a_fused_step_on_a_device_is_two_operators():
    """Each of them is one launch; views and empty memory are none."""
    with fake_cuda() as guard:
        optimizer = zclip.optim.AdamW(fake_parameters(SHAPES[:3]), clipper="zclip")
        optimizer.step()
        guard.ops.clear()
        optimizer.step()
        free = ("profiler::", "prim::", "aten::slice", "aten::empty")
        computing = [op for op in guard.ops if not op.startswith(free)]
    assert computing == ["zclip::decide_by_", "zclip::optim_update_"]
