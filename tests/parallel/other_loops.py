"""Other people's loops on many ranks."""

import copy
import math

import torch
import torch.distributed as dist

import zclip
from tests.parallel.layouts import CountCollectives, same_on_all_ranks
from tests.parallel.registry import check
from zclip.layout import NORM

FEATURES = 5


@check(2, 3, needs="accelerate")
def accelerate_prepares_the_wrapper():
    from accelerate import Accelerator
    from torch.nn.parallel import DistributedDataParallel

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, 3, dtype=torch.float64)
    alone = torch.nn.Linear(FEATURES, 3, dtype=torch.float64)
    alone.load_state_dict(model.state_dict())
    optimizers = [
        zclip.wrap(torch.optim.AdamW(m.parameters(), fused=True), zclip.ZClip(warmup_steps=2))
        for m in (model, alone)
    ]
    model, prepared = accelerator.prepare(model, optimizers[0])
    assert isinstance(model, DistributedDataParallel)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(12, FEATURES, dtype=torch.float64, generator=generator)
        mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
        accelerator.backward(model(mine).square().mean())
        with CountCollectives() as counted:
            prepared.step()
        assert counted.names == []
        prepared.zero_grad()
        alone(batch).square().mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        verdicts = [optimizer.result.verdict for optimizer in optimizers]
        torch.testing.assert_close(*verdicts, rtol=1e-6, atol=1e-6)
        assert same_on_all_ranks(verdicts[0])
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


@check(2, 3, needs="accelerate")
def accelerate_shards_the_wrapper():
    """FSDP2 as accelerate does it, which exchanges the parameters of an optimizer it was given."""
    from accelerate.state import AcceleratorState
    from torch.distributed.tensor import DTensor

    layers = torch.nn.Linear(FEATURES, 8), torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(*layers).double()
    alone = copy.deepcopy(model)
    optimizers = [
        zclip.wrap(torch.optim.AdamW(m.parameters(), fused=True), zclip.ZClip(warmup_steps=2))
        for m in (model, alone)
    ]
    accelerator = fsdp2_accelerator()
    try:
        model, prepared = accelerator.prepare(model, optimizers[0])
        assert all(isinstance(p, DTensor) for p in model.parameters())
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(12, FEATURES, dtype=torch.float64, generator=generator)
            batch[0, 0] = math.nan if step == 3 else 1.0  # on the first rank only
            mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
            accelerator.backward(model(mine).square().mean())
            with CountCollectives() as counted:
                prepared.step()
            assert len(counted.names) == 1
            prepared.zero_grad()
            alone(batch).square().mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            norms = [optimizer.result.verdict[NORM] for optimizer in optimizers]
            torch.testing.assert_close(*norms, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert optimizers[0].metrics()["zclip/total_skips"] == 1
        for got, want in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-6, atol=1e-9)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def fsdp2_accelerator():
    """An accelerator that shards on the CPU.

    accelerate 1.15 looks at the plugin only where there are GPUs or their like, and makes DDP of it
    on the CPU without a word. What it does with a sharded model works here too once it is told.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        reshard_after_forward=True,
    )
    assert accelerator.is_fsdp2
    return accelerator
