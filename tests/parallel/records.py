"""What only one rank knows reaches all, in the same message: losses, lanes, step tags."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.nn import Parameter

import zclip
from tests.parallel.layouts import (
    CountCollectives,
    fsdp,
    layouts,
    mesh_of,
    replicated,
    same_on_all_ranks,
    spread,
)
from tests.parallel.registry import check
from zclip.layout import BLOCKED, DESYNC, FLAGS, LOSS, LOSS_NAN, STEPS, TAG_MODULUS
from zclip.parallel import reduce_record


def _lanes():
    """Told to stop: the last rank. Short of memory: all but the first."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    return torch.tensor([float(rank == last), float(rank > 0), 0.0], dtype=torch.float64)


@check()
def extra_lanes_travel_with_the_norm():
    size = dist.get_world_size()
    for name, make in layouts().items():
        layout = make()
        clipper = zclip.ZClip().distribute(**layout.groups)
        clipper.bind(layout.params)
        with CountCollectives() as counted:
            clipper.step(layout.params, extra=_lanes())
        assert len(counted.names) == layout.collectives
        extra = clipper.result.extra
        if layout.collectives == 0:
            assert torch.equal(extra, _lanes()), "no message, so the lanes are our own"
            continue
        assert extra.tolist() == [1.0, size - 1.0, 0.0], name


@check()
def under_ddp_the_record_costs_one_message():
    size, rank = dist.get_world_size(), dist.get_rank()
    layout = replicated()
    inner = torch.optim.AdamW(layout.params, fused=True)
    optimizer = zclip.wrap(
        inner, zclip.SpikeSkip(window=4, min_count=2), record_group=dist.group.WORLD
    )
    for step in range(3):
        layout.set_grads(layout.total)
        with CountCollectives() as counted:
            optimizer.step(loss=torch.tensor(float(rank + step)), extra=_lanes())
        assert counted.names == ["c10d::allreduce_"]
        assert optimizer.result.extra.tolist() == [1.0, size - 1.0, 0.0]
        assert optimizer.result.verdict[LOSS] == (size - 1) / 2 + step
        assert same_on_all_ranks(optimizer.result.verdict)
    for param in layout.params:
        param.grad = None
    with CountCollectives() as counted:  # no gradients: the others must not wait for us
        optimizer.step(loss=torch.tensor(1.0), extra=_lanes())
    assert len(counted.names) == 1


@check()
def a_nan_loss_on_one_rank_is_everyones():
    for make in (fsdp, replicated):
        layout = make()
        clipper = zclip.SpikeSkip().distribute(record_group=dist.group.WORLD)
        loss = torch.tensor(math.nan if dist.get_rank() == 0 else 1.0)
        with CountCollectives() as counted:
            clipper.step(layout.params, loss=loss)
        assert len(counted.names) == 1  # with the norm if that is reduced, else alone
        assert clipper.result.verdict[BLOCKED] == 1
        assert int(clipper.result.verdict[FLAGS]) & LOSS_NAN


@check()
def only_the_ranks_that_have_a_loss_count():
    layout = layouts()["pipeline"]()
    clipper = zclip.SpikeSkip().distribute(**layout.groups)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    clipper.step(layout.params, loss=torch.tensor(7.0) if is_last else torch.empty(0))
    assert clipper.result.verdict[LOSS] == 7.0


@check(4)
def a_record_wider_than_the_norm_has_a_message_of_its_own():
    mesh = mesh_of((2, 2), ("dp", "tp"))["tp"]
    whole = torch.ones(4, 4)
    sharded, plain = Parameter(spread(whole, mesh, [Shard(0)])), Parameter(whole.clone())
    sharded.grad, plain.grad = spread(whole, mesh, [Shard(0)]), whole.clone()
    clipper = zclip.GlobalNorm(1e6).distribute(record_group=dist.group.WORLD)
    clipper.step([sharded, plain], extra=_lanes())
    with CountCollectives() as counted:
        norm = clipper.step([sharded, plain], extra=_lanes())
    assert len(counted.names) == 2
    assert clipper.result.extra.tolist() == [1.0, 3.0, 0.0]
    torch.testing.assert_close(norm.item(), math.sqrt(32), rtol=1e-6, atol=0)


@check()
def ranks_at_different_steps_are_told():
    for name, make in layouts().items():
        layout = make()
        record = {} if layout.collectives else {"record_group": dist.group.WORLD}
        clipper = zclip.ZClip().distribute(**layout.groups, **record)
        for _ in range(3):
            clipper.step(layout.params)
            assert not int(clipper.result.verdict[FLAGS]) & DESYNC, name
        if dist.get_rank() == 1:
            clipper._state.states[0][STEPS] += 1
        clipper.step(layout.params)
        assert int(clipper.result.verdict[FLAGS]) & DESYNC, name
        assert same_on_all_ranks(clipper.result.verdict[FLAGS])


@check()
def tags_are_compared_exactly_up_to_large_steps():
    for step in (0, 1, TAG_MODULUS - 1, TAG_MODULUS, 10**9):
        for apart in (0, 1):
            mine = step + (apart if dist.get_rank() == 0 else 0)
            record = reduce_record(tag=torch.tensor(float(mine), dtype=torch.float64))
            assert bool(record.desynced) == bool(apart), step


@check()
def a_record_alone():
    record = reduce_record(loss=torch.tensor(2.0 + dist.get_rank()), extra=_lanes())
    assert record.loss == 2.0 + (dist.get_world_size() - 1) / 2
    assert record.extra.tolist() == [1.0, dist.get_world_size() - 1.0, 0.0]
    assert reduce_record(extra=_lanes()).loss is None
    with pytest.raises(ValueError, match="one dimension"):
        reduce_record(extra=torch.zeros(()))
