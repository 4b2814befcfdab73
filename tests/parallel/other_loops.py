"""Other people's loops on many ranks."""

import torch
import torch.distributed as dist

import zclip
from tests.parallel.layouts import CountCollectives, same_on_all_ranks
from tests.parallel.registry import check

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
