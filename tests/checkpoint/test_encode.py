import collections
import enum
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from heal.checkpoint import CannotEncode, CheckpointRefused, manifest
from heal.checkpoint.encode import MAX_DEPTH, decode, encode
from heal.data.loader_pass import EpochStart
from heal.data.stream import DataPosition
from heal.training_state import RngState

HERE = Path("manifest.json")


def there_and_back(value):
    json, tensors = encode(value)
    return decode(manifest.from_bytes(manifest.to_bytes(json), HERE), tensors, HERE)


EXACT = [
    None, True, False, 0, -1, 2**62, 2**63, -(2**200), "", "text \0 é \ud7ff", 0.1, -0.0, 5e-324,
    1.7976931348623157e308, math.inf, -math.inf, 1 + 2j, b"", b"\0\xff", bytearray(b"ab"),
    [], [1, [2.0, "3"]], (), (1, (2, [3])), {}, {"a": {"b": 1}}, {1: 2, (1, 2): 3, None: 4},
    {"$": "os.system"}, {"$": {"$": 1}}, set(), {1, 2}, frozenset({(1, 2)}),
    collections.deque([1, 2], maxlen=3), collections.deque([1]), collections.Counter("hello"),
    collections.OrderedDict([("b", 1), ("a", 2)]), torch.float32, torch.bfloat16,
    torch.device("cpu"), torch.device("cuda", 3), torch.Size([1, 2]),
]  # fmt: skip


@pytest.mark.parametrize("value", EXACT, ids=lambda v: f"{type(v).__name__}-{v!r}"[:40])
def test_a_value_comes_back_as_it_was(value):
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)  # also the sign of zero, the order of keys, a maxlen


def test_a_nan_keeps_its_bits():
    odd = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    assert struct.pack(">d", there_and_back(odd)).hex() == "fff8000000000123"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_are_taken_out_and_put_back(dtype):
    tensor = torch.arange(6).to(dtype).view(2, 3)
    json, tensors = encode({"a": [tensor]})
    assert list(tensors) == ["value/0"]
    assert torch.equal(decode(json, tensors, HERE)["a"][0], tensor)


def test_numpy_arrays_and_numbers_come_back():
    for array in (np.arange(5, dtype=np.uint32), np.zeros((2, 0)), np.float32(0.1), np.bool_(True)):
        back = there_and_back(array)
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)


def test_generators_and_positions_come_back():
    torch.manual_seed(3)
    now = RngState.now()
    start = EpochStart(now, (torch.Generator().get_state(),), 4)
    back = there_and_back(DataPosition(1, 2, 3, start, {"epoch": 7}))
    first = torch.rand(3), np.random.rand()
    back.start.rng.put_back()
    assert torch.equal(torch.rand(3), first[0])
    assert np.random.rand() == first[1]
    assert (back.epoch, back.start.sampler_epoch, back.loader_state) == (1, 4, {"epoch": 7})


def test_a_position_of_a_first_checkpoint_is_read():
    start = EpochStart(RngState.now(), (), None, (("dataset", 4),))
    json, tensors = encode(start)
    assert decode(json, tensors, HERE).epochs == {"dataset": 4}
    del json["fields"]["other_epochs"]
    assert decode(json, tensors, HERE).epochs == {}
    del json["fields"]["generators"]
    with pytest.raises(CheckpointRefused, match="fields of EpochStart"):
        decode(json, tensors, HERE)


def test_a_position_that_was_saved_before_it_had_all_its_fields_is_read():
    json, tensors = encode(DataPosition(1, 2, 3, None, generators=(torch.zeros(2),), is_over=True))
    del json["fields"]["generators"], json["fields"]["is_over"]
    back = decode(json, tensors, HERE)
    assert (back.index, back.generators, back.is_over) == (2, None, False)
    del json["fields"]["index"]
    with pytest.raises(CheckpointRefused, match="the fields of DataPosition"):
        decode(json, tensors, HERE)


