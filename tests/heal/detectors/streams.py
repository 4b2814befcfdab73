"""Streams of records as healthy and sick runs have them, made without training anything."""

import math

import numpy as np

from heal.causes import Severity
from heal.config import HealingConfig
from heal.detectors.watch import Watch
from heal.record import Flag, HealthRow, Record


def records(losses, norms=None, lrs=None, scheduled_lrs=None, seconds=None):
    """A record per loss; norms of about 1 unless told."""
    generator = np.random.default_rng(0)
    for step, loss in enumerate(losses):
        norm = float(np.exp(0.3 * generator.standard_normal())) if norms is None else norms[step]
        yield Record(
            step=step,
            loss=float(loss),
            norm=float(norm),
            flags=Flag(0) if math.isfinite(loss) else Flag.LOSS_NAN,
            blocked=not math.isfinite(loss),
            lr=math.nan if lrs is None else float(lrs[step]),
            scheduled_lr=math.nan if scheduled_lrs is None else float(scheduled_lrs[step]),
            seconds=math.nan if seconds is None else float(seconds[step]),
        )


def findings(stream, config=None):
    """Everything that the detectors find in a stream."""
    watch = Watch(config or HealingConfig())
    return [finding for record in stream for finding in watch.observe(record)]


def alarms(stream, config=None):
    """The findings that would change training."""
    return [f for f in findings(stream, config) if f.severity >= Severity.ERROR]


def learning_curve(steps, start=2.3, end=0.3, time=400.0):
    return end + (start - end) * np.exp(-np.arange(steps) / time)


def healthy_streams(seed, steps=3000):
    """Names and losses of runs in which nothing is wrong."""
    g = np.random.default_rng(seed)
    normal = g.standard_normal(steps)
    heavy = g.standard_t(2, steps)
    curve = learning_curve(steps)
    t = np.arange(steps)
    yield "quiet", curve + 0.02 * normal
    yield "noisy", np.abs(curve + 0.3 * normal)
    yield "heavy tails", curve + 0.05 * np.abs(heavy)
    yield "cauchy", curve + 0.01 * np.abs(g.standard_cauchy(steps))
    yield "interpolation", learning_curve(steps, 2.3, 0.0, 150.0) * np.exp(0.8 * normal)
    yield (
        "memorised, rare hard batches",
        np.where(g.random(steps) < 0.05, g.uniform(0.0, 2.0, steps), 1e-4 * np.exp(normal)),
    )
    yield "tiny", 1e-7 * (1 + 0.2 * normal)
    yield "negative", -3.0 + learning_curve(steps, 4.0, -1.0) + 0.1 * normal
    yield "crosses zero", learning_curve(steps, 1.0, -1.0) + 0.1 * normal
    yield "zero-centred", 0.3 * normal
    yield "zero-centred, heavy", 0.1 * heavy
    yield "exactly zero", np.zeros(steps)
    yield "zero, then noise", np.where(t < g.integers(5, 400), 0.0, 0.3 * normal)
    yield "zero, mostly", np.where(g.random(steps) < 0.7, 0.0, 0.2 * normal)
    yield "grpo, kl grows", np.where(t < 20, 0.0, 0.02 * normal + 1e-4 * t)
    yield "grpo, kl grows quietly", 1e-5 * normal + 0.1 * (1 - np.exp(-t / 800.0))
    jump = g.integers(600, 2000)
    harder = np.where(t < jump, curve, 0.3 + 1.9 * np.exp(-np.maximum(t - jump, 0) / 300.0))
    yield "curriculum jump", harder + 0.05 * normal
    longer = np.where(t < jump, curve, curve + 0.8)
    yield "curriculum, level stays", longer + 0.05 * normal
    period = 500
    restart = 0.4 + 0.5 * (1 + np.cos(np.pi * (t % period) / period)) * np.exp(-t / 3000)
    restart = np.where(t < period, curve + 0.4, restart)
    yield "warm restarts", restart + 0.05 * normal
    yield (
        "warm restarts, slow to rise",
        np.convolve(restart, np.ones(40) / 40, "same") + (0.05 * normal),
    )
    yield "dpo", 0.6931 - 0.4 * (1 - np.exp(-t / 1500)) + 0.03 * normal
    yield "chance for ever", 0.6931 + 0.02 * normal
    yield "epochs", curve * (1 + 0.15 * np.sin(2 * np.pi * t / 300)) + 0.05 * normal
    yield (
        "mixture of easy and hard",
        np.where(g.random(steps) < 0.3, 3.0, 0.1) * np.exp(0.2 * normal),
    )
    yield "large", 1e6 * (curve + 0.1 * normal)
    yield "float16 steps", np.round(curve + 0.02 * normal, 2)
    yield "overfitted, noisy labels", np.abs(0.05 + 0.05 * heavy)
    yield "slow rise of a critic", np.cumsum(0.01 * normal)
    yield "warm-up rises first", curve + 0.5 * np.exp(-(((t - 60) / 30.0) ** 2)) + 0.05 * normal


