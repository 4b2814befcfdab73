"""Train the forecast of slow failures anew, or judge it.

heal forecast train --corpus build/forecast.npz --output model.json
heal forecast evaluate --corpus build/forecast.npz --output results.json

The corpus is made if the file is not there: tiny networks, trained and broken, about ten minutes of
one core; ``--quick`` makes a small one in a minute. Needs scikit-learn: pip install
zclip-heal[forecast].
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

FULL: dict[str, Any] = {"healthy": 96, "slow": 44, "instant": 4}
QUICK: dict[str, Any] = {"healthy": 28, "slow": 10, "instant": 2}
CORPUS_SEED = 2  # the features were chosen on that of seed 1
LEARNED_SHARE = 0.7  # of the runs; the others calibrate the model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("verb", choices=("train", "evaluate"))
    parser.add_argument("--corpus", default="build/forecast.npz", help="file of records")
    parser.add_argument("--output", default=None, help="model or results, as JSON")
    parser.add_argument("--kind", choices=("network", "logistic"), default="network")
    parser.add_argument("--quick", action="store_true", help="a small corpus, if one is made")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--seed", type=int, default=0, help="of splits and training")


def run(arguments: argparse.Namespace) -> int:
    """Do it; 1 if something that is needed is not installed or cannot be read."""
    try:
        import sklearn  # noqa: F401
    except ImportError:
        wanted = "pip install zclip-heal[forecast]"
        print(f"heal forecast: scikit-learn is not installed; wanted: {wanted}", file=sys.stderr)
        return 1
    try:
        if arguments.verb == "train":
            return _train(arguments)
        return _evaluate(arguments)
    except (OSError, ValueError) as error:
        print(f"heal forecast: {error}", file=sys.stderr)
        return 1


def dataset_of(arguments: argparse.Namespace) -> Any:
    """Return the features of all runs of the corpus, which is read or made."""
    from heal.forecast import corpus, dataset

    path = Path(arguments.corpus)
    if not path.exists():
        _say(f"making the corpus: {path}")
        counts = QUICK if arguments.quick else FULL
        wanted = corpus.groups(**counts, seed=CORPUS_SEED)
        corpus.save(corpus.make(wanted, arguments.processes), path)
    streams = corpus.load(path)
    _say(f"{len(streams)} runs; following them")
    return dataset.build(streams, arguments.processes)


def trained(runs: Any, kind: str, seed: int) -> tuple[Any, Any]:
    """Return a model, calibrated, and the runs that it has not learned from."""
    import numpy as np

    from heal.forecast.train import calibrate, fit

    learned = np.random.default_rng(seed).random(len(runs)) < LEARNED_SHARE
    unseen = runs.part(~learned)
    return calibrate(fit(runs.part(learned), kind, seed), unseen), unseen


def _train(arguments: argparse.Namespace) -> int:
    from heal.forecast.evaluate import coverage

    model, unseen = trained(dataset_of(arguments), arguments.kind, arguments.seed)
    for share, covered in coverage(model, unseen).items():
        _say(f"coverage wanted {100 - 100 * share:.0f} %, found {100 * covered:.1f} %")
    path = Path(arguments.output or "model.json")
    path.write_text(json.dumps(model.to_json(), indent=1) + "\n", encoding="utf-8")
    _say(f"wrote {path}")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from heal.forecast import evaluate, judge

    runs = dataset_of(arguments)
    told: dict[str, Any] = {"runs": len(runs), "steps": int(runs.features.shape[1])}
    for by, kind, folds in PARTS:
        parts = evaluate.cross_validate(runs, kind, by, seed=arguments.seed, folds=folds)
        total = evaluate.together(parts)
        told[f"{kind} by {by}"] = {
            "total": evaluate.summary(total),
            "folds": {fold.held_out: evaluate.summary(fold.judgement) for fold in parts},
        }
        _say(f"{kind}, {by} held out: {_sentence(total)}")
        _save(arguments.output, told)
    told["exam"] = _exam(runs, arguments)
    model, unseen = trained(runs, arguments.kind, arguments.seed)
    told["coverage"] = {f"{1 - s:g}": v for s, v in evaluate.coverage(model, unseen).items()}
    told["coverage_runs"] = int(unseen.healthy.sum())
    told["reliability"] = evaluate.reliability(model, unseen)
    scores = judge.evidence(model, unseen.features)
    told["limits"] = {
        f"{share:g}": evaluate.summary(judge.judge(unseen, scores, limit))
        for share, limit in model.limits.items()
    }
    for wanted, found in told["coverage"].items():
        _say(f"coverage wanted {100 * float(wanted):.0f} %, found {100 * found:.1f} %")
    _save(arguments.output, told)
    return 0


def _exam(runs: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train without the architectures of the exam, and judge on them."""
    import numpy as np

    from heal.forecast import evaluate
    from heal.forecast.architectures import EXAM

    held_out = np.isin(runs.architecture, EXAM)
    parts = evaluate.one_fold(runs, arguments.kind, held_out, runs.architecture, arguments.seed)
    total = evaluate.together(parts)
    _say(f"exam, {', '.join(EXAM)}: {_sentence(total)}")
    return {
        "total": evaluate.summary(total),
        "folds": {fold.held_out: evaluate.summary(fold.judgement) for fold in parts},
    }


def _sentence(total: Any) -> str:
    return (
        f"{100 * total.detection:.1f} % warned in time, median lead {total.median_lead:.0f} steps, "
        f"{total.false_per_10k:.2f} false warnings per 10,000"
    )


PARTS = (
    ("architecture", "network", 8),
    ("architecture", "logistic", 8),
    ("run", "network", 3),
    ("run", "logistic", 3),
)
"""What is held out, which model, and in how many folds: architectures go three at a time."""


def _save(path: str | None, told: dict[str, Any]) -> None:
    if path is not None:
        text = json.dumps(_plain(told), indent=1, allow_nan=False) + "\n"
        Path(path).write_text(text, encoding="utf-8")


def _plain(value: Any) -> Any:
    """Return what JSON can say: None for a number that is none."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _say(line: str) -> None:
    print(line, flush=True)
