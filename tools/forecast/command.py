"""Train the forecast of slow failures anew, or judge the one that is there.

python -m tools.forecast train --output model.json
python -m tools.forecast evaluate --model model.json --output results.json

A corpus is made if its file is not there: tiny networks, trained and broken; a few minutes of one
core, and as long again to follow its runs. ``--quick`` makes a small one, in a file of its own.
Needs scikit-learn and numpy.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

FULL: dict[str, Any] = {"healthy": 96, "slow": 44, "instant": 4}
FRESH: dict[str, Any] = {"healthy": 42, "slow": 15, "instant": 2}
ALIKE: dict[str, Any] = {"healthy": 42, "slow": 0, "instant": 0}
QUICK: dict[str, Any] = {"healthy": 28, "slow": 10, "instant": 2}
CORPUS_SEED = 2  # the features were chosen on that of seed 1
FRESH_SEED = 3  # of runs that no model was trained on nor calibrated by
ALIKE_SEED = 5  # likewise, with the batch sizes of CORPUS_SEED, which take turns of three
LEARNED_SHARE = 0.7  # of the runs; the others calibrate the model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("verb", choices=("train", "evaluate"))
    parser.add_argument("--folder", default="build", help="where corpora are kept")
    parser.add_argument("--model", default=None, help="the model to judge; the shipped one if none")
    parser.add_argument("--output", default=None, help="model or results, as JSON")
    parser.add_argument("--kind", choices=("network", "logistic"), default="network")
    parser.add_argument("--quick", action="store_true", help="small corpora")
    parser.add_argument("--card", action="store_true", help="write results into the model's card")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--seed", type=int, default=0, help="of splits and training")


def run(arguments: argparse.Namespace) -> int:
    """Do it; 1 if something that is needed is not installed or cannot be read."""
    try:
        import sklearn  # noqa: F401
    except ImportError:
        wanted = "pip install scikit-learn numpy"
        print(f"forecast: scikit-learn is not installed; do: {wanted}", file=sys.stderr)
        return 1
    try:
        if arguments.verb == "train":
            return _train(arguments)
        return _evaluate(arguments)
    except (OSError, ValueError) as error:
        print(f"forecast: {error}", file=sys.stderr)
        return 1


def corpus_of(arguments: argparse.Namespace, seed: int, counts: dict[str, Any]) -> Any:
    """Return the records of a corpus, which is read or made.

    Raises:
        ValueError: the file holds other runs than those asked for.
    """
    from tools.forecast import corpus

    counts = QUICK if arguments.quick else counts
    kept = f"forecast-{seed}-" + "-".join(str(count) for count in counts.values())
    path = Path(arguments.folder) / f"{kept}.npz"
    wanted = corpus.groups(**counts, seed=seed)
    if not path.exists():
        _say(f"making the corpus: {path}")
        corpus.save(corpus.make(wanted, arguments.processes), path)
    streams = corpus.load(path)
    corpus.check(streams, wanted, path)
    return streams


def dataset_of(arguments: argparse.Namespace, streams: Any) -> Any:
    """Return the features of all runs."""
    from tools.forecast import dataset

    _say(f"{len(streams)} runs; following them")
    return dataset.build(streams, arguments.processes)


def trained(runs: Any, kind: str, seed: int, card: dict[str, Any] | None = None) -> Any:
    """Return a model, calibrated on runs that it has not learned from."""
    import numpy as np

    from tools.forecast.train import calibrate, fit

    learned = np.random.default_rng(seed).random(len(runs)) < LEARNED_SHARE
    return calibrate(fit(runs.part(learned), kind, seed), runs.part(~learned), card)


def _train(arguments: argparse.Namespace) -> int:
    from tools.forecast import card

    streams = corpus_of(arguments, CORPUS_SEED, FULL)
    runs = dataset_of(arguments, streams)
    origin = card.origin(streams, CORPUS_SEED)
    model = trained(runs, arguments.kind, arguments.seed, origin)
    _write(arguments.output or "model.json", card.to_json(model))
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from heal.lab.forecast.forecast_watch import SHIPPED
    from tools.forecast import card, evaluate
    from tools.forecast.model_file import read
    from tools.forecast.results import results_of

    model = read(arguments.model or SHIPPED)  # before the work, in case there is none
    streams = corpus_of(arguments, CORPUS_SEED, FULL)
    runs = dataset_of(arguments, streams)
    told: dict[str, Any] = {"runs": len(runs), "steps": int(runs.features.shape[1])}
    for by, kind, folds in PARTS:
        parts = evaluate.cross_validate(runs, kind, by, seed=arguments.seed, folds=folds)
        told[f"{kind} by {by}"] = results_of(parts)
        _say(f"{kind}, {by} held out: {_sentence(evaluate.together(parts))}")
    told["exam"] = _exam(runs, arguments)
    told["fresh"] = _fresh(model, arguments)
    told["fresh"]["judges"] = card.digest(model)
    told["alike"] = _alike(model, arguments)
    if arguments.output is not None:
        _write(arguments.output, told)
    if arguments.card:
        path = Path(arguments.model or SHIPPED)
        _write(path, card.to_json(card.with_metrics(model, told)))
    return 0


def _exam(runs: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train without the architectures of the exam, and judge on them."""
    import numpy as np

    from tools.forecast import evaluate
    from tools.forecast.architectures import EXAM
    from tools.forecast.results import results_of

    held_out = np.isin(runs.architecture, EXAM)
    parts = evaluate.one_fold(runs, arguments.kind, held_out, runs.architecture, arguments.seed)
    _say(f"exam, {', '.join(EXAM)}: {_sentence(evaluate.together(parts))}")
    return results_of(parts)


def _fresh(model: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Judge the model, as it is, on runs of another seed; some also without norms of weights."""
    from tools.forecast import evaluate
    from tools.forecast.results import results_of, summary

    streams = corpus_of(arguments, FRESH_SEED, FRESH)
    runs = dataset_of(arguments, streams)
    parts = evaluate.judged(model, runs, runs.architecture)
    _say(f"the model itself, fresh runs: {_sentence(evaluate.together(parts))}")
    blind = dataset_of(arguments, streams.without("weight_norm", every=3))
    blindly = evaluate.judged(model, blind, blind.architecture)
    return {
        **results_of(parts),
        "runs": len(runs),
        "without_weight_norms": summary(evaluate.together(blindly)),
    }


def _alike(model: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Test the limits of the model on healthy runs like those that set them."""
    from tools.forecast import evaluate
    from tools.forecast.results import at_share

    runs = dataset_of(arguments, corpus_of(arguments, ALIKE_SEED, ALIKE))
    parts = evaluate.judged(model, runs, runs.architecture)
    told = {f"{share:g}": at_share(parts, share) for share in model.limits}
    for share, row in told.items():
        wanted = 100 - 100 * float(share)
        _say(f"coverage wanted {wanted:.0f} %, found {100 * row['coverage']:.1f} %")
    return {"by_share": told}


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


def _write(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    text = json.dumps(_plain(content), indent=1, allow_nan=False) + "\n"
    Path(path).write_text(text, encoding="utf-8")
    _say(f"wrote {path}")


def _plain(value: Any) -> Any:
    """Return what JSON can say: None for a number that is none."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _say(line: str) -> None:
    print(line, flush=True)
