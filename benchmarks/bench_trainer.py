"""What healing costs in a step of ``SFTTrainer`` on a tiny Llama, beside the bare trainer.

python benchmarks/bench_trainer.py [--steps 100] [--rounds 12]

Runs take turns, so that all meet the same machine. Compared is the step that a fifth of all steps
were faster than: whatever else the machine did, it did not do it all the time.
"""

import argparse
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from transformers import TrainerCallback

from heal import HealingConfig, SelfHealingTrainer
from tests.heal.trainers import tiny

WARM = 20  # first steps, in which caches and state are made


class Clock(TrainerCallback):
    """Notes how long each step took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        if self._last:
            self.seconds.append(now - self._last)
        self._last = now


CONTENDERS = {
    "bare": None,
    "watching": HealingConfig(zclip_enabled=False),
    "ZClip": HealingConfig(),
}


def measure(config: HealingConfig | None, steps: int) -> list[float]:
    """Return the seconds of every step after the first ones, whole steps with all their hooks."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(hidden_size=64, intermediate_size=128, num_hidden_layers=4)
        trainer = tiny.sft(
            folder,
            model,
            max_steps=steps + WARM,
            per_device_train_batch_size=16,
            logging_steps=50,
            callbacks=[clock],
        )
        if config is None:
            trainer.train()
        else:
            SelfHealingTrainer(trainer, config).train()
    return clock.seconds[WARM:]


def main() -> None:
    """Take turns, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=12)
    wanted = parser.parse_args()
    seconds: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    for _ in range(wanted.rounds):
        for name, config in CONTENDERS.items():
            seconds[name].append(measure(config, wanted.steps))
    print("| SFT step | ms, fastest fifth | to bare | ms, median | to bare |")
    print("|---|---:|---:|---:|---:|")
    times = {name: sorted(chain(*rounds)) for name, rounds in seconds.items()}
    for name, steps in times.items():
        cells = []
        for share in (0.2, 0.5):
            ours, bare = (t[int(share * len(t))] for t in (steps, times["bare"]))
            cells += [f"{1000 * ours:.2f}", f"{ours / bare:.3f}"]
        print("| " + " | ".join([name, *cells]) + " |")


if __name__ == "__main__":
    main()
