"""Batches that a train step may take apart, and find whole when it is tried again."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from heal.data.split import own_copy
from heal.micro_batch import MicroBatcher
from tests.heal.data.test_split import Encoding

X, Y = torch.randn(8, 2), torch.randn(8)
Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclass(frozen=True)
class Sample:
    inputs: dict


BATCHES = {
    "dict": lambda: {"x": X, "y": Y},
    "OrderedDict": lambda: OrderedDict(x=X, y=Y),
    "defaultdict": lambda: defaultdict(list, x=X, y=Y),
    "UserDict": lambda: UserDict(x=X, y=Y),
    "encoding": lambda: Encoding({"x": X, "y": Y}, None, "pt"),
}
WITHIN = {
    "nothing": (lambda b: b, lambda b: b),
    "dict": (lambda b: {"batch": b}, lambda b: b["batch"]),
    "tuple": (lambda b: (b, 1), lambda b: b[0]),
    "list": (lambda b: [X, b], lambda b: b[1]),
    "named tuple": (lambda b: Pair(b, None), lambda b: b.inputs),
    "dataclass": (lambda b: Sample(b), lambda b: b.inputs),
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("place", WITHIN)
def test_what_is_done_to_a_copy_is_not_done_to_the_batch(kind, place):
    wrap, find = WITHIN[place]
    batch = wrap(BATCHES[kind]())
    copied = own_copy(batch)
    assert type(copied) is type(batch)
    assert type(find(copied)) is type(find(batch))
    assert find(copied).pop("y") is Y
    find(copied)["more"] = 1
    assert list(find(batch)) == ["x", "y"]
    assert find(copied)["x"] is X


class Stubborn(dict):
    def __reduce_ex__(self, protocol):
        raise TypeError("no copies")


@pytest.mark.parametrize(
    "batch", [X, "text", None, (X, Y), nn.utils.rnn.pack_sequence([X]), Stubborn(x=X)]
)
def test_what_cannot_be_changed_or_copied_is_the_batch_itself(batch):
    assert own_copy(batch) is batch


@pytest.mark.parametrize("pieces", [1, 2])
def test_labels_that_the_first_attempt_popped_are_there_in_the_second(pieces):
    model = nn.Linear(2, 1)
    micro = MicroBatcher(model, lambda: list(model.parameters()))
    micro.pieces = pieces
    batch, tries = {"x": X, "targets": [{"y": y} for y in Y]}, []

    def train_step(piece):
        y = torch.stack([target.pop("y") for target in piece["targets"]])
        tries.append(len(y))
        if len(tries) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return (model(piece.pop("x"))[:, 0] - y).square().mean()

    with pytest.raises(torch.OutOfMemoryError):
        micro.backward([batch], train_step, lambda loss: loss)
    micro.undo()
    micro.backward([batch], train_step, lambda loss: loss)
    assert tries == [8 // pieces] * (1 + pieces)