def schedulers():
    def optimizer():
        return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)

    return [
        lr_scheduler.LambdaLR(optimizer(), lambda step: 0.9**step),
        lr_scheduler.MultiStepLR(optimizer(), [1, 2, 2]),
        lr_scheduler.CosineAnnealingLR(optimizer(), 5),
        lr_scheduler.OneCycleLR(optimizer(), 0.1, 10),
        lr_scheduler.CyclicLR(optimizer(), 0.1, 0.2),
        lr_scheduler.ReduceLROnPlateau(optimizer()),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer(), 3),
        (lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.LinearLR(o)], [2]))(optimizer()),
        (lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.PolynomialLR(o), lr_scheduler.ExponentialLR(o, 0.9)]))(optimizer()),
    ]  # fmt: skip


@pytest.mark.parametrize("scheduler", schedulers(), ids=lambda s: type(s).__name__)
def test_every_scheduler_of_torch_has_a_state_that_can_be_saved(scheduler):
    state = scheduler.state_dict()
    assert there_and_back(state) == state


class Colour(enum.Enum):
    RED = 1


class Sneaky(dict):
    def __reduce__(self):
        return print, ("pwned",)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "builtins.object"),
        (print, "builtins.builtin_function_or_method"),
        (Colour.RED, "Colour"),
        (Sneaky(), "Sneaky"),
        (np.array([object()]), "numpy.ndarray"),
        (Path("a"), "Path"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_an_unknown_type_is_refused_by_name_and_place(value, name):
    with pytest.raises(CannotEncode, match=name) as error:
        encode({"outer": [value]})
    assert "state['outer'][0]" in str(error.value)


def test_a_value_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(CannotEncode, match="does it hold itself"):
        encode(loop)


HOSTILE = [
    {"$": "os.system", "args": ["true"]},
    {"$": None},
    {"$": ["tuple"]},
    {"$": "tuple"},
    {"$": "tuple", "items": "abc"},
    {"$": "dict", "items": [[1]]},
    {"$": "dict", "items": [[[1], 2]]},
    {"$": "set", "items": [[1]]},
    {"$": "int", "hex": "zz"},
    {"$": "float", "bits": "00"},
    {"$": "bytes", "base64": "!"},
    {"$": "dtype", "name": "load"},
    {"$": "dtype", "name": "__builtins__"},
    {"$": "device", "name": "nowhere:0"},
    {"$": "tensor", "name": "value/9"},
    {"$": "tensor", "name": ["value/0"]},
    {"$": "ndarray", "name": "value/0", "dtype": "O", "shape": [1]},
    {"$": "ndarray", "name": "value/0", "dtype": "f8", "shape": [10**9]},
    {"$": "numpy", "dtype": "f8", "base64": ""},
    {"$": "RngState", "fields": {"python": 1}},
    {"$": "RngState", "fields": 3},
    {"$": "deque", "items": [], "maxlen": "x"},
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda v: str(v)[:50])
def test_a_hostile_value_is_refused(value):
    with pytest.raises(CheckpointRefused, match=r"manifest\.json"):
        decode({"a": [value]}, {"value/0": torch.zeros(8, dtype=torch.uint8)}, HERE)


def test_deep_nesting_is_refused_when_decoding():
    value = 1
    for _ in range(MAX_DEPTH + 2):
        value = [value]
    with pytest.raises(CheckpointRefused, match="nested"):
        decode(value, {}, HERE)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a":1,"a":2}', "not JSON as it is written here"),
        (b"1" * 5000, "not JSON"),
        (b"[1e999]", "not JSON"),
        (b"[NaN]", "not JSON"),
        (b"[" * 100_000, "nested beyond reason"),
        (b'{"a":' * 50_000, "nested beyond reason"),
        (b"\x80\x04\x95", "not JSON"),
        (b"", "not JSON"),
        (b'{"a":1}x', "not JSON"),
        (b'{"a": 1}', "not JSON as it is written here"),
        ("[1]".encode("utf-16"), "not JSON as it is written here"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_what_is_not_our_json_is_refused_by_name(text, why):
    with pytest.raises(CheckpointRefused, match=why):
        manifest.from_bytes(text, HERE)
