import os
import stat

import pytest
import torch
from safetensors import safe_open
from torch import nn

from heal import checkpoint
from heal.checkpoint import CheckpointStore, NoSpace, SaveFailed, saving
from heal.training_state import StateMismatch
from tests.checkpoint.scenes import assert_same, files_of, run, saved_at


def test_a_run_goes_on_bit_by_bit_as_if_it_had_never_stopped(tmp_path):
    whole = run()
    whole.train(3)
    whole.save(tmp_path, 3, extra={"epoch": 1})
    whole.train(4)
    again = run(seed=1)
    resumed = again.load(tmp_path)
    assert (resumed.step, resumed.extra, resumed.notes) == (3, {"epoch": 1}, ())
    again.train(4)
    assert_same(again.bits(), whole.bits())
    assert again.scheduler.state_dict() == whole.scheduler.state_dict()
    assert (
        again.optimizer.state_dict()["param_groups"]
        == (whole.optimizer.state_dict()["param_groups"])
    )


def test_nothing_saved_means_a_fresh_start(tmp_path):
    assert run().load(tmp_path / "new") is None


@pytest.mark.parametrize("capturable", [False, True])
def test_the_step_count_keeps_its_dtype_and_device(tmp_path, capturable):
    def built():
        param = nn.Parameter(torch.ones(2))
        return nn.ParameterList([param]), torch.optim.AdamW([param], foreach=True)

    model, optimizer = built()
    model[0].sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, 1, model, optimizer)
    model, optimizer = built()
    checkpoint.load(tmp_path, model, optimizer)
    step = optimizer.state[model[0]]["step"]
    assert (step.dtype, step.device.type, step.item()) == (torch.float32, "cpu", 1.0)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.bool,
        torch.uint16,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2fnuz,
        torch.int8,
    ],
    ids=str,
)
def test_every_dtype_and_shape_comes_back_to_the_bit(tmp_path, dtype):
    def built(fill):
        model = nn.Module()
        for i, shape in enumerate([(), (0,), (3, 5), (2, 0, 3)]):
            model.register_buffer(f"b{i}", torch.full(shape, fill).to(dtype), persistent=i > 0)
        return model

    model = built(1.0)
    folder = checkpoint.save(tmp_path, 0, model)
    again = built(0.0)
    assert checkpoint.load(tmp_path, again).step == 0
    for name, buffer in model.named_buffers():
        back = dict(again.named_buffers())[name]
        assert torch.equal(back.reshape(-1).view(torch.uint8), buffer.reshape(-1).view(torch.uint8))
    with safe_open(folder / "rank-00000.safetensors", "pt") as file:
        assert "buffer/b2" in file.keys()  # noqa: SIM118


def test_tied_and_transposed_weights_are_saved_once_and_come_back(tmp_path):
    def built(seed):
        torch.manual_seed(seed)
        first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        second.weight = first.weight
        third = nn.Linear(2, 3, bias=False)
        third.weight = nn.Parameter(torch.randn(2, 3).t())
        return nn.Sequential(first, second, third)

    model, again = built(0), built(1)
    checkpoint.save(tmp_path, 0, model)
    checkpoint.load(tmp_path, again)
    assert again[0].weight is again[1].weight
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_wrappers_around_the_model_do_not_matter(tmp_path):
    model = nn.Linear(2, 2)
    # As DistributedDataParallel(torch.compile(...)) names it.
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": nn.Sequential(model)})})
    checkpoint.save(tmp_path, 0, wrapped)
    again = nn.Linear(2, 2)
    checkpoint.load(tmp_path, nn.Sequential(again))
    assert torch.equal(again.weight, model.weight)


def test_files_are_private_and_nothing_else_is_left(tmp_path):
    saved_at(tmp_path / "a" / "b", 1)
    folder = tmp_path / "a" / "b" / "step-000001"
    names = ["COMMIT", "manifest-00000.json", "rank-00000.safetensors"]
    assert sorted(os.listdir(folder)) == names
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files_of(folder)} == {0o600}


