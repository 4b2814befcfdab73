"""What only evaluation reads, such as running statistics, is checked in evaluation mode."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.heal.runs import assert_same, fingerprint, regression

STEPS, AT = 90, 60
TRACED, UNTRACED = 1, 2


@pytest.fixture(autouse=True)
def _run_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def events(name):
    lines = Path("events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def batch_norm():
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))


class Instances(nn.Module):
    """InstanceNorm over groups of features: each forward leaves a trace in its statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

    def forward(self, x):
        return self.norm(x.unflatten(1, (4, -1))).flatten(1)


def instance_norm():
    return nn.Sequential(nn.Linear(8, 32), Instances(), nn.ReLU(), nn.Linear(32, 1))


class OwnNorm(nn.Module):
    """A norm layer of one's own: what evaluation reads has a name of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(32))
        self.register_buffer("running_var", torch.ones(32))

    def forward(self, x):
        if self.training:
            mean, var = x.mean(0), x.var(0)
            with torch.no_grad():
                self.running_mean.lerp_(mean, 0.1)
                self.running_var.lerp_(var, 0.1)
        else:
            mean, var = self.running_mean, self.running_var
        return (x - mean) / (var + 1e-5).sqrt()


def own_norm():
    return nn.Sequential(nn.Linear(8, 32), OwnNorm(), nn.ReLU(), nn.Linear(32, 1))


def spoil(model, how=TRACED):
    """Write wrong and finite statistics, as a bug in a callback or a bad memory would."""
    for name, buffer in model.named_buffers():
        target = buffer if how == TRACED else buffer.data
        if name.endswith("running_mean"):
            target.add_(30.0)
        elif name.endswith("running_var"):
            target.mul_(1000.0)


def trained(
    by_hand=False, change=spoil, model=batch_norm, steps=STEPS, at=AT, body=None, **options
):
    """Train, with a change of the model before step ``at``; return the set-up and its healer."""
    setup = regression(model=model, **options)
    healer = setup.healer(run_dir=Path.cwd())
    has_changed = False

    def after_step():
        nonlocal has_changed
        if healer.last_step == at - 1 and not has_changed:
            has_changed = True
            change(setup.model)

    if not by_hand:
        healer.run(
            setup.train_step, setup.loader, steps, progress=False, on_step=lambda step: after_step()
        )
        return setup, healer
    while healer.last_step < steps - 1:
        for batch in healer.batches(setup.loader):
            setup.model.train()  # as many loops do, in trials too
            loss = setup.train_step(batch)
            loss.backward()
            healer.step(loss)
            setup.optimizer.zero_grad()
            after_step()
            if healer.last_step >= steps - 1:
                break
    healer.close()
    return setup, healer


def held_out(setup):
    torch.manual_seed(1)
    inputs = torch.randn(512, 8)
    setup.model.eval()
    with torch.no_grad():
        loss = setup.train_step((inputs, inputs[:, :1].sin()))
    setup.model.train()
    return float(loss)


@pytest.mark.parametrize("by_hand", [False, True], ids=["run", "loop"])
@pytest.mark.parametrize("how", [TRACED, UNTRACED], ids=["traced", "untraced"])
def test_statistics_that_are_wrong_and_finite_are_healed(by_hand, how):
    setup, healer = trained(by_hand, lambda model: spoil(model, how), steps=AT + 25)
    untouched, _ = trained(by_hand, lambda model: None, steps=AT + 25)
    (asked,) = [e for e in events("experiment") if e["answer"] == "damaged"]
    assert asked["suspicion"] == "weight_corruption"
    (entry,) = healer.recoveries
    assert entry["actions"][0] == "rollback"
    assert held_out(setup) < 1.5 * held_out(untouched)


def test_without_healing_they_are_wrong_at_the_end():
    config = {"disabled_detectors": "foreign_writes,health"}
    setup = regression(model=batch_norm, **config)
    healer = setup.healer()
    healer.run(
        setup.train_step,
        setup.loader,
        AT + 10,
        progress=False,
        on_step=lambda step: spoil(setup.model) if step == AT - 1 else None,
    )
    untouched, _ = trained(change=lambda model: None, steps=AT + 10)
    assert held_out(setup) > 3.0 * held_out(untouched)


@pytest.mark.parametrize("model", [instance_norm, own_norm])
def test_layers_that_write_with_a_trace_in_every_forward_are_seen_by_their_norms(model):
    _, healer = trained(model=model, steps=AT + 30, at=AT + 5)
    assert [entry["actions"][0] for entry in healer.recoveries] == ["rollback"]


@pytest.mark.parametrize("model", [instance_norm, own_norm])
def test_such_layers_raise_no_suspicion_by_themselves(model):
    trained(model=model, change=lambda model: None)
    assert events("experiment") == []


def measured(model):
    """Precise statistics, written on purpose."""
    torch.manual_seed(3)
    norm = model[1]
    norm.reset_running_stats()
    norm.momentum = None
    with torch.no_grad():
        for _ in range(20):
            model(torch.randn(16, 8))
    norm.momentum = 0.1


@pytest.mark.parametrize("by_hand", [False, True], ids=["run", "loop"])
def test_statistics_that_are_written_on_purpose_stay_to_the_bit(by_hand):
    """The experiment acquits them, and leaves no trace."""
    asked, healer = trained(by_hand, measured)
    assert [event["answer"] for event in events("experiment")] == ["other data"]
    assert not healer.recoveries
    bare = regression(model=batch_norm)
    for _, batch in zip(range(STEPS), endless(bare.loader), strict=False):
        bare.train_step(batch).backward()
        bare.optimizer.step()
        bare.optimizer.zero_grad()
        if (taken := taken_by(bare)) == AT:
            measured(bare.model)
    assert taken == STEPS
    assert_same(fingerprint(asked), fingerprint(bare))


def endless(loader):
    while True:
        yield from loader


def taken_by(setup):
    return int(next(iter(setup.optimizer.state.values()))["step"])


def test_only_layers_with_statistics_change_their_mode_in_a_trial():
    """The mode of a model may decide what it returns, and recurrent layers need theirs."""
    seen = []

    def spoil_and_watch(model):
        spoil(model)
        model[1].register_forward_hook(
            lambda *_: seen.append([module.training for module in model.modules()])
        )

    trained(True, spoil_and_watch, steps=AT + 25)
    in_trials = [modes for modes in seen if not all(modes)]
    assert in_trials
    assert all(modes == [True, True, False, True, True] for modes in in_trials)
    assert all(seen[-1])


@pytest.mark.parametrize("how", [TRACED, UNTRACED], ids=["traced", "untraced"])
@pytest.mark.parametrize("left", [0, 1, 4])
def test_statistics_that_are_spoilt_in_the_last_steps_of_run_are_healed(how, left):
    """One check more, and an experiment on the last batch, come before the run is over."""
    at, steps = AT + 17 - left, AT + 17
    setup, healer = trained(change=lambda model: spoil(model, how), steps=steps, at=at)
    (entry,) = healer.recoveries
    assert entry["actions"][0] == "rollback"
    assert healer.last_step == steps - 1
    untouched, _ = trained(change=lambda model: None, steps=steps)
    assert held_out(setup) < 1.5 * held_out(untouched)


def test_precise_statistics_that_are_written_at_the_end_of_run_stay_to_the_bit():
    setup, _ = trained(change=measured, steps=AT + 17, at=AT + 16)
    ended = [t.clone() for t in setup.model.state_dict().values()]
    assert [e["answer"] for e in events("experiment")] == ["other data"]
    setup, _ = trained(
        change=measured, steps=AT + 17, at=AT + 16, disabled_detectors="foreign_writes,health"
    )
    assert_same(ended, list(setup.model.state_dict().values()))


def test_a_suspicion_that_the_end_leaves_open_is_reported():
    trained(by_hand=True, steps=AT + 4)
    (event,) = [e for e in events("recovery") + events("alert") if "hint" in str(e)]
    assert event["failure"] == "weight_corruption"
    assert not event.get("plan")
    assert "evaluate the model" in json.dumps(event)


def fill_with_nan(model):
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))


@pytest.mark.parametrize("left", [0, 1])
def test_weights_that_turn_nan_in_the_last_steps_are_healed_by_run(left):
    setup, healer = trained(change=fill_with_nan, steps=AT + 17, at=AT + 17 - left)
    assert [entry["actions"][0] for entry in healer.recoveries if entry["actions"]][
        -1
    ] == "rollback"
    assert all(p.isfinite().all() for p in setup.model.parameters())
    assert healer.last_step == AT + 16


def test_weights_that_are_nan_when_a_loop_ends_are_reported():
    trained(by_hand=True, change=fill_with_nan, steps=AT + 17, at=AT + 17)
    (alert,) = events("alert")
    assert alert["failure"] == "weight_corruption"
