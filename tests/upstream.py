"""The published algorithms, restated in plain Python on plain floats, host branches and all.

Written from their formulae, to be read beside the papers. Each ``step`` returns what the gradients
are multiplied by. What they do with NaN is what the published code does with it.
"""

import math
from statistics import mean as mean_of
from statistics import stdev

TORCH_EPS = 1e-6


def torch_clip_coef(norm, max_norm):
    """What torch.nn.utils.clip_grad_norm_ multiplies by."""
    coef = max_norm / (norm + TORCH_EPS)
    return 1.0 if coef >= 1.0 else coef


class PlainZClip:
    """arXiv 2504.02507."""

    def __init__(
        self,
        alpha=0.97,
        z_thresh=2.5,
        max_grad_norm=None,
        eps=1e-6,
        warmup_steps=25,
        option="adaptive_scaling",
        clip_factor=1.0,
        skip_update_on_spike=False,
    ):
        self.alpha, self.z_thresh, self.max_grad_norm, self.eps = (
            alpha,
            z_thresh,
            max_grad_norm,
            eps,
        )
        self.warmup_steps, self.option, self.clip_factor = warmup_steps, option, clip_factor
        self.skip_update_on_spike = skip_update_on_spike
        self.buffer, self.mean, self.var = [], None, None

    def step(self, norm):
        if self.mean is None:
            return self._warm_up(norm)
        target = self._target(norm)
        wanted = norm if target is None else target
        allowed = wanted if self.max_grad_norm is None else min(wanted, self.max_grad_norm)
        coef = allowed / (norm + TORCH_EPS) if norm > allowed else 1.0
        if target is None or not self.skip_update_on_spike:
            self.mean = self.alpha * self.mean + (1 - self.alpha) * wanted
            self.var = self.alpha * self.var + (1 - self.alpha) * (wanted - self.mean) ** 2
        return coef

    def _warm_up(self, norm):
        self.buffer.append(norm)
        if len(self.buffer) >= self.warmup_steps:
            count = len(self.buffer)
            self.mean = sum(self.buffer) / count
            self.var = sum((x - self.mean) ** 2 for x in self.buffer) / count
            self.buffer = []
        return 1.0 if self.max_grad_norm is None else torch_clip_coef(norm, self.max_grad_norm)

    def _target(self, norm):
        """The norm to clip to, or None if this one is no outlier."""
        std = math.sqrt(self.var)
        if self.option == "percentile":
            limit = self.mean + self.z_thresh * std
            return limit if norm > limit else None
        z = (norm - self.mean) / (std + self.eps)
        if not z > self.z_thresh:
            return None
        if self.option == "mean":
            return self.mean
        return (self.mean + self.z_thresh * std / (z / self.z_thresh)) * self.clip_factor


class PlainAdaGC:
    """arXiv 2502.11034, with the guard that a norm of zero teaches nothing."""

    def __init__(
        self,
        lambda_rel=1.04,
        beta=0.99,
        lambda_abs=1.0,
        eps=1e-6,
        warmup_steps=100,
        seed="min_clipped",
    ):
        self.lambda_rel, self.beta, self.lambda_abs, self.eps = lambda_rel, beta, lambda_abs, eps
        self.warmup_steps, self.seed = warmup_steps, seed
        self.steps, self.gamma = 0, {}

    def step(self, norms):
        self.steps += 1
        if self.steps <= self.warmup_steps:
            coef = self.lambda_abs / (math.sqrt(sum(n * n for n in norms)) + self.eps)
            coef = coef if coef < 1 else 1.0
            for i, norm in enumerate(norms):
                self._seed(i, norm, norm * coef)
            return [coef if norm else 1.0 for norm in norms]
        return [self._clip(i, norm) for i, norm in enumerate(norms)]

    def _seed(self, i, raw, clipped):
        seen = raw if self.seed == "min_raw" else clipped
        if seen == 0:
            return
        if i not in self.gamma:
            self.gamma[i] = seen
        elif self.seed == "first":
            self.gamma[i] = self.beta * self.gamma[i] + (1 - self.beta) * seen
        elif seen < self.gamma[i]:
            self.gamma[i] = seen

    def _clip(self, i, norm):
        if norm == 0:
            return 1.0
        gamma, coef = self.gamma.get(i, norm), 1.0
        limit = self.lambda_rel * gamma
        if norm > limit:
            coef, norm = limit / (norm + self.eps), limit
        self.gamma[i] = self.beta * gamma + (1 - self.beta) * norm
        return coef


class PlainSpikeSkip:
    """OLMo-core's rule, on windows that only accepted steps enter."""

    def __init__(self, window=128, sigma=6.0, min_count=2):
        self.window, self.sigma, self.min_count = window, sigma, min_count
        self.norms, self.losses = [], []

    def step(self, norm, loss=None):
        fits = self._fits(self.norms, norm) and (loss is None or self._fits(self.losses, loss))
        if not fits:
            return -1.0
        self.norms = [*self.norms, norm][-self.window :]
        if loss is not None:
            self.losses = [*self.losses, loss][-self.window :]
        return 1.0

    def _fits(self, values, value):
        if not math.isfinite(value):
            return False
        if len(values) < max(2, self.min_count):
            return True
        middle = mean_of(values)
        spread = max(stdev(values), 1e-6 * abs(middle))
        return value - middle <= self.sigma * spread
