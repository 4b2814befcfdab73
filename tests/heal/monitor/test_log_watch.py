"""What the log of a trainer tells: alarms where something is wrong, silence where nothing is."""

import json
import math
import random

import pytest

from heal.causes import Severity
from heal.config import HealingConfig
from heal.detectors.watch import LogWatch

LN2 = math.log(2)


def heard(lines, **config):
    """Feed lines, one per step; return what was found, with the step."""
    watch = LogWatch(HealingConfig(plateau_steps=100, **config))
    findings = [f for step, line in enumerate(lines, 1) for f in watch.observe(step, line)]
    assert all(f.severity is Severity.WARN for f in findings)  # never more: these are alerts
    return [(f.cause.value, f.step) for f in findings]


def coin(rng):
    return sum(rng.random() < 0.5 for _ in range(4)) / 4


def dpo(rng, loss, accuracy, margin):
    return {
        "loss": loss + rng.gauss(0, 0.003),
        "rewards/accuracies": accuracy,
        "rewards/margins": margin + rng.gauss(0, 0.01),
        "logps/chosen": -20 + rng.gauss(0, 1),
        "learning_rate": 1e-5,
    }


@pytest.mark.parametrize("seed", range(5))
def test_a_preference_run_that_stays_at_chance_is_told_of_once(seed):
    rng = random.Random(seed)
    lines = [dpo(rng, LN2, coin(rng), 0.0) for _ in range(200)]
    assert heard(lines) == [("plateau", 51)]


@pytest.mark.parametrize("seed", range(5))
def test_one_that_learns_is_not_although_it_starts_at_chance(seed):
    rng = random.Random(seed)
    lines = [dpo(rng, LN2 - 0.001 * s, min(1.0, 0.5 + s / 80), s / 100) for s in range(200)]
    assert heard(lines) == []


def test_a_loss_at_chance_is_no_plateau_if_accuracy_or_margins_improve():
    rng = random.Random(0)
    assert heard([dpo(rng, LN2, 0.9, 0.0) for _ in range(200)]) == []
    assert heard([dpo(rng, LN2, coin(rng), 0.5) for _ in range(200)]) == []


def test_a_loss_at_chance_without_such_evidence_is_none_either():
    assert heard([{"loss": LN2, "learning_rate": 1e-5}] * 200) == []


def test_a_plateau_is_not_told_of_at_the_start_nor_while_the_learning_rate_is_zero():
    rng = random.Random(0)
    flat = [dpo(rng, LN2, coin(rng), 0.0) for _ in range(200)]
    assert heard(flat[:50]) == []
    assert heard([{**line, "learning_rate": 0.0} for line in flat]) == []


def test_preferences_the_wrong_way_round_are_told_of():
    rng = random.Random(0)
    lines = [{"log_odds_chosen": -0.5 + rng.gauss(0, 0.1)} for _ in range(40)]
    assert heard(lines) == [("preference_inversion", 32)]
    assert heard([{"rewards/margins": rng.gauss(0, 1)} for _ in range(400)]) == []


@pytest.mark.parametrize(("key", "sign"), [("nll_loss", 1), ("logps/chosen", -1)])
def test_chosen_answers_that_become_unlikely_are_told_of(key, sign):
    rng = random.Random(0)
    healthy = [{key: sign * (3 + rng.gauss(0, 0.2))} for _ in range(100)]
    assert heard(healthy) == []
    worse = [{key: sign * (3 + 0.1 * s + rng.gauss(0, 0.2))} for s in range(120)]
    (cause, step), *rest = heard(healthy + worse)
    assert cause == "likelihood_collapse"
    assert 170 < step < 190
    assert rest == []


def test_a_likelihood_that_only_improves_is_not():
    assert heard([{"nll_loss": 3.0 / (1 + s)} for s in range(200)]) == []
    assert heard([{"logps/chosen": -90.0 / (1 + s)} for s in range(200)]) == []


def grpo(rng, reward, std, zero):
    return {
        "reward": reward + rng.gauss(0, 0.02),
        "reward_std": std,
        "frac_reward_zero_std": zero,
        "loss": 0.0,
        "kl": abs(rng.gauss(0.01, 0.003)),
    }


@pytest.mark.parametrize("seed", range(3))
def test_groups_without_any_difference_are_told_of_and_some_such_groups_are_not(seed):
    rng = random.Random(seed)
    usual = [grpo(rng, 0.4, 0.2, rng.choice([0.0, 0.25, 0.5])) for _ in range(100)]
    assert heard(usual) == []
    collapsed = [grpo(rng, 0.4, 0.0, 1.0) for _ in range(100)]
    (cause, step), *rest = heard(usual + collapsed)
    assert (cause, rest) == ("reward_collapse", [])
    assert step <= 117


