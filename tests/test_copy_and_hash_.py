"""copy_and_hash_: the copy is exact, the hash is fingerprint's, and no NaN or Inf is overlooked."""

import math

import pytest
import torch

from tests.backends import CPU_PATHS
from tests.grads import DTYPES, dtype_name, make_grads
from zclip import reference

LINE, PART = 64, 1 << 17  # bytes, as in csrc/cpu/hash_words.h and parts.h
SIZES = [0, 1, 3, 15, 16, 17, 31, 33, PART // 4 - 1, PART // 4, PART // 4 + 17, 100_003]


@pytest.fixture(params=CPU_PATHS)
def ops(request):
    return CPU_PATHS[request.param]


def check(ops, sources, targets=None):
    targets = [torch.full_like(s, 1) for s in sources] if targets is None else targets
    rows = ops.copy_and_hash_(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        same = target.contiguous().view(torch.uint8), source.contiguous().view(torch.uint8)
        assert torch.equal(*same)
    assert torch.equal(rows, reference.copy_and_hash_([t.clone() for t in targets], sources))
    return rows[:, 1].tolist()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.uint8, torch.bool], ids=dtype_name)
def test_every_size_and_dtype(ops, dtype):
    sources = [(g * 100).to(dtype) for g in make_grads([(n,) for n in SIZES])]
    assert check(ops, sources) == [0] * len(SIZES)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_one_bad_element_anywhere_is_found(ops, dtype, value):
    sources = make_grads([(100,)] * 100, dtype)
    for at, source in enumerate(sources):
        source[at] = value
    assert check(ops, sources) == [1] * 100


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_the_largest_numbers_and_what_only_looks_bad_are_not(ops, dtype):
    largest = torch.full((37,), torch.finfo(dtype).max, dtype=dtype)
    assert check(ops, [largest, -largest]) == [0, 0]
    ones = torch.full((40,), -1, dtype=torch.int32)  # every bit set, and no number of ours
    assert check(ops, [ones]) == [0]


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_targets_at_any_address(ops, offset):
    (source,) = make_grads([(1000,)])
    target = torch.zeros(1100)
    check(ops, [source], [target[offset : offset + 1000]])
    assert not target[:offset].any()
    assert not target[offset + 1000 :].any()


def test_any_number_of_threads_gives_the_same(ops):
    sources = make_grads([(1_000_003,), (5,)])
    threads = torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            check(ops, sources)
    finally:
        torch.set_num_threads(threads)


def overlapping():
    memory = torch.zeros(20)
    memory[10:] = 1.0
    return [memory[:10]], [memory[9:19]]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (([torch.zeros(2)], [torch.ones(2), torch.ones(2)]), "got 1 for 2"),
        (([torch.zeros(2)], [torch.ones(3)]), "pair 0: expected one dtype and number"),
        (([torch.zeros(2)], [torch.ones(2).double()]), "pair 0: expected one dtype and number"),
        (([torch.zeros(4, 2).t()], [torch.ones(2, 4)]), "pair 0: expected contiguous tensors"),
        (([torch.zeros(2, 4)], [torch.ones(4, 2).t()]), "pair 0: expected contiguous tensors"),
        (overlapping(), "pair 0: expected memory of their own"),
    ],
)
def test_what_cannot_be_copied_is_refused_before_anything_is_written(pairs, message):
    targets, sources = pairs
    with pytest.raises(RuntimeError, match=message):
        torch.ops.zclip.copy_and_hash_(targets, sources)
    assert not any(t.any() for t in targets)
