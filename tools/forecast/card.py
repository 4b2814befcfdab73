"""What a model file says of itself: from which runs, with which versions, and how good it is."""

import hashlib
import json
import platform
from dataclasses import replace
from typing import Any

import numpy as np

from heal.lab.forecast.forecast_watch import FORMAT, Model
from tools.forecast.simulate import Streams

SHOWN = ("detection", "detection_interval", "false_per_10k", "false_per_10k_interval")
"""The numbers of a total that the card repeats."""


def origin(streams: Streams, seed: int) -> dict[str, Any]:
    """Return where a model comes from: its corpus, told by seed and digest, and the versions."""
    import sklearn
    import torch

    return {
        "corpus": {"seed": seed, "runs": len(streams), "sha256": corpus_digest(streams)},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "scikit-learn": sklearn.__version__,
        },
    }


def corpus_digest(streams: Streams) -> str:
    """Return the SHA-256 of all records, and of what was done to each run."""
    digest = hashlib.sha256(np.ascontiguousarray(streams.records).tobytes())
    for told in (streams.architecture, streams.optimizer, streams.kind, streams.onset.tolist()):
        digest.update(json.dumps(told).encode())
    return digest.hexdigest()


def to_json(model: Model) -> dict[str, Any]:
    """Return the content of a model file; :mod:`~tools.forecast.model_file` reads it."""
    return {
        "format": FORMAT,
        "names": list(model.names),
        "means": list(model.means),
        "scales": list(model.scales),
        "layers": [{"weights": [list(r) for r in w], "biases": list(b)} for w, b in model.layers],
        "calibration": {"levels": list(model.levels), "chances": list(model.chances)},
        "memory": model.memory,
        "limits": {f"{share:g}": limit for share, limit in model.limits.items()},
        "stretch_steps": model.stretch_steps,
        "card": model.card,
    }


def digest(model: Model) -> str:
    """Return the SHA-256 of all that a model computes with; its card is left out."""
    content = {name: part for name, part in to_json(model).items() if name != "card"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def with_metrics(model: Model, told: dict[str, Any]) -> Model:
    """Return the model with the headline numbers of an evaluation in its card."""
    metrics = {
        "held_out_architectures": _shown(told["network by architecture"]["total"]),
        "fresh_runs": _shown(told["fresh"]["total"]),
        "fresh_coverage": {s: row["coverage"] for s, row in told["alike"]["by_share"].items()},
    }
    return replace(model, card={**model.card, "metrics": metrics})


def _shown(total: dict[str, Any]) -> dict[str, Any]:
    return {name: total[name] for name in SHOWN}
