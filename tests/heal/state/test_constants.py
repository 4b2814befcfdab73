"""What no snapshot holds: frozen weights and still buffers, and what if they change after all."""

import pytest
import torch
from torch import nn

from heal import Healer
from heal import state_checks as constants_module
from heal.actions import HealingError, Rollback
from heal.state_checks import Constants
from heal.testing import Chaos, Fault
from heal.training_state import TrainingState
from tests.heal.runs import quick, regression


class Teacher(nn.Module):
    """A student and a frozen teacher that follows it through ``.data``, as MoCo's key encoder."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 1), nn.Linear(8, 1).requires_grad_(False)

    def forward(self, x):
        pairs = zip(self.student.parameters(), self.teacher.parameters(), strict=True)
        for student, teacher in pairs:
            teacher.data = teacher.data * 0.99 + student.data * 0.01
        return self.student(x)


class Quantized(nn.Module):
    """A frozen base in integer buffers, as GPTQ and AWQ keep it, and a trainable adapter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("qweight", torch.zeros(1_000_000, dtype=torch.int32))
        self.adapter = nn.Linear(8, 1)

    def forward(self, x):
        return self.adapter(x)


def rollbacks_of(healer):
    return [a for _, _, plan in healer.history for a in plan if isinstance(a, Rollback)]


def test_a_teacher_that_follows_through_data_is_returned_with_the_student():
    setup = regression(model=Teacher)
    healer = setup.healer()
    train_step = Chaos(healer, [Fault("corrupt_weight", at=70)]).wrap(setup.train_step)
    healer.run(train_step, setup.loader, 90, progress=False)
    assert len(rollbacks_of(healer)) == 1
    assert all(p.isfinite().all() for p in setup.model.parameters())
    assert len(healer.notes) == 2
    assert "parameter teacher.weight is not trained and yet changes" in healer.notes[0]
    assert ("parameter", "teacher.weight") in healer.newest_snapshot().tensors


def frozen_head(**config):
    setup = regression(**config)
    setup.model[5].requires_grad_(False)
    return setup


def test_a_frozen_weight_that_changed_unseen_does_not_stop_a_rollback():
    setup = frozen_head()
    healer = setup.healer()
    healer.run(setup.train_step, setup.loader, 15, progress=False)
    setup.model[5].bias.data += 1.0
    healer.training.restore(healer.snapshots()[0])
    assert "stays as it is in this rollback" in healer.notes[0]
    assert healer.training.has_changed_shape()  # snapshots from now on hold it


def test_a_frozen_weight_that_became_nan_does():
    setup = frozen_head()
    healer = setup.healer()
    healer.run(setup.train_step, setup.loader, 15, progress=False)
    setup.model[5].bias.data *= float("nan")
    with pytest.raises(HealingError, match=r"parameter 5.bias holds NaN or Inf, and no snapshot"):
        healer.training.restore(healer.snapshots()[0])


def test_parameters_of_an_optimizer_that_lost_its_state_are_still_in_the_run():
    setup = regression()
    healer = setup.healer()
    steps = []

    def train_step(batch):
        steps.append(1)
        if len(steps) == 12:
            setup.model[5].requires_grad_(False)  # its moments stay in the optimizer
        return setup.train_step(batch)

    train_step = Chaos(healer, [Fault("reset_optimizer", at=55)]).wrap(train_step)
    healer.run(train_step, setup.loader, 80, progress=False)
    assert [d.cause.value for _, d, _ in healer.history] == ["optimizer_reset"]
    assert not rollbacks_of(healer)
    assert healer.snapshots()[0] > 55  # and they fit


def test_a_quantised_base_is_neither_in_snapshots_nor_copied_beside_the_model():
    setup = regression(model=Quantized, snapshot_memory_factor=2.0)
    healer = setup.run(45)
    trainable = 3 * sum(p.nbytes for p in setup.model.parameters())
    counters = healer.guarded.watch.state.nbytes + 2 * 4  # of the loss, and Adam's steps
    assert healer.training.ring.held_bytes() <= 2 * (trainable + counters)
    assert healer.metrics()["healing/snapshot_bytes"] == healer.training.ring.held_bytes() > 0
    assert healer.micro._buffers._groups == []
    assert healer.notes == []


@pytest.mark.parametrize("way", ["in place", "through data"])
def test_a_base_that_is_written_after_all_is_in_snapshots_from_then_on(way):
    setup = regression(model=Quantized)
    healer = setup.healer()
    inner = setup.train_step

    def train_step(batch):
        if way == "in place":
            setup.model.qweight[0] += 1
        else:
            setup.model.qweight.data[0] += 1
        return inner(batch)

    healer.run(train_step, setup.loader, 45, progress=False)
    snapshot = healer.newest_snapshot()
    assert int(snapshot.tensors["buffer", "qweight"][0]) == snapshot.step
    assert len(healer.notes) == (way == "through data")


def test_a_large_base_is_hashed_a_part_at_a_time(monkeypatch):
    monkeypatch.setattr(constants_module, "LEAST_BYTES", 1)
    model = nn.Sequential(*[nn.Linear(10, 10, bias=False).requires_grad_(False) for _ in range(6)])
    notes = []
    constants = Constants(TrainingState(model, []), notes.append)
    constants.look(0)
    for param in model.parameters():
        param.data += 1.0
    constants.look(1)
    assert len(notes) == 1
    for step in range(2, 7):
        constants.look(step)
    assert len(notes) == 6


def test_a_rollback_returns_small_buffers_that_began_to_move_after_the_snapshot():
    model = nn.Linear(2, 1)
    model.register_buffer("seen", torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    healer = Healer(model, optimizer, config=quick())
    for _ in healer.batches([0, 1, 2]):
        model.seen += 1
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        healer.step(loss)
        optimizer.zero_grad()
    healer.training.restore(0)
    assert model.seen == 0
    healer.exits.dismiss()