def norm_streams(seed, steps=2000):
    """Names and gradient norms of runs in which nothing is wrong."""
    g = np.random.default_rng(seed)
    normal, t = g.standard_normal(steps), np.arange(steps)
    yield "heavy tails", np.abs(g.standard_cauchy(steps))
    yield "shrinking", np.exp(-t / 300) * np.exp(0.3 * normal)
    yield "growing", np.exp(t / 500) * np.exp(0.3 * normal)
    yield "zero, mostly", np.where(g.random(steps) < 0.8, 0.0, np.exp(normal))
    yield "zero at first", np.where(t < 300, 0.0, np.exp(0.3 * normal))
    yield "tiny at first", np.where(t < 300, 1e-9, 1.0) * np.exp(0.3 * normal)
    yield "a new regime", np.where(t < 1000, 1.0, 500.0) * np.exp(0.3 * normal)
    yield "clipped by the caller", np.full(steps, 1.0)
    yield "rare giants", np.where(g.random(steps) < 0.01, 1e6, 1.0)
    yield "giants in pairs", np.where((t % 200) < 2, 1e5, 1.0)


def schedules(steps=2000):
    """Names and learning rates as schedules have them."""
    t = np.arange(steps)
    yield "constant", np.full(steps, 1e-3)
    yield "zero", np.zeros(steps)
    yield "cosine to zero", 5e-4 * (1 + np.cos(np.pi * t / steps))
    yield "warm-up from zero", np.minimum(t / 500, 1.0) * 1e-3
    yield "steep warm-up", 1e-3 * np.minimum(1.0, 10.0 ** (t / 20 - 6))
    yield "warm restarts", 1e-6 + 5e-4 * (1 + np.cos(np.pi * (t % 300) / 300))
    yield "one cycle", 1e-3 * np.exp(-(((t - 600) / 300.0) ** 2))
    yield "steps down", 1e-2 * 0.1 ** (t // 500)
    yield "second phase, higher", np.where(t < 500, 1e-6, 1e-3)


def durations(seed, steps=2000):
    """Names and seconds per step of runs that keep their pace."""
    g = np.random.default_rng(seed)
    normal, t = g.standard_normal(steps), np.arange(steps)
    usual = 0.1 * np.exp(0.1 * normal)
    yield "even", usual
    yield "uneven", 0.1 * np.exp(0.5 * normal)
    yield "slow at first", np.where(t < 20, 50.0, usual)
    yield "a checkpoint every 100 steps", np.where(t % 100 < 3, 5.0, usual)
    yield "an evaluation every 10 steps", np.where(t % 10 == 0, 2.0, usual)
    yield "long sequences now and then", np.where(g.random(steps) < 0.2, 4.0, 1.0) * usual


def weight_rows(seed, checks=60):
    """Names and checks of weights and moments that training moves: at powers of two, then evenly.

    Four tensors, a weight, a bias that starts at zero and two more, 50 steps between checks.
    """
    g = np.random.default_rng(seed)
    steps = [0, 1, 2, 4, 8, 16, 32, *range(50, 50 * (checks - 6), 50)]
    start = np.array([4.0, 0.0, 1.0, 12.0])
    growths = {
        "grows as the root of time": lambda t: 0.2 * np.sqrt(t),
        "fast, then slow": lambda t: 5.0 * (1 - np.exp(-t / 100)),
        "linear": lambda t: 0.01 * t,
        "decays": lambda t: -0.8 * start * (1 - np.exp(-t / 500)),
    }
    for name, growth in growths.items():
        rows = []
        for step in steps:
            norms = np.abs(start + growth(step)) * np.exp(0.01 * g.standard_normal(4))
            rows.append(
                HealthRow(
                    step=step,
                    weight_norms=tuple(norms),
                    weight_bad=(0,) * 4,
                    moment_norms=tuple(norms / 10),
                    moment_bad=(0,) * 4,
                    step_counters=(float(step),) * 4,
                    names=("weight", "bias", "norm", "head"),
                )
            )
        yield name, rows


def logs(seed, lines=1000):
    """Names and lines of the logs of preference and reinforcement runs that learn."""
    g = np.random.default_rng(seed)
    t, normal = np.arange(lines), g.standard_normal((4, lines))
    learned = 1 - np.exp(-t / 300)
    drift = np.zeros(lines)
    for i in range(1, lines):
        drift[i] = 0.8 * drift[i - 1] + 0.03 * normal[0, i]
    yield (
        "DPO",
        _lines(
            {
                "loss": math.log(2) - 0.3 * learned + 0.03 * normal[0],
                "rewards/accuracies": np.clip(0.5 + 0.4 * learned + 0.1 * normal[1], 0, 1),
                "rewards/margins": learned + 0.2 * normal[2],
                "logps/chosen": -100.0 * (1 + 0.8 * learned) + 10 * normal[3],
            }
        ),
    )
    yield (
        "ORPO",
        _lines(
            {
                "loss": 2.0 - learned + 0.1 * normal[0],
                "nll_loss": 2.0 - 0.8 * learned + 0.2 * normal[1],
                "log_odds_chosen": learned - 0.05 + 0.3 * normal[2],
            }
        ),
    )
    yield (
        "GRPO",
        _lines(
            {
                "reward": 0.3 + 0.5 * learned + drift + 0.1 * normal[1],
                "reward_std": np.abs(0.2 + 0.05 * normal[2]),
                "frac_reward_zero_std": g.choice([0.0, 0.25, 0.5], lines),
                "kl": np.abs(0.002 * t * np.exp(0.5 * normal[3])),
            }
        ),
    )
    yield (
        "GRPO, easy and hard prompts",
        _lines(
            {
                "reward": 0.5 + 0.1 * np.sin(t / 10) + 0.05 * normal[1],
                "kl": np.abs(5.0 * learned * np.exp(0.3 * normal[3])),
            }
        ),
    )


def _lines(columns):
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, map(float, row), strict=True)) for row in rows]
