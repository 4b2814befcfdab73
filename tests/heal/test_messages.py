"""What people read: a line per action, the batch to look at, and what is to blame."""

import json
import logging
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heal import Healer, HealingConfig
from heal.actions import HealingError
from heal.causes import Cause
from heal.exception_causes import classify
from heal.exit_codes import ExitCode
from heal.journal import read_events

QUICK = {"snapshot_interval": 10, "check_interval": 10, "quarantine_steps": 4}


def tensors(num_samples=640, bad=()):
    torch.manual_seed(0)
    inputs = torch.randn(num_samples, 8)
    targets = inputs[:, :1].sin()
    inputs[list(bad)] = float("nan")
    return TensorDataset(inputs, targets)


def build(tmp_path=None, lr=1e-3, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    config = HealingConfig(**{**QUICK, **settings})
    return model, optimizer, Healer(model, optimizer, config=config, run_dir=tmp_path)


def train(model, optimizer, healer, loader, epochs=1, spoil=lambda call: None):
    """Train; return the number of the last call of ``step`` whose batch held NaN."""
    call, bad_call = 0, None
    for _ in range(epochs):
        for x, y in healer.batches(loader):
            spoil(call)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            healer.step(loss)
            optimizer.zero_grad()
            call += 1
            bad_call = bad_call if x.isfinite().all() else call
    return bad_call


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


SCRIPT = """
import sys, torch
from torch import nn
from heal import Healer, HealingConfig
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = HealingConfig(snapshot_interval=10, check_interval=10, quarantine_steps=4)
healer = Healer(model, optimizer, config=config)
if "quiet" in sys.argv:
    import logging
    logging.getLogger("heal").setLevel(logging.ERROR)
def train_step(batch):
    if healer.last_step == 44 and not healer.recoveries:
        model.weight.data[0, 0] = float("nan")
    return model(batch[0]).square().mean()
loader = [[torch.randn(4, 8)] for _ in range(60)]
if "run" in sys.argv:
    healer.run(train_step, loader, 60)
else:
    for batch in healer.batches(loader):
        loss = train_step(batch)
        loss.backward()
        healer.step(loss)
        optimizer.zero_grad()
"""


def printed(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.replace("\r", "\n").splitlines() if "rolled back" in line]


@pytest.mark.parametrize("loop", ["by hand", "run"])
def test_a_rollback_prints_one_line_without_any_set_up(loop):
    (line,) = printed(loop)
    assert "weight_corruption" in line
    assert "rolled back to the snapshot of step 40" in line


def test_the_logging_module_switches_the_lines_off():
    assert printed("run", "quiet") == []
    assert printed("by hand", "quiet") == []


def test_a_skipped_step_names_call_epoch_batch_and_samples(caplog):
    model, optimizer, healer = build()
    loader = DataLoader(tensors(bad=[325]), batch_size=10)
    train(model, optimizer, healer, loader)
    (line,) = warnings(caplog)
    assert "call 33" in line
    assert "epoch 0 batch 32" in line
    assert "samples 320, 321" in line
    assert healer.recoveries[0]["evidence"]["samples"] == list(range(320, 330))


def test_after_a_rollback_the_call_and_the_batch_are_those_of_the_loop(caplog):
    model, optimizer, healer = build()
    loader = DataLoader(tensors(bad=[605]), batch_size=10)

    def spoil(call):
        if call == 35:
            model[0].weight.data[0, 0] = float("nan")

    call = train(model, optimizer, healer, loader, spoil=spoil)
    skipped = healer.recoveries[-1]
    assert skipped["failure"] == "nonfinite_loss"
    assert skipped["step"] < 60
    assert skipped["evidence"]["call"] == call
    assert skipped["evidence"]["batch"] == 60


def test_nan_data_is_called_nan_data_in_the_line_and_at_the_halt(caplog):
    model, optimizer, healer = build(nan_action="skip", max_consecutive_skips=8)
    loader = DataLoader(tensors(bad=range(300, 640)), batch_size=10)
    with pytest.raises(HealingError) as caught:
        train(model, optimizer, healer, loader)
    assert caught.value.exit_code == ExitCode.NONFINITE
    assert "the data: 80 of 80 numbers of batch[0] are NaN" in str(caught.value)
    assert "0.weight" not in str(caught.value)
    assert "the data" in warnings(caplog)[0]


def test_reading_the_batch_again_draws_from_no_generator():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 400

        def __getitem__(self, index):
            value = float("nan") if index == 155 else 1.0
            return torch.randn(8) * value, torch.randn(1)

    def last_numbers(nan_action):
        model, optimizer, healer = build(nan_action=nan_action)
        torch.manual_seed(7)
        for x, y in healer.batches(DataLoader(Noisy(), batch_size=10, shuffle=True)):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            healer.step(loss)
            optimizer.zero_grad()
        return torch.rand(3), healer

    first, healer = last_numbers("skip")
    assert "the data" in healer.recoveries[0]["evidence"]["blames"]
    torch.manual_seed(7)
    for _ in DataLoader(Noisy(), batch_size=10, shuffle=True):
        pass
    assert torch.equal(first, torch.rand(3))


def test_nan_in_a_hidden_state_outside_the_model_gets_a_hint():
    model, optimizer, healer = build(nan_action="skip", max_consecutive_skips=8)

    def train_with_memory():
        hidden = torch.zeros(10, 1)
        for call, (x, y) in enumerate(healer.batches(DataLoader(tensors(), batch_size=10))):
            hidden = hidden * 0.9 + (float("nan") if call == 20 else 0.0)
            loss = nn.functional.mse_loss(model(x) + hidden, y)
            loss.backward()
            healer.step(loss)
            optimizer.zero_grad()

    with pytest.raises(HealingError, match="hidden state that is carried"):
        train_with_memory()


@pytest.mark.parametrize("back", [1, 2, 3])
def test_nan_in_one_of_the_last_steps_is_reported_like_any_other(tmp_path, caplog, back):
    model, optimizer, healer = build(tmp_path)
    loader = DataLoader(tensors(bad=[640 - 10 * back]), batch_size=10)
    with healer:
        train(model, optimizer, healer, loader)
    postmortem = json.loads((tmp_path / "postmortem.json").read_text())
    (entry,) = postmortem["recovery_actions"]
    assert entry["failure"] == "nonfinite_loss"
    assert entry["evidence"]["batch"] == 64 - back
    assert postmortem["final_metrics"]["healing/nan_count"] == 1.0
    events = read_events(tmp_path / "events.jsonl")[0]
    assert [e["failure"] for e in events if e["event"] == "recovery"] == ["nonfinite_loss"]
    assert len(warnings(caplog)) == 1


def test_a_gradient_scaler_in_search_of_its_scale_takes_one_line(tmp_path):
    model, optimizer, _ = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    config = HealingConfig(**QUICK)
    healer = Healer(model, optimizer, config=config, scaler=scaler, run_dir=tmp_path)
    for x, y in healer.batches([tensors(10).tensors] * 60):
        loss = nn.functional.mse_loss(model(x), 1000 * y)
        scaler.scale(loss).backward()
        healer.step(loss)
        optimizer.zero_grad()
    healer.close()
    events = read_events(tmp_path / "events.jsonl")[0]
    (line,) = [e for e in events if e.get("failure") == "scaler_overflow"]
    assert line["evidence"]["skipped"] > 5


def test_the_line_of_an_alert_has_its_numbers_and_its_advice(caplog):
    model, optimizer, healer = build(zclip_enabled=False)

    def stop_learning(call):
        if call == 20:
            optimizer.param_groups[0]["lr"] = 0.0

    before = optimizer.param_groups[0]["lr"]
    train(model, optimizer, healer, DataLoader(tensors(), batch_size=10), spoil=stop_learning)
    (line,) = warnings(caplog)
    assert f"(learning rate 0, baseline learning rate {before:g}; nothing is learned" in line


def test_a_limit_far_below_the_usual_norm_is_reported_once(caplog):
    model, optimizer, healer = build(max_grad_norm=1e-4)
    train(model, optimizer, healer, DataLoader(tensors(), batch_size=10), epochs=8)
    (line,) = [text for text in warnings(caplog) if "clipped" in text]
    assert "raise max_grad_norm" in line


def test_a_limit_that_cuts_some_steps_is_not_reported(caplog):
    model, optimizer, healer = build(max_grad_norm=1.0)
    train(model, optimizer, healer, DataLoader(tensors(), batch_size=10), epochs=8)
    assert not [text for text in warnings(caplog) if "clipped" in text]


def test_onednn_without_memory_for_a_kernel_is_out_of_memory():
    assert classify(RuntimeError("could not create a primitive"))[0] is Cause.OUT_OF_MEMORY
    unsupported = RuntimeError("could not create a primitive descriptor for a convolution")
    assert classify(unsupported)[0] is Cause.UNKNOWN


@pytest.mark.parametrize("nan_action", ["warn", "skip", "rollback"])
def test_every_skipped_step_is_a_line_whatever_nan_action_says(caplog, nan_action):
    model, optimizer, healer = build(nan_action=nan_action)
    for step in range(12):
        loss = model(torch.ones(4, 8)).square().mean() * (math.nan if step == 8 else 1.0)
        loss.backward()
        healer.step(loss)
        optimizer.zero_grad()
    healer.close()
    (line,) = [told for told in warnings(caplog) if "step 8" in told]
    assert "skipped" in line


def test_snapshots_that_stop_becoming_good_are_reported():
    model, optimizer, healer = build(snapshot_interval=5, quarantine_steps=2, check_interval=0)
    for step in range(40):
        if step == 12:
            optimizer.state[model[0].weight]["exp_avg_sq"].fill_(math.inf)  # no update, no NaN
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        healer.step(loss)
        optimizer.zero_grad()
    healer.close()
    assert any("snapshots held NaN or Inf" in note for note in healer.notes)
