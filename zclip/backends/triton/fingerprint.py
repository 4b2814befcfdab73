"""Triton backend of zclip::fingerprint: csrc/math/fingerprint.h once more, in two launches.

A hash is a sum of integers, so parts may be hashed in any order. Not for the step path: the table
of parts is made again for every call, since tensors of any dtype may come.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip.backends.triton.chunk import full_tile
from zclip.backends.triton.launch import OPTIONS, on_device
from zclip.backends.triton.table import ALIGNMENT, Upload, refuse_during_capture
from zclip.checks import check_one_device

# Odd 64-bit numbers as int64: the golden ratio, and the multipliers of MurmurHash3's finaliser.
GOLDEN = tl.constexpr(-0x61C8864680B583EB)
FIRST_MULTIPLIER = tl.constexpr(-0x00AE502812AA7333)
SECOND_MULTIPLIER = tl.constexpr(-0x3B314601E57A13AD)
LOW_HALF = tl.constexpr(0xFFFFFFFF)
ALIGNED = tl.constexpr(ALIGNMENT)

PART_WORDS = 16384  # 64-bit words per program
BYTES_PER_WORD = 8
SHAPE = {"WORDS": PART_WORDS, "LANES": 1024, "ROWS": 2}
SLOT_BLOCK = 1024  # slots that the finish adds at a time


@triton.jit
def mix(word, index):
    """One-to-one in the word, so that a change of any one word always changes the sum."""
    h = (word ^ ((index + 1) * GOLDEN)) * FIRST_MULTIPLIER
    h = h ^ ((h >> 32) & LOW_HALF)  # int64 shifts in sign bits; the mask takes them out
    h = h * SECOND_MULTIPLIER
    return h ^ ((h >> 32) & LOW_HALF)


@triton.jit
def hash_full(address, first_word, WORDS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Hash a part of WORDS words at an aligned address: read without masks, 128 bits at a time."""
    tile = full_tile(ROWS, LANES)
    pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16) + tile
    sums = tl.zeros([ROWS, LANES], tl.int64)
    for start in range(0, WORDS, ROWS * LANES):
        sums += mix(tl.load(pointer + start), first_word + start + tile)
    return tl.sum(tl.sum(sums, axis=0), axis=0)


@triton.jit
def hash_bytes(address, length, first_word, LANES: tl.constexpr):
    """Hash any part byte by byte; zeros stand behind the last one."""
    pointer = address.to(tl.pointer_type(tl.uint8))
    words = (length + 7) >> 3
    sums = tl.zeros([LANES], tl.int64)
    for start in range(0, words, LANES):
        word = start + tl.arange(0, LANES)
        bits = tl.zeros([LANES], tl.int64)
        for byte in tl.static_range(8):
            at = word * 8 + byte
            bits |= tl.load(pointer + at, mask=at < length, other=0).to(tl.int64) << (8 * byte)
        sums += tl.where(word < words, mix(bits, first_word + word), 0)
    return tl.sum(sums, axis=0)


@triton.jit(do_not_specialize=[])
def fingerprint_partials(
    addresses,  # int64 [num_parts]
    lengths,  # int64 [num_parts]: in bytes
    first_words,  # int64 [num_parts]: index of the part's first word in its tensor
    hashes,  # int64 [num_parts]: written, one per program
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per part."""
    part = tl.program_id(0)
    address = tl.load(addresses + part)
    length = tl.load(lengths + part).to(tl.int32)
    first_word = tl.load(first_words + part)
    if (length == WORDS * 8) & ((address & (ALIGNED - 1)) == 0):
        total = hash_full(address, first_word, WORDS, LANES, ROWS)
    else:
        total = hash_bytes(address, length, first_word, LANES)
    tl.store(hashes + part, total)


@triton.jit(do_not_specialize=[])
def fingerprint_finish(
    hashes,  # int64 [num_parts]
    tensor_parts,  # int64 [num_tensors + 1]: where the parts of each tensor begin
    sizes,  # int64 [num_tensors]: in bytes
    fingerprints,  # int64 [num_tensors]: written, one per program
    BLOCK: tl.constexpr,
):
    """One program per tensor."""
    tensor = tl.program_id(0)
    begin = tl.load(tensor_parts + tensor)
    end = tl.load(tensor_parts + tensor + 1)
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(begin, end, BLOCK):
        part = start + tl.arange(0, BLOCK)
        sums += tl.load(hashes + part, mask=part < end, other=0)
    # The length counts as a word at index -1: zeros behind a tensor make another one.
    size = tl.load(sizes + tensor)
    tl.store(fingerprints + tensor, tl.sum(sums, axis=0) + mix(size, size * 0 - 1))


def _cut_into_parts(tensors: list[Tensor]) -> list[Tensor]:
    """Return address, length and first word of every part, and first part and size of each."""
    part_bytes = PART_WORDS * BYTES_PER_WORD
    address = torch.tensor([t.data_ptr() for t in tensors])
    size = torch.tensor([t.numel() * t.element_size() for t in tensors])
    counts = (size + part_bytes - 1) // part_bytes
    tensor_parts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    place = torch.arange(int(tensor_parts[-1])) - tensor_parts[:-1].repeat_interleave(counts)
    begin = place * part_bytes
    length = (size.repeat_interleave(counts) - begin).clamp(max=part_bytes)
    start = address.repeat_interleave(counts) + begin
    return [start, length, begin // BYTES_PER_WORD, tensor_parts, size]


def fingerprint(tensors: list[Tensor]) -> Tensor:
    """See :func:`zclip.reference.fingerprint`."""
    check_one_device(tensors, "tensors[{}]".format)
    refuse_during_capture(tensors[0].device)
    dense = [t.detach().contiguous() for t in tensors]  # index order counts, not memory order
    parts = _cut_into_parts(dense)
    num_parts = len(parts[0])
    addresses, lengths, first_words, tensor_parts, sizes = Upload(dense, parts).columns
    with on_device(dense[0].device):
        hashes = addresses.new_empty(num_parts)
        fingerprints: Tensor = addresses.new_empty(len(dense))
        if num_parts:
            fingerprint_partials[(num_parts,)](
                addresses, lengths, first_words, hashes, **SHAPE, **OPTIONS
            )
        fingerprint_finish[(len(dense),)](
            hashes, tensor_parts, sizes, fingerprints, BLOCK=SLOT_BLOCK, **OPTIONS
        )
    return fingerprints
