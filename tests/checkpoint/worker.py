"""What one rank does in ``test_worlds.py``: rank, size, folder and names of checks on the line."""

import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from heal import Healer, HealingConfig, checkpoint
from heal.checkpoint import CheckpointStore, SaveFailed, saving
from heal.checkpoint.store import training_state
from heal.cluster.launch import RankGroup
from heal.dry_run import Origin
from heal.training_state import RngState

torch.set_num_threads(1)


def sharded(mesh, seed):
    """A model whose sizes no number of ranks divides."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3), nn.LayerNorm(3))
    model[0].bias.requires_grad_(False)
    model.register_buffer("scale", torch.rand(2))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer


def train(model, optimizer, steps, seed=0):
    for step in range(steps):
        torch.manual_seed(1000 * seed + step)
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model, optimizer):
    """Everything, put together from all ranks."""
    found = [p.full_tensor() for p in model.parameters()]
    for p in model.parameters():
        for value in optimizer.state[p].values():
            found.append(value.full_tensor() if hasattr(value, "full_tensor") else value)
    return [t.detach().clone() for t in (*found, *model.buffers())]


def assert_equal(first, second):
    assert len(first) == len(second)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(a, b), f"item {i}: {a} is not {b}"


def save(directory, step, model, optimizer, ranks):
    store = CheckpointStore(directory, ranks=ranks)
    return store.save_state(
        step, training_state(model, optimizer, None, None), {"rng": RngState.now()}
    )


def load(directory, model, optimizer, ranks):
    store = CheckpointStore(directory, ranks=ranks)
    restored = store.load_state(training_state(model, optimizer, None, None))
    assert restored is not None, store.notes
    restored.restore_rng(ranks.rank)
    return restored.step, store.notes


def check_resharding(rank, size, directory):
    """Four ranks save, two load and save, four load: every number stays what it was."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "pair"))
    flat = init_device_mesh("cpu", (4,))
    pair = RankGroup(mesh["pair"].get_group())
    everyone = RankGroup()
    model, optimizer = sharded(flat, seed=1)
    train(model, optimizer, 3)
    truth = whole(model, optimizer)
    save(directory / "four", 3, model, optimizer, everyone)

    model, optimizer = sharded(mesh["pair"], seed=2)  # each pair is a world of two
    assert load(directory / "four", model, optimizer, pair) == (3, [])
    assert_equal(whole(model, optimizer), truth)
    train(model, optimizer, 2, seed=1)  # the moments are of the right kind
    truth = whole(model, optimizer)
    own = directory / f"two-{rank // 2}"
    save(own, 5, model, optimizer, pair)
    dist.barrier()

    model, optimizer = sharded(flat, seed=3)
    assert load(directory / "two-1", model, optimizer, everyone) == (5, [])
    assert_equal(whole(model, optimizer), truth)
    train(model, optimizer, 1)
    model, optimizer = sharded(mesh, seed=4)  # HSDP: two copies of two shards each
    assert load(directory / "four", model, optimizer, everyone)[0] == 3
    path = save(directory / "hybrid", 3, model, optimizer, everyone)
    sizes = [p.stat().st_size for p in path.glob("*.safetensors")]
    single = [p.stat().st_size for p in (directory / "four" / "step-000003").glob("*.safetensors")]
    assert sum(sizes) < 1.3 * sum(single), "copies are written once"


def check_fallback(rank, size, directory):
    """A bit flips in the shard of one rank: all ranks go back to the checkpoint before."""
    mesh = init_device_mesh("cpu", (size,))
    model, optimizer = sharded(mesh, seed=1)
    train(model, optimizer, 1)
    truth = whole(model, optimizer)
    save(directory, 1, model, optimizer, RankGroup())
    train(model, optimizer, 2)
    path = save(directory, 3, model, optimizer, RankGroup())
    if rank == 0:
        shard = path / f"rank-{size - 1:05d}.safetensors"
        data = bytearray(shard.read_bytes())
        data[-2] ^= 16
        shard.write_bytes(data)
    dist.barrier()
    model, optimizer = sharded(mesh, seed=2)
    step, notes = load(directory, model, optimizer, RankGroup())
    assert step == 1
    assert_equal(whole(model, optimizer), truth)
    assert "step-000003" in notes[0], notes
    assert ("another rank" in notes[0]) == (rank != size - 1), notes


