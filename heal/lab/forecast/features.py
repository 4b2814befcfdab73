"""Numbers that say how a run is doing, from its records alone: plain floats, O(1) a step.

None depends on the scale or the sign of the loss, nor on that of the gradients: levels are compared
with the run's own past, in units of its own noise or of its own level. A loss or norm that is NaN,
Inf or missing leaves the numbers that need it as they were.
"""

import math
from typing import Any

from heal.detectors.robust import LARGEST
from heal.record import Flag, Record

ABOUT: dict[str, str] = {
    "loss_rise": "Mean loss of 8 steps above that of 32, in deviations of its noise.",
    "loss_climb": "Mean loss of 32 steps above that of 128, in deviations of its noise.",
    "loss_undone": "Share of what was learned since the start that the last 8 steps have lost.",
    "loss_trend": "How many more of the last 16 steps raised the mean of 8 than lowered it.",
    "loss_curvature": "Rise of late minus climb before it, in deviations of the noise.",
    "loss_volatility": "Log of the step-to-step noise of 10 steps over that of 100.",
    "loss_autocorrelation": "Correlation of a loss's residual with the one before; -1: zigzag.",
    "loss_reversals": "Share of the last 16 steps that turned round, less the 2/3 of pure noise.",
    "loss_leap": "The largest rise of one step of late, in deviations: a leap is no climb.",
    "norm_growth": "Log of the gradient norm: mean of 8 steps above that of 128.",
    "norm_rate": "Log of the gradient norm: mean of 8 steps above that of 32.",
    "norm_record": "Log of the gradient norm: mean of 8 steps above the highest of 32 ever.",
    "norm_volatility": "Log of the noise of the log norm, 10 steps over 100.",
    "z_run": "Log of how many steps in a row had a norm more than one deviation above usual.",
    "clip_rate": "Share of clipped steps: of the last 16 less of the last 128.",
    "refused_rate": "Share of skipped steps among the last 32.",
    "lr_ratio": "Log of the learning rate over its mean of 128 steps.",
    "lr_growth": "Growth of the learning rate per step, in percent, mean of 16.",
    "lr_beyond": "Log of the learning rate over its highest mean of 32 steps.",
    "lr_leap": "The largest rise of the log rate in one step of late: a jump is no growth.",
    "lr_override": "Log of the learning rate over the scheduled one, where that is known.",
    "lr_climb": "Log of the learning rate over the highest that was not exceeded for 30 steps.",
    "lr_swing": "How much the learning rate goes to and fro, in percent a step, mean of 16.",
    "update_ratio": "Log of update over weight, rate x clipped norm / weights' norm, 8 above 128.",
    "weight_rate": "Growth of the weights' norm per step, between the last two checks.",
    "weight_surge": "Log of that growth over what it usually is.",
    "weight_growth": "Log of the weights' norm over its mean of 128 steps.",
    "throughput": "Log of the seconds per step, 8 over 128. Not in the corpus: in no model.",
}
"""Every feature, in order, with its meaning."""

NAMES = tuple(ABOUT)

FAST, MID, SLOW = 1.0 / 8, 1.0 / 32, 1.0 / 128
NOISE_FAST, NOISE_SLOW, SHARE = 1.0 / 10, 1.0 / 100, 1.0 / 16
DEVIATION = 0.886  # of normal noise, per mean distance of neighbours
LIMIT = 8.0  # of every feature: beyond it more says nothing new
HOLD = 30.0  # steps without a higher one after which a learning rate counts as held
SETTLED = 16  # steps until a level counts as one
FADE = 0.97  # per step, of the largest rises
CHECK_INTERVAL = 10  # steps between two norms of the weights: of more frequent ones some are left
TINY = 1e-30
WEIGHT_TINY = 1e-5  # per step: what weights change by in any training


