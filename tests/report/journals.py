"""Journals written by hand, as a run would write them, for the tests of report and watch."""

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def at(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def suffix(rank: int) -> str:
    return f".rank{rank}" if rank else ""


def write(path: Path, lines: list[dict[str, Any]], mode: str = "a") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, mode, encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def started(rank: int = 0, seconds: float = 0.0, **more: Any) -> dict[str, Any]:
    about = {"host": f"node{rank}", "torch": "2.13", "model": "Gpt", "settings": {"lag": 1}}
    head = {"v": 1, "time": at(seconds), "rank": rank, "step": 0, "event": "started"}
    return {**head, **about, "zclip_z_threshold": 2.5, **more}


def trouble(
    failure: str, step: int, *actions: dict[str, Any], rank: int = 0, **more: Any
) -> dict[str, Any]:
    """An event of healing; ``actions`` as the journal writes them, none for an alert."""
    line = {
        "v": 1,
        "time": at(step * 0.1 + 0.3),
        "rank": rank,
        "step": step,
        "event": "recovery" if actions else "alert",
        "failure": failure,
        "diagnosis": f"It was {failure}.",
        "bad_step": step,
        "confidence": 0.9,
        "reference": "a paper",
        "evidence": {"loss": "NaN", "tensor": "layer.weight", "tensor_index": 3},
        "plan": [{"effect": True, **action} for action in actions],
        "seconds": 0.25,
        "noticed_at": step + 3,
        "resumed_at": step + 3,
    }
    return {**line, **more}


def act(name: str, **told: Any) -> dict[str, Any]:
    return {"action": name, **told}


def metrics(
    step: int, losses: list[Any], /, *, ended: float | None = None, **series: Any
) -> dict[str, Any]:
    """A line of metrics whose newest record is that of ``step``."""
    steps = list(range(step - len(losses) + 1, step + 1))
    return {
        "time": at(step * 0.1 if ended is None else ended),
        "step": step + 2,
        "seen_at": step,
        "loss": losses[-1],
        "lr_scale": 1.0,
        "zclip/raw_grad_norm": 0.5,
        "zclip/threshold": 1.0,
        "healing/nan_count": 0.0,
        "series": {
            "step": steps,
            "loss": losses,
            "norm": [0.5] * len(losses),
            "lr": 0.001,
            "lr_scale": 1.0,
            "micro_batches": 1,
            "seconds": [0.1] * len(losses),
            "threshold": 1.0,
            "mean": 0.5,
            "std": 0.1,
            **series,
        },
    }


def calm_metrics(steps: int, *, first: int = 0, every: int = 10) -> list[dict[str, Any]]:
    return [
        metrics(last, [3.0 - 2.0 * s / (s + 50) for s in range(last - every + 1, last + 1)])
        for last in range(first + every - 1, first + steps, every)
    ]


def postmortem(folder: Path, rank: int = 0, **page: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "exit_reason": "completed",
        "last_step": 99,
        "timestamp": at(1000),
        "exit_code": 0,
        "exception_message": None,
        "python": "3.11.7",
    }
    text = json.dumps({**told, **page})
    (folder / f"postmortem{suffix(rank)}.json").write_text(text)


def sick_run(folder: Path, ranks: int = 1) -> Path:
    """A hundred steps: a refused one, NaN losses and a rollback from 60 to 40, a slow time."""
    undone = [metrics(59, [2.0] * 5 + ["NaN"] * 5, ended=5.95)]
    again = [metrics(49, [1.9] * 10, ended=7.0), metrics(59, [1.8] * 10, ended=8.0)]
    after = [metrics(s, [1.5] * 10, ended=s * 0.1 + 2) for s in range(69, 100, 10)]
    for rank in range(ranks):
        events = [
            started(rank),
            {**started(rank), "event": "goal", "steps": 100},
            trouble("nonfinite_gradient", 20, act("Skip"), rank=rank),
            *(trouble("nonfinite_loss", s, act("Skip"), rank=rank) for s in (55, 56)),
            trouble(
                "nonfinite_loss",
                57,
                act("Rollback", before_step=40),
                act("SkipBatches", first_step=40, last_step=58),
                act("ScaleLr", factor=0.5, floor=0.01, ramp_steps=20),
                rank=rank,
                bad_step=55,
                noticed_at=60,
                resumed_at=40,
            ),
            trouble("throughput_collapse", 90, rank=rank, evidence={"seconds": 2.0}),
        ]
        write(folder / f"events{suffix(rank)}.jsonl", events)
        lines = [*calm_metrics(50), *undone, *again, *after]
        write(folder / f"metrics{suffix(rank)}.jsonl", lines)
        postmortem(folder, rank)
    return folder


def long_metrics(path: Path, steps: int, spike: int) -> None:
    """Metrics of a very long run with one spike of one step, quickly written."""
    line = json.dumps(metrics(9, [1.0] * 10))
    before, after = line.split('"series": ')
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for last in range(9, steps, 10):
            chosen = range(last - 9, last + 1)
            losses = [1e4 if s == spike else 2.0 + (s * 7919 % 1000) / 5000 for s in chosen]
            head = before.replace('"step": 11', f'"step": {last + 2}').replace(
                at(0.9), at(last / 10)
            )
            tail = after.replace(json.dumps(list(range(10))), json.dumps(list(chosen)))
            file.write(
                f'{head}"series": {tail.replace(json.dumps([1.0] * 10), json.dumps(losses))}\n'
            )


def two_runs(folder: Path, ranks: int = 1, **second: Any) -> Path:
    """A run of 100 steps with an incident, then another of 50 without one, in the same folder."""
    for rank in range(ranks):
        ids = [{"run": f"first-{rank}"}, {"run": f"second-{rank}"}]
        events = [
            started(rank) | ids[0],
            trouble("nonfinite_loss", 60, act("Refuse"), rank=rank) | ids[0],
            started(rank, seconds=100.0 + rank) | ids[1] | second,
        ]
        write(folder / f"events{suffix(rank)}.jsonl", events)
        later = [{**line, "time": at(101 + i)} for i, line in enumerate(calm_metrics(50))]
        for lines, name in ((calm_metrics(100), ids[0]), (later, ids[1])):
            write(folder / f"metrics{suffix(rank)}.jsonl", [line | name for line in lines])
    return folder
