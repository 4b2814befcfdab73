"""Nothing waits on many ranks either: fake CUDA tensors, and a process group that does nothing."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

import zclip
from tests.fake_cuda import WAITS, fake_cuda
from tests.test_no_sync import CLIPPERS, pinned  # noqa: F401
from zclip.parallel import reduce_record
from zclip.parallel.placement import ranks_of

SIZE, RANK = 4, 1  # neither the first rank nor a power of itself


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=SIZE)
    made = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    for part in (made, made["dp"], made["tp"]):
        ranks_of(part)  # on the host, once per mesh; fake tensors cannot be asked for it
    yield made
    dist.destroy_process_group()


def _parameters(mesh):
    """Shards in two dimensions, replicas, a smaller mesh, and a plain tensor among them."""

    def spread(shape, mesh, placements):
        local = torch.empty(shape, device="cuda")
        return DTensor.from_local(local, mesh, placements, run_check=False)

    hows = [
        ((4, 3), mesh, [Shard(0), Shard(1)]),
        ((4, 3), mesh, [Replicate(), Shard(0)]),
        ((5,), mesh["dp"], [Shard(0)]),
        ((0, 2), mesh["dp"], [Shard(0)]),
    ]
    params = []
    for how in hows:
        params.append(Parameter(spread(*how)))
        params[-1].grad = spread(*how)
    params.append(Parameter(torch.empty(3, device="cuda")))
    params[-1].grad = torch.empty(3, device="cuda")
    return params


@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "zero"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm_(mesh, norm_type, nonfinite):
    with fake_cuda() as mode:
        params = _parameters(mesh)
        norm = zclip.clip_grad_norm_(params, 1.0, norm_type, nonfinite=nonfinite)
        assert norm.device.type == "cuda"
        zclip.get_total_norm([p.grad for p in params])
        zclip.clip_grad_value_(params, 1.0)
    assert mode.ops.count("c10d::allreduce_") == 2


@pytest.mark.parametrize("name", CLIPPERS)
def test_every_clipper(mesh, name):
    with fake_cuda() as mode:
        params = _parameters(mesh)
        clipper = CLIPPERS[name]()
        extra = torch.zeros(2, device="cuda", dtype=torch.float64)
        for _ in range(2):
            clipper.step(params, loss=torch.empty((), device="cuda"), extra=extra)
        assert clipper.result.extra.device.type == "cuda"
    assert mode.ops.count("c10d::allreduce_") == 2


def test_a_record_alone(mesh):
    with fake_cuda() as mode:
        record = reduce_record(torch.empty((), device="cuda"), tag=torch.zeros((), device="cuda"))
        assert record.loss.device.type == "cuda"
    assert mode.ops.count("c10d::allreduce_") == 1


def test_the_wrapper(mesh, pinned):  # noqa: F811
    with fake_cuda() as mode:
        groups = [{"params": [p]} for p in _parameters(mesh)]
        optimizer = zclip.wrap(torch.optim.AdamW(groups, fused=True), "zclip")
        for _ in range(3):
            optimizer.step(loss=torch.empty((), device="cuda"))
    assert mode.ops.count("c10d::allreduce_") == 3


def test_the_guard_sees_through_a_distributed_tensor(mesh):
    with fake_cuda():
        param = _parameters(mesh)[0]
        with pytest.raises(WAITS):
            float(param.grad.to_local().sum())