def test_a_step_saved_twice_gets_a_folder_of_its_own_and_the_newer_one_is_loaded(tmp_path):
    there = run().train(2)
    there.save(tmp_path, 2)
    first = (tmp_path / "step-000002" / "COMMIT").read_bytes()
    there.train(1)
    assert there.save(tmp_path, 2).name == "step-000002-r1"
    assert (tmp_path / "step-000002" / "COMMIT").read_bytes() == first
    bits = there.bits()
    again = run(seed=1)
    again.load(tmp_path)
    assert_same(again.bits(), bits)


def test_another_model_raises_by_name_and_nothing_changes(tmp_path):
    run().train(1).save(tmp_path, 1)
    for change, why in [
        (lambda r: r.model.append(nn.Linear(2, 2)), "'4.weight' is not in the checkpoint"),
        (lambda r: r.model.register_buffer("new", torch.ones(1)), ""),
        (
            lambda r: r.model.__setitem__(3, nn.Linear(8, 3)),
            r"\(3, 8\) as in this run, got .*\(2, 8\)",
        ),
        (lambda r: r.model.__setitem__(3, nn.Identity()), "'unnamed"),
    ]:
        other = run(seed=1)
        change(other)
        before = [p.clone() for p in other.model.parameters()]
        if not why:  # caches are made in the first forward: a new buffer is no other model
            assert other.load(tmp_path).step == 1
            continue
        with pytest.raises(StateMismatch, match=why):
            other.load(tmp_path)
        for a, b in zip(before, other.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_what_the_run_does_not_have_is_refused_by_name(tmp_path):
    checkpoint.save(tmp_path, 1, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(StateMismatch, match=r"'parameter/1\.weight', which this run does not have"):
        checkpoint.load(tmp_path, nn.Sequential(nn.Linear(2, 2)))


def test_another_number_of_groups_is_refused(tmp_path):
    run().train(1).save(tmp_path, 1)
    other = run()
    other.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(StateMismatch, match="unnamed"):
        other.load(tmp_path)
    with pytest.raises(StateMismatch, match="schedulers: expected 0 as in this run, got 1"):
        checkpoint.load(tmp_path, (fresh := run()).model, fresh.optimizer)


def test_weights_with_nan_are_not_saved_unless_asked_for(tmp_path):
    there = run().train(1)
    there.save(tmp_path, 1)
    with torch.no_grad():
        there.model[0].weight[0, 0] = float("nan")
    with pytest.raises(SaveFailed, match="hold 1 NaN or Inf"):
        there.save(tmp_path, 2)
    assert CheckpointStore(tmp_path).steps() == [1]
    there.save(tmp_path, 3, allow_nonfinite=True)
    assert run().load(tmp_path).step == 3


def test_a_value_without_a_safe_form_is_refused_by_name_and_nothing_is_written(tmp_path):
    with pytest.raises(SaveFailed, match=r"state\['extra'\]: expected .*, got a builtins\.object"):
        run().save(tmp_path, 1, extra=object())
    assert os.listdir(tmp_path) == []


def test_without_room_nothing_is_written_and_the_message_says_how_much(tmp_path, monkeypatch):
    saved_at(tmp_path, 1)
    monkeypatch.setattr(saving, "free_bytes", lambda path: 1000)
    with pytest.raises(NoSpace, match="1000 are free"):
        run().train(2).save(tmp_path, 2)
    assert os.listdir(tmp_path) == ["step-000001"]


def test_an_older_checkpoint_can_be_asked_for(tmp_path):
    bits = saved_at(tmp_path, 1, 3, 5)
    again = run(seed=1)
    assert again.load(tmp_path, most=4).step == 3
    assert_same(again.bits(), bits[3])


def test_abandoned_steps_are_put_aside(tmp_path):
    saved_at(tmp_path, 1, 3, 5)
    store = CheckpointStore(tmp_path)
    store.abandon_after(1)
    assert store.steps() == [1]
    assert sorted(os.listdir(tmp_path)) == [
        "step-000001",
        "step-000003.abandoned",
        "step-000005.abandoned",
    ]