def check_replicas(rank, size, directory):
    """Under DDP the state is written once, by all together; each rank keeps its own generators."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(rank)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    path = checkpoint.save(directory, 1, model, optimizer, extra={"rank": rank})
    drawn = torch.rand(3)
    model.module[0].weight.data.zero_()
    torch.manual_seed(99)
    resumed = checkpoint.load(directory, model, optimizer)
    assert (resumed.step, resumed.extra) == (1, {"rank": rank})
    assert torch.equal(torch.rand(3), drawn)
    assert model.module[0].weight.abs().sum() > 0
    sizes = [p.stat().st_size for p in sorted(path.glob("*.safetensors"))]
    state_bytes = 3 * sum(p.nbytes for p in model.parameters())
    assert sum(sizes) < 1.5 * state_bytes, "replicas are written once"
    assert max(sizes) < 0.7 * state_bytes, "and the ranks share the work"
    alone = RankGroup()
    alone.rank, alone.size = 0, 1  # one process loads what several saved
    fresh = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    moments = torch.optim.AdamW(fresh.parameters())
    assert load(directory, fresh, moments, alone)[0] == 1
    assert torch.equal(fresh[1].weight, model.module[1].weight)


def check_failures(rank, size, directory):
    """What one rank cannot do, none does, and none waits for it."""
    model, optimizer = sharded(init_device_mesh("cpu", (size,)), seed=1)
    store = CheckpointStore(directory, wait_seconds=60)
    state = training_state(model, optimizer, None, None)
    began = time.monotonic()
    why = r"rank 1: CannotEncode: state\['odd'\]: expected .*, got a builtins\.object"
    with pytest.raises(SaveFailed, match=why):
        store.save_state(1, state, {"odd": object() if rank == 1 else 0})
    real = saving.write_shard

    def no_disk(*args):
        if rank == 1:
            raise OSError(28, "No space left on device")
        real(*args)

    saving.write_shard = no_disk
    with pytest.raises(SaveFailed, match="No space left" if rank == 1 else "rank 1 failed"):
        store.save_state(2, state, {})
    assert time.monotonic() - began < 50, "somebody waited"
    saving.write_shard = real
    real_free = saving.free_bytes

    def stale_mount(path):
        if rank == 1:
            raise OSError(116, "Stale file handle")
        return real_free(path)

    saving.free_bytes = stale_mount
    with pytest.raises(SaveFailed, match=r"rank 1: .* cannot be used: .*Stale file handle"):
        store.save_state(3, state, {})
    assert time.monotonic() - began < 50, "somebody waited"
    saving.free_bytes = real_free
    dist.barrier()
    store.save_state(3, state, {})
    dist.barrier()
    assert store.steps() == [3]


def check_thread(rank, size, directory):
    """Saves beside the training, on several ranks, are committed when all are done."""
    model, optimizer = sharded(init_device_mesh("cpu", (size,)), seed=1)
    store = CheckpointStore(directory, asynchronous=True, wait_seconds=60)
    state = training_state(model, optimizer, None, None)
    train(model, optimizer, 1)
    truth = whole(model, optimizer)
    store.save_state(1, state, {"rng": RngState.now()})
    train(model, optimizer, 2)
    store.close()
    dist.barrier()
    assert [r.error for r in store.finished_saves()] == [None]
    assert load(directory, model, optimizer, RankGroup())[0] == 1
    assert_equal(whole(model, optimizer), truth)


def check_healer(rank, size, directory):
    """Ranks that were killed go on bit by bit, also from the checkpoint before a damaged one."""
    data = TensorDataset(torch.randn(64, 5, generator=torch.Generator().manual_seed(7)))

    def healed(folder, seed):
        torch.manual_seed(seed)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.3)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        config = HealingConfig(checkpoint_interval=3, checkpoint_async=False)
        healer = Healer(model, optimizer, config=config, checkpoint_dir=folder, rank=rank)
        healer.exits.dismiss()
        torch.manual_seed(seed + rank)
        sampler = DistributedSampler(data, size, rank, seed=1)
        loader = DataLoader(data, batch_size=4, sampler=sampler)
        return healer, lambda b: model(b[0]).square().mean(), loader, model

    def finish(folder, seed, steps):
        healer, train_step, loader, model = healed(folder, seed)
        first = healer.resume()
        healer.run(train_step, loader, steps, progress=False)
        bits = [p.detach().clone() for p in model.parameters()]
        return first, [*bits, torch.get_rng_state()], healer.notes

    _, truth, _ = finish(directory / "whole", 0, 14)
    assert finish(directory / "cut", 0, 7)[0] == 0
    dist.barrier()
    if rank == 0:  # the end of a run is saved; take that away, as a crash would
        shutil.rmtree(directory / "cut" / "step-000007")
        shard = directory / "cut" / "step-000006" / "rank-00001.safetensors"
        data_bytes = bytearray(shard.read_bytes())
        data_bytes[-1] ^= 128
        shard.write_bytes(data_bytes)
    dist.barrier()
    first, bits, notes = finish(directory / "cut", 9, 14)
    assert first == 3, "step 6 is damaged on one rank"
    assert any("step-000006" in note for note in notes), notes
    assert_equal(bits, truth)


def check_recompute(rank, size, directory):
    """Steps computed again name the rank that failed, on all ranks."""

    def recomputed(fault):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        config = HealingConfig(snapshot_interval=5, zclip_enabled=False, check_interval=0)
        healer = Healer(model, optimizer, config=config, rank=rank)
        healer.exits.dismiss()
        torch.manual_seed(rank)
        data = [torch.randn(8, 4) for _ in range(7)]
        losses = []
        for step, x in enumerate(data):
            optimizer.zero_grad()
            is_wrong = fault == "activation" and rank == 1 and step == 6
            loss = (model(x) * (1.001 if is_wrong else 1.0)).square().mean()
            loss.backward()
            healer.step(loss)
            losses.append(loss.detach())
            if fault == "weight" and rank == 1 and step == 5:
                with torch.no_grad():
                    model.module.weight[0, :1].view(torch.int32).bitwise_xor_(1 << 18)
        found = healer.recompute(lambda x: (model(x) * 1.0).square().mean(), data[5:], losses[5:])
        return found.origin, found.ranks

    assert recomputed("none") == (Origin.REPRODUCIBLE, ())
    assert recomputed("weight") == (Origin.TRANSIENT, (1,))
    assert recomputed("activation") == (Origin.TRANSIENT, (1,))


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    for name in sys.argv[4:]:
        globals()[f"check_{name}"](rank, size, folder / name)
        dist.barrier()
        if rank == 0:
            print(name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
