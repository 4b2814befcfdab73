"""Numbers that say how a run is doing, from its records alone: plain floats, O(1) a step.

None depends on the scale or the sign of the loss, nor on that of the gradients: levels are compared
with the run's own past, in units of its own noise or of its own level. A loss or norm that is NaN,
Inf or missing leaves the numbers that need it as they were.
"""

import math
from typing import Any

from heal.robust import LARGEST
from heal.verdict import Flag, Record

ABOUT: dict[str, str] = {
    "loss_rise": "Mean loss of 8 steps above that of 32, in deviations of its noise.",
    "loss_climb": "Mean loss of 32 steps above that of 128, in deviations of its noise.",
    "loss_rise_share": "Mean loss of 8 steps above that of 32, as a share of its level.",
    "loss_climb_share": "Mean loss of 8 steps above that of 128, as a share of its level.",
    "loss_undone": "Share of what was learned since the start that the last 8 steps have lost.",
    "loss_trend": "How many more of the last 16 steps raised the mean of 8 than lowered it.",
    "loss_curvature": "Rise of late minus climb before it, in deviations of the noise.",
    "loss_volatility": "Log of the step-to-step noise of 10 steps over that of 100.",
    "loss_autocorrelation": "Correlation of a loss's residual with the one before; -1: zigzag.",
    "loss_reversals": "Share of the last 16 steps that turned round, less the 2/3 of pure noise.",
    "norm_growth": "Log of the gradient norm: mean of 8 steps above that of 128.",
    "norm_rate": "Log of the gradient norm: mean of 8 steps above that of 32.",
    "norm_record": "Log of the gradient norm: mean of 8 steps above the highest of 32 ever.",
    "norm_volatility": "Log of the noise of the log norm, 10 steps over 100.",
    "z_run": "Log of how many steps in a row had a norm more than one deviation above usual.",
    "clip_rate": "Share of clipped steps: of the last 16 less of the last 128.",
    "refused_rate": "Share of refused steps among the last 32.",
    "lr_ratio": "Log of the learning rate over its mean of 128 steps.",
    "lr_growth": "Growth of the learning rate per step, in percent, mean of 16.",
    "lr_beyond": "Log of the learning rate over its highest mean of 32 steps.",
    "lr_override": "Log of the learning rate over the scheduled one, where that is known.",
    "step_growth": "Log of rate times clipped norm, in place of update over weight, 8 above 128.",
    "coupling": "Correlation of loss and log norm, both against their means of 32.",
    "throughput": "Log of the seconds per step, 8 over 128. Differs by rank: in no shipped model.",
    "age": "Log of the number of steps, in thousands' logs.",
}
"""Every feature, in order, with its meaning."""

NAMES = tuple(ABOUT)

FAST, MID, SLOW = 1.0 / 8, 1.0 / 32, 1.0 / 128
NOISE_FAST, NOISE_SLOW, SHARE = 1.0 / 10, 1.0 / 100, 1.0 / 16
DEVIATION = 0.886  # of normal noise, per mean distance of neighbours
LIMIT = 8.0  # of every feature: beyond it more says nothing new
SETTLED = 16  # steps until a level counts as one
TINY = 1e-30

_STATE = (
    "n",
    "fast",
    "mid",
    "slow",
    "noise_fast",
    "noise_slow",
    "last_loss",
    "last_change",
    "last_residual",
    "first",
    "best",
    "trend",
    "reversals",
    "product",
    "square",
    "m",
    "norm_fast",
    "norm_mid",
    "norm_slow",
    "norm_noise_fast",
    "norm_noise_slow",
    "last_norm",
    "norm_peak",
    "z_run",
    "clip_fast",
    "clip_slow",
    "refused",
    "k",
    "lr_mid",
    "lr_slow",
    "lr_change",
    "last_lr",
    "lr_peak",
    "override",
    "j",
    "step_fast",
    "step_slow",
    "coupled",
    "norm_square",
    "loss_square",
    "i",
    "second_fast",
    "second_slow",
    "steps",
)


