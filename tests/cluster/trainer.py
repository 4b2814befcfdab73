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

from heal import checkpoint
from heal.cluster import ShutdownHandler, init_process_group, resolve_resume_path

SAMPLES = 6  # per step, over all ranks: one, two, three and six of them share evenly
SAVE_EVERY = 3


def batch(step, rank, size):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 4, generator=generator)[rank::size]


class Model(torch.nn.Module):
    """Two layers, and momentum by hand: torch's optimizers and DDP take seconds to load."""

    def __init__(self):
        super().__init__()
        for name, shape in (("weight", (4, 8)), ("bias", (8,)), ("out", (8, 1))):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))
            self.register_buffer(f"{name}_momentum", torch.zeros(shape))

    def train_on(self, samples):
        """One step on the mean gradient of all ranks."""
        loss = ((samples @ self.weight + self.bias).tanh() @ self.out).square().mean()
        parameters = list(self.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, momentum, grad in zip(parameters, self.buffers(), gradients, strict=True):
            dist.all_reduce(grad)
            momentum.mul_(0.9).add_(grad / dist.get_world_size())
            parameter.data.sub_(momentum, alpha=1e-2)


def digest(tensors):
    content = b"".join(t.detach().numpy().tobytes() for t in tensors)
    return hashlib.sha256(content).hexdigest()


def main(folder, steps, pause="0"):
    torch.set_num_threads(1)
    folder, steps, pause = Path(folder), int(steps), float(pause)
    attempt = init_process_group("gloo")
    rank, size = attempt.rank, attempt.world_size
    torch.manual_seed(0)
    model = Model()
    resumed = checkpoint.load(folder, model)
    start = resumed.step if resumed is not None else 0
    if resumed is not None:
        assert resolve_resume_path(folder).name == f"step-{start:06d}"
    with (folder / f"attempts{rank}").open("a") as file:
        line = {"start": start, "size": size, "name": attempt.name, "time": time.time()}
        file.write(json.dumps({**line, "pid": os.getpid()}) + "\n")
    with ShutdownHandler(shutdown_timeout_sec=60) as shutdown:
        for step in range(start, steps):
            model.train_on(batch(step, rank, size))
            (folder / f"step{rank}").write_text(str(step))
            time.sleep(pause)
            stop = shutdown.should_stop()
            if stop or (step + 1) % SAVE_EVERY == 0:
                checkpoint.save(folder, step + 1, model)
            if stop:
                (folder / f"stopped{rank}").write_text(
                    f"{step} {digest(model.state_dict().values())}"
                )
                shutdown.exit()
    (folder / f"done{rank}").write_text(digest(model.state_dict().values()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
