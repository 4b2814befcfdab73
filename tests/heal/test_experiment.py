"""Suspicions are settled by an experiment: damage is healed, everything else is left alone."""

import json
import math
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.healthy.guards import BareSteps
from heal import Healer, Rollback
from heal.causes import Cause, Family, Finding, Severity
from heal.experiment import BUDGET, Answer, Pair, judge
from heal.history import Incident
from tests.heal.runs import assert_same, fingerprint, language, mlp, regression

STEPS = 80


class Suspicious:
    """Suspects the weights in every record: as bad as a detector can be."""

    def observe(self, record):
        return Finding(
            cause=Cause.LOSS_SPIKE,
            step=record.step,
            bad_step=max(record.step - 1, 0),
            severity=Severity.WARN,
            evidence={"loss": record.loss, "usual_loss": record.loss, "noise": 0.1},
            wants_proof=True,
        )

    def state(self):
        return {}

    def load_state(self, state):
        pass


@pytest.fixture(autouse=True)
def _run_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def bare_run(make):
    setup = make()
    setup.bare(STEPS)
    return fingerprint(setup)


def suspected(setup, **options) -> Healer:
    healer = setup.healer(run_dir=Path.cwd(), **options)
    healer.add_detector("suspicious", Suspicious())
    return healer


def events(name):
    lines = Path("events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def in_a_loop(setup, healer, steps):
    """A hand-written loop over as many batches as it takes."""
    done = False
    while not done:
        for batch in healer.batches(setup.loader):
            loss = setup.train_step(batch)
            loss.backward()
            healer.step(loss)
            setup.optimizer.zero_grad()
            done = healer.last_step >= steps - 1
            if done:
                break


@pytest.mark.parametrize(
    ("pairs", "answer"),
    [
        ([Pair(1e8, 0.2)], Answer.DAMAGED),
        ([Pair(0.2, 0.2)], None),  # as usual: says little
        ([Pair(7.4, 7.2)], Answer.OTHER_DATA),  # hard for both
        ([Pair(0.5, 0.2), Pair(0.6, 0.25)], None),
        ([Pair(0.5, 0.2), Pair(0.6, 0.25), Pair(0.5, 0.2)], Answer.DAMAGED),
        ([Pair(0.2, 0.2), Pair(0.6, 0.2), Pair(5.0, 0.2)], Answer.DAMAGED),
        ([Pair(0.5, 0.2), Pair(0.2, 0.2), Pair(0.2, 0.2)], Answer.OTHER_DATA),
        ([Pair(0.12, 0.02), Pair(0.1, 0.1), Pair(0.1, 0.1)], Answer.OTHER_DATA),
        ([Pair(math.inf, 0.2)], Answer.DAMAGED),
        ([Pair(math.inf, math.inf)], Answer.OTHER_DATA),
        ([Pair(-1.0, -5.0)], Answer.DAMAGED),
        ([Pair(-4.95, -5.0)] * 3, Answer.OTHER_DATA),
    ],
)
def test_paired_losses_are_judged_by_ratio_and_noise(pairs, answer):
    assert judge(pairs, noise=0.15, baseline=0.2) is answer


@pytest.mark.parametrize(
    ("pairs", "answer"),
    [
        ([Pair(1.1, 0.7)], None),  # hard for today's weights only: that is no other data
        ([Pair(1.0, 0.9)], Answer.OTHER_DATA),  # hard for both
        ([Pair(1.1, 0.7), Pair(1.0, 0.9)], None),  # one hard batch among others is no other data
        ([Pair(1.0, 0.5), Pair(1.0, 0.6), Pair(1.2, 0.9)], Answer.DAMAGED),
        ([Pair(0.72, 0.6), Pair(0.75, 0.65), Pair(0.68, 0.62)], Answer.DAMAGED),  # lost each time
        ([Pair(0.72, 0.6), Pair(0.75, 0.65), Pair(0.68, 0.69)], Answer.OTHER_DATA),  # not each time
        ([Pair(0.65, 0.6)] * 3, Answer.OTHER_DATA),  # by less than the noise
        ([Pair(0.67, 0.6)] * 3, Answer.DAMAGED),
        ([Pair(0.77, 0.705)] * 3, Answer.OTHER_DATA),  # by less than a tenth
        ([Pair(-0.5, -0.55)] * 3, Answer.OTHER_DATA),
        ([Pair(-0.5, -0.6)] * 3, Answer.DAMAGED),
    ],
)
def test_weights_that_lose_every_batch_are_worse_though_by_a_tenth(pairs, answer):
    """The noise is of losses, from batch to batch; pairs share their batch."""
    assert judge(pairs, noise=0.06, baseline=0.6) is answer


@pytest.mark.parametrize(
    ("pairs", "answer"),
    [
        ([Pair(1.31, 1.25), Pair(1.27, 1.16), Pair(1.43, 1.32)], Answer.DAMAGED),
        ([Pair(1.31, 1.25), Pair(1.27, 1.16)], None),
        ([Pair(1.31, 1.25), Pair(1.27, 1.16), Pair(1.73, 1.32)], None),  # may be chance
        (
            [Pair(1.31, 1.25), Pair(1.27, 1.16), Pair(1.73, 1.32), Pair(1.3, 1.31)],
            Answer.OTHER_DATA,
        ),
        ([Pair(1.31, 1.25), Pair(1.27, 1.16), Pair(1.83, 1.32)], Answer.DAMAGED),  # by the noise
        ([Pair(1.205, 1.2)] * 3, Answer.OTHER_DATA),  # the same level
        ([Pair(0.05, -0.01)] * 3, Answer.DAMAGED),
    ],
)
def test_what_no_update_does_need_not_cost_more_than_the_noise_of_the_losses(pairs, answer):
    assert judge(pairs, noise=0.2, baseline=1.2, is_no_update=True) is answer


@pytest.mark.parametrize("make", [regression, language])
def test_experiments_leave_no_trace_in_run(make):
    expected = bare_run(make)
    setup = make()
    healer = suspected(setup)
    healer.run(setup.train_step, setup.loader, STEPS, progress=False)
    assert len(events("experiment")) > 3
    assert not healer.recoveries
    assert_same(fingerprint(setup), expected)


@pytest.mark.parametrize("make", [regression, language])
def test_experiments_leave_no_trace_in_a_hand_written_loop(make):
    expected = bare_run(make)
    setup = make()
    healer = suspected(setup)
    in_a_loop(setup, healer, STEPS)
    assert len(events("experiment")) > 3
    assert_same(fingerprint(setup), expected)


def test_addresses_stay_what_they_were():
    setup = regression()
    addresses = [p.data_ptr() for p in setup.model.parameters()]
    healer = suspected(setup)
    in_a_loop(setup, healer, 20)
    assert [p.data_ptr() for p in setup.model.parameters()] == addresses


def test_the_body_runs_once_more_with_old_weights_and_its_step_changes_nothing():
    setup = regression()
    healer = suspected(setup)
    seen = []
    for batch in healer.batches(setup.loader):
        seen.append((healer.last_step, setup.model[0].weight.detach().clone()))
        loss = setup.train_step(batch)
        loss.backward()
        healer.step(loss)
        setup.optimizer.zero_grad()
        if healer.last_step >= 12:
            break
    twice = [i for i in range(1, len(seen)) if seen[i][0] == seen[i - 1][0]]
    assert twice
    assert any(not torch.equal(seen[i][1], seen[i - 1][1]) for i in twice)


def averaged(setup, steps, body):
    """Keep a moving average of the weights beside the model, as many loops do."""
    average = torch.optim.swa_utils.AveragedModel(setup.model)
    in_place, not_copied = torch.zeros(3), torch.zeros(3, device="meta")
    for batch in islice(body.batches(setup.loader), 2 * steps):
        loss = setup.train_step(batch)
        loss.backward()
        body.step(loss)
        setup.optimizer.zero_grad()
        average.update_parameters(setup.model)
        in_place[1] += 1.0
        not_copied.add_(1.0)  # must not end the run
        if body.last_step == steps - 1:
            break
    return [*average.parameters(), *average.buffers(), in_place]


def test_what_the_body_writes_after_the_step_of_a_trial_is_undone():
    bare = regression()
    expected = averaged(bare, STEPS, BareSteps(bare.model, bare.optimizer))
    setup = regression()
    healer = suspected(setup)
    found = averaged(setup, STEPS, healer)
    assert events("experiment")
    assert all(map(torch.equal, found, expected))
    later = torch.zeros(2)
    later.add_(1.0)
    healer.close()
    assert later.sum() == 2.0  # writes after the loop stay


def test_accumulated_batches_are_given_out_again_together():
    def loop(batches, step, setup):
        for i, batch in enumerate(batches):
            loss = setup.train_step(batch) / 2
            loss.backward()
            if i % 2:
                step(loss)
                setup.optimizer.zero_grad()

    bare = regression()
    loop(bare.loader, lambda loss: bare.optimizer.step(), bare)
    expected = fingerprint(bare)
    setup = regression()
    healer = suspected(setup)
    loop(healer.batches(setup.loader), healer.step, setup)
    assert healer.experiment.forwards
    assert_same(fingerprint(setup), expected)


def test_a_given_forward_is_used_in_place_of_the_body():
    setup, calls = regression(), []

    def forward(batch):
        calls.append(torch.is_grad_enabled())
        return setup.train_step(batch)

    healer = suspected(setup, forward=forward)
    bodies = 0
    for batch in healer.batches(setup.loader):
        bodies += 1
        loss = setup.train_step(batch)
        loss.backward()
        healer.step(loss)
        setup.optimizer.zero_grad()
    assert bodies == healer.last_step + 1
    assert calls
    assert not any(calls)


def test_a_body_that_steps_another_optimizer_is_not_run_twice():
    setup = regression()
    other = nn.Linear(2, 2)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    healer = suspected(setup)
    bodies = 0
    for batch in healer.batches(setup.loader):
        bodies += 1
        other(torch.ones(2)).sum().backward()
        others.step()
        loss = setup.train_step(batch)
        loss.backward()
        healer.step(loss)
        setup.optimizer.zero_grad()
    assert bodies == healer.last_step + 1
    assert any("forward" in note for note in healer.notes)


def test_without_a_forward_pass_a_suspicion_is_only_reported():
    setup = regression()
    healer = suspected(setup)
    for batch in setup.loader:  # not healer.batches
        loss = setup.train_step(batch)
        loss.backward()
        healer.step(loss)
        setup.optimizer.zero_grad()
    alerts = events("alert")
    assert {alert["failure"] for alert in alerts} == {"loss_spike"}
    assert not any(event["plan"] for event in events("recovery"))


def test_experiments_cost_no_more_than_their_budget():
    setup = regression()
    healer = suspected(setup)
    healer.run(setup.train_step, setup.loader, 300, progress=False)
    assert 0 < healer.experiment.forwards <= BUDGET


def damaged(setup, step, damage):
    """The setup with ``damage`` done right before the forward pass of a step."""
    inner, calls = setup.train_step, []

    def train_step(batch):
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == step:
                with torch.no_grad():
                    damage(setup)
        return inner(batch)

    setup.train_step = train_step
    return setup


def scale_weights(setup):
    for param in setup.model.parameters():
        param.mul_(100.0)


def blow_up_moments(setup):
    for state in setup.optimizer.state.values():
        state["exp_avg"].mul_(1e4)


def one_huge_weight(setup):
    setup.model[3].weight[0, 0] = 1e4


@pytest.mark.parametrize("damage", [scale_weights, blow_up_moments, one_huge_weight])
@pytest.mark.parametrize("step", [5, 23, 61])
def test_damage_at_any_step_is_rolled_back_and_the_loss_comes_back(damage, step):
    setup = damaged(regression(), step, damage)
    setup.run(160, run_dir=Path.cwd())
    rolled = [e for e in events("recovery") if e["resumed_at"] < e["noticed_at"]]
    assert rolled
    assert all(event["resumed_at"] < step for event in rolled)
    losses = [float(setup.train_step(batch).detach()) for batch in setup.loader]
    twin = regression()
    twin.bare(160)
    expected = [float(twin.train_step(batch).detach()) for batch in twin.loader]
    assert sum(losses) < 1.5 * sum(expected) + 0.05


@pytest.mark.parametrize(("after", "returns_to"), [(49, 50), (48, 40), (51, 50)])
def test_a_fresh_snapshot_is_returned_to_if_it_is_from_before_the_damage(after, returns_to):
    setup = regression()
    healer = setup.healer(run_dir=Path.cwd())

    @torch.no_grad()
    def on_step(step):
        if step == after and not healer.history:
            for weight in setup.model.parameters():
                weight.mul_(30.0)

    healer.run(setup.train_step, setup.loader, STEPS, progress=False, on_step=on_step)
    rollbacks = [a for _, _, plan in healer.history for a in plan if isinstance(a, Rollback)]
    assert [rollback.before_step for rollback in rollbacks] == [returns_to]


def test_nan_data_skips_steps_and_never_rolls_back():
    setup = regression(max_consecutive_skips=20)
    inner, calls = setup.train_step, []

    def train_step(batch):
        if torch.is_grad_enabled():
            calls.append(1)
        loss = inner(batch)
        return loss * math.nan if len(calls) > 40 else loss

    setup.train_step = train_step
    healer = setup.healer()
    weights = {}

    def keep(step):
        if step == 39:
            weights.update({k: v.clone() for k, v in setup.model.state_dict().items()})

    from heal.actions import HealingError

    with pytest.raises(HealingError) as halt:
        healer.run(setup.train_step, setup.loader, 200, progress=False, on_step=keep)
    assert halt.value.exit_code == 43
    assert "data" in str(halt.value)
    for name, value in setup.model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_weights_that_overflow_are_told_from_nan_data():
    def overflow(setup):
        for param in setup.model.parameters():
            param.mul_(1e25)

    setup = damaged(regression(), 40, overflow)
    setup.run(120, run_dir=Path.cwd())
    assert all(torch.isfinite(p).all() and p.abs().max() < 1e3 for p in setup.model.parameters())
    assert any(e["resumed_at"] < e["noticed_at"] for e in events("recovery"))


def test_a_body_that_is_left_in_a_trial_finds_its_own_weights():
    setup = regression()
    healer = suspected(setup)
    own = []
    for batch in healer.batches(setup.loader):
        if healer.trials.is_open and healer.last_step > 4:
            swapped = [p.detach().clone() for p in setup.model.parameters()]
            break
        loss = setup.train_step(batch)
        loss.backward()
        healer.step(loss)
        setup.optimizer.zero_grad()
        own = [p.detach().clone() for p in setup.model.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(swapped, own, strict=True))
    assert all(torch.equal(p, a) for p, a in zip(setup.model.parameters(), own, strict=True))


def test_an_error_in_a_trial_is_no_error_of_the_run():
    setup = regression()
    healer = suspected(setup)
    for batch in healer.batches(setup.loader):
        with healer.attempt():
            if healer.trials.is_open:
                raise ValueError("only with old weights")
            loss = setup.train_step(batch)
            loss.backward()
            healer.step(loss)
        setup.optimizer.zero_grad()
    assert healer.last_step == len(setup.loader) - 1
    assert not healer.recoveries


def new_head(setup):
    """Replace the last layer by an untrained one that the optimizer learns of."""
    torch.manual_seed(7)
    setup.model[-1] = nn.Linear(16, 1)
    group = setup.optimizer.param_groups[0]
    group["params"] = list(setup.model.parameters())


@pytest.mark.parametrize("says_so", [True, False])
def test_a_head_that_is_replaced_is_no_damage(says_so):
    setup = regression()
    healer = setup.healer(run_dir=Path.cwd())
    for epoch in range(8):
        for batch in healer.batches(setup.loader):
            loss = setup.train_step(batch)
            loss.backward()
            healer.step(loss)
            setup.optimizer.zero_grad()
        if epoch == 3:
            new_head(setup)
            head = setup.model[-1].weight.detach().clone()
            if says_so:
                healer.expect_change("new head")
    assert healer.last_step == 8 * len(setup.loader) - 1
    assert not torch.equal(setup.model[-1].weight, head)
    assert len(events("expected_change")) == says_so


def test_a_detector_can_be_switched_off_or_set_to_report_only():
    off = damaged(
        regression(disabled_detectors="loss,gradient_explosion,health"), 40, scale_weights
    )
    off.run(80, run_dir=Path.cwd())
    assert not events("experiment")
    assert not events("recovery")


def test_an_alert_only_detector_changes_nothing():
    names = "loss,gradient_explosion,health,skipped_steps"
    setup = damaged(regression(alert_only_detectors=names), 40, scale_weights)
    setup.run(80, run_dir=Path.cwd())
    assert events("alert")
    assert not events("experiment")


def test_an_unknown_detector_is_refused_by_name():
    with pytest.raises(ValueError, match="got 'losses'"):
        regression(disabled_detectors="losses").healer()


def rising_rate(seed, healed):
    """500 steps at a low rate, then a thousand times that, by a schedule that is known."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model.append(nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-4, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0 if k < 500 else 1e3)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randn(20, 5, generator=generator)
    inputs = [torch.randn(64, 20, generator=generator) for _ in range(700)]
    healer = None
    if healed:
        healer = Healer(model, optimizer, schedule, {"zclip_enabled": False}, run_dir=Path.cwd())
    for x in inputs if healer is None else healer.batches(inputs):
        loss = nn.functional.cross_entropy(model(x), (x @ labels).argmax(1))
        loss.backward()
        if healer is None:
            optimizer.step()
            schedule.step()
        else:
            healer.step(loss)
        optimizer.zero_grad()
    if healer is not None:
        healer.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_schedule_that_raises_the_rate_a_thousandfold_is_left_alone(seed):
    expected = rising_rate(seed, healed=False)
    assert_same(rising_rate(seed, healed=True), expected)
    assert not events("recovery")


class Rooted(nn.Module):
    """Its loss hardly changes if a weight becomes zero, and the gradient is NaN from then on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (x * self.weight).sum(1, keepdim=True) + 1e-3 * self.weight.abs().sqrt().sum()


@pytest.mark.parametrize("by_hand", [False, True], ids=["run", "loop"])
def test_gradients_that_are_nan_under_a_finite_loss_are_told_from_bad_data(by_hand):
    def spoil(setup):
        setup.model.weight[3] = 0.0

    setup = damaged(regression(model=Rooted), 40, spoil)
    healer = setup.healer(run_dir=Path.cwd())
    if by_hand:
        in_a_loop(setup, healer, 90)
        healer.close()
    else:
        healer.run(setup.train_step, setup.loader, 90, progress=False)
    assert any(e["resumed_at"] < e["noticed_at"] for e in events("recovery"))
    assert healer.last_step == 89
    assert healer.metrics()["healing/nan_count"] < 20


@pytest.mark.parametrize("by_hand", [False, True], ids=["run", "loop"])
def test_weights_that_overflow_running_statistics_are_told_from_bad_data(by_hand):
    """Loss and gradients stay finite; each step is skipped because of what it leaves behind."""

    def normed():
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def overflow(setup):
        setup.model[0].weight[3, 2] = 1e30

    setup = damaged(regression(model=normed), 40, overflow)
    healer = setup.healer(run_dir=Path.cwd())
    if by_hand:
        in_a_loop(setup, healer, 90)
        healer.close()
    else:
        healer.run(setup.train_step, setup.loader, 90, progress=False)
    skipped = [e for e in events("experiment") if e["suspicion"] == "nonfinite_gradient"]
    assert [e["answer"] for e in skipped] == ["damaged"]
    assert float(setup.model[0].weight.detach().abs().max()) < 1e3
    assert healer.last_step == 89


def train_and_read(setup, steps, caplog):
    """Train; return the alerts and the lines of the log."""
    setup.run(steps, run_dir=Path.cwd())
    return events("alert"), [record.getMessage() for record in caplog.records]


def test_where_the_first_weights_do_far_better_the_advice_is_to_start_again(caplog):
    def scale_without_a_trace(setup):
        for param in setup.model.parameters():
            param.data.mul_(100.0)

    setup = damaged(regression(), 1, scale_without_a_trace)  # no loss from before it is known
    alerts, lines = train_and_read(setup, 130, caplog)
    (alert,) = [alert for alert in alerts if alert["failure"] == "not_learning"]
    evidence = alert["evidence"]
    assert evidence["loss_now"] > 3 * evidence["loss_with_first_weights"]
    assert "start again" in evidence["advice"]
    (line,) = [line for line in lines if "not_learning" in line]
    assert evidence["advice"] in line


def test_one_enormous_weight_that_costs_no_loss_is_reported_and_left_alone(caplog):
    setup = regression(model=lambda: mlp(dropout=0.0))
    nn.init.constant_(setup.model[3].bias, 0.0)
    silent = 3

    def a_weight_of_a_dead_unit(setup):
        setup.model[5].weight[0, silent] = 0.0
        setup.model[3].weight[silent, 0] = 1e30
        setup.model[3].bias[silent] = -1e36

    alerts, lines = train_and_read(damaged(setup, 60, a_weight_of_a_dead_unit), 130, caplog)
    (alert,) = [alert for alert in alerts if alert["failure"] == "weight_drift"]
    assert alert["evidence"]["norm"] > 1e29
    assert alert["evidence"]["norm_before"] < 1e3
    assert not events("recovery")
    (line,) = [line for line in lines if "weight_drift" in line]
    assert "norm before" in line
    assert "gradient" not in line


def nan_weight(setup):
    setup.model[3].weight[0, 0] = math.nan


@pytest.mark.parametrize("damage", [scale_weights, nan_weight])
def test_whether_the_loss_came_back_is_said_whatever_was_found(damage):
    damaged(regression(), 60, damage).run(240, run_dir=Path.cwd())
    (outcome,) = events("outcome")
    assert outcome["healed"]
    assert outcome["loss"] < 1.5 * outcome["loss_before"]


def test_a_loss_that_stayed_high_is_not_healed_however_noisy_it_has_become():
    """The noise of a run that is broken is no measure of its recovery: that of before is."""
    setup = damaged(regression(model=lambda: mlp(dropout=0.0)), 60, scale_weights)
    factors = iter(torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 2000)
    compute, calls = setup.train_step, []

    def train_step(batch):
        calls.append(batch)
        return compute(batch) * (next(factors) if len(calls) > 80 else 1.0)

    setup.train_step = train_step
    setup.run(240, run_dir=Path.cwd())
    (outcome,) = events("outcome")
    assert outcome["loss"] > 10 * outcome["loss_before"]
    assert not outcome["healed"]


def test_a_loss_that_stayed_high_is_not_healed_though_the_first_noise_was_a_guess():
    setup = regression()
    healer = setup.healer(run_dir=Path.cwd())
    plans, level = [[{"action": "Rollback"}]], {"loss_before": 1.0, "noise": 0.3}
    incident = Incident(Family.NUMERIC.value, 0, 0, 0, plans=plans, **level)
    healer.recovery.history.incidents.append(incident)
    healer.run(lambda b: 0 * setup.train_step(b) + 1.5, setup.loader, 40, progress=False)
    (outcome,) = events("outcome")
    assert not outcome["healed"]


def test_a_loss_that_has_leapt_again_in_the_last_steps_is_not_healed():
    """Its level leaves out what lies far above it: a median of good losses would be reported."""
    setup = damaged(regression(), 60, scale_weights)
    healer = setup.healer(run_dir=Path.cwd())
    for batch in chain.from_iterable(healer.batches(setup.loader) for _ in range(20)):
        if healer.last_step == 117 and not healer.trials.is_open:
            with torch.no_grad():
                scale_weights(setup)
        loss = setup.train_step(batch)
        loss.backward()
        healer.step(loss)
        setup.optimizer.zero_grad()
        if healer.last_step == 120:
            break
    healer.close()
    (outcome,) = events("outcome")
    assert outcome["loss"] > 10 * outcome["loss_before"]
    assert not outcome["healed"]


@pytest.mark.parametrize("is_kept", [False, True])
def test_what_an_experiment_clears_is_reported_only_if_the_detector_says_so(is_kept):
    class Leapt(Suspicious):
        def observe(self, record):
            return replace(super().observe(record), cause=Cause.WEIGHT_CORRUPTION, is_kept=is_kept)

    setup = regression()
    healer = setup.healer(run_dir=Path.cwd())
    healer.add_detector("leapt", Leapt())
    healer.run(setup.train_step, setup.loader, STEPS, progress=False)
    assert "other data" in {event["answer"] for event in events("experiment")}
    assert {alert["failure"] for alert in events("alert")} == (
        {"weight_drift"} if is_kept else set()
    )


def test_of_a_loss_that_came_down_by_itself_it_is_not_said_that_old_weights_do_no_better():
    setup = regression(model=lambda: mlp(dropout=0.0))
    *others, bias = setup.model.parameters()
    groups = [{"params": others, "lr": 1e-3}, {"params": [bias], "lr": 0.15}]
    setup.optimizer = torch.optim.SGD(groups)

    def shift(setup):
        setup.model[5].bias.add_(4.0)

    damaged(setup, 65, shift).run(120, run_dir=Path.cwd())
    assert not events("recovery")
    (experiment,) = [e for e in events("experiment") if e["suspicion"] == "loss_spike"]
    assert experiment["losses_now"][0] > 3 * experiment["losses_old"][0]
    assert "came down by itself" in experiment["why"]


def add_noise(setup):
    generator = torch.Generator().manual_seed(1)
    for param in setup.model.parameters():
        param.add_(0.5 * torch.randn(param.shape, generator=generator))


def first_rollback(setup, steps):
    setup.run(steps, run_dir=Path.cwd())
    return next(e for e in events("recovery") if e["resumed_at"] < e["noticed_at"])


def test_weights_that_have_grown_are_given_no_time():
    """Their loss comes down, too, but the steps before are lost."""
    rollback = first_rollback(damaged(regression(), 61, add_noise), 120)
    assert rollback["noticed_at"] < 60 + 12


def scramble(setup):
    weight = setup.model[3].weight
    weight.copy_(weight.flatten()[torch.randperm(weight.numel())].view_as(weight))


@pytest.mark.parametrize(
    ("damage", "step", "steps"),
    [
        (scale_weights, 152, 160),
        (scale_weights, 158, 160),
        (scale_weights, 160, 160),
        (scale_weights, 152, 152),  # with a snapshot from right before it
        (scramble, 146, 160),
    ],
)
def test_damage_in_the_last_steps_of_a_run_is_healed_before_it_ends(damage, step, steps):
    setup = damaged(regression(), step, damage)
    setup.run(steps, run_dir=Path.cwd())
    losses = [float(setup.train_step(batch).detach()) for batch in setup.loader]
    twin = regression()
    twin.bare(steps)
    expected = [float(twin.train_step(batch).detach()) for batch in twin.loader]
    assert sum(losses) < 1.5 * sum(expected) + 0.05


def test_a_healthy_run_ends_with_the_bits_of_a_bare_one_though_a_suspicion_is_open():
    expected = bare_run(regression)
    setup = regression()
    healer = suspected(setup)
    healer.run(setup.train_step, setup.loader, STEPS, progress=False)
    assert not healer.experiment.is_due
    assert_same(fingerprint(setup), expected)


def test_a_loop_that_ends_while_a_loss_is_given_time_reports_it():
    setup = damaged(regression(), 146, scramble)
    healer = setup.healer(run_dir=Path.cwd())
    in_a_loop(setup, healer, 160)
    healer.close()
    assert not healer.recoveries
    (alert,) = [e for e in events("alert") if e["failure"] == "loss_spike"]
    assert "evaluate the model" in alert["evidence"]["hint"]


def without_batches(setup, steps):
    """Train in a loop that healing can run no forward pass of; return the reports of one cause."""
    healer = setup.healer(run_dir=Path.cwd())
    for _ in range(-(-steps // len(setup.loader))):
        for batch in setup.loader:
            loss = setup.train_step(batch)
            loss.backward()
            healer.step(loss)
            setup.optimizer.zero_grad()
    healer.close()
    return [alert for alert in events("alert") if alert["failure"] == "not_learning"]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_dead_network_whose_last_bias_goes_on_learning_is_reported(optimizer):
    setup = regression(model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    nn.init.constant_(setup.model[0].bias, -1e3)
    setup.optimizer = optimizer(setup.model.parameters(), lr=1e-2)
    (alert,) = without_batches(setup, 130)
    assert alert["step"] <= 40
    assert "the gradients of 3 of 4 weights are zero" in alert["evidence"]["advice"]


def test_a_rate_that_is_far_too_low_is_reported_where_no_forward_pass_can_be_run():
    setup = regression()
    setup.optimizer.param_groups[0]["lr"] = 1e-12
    (alert,) = without_batches(setup, 130)
    assert "no proof" in alert["evidence"]["hint"]
    assert "forward=" in alert["evidence"]["hint"]


def test_a_run_that_learns_is_not_reported_where_no_forward_pass_can_be_run():
    assert without_batches(regression(), 130) == []


def test_weights_that_something_else_wrote_before_the_first_forward_are_put_back():
    """No loss is known yet; that of the first step is as high as all others."""
    setup = regression(model=lambda: mlp(dropout=0.0))
    healer = setup.healer(run_dir=Path.cwd())
    first = [p.detach().clone() for p in setup.model.parameters()]
    for batch in healer.batches(setup.loader):
        if healer.last_step < 0 and not events("experiment"):
            with torch.no_grad():
                for p in setup.model.parameters():
                    p.mul_(1000.0)
        loss = setup.train_step(batch)
        loss.backward()
        healer.step(loss)
        setup.optimizer.zero_grad()
        if events("recovery"):
            break
    (recovery,) = events("recovery")
    assert (recovery["failure"], recovery["resumed_at"]) == ("weight_corruption", 0)
    assert_same(first, list(setup.model.parameters()))


@pytest.mark.parametrize("steps", [[0], [1, 2, 3], range(16)])
def test_weights_that_are_written_on_purpose_in_a_young_run_stay(steps):
    setup = regression()
    healer = setup.healer(run_dir=Path.cwd())
    for batch in healer.batches(setup.loader):
        if healer.last_step + 1 in steps:
            with torch.no_grad():
                setup.model[0].weight.clamp_(-0.3, 0.3)
        loss = setup.train_step(batch)
        loss.backward()
        healer.step(loss)
        setup.optimizer.zero_grad()
    healer.close()
    assert [e["answer"] for e in events("experiment")] == ["other data"]
    assert events("recovery") == events("alert") == []
