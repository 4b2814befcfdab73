"""Parameter shapes to measure on: of real models, by their formulae, and of the corners."""

from collections.abc import Callable
from math import prod

Shape = tuple[int, ...]


def gpt2(layers: int, width: int, vocabulary: int = 50257, context: int = 1024) -> list[Shape]:
    """Return the shapes of a GPT-2 model; its output layer is the token embedding."""
    block: list[Shape] = [(width,), (width,)]
    block += [(3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (context, width), *block * layers, (width,), (width,)]


def llama_block(width: int, key_width: int, hidden: int) -> list[Shape]:
    """Return the shapes of one Llama block: attention with grouped keys, gated feed-forward."""
    attention: list[Shape] = [(width, width), (key_width, width), (key_width, width)]
    attention += [(width, width)]
    return [*attention, (hidden, width), (hidden, width), (width, hidden), (width,), (width,)]


def llama(
    layers: int, width: int, key_width: int, hidden: int, *, tied: bool, vocabulary: int = 128256
) -> list[Shape]:
    """Return the shapes of a Llama 3 model; ``tied``: one matrix for input and output."""
    ends: list[Shape] = [(vocabulary, width)] * (1 if tied else 2)
    return [*ends, *llama_block(width, key_width, hidden) * layers, (width,)]


def vit(layers: int, width: int, patch: int, image: int, classes: int) -> list[Shape]:
    """Return the shapes of a vision transformer on square images in three colours."""
    places = (image // patch) ** 2 + 1
    block: list[Shape] = [(width,), (width,), (3 * width, width), (3 * width,)]
    block += [(width, width), (width,), (width,), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    ends: list[Shape] = [(1, 1, width), (1, places, width), (width, 3, patch, patch), (width,)]
    return [*ends, *block * layers, (width,), (width,), (classes, width), (classes,)]


def resnet(blocks: tuple[int, ...], classes: int) -> list[Shape]:
    """Return the shapes of a ResNet with bottlenecks, on three colours."""

    def convolution(outputs: int, inputs: int, size: int) -> list[Shape]:
        return [(outputs, inputs, size, size), (outputs,), (outputs,)]  # then a batch norm

    shapes = convolution(64, 3, 7)
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            shapes += convolution(width, inputs, 1) + convolution(width, width, 3)
            shapes += convolution(4 * width, width, 1)
            if block == 0:
                shapes += convolution(4 * width, inputs, 1)
            inputs = 4 * width
    return [*shapes, (classes, inputs), (classes,)]


def mixture(layers: int, width: int, experts: int, hidden: int, vocabulary: int) -> list[Shape]:
    """Return the shapes of a mixture of experts, each expert three tensors of its own."""
    expert: list[Shape] = [(hidden, width), (hidden, width), (width, hidden)]
    attention: list[Shape] = [(width, width)] * 4
    block = [*attention, (width,), (width,), (experts, width), *expert * experts]
    return [(vocabulary, width), *block * layers, (width,), (vocabulary, width)]


def in_pieces(elements: int, tensors: int) -> list[Shape]:
    """Return so many tensors of equal size that hold about so many elements together."""
    return [(max(1, elements // tensors),)] * tensors


SHAPES: dict[str, Callable[[], list[Shape]]] = {
    "gpt2-small": lambda: gpt2(12, 768),
    "gpt2-medium": lambda: gpt2(24, 1024),
    "gpt2-xl": lambda: gpt2(48, 1600),
    "llama-1b": lambda: llama(16, 2048, 512, 8192, tied=True),
    "llama-1b-block": lambda: llama_block(2048, 512, 8192),
    "llama-8b": lambda: llama(32, 4096, 1024, 14336, tied=False),
    "llama-8b-block": lambda: llama_block(4096, 1024, 14336),
    "vit-b": lambda: vit(12, 768, 16, 224, 1000),
    "resnet-50": lambda: resnet((3, 4, 6, 3), 1000),
    "moe-10000": lambda: mixture(13, 128, 254, 64, 8192),
    "98m-in-150": lambda: [(654, 1000)] * 150,
    "2000-small": lambda: [(64,)] * 2000,
    "tiny": lambda: [(30, 10)] * 5,
}
"""Built when asked for. The experts of ``moe-10000`` are small: what counts is their number."""

BYTES = "bytes-"
TENSORS = "tensors-"
TENSORS_IN_BYTES, ELEMENTS_IN_TENSORS = 16, 4_000_000


def named(name: str) -> list[Shape]:
    """Return the shapes of a name: of :data:`SHAPES`, or of a point of a sweep.

    ``bytes-1000000`` is so many bytes of float32 in sixteen tensors; ``tensors-100`` is four
    million elements in so many tensors.

    Raises:
        ValueError: there is no such name; lists those there are.
    """
    if name in SHAPES:
        return SHAPES[name]()
    for prefix in (BYTES, TENSORS):
        count = name.removeprefix(prefix)
        if name.startswith(prefix) and count.isdecimal() and int(count) > 0:
            if prefix == BYTES:
                return in_pieces(int(count) // 4, TENSORS_IN_BYTES)
            return in_pieces(ELEMENTS_IN_TENSORS, int(count))
    wanted = ", ".join([*SHAPES, f"{BYTES}N", f"{TENSORS}N"])
    raise ValueError(f"shapes: expected one of {wanted}, got {name!r}")


def elements(shapes: list[Shape]) -> int:
    """Return how many numbers the shapes hold together."""
    return sum(map(prod, shapes))
