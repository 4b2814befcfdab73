"""What zclip offers to those who take a step in two halves, as heal does."""

import ast
import math
from pathlib import Path

import pytest
import torch

import zclip
from tests.models import make_model, set_norms
from zclip.layout import BLOCKED

ROOT = Path(__file__).parent.parent


def make(clipper=None, **settings):
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return list(model.parameters()), zclip.wrap(inner, clipper or zclip.GlobalNorm(1.0), **settings)


def test_two_halves_are_a_step():
    (params, whole), (twins, halves) = make(lag=0), make(lag=0)
    for seed in range(4):
        for group in (params, twins):
            set_norms(group, [seed + 1.0] * len(group))
        if seed == 2:
            params[0].grad[0] = twins[0].grad[0] = math.nan
        whole.step()
        result = halves.clip()
        halves.step_if_allowed(result)
        assert halves.was_skipped(result.verdict.tolist()) == (seed == 2)
        assert halves.skips(result.verdict).item() == (seed == 2)
        for one, two in zip(params, twins, strict=True):
            assert torch.equal(one, two)
    assert whole.steps == halves.steps == 4
    assert whole.metrics()["zclip/total_skips"] == 1
    assert halves.metrics() == {}  # the first half posts nothing: whoever takes both does


def test_between_the_halves_others_may_object():
    params, optimizer = make()
    set_norms(params, [1.0] * len(params))
    before = [p.detach().clone() for p in params]
    result = optimizer.clip()
    result.verdict[BLOCKED] = 1.0
    optimizer.step_if_allowed(result)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_without_gradients_there_is_no_result():
    params, optimizer = make()
    for param in params:
        param.grad = None
    assert optimizer.clip() is None


@pytest.mark.parametrize(("skip_nonfinite", "skipped"), [(True, 1), (False, 0)])
def test_flags_count_where_the_clipper_lets_bad_steps_pass(skip_nonfinite, skipped):
    clipper = zclip.GlobalNorm(1.0, on_nonfinite="official")
    params, optimizer = make(clipper, skip_nonfinite=skip_nonfinite)
    set_norms(params, [1.0] * len(params))
    params[0].grad[0] = math.inf
    result = optimizer.clip()
    assert optimizer.skips(result.verdict).item() == skipped
    assert optimizer.was_skipped(result.verdict.tolist()) == bool(skipped)


def test_a_clipper_knows_names_and_ranks():
    params, optimizer = make()
    names = [f"layer{i}" for i in range(len(params))]
    optimizer.learn_names(zip(names, params, strict=True))
    set_norms(params, [1.0] * len(params))
    optimizer.step()
    assert optimizer.clipper.names == names
    params[1].grad = None
    optimizer.step()
    assert optimizer.clipper.names == [names[0], *names[2:]]
    assert optimizer.clipper.groups == (None, None, None)
    assert zclip.ZClip().names == []


HELD = ("clippers", "optim", "optimizer_proxy.py", "mailbox.py", "verdict_ring.py")
"""Where the classes are defined whose objects heal holds."""


def private_names_of_zclip(source):
    """Names with one underscore that these classes have and this source uses."""
    private = set()
    files = [p for name in HELD for p in sorted((ROOT / "zclip" / name).rglob("*.py"))]
    files += [ROOT / "zclip" / name for name in HELD if name.endswith(".py")]
    for path in files:
        for kind in ast.walk(ast.parse(path.read_text())):
            for node in ast.walk(kind) if isinstance(kind, ast.ClassDef) else ():
                if isinstance(node, ast.FunctionDef):
                    private.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    private.add(node.attr)
    private = {name for name in private if name.startswith("_") and not name.startswith("__")}
    private -= {"_make", "_replace"}  # of named tuples too
    tree = ast.parse(source)
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    }
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    imported = {
        alias.name
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("zclip")
        for alias in n.names
        if alias.name.startswith("_")
    }
    return (used & private) - own | imported


def test_heal_uses_no_private_name_of_zclip():
    found = {}
    for path in sorted((ROOT / "heal").rglob("*.py")):
        text = path.read_text()
        touches = "clipper" in text or "optimizer" in text or "zclip" in text
        names = private_names_of_zclip(text) if touches else set()
        if names:
            found[str(path.relative_to(ROOT))] = sorted(names)
    assert found == {}


def test_the_check_notices_a_private_name():
    assert private_names_of_zclip("clipper._state.states") == {"_state"}
    assert private_names_of_zclip("from zclip.ops import _measure") == {"_measure"}
