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
import torch.distributed as dist

from heal.cluster import ShutdownHandler, init_process_group, resolve_resume_path

SAMPLES = 6  # per step, over all ranks: one, two, three and six of them share evenly
SAVE_EVERY = 3


def batch(step, rank, size):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 4, generator=generator)[rank::size]


def train(parameters, momenta, samples):
    """One step of momentum on the mean gradient of all ranks, without DDP: it loads for seconds."""
    weight, bias, out = parameters
    loss = ((samples @ weight + bias).tanh() @ out).square().mean()
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, momentum, gradient in zip(parameters, momenta, gradients, strict=True):
        dist.all_reduce(gradient)
        momentum.mul_(0.9).add_(gradient / dist.get_world_size())
        parameter.data.sub_(momentum, alpha=1e-2)


def save(folder, step, state):
    """One file and the marker, by rank 0; a test of durability is not the point here."""
    path = folder / f"step-{step:06d}"
    path.mkdir(exist_ok=True)
    torch.save(state, path / "part.pt")
    os.replace(path / "part.pt", path / "state.pt")
    (path / "COMMIT").touch()


def load(path, state):
    for ours, theirs in zip(state, torch.load(path / "state.pt", weights_only=True), strict=True):
        ours.data.copy_(theirs)
    return int(path.name.removeprefix("step-"))


def digest(tensors):
    content = b"".join(t.detach().numpy().tobytes() for t in tensors)
    return hashlib.sha256(content).hexdigest()


def main(folder, steps, pause="0"):
    torch.set_num_threads(1)
    folder, steps, pause = Path(folder), int(steps), float(pause)
    attempt = init_process_group("gloo")
    rank, size = attempt.rank, attempt.world_size
    torch.manual_seed(0)
    parameters = [torch.randn(shape).requires_grad_() for shape in ((4, 8), (8,), (8, 1))]
    momenta = [torch.zeros_like(p) for p in parameters]
    state = [p.detach() for p in parameters] + momenta
    start = 0
    resumed = resolve_resume_path(folder)
    if resumed is not None:
        start = load(resumed, state)
    with (folder / f"attempts{rank}").open("a") as file:
        line = {"start": start, "size": size, "name": attempt.name, "time": time.time()}
        file.write(json.dumps({**line, "pid": os.getpid()}) + "\n")
    with ShutdownHandler(shutdown_timeout_sec=60) as shutdown:
        for step in range(start, steps):
            train(parameters, momenta, batch(step, rank, size))
            (folder / f"step{rank}").write_text(str(step))
            time.sleep(pause)
            stop = shutdown.should_stop()
            if rank == 0 and (stop or (step + 1) % SAVE_EVERY == 0):
                save(folder, step + 1, state)
            if stop:
                (folder / f"stopped{rank}").write_text(f"{step} {digest(state)}")
                shutdown.exit()
    (folder / f"done{rank}").write_text(digest(state))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
