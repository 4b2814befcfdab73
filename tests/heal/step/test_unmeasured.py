"""Sparse and complex gradients are stepped unguarded, which is told; all else is judged as ever."""

import math

import pytest
import torch
from torch import nn

import zclip
from heal import Healer
from heal.actions import Rollback
from heal.causes import Cause
from tests.heal.runs import quick

BAD = 20


class Words(nn.Module):
    """A sparse embedding before a dense layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, words):
        return self.head(self.embed(words)).square().mean()


class Waves(nn.Module):
    """A complex parameter and a real one."""

    def __init__(self):
        super().__init__()
        self.wave = nn.Parameter(torch.randn(10, dtype=torch.complex64))
        self.head = nn.Linear(1, 1)

    def forward(self, words):
        return self.head(self.wave[words].abs().square().mean().reshape(1)).square().mean()


SGD, SparseAdam = torch.optim.SGD, torch.optim.SparseAdam
CASES = {
    "SGD": (Words, lambda m: [SGD(m.parameters(), 0.1)]),
    "SparseAdam alone": (
        lambda: nn.Embedding(10, 4, sparse=True),
        lambda m: [SparseAdam(m.parameters(), 0.1)],
    ),
    "SparseAdam and fused AdamW": (
        Words,
        lambda m: [
            SparseAdam(m.embed.parameters(), 0.1),
            torch.optim.AdamW(m.head.parameters(), 0.1, fused=True),
        ],
    ),
    "complex Adam": (Waves, lambda m: [torch.optim.Adam(m.parameters(), 0.1)]),
}


def batches(count=40):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 10, (6,), generator=generator) for _ in range(count)]


def loss_of(model, words):
    return model(words) if not isinstance(model, nn.Embedding) else model(words).square().mean()


def build(case):
    torch.manual_seed(0)
    make_model, make_optimizers = CASES[case]
    model = make_model()
    return model, make_optimizers(model)


def healed(case, disturb=lambda step, model: None, sees=lambda step, loss: loss, **config):
    model, optimizers = build(case)
    healer = Healer(model, optimizers, config=quick(**config))
    healer.exits.dismiss()
    for step, words in enumerate(healer.batches(batches())):
        loss = loss_of(model, words)
        loss.backward()
        disturb(step, model)
        healer.step(sees(step, loss))
        model.zero_grad()
    return model, healer


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return request.param


def test_they_are_stepped_as_without_a_healer_and_it_is_told_once(case):
    model, healer = healed(case)
    bare, optimizers = build(case)
    for words in batches():
        loss_of(bare, words).backward()
        for optimizer in optimizers:
            optimizer.step()
        bare.zero_grad()
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    name = {"SparseAdam alone": "weight", "complex Adam": "wave"}.get(case, "embed.weight")
    kind = "complex64" if "complex" in case else "sparse_coo"
    (note,) = healer.notes
    assert note.startswith(f"the gradient of {name} is {kind}, which cannot be measured")
    assert not healer.history


def test_a_bad_loss_is_refused_for_them_too(case):
    before = []

    def note(step, model):
        if step in (BAD, BAD + 1):
            before.append([p.detach().clone() for p in model.parameters()])

    _, healer = healed(
        case, note, lambda step, loss: loss.detach() * math.nan if step == BAD else loss
    )
    assert all(map(torch.equal, *before))
    assert [d.cause for _, d, _ in healer.history] == [Cause.NONFINITE_LOSS]


@pytest.mark.parametrize("case", ["SGD", "SparseAdam and fused AdamW"])
def test_the_dense_gradients_beside_them_are_watched_clipped_and_named(case):
    def spoil(step, model):
        if step == BAD:
            model.head.weight.grad[0, 0] = math.nan

    _, healer = healed(case, spoil, zclip_enabled=True)
    (diagnosis,) = [d for _, d, _ in healer.history]
    assert (diagnosis.cause, diagnosis.evidence["tensor"]) == (
        Cause.NONFINITE_GRADIENT,
        "head.weight",
    )
    assert math.isfinite(healer.latest.norm)


def test_nan_in_them_is_found_in_the_weights_and_rolled_back(case):
    struck = []

    def spoil(step, model):
        if step == BAD + 3 and not struck:
            struck.append(step)
            param = next(iter(model.parameters()))
            param.grad = param.grad * math.nan

    model, healer = healed(case, spoil)
    assert any(isinstance(action, Rollback) for _, _, plan in healer.history for action in plan)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_scaler_divides_them_too():
    model, optimizers = build("SGD")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    healer = Healer(model, optimizers, config=quick(), scaler=scaler)
    healer.exits.dismiss()
    for words in healer.batches(batches()):
        loss = loss_of(model, words)
        scaler.scale(loss).backward()
        healer.step(loss)
        model.zero_grad()
    plain, _ = healed("SGD")
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_what_joins_later_is_noticed():
    torch.manual_seed(0)
    model = Words()
    optimizer = SGD(model.head.parameters(), 0.1)
    healer = Healer(model, optimizer, config=quick())
    healer.exits.dismiss()
    for step, words in enumerate(healer.batches(batches())):
        if step == BAD:
            optimizer.add_param_group({"params": [model.embed.weight]})
        loss = model(words)
        loss.backward()
        healer.step(loss)
        model.zero_grad()
    assert [note.split(" is ")[0] for note in healer.notes] == ["the gradient of embed.weight"]


def test_a_clipper_by_itself_says_what_it_wanted():
    model, (optimizer,) = build("SGD")
    model(batches(1)[0]).backward()
    with pytest.raises(TypeError, match="expected a dense tensor"):
        zclip.wrap(optimizer).step()
