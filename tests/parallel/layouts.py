"""The ways to spread a model over ranks, and the same model in one piece to compare with.

A layout is a list of parameters with gradients. Values come from one seed, so that every rank can
also hold the whole, and a layout never has to be gathered to be judged.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

# Rows that do not divide by 2, 3 or 4, fewer rows than ranks, one row, a vector and a scalar-like.
SHAPES = [(7, 5), (5, 6), (2, 3), (1, 4), (9,), (1,), (12, 8)]


@dataclass
class Layout:
    """Parameters as this rank holds them, and the whole."""

    params: list[Parameter]
    whole: list[torch.Tensor]  # the full gradient of each parameter, in one piece
    collectives: int = 1
    groups: dict[str, Any] = field(default_factory=dict)  # arguments of distribute()
    total: list[torch.Tensor] | None = None  # all gradients of the model; None: those of whole
    offset: int = 0  # where ours begin in total

    def __post_init__(self):
        self.total = self.whole if self.total is None else self.total

    def set_grads(self, total) -> None:
        """Give the parameters their pieces of these gradients, one per tensor of the model."""
        self.total = total
        self.whole = total[self.offset : self.offset + len(self.params)]
        for param, grad in zip(self.params, self.whole, strict=True):
            param.grad = spread_like(grad, param)

    def pieces(self, total) -> list[torch.Tensor]:
        """What this rank should hold of the tensors of a model."""
        ours = total[self.offset : self.offset + len(self.params)]
        return [_local(spread_like(t, p)) for t, p in zip(ours, self.params, strict=True)]

    def local_grads(self) -> list[torch.Tensor]:
        return [_local(p.grad) for p in self.params]

    def local_params(self) -> list[torch.Tensor]:
        return [_local(p.detach()) for p in self.params]


def spread_like(whole, param):
    """Spread a tensor as a parameter is; no messages."""
    if isinstance(param, DTensor):
        return spread(whole, param.device_mesh, param.placements)
    part = getattr(param, "part", None)  # plain, but a part of the whole by the test's own making
    return whole.clone() if part is None else whole.reshape(-1)[part].clone()


def spread(whole, mesh, placements):
    if mesh.get_coordinate() is None:  # not in the mesh: an empty local tensor, as torch has it
        shape, stride = whole.shape, whole.stride()
        return DTensor.from_local(
            whole.new_empty(0), mesh, placements, run_check=False, shape=shape, stride=stride
        )
    return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(seed=0, dtype=torch.float32, shapes=SHAPES, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(s, generator=generator) * size).to(dtype) for s in shapes]


def _layout(meshes_and_placements, dtype, **settings) -> Layout:
    """Parameters spread as said, in turn; None stands for a plain replicated tensor."""
    whole = gradients(dtype=dtype)
    params = []
    for i, tensor in enumerate(whole):
        how = meshes_and_placements[i % len(meshes_and_placements)]
        fits = how is not None and all(
            not isinstance(p, Shard) or p.dim < tensor.dim() for p in how[1]
        )
        if how is None:
            params.append(Parameter(tensor.clone()))
        else:
            mesh, placements = how
            if not fits:  # a vector has no second dimension to shard
                placements = [Shard(0) if isinstance(p, Shard) else p for p in placements]
            params.append(Parameter(spread(tensor, mesh, placements)))
    layout = Layout(params, whole, **settings)
    layout.set_grads(whole)
    return layout


_meshes: dict[tuple, DeviceMesh] = {}


def mesh_of(shape, names):
    """Meshes are kept: making one makes process groups."""
    key = (tuple(shape), tuple(names))
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[key]


def _ranks_mesh(ranks):
    key = ("ranks", *ranks)
    if key not in _meshes:
        _meshes[key] = DeviceMesh("cpu", list(ranks))
    return _meshes[key]


def _groups_of(lists):
    """Make a group for each list of ranks, on all ranks; return ours."""
    key = ("groups", *map(tuple, lists))
    if key not in _meshes:
        made = [dist.new_group(ranks) for ranks in lists]
        mine = [g for g, r in zip(made, lists, strict=True) if dist.get_rank() in r]
        _meshes[key] = mine[0]
    return _meshes[key]


def replicated(dtype=torch.float32):
    return _layout([None], dtype, collectives=0)


def fsdp(dtype=torch.float32):
    return _layout([(mesh_of((dist.get_world_size(),), ("dp",)), [Shard(0)])], dtype)


def tensor_parallel(dtype=torch.float32):
    """Column and row parallel in turn, and replicated DTensors between them."""
    mesh = mesh_of((dist.get_world_size(),), ("tp",))
    return _layout([(mesh, [Shard(0)]), (mesh, [Shard(1)]), (mesh, [Replicate()])], dtype)


def beside_plain(dtype=torch.float32):
    return _layout([(mesh_of((dist.get_world_size(),), ("dp",)), [Shard(0)]), None], dtype)


def hsdp(dtype=torch.float32):
    mesh = mesh_of((2, dist.get_world_size() // 2), ("replicate", "shard"))
    return _layout([(mesh, [Replicate(), Shard(0)])], dtype)


def fsdp_and_tp(dtype=torch.float32):
    """Two-dimensional shards; and tensors that only data parallelism shards, as norms are."""
    mesh = mesh_of((2, dist.get_world_size() // 2), ("dp", "tp"))
    both = [(mesh, [Shard(0), Shard(0)]), (mesh, [Shard(0), Shard(1)])]
    return _layout([*both, (mesh["dp"], [Shard(0)]), (mesh, [Shard(0), Replicate()])], dtype)


def experts_beside_fsdp(dtype=torch.float32):
    """Two meshes over the same ranks: experts on one, all else on the other."""
    size = dist.get_world_size()
    dp, experts = mesh_of((size,), ("dp",)), mesh_of((2, size // 2), ("efsdp", "ep"))
    return _layout([(dp, [Shard(0)]), (experts, [Shard(0), Shard(0)])], dtype)


def crossing_meshes(dtype=torch.float32):
    """Neither mesh holds the other: rows here, columns there, each repeated over the other."""
    mesh = mesh_of((2, dist.get_world_size() // 2), ("rows", "columns"))
    return _layout([(mesh["rows"], [Shard(0)]), (mesh["columns"], [Shard(0)])], dtype)


def disjoint_meshes(dtype=torch.float32):
    """Every rank lists every tensor, but holds something of those of its own mesh only."""
    half = dist.get_world_size() // 2
    first, second = range(half), range(half, dist.get_world_size())
    return _layout([(_ranks_mesh(first), [Shard(0)]), (_ranks_mesh(second), [Shard(0)])], dtype)


def flat_parts(dtype=torch.float32):
    """Plain tensors of which each rank holds some elements, as ZeRO and FSDP1 have them."""
    whole = gradients(dtype=dtype)
    size, rank = dist.get_world_size(), dist.get_rank()
    params = []
    for tensor in whole:
        bounds = [tensor.numel() * i // size for i in range(size + 1)]
        part = slice(bounds[rank], bounds[rank + 1])
        param = Parameter(tensor.reshape(-1)[part].clone())
        param.part = part
        params.append(param)
    layout = Layout(params, whole, groups={"process_group": dist.group.WORLD})
    layout.set_grads(whole)
    return layout


def pipeline(dtype=torch.float32):
    """Every rank is a stage with tensors of its own, the last with fewest."""
    total = gradients(dtype=dtype)
    size, rank = dist.get_world_size(), dist.get_rank()
    step = -(-len(total) // size)
    mine = total[rank * step : (rank + 1) * step]
    params = [Parameter(t.clone()) for t in mine]
    groups = {"pipeline_group": dist.group.WORLD}
    layout = Layout(params, mine, 1, groups, total, rank * step)
    layout.set_grads(total)
    return layout


def pipeline_of_fsdp(dtype=torch.float32):
    """Two stages, each sharded over half of the ranks: one all-reduce in the stage, one along."""
    total = gradients(dtype=dtype)
    half = dist.get_world_size() // 2
    stage = dist.get_rank() // half
    start = 4 * stage
    mine = total[:4] if stage == 0 else total[4:]
    for ranks in (range(half), range(half, 2 * half)):  # made by all ranks
        mesh = _ranks_mesh(ranks)
        if dist.get_rank() in ranks:
            ours = mesh
    params = [Parameter(spread(t, ours, [Shard(0)])) for t in mine]
    along = _groups_of([[i, i + half] for i in range(half)])
    layout = Layout(params, mine, 2, {"pipeline_group": along}, total, start)
    layout.set_grads(total)
    return layout


LAYOUTS = {
    "replicated": (replicated, (2, 3, 4)),
    "fsdp": (fsdp, (2, 3, 4)),
    "tensor_parallel": (tensor_parallel, (2, 3, 4)),
    "beside_plain": (beside_plain, (2, 3, 4)),
    "flat_parts": (flat_parts, (2, 3, 4)),
    "pipeline": (pipeline, (2, 3, 4)),
    "hsdp": (hsdp, (2, 4)),
    "fsdp_and_tp": (fsdp_and_tp, (2, 4)),
    "experts_beside_fsdp": (experts_beside_fsdp, (2, 4)),
    "crossing_meshes": (crossing_meshes, (2, 4)),
    "disjoint_meshes": (disjoint_meshes, (2, 4)),
    "pipeline_of_fsdp": (pipeline_of_fsdp, (4,)),
}


def layouts():
    """Return the layouts that a world of this size can have, by name."""
    return {n: make for n, (make, sizes) in LAYOUTS.items() if dist.get_world_size() in sizes}


class CountCollectives(TorchDispatchMode):
    """Counts the messages between ranks, whoever sends them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def same_on_all_ranks(*tensors) -> bool:
    """Return whether the bits are the same everywhere."""
    flat = torch.cat([t.detach().double().reshape(-1) for t in tensors])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    bits = flat.view(torch.int64)
    return all(torch.equal(other.view(torch.int64), bits) for other in everyone)
