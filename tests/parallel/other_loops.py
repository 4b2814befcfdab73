"""Other people's loops on many ranks."""

import copy
import math

import pytest
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


@check(2, 3)
def fsdp1_is_handed_over_as_it_is():
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    def wrapped(module, **how):
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(module, device_id=cpu, **how)

    for keeps_names in (False, True):
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            how = {"use_orig_params": keeps_names, "sharding_strategy": ShardingStrategy[strategy]}
            torch.manual_seed(0)
            layers = [torch.nn.Linear(FEATURES, 7), torch.nn.Linear(7, 3)]
            alone = torch.nn.Sequential(*(copy.deepcopy(layer) for layer in layers))
            inner = wrapped(layers[0], **how)
            model = wrapped(torch.nn.Sequential(inner, layers[1]), **how)
            clippers = zclip.ZClip(warmup_steps=2), zclip.ZClip(warmup_steps=2)
            for step, size in enumerate((1.0, 1.0, 1.1, 30.0)):
                batch = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(step))
                for module in (model, alone):
                    module.zero_grad()
                    (module(batch) * size).square().mean().backward()
                got, want = clippers[0].step(model), clippers[1].step(alone)
                torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
                results = [clipper.result.clipped_norm for clipper in clippers]
                torch.testing.assert_close(*results, rtol=1e-5, atol=0)
                clipped = model.clip_grad_norm_(float("inf"))  # FSDP1's own norm of what is left
                torch.testing.assert_close(clipped, results[1], rtol=1e-5, atol=0)
            assert same_on_all_ranks(clippers[0].result.verdict)
            if dist.get_rank() == 0:
                grad = next(p.grad for p in model.parameters() if p.grad is not None)
                grad.view(-1)[0] = float("nan")
            elif strategy == "NO_SHARD":
                continue  # replicas are equal, by contract
            clippers[0].step(model)
            refused = clippers[0].result.blocked
            assert refused.item() == 1
            assert strategy == "NO_SHARD" or same_on_all_ranks(refused)


@check(2)
def fsdp1_beside_whole_tensors_is_refused_by_name():
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    model = torch.nn.Sequential(sharded, torch.nn.Linear(4, 2))
    with pytest.raises(NotImplementedError, match=r"some that are whole: .*1\.weight"):
        zclip.ZClip().step(model)


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
