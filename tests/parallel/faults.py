"""A bad element on one rank, one shard, one replica: all refuse the step, and nothing changes."""

import math

import torch
import torch.distributed as dist

import zclip
from tests.parallel.layouts import CountCollectives, gradients, layouts, same_on_all_ranks
from tests.parallel.registry import check
from zclip.layout import BLOCKED, FLAGS, HAS_INF, HAS_NAN, NORM, SKIPS

BAD = ((math.nan, HAS_NAN), (math.inf, HAS_INF), (-math.inf, HAS_INF))


def optimizer_for(layout, clipper="zclip", **settings):
    """Fused AdamW, one group per tensor: torch's kernels refuse to mix meshes."""
    groups = [{"params": [p]} for p in layout.params]
    inner = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    return zclip.wrap(inner, clipper, **settings, **layout.groups)


def poison(layout, rank, value) -> bool:
    """Put a bad value into the last piece that a rank holds; return whether it holds any."""
    pieces = [g for g in layout.local_grads() if g.numel()]
    if dist.get_rank() == rank and pieces:
        pieces[-1].reshape(-1)[-1] = value
    held = torch.tensor(float(bool(pieces)))
    dist.broadcast(held, rank)
    return bool(held)


def bits(layout, optimizer):
    """Copies of everything that a refused step must not change."""
    state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in state]
    return [t.clone() for t in (*layout.local_params(), *local)]


@check()
def a_bad_element_anywhere_stops_all():
    for name, make in layouts().items():
        layout = make()
        if layout.collectives == 0:
            continue  # replicas without a message are equal; DDP makes a NaN everyone's
        optimizer = optimizer_for(layout)
        optimizer.step()
        for rank in range(dist.get_world_size()):
            for value, flag in BAD if rank == 0 else BAD[:1]:
                layout.set_grads(gradients(seed=rank))
                if not poison(layout, rank, value):
                    continue
                before = bits(layout, optimizer)
                learned = [t.clone() for t in optimizer.clipper._state.states]
                with CountCollectives() as counted:
                    optimizer.step()
                assert len(counted.names) == layout.collectives, name
                verdict = optimizer.result.verdict
                assert verdict[BLOCKED] == 1, (name, rank)
                assert int(verdict[FLAGS]) & flag, (name, rank)
                assert not verdict[NORM].isfinite()
                assert same_on_all_ranks(verdict[verdict.isfinite()])
                assert all(map(torch.equal, before, bits(layout, optimizer))), (name, rank)
                assert torch.equal(learned[0][3:], optimizer.clipper._state.states[0][3:])
        skips = optimizer.result.verdict[SKIPS].clone()
        layout.set_grads(gradients(seed=9))
        before = layout.local_params()[0].clone()
        optimizer.step()
        assert optimizer.result.verdict[BLOCKED] == 0
        assert optimizer.result.verdict[SKIPS] == skips
        assert layout.local_params()[0].numel() == 0 or not before.equal(layout.local_params()[0])


@check()
def a_nan_on_one_rank_under_ddp_stops_all():
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = zclip.wrap(inner, "zclip")
    for step in range(6):
        before = [p.detach().clone() for p in model.parameters()]
        batch = torch.randn(4, 5)
        bad = step in (2, 4)
        if bad and dist.get_rank() == dist.get_world_size() - 1:
            batch[1, 2] = math.nan
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        with CountCollectives() as counted:
            optimizer.step()
        assert counted.names == []
        assert optimizer.result.verdict[BLOCKED] == bad
        unchanged = all(map(torch.equal, before, model.parameters()))
        assert unchanged == bad
        assert same_on_all_ranks(*model.parameters())


@check()
def the_clip_may_ride_on_the_fused_step():
    layout = layouts()["fsdp"]()
    folded, written = layouts()["fsdp"](), layouts()["fsdp"]()
    optimizers = [
        optimizer_for(folded, "global_norm", max_norm=0.1, apply="grad_scale"),
        optimizer_for(written, "global_norm", max_norm=0.1),
    ]
    for step in range(3):
        for layout, optimizer in zip((folded, written), optimizers, strict=True):
            layout.set_grads(gradients(seed=step))
            if step == 1:
                poison(layout, 0, math.nan)
            optimizer.step()
    for got, want in zip(folded.local_params(), written.local_params(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
