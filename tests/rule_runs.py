"""Runs a clip rule over a history of norms, on any backend, with its defaults by name."""

import math
from typing import NamedTuple

import torch

import zclip
from zclip.layout import BUFFER_COLUMN, GAMMA_COLUMN, HISTORY_COLUMN, WINDOW_COLUMN
from zclip.reference import IDS, RULES

DEFAULTS = {
    "zclip_": {
        "alpha": 0.97,
        "z_thresh": 2.5,
        "max_grad_norm": math.inf,
        "eps": 1e-6,
        "warmup_steps": 25,
        "clip_mode": 0,
        "clip_factor": 1.0,
        "skip_update_on_spike": False,
        "skip_step_on_spike": False,
        "on_nonfinite": 0,
    },
    "adagc_": {
        "lambda_rel": 1.04,
        "beta": 0.99,
        "lambda_abs": 1.0,
        "eps": 1e-6,
        "warmup_steps": 100,
        "seed": 0,
        "on_nonfinite": 0,
    },
    "spike_skip_": {"window": 128, "sigma": 6.0, "min_count": 2, "on_nonfinite": 0},
    "auto_clip_": {"percentile": 10.0, "history": 1000, "on_nonfinite": 0},
}
NO_LOSS = torch.empty(0)


def clipper_of(name, **settings):
    """The clipper of a rule, with the defaults it has; what a new rule is tested with."""
    if name == "global_norm":
        settings = {"max_norm": 1.0} | settings
    return zclip.clippers.CLIPPERS[name](**settings)


for _rule in RULES:
    if _rule.name != "global_norm":
        DEFAULTS.setdefault(f"{_rule.name}_", _rule.typed(clipper_of(_rule.name).settings({})))


def takes_loss(rule):
    return RULES[IDS[rule[:-1]]].takes_loss


def settings_of(rule, **changed):
    """The settings of a rule, in order; unknown names are an error."""
    assert set(changed) <= set(DEFAULTS[rule])
    return list((DEFAULTS[rule] | changed).values())


def fresh_state(rule, num_tensors=1, **changed):
    settings = DEFAULTS[rule] | changed
    sizes = {
        "zclip_": lambda: BUFFER_COLUMN + max(1, settings["warmup_steps"]),
        "adagc_": lambda: GAMMA_COLUMN + num_tensors,
        "spike_skip_": lambda: WINDOW_COLUMN + 2 * settings["window"],
        "auto_clip_": lambda: HISTORY_COLUMN + settings["history"],
    }
    if rule in sizes:
        size = sizes[rule]()
    else:
        changed.pop("on_nonfinite", None)  # no size depends on it
        size = clipper_of(rule[:-1], **changed).state_size(num_tensors)
    return torch.zeros(size, dtype=torch.float64)


def stats_of(*norms):
    """Stats of tensors with these norms; a norm that is NaN or Inf is one bad element."""
    rows = []
    for norm in norms:
        if math.isnan(norm):
            rows.append([1.0, 1.0, 0.0])
        elif math.isinf(norm):
            rows.append([1.0, 0.0, 1.0])
        else:
            rows.append([norm * norm, 0.0, 0.0])
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)


class Step(NamedTuple):
    coefs: list[float]
    verdict: torch.Tensor
    state: torch.Tensor  # after the step


def run(backend, rule, history, /, losses=None, state=None, **changed):
    """Feed the rule one tuple of norms (or one norm) after the other; return every step."""
    history = [norms if isinstance(norms, tuple) else (norms,) for norms in history]
    if state is None:
        state = fresh_state(rule, len(history[0]), **changed)
    steps = []
    for i, norms in enumerate(history):
        extra = []
        if takes_loss(rule):
            extra = [NO_LOSS if losses is None else torch.tensor(losses[i], dtype=torch.float64)]
        op = getattr(backend, rule)
        coefs, verdict = op(state, stats_of(*norms), *extra, *settings_of(rule, **changed))
        steps.append(Step(coefs.tolist(), verdict, state.clone()))
    return steps


def noisy_norms(count, seed=0, spikes=True):
    """Norms as training has them: lognormal noise, a slow drift, now and then a spike."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    chance = torch.rand(count, generator=generator, dtype=torch.float64)
    drift = torch.linspace(0.0, 0.5, count, dtype=torch.float64)
    norms = (0.15 * noise + drift).exp()
    if spikes:
        norms = torch.where(chance < 0.05, norms * 10 ** (1 + 40 * chance), norms)
    return norms.tolist()