class Features:
    """Follows one run; :meth:`observe` returns its features after each step, see :data:`NAMES`."""

    __slots__ = _STATE

    def __init__(self) -> None:
        for name in _STATE:
            setattr(self, name, 0.0)
        self.best = self.norm_peak = self.lr_peak = math.nan

    def observe(self, record: Record) -> list[float]:
        """Hear of a step, in order."""
        return self.update(
            record.loss if record.has_finite_loss else math.nan,
            record.norm,
            record.clipped_norm,
            record.lr,
            record.scheduled_lr,
            record.has(Flag.CLIPPED),
            record.blocked,
            record.seconds,
        )

    def update(
        self,
        loss: float,
        norm: float,
        clipped_norm: float,
        lr: float,
        scheduled_lr: float,
        clipped: bool,
        blocked: bool,
        seconds: float,
    ) -> list[float]:
        """As :meth:`observe`, from plain numbers."""
        self.steps += 1.0
        residual = 0.0
        if abs(loss) < LARGEST:
            residual = self._hear_loss(loss)
        log_norm = math.log(norm) if 0.0 < norm < LARGEST else math.nan
        if log_norm == log_norm:
            self._hear_norm(log_norm, residual)
        self.clip_fast += SHARE * (clipped - self.clip_fast)
        self.clip_slow += SLOW * (clipped - self.clip_slow)
        self.refused += MID * (blocked - self.refused)
        if 0.0 < lr < LARGEST:
            self._hear_lr(lr, scheduled_lr, clipped_norm)
        if 0.0 < seconds < LARGEST:
            self.i += 1.0
            log_seconds = math.log(seconds)
            self.second_fast += max(1.0 / self.i, FAST) * (log_seconds - self.second_fast)
            self.second_slow += max(1.0 / self.i, SLOW) * (log_seconds - self.second_slow)
        return self._values()

    def _hear_loss(self, loss: float) -> float:
        """Take in a loss; return how far it lies from its mean of 32, in deviations."""
        self.n += 1.0
        share = 1.0 / self.n
        if self.n == 1.0:
            self.last_loss = self.fast = self.mid = self.slow = loss
        noise = DEVIATION * self.noise_slow
        # One freak loss must not become the level.
        reach = 20.0 * noise + abs(self.mid) + TINY
        if self.n > SETTLED:
            loss = min(max(loss, self.mid - reach), self.mid + reach)
        change = loss - self.last_loss
        distance = abs(change)
        cap = 5.0 * self.noise_slow + 1e-3 * abs(self.slow) + TINY if self.n > 8.0 else LARGEST
        self.noise_fast += max(share, NOISE_FAST) * (distance - self.noise_fast)
        self.noise_slow += max(share, NOISE_SLOW) * (min(distance, cap) - self.noise_slow)
        residual = loss - self.mid
        before = self.fast
        self.fast += max(share, FAST) * (loss - self.fast)
        self.mid += max(share, MID) * residual
        self.slow += max(share, SLOW) * (loss - self.slow)
        self.trend += SHARE * ((1.0 if self.fast > before else -1.0) - self.trend)
        turned = change * self.last_change < 0.0
        self.reversals += SHARE * (turned - 2.0 / 3.0 - self.reversals)
        self.product += MID * (residual * self.last_residual - self.product)
        self.square += MID * (residual * residual - self.square)
        self.last_loss, self.last_change, self.last_residual = loss, change, residual
        if self.n <= 8.0:
            self.first = self.fast
        if self.n >= SETTLED and not self.mid >= self.best:
            self.best = self.mid
        return residual / (noise + 1e-4 * abs(self.slow) + TINY)

    def _hear_norm(self, log_norm: float, residual: float) -> None:
        self.m += 1.0
        share = 1.0 / self.m
        if self.m == 1.0:
            self.last_norm = log_norm
        deviation = DEVIATION * self.norm_noise_slow + 1e-3
        off = log_norm - self.norm_mid
        is_high = self.m > SETTLED and log_norm - self.norm_slow > deviation
        self.z_run = self.z_run + 1.0 if is_high else 0.0
        distance = abs(log_norm - self.last_norm)
        cap = 5.0 * self.norm_noise_slow + 1e-3 if self.m > 8.0 else LARGEST
        self.norm_noise_fast += max(share, NOISE_FAST) * (distance - self.norm_noise_fast)
        self.norm_noise_slow += max(share, NOISE_SLOW) * (min(distance, cap) - self.norm_noise_slow)
        self.norm_fast += max(share, FAST) * (log_norm - self.norm_fast)
        self.norm_mid += max(share, MID) * off
        self.norm_slow += max(share, SLOW) * (log_norm - self.norm_slow)
        self.last_norm = log_norm
        if self.m >= SETTLED and not self.norm_mid <= self.norm_peak:
            self.norm_peak = self.norm_mid
        off = min(max(off / deviation, -LIMIT), LIMIT)
        residual = min(max(residual, -LIMIT), LIMIT)
        self.coupled += MID * (off * residual - self.coupled)
        self.norm_square += MID * (off * off - self.norm_square)
        self.loss_square += MID * (residual * residual - self.loss_square)

    def _hear_lr(self, lr: float, scheduled_lr: float, clipped_norm: float) -> None:
        self.k += 1.0
        share = 1.0 / self.k
        log_lr = math.log(lr)
        if self.k == 1.0:
            self.last_lr = log_lr
        self.lr_change += SHARE * (log_lr - self.last_lr - self.lr_change)
        self.last_lr = log_lr
        self.lr_mid += max(share, MID) * (log_lr - self.lr_mid)
        self.lr_slow += max(share, SLOW) * (log_lr - self.lr_slow)
        if not self.lr_mid <= self.lr_peak:
            self.lr_peak = self.lr_mid
        self.override = log_lr - math.log(scheduled_lr) if 0.0 < scheduled_lr < LARGEST else 0.0
        if 0.0 < clipped_norm < LARGEST:
            self.j += 1.0
            size = log_lr + math.log(clipped_norm)
            self.step_fast += max(1.0 / self.j, FAST) * (size - self.step_fast)
            self.step_slow += max(1.0 / self.j, SLOW) * (size - self.step_slow)

    def _values(self) -> list[float]:
        noise = DEVIATION * self.noise_slow + 1e-4 * abs(self.slow) + TINY
        rise, climb = self.fast - self.mid, self.mid - self.slow
        learned = self.first - self.best
        undone = (self.fast - self.best) / max(learned, noise) if self.n >= SETTLED else 0.0
        high = self.norm_fast - self.norm_peak if self.m >= SETTLED else 0.0
        spread = math.sqrt(self.norm_square * self.loss_square)
        volatility = math.log((self.noise_fast + 1e-3 * noise) / (self.noise_slow + 1e-3 * noise))
        norm_volatility = math.log((self.norm_noise_fast + 1e-3) / (self.norm_noise_slow + 1e-3))
        values = (
            _compressed(rise / noise),
            _compressed(climb / noise),
            _compressed(4.0 * rise / max(abs(self.mid), noise)),
            _compressed(4.0 * (self.fast - self.slow) / max(abs(self.slow), noise)),
            _compressed(4.0 * undone),
            self.trend,
            _compressed((rise - climb) / noise),
            volatility if self.n > 2.0 else 0.0,
            self.product / self.square if self.square > TINY else 0.0,
            self.reversals,
            self.norm_fast - self.norm_slow,
            self.norm_fast - self.norm_mid,
            high,
            norm_volatility,
            math.log1p(self.z_run),
            self.clip_fast - self.clip_slow,
            self.refused,
            self.last_lr - self.lr_slow,
            100.0 * self.lr_change,
            self.last_lr - self.lr_peak if self.k else 0.0,
            self.override,
            self.step_fast - self.step_slow,
            self.coupled / spread if spread > TINY else 0.0,
            self.second_fast - self.second_slow,
            math.log1p(self.steps) / 6.9,
        )
        return [min(max(value, -LIMIT), LIMIT) for value in values]

    def state(self) -> dict[str, Any]:
        """Return all that is remembered, as values that JSON has."""
        values = {name: getattr(self, name) for name in _STATE}
        return {name: value if value == value else None for name, value in values.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Remember what :meth:`state` returned, and nothing else."""
        for name in _STATE:
            value = state[name]
            setattr(self, name, math.nan if value is None else float(value))


def _compressed(value: float) -> float:
    """Signed log: near the origin as it is, far from it by orders of magnitude."""
    return math.copysign(math.log1p(abs(value)), value)