class Features:
    """Follows one run; :meth:`observe` returns its features after each step, see :data:`NAMES`."""

    def __init__(self) -> None:
        self.steps = self.since_check = 0.0
        # Losses: how many, their levels, the noise from step to step, and what was best.
        self.n = self.fast = self.mid = self.slow = self.noise_fast = self.noise_slow = 0.0
        self.last_loss = self.last_change = self.last_residual = self.leap = self.first = 0.0
        self.trend = self.reversals = self.product = self.square = 0.0
        self.best = math.nan
        # Logs of gradient norms: the same.
        self.m = self.norm_fast = self.norm_mid = self.norm_slow = self.last_norm = 0.0
        self.norm_noise_fast = self.norm_noise_slow = self.z_run = 0.0
        self.norm_peak = math.nan
        self.clip_fast = self.clip_slow = self.refused = 0.0
        # Logs of learning rates, and of updates over weights.
        self.k = self.lr_mid = self.lr_slow = self.lr_change = self.last_lr = self.lr_leap = 0.0
        self.lr_path = self.lr_top_age = self.override = 0.0
        self.lr_peak = self.lr_top = self.lr_held = math.nan
        self.j = self.step_fast = self.step_slow = 0.0
        # Logs of seconds, and of the norm of the weights.
        self.i = self.second_fast = self.second_slow = 0.0
        self.w = self.weight_last = self.weight_slow = 0.0
        self.weight_rate = self.weight_habit = self.weight_surge = 0.0

    def observe(self, record: Record) -> list[float]:
        """Take in a step, in order."""
        self.steps += 1.0
        self.since_check += 1.0
        if record.has_finite_loss and abs(record.loss) < LARGEST:
            self._observe_loss(record.loss)
        if 0.0 < record.norm < LARGEST:
            self._observe_norm(math.log(record.norm))
        clipped = record.has(Flag.CLIPPED)
        self.clip_fast += SHARE * (clipped - self.clip_fast)
        self.clip_slow += SLOW * (clipped - self.clip_slow)
        self.refused += MID * (record.blocked - self.refused)
        if 0.0 < record.lr < LARGEST:
            self._observe_lr(record.lr, record.scheduled_lr, record.clipped_norm)
        if 0.0 < record.seconds < LARGEST:
            self.i += 1.0
            log_seconds = math.log(record.seconds)
            self.second_fast += max(1.0 / self.i, FAST) * (log_seconds - self.second_fast)
            self.second_slow += max(1.0 / self.i, SLOW) * (log_seconds - self.second_slow)
        return self._values()

    def observe_weights(self, norm: float) -> None:
        """Take in the norm of all weights, as it was before the last step that was taken in."""
        is_early = self.w > 0.0 and self.since_check < CHECK_INTERVAL
        if is_early or not 0.0 < norm < LARGEST:
            return
        log_norm = math.log(norm)
        gap, self.since_check = self.since_check, 0.0
        self.w += 1.0
        if self.w == 1.0:
            self.weight_last = self.weight_slow = log_norm
            # Until now updates were not over anything: what changes is the unit, not the run.
            self.step_fast -= log_norm
            self.step_slow -= log_norm
            return
        self.weight_rate = (log_norm - self.weight_last) / gap
        self.weight_last = log_norm
        self.weight_slow += min(gap * SLOW, 1.0) * (log_norm - self.weight_slow)
        rate = abs(self.weight_rate)
        if self.w == 2.0:
            self.weight_habit = rate
            return
        self.weight_surge = math.log((rate + WEIGHT_TINY) / (self.weight_habit + WEIGHT_TINY))
        # A surge becomes a habit slowly, so that it is seen for a while.
        rate = min(rate, 2.0 * self.weight_habit + WEIGHT_TINY)
        self.weight_habit += min(gap * MID, 1.0) * (rate - self.weight_habit)

    def _observe_loss(self, loss: float) -> None:
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
        rise = change / (noise + 1e-4 * abs(self.slow) + TINY)
        self.leap = max(FADE * self.leap, min(rise, 1e6) if self.n > SETTLED else 0.0)
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

    def _observe_norm(self, log_norm: float) -> None:
        self.m += 1.0
        share = 1.0 / self.m
        if self.m == 1.0:
            self.last_norm = log_norm
        deviation = DEVIATION * self.norm_noise_slow + 1e-3
        is_high = self.m > SETTLED and log_norm - self.norm_slow > deviation
        self.z_run = self.z_run + 1.0 if is_high else 0.0
        distance = abs(log_norm - self.last_norm)
        cap = 5.0 * self.norm_noise_slow + 1e-3 if self.m > 8.0 else LARGEST
        self.norm_noise_fast += max(share, NOISE_FAST) * (distance - self.norm_noise_fast)
        self.norm_noise_slow += max(share, NOISE_SLOW) * (min(distance, cap) - self.norm_noise_slow)
        self.norm_fast += max(share, FAST) * (log_norm - self.norm_fast)
        self.norm_mid += max(share, MID) * (log_norm - self.norm_mid)
        self.norm_slow += max(share, SLOW) * (log_norm - self.norm_slow)
        self.last_norm = log_norm
        if self.m >= SETTLED and not self.norm_mid <= self.norm_peak:
            self.norm_peak = self.norm_mid

    def _observe_lr(self, lr: float, scheduled_lr: float, clipped_norm: float) -> None:
        self.k += 1.0
        share = 1.0 / self.k
        log_lr = math.log(lr)
        if self.k == 1.0:
            self.last_lr = log_lr
        self.lr_leap = max(FADE * self.lr_leap, log_lr - self.last_lr)
        self.lr_change += SHARE * (log_lr - self.last_lr - self.lr_change)
        self.lr_path += SHARE * (abs(log_lr - self.last_lr) - self.lr_path)
        self.last_lr = log_lr
        self.lr_mid += max(share, MID) * (log_lr - self.lr_mid)
        self.lr_slow += max(share, SLOW) * (log_lr - self.lr_slow)
        if not self.lr_mid <= self.lr_peak:
            self.lr_peak = self.lr_mid
        self.lr_top_age += 1.0
        if not log_lr <= self.lr_top + 1e-3:
            self.lr_top, self.lr_top_age = log_lr, 0.0
        elif self.lr_top_age >= HOLD:
            self.lr_held = self.lr_top
        self.override = log_lr - math.log(scheduled_lr) if 0.0 < scheduled_lr < LARGEST else 0.0
        if 0.0 < clipped_norm < LARGEST:
            self.j += 1.0
            size = log_lr + math.log(clipped_norm) - self.weight_last
            self.step_fast += max(1.0 / self.j, FAST) * (size - self.step_fast)
            self.step_slow += max(1.0 / self.j, SLOW) * (size - self.step_slow)

    def _values(self) -> list[float]:
        noise = DEVIATION * self.noise_slow + 1e-4 * abs(self.slow) + TINY
        rise, climb = self.fast - self.mid, self.mid - self.slow
        learned = self.first - self.best
        undone = (self.fast - self.best) / max(learned, noise) if self.n >= SETTLED else 0.0
        high = self.norm_fast - self.norm_peak if self.m >= SETTLED else 0.0
        volatility = math.log((self.noise_fast + 1e-3 * noise) / (self.noise_slow + 1e-3 * noise))
        norm_volatility = math.log((self.norm_noise_fast + 1e-3) / (self.norm_noise_slow + 1e-3))
        values = (
            _compressed(rise / noise),
            _compressed(climb / noise),
            _compressed(4.0 * undone),
            self.trend,
            _compressed((rise - climb) / noise),
            volatility if self.n > 2.0 else 0.0,
            self.product / self.square if self.square > TINY else 0.0,
            self.reversals,
            _compressed(self.leap),
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
            self.lr_leap,
            self.override,
            self.last_lr - self.lr_held if self.last_lr > self.lr_held else 0.0,
            math.log1p(100.0 * max(self.lr_path - abs(self.lr_change), 0.0)),
            self.step_fast - self.step_slow,
            _compressed(200.0 * self.weight_rate),
            self.weight_surge,
            _compressed(20.0 * (self.weight_last - self.weight_slow)),
            self.second_fast - self.second_slow,
        )
        # Written out: two calls for each of so many numbers would be a fifth of the step's cost.
        return [v if -LIMIT <= v <= LIMIT else math.copysign(LIMIT, v) for v in values]

    def state(self) -> dict[str, Any]:
        """Return all that is remembered, as values that JSON has."""
        return {name: value if value == value else None for name, value in vars(self).items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Remember what :meth:`state` returned, and nothing else."""
        for name in vars(self):
            value = state[name]
            setattr(self, name, math.nan if value is None else float(value))


def _compressed(value: float) -> float:
    """Signed log: near the origin as it is, far from it by orders of magnitude."""
    return math.copysign(math.log1p(abs(value)), value)
