"""The gradient-noise scale: the batch size from which a larger batch brings little."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from heal.data.split import num_samples
from heal.probes.undisturbed import freeze_batch_statistics, pieces_of, undisturbed
from heal.step.micro_batch import TrainStep


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """Estimates without bias of the two parts of a gradient (McCandlish et al., arXiv:1812.06162).

    ``signal`` is the squared length of the true gradient, ``noise`` the trace of the covariance of
    one sample's. The estimate of a small signal may come out negative: then there is none to see.
    """

    signal: float
    noise: float

    @property
    def samples(self) -> float:
        """Noise over signal, in samples; infinite where there is no signal to be seen."""
        return self.noise / self.signal if self.signal > 0.0 else math.inf


def noise_scale(
    model: Module, train_step: TrainStep, batch: Any, pieces: int | None = None
) -> NoiseScale:
    """Compare the gradients of the pieces of a batch with that of the whole.

    Batch norms use their running statistics, so that a piece is to be compared with the whole.

    Args:
        model: what is trained.
        train_step: takes a batch, returns its mean loss over samples.
        batch: at least two samples.
        pieces: into how many the batch is cut; one per sample if None.

    Raises:
        ValueError: there is only one piece, or the batch does not divide.
    """
    with undisturbed(model) as params:
        freeze_batch_statistics(model)
        parts = pieces_of(batch, pieces)
        count, samples = len(parts), num_samples(batch)
        if count < 2:
            raise ValueError("one piece tells nothing of noise; wanted at least 2 samples")
        total: list[torch.Tensor] | None = None
        squares = 0.0
        for part in parts:
            grads = torch.autograd.grad(
                train_step(part), [p for _, p in params], allow_unused=True, materialize_grads=True
            )
            squares += float(torch.stack([g.double().square().sum() for g in grads]).sum())
            wide = [g.double() for g in grads]
            total = wide if total is None else [a + b for a, b in zip(total, wide, strict=True)]
        assert total is not None
        small = squares / count  # mean squared length of a piece's gradient
        large = float(torch.stack([(t / count).square().sum() for t in total]).sum())
        size = samples / count
        return NoiseScale(
            signal=(samples * large - size * small) / (samples - size),
            noise=(small - large) / (1.0 / size - 1.0 / samples),
        )
