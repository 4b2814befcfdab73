"""Gradients to test with, and the float64 truth about them."""

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

# Around the vector width, a row of lanes, a block and a chunk of csrc/math/grad_stats.h.
SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 16383, 16384, 16385, 40000]


def dtype_name(value):
    return str(value).removeprefix("torch.")


def make_grads(shapes, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        for shape in shapes
    ]


def exact_sumsq(grads):
    """Sums of squares in float64, of what the dtype holds."""
    return torch.stack([g.double().square().sum() for g in grads])
