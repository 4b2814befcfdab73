"""What a durable checkpoint costs, as a share of what the disk can do, beside torch.save and DCP.

python benchmarks/bench_checkpoint.py --mib 512 --rounds 7 --dir /path/on/the/disk

A model with AdamW is saved and loaded in turns by every contender, so that a busy disk disturbs all
alike. "disk" is the same number of bytes written in one go and flushed, or read. Page caches are
dropped before every read, as far as the system lets an ordinary user do so. Rivals get an fsync of
their own, for without it they measure memory; neither of them notices a flipped bit.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from heal import checkpoint
from heal.checkpoint import CheckpointStore
from heal.checkpoint.store import training_state
from heal.training_state import RngState

MIB = 2**20
BLOCK = 64 * MIB


def built(mib):
    """A model whose parameters and moments are so many MiB together."""
    width = 1024
    layers = max(1, round(mib * MIB / (3 * 4 * width * width)))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def flush(path):
    """Have a file, or all files of a folder, on the disk."""
    for each in [path] if path.is_file() else [*path.rglob("*"), path]:
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def forget(path):
    """Drop what memory keeps of a file, or of all files of a folder."""
    for each in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        descriptor = os.open(each, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Disk:
    """Nothing but the bytes."""

    def __init__(self, folder, model, optimizer):
        self.path = folder / "plain"
        tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
        self.size = sum(t.nbytes for t in tensors)
        self.block = memoryview(os.urandom(BLOCK))

    def save(self):
        with open(self.path, "wb", buffering=0) as file:
            for begin in range(0, self.size, BLOCK):
                file.write(self.block[: min(BLOCK, self.size - begin)])
            os.fsync(file.fileno())

    def load(self):
        target = bytearray(BLOCK)
        with open(self.path, "rb", buffering=0) as file:
            while file.readinto(target):
                pass


class Ours:
    """heal.checkpoint, as it is used; a second time without reading back what was written."""

    def __init__(self, folder, model, optimizer, read_back=True):
        self.path = folder / f"ours-{read_back}"
        self.run = model, optimizer
        self.state = training_state(model, optimizer, None, None)
        self.store = CheckpointStore(self.path, keep=1, read_back=read_back)
        self.read_back = read_back

    def save(self):
        if not self.read_back:
            shutil.rmtree(self.path)  # nothing is removed that nobody verified
            self.path.mkdir()
        self.store.save_state(1, self.state, {"rng": RngState.now()})

    def load(self):
        assert checkpoint.load(self.path, *self.run).step == 1


class Beside(Ours):
    """The same in a thread: what the training waits for."""

    def __init__(self, folder, model, optimizer):
        super().__init__(folder, model, optimizer)
        self.path = folder / "beside"
        self.store = CheckpointStore(self.path, keep=1, asynchronous=True)

    def save(self):
        self.store.save_state(1, self.state, {"rng": RngState.now()})

    def after(self):
        self.store.wait()


class TorchSave:
    """torch.save of the state dicts."""

    def __init__(self, folder, model, optimizer):
        self.path = folder / "torch.pt"
        self.model, self.optimizer = model, optimizer

    def save(self):
        tree = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(tree, self.path)
        flush(self.path)

    def load(self):
        tree = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(tree["model"])
        self.optimizer.load_state_dict(tree["optimizer"])


class Dcp:
    """torch.distributed.checkpoint of the same."""

    def __init__(self, folder, model, optimizer):
        self.path = folder / "dcp"
        self.model, self.optimizer = model, optimizer

    def tree(self):
        moments = self.optimizer.state_dict()["state"]
        state = {str(i): dict(entry) for i, entry in moments.items()}
        return {"model": self.model.state_dict(), "optimizer": state}

    def save(self):
        shutil.rmtree(self.path, ignore_errors=True)
        dcp.save(self.tree(), checkpoint_id=self.path, no_dist=True)
        flush(self.path)

    def load(self):
        dcp.load(self.tree(), checkpoint_id=self.path, no_dist=True)


def timed(action, after=None):
    begin = time.perf_counter()
    action()
    seconds = time.perf_counter() - begin
    if after is not None:
        after()
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="of parameters and moments")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="see whether it works at all")
    parser.add_argument("--dir", type=Path, help="on the disk in question; a temporary folder")
    parser.add_argument("--save", type=Path, help="folder for the table, as checkpoint.md")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.mib, arguments.rounds = 16, 2
    warnings.simplefilter("ignore")
    model, optimizer = built(arguments.mib)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        folder = Path(name)
        contenders = {
            "disk": Disk(folder, model, optimizer),
            "heal.checkpoint": Ours(folder, model, optimizer),
            "heal.checkpoint, not read back": Ours(folder, model, optimizer, read_back=False),
            "heal.checkpoint, what training waits for": Beside(folder, model, optimizer),
            "torch.save + fsync": TorchSave(folder, model, optimizer),
            "DCP + fsync": Dcp(folder, model, optimizer),
        }
        size = contenders["disk"].size
        saves, loads = ({name: [] for name in contenders} for _ in range(2))
        for number in range(arguments.rounds + 1):  # the first one warms up
            for name, contender in contenders.items():
                seconds = timed(contender.save, getattr(contender, "after", None))
                forget(contender.path)
                restore = timed(contender.load)
                if number:
                    saves[name].append(seconds)
                    loads[name].append(restore)
        lines = table(size, saves, loads)
    print("\n".join(lines))
    if arguments.save is not None:
        (arguments.save / "checkpoint.md").write_text("\n".join(lines) + "\n")


def table(size, saves, loads):
    """Medians, and the median of the ratios to the disk in the same round."""
    lines = [
        f"{size / MIB:.0f} MiB of parameters and moments, {len(saves['disk'])} rounds in turns",
        "",
        "| | save MiB/s | of the disk | restore MiB/s | of the disk |",
        "|---|---|---|---|---|",
    ]
    for name in saves:
        cells = []
        for seconds, plain in ((saves[name], saves["disk"]), (loads[name], loads["disk"])):
            share = statistics.median(p / s for p, s in zip(plain, seconds, strict=True))
            cells += [f"{size / MIB / statistics.median(seconds):.0f}", f"{100 * share:.0f} %"]
        if "waits" in name:
            cells[2:] = ["", ""]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
