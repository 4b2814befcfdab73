"""fingerprint: every bit and every position counts; strides, threads and parts do not."""

import pytest
import torch

from tests.backends import CPU_PATHS
from tests.grads import make_grads

PART = 1 << 17  # bytes that csrc/cpu/fingerprint.cpp hashes at a time
SIZES = [0, 1, 2, 3, 7, 8, 9, 1000, PART // 4 - 1, PART // 4, PART // 4 + 1, 100_003]
MASK = (1 << 64) - 1


def plain_hash(data: bytes) -> int:
    """The definition, in Python integers."""

    def mix(word, index):
        h = (word ^ ((index + 1) * 0x9E3779B97F4A7C15 & MASK)) * 0xFF51AFD7ED558CCD & MASK
        h = (h ^ h >> 32) * 0xC4CEB9FE1A85EC53 & MASK
        return h ^ h >> 32

    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return (mix(len(data), -1) + sum(mix(w, i) for i, w in enumerate(words))) & MASK


def hashes(backend, *tensors):
    return [h & MASK for h in backend.fingerprint(list(tensors)).tolist()]


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_definition(backend, size):
    (tensor,) = make_grads([(size,)])
    assert hashes(backend, tensor) == [plain_hash(tensor.numpy().tobytes())]


@pytest.mark.parametrize("size", SIZES)
def test_every_instruction_set_has_the_same(size):
    (tensor,) = make_grads([(size,)])
    assert len({hashes(ops, tensor)[0] for ops in CPU_PATHS.values()}) == 1


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64]
)
def test_any_dtype_is_bytes(backend, dtype):
    tensor = (torch.arange(13) % 5).to(dtype)
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert hashes(backend, tensor) == [plain_hash(data)]


@pytest.mark.parametrize("at", [0, 1, 16383, 32767, 32768, 99_999])
def test_one_bit_anywhere_changes_it(backend, at):
    (tensor,) = make_grads([(100_000,)])
    changed = tensor.clone()
    changed.view(torch.int32)[at] ^= 1
    assert hashes(backend, tensor) != hashes(backend, changed)


def test_positions_count(backend):
    a, b = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([3.0, 4.0, 1.0, 2.0])
    c = torch.tensor([2.0, 1.0, 3.0, 4.0])
    assert len(set(hashes(backend, a, b, c))) == 3


def test_length_counts(backend):
    zeros = [torch.zeros(n) for n in range(20)]
    assert len(set(hashes(backend, *zeros))) == 20


def test_signed_zeros_and_nans_are_told_apart(backend):
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    values = [torch.tensor(0.0), torch.tensor(-0.0), nans[0], nans[1]]
    assert len(set(hashes(backend, *values))) == 4


def test_strides_do_not_count(backend):
    matrix = torch.arange(12.0).reshape(3, 4)
    views = [matrix.t(), matrix[:, ::2], matrix[1:], torch.tensor(5.0).expand(7)]
    copies = [v.clone(memory_format=torch.contiguous_format) for v in views]
    assert hashes(backend, *views) == hashes(backend, *copies)


def test_each_tensor_has_its_own_hash(backend):
    tensors = make_grads([(n,) for n in SIZES])
    assert hashes(backend, *tensors) == [hashes(backend, t)[0] for t in tensors]


def test_any_number_of_threads_gives_the_same(backend):
    tensors = make_grads([(300_001,), (7,)])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = hashes(backend, *tensors)
        torch.set_num_threads(4)
        assert hashes(backend, *tensors) == one
    finally:
        torch.set_num_threads(threads)