def test_rewards_that_fall_are_told_of_and_rewards_that_wander_are_not():
    rng = random.Random(0)
    wandering = [grpo(rng, 0.5 + 0.1 * math.sin(s / 10), 0.2, 0.0) for s in range(200)]
    assert heard(wandering) == []
    falling = [grpo(rng, 0.5 - 0.03 * s, 0.05, 0.0) for s in range(60)]
    assert [cause for cause, _ in heard(wandering + falling)] == ["reward_collapse"]


@pytest.mark.parametrize("seed", range(20))
def test_rewards_that_rise_with_correlated_noise_are_well(seed):
    rng, drift, lines = random.Random(seed), 0.0, []
    for step in range(1000):
        drift = 0.8 * drift + rng.gauss(0, 0.03)
        level = 0.8 - 0.5 * math.exp(-step / 300)
        lines.append({"reward": level + drift + rng.gauss(0, 0.1)})
    assert heard(lines) == []


def test_a_fall_beyond_the_noise_of_the_median_is_told_of():
    rng = random.Random(0)
    level = [0.55] * 60 + [0.55 - 0.004 * s for s in range(125)]  # as GRPO with its sign wrong
    told = heard([{"reward": v + rng.gauss(0, 0.14)} for v in level])
    assert [cause for cause, _ in told] == ["reward_collapse"]


@pytest.mark.parametrize("key", ["kl", "objective/kl"])
def test_a_divergence_that_blows_up_is_told_of_once(key):
    rng = random.Random(0)
    usual = [{key: 0.1 + abs(rng.gauss(0, 0.05))} for _ in range(50)]
    assert heard(usual) == []
    assert heard([*usual, {key: 50.0}, *usual]) == []  # one line is nothing
    assert heard(usual + [{key: 20.0 + s} for s in range(30)]) == [("kl_blowup", 58)]
    assert heard([{key: 0.001 * s} for s in range(500)]) == []  # a policy that learns moves


@pytest.mark.parametrize(("fall", "is_found"), [(0.75, False), (0.78, True)])
def test_rewards_fall_by_two_spreads_before_anything_is_said(fall, is_found):
    """Any 32 rewards are spread evenly over 1; their quartiles lie 0.516 apart: 0.3825 spreads."""
    even = [2.0 + (i * 7 % 32) / 31 for i in range(128)]
    found = heard([{"reward": reward} for reward in [*even, *(r - fall for r in even)]])
    assert found == ([("reward_collapse", found[0][1])] if is_found else [])
    assert all(128 < step <= 160 for _, step in found)


@pytest.mark.parametrize(("std", "is_found"), [(0.0021, False), (0.0019, True)])
def test_rewards_that_differ_by_less_than_a_thousandth_are_all_alike(std, is_found):
    assert bool(heard([{"reward": 2.0, "reward_std": std}] * 40)) is is_found


@pytest.mark.parametrize(("kl", "is_found"), [(0.99, False), (1.01, True)])
def test_a_divergence_below_one_nat_is_none(kl, is_found):
    assert bool(heard([{"kl": 0.001}] * 20 + [{"kl": kl}] * 20)) is is_found


@pytest.mark.parametrize(("kl", "is_found"), [(5.9, False), (6.1, True)])
def test_a_divergence_three_times_its_upper_range_blows_up(kl, is_found):
    assert bool(heard([{"kl": 2.0}] * 20 + [{"kl": kl}] * 20)) is is_found


@pytest.mark.parametrize(("margin", "is_found"), [(-0.33, False), (-0.36, True)])
def test_preferences_are_inverted_by_four_standard_errors(margin, is_found):
    """Quartiles are -1 and the margin: four errors of 32 are 0.524 of their distance."""
    assert bool(heard([{"rewards/margins": -1.0}] * 9 + [{"rewards/margins": margin}] * 23)) is (
        is_found
    )


def test_losses_that_are_zero_or_negative_mean_nothing_here():
    rng = random.Random(0)
    lines = [{**grpo(rng, 0.4, 0.2, 0.0), "loss": rng.choice([0.0, -0.3, 0.2])} for _ in range(99)]
    assert heard(lines) == []


def test_words_nan_and_lines_of_other_kinds_pass():
    odd = {"reward": math.nan, "kl": "much", "rewards/margins": math.inf, "eval_loss": 3.0}
    assert heard([odd] * 60) == []


def test_the_state_is_plain_and_brings_a_watch_back():
    rng = random.Random(0)
    lines = [
        {**dpo(rng, LN2, coin(rng), 0.0), **grpo(rng, 0.4, 0.2, 0.0), "nll_loss": 3.0}
        for _ in range(90)
    ]
    for line in lines:
        line["loss"] = LN2
    config = HealingConfig(plateau_steps=100)
    whole, first, second = LogWatch(config), LogWatch(config), LogWatch(config)
    for step, line in enumerate(lines[:30], 1):
        whole.observe(step, line)
        first.observe(step, line)
    second.load_state(json.loads(json.dumps(first.state())))
    for step, line in enumerate(lines[30:], 31):
        assert second.observe(step, line) == whole.observe(step, line)
    assert second.state() == whole.state()
