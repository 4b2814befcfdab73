"""Gradients measured in backward on many ranks: the bits of measuring them after it."""

import contextlib
import copy
import functools
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zclip
from tests.parallel.registry import check

WIDE = 256
STEPS = 3


class Net(nn.Module):
    def __init__(self, width=WIDE):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.second = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        self.seldom = nn.Linear(width, width)
        self.never = nn.Linear(width, 3)

    def forward(self, x, seldom=False):
        x = self.second(torch.tanh(self.first(x)))
        return self.seldom(x) if seldom else x


def backward(model, step, seldom=False):
    """Every rank has other data."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    width = next(iter(model.parameters())).shape[1]
    x = torch.randn(4, width, generator=generator)
    (model(x, seldom=seldom).square().mean() * (50.0 if step == 2 else 1.0)).backward()


def accumulate(model, step):
    with model.no_sync():
        backward(model, step + 10, seldom=True)
        backward(model, step + 20)
    backward(model, step)


def seldom(model, step):
    backward(model, step, seldom=step == 1)


def uneven(model, step):
    backward(model, step, seldom=dist.get_rank() == 0)


def change(model, step):
    backward(model, step)
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None and param.dim() > 1:
                param.grad.mul_(2.0)


def keep_an_old_gradient(model, step):
    """DDP leaves alone the gradient of a parameter that no rank uses."""
    if step == 1:
        weight = model.module.seldom.weight
        weight.grad = torch.full_like(weight, 1.0 + dist.get_rank())
    backward(model, step)


def unscale(model, step):
    backward(model, step, seldom=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


SCENARIOS = (backward, accumulate, seldom, uneven, change, keep_an_old_gradient)
CLIPPERS = {
    "zclip": functools.partial(zclip.ZClip, warmup_steps=1, max_grad_norm=0.05),
    "adagc": functools.partial(zclip.AdaGC, warmup_steps=1),
}


def own_memory_hook(state, bucket):
    """A hook whose answer is not the bucket, but a new tensor of another dtype."""
    future = torch.futures.Future()
    mean = bucket.buffer().double()
    dist.all_reduce(mean)
    future.set_result(mean / dist.get_world_size())
    return future


def bits(tensor):
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.detach().reshape(-1).clone().view(torch.uint8)


class Loop:
    def __init__(self, model, clipper):
        self.model, self.clipper = model, clipper
        self.inner = torch.optim.SGD(model.parameters(), lr=0.1)
        self.zero_grad = self.inner.zero_grad

    def step(self):
        self.clipper.step(self.model)
        self.inner.step()


OPTIMIZERS = {
    "loop": Loop,
    "fused": lambda model, clipper: zclip.optim.AdamW(model.parameters(), clipper=clipper),
}


def trace(model, clipper, make, scenario, attach=None, set_to_none=True):
    optimizer = make(model, clipper)
    handle = attach(clipper, model) if attach else None
    seen, early = [], 0
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        scenario(model, step)
        optimizer.step()
        result = clipper.result
        seen += [bits(t) for t in (result.total_norm, result.stats, result.coefs, result.verdict)]
        for param in model.parameters():
            seen.append(bits(param))
            if param.grad is not None:
                seen.append(bits(param.grad))
        early += handle.early if handle else 0
    if handle:
        handle.detach()
    return seen, early


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def compare(make_model, scenario, comm_hook=None, name="zclip", make=Loop, **more):
    """Train the same model twice, and return how many gradients were measured early."""
    plain = make_model()
    if comm_hook is not None:
        plain.register_comm_hook(*comm_hook)
    expected, _ = trace(plain, CLIPPERS[name](), make, scenario, **more)

    def attach(clipper, model):
        return clipper.attach(model, comm_hook=comm_hook)

    got, early = trace(make_model(), CLIPPERS[name](), make, scenario, attach, **more)
    assert same(expected, got), (scenario.__name__, comm_hook, name, more)
    return early


def replicated(**settings):
    return DistributedDataParallel(Net(), bucket_cap_mb=0.5, **settings)


@check(2)
def buckets_are_measured_after_the_all_reduce():
    for views in (False, True):
        make = functools.partial(
            replicated, gradient_as_bucket_view=views, find_unused_parameters=True
        )
        for scenario in SCENARIOS:
            for set_to_none in (True, False):
                early = compare(make, scenario, set_to_none=set_to_none)
                if scenario is not change:
                    assert early > 0, scenario.__name__


def bf16_hook(state, bucket):
    """Compress to bfloat16; under torch's own name DDP accepts it with NCCL only."""
    return bf16_compress_hook(state, bucket)


@check(2)
def compression_hooks_work_as_before():
    for views in (False, True):
        make = functools.partial(
            replicated, gradient_as_bucket_view=views, find_unused_parameters=True
        )
        for hook in (fp16_compress_hook, bf16_hook, allreduce_hook):
            assert compare(make, accumulate, comm_hook=(None, hook)) > 0
        assert compare(make, accumulate, comm_hook=("state", own_memory_hook)) == 0


