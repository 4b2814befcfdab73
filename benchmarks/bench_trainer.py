"""What healing costs in a step of ``SFTTrainer`` on a tiny Llama, beside the bare trainer.

python benchmarks/bench_trainer.py [--steps 300] [--rounds 5]

Runs take turns, so that both meet the same machine; the ratio is that of the medians of all steps.
"""

import argparse
import statistics
import sys
import tempfile
import time
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
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    seconds: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    for _ in range(wanted.rounds):
        for name, config in CONTENDERS.items():
            seconds[name].append(measure(config, wanted.steps))
    print("| SFT step | median ms | to bare | rounds, lowest to highest |")
    print("|---|---|---|---|")
    bare = [statistics.median(steps) for steps in seconds["bare"]]
    for name, rounds in seconds.items():
        medians = [statistics.median(steps) for steps in rounds]
        ratios = [ours / theirs for ours, theirs in zip(medians, bare, strict=True)]
        middle = statistics.median(ratios)
        print(
            f"| {name} | {1000 * statistics.median(medians):.2f} | {middle:.3f} "
            f"| {min(ratios):.3f} to {max(ratios):.3f} |"
        )


if __name__ == "__main__":
    main()
