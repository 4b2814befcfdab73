"""Batches cut into pieces: every kind of container, and refusal where it is not clear how."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from heal.actions import HealingError
from heal.data.split import CannotSplit, num_samples, split
from heal.exit_codes import ExitCode
from tests.heal.runs import regression

Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclass(frozen=True)
class Sample:
    inputs: torch.Tensor
    texts: list
    scale: float = 2.0


class Encoding(UserDict):
    """As transformers' BatchEncoding: a UserDict whose constructor wants more."""

    def __init__(self, data, encodings, kind):
        super().__init__(data)
        self.encodings, self.kind = encodings, kind


X = torch.arange(14.0).reshape(7, 2)
TEXTS = list("abcdefg")
IMAGES = [torch.full((3, 4, 4 + i), float(i)) for i in range(7)]
ODD_LENGTHS = [torch.arange(1.0 + i) for i in range(7)]


def targets(boxes=lambda i: 2):
    return [{"boxes": torch.full((boxes(i), 4), float(i))} for i in range(7)]


def numbers(entries):
    """The number that each sample of a list is filled with."""
    tensors = [e if isinstance(e, torch.Tensor) else e["boxes"] for e in entries]
    return torch.stack([torch.full((2,), float(t.max())) for t in tensors])


BATCHES = {
    "tensor": (X, lambda b: b),
    "dict": ({"x": X, "id": TEXTS, "mask": torch.ones(3, 3)}, lambda b: b["x"]),
    "OrderedDict": (OrderedDict(x=X, id=TEXTS), lambda b: b["x"]),
    "defaultdict": (defaultdict(list, x=X, id=TEXTS), lambda b: b["x"]),
    "read-only mapping": ({"outer": {"x": X}}, lambda b: b["outer"]["x"]),
    "tuple": ((X, torch.arange(7)), lambda b: b[0]),
    "tuple with a matrix": ((X, torch.ones(2, 2)), lambda b: b[0]),
    "list": ([X, X * 2], lambda b: b[1] / 2),
    "named tuple": (Pair(X, torch.arange(7)), lambda b: b.inputs),
    "dataclass": (Sample(X, TEXTS), lambda b: b.inputs),
    "encoding": (Encoding({"x": X}, None, "pt"), lambda b: b["x"]),
    "nested": ({"a": [{"b": (X, TEXTS)}]}, lambda b: b["a"][0]["b"][0]),
    "dict of dataclasses": ({"a": Sample(X, TEXTS), "b": Pair(X, 1)}, lambda b: b["a"].inputs),
    "array": ((X, np.arange(7)), lambda b: b[0] + 0 * torch.from_numpy(b[1])[:, None]),
    "texts beside a tensor": ((TEXTS, X), lambda b: b[1]),
    "pairs of fields": ([{"ids": X}, {"ids": X}], lambda b: b[1]["ids"]),
    "weights of classes first": ({"w": torch.ones(10), "x": X, "y": X}, lambda b: b["x"]),
    "one number first": ({"temperature": torch.ones(1), "x": X}, lambda b: b["x"]),
    "an empty tensor first": ((torch.ones(0, 4), X), lambda b: b[1]),
    "a mask for all samples first": ((torch.ones(1, 2), X), lambda b: b[1]),
    "a square mask first": ((torch.ones(2, 2), X), lambda b: b[1]),
    "names of classes": ({"x": X, "classes": list("cats and dogs")}, lambda b: b["x"]),
    "fields of one list": ({"views": [X, X], "x": X, "w": torch.ones(10)}, lambda b: b["views"][1]),
    "a number per sample": ({"x": X, "lengths": [2, 3, 5, 7, 11, 13, 17]}, lambda b: b["x"]),
}

