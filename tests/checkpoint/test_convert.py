import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

from heal.checkpoint import CheckpointError, convert
from heal.checkpoint.contents import state_dicts
from tests.checkpoint.scenes import assert_same, run, saved_at


def test_a_checkpoint_becomes_state_dicts_that_torch_takes(tmp_path):
    bits = saved_at(tmp_path, 1, 3)
    dicts = state_dicts(tmp_path)
    again = run(seed=1)
    again.model.load_state_dict(dicts["model"])
    again.optimizer.load_state_dict(dicts["optimizers"][0])
    again.scheduler.load_state_dict(dicts["schedulers"][0])
    assert_same(again.bits()[:-2], bits[3][:-2])  # generators are no part of state dicts
    assert state_dicts(tmp_path, 1)["step"] == 1


def test_a_checkpoint_goes_to_torch_save_and_back(tmp_path):
    bits = saved_at(tmp_path / "ours", 3)
    convert.export_torch(tmp_path / "ours", tmp_path / "theirs.pt")
    assert sorted(os.listdir(tmp_path)) == ["ours", "theirs.pt"]
    other = run(seed=1)
    parts = (other.model, other.optimizer, other.scheduler)
    convert.import_torch(tmp_path / "theirs.pt", tmp_path / "back", 3, *parts, trusted=True)
    again = run(seed=2)
    assert again.load(tmp_path / "back").step == 3
    assert_same(again.bits()[:-2], bits[3][:-2])


def test_a_checkpoint_goes_to_dcp_and_back(tmp_path):
    bits = saved_at(tmp_path / "ours", 3)
    convert.export_dcp(tmp_path / "ours", tmp_path / "theirs")
    other = run(seed=1)
    parts = (other.model, other.optimizer, other.scheduler)
    convert.import_dcp(tmp_path / "theirs", tmp_path / "back", 3, *parts, trusted=True)
    again = run(seed=2)
    assert again.load(tmp_path / "back").step == 3
    assert_same(again.bits()[:-2], bits[3][:-2])


def test_dcp_itself_reads_what_we_export(tmp_path):
    saved_at(tmp_path / "ours", 3)
    convert.export_dcp(tmp_path / "ours", tmp_path / "theirs")
    there = run(seed=1)
    tree = {"model": there.model.state_dict()}
    dcp.load(tree, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for name, tensor in state_dicts(tmp_path / "ours")["model"].items():
        assert torch.equal(tree["model"][name], tensor)


@pytest.mark.parametrize("key", ["model", "model_state_dict", "state_dict", None])
def test_the_usual_names_of_others_are_known(tmp_path, key):
    there = run().train(1)
    wrapped = {f"module.{name}": t for name, t in there.model.state_dict().items()}
    torch.save({key: wrapped} if key else wrapped, tmp_path / "weights.pt")
    other = run(seed=1)
    convert.import_torch(tmp_path / "weights.pt", tmp_path / "ours", 0, other.model, trusted=True)
    assert torch.equal(other.model[0].weight, there.model[0].weight)


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB"],)


@pytest.mark.parametrize("load", [convert.import_torch, convert.import_dcp])
def test_nothing_is_loaded_that_was_not_declared_trusted(tmp_path, monkeypatch, load):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    torch.save({"model": Bomb()}, tmp_path / "bomb.pt")
    for trusted in (False, 1, "yes"):
        with pytest.raises(convert.NotTrusted, match="give trusted=True"):
            load(tmp_path / "bomb.pt", tmp_path / "ours", 0, run().model, trusted=trusted)
    assert not (tmp_path / "exploded").exists()


def test_what_is_missing_is_named(tmp_path):
    there = run().train(1)
    torch.save({"model": there.model.state_dict()}, tmp_path / "a.pt")
    torch.save({"weights": 1}, tmp_path / "b.pt")
    parts = (there.model, there.optimizer)
    with pytest.raises(CheckpointError, match="expected 1 optimizers, got 0"):
        convert.import_torch(tmp_path / "a.pt", tmp_path / "ours", 0, *parts, trusted=True)
    with pytest.raises(CheckpointError, match=r"expected one of model.*, got \['weights'\]"):
        convert.import_torch(tmp_path / "b.pt", tmp_path / "ours", 0, *parts, trusted=True)
    with pytest.raises(CheckpointError, match="no finished checkpoint of step 7"):
        state_dicts(tmp_path, 7)
