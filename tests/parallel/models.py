"""Real models through torch's own wrappers: the gradients come out of their backward passes."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import zclip
from tests.parallel.layouts import CountCollectives, mesh_of, same_on_all_ranks
from tests.parallel.registry import check

FEATURES, HIDDEN = 7, 12  # rows that do not divide; 12 do, as tensor parallelism wants
STEPS = 3


class Block(nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES, dtype=dtype)
        self.up = nn.Linear(FEATURES, HIDDEN, dtype=dtype)
        self.down = nn.Linear(HIDDEN, FEATURES, dtype=dtype)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tied(nn.Module):
    """The head is the embedding, as in many language models."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, HIDDEN, bias=False, dtype=torch.float64)
        self.head = nn.Linear(FEATURES, HIDDEN, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return torch.tanh(self.embed(x)) @ self.head.weight


def _stack():
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block())


def _shard(model, mesh):
    for block in model.children():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _parallelize(model, mesh):
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _train(model, params, shards, index):
    """Train on this shard of the batch, and return norms and the number of messages of clipping."""
    # Not fused: torch's fused SGD does not know DTensors. Adam would hide small differences.
    optimizer = zclip.wrap(torch.optim.SGD(params, lr=0.1), zclip.GlobalNorm(0.05))
    norms, messages = [], []
    clip = optimizer.clipper.step

    def counted(*args, **kwargs):
        with CountCollectives() as mode:
            norm = clip(*args, **kwargs)
        messages.append(len(mode.names))
        return norm

    optimizer.clipper.step = counted
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(12, FEATURES, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        model(batch.chunk(shards)[index]).square().mean().backward()
        optimizer.step()
        norms.append(optimizer.result.total_norm.clone())
    del optimizer.clipper.step
    return torch.stack(norms), messages


def _compare(model, wrapped, shards=1, index=0, messages=1, groups=None):
    reference = copy.deepcopy(model)
    wrapped = wrapped(model)
    params = groups(wrapped) if groups else list(wrapped.parameters())
    norms, counted = _train(wrapped, params, shards, index)
    wanted, _ = _train(reference, list(reference.parameters()), 1, 0)
    torch.testing.assert_close(norms, wanted, rtol=1e-6, atol=0)
    assert counted == [messages] * STEPS, counted
    assert same_on_all_ranks(norms)
    for got, want in zip(wrapped.parameters(), reference.parameters(), strict=True):
        full = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(full, want, rtol=1e-6, atol=1e-12)


def _by_mesh(model):
    """One group per mesh: torch's fused optimizers refuse to mix them."""
    groups = {}
    for param in model.parameters():
        groups.setdefault(getattr(param, "device_mesh", None), []).append(param)
    return [{"params": params} for params in groups.values()]


@check()
def ddp():
    size, rank = dist.get_world_size(), dist.get_rank()
    _compare(_stack(), DistributedDataParallel, size, rank, messages=0)


@check()
def fsdp2():
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of((size,), ("dp",))
    _compare(_stack(), lambda model: _shard(model, mesh), size, rank)


@check()
def fsdp2_with_tied_weights():
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of((size,), ("dp",))
    torch.manual_seed(1)
    _compare(Tied(), lambda model: fully_shard(model, mesh=mesh), size, rank)


@check(2, 4)
def hsdp2():
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of((2, size // 2), ("replicate", "shard"))
    _compare(_stack(), lambda model: _shard(model, mesh), size, rank)


@check()
def tensor_parallel_with_plain_norms():
    mesh = mesh_of((dist.get_world_size(),), ("tp",))
    _compare(_stack(), lambda model: _parallelize(model, mesh), groups=_by_mesh)


@check(4)
def fsdp2_of_tensor_parallel():
    mesh = mesh_of((2, 2), ("dp", "tp"))
    index = mesh["dp"].get_local_rank()
    shard = lambda model: _shard(_parallelize(model, mesh["tp"]), mesh["dp"])  # noqa: E731
    _compare(_stack(), shard, 2, index, groups=_by_mesh)


@check(4)
def ddp_of_tensor_parallel():
    """The norm is added up over the tensor-parallel ranks only: replicas have the same."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    _compare(_stack(), lambda model: _parallelize(model, mesh["tp"]), groups=_by_mesh)


@check()
def clipping_under_ddp_is_the_same_bit_by_bit_with_no_message():
    """Why no message is needed: gradients are equal, and equal bits give equal norms."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(Block(torch.float32), Block(torch.float32)))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    optimizer = zclip.wrap(inner, zclip.ZClip(warmup_steps=3))
    for step in range(20):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        batch = torch.randn(5, FEATURES, generator=generator) * (1 + 9 * (step % 7 == 6))
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        with CountCollectives() as mode:
            optimizer.step()
        assert mode.names == []
        grads = [p.grad for p in model.parameters()]
        assert same_on_all_ranks(optimizer.result.verdict, *grads)
    assert same_on_all_ranks(*optimizer.clipper._state.states, *model.parameters())
