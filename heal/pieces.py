"""Tensors cut into pieces that fit the cache, so that several passes over them read memory once."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor

from heal.training_state import Key

PIECE_BYTES = 1 << 20  # of one piece
HELPING_BYTES = 1 << 20  # of pieces that are worked on together; a core's own cache has about that


def uncut_of(tensors: Mapping[Key, Tensor]) -> frozenset[Key]:
    """Return which tensors stay whole: those whose elements do not lie in a row in memory.

    A copy of one may be contiguous. It must be cut where its source was, so that this is asked of
    the source and remembered.
    """
    return frozenset(key for key, tensor in tensors.items() if not tensor.is_contiguous())


def cut(tensors: Mapping[Key, Tensor], whole: Collection[Key]) -> tuple[list[Key], list[Tensor]]:
    """Cut large tensors; return the key that each piece belongs to, and the pieces, as views."""
    keys: list[Key] = []
    pieces: list[Tensor] = []
    for key, tensor in tensors.items():
        length = PIECE_BYTES // tensor.element_size()
        parts: Sequence[Tensor] = [tensor]
        if tensor.numel() > length and key not in whole:
            parts = tensor.view(-1).split(length)
        keys += [key] * len(parts)
        pieces += parts
    return keys, pieces


def helpings(pieces: Sequence[Tensor]) -> Iterator[slice]:
    """Yield neighbouring pieces that together have about so many bytes."""
    start = size = 0
    for end, piece in enumerate(pieces, 1):
        size += piece.nbytes
        if size >= HELPING_BYTES:
            yield slice(start, end)
            start, size = end, 0
    if start < len(pieces):
        yield slice(start, len(pieces))
