"""A 64-bit hash of each tensor's bits, made of a sum so that parts may be hashed anywhere."""

import torch
from torch import Tensor

# Odd 64-bit numbers as int64: the golden ratio, and the multipliers of MurmurHash3's finaliser.
GOLDEN = -0x61C8864680B583EB
FIRST_MULTIPLIER = -0x00AE502812AA7333
SECOND_MULTIPLIER = -0x3B314601E57A13AD
LOW_HALF = 0xFFFFFFFF
BYTES_PER_WORD = 8


def fingerprint(tensors: list[Tensor]) -> Tensor:
    """Hash the bytes of each tensor, in index order, whatever its strides and its dtype.

    The bytes are padded with zeros to 64-bit words, and the hash is, modulo 2**64::

        mix(number of bytes, -1) + sum over i of mix(word i, i)
        mix(w, i) = s ^ (s >> 32)  with  s = h * B,  h = t ^ (t >> 32),  t = (w ^ (i + 1) * G) * A

    Since ``mix`` is one-to-one in the word, a change of any one word always changes the hash.

    Returns:
        int64 [len(tensors)]; equal tensors have equal hashes on every device.
    """
    return torch.stack([_hash(t) for t in tensors])


def copy_and_hash_(targets: list[Tensor], sources: list[Tensor]) -> Tensor:
    """Copy each source into its target; hash the sources and look for NaN and Inf on the way.

    Returns:
        int64 [len(sources), 2]: :func:`fingerprint`, and 1 where an element is not finite.
    """
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
    nonfinite = torch.stack([s.isfinite().logical_not().any() for s in sources])
    return torch.stack([fingerprint(sources), nonfinite.long()], dim=1)


def _hash(tensor: Tensor) -> Tensor:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = data.numel()
    words = torch.nn.functional.pad(data, (0, -size % BYTES_PER_WORD)).view(torch.int64)
    index = torch.arange(words.numel(), device=words.device)
    length = torch.full((), size, dtype=torch.int64, device=words.device)
    return _mix(words, index).sum() + _mix(length, torch.full_like(length, -1))


def _mix(word: Tensor, index: Tensor) -> Tensor:
    h = (word ^ (index + 1) * GOLDEN) * FIRST_MULTIPLIER
    h = h ^ (h >> 32 & LOW_HALF)  # int64 shifts in sign bits; the mask takes them out
    h = h * SECOND_MULTIPLIER
    return h ^ (h >> 32 & LOW_HALF)
