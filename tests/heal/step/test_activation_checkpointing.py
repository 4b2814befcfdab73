"""Activations are recomputed: the same training, and a model that can be copied and saved."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from heal.buffers import SMALL_BYTES
from heal.micro_batch import checkpoint_activations


class Averaging(nn.Module):
    """Writes one buffer in place and replaces another."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, scale=1.0):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.seen = self.seen + len(x)
        return torch.tanh(self.layer(x)) * scale


BLOCKS = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU()),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)),
    "BatchNorm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()),
    "own buffers": Averaging,
}


def model_of(name):
    torch.manual_seed(0)
    return nn.Sequential(*(BLOCKS[name]() for _ in range(3)))


def trained(model, steps=3):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("name", BLOCKS)
def test_training_is_the_same_bit_by_bit_buffers_included(name):
    plain, recomputed = model_of(name), model_of(name)
    assert checkpoint_activations(recomputed)
    wanted, found = trained(plain), trained(recomputed)
    assert list(wanted) == list(found)
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


def test_activations_are_not_kept():
    def kept_by(model):
        saved = []

        def pack(tensor):
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(6, 4))
        return len(saved)

    model = model_of("linear")
    before = kept_by(model)
    assert checkpoint_activations(model)
    assert kept_by(model) < before


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_has_weights_of_its_own_and_recomputes_too(copied, name):
    model = model_of(name)
    checkpoint_activations(model)
    other = copied(model)
    assert not checkpoint_activations(other)
    assert isinstance(other[0], type(BLOCKS[name]()))
    x = torch.randn(6, 4)
    model.eval()
    wanted = model(x)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    torch.testing.assert_close(other.eval()(x), wanted, rtol=0, atol=0)
    trained(other.train())


def test_the_class_of_a_block_stays_what_it_is():
    model = model_of("own buffers")
    checkpoint_activations(model)
    assert all(type(block) is Averaging for block in model)


def test_a_replica_for_another_device_computes_with_its_own_weights():
    """As ``nn.DataParallel`` makes them: the dictionaries are copied, the weights put in later."""
    model = model_of("linear")
    checkpoint_activations(model)
    replica = model[0]._replicate_for_data_parallel()
    replica._modules["0"] = nn.Linear(4, 4)
    x = torch.randn(6, 4)
    assert torch.equal(replica(x), replica[1](replica[0](x)))
    replica(x).sum().backward()
    assert replica[0].weight.grad is not None
    assert model[0][0].weight.grad is None


def test_a_compiled_model_recomputes_as_well():
    plain, compiled = model_of("linear"), model_of("linear")
    checkpoint_activations(compiled)
    run = torch.compile(compiled, backend="eager")
    x = torch.randn(6, 4)
    for each in (plain, run):
        each(x).square().mean().backward()
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_it_is_turned_on_once_and_where_there_are_blocks():
    model = model_of("linear")
    assert checkpoint_activations(model)
    assert not checkpoint_activations(model)
    assert not checkpoint_activations(nn.Linear(4, 4))


def test_a_forward_that_somebody_has_put_before_the_blocks_own_stays():
    model = model_of("linear")
    calls = []
    inner = model[0].forward
    model[0].forward = lambda x: calls.append(1) or inner(x)
    assert checkpoint_activations(model)
    model(torch.randn(6, 4)).sum().backward()
    assert calls == [1]


def test_large_tables_are_not_copied_in_recomputation(monkeypatch):
    block = Averaging()
    block.register_buffer("table", torch.zeros(SMALL_BYTES))
    model = nn.Sequential(block, Averaging())
    checkpoint_activations(model)
    monkeypatch.setattr(type(block.table), "clone", refuse_large(torch.Tensor.clone))
    model(torch.randn(6, 4)).sum().backward()


def refuse_large(clone):
    def checked(tensor, *args, **kwargs):
        assert tensor.nbytes <= SMALL_BYTES
        return clone(tensor, *args, **kwargs)

    return checked
