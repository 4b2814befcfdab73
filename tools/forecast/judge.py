"""How good forecasts are: who was warned in time, how early, and how often in vain."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from heal.lab.forecast.forecast_watch import FIRST_STEP, LARGEST_LOGIT, Hysteresis, Model
from tools.forecast.dataset import Dataset
from tools.forecast.scenarios import INSTANT

BEFORE = 50  # steps before an instant failure in which a warning would have been of use
LAG = 2  # steps after which a healer hears of one: a warning counts from then on


def logits(model: Model, features: NDArray[np.float32]) -> NDArray[np.float32]:
    """As :meth:`Model.logit`, for arrays of [..., features], in float32."""
    scales = np.array(model.scales, np.float32)
    values = features[..., list(model.indices)] * scales
    values -= np.array(model.means, np.float32) * scales
    for depth, (weights, biases) in enumerate(model.layers):
        values = values @ np.array(weights, np.float32).T + np.array(biases, np.float32)
        if depth < len(model.layers) - 1:
            np.tanh(values, out=values)
    return np.asarray(values[..., 0].clip(-LARGEST_LOGIT, LARGEST_LOGIT))


def evidence(model: Model, features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the evidence of [runs, steps], as the watch has it; -inf in the first steps."""
    scores = logits(model, features)
    out = np.full(scores.shape, -np.inf, np.float32)
    if scores.shape[1] <= FIRST_STEP:
        return out
    now = scores[:, FIRST_STEP]
    for step in range(FIRST_STEP, scores.shape[1]):
        now = now + (scores[:, step] - now) / model.memory
        out[:, step] = now
    return out


def warnings(evidence_of_run: NDArray[np.float32], limit: float) -> list[tuple[int, int]]:
    """Return the first step of every warning, and the step at which it is over."""
    if not (evidence_of_run > limit).any():
        return []
    switch = Hysteresis(limit)
    found: list[tuple[int, int]] = []
    for step, level in enumerate(evidence_of_run.tolist()):
        if switch.observe(level):
            found.append((step, len(evidence_of_run)))
        elif found and not switch.is_on and found[-1][1] == len(evidence_of_run):
            found[-1] = (found[-1][0], step)
    return found


@dataclass
class Judgement:
    """Counts over the runs of a dataset."""

    in_time: dict[str, list[bool]] = field(default_factory=dict)
    lead: dict[str, list[int]] = field(default_factory=dict)
    instant: list[bool] = field(default_factory=list)
    false_warnings: int = 0
    falsely_warned_steps: int = 0
    healthy_steps: int = 0
    false_by_kind: dict[str, list[bool]] = field(default_factory=dict)

    @property
    def detection(self) -> float:
        """Share of slow failures warned of before their loss had doubled."""
        hits = [hit for hits in self.in_time.values() for hit in hits]
        return sum(hits) / len(hits) if hits else float("nan")

    @property
    def false_per_10k(self) -> float:
        """False warnings per 10,000 healthy steps."""
        return 1e4 * self.false_warnings / max(self.healthy_steps, 1)

    @property
    def median_lead(self) -> float:
        """Steps between the warning and the doubled loss, where there was one."""
        leads = [step for steps in self.lead.values() for step in steps]
        return float(np.median(leads)) if leads else float("nan")

    def add(self, other: "Judgement") -> None:
        """Count the runs of another judgement too."""
        for name in ("in_time", "lead", "false_by_kind"):
            for kind, values in getattr(other, name).items():
                getattr(self, name).setdefault(kind, []).extend(values)
        self.instant += other.instant
        self.false_warnings += other.false_warnings
        self.falsely_warned_steps += other.falsely_warned_steps
        self.healthy_steps += other.healthy_steps


def judge(dataset: Dataset, evidence_of: NDArray[np.float32], limit: float) -> Judgement:
    """Judge every run: a fault must be warned of from its onset on, and heard before the damage.

    Warnings in healthy runs, and before a fault, are false.
    """
    told = Judgement()
    steps = evidence_of.shape[1]
    for run in range(len(dataset)):
        onset, kind = int(dataset.onset[run]), str(dataset.kind[run])
        if onset < 0 and not dataset.healthy[run]:
            continue
        found = warnings(evidence_of[run], limit)
        begun = [step for step, _ in found]
        end = onset if onset >= 0 else steps
        early = [step for step in begun if step < end]
        told.false_warnings += len(early)
        told.falsely_warned_steps += sum(
            min(over, end) - step for step, over in found[: len(early)]
        )
        told.healthy_steps += end - FIRST_STEP
        if onset < 0:
            told.false_by_kind.setdefault(kind, []).append(bool(early))
        elif kind in INSTANT:
            told.instant.append(any(onset - BEFORE <= step < onset - LAG for step in begun))
        elif dataset.damage[run] >= 0:
            damage = int(dataset.damage[run])
            useful = [step for step in begun if onset <= step < damage - LAG]
            told.in_time.setdefault(kind, []).append(bool(useful))
            if useful:
                told.lead.setdefault(kind, []).append(damage - LAG - useful[0])
    return told
