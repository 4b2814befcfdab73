"""A small training run that stops, dies and comes back: one rank of it.

``python -m tests.cluster.trainer FOLDER STEPS [PAUSE]``, under torchrun or by hand. The samples of
a step follow from its number alone and are dealt out over the ranks, so that a run of any size, and
one that was interrupted, sees the same data.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from heal.cluster import ShutdownHandler, init_process_group, resolve_resume_path

SAMPLES = 6  # per step, over all ranks: one, two, three and six of them share evenly
SAVE_EVERY = 3


def batch(step, rank, size):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 4, generator=generator)[rank::size]


def save(folder, step, model, optimizer):
    """One file and the marker, by rank 0; a test of durability is not the point here."""
    path = folder / f"step-{step:06d}"
    path.mkdir(exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path / "part.pt")
    os.replace(path / "part.pt", path / "state.pt")
    (path / "COMMIT").touch()


def load(path, model, optimizer):
    state = torch.load(path / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(path.name.removeprefix("step-"))


def digest(model):
    content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(content).hexdigest()


def main(folder, steps, pause="0"):
    torch.set_num_threads(1)
    folder, steps, pause = Path(folder), int(steps), float(pause)
    attempt = init_process_group("gloo")
    rank, size = attempt.rank, attempt.world_size
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = 0
    resumed = resolve_resume_path(folder)
    if resumed is not None:
        start = load(resumed, model, optimizer)
    wrapped = DistributedDataParallel(model)
    with (folder / f"attempts{rank}").open("a") as file:
        line = {"start": start, "size": size, "name": attempt.name, "time": time.time()}
        file.write(json.dumps({**line, "pid": os.getpid()}) + "\n")
    with ShutdownHandler(shutdown_timeout_sec=60) as shutdown:
        for step in range(start, steps):
            optimizer.zero_grad()
            wrapped(batch(step, rank, size)).square().mean().backward()
            optimizer.step()
            (folder / f"step{rank}").write_text(str(step))
            time.sleep(pause)
            stop = shutdown.should_stop()
            if rank == 0 and (stop or (step + 1) % SAVE_EVERY == 0):
                save(folder, step + 1, model, optimizer)
            if stop:
                (folder / f"stopped{rank}").write_text(f"{step} {digest(model)}")
                shutdown.exit()
    (folder / f"done{rank}").write_text(digest(model))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
