"""Checkpoints in ``saved_by_0_1``, written by the first format and its code, stay readable.

One was saved by a single process, the other by two ranks under FSDP2. Weights, buffers and moments
count up in eighths: the i-th tensor is ``arange / 8 + i``.
"""

import collections
import math
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from heal import checkpoint, doctor
from heal.checkpoint import CannotReshard
from heal.checkpoint.contents import state_dicts
from heal.checkpoint.manifest import Chunk
from heal.checkpoint.reading import CheckpointReader

SAVED = Path(__file__).parent / "saved_by_0_1"
VALUES = {
    "plain": [None, True, -1, 2**70, 0.1, math.inf, -math.inf, "text", 1 + 2j],
    "bytes": b"\0\xff",
    "bytearray": bytearray(b"ab"),
    "tuple": (1, (2, [3])),
    "keys": {1: 2, (1, 2): 3, None: 4},
    "tag": {"$": "x"},
    "set": {3, 1},
    "frozen": frozenset({(1, 2)}),
    "deque": collections.deque([1, 2], maxlen=3),
    "counter": collections.Counter("hello"),
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 3),
    "size": torch.Size([1, 2]),
    "tensor": torch.arange(3).to(torch.bfloat16),
    "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
    "number": np.float32(0.1),
    "complex128": torch.tensor([1 + 2j], dtype=torch.complex128),
}


def built():
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])


def assert_counts_up(model, optimizer):
    moments = [
        v for p in model.parameters() for v in optimizer.state.get(p, {}).values() if v.dim()
    ]
    assert len(moments) == 10
    for i, tensor in enumerate([*model.parameters(), *model.buffers(), *moments]):
        expected = (torch.arange(tensor.numel()) / 8 + i).view(tensor.shape).to(tensor.dtype)
        assert torch.equal(tensor, expected), f"tensor {i}: expected {expected}, got {tensor}"


@pytest.fixture(params=["by-1", "by-2"])
def old(request, tmp_path):
    shutil.copytree(SAVED / request.param, tmp_path / request.param)
    return tmp_path / request.param


def test_a_run_resumes_from_an_old_checkpoint(old):
    model, optimizer, scheduler = built()
    resumed = checkpoint.load(old, model, optimizer, scheduler)
    assert (resumed.step, resumed.notes) == (3, ())
    assert_counts_up(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert scheduler.last_epoch == 1
    drawn = random.random(), np.random.rand(), torch.rand(1)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1))


def test_every_type_of_an_old_checkpoint_comes_back_as_it_was(old):
    extra = state_dicts(old)["extra"]
    assert list(extra) == list(VALUES)
    for name, value in VALUES.items():
        assert type(extra[name]) is type(value)
        assert repr(extra[name]) == repr(value)


def test_old_checkpoints_become_state_dicts(old):
    model, optimizer, scheduler = built()
    dicts = state_dicts(old)
    model.load_state_dict(dicts["model"])
    optimizer.load_state_dict(dicts["optimizers"][0])
    scheduler.load_state_dict(dicts["schedulers"][0])
    assert_counts_up(model, optimizer)


def test_the_doctor_reads_every_byte_of_an_old_checkpoint(old):
    told = [finding.what for finding in doctor.check_checkpoints(old)]
    assert "a run resumes from step 3" in told


def test_every_shard_is_opened_once_however_many_tensors_are_put_together(monkeypatch):
    opened, real = [], os.open

    def counted(path, *args, **kwargs):
        opened.append(Path(path).name)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", counted)
    state_dicts(SAVED / "by-2")
    shards = sorted(name for name in opened if name.endswith(".safetensors"))
    assert shards == ["rank-00000.safetensors", "rank-00001.safetensors"]


@pytest.mark.parametrize(
    ("needed", "why"),
    [
        (Chunk((4, 5), (0, 0), (4, 5)), r"expected \(4, 5\) as in this run, got \(3, 5\)"),
        (Chunk((3, 5), (2, 0), (2, 5)), r"cover 5 elements of the \(2, 5\) at \(2, 0\)"),
    ],
)
def test_parts_that_do_not_make_up_what_is_needed_are_refused_by_name(needed, why):
    reader = CheckpointReader(SAVED / "by-2" / "step-000003")
    with pytest.raises(CannotReshard, match=f"'parameter/0.weight'.*{why}"):
        reader.read(0, 1, {"parameter/0.weight": needed}.get)