LISTS = {
    "images beside labels": ((IMAGES, torch.arange(7)), lambda b: b[0]),
    "images in a dict": ({"images": IMAGES, "y": torch.arange(7)}, lambda b: b["images"]),
    "images and targets": ((IMAGES, targets()), lambda b: b[0]),
    "targets of images": ((IMAGES, targets(lambda i: 1 + i)), lambda b: b[1]),
    "as torchvision collates": ((tuple(IMAGES), tuple(targets())), lambda b: b[1]),
    "samples of several lengths": (ODD_LENGTHS, lambda b: b),
    "a list of dicts": (targets(lambda i: 1 + i), lambda b: b),
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
def test_pieces_put_together_are_the_batch(kind, parts):
    batch, inputs = BATCHES[kind]
    pieces = split(batch, parts)
    assert len(pieces) == min(parts, 7)
    assert torch.equal(torch.cat([inputs(piece) for piece, _ in pieces]), X)
    assert [n for _, n in pieces] == [len(inputs(piece)) for piece, _ in pieces]
    assert all(type(piece) is type(batch) for piece, _ in pieces)
    assert num_samples(batch) == 7


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
def test_lists_whose_entries_are_samples_are_cut_between_them(kind, parts):
    batch, entries = LISTS[kind]
    pieces = split(batch, parts)
    assert len(pieces) == min(parts, 7)
    assert num_samples(batch) == 7
    together = [entry for piece, _ in pieces for entry in entries(piece)]
    assert all(a is b for a, b in zip(together, entries(batch), strict=True))
    assert [n for _, n in pieces] == [len(entries(piece)) for piece, _ in pieces]


def test_texts_are_cut_along_and_what_is_no_sample_stays_whole():
    piece, _ = split(BATCHES["dict"][0], 2)[0]
    assert piece["id"] == TEXTS[:3]
    assert piece["mask"].shape == (3, 3)
    piece, _ = split(Sample(X, TEXTS), 2)[1]
    assert (piece.texts, piece.scale) == (TEXTS[3:], 2.0)
    assert split(TEXTS, 2) == [(TEXTS, 1)]


def test_a_cut_defaultdict_still_has_its_default_and_the_batch_is_untouched():
    batch = defaultdict(list, x=X)
    piece, _ = split(batch, 2)[0]
    assert piece["missing"] == []
    assert list(batch) == ["x"]
    assert len(batch["x"]) == 7
    frozen = MappingProxyType({"x": X})
    assert len(split(frozen, 2)[0][0]["x"]) == 3


def test_two_fields_of_two_samples_are_cut_as_fields():
    pieces = split([X[:2], X[2:4]], 2)
    assert [tuple(piece[1].shape) for piece, _ in pieces] == [(1, 2), (1, 2)]


def test_a_list_of_several_kinds_that_is_as_long_as_the_batch_is_one_of_fields():
    y = X[:2, 0]
    pieces = split({"x": X[:2], "targets": [y, (y,)]}, 2)
    assert [piece["targets"] for piece, _ in pieces] == [[y[:1], (y[:1],)], [y[1:], (y[1:],)]]
    several = [{"boxes": X[:5]}, {"no_boxes": True}]
    assert [p["targets"] for p, _ in split({"x": X[:2], "targets": several}, 2)] == [
        several[:1],
        several[1:],
    ]
    optional = [X[:3], None]
    assert [p["boxes"] for p, _ in split({"x": X[:2], "boxes": optional}, 2)] == [
        optional[:1],
        optional[1:],
    ]


def test_a_batch_of_one_beside_longer_tensors_is_one():
    tokens = torch.ones(1, 100)
    assert num_samples({"ids": tokens, "labels": tokens, "weights": torch.ones(10)}) == 1


class Graph:
    """As of a library that we do not know."""

    def __init__(self):
        self.nodes = X


class Slots:
    __slots__ = ("mask",)

    def __init__(self):
        self.mask = X


class Store:
    def __init__(self):
        self.store = {"mask": X}


@dataclass
class Sequences:
    ids: torch.Tensor
    cu_seqlens: torch.Tensor


UNCLEAR = {
    "PackedSequence": nn.utils.rnn.pack_sequence([X, X[:3]]),
    "packed beside a tensor": (X, nn.utils.rnn.pack_sequence([X, X[:3]])),
    "images alone": [torch.zeros(3, 8, 8) for _ in range(4)],
    "images alone in a tuple": tuple(torch.zeros(3, 8, 8) for _ in range(4)),
    "samples of one length": [torch.zeros(128) for _ in range(8)],
    "as many fields as samples": {"x": X, "states": [X] * 7},
    "unknown object": {"x": X, "graph": Graph()},
    "set": {"x": X, "names": set(TEXTS)},
    "sparse": (X, torch.eye(7).to_sparse()),
    "lists of several lengths": (IMAGES, targets()[:5]),
    "time first": (torch.zeros(10, 4, 3), torch.zeros(4)),
    "time first in a list": {"pair": [torch.zeros(10, 4, 3), torch.zeros(4)]},
    "one sample beside weights": (torch.zeros(1, 3), torch.zeros(10)),
    "weights beside views": {"w": torch.zeros(10), "views": [X, X]},
    "graphs": {"x": X, "edge_index": torch.zeros(2, 7), "batch": torch.zeros(7)},
    "sequences": {"ids": X, "cu_seqlens": torch.tensor([0, 3, 7])},
    "sequences in a dataclass": Sequences(X, torch.tensor([0, 3, 7])),
    "a size": {"x": X[:2], "image_size": (224, 224)},
    "fields of dicts, as many as samples": {"x": X[:2], "sides": [{"a": X[:2]}, {"a": X[:2]}]},
    "slots": {"x": X, "mask": Slots()},
    "a store": {"x": X, "mask": Store()},
}
NAMED = {
    "unknown object": r"expected tensors, .* got a .*Graph",
    "PackedSequence": "PackedSequence",
    "set": "set",
    "time first": "first axis .* lengths 4, 10",
    "graphs": "got samples packed .*edge_index",
    "a size": r"got \(224, 224\), which may be either; use a tensor",
    "samples of one length": "got a list of 8 entries of the type Tensor, which may be either",
    "as many fields as samples": "got a list of 7 entries with tensors of length 7, which may be",
    "slots": "Slots",
}


@pytest.mark.parametrize("kind", UNCLEAR)
def test_what_is_not_understood_is_refused_by_name(kind):
    with pytest.raises(CannotSplit, match=NAMED.get(kind)):
        split(UNCLEAR[kind], 2)
    assert split(UNCLEAR[kind], 1)[0][0] is UNCLEAR[kind]


def test_transformers_encodings_stay_what_they_are():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": X, "mask": X > 3})
    piece, samples = split(batch, 2)[1]
    assert type(piece) is transformers.BatchEncoding
    assert samples == 4
    assert torch.equal(piece.input_ids, X[3:])
    assert len(batch["input_ids"]) == 7


def test_memory_that_runs_out_on_what_cannot_be_cut_ends_with_the_reason():
    setup = regression()
    packed = nn.utils.rnn.pack_sequence([X, X[:3]])

    def train_step(batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    healer = setup.healer()
    with pytest.raises(
        HealingError, match=r"cannot be cut: expected .* got a PackedSequence"
    ) as halted:
        healer.run(train_step, [packed] * 4, 4, progress=False)
    assert halted.value.exit_code == ExitCode.OUT_OF_MEMORY
