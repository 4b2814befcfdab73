"""clip_grad_norm_ on DTensors beside torch's own: one packed all-reduce against one per mesh.

torchrun --standalone --nproc-per-node 2 benchmarks/bench_parallel.py

Calls of both alternate in one run; medians, on the slowest rank. The norms are checked against
float64. Where torch's call would take more than its share of a run, it is left out and said so.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

import zclip

GPT2_BLOCK = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072)]
CASES = {
    "gpt2-block": GPT2_BLOCK,
    "100-small": [(64, 16)] * 100,
    "1000-small": [(64, 16)] * 1000,
    "3000-small": [(64, 16)] * 3000,
    "10000-small": [(64, 16)] * 10_000,
}


def by_torch(params, limit):
    norm = torch.nn.utils.clip_grad_norm_(params, limit)
    return norm.full_tensor()  # until then no rank knows it


RIVALS = {"zclip": zclip.clip_grad_norm_, "torch": by_torch}


def spread(shapes, mesh):
    generator = torch.Generator().manual_seed(0)
    params, squares = [], 0.0
    for shape in shapes:
        grad = torch.randn(shape, generator=generator)
        squares += grad.double().square().sum().item()
        piece = distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
        params.append(Parameter(piece.detach().clone()))
        params[-1].grad = piece
    return params, squares**0.5


def seconds_of(call, params, limit, exact):
    dist.barrier()
    start = time.perf_counter()
    norm = call(params, limit)
    took = torch.tensor(time.perf_counter() - start)
    assert abs(norm.item() - exact) < 1e-4 * exact
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--most-seconds", type=float, default=30.0, help="for a call of torch's")
    settings = parser.parse_args()
    rounds, most_seconds = settings.rounds, settings.most_seconds
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if dist.get_rank() == 0:
        columns = f"{'zclip':>10} {'torch':>10} {'its first':>10} {'torch/zclip':>12}"
        print(f"{dist.get_world_size()} ranks; milliseconds, median of up to {rounds} calls")
        print(f"{'case':>14} {'tensors':>8} {columns}", flush=True)
    last, last_tensors = 0.0, 1
    for name, shapes in CASES.items():
        params, exact = spread(shapes, mesh)
        foreseen = last * len(shapes) / last_tensors  # at least: growth is not below linear
        rivals = {n: r for n, r in RIVALS.items() if n != "torch" or foreseen < most_seconds}
        first = {n: seconds_of(call, params, 1e30, exact) for n, call in rivals.items()}
        if "torch" in first and len(shapes) >= 100:  # with few, the call costs and not the list
            last, last_tensors = first["torch"], len(shapes)
        times = {n: [] for n in rivals}
        for _ in range(rounds):
            for rival, call in rivals.items():
                if sum(times[rival]) < most_seconds / 2:
                    times[rival].append(seconds_of(call, params, 1e30, exact))
        medians = {n: statistics.median(t) * 1e3 for n, t in times.items()}
        if dist.get_rank() == 0:
            shown = [f"{name:>14} {len(shapes):>8} {medians['zclip']:10.2f}"]
            if "torch" in medians:
                shown.append(f"{medians['torch']:10.2f} {first['torch'] * 1e3:10.2f}")
                shown.append(f"{medians['torch'] / medians['zclip']:12.1f}")
            else:
                shown.append(f"  left out: its first call would take {foreseen:.0f} s or more")
            print(*shown, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
