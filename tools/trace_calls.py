"""Count how many of our functions and files a user's call visits: ``python -m tools.trace_calls``.

A reader who follows a call makes one jump for every change of file. Calls of other packages are not
counted, nor what they call back into. For each row: calls, files, jumps between files.
"""

import argparse
import gc
import inspect
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zclip
from heal import Healer, HealingConfig

ROOT = Path(__file__).parents[1]
OURS = tuple(str(ROOT / name) + "/" for name in ("heal", "zclip"))


class Trace:
    """What a call visited.

    Args:
        without: a function whose calls, and those below them, are not counted.
    """

    def __init__(self, without: Callable[..., Any] | None = None) -> None:
        self.visited: list[str] = []
        self._without = None if without is None else inspect.unwrap(without).__code__
        self._is_within = False

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if code is self._without and event in ("call", "return"):
            self._is_within = event == "call"
            return
        is_ours = event == "call" and code.co_filename.startswith(OURS) and not self._is_within
        if is_ours and not code.co_name.startswith("<"):
            self.visited.append(code.co_filename)

    @property
    def files(self) -> set[str]:
        """The files of the project that were visited."""
        return {str(Path(path).relative_to(ROOT)) for path in self.visited}

    @property
    def row(self) -> tuple[int, int, int]:
        """Calls, files and jumps between files."""
        pairs = zip(self.visited, self.visited[1:], strict=False)
        return len(self.visited), len(self.files), sum(a != b for a, b in pairs)


def traced(call: Callable[[], Any], without: Callable[..., Any] | None = None) -> Trace:
    """Run ``call`` and return what it visited, and not what the garbage collector calls."""
    trace = Trace(without)
    before = sys.getprofile()
    gc.collect()
    gc.disable()
    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return trace


class Run:
    """A small training run, with and without a healer."""

    def __init__(self, is_fused: bool = False, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        kind = zclip.optim.AdamW if is_fused else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-3, fused=True)
        self.settings = settings
        self.healer: Healer | None = None

    def build(self) -> Healer:
        """Make the healer."""
        config = HealingConfig(**self.settings)
        self.healer = Healer(self.model, self.optimizer, config=config)
        return self.healer

    def backward(self) -> torch.Tensor:
        """Compute gradients and return the loss."""
        loss: torch.Tensor = self.model.forward(torch.randn(32, 8)).square().mean()
        loss.backward()
        return loss.detach()

    def step(self, count: int = 1) -> None:
        """Take healed steps."""
        assert self.healer is not None
        for _ in range(count):
            loss = self.backward()
            self.healer.step(loss)
            self.optimizer.zero_grad()

    def trace_step(self) -> Trace:
        """Take one healed step, with only ``healer.step`` traced."""
        assert self.healer is not None
        healer, loss = self.healer, self.backward()
        trace = traced(lambda: healer.step(loss), without=zclip.optim.FusedOptimizer.step)
        self.optimizer.zero_grad()
        return trace


def healthy_step(is_fused: bool = False) -> Trace:
    """Return what a step of a healthy run visits: the median of twenty, by calls.

    Args:
        is_fused: whether the optimizer is one of ours. What its own step calls is not counted.
    """
    run = Run(is_fused)
    run.build()
    run.step(60)
    return sorted((run.trace_step() for _ in range(20)), key=lambda trace: trace.row[0])[10]


def rollback() -> Trace:
    """Return what the step visits that rolls back weights which hold NaN."""
    run = Run(snapshot_interval=10, check_interval=10)
    run.build()
    run.step(35)
    with torch.no_grad():
        next(run.model.parameters())[0, 0] = math.nan
    traces = []
    for _ in range(30):
        traces.append(run.trace_step())
        assert run.healer is not None
        if any(type(a).__name__ == "Rollback" for _, _, plan in run.healer.history for a in plan):
            return traces[-1]
    raise RuntimeError("no rollback came; expected one within 30 steps")


def clip() -> Trace:
    """Return what ``zclip.clip_grad_norm_`` visits."""
    run = Run()
    run.backward()
    zclip.clip_grad_norm_(run.model.parameters(), 1.0)
    return traced(lambda: zclip.clip_grad_norm_(run.model.parameters(), 1.0))


def wrapped_step() -> Trace:
    """Return what a step of ``zclip.wrap(optimizer)`` visits."""
    run = Run()
    wrapped = zclip.wrap(run.optimizer, "zclip")
    for _ in range(3):
        run.backward()
        wrapped.step()
        wrapped.zero_grad()
    run.backward()
    return traced(wrapped.step)


def construction() -> Trace:
    """Return what ``Healer(...)`` visits."""
    Run().build()
    return traced(Run().build)


def report() -> Trace:
    """Return what ``heal report`` visits."""
    from heal.cli import main

    with tempfile.TemporaryDirectory() as folder:
        run = Run()
        healer = Healer(run.model, run.optimizer, run_dir=folder)
        run.healer = healer
        run.step(30)
        healer.close()
        return traced(lambda: main(["report", folder, "-o", str(Path(folder) / "page.html")]))


class Scored(nn.Module):
    """A model as a trainer of Transformers wants it: fields in, a loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of a batch."""
        return {"loss": self.linear(x).square().mean()}


def trainer_steps() -> Trace:
    """Return what twelve steps of a healed ``transformers.Trainer`` visit."""
    from transformers import Trainer, TrainingArguments

    from heal import SelfHealingTrainer

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=12,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=100,
        )
        data = [{"x": torch.ones(8)} for _ in range(96)]
        healed = SelfHealingTrainer(Trainer(Scored(), arguments, train_dataset=data))
        return traced(healed.train)


ROWS = {
    "clip_grad_norm_": clip,
    "wrapped step": wrapped_step,
    "Healer()": construction,
    "healthy step": healthy_step,
    "healthy step above a fused optimizer": lambda: healthy_step(is_fused=True),
    "rollback": rollback,
    "12 trainer steps": trainer_steps,
    "heal report": report,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", metavar="ROW", help="list the files of one row")
    arguments = parser.parse_args()
    if arguments.files:
        print("\n".join(sorted(ROWS[arguments.files]().files)))
        return
    print("| call | calls | files | jumps |\n|---|---:|---:|---:|")
    for name, row in ROWS.items():
        calls, files, jumps = row().row
        print(f"| {name} | {calls} | {files} | {jumps} |")


if __name__ == "__main__":
    main()
