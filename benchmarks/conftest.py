"""Gradients in the shapes of real models, one block of each so that a run stays short."""

import pytest
import torch

BLOCKS = {
    "gpt2-block": [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072)],
    "llama1b-block": [(2048, 2048)] * 2 + [(512, 2048)] * 2 + [(8192, 2048)] * 3 + [(2048,)] * 2,
    "2000-small": [(64,)] * 2000,
}


@pytest.fixture(params=BLOCKS)
def block(request):
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def grads(request, block):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(request.param) for s in BLOCKS[block]]


@pytest.fixture
def report(benchmark, grads):
    """Run a contender, then note its speed in bytes and its error against float64."""

    def run(function, *args):
        result = benchmark(function, *args)
        seconds = benchmark.stats["median"]
        size = sum(g.numel() * g.element_size() for g in grads)
        benchmark.extra_info["GB/s"] = round(size / seconds / 1e9, 1)
        benchmark.extra_info["us/tensor"] = round(seconds * 1e6 / len(grads), 2)
        return result

    return run
