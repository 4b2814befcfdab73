"""The norm of the whole, and what it does to the pieces."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import Parameter

import zclip
from tests.parallel.layouts import (
    CountCollectives,
    fsdp,
    gradients,
    layouts,
    mesh_of,
    same_on_all_ranks,
    spread,
)
from tests.parallel.registry import check

RTOL = {torch.float32: 1e-6, torch.float64: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of clipped gradients: the library's own bound, or one rounding of the dtype. Norms: 1e-6."""


def _exact_norm(tensors, norm_type):
    flat = torch.cat([t.double().reshape(-1) for t in tensors])
    return torch.linalg.vector_norm(flat, norm_type).item()


def _compare(name, dtype, norm_type):
    layout = layouts()[name](dtype)
    exact = _exact_norm(layout.total, norm_type)
    before = [p.clone() for p in layout.local_params()]
    zclip.clip_grad_norm_(layout.params, math.inf, norm_type, **layout.groups)  # agrees on groups
    assert all(map(torch.equal, layout.local_grads(), layout.pieces(layout.total))), name
    with CountCollectives() as counted:
        norm = zclip.clip_grad_norm_(layout.params, exact / 2, norm_type, **layout.groups)
    assert len(counted.names) == layout.collectives, (name, counted.names)
    torch.testing.assert_close(norm.item(), exact, rtol=1e-6, atol=0, msg=name)
    assert same_on_all_ranks(norm), name
    wanted = layout.pieces([t.double() * 0.5 for t in layout.total])
    for got, want in zip(layout.local_grads(), wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=RTOL[dtype], atol=1e-12)
    assert all(map(torch.equal, before, layout.local_params()))


@check()
def norms_and_clipped_gradients_equal_those_of_one_process():
    for name in layouts():
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            _compare(name, dtype, 2.0)


@check()
def other_norms_too():
    for name in layouts():
        for norm_type in (1.0, 3.0, math.inf):
            _compare(name, torch.float32, norm_type)


@check()
def the_norm_does_not_hang_on_the_partition():
    norms = {}
    for name, make in layouts().items():
        layout = make(torch.bfloat16)
        norms[name] = zclip.clip_grad_norm_(layout.params, math.inf, **layout.groups).item()
    low, high = min(norms.values()), max(norms.values())
    assert high - low <= 1e-6 * high, norms


@check()
def what_is_within_the_limit_stays_untouched():
    for make in layouts().values():
        layout = make()
        before = [g.clone() for g in layout.local_grads()]
        zclip.clip_grad_norm_(layout.params, 1e6, **layout.groups)
        assert all(map(torch.equal, before, layout.local_grads()))


@check()
def ranks_without_gradients_still_come():
    layout = fsdp()
    whole = _exact_norm(layout.total, 2.0)
    if dist.get_rank() == 0:
        lost = sum(g.double().square().sum().item() for g in layout.local_grads())
        for param in layout.params:
            param.grad = None
    else:
        lost = 0.0
    missing = torch.tensor(lost, dtype=torch.float64)
    dist.all_reduce(missing)
    norm = zclip.clip_grad_norm_(layout.params, 1.0)
    expected = math.sqrt(whole**2 - missing.item())
    torch.testing.assert_close(norm.item(), expected, rtol=1e-6, atol=0)
    assert same_on_all_ranks(norm)


@check()
def no_rank_has_gradients():
    layout = fsdp()
    for param in layout.params:
        param.grad = None
    assert zclip.clip_grad_norm_(layout.params, 1.0).item() == 0.0


@check()
def partial_gradients_are_refused_by_name():
    mesh = mesh_of((dist.get_world_size(),), ("dp",))
    param = Parameter(spread(torch.ones(4, 2), mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.ones(4, 2), mesh, [Partial()])
    for clip in (
        lambda: zclip.clip_grad_norm_([("layer.weight", param)], 1.0),
        lambda: zclip.clip_grad_value_([("layer.weight", param)], 1.0),
        lambda: zclip.ZClip().step([("layer.weight", param)]),
    ):
        with pytest.raises(TypeError, match=r"layer\.weight.*Partial"):
            clip()
    with pytest.raises(TypeError, match="Partial"):
        zclip.get_total_norm([param.grad])


@check()
def gradients_placed_unlike_their_parameter_are_refused():
    mesh = mesh_of((dist.get_world_size(),), ("dp",))
    param = Parameter(spread(torch.ones(4, 2), mesh, [Shard(0)]))
    param.grad = spread(torch.ones(4, 2), mesh, [Shard(1)])
    with pytest.raises(TypeError, match="expected the placement of its parameter"):
        zclip.clip_grad_norm_([param], 1.0)


@check()
def a_group_that_leaves_out_a_rank_is_refused():
    layout = fsdp()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with pytest.raises(ValueError, match="expected all ranks of a parameter"):
        zclip.clip_grad_norm_(layout.params, 1.0, process_group=alone)


@check()
def every_mode_for_nonfinite_gradients():
    last = dist.get_world_size() - 1
    for make in layouts().values():
        for mode in ("skip", "zero", "propagate", "error"):
            layout = make()
            layout.params = [p for p in layout.params if p.grad is not None]
            local = [g for g in layout.local_grads() if g.numel()]
            if dist.get_rank() == last and local:
                local[0].reshape(-1)[-1] = math.nan
            if mode == "error":
                before = [g.clone() for g in layout.local_grads()]
                if layout.collectives == 0 and dist.get_rank() != last:
                    continue  # replicas that differ are no layout: only one rank sees it
                with pytest.raises(RuntimeError, match="NaN"):
                    zclip.clip_grad_norm_(layout.params, 1.0, nonfinite=mode, **layout.groups)
                pairs = zip(layout.local_grads(), before, strict=True)
                assert all(a.equal(b) or b.isnan().any() for a, b in pairs)
                continue
            norm = zclip.clip_grad_norm_(layout.params, 1.0, nonfinite=mode, **layout.groups)
            if layout.collectives == 0:
                continue
            assert norm.isnan() if mode != "zero" else norm.isfinite()
            if mode == "skip":
                assert all((g == 0).all() for g in layout.local_grads())
            if mode == "zero":
                assert all(g.isfinite().all() for g in layout.local_grads())


@check()
def values_are_clamped_with_no_message():
    layout = fsdp()
    with CountCollectives() as counted:
        zclip.clip_grad_value_(layout.params, 0.5)
    assert counted.names == []
    wanted = layout.pieces([t.clamp(-0.5, 0.5) for t in layout.total])
    assert all(map(torch.equal, layout.local_grads(), wanted))


@check()
def the_total_norm_of_distributed_tensors():
    layout = fsdp()
    norm = zclip.get_total_norm([p.grad for p in layout.params])
    exact = _exact_norm(layout.total, 2.0)
    torch.testing.assert_close(norm.item(), exact, rtol=1e-6, atol=0)
    huge = gradients(size=1e19)
    layout.set_grads(huge)  # squares overflow float32: torch's own norm would be Inf
    norm = zclip.get_total_norm([p.grad for p in layout.params])
    torch.testing.assert_close(norm.item(), _exact_norm(huge, 2.0), rtol=1e-6, atol=0)
