"""Streams of records as healthy and sick runs have them, made without training anything."""

import math

import numpy as np

from heal.causes import Severity
from heal.config import HealingConfig
from heal.detect import Watch
from heal.verdict import Flag, Record


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
