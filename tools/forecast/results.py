"""Folds and judgements as plain numbers, with intervals: what the evaluation saves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heal.lab.forecast.forecast_watch import DEFAULT_SHARE
from tools.forecast import calibration
from tools.forecast.evaluate import Fold, together
from tools.forecast.intervals import ratio_interval
from tools.forecast.judge import Judgement


def results_of(folds: list[Fold], share: float = DEFAULT_SHARE) -> dict[str, Any]:
    """Return all that folds have to say: totals, each fold, every share, coverage, reliability."""
    return {
        "total": {**summary(together(folds, share)), **intervals(folds, share)},
        "folds": {fold.held_out: summary(fold.by_share[share]) for fold in folds},
        "by_share": {f"{s:g}": at_share(folds, s) for s in folds[0].by_share},
        "reliability": calibration.told([fold.reliability for fold in folds]),
    }


def intervals(folds: Sequence[Fold], share: float) -> dict[str, Any]:
    """Return 95 % intervals of the headline numbers; folds are what is drawn."""
    told = [fold.by_share[share] for fold in folds]
    hits = [sum(map(sum, one.in_time.values())) for one in told]
    failures = [sum(map(len, one.in_time.values())) for one in told]
    false = [1e4 * one.false_warnings for one in told]
    steps = [one.healthy_steps for one in told]
    return {
        "detection_interval": list(ratio_interval(hits, failures)) if any(failures) else None,
        "false_per_10k_interval": list(ratio_interval(false, steps)),
    }


def at_share(folds: Sequence[Fold], share: float) -> dict[str, Any]:
    """Return the numbers of one limit, and the coverage with its spread over folds."""
    below = [fold.below[share] for fold in folds]
    healthy = [fold.healthy for fold in folds]
    each = [b / h for b, h in zip(below, healthy, strict=True) if h]
    total = together(list(folds), share)
    return {
        "detection": total.detection,
        "median_lead": total.median_lead,
        "false_per_10k": total.false_per_10k,
        "falsely_warned": total.falsely_warned_steps / max(total.healthy_steps, 1),
        "coverage": sum(below) / max(sum(healthy), 1),
        "coverage_interval": list(ratio_interval(below, healthy)),
        "coverage_low_p10_p90_high": [
            float(value) for value in np.quantile(each, [0.0, 0.1, 0.9, 1.0])
        ],
        "healthy_runs": sum(healthy),
        **intervals(folds, share),
    }


def summary(told: Judgement) -> dict[str, Any]:
    """Return a judgement as plain numbers."""
    return {
        "detection": told.detection,
        "failures": sum(len(hits) for hits in told.in_time.values()),
        "median_lead": told.median_lead,
        "false_per_10k": told.false_per_10k,
        "falsely_warned": told.falsely_warned_steps / max(told.healthy_steps, 1),
        "healthy_steps": told.healthy_steps,
        "by_kind": {
            kind: {
                "detection": float(np.mean(hits)),
                "failures": len(hits),
                "lead_p10_p50_p90": _quantiles(told.lead.get(kind, [])),
            }
            for kind, hits in sorted(told.in_time.items())
        },
        "false_share_by_kind": {
            kind: float(np.mean(hits)) for kind, hits in sorted(told.false_by_kind.items())
        },
        "instant_warned_before": float(np.mean(told.instant)) if told.instant else float("nan"),
        "instant_failures": len(told.instant),
    }


def _quantiles(values: list[int]) -> list[float]:
    if not values:
        return []
    found: NDArray[np.float64] = np.quantile(values, [0.1, 0.5, 0.9])
    return [float(value) for value in found]
