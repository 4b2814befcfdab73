"""Every operator, whatever it computes: declared once, registered everywhere, traceable."""

import pytest
import torch
from torch.library import opcheck
from torch.utils._pytree import tree_leaves

from tests.grads import make_grads
from zclip import layout, reference
from zclip.backends import OPS


def arguments():
    grads = make_grads([(3, 4), (70,), (0,)])
    stats = torch.tensor([[9.0, 0, 0], [16.0, 0, 0], [0.0, 0, 0]], dtype=torch.float64)
    state = torch.zeros(layout.NUM_COUNTERS, dtype=torch.float64)
    return rule_arguments(grads, stats) | {
        "grad_stats": (grads,),
        "power_stats": (grads, 3.0),
        "global_norm_": (state, stats, 1.0, layout.SKIP),
        "scale_": (grads, torch.full((3,), 0.5, dtype=torch.float64)),
        "zero_nonfinite_": (grads, stats),
        "clamp_": (grads, 0.1),
        "clip_by_global_norm_": (grads, state, 1.0, layout.ZERO),
        "agc_": (grads, make_grads([(3, 4), (70,), (0,)], seed=1), state, 0.01, 1e-3, 0),
        "watch_loss_": (fresh(8), torch.tensor(2.0), torch.zeros(14), 3.0, 5, 0.99, 10),
        "copy_and_hash_": (fresh_like(grads), grads),
        "fingerprint": ([*grads, torch.arange(3), torch.ones(2, dtype=torch.bool)],),
    }


def fresh_like(tensors):
    return [torch.zeros_like(t) for t in tensors]


def fresh(size):
    return torch.zeros(size, dtype=torch.float64)


def rule_arguments(grads, stats):
    """Each adaptive rule's two operators, by their names."""
    rules = {
        "zclip_": (fresh(8), 0.97, 2.5, 1.0, 1e-6, 2, 0, 1.0, False, False, 0),
        "adagc_": (fresh(6), 1.04, 0.99, 1.0, 1e-6, 2, 0, 0),
        "spike_skip_": (fresh(5 + 2 * 4), torch.tensor(2.0), 4, 6.0, 2, 0),
        "auto_clip_": (fresh(4 + 10), 10.0, 10, 0),
    }
    alone = {name: (state, stats, *rest) for name, (state, *rest) in rules.items()}
    fused = {f"clip_by_{name}": (grads, state, *rest) for name, (state, *rest) in rules.items()}
    return alone | fused


def test_every_operator_has_arguments_here():
    assert set(arguments()) == set(OPS) - {"read_probe"}


@pytest.mark.parametrize("name", arguments())
def test_opcheck_passes(name):
    opcheck(getattr(torch.ops.zclip, name).default, arguments()[name])


@pytest.mark.parametrize("mode", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", arguments())
def test_it_compiles_as_one_graph_and_computes_the_same(name, mode):
    op = getattr(torch.ops.zclip, name).default
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
