"""Every operator, whatever it computes: declared once, registered everywhere, traceable."""

import pytest
import torch
from torch.library import opcheck
from torch.utils._pytree import tree_leaves

from tests.grads import make_grads
from tests.rule_runs import clipper_of
from zclip import layout, reference
from zclip.backends import OPS


def arguments():
    grads = make_grads([(3, 4), (70,), (0,)])
    stats = torch.tensor([[9.0, 0, 0], [16.0, 0, 0], [0.0, 0, 0]], dtype=torch.float64)
    state = torch.zeros(layout.NUM_COUNTERS, dtype=torch.float64)
    return rule_arguments(grads, stats) | {
        "grad_stats": (grads,),
        "power_stats": (grads, 3.0),
        "scale_": (grads, torch.full((3,), 0.5, dtype=torch.float64)),
        "zero_nonfinite_": (grads, stats),
        "clamp_": (grads, 0.1),
        "agc_": (grads, make_grads([(3, 4), (70,), (0,)], seed=1), state, 0.01, 1e-3, 0),
        "watch_loss_": (fresh(8), torch.tensor(2.0), torch.zeros(14), 3.0, 5, 0.99, 10),
        "optim_update_": update_arguments(grads),
        "decide_by_": (grads, fresh(3), 0, [1.0, layout.SKIP]),
        "copy_and_hash_": (fresh_like(grads), grads),
        "fingerprint": ([*grads, torch.arange(3), torch.ones(2, dtype=torch.bool)],),
    }


def update_arguments(grads):
    """Of a step of AdamW."""
    params, ledger = make_grads([(3, 4), (70,), (0,)], seed=2), torch.zeros(3, 5, dtype=torch.int64)
    moments = fresh_like(grads), [torch.ones_like(g) for g in grads], []
    steps = [torch.zeros(()) for _ in grads]
    numbers = (fresh(3) + 0.5, torch.zeros(()), torch.ones(()), fresh(0))
    settings = [1e-3, 0.9, 0.99, 1e-8, 0.1, 2.0]
    return (
        params,
        grads,
        *moments,
        steps,
        ledger,
        *numbers,
        layout.ADAM,
        [3],
        settings,
        0,
        True,
        0,
    )


def fresh_like(tensors):
    return [torch.zeros_like(t) for t in tensors]


def fresh(size):
    return torch.zeros(size, dtype=torch.float64)


def rule_arguments(grads, stats):
    """The operators of rules, once for each rule: what its state, settings and loss are."""
    calls = {}
    for name, number in reference.IDS.items():
        clipper = clipper_of(name)
        state, settings = fresh(clipper.state_size(len(grads))), clipper.settings({})
        loss = torch.tensor(2.0) if clipper.watches_loss else None
        calls[f"rule_ {name}"] = (state, stats, number, settings, loss)
        calls[f"reference_rule_ {name}"] = (state, stats, number, settings, loss)
        calls[f"clip_by_ {name}"] = (grads, state, number, settings, loss)
    return calls


def operator_of(call):
    return getattr(torch.ops.zclip, call.split()[0]).default


def test_every_operator_has_arguments_here():
    called = {call.split()[0] for call in arguments()}
    assert called == set(OPS) - {"read_probe"} | {"reference_rule_"}


@pytest.mark.parametrize("name", arguments())
def test_opcheck_passes(name):
    opcheck(operator_of(name), arguments()[name])


@pytest.mark.parametrize("mode", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", arguments())
def test_it_compiles_as_one_graph_and_computes_the_same(name, mode):
    op = operator_of(name)
    torch.compiler.reset()  # all the lambdas are one piece of code to it
    compiled = torch.compile(lambda *args: op(*args), fullgraph=True, backend=mode)
    ours, plain = arguments()[name], arguments()[name]
    assert_same(compiled(*ours), op(*plain))
    assert_same(ours, plain)


def assert_same(got, want):
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", OPS)
def test_one_name_everywhere(name):
    assert callable(getattr(reference, name))
    for key in ("CPU", "CompositeExplicitAutograd"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"zclip::{name}", key)


@pytest.mark.parametrize("name", [n for n in OPS if n.endswith("_")])
def test_a_trailing_underscore_means_that_it_writes(name):
    assert getattr(torch.ops.zclip, name).default._schema.is_mutable


@pytest.mark.parametrize("name", [n for n in OPS if not n.endswith("_")])
def test_no_underscore_means_that_it_does_not(name):
    assert not getattr(torch.ops.zclip, name).default._schema.is_mutable