@check(2)
def a_static_graph_and_a_fused_optimizer():
    class Used(Net):
        def __init__(self):
            super().__init__()
            del self.never, self.seldom

    def make():
        return DistributedDataParallel(Used(), bucket_cap_mb=0.5, static_graph=True)

    for optimizer in OPTIMIZERS.values():
        assert compare(make, backward, name="adagc", make=optimizer) > 0


@check(3, 4, slow=True)
def buckets_in_larger_worlds():
    """The mean over three ranks rounds: the hook has to divide as DDP does."""
    make = functools.partial(replicated, find_unused_parameters=True)
    for scenario in SCENARIOS:
        compare(make, scenario)


@check(2)
def random_trials_with_buckets():
    _trials(range(20))


@check(2, 4, slow=True)
def two_hundred_random_trials():
    _trials(range(150))
    for seed in range(50):
        draw = random.Random(seed)
        compare(
            sharded,
            draw.choice(SHARD_SCENARIOS),
            name=draw.choice(list(CLIPPERS)),
            make=draw.choice(list(OPTIMIZERS.values())),
            set_to_none=draw.choice([False, True]),
        )


def _trials(seeds):
    for seed in seeds:
        draw = random.Random(seed)
        make = functools.partial(
            replicated,
            gradient_as_bucket_view=draw.choice([False, True]),
            find_unused_parameters=True,
        )
        compare(
            make,
            draw.choice(SCENARIOS),
            comm_hook=draw.choice([None, (None, fp16_compress_hook)]),
            name=draw.choice(list(CLIPPERS)),
            make=draw.choice(list(OPTIMIZERS.values())),
            set_to_none=draw.choice([False, True]),
        )


@check(2)
def a_detached_replica_trains_as_one_that_was_never_attached():
    make = functools.partial(replicated, find_unused_parameters=True)
    expected, _ = trace(make(), CLIPPERS["zclip"](), Loop, accumulate)
    model = make()
    first = CLIPPERS["zclip"]().attach(model)
    first.detach()
    got, _ = trace(model, CLIPPERS["zclip"](), Loop, accumulate)
    assert same(expected, got)
    again = CLIPPERS["zclip"]().attach(model)  # the hook that is there serves again
    backward(model, 0)
    again.detach()


@check(2)
def a_backward_that_fails_on_every_rank_leaves_no_row_behind():
    def fail(_):
        raise ZeroDivisionError

    plain, model = replicated(), replicated()
    for candidate in (plain, model):
        del candidate.module.never, candidate.module.seldom
    plain, model = (
        DistributedDataParallel(candidate.module, bucket_cap_mb=0.1) for candidate in (plain, model)
    )
    clippers = [CLIPPERS["zclip"](), CLIPPERS["zclip"]()]
    handle = clippers[1].attach(model)
    for candidate in (plain, model):
        failing = candidate.module.first.weight.register_hook(fail)
        with contextlib.suppress(ZeroDivisionError):
            backward(candidate, 5)
        failing.remove()
    for candidate, clipper in zip((plain, model), clippers, strict=True):
        clipper.step(candidate)  # of what there is: some gradients were not added up yet
    assert same(*[[bits(clipper.result.stats)] for clipper in clippers])
    handle.detach()


@check(2)
def what_cannot_be_measured_early_says_so():
    clipper = zclip.ZClip()
    for target in (Net(), list(Net().parameters())):
        with pytest.raises(ValueError, match="expected DistributedDataParallel or fully_shard"):
            clipper.attach(target)
    taken = replicated()
    taken.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match=r"comm_hook=\(state, hook\)"):
        clipper.attach(taken)


def sharded(**settings):
    model = Net(1024)
    del model.never
    for part in (model.first, model.second, model.seldom):
        fully_shard(part, **settings)
    return fully_shard(model, **settings)


def accumulate_shards(model, step):
    model.set_requires_gradient_sync(False)
    backward(model, step + 10, seldom=True)
    model.set_requires_gradient_sync(True)
    backward(model, step, seldom=True)


def accumulate_reduced(model, step):
    backward(model, step + 10)
    backward(model, step, seldom=True)


SHARD_SCENARIOS = (
    backward,
    seldom,
    change,
    unscale,
    accumulate_shards,
    accumulate_reduced,
)


@check(2)
def shards_are_measured_after_the_reduce_scatter():
    for scenario in SHARD_SCENARIOS:
        for name, make in (("zclip", Loop), ("adagc", OPTIMIZERS["fused"])):
            early = compare(sharded, scenario, name=name, make=make)
            if scenario not in (change, unscale):
                assert early > 0, scenario.__name__


@check(4, slow=True)
def shards_in_larger_worlds():
    for scenario in (backward, accumulate_shards):
        compare(sharded, scenario, name="adagc", make=OPTIMIZERS["fused"])


@check(2)
def detaching_shards_leaves_no_hook():
    model = sharded()
    twin = copy.copy(list(model.parameters()))
    clipper = zclip.ZClip()
    clipper.attach(model).detach()
    assert all(param._post_accumulate_grad_hooks is None for param in twin)
