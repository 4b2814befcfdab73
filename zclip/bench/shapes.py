"""Parameter shapes to measure on: of real models, and of the corners."""

Shape = tuple[int, ...]


def transformer(layers: int, width: int, vocabulary: int, context: int) -> list[Shape]:
    """Return the shapes of a GPT-2 style model."""
    block = [
        (width,),
        (width,),
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        (width,),
        (width,),
        (4 * width, width),
        (4 * width,),
        (width, 4 * width),
        (width,),
    ]
    return [(vocabulary, width), (context, width), *block * layers, (width,), (width,)]


MODELS: dict[str, list[Shape]] = {
    "98M in 150 tensors": [(654, 1000)] * 150,
    "2,000 tensors of 64": [(64,)] * 2000,
    "gpt2": transformer(layers=12, width=768, vocabulary=50257, context=1024),
}


def elements(shapes: list[Shape]) -> int:
    """Return how many numbers the shapes hold together."""
    total = 0
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        total += count
    return total
