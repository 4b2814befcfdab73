"""A fused optimizer on many ranks takes the step that one process takes on the whole model."""

import math

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

import zclip
from tests.parallel.layouts import CountCollectives, gradients, layouts, same_on_all_ranks
from tests.parallel.registry import check

OPTIMIZERS = {
    "AdamW": lambda params, **more: zclip.optim.AdamW(params, lr=1e-2, **more),
    "SGD": lambda params, **more: zclip.optim.SGD(params, lr=1e-2, momentum=0.9, **more),
}
CLIPPERS = {
    "zclip": lambda: zclip.ZClip(warmup_steps=2),
    "adagc": lambda: zclip.AdaGC(warmup_steps=2),
    "global_norm": lambda: zclip.GlobalNorm(0.5),
}


def _whole(layout):
    """The whole model, with the weights that the parts have."""
    return [Parameter(t.clone()) for t in gradients(seed=99)][: len(layout.total)]


def _set_params(layout, whole):
    for param, piece in zip(
        layout.local_params(), layout.pieces([p.detach() for p in whole]), strict=True
    ):
        param.copy_(piece)


@check()
def a_fused_step_is_that_of_the_whole():
    for name, make_layout in layouts().items():
        for make in OPTIMIZERS.values():
            for make_clipper in CLIPPERS.values():
                layout = make_layout()
                whole = _whole(layout)
                _set_params(layout, whole)
                alone = make(whole, clipper=make_clipper())
                clipper = make_clipper().distribute(**layout.groups)
                together = make(layout.params, clipper=clipper)
                for step in range(4):
                    grads = gradients(seed=step, size=20.0 if step == 3 else 1.0)
                    layout.set_grads(grads)
                    for param, grad in zip(whole, grads, strict=True):
                        param.grad = grad.clone()
                    alone.step()
                    with CountCollectives() as counted:
                        together.step()
                    assert len(counted.names) == layout.collectives, (name, counted.names)
                    assert float(together.result.health_flags) == 0.0, name
                expected = layout.pieces([p.detach() for p in whole])
                for ours, wanted in zip(layout.local_params(), expected, strict=True):
                    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6, msg=name)
                assert same_on_all_ranks(together.result.clip.verdict), name


@check()
def a_bad_element_on_one_rank_skips_the_step_on_all():
    for name, make_layout in layouts().items():
        layout = make_layout()
        if not layout.collectives:
            continue
        together = zclip.optim.AdamW(
            layout.params, clipper=zclip.GlobalNorm(1.0).distribute(**layout.groups)
        )
        layout.set_grads(gradients(seed=0))
        together.step()
        before = [p.clone() for p in layout.local_params()]
        if dist.get_rank() == dist.get_world_size() - 1:
            for grad in layout.local_grads():
                if grad.numel():
                    grad.view(-1)[0] = math.nan
        together.step()
        assert float(together.result.taken) == 0.0, name
        assert all(map(torch.equal, before, layout.local_params())), name


@check()
def fsdp2_trains_and_saves_as_one_process_does():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))

    sharded, plain = model(), model()
    fully_shard(sharded[0])
    fully_shard(sharded)
    ours = zclip.optim.AdamW(sharded.parameters(), lr=1e-2, clipper="global_norm", max_norm=0.1)
    alone = zclip.optim.AdamW(plain.parameters(), lr=1e-2, clipper="global_norm", max_norm=0.1)
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for net, optimizer in ((sharded, ours), (plain, alone)):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    for ours_p, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours_p, DTensor)
        torch.testing.assert_close(ours_p.full_tensor(), theirs.detach(), rtol=1e-5, atol=1e-6)
    state = get_optimizer_state_dict(sharded, ours)
    assert isinstance(state["state"]["0.weight"]["exp_avg"], DTensor)
    assert float(ours.result.health_flags) == 0.0
