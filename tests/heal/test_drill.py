"""Drills: faults from words, outcomes in a table, and the demonstration itself."""

import io
import json
import re

import pytest
import torch
from rich.console import Console

from heal import HealingConfig
from heal.cli import main
from heal.testing import KINDS, Fault, Strike
from heal.testing.demo import outcome_table
from heal.testing.drill import STANDARD, Drill, Outcome, parse_fault, standard_faults
from tests.heal.runs import regression


def build():
    """What ``heal drill tests.heal.test_drill:build`` runs."""
    setup = regression()
    return setup.healer(), setup.train_step, setup.loader


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("nan_loss@7", Fault("nan_loss", 7)),
        ("nan_loss@7x3", Fault("nan_loss", 7, 3)),
        ("bad_batch~0.25", Fault("bad_batch", rate=0.25)),
    ],
)
def test_faults_are_read_from_words(word, fault):
    assert parse_fault(word) == fault


@pytest.mark.parametrize("word", ["nan_loss", "nan_loss@x", "bad_batch~2", "sharknado@3"])
def test_a_word_that_is_no_fault_is_named(word):
    with pytest.raises(ValueError, match=re.escape(word.partition("@")[0].partition("~")[0])):
        parse_fault(word)


def test_a_standard_drill_has_a_dozen_faults_of_different_kinds():
    assert len({kind for kind, *_ in STANDARD}) == 12
    assert {fault.kind for fault in standard_faults(100)} <= set(KINDS)


def test_outcomes_say_when_a_fault_was_detected_what_was_done_and_what_it_cost():
    healer, train_step, loader = build()
    faults = [Fault("nan_loss", 20), Fault("corrupt_weight", 50), Fault("oom_forward", 90)]
    drill = Drill(healer, faults)
    drill.run(train_step, loader, 110, progress=False)
    nan, weight, memory = drill.outcomes
    assert (nan.strike.step, nan.actions, nan.lost_steps) == (20, ["Skip"], 1)
    assert 20 < nan.detected_at <= 24
    assert "Rollback" in weight.actions
    assert weight.lost_steps >= 5
    assert memory.actions == ["ClearCache", "ShrinkBatch"]
    assert all(len(outcome.row()) == 7 for outcome in drill.outcomes)


def test_the_drill_of_the_command_line_prints_the_table(capsys):
    words = ["tests.heal.test_drill:build", "--plain", "--steps", "60", "--fault", "nan_loss@20"]
    assert main(["drill", *words]) == 0
    printed = capsys.readouterr().out
    assert "nan loss" in printed
    assert "Skip" in printed


def build_with_defaults():
    """A run with the settings that everybody begins with."""
    setup = regression()
    setup.config = HealingConfig()
    return setup.healer(), setup.train_step, setup.loader


def build_that_looks_away():
    """A run whose weights and optimizer state are never checked."""
    setup = regression(check_interval=0)
    return setup.healer(), setup.train_step, setup.loader


def test_the_standard_drill_finds_every_fault_under_the_defaults(capsys):
    words = ["tests.heal.test_drill:build_with_defaults", "--plain", "--steps", "300"]
    assert main(["drill", *words]) == 0
    table, errors = capsys.readouterr()
    assert "missed" not in table
    assert "optimizer reset" in " ".join(table.split())
    assert "not found" not in errors


def test_a_fault_that_nobody_found_is_called_missed_and_ends_with_its_own_code(capsys):
    words = ["tests.heal.test_drill:build_that_looks_away", "--plain", "--steps", "60"]
    assert main(["drill", *words, "--fault", "reset_optimizer@40"]) == 1
    table, errors = capsys.readouterr()
    assert "missed" in table
    assert "noted" not in table
    assert errors.strip() == "heal drill: not found: reset_optimizer"


def build_with_sgd(momentum=0.0):
    """A run whose optimizer counts no steps."""
    setup = regression()
    setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.03, momentum=momentum)
    return setup.healer(), setup.train_step, setup.loader


def build_with_momentum():
    return build_with_sgd(0.9)


@pytest.mark.parametrize("name", ["build_with_sgd", "build_with_momentum"])
def test_the_standard_drill_of_sgd_has_only_what_can_be_seen(name, capsys):
    assert main(["drill", f"tests.heal.test_drill:{name}", "--plain", "--steps", "300"]) == 0
    table, errors = capsys.readouterr()
    assert "reset" not in table
    assert errors == ""


def test_a_fault_that_did_not_strike_is_not_healed(capsys):
    words = ["tests.heal.test_drill:build", "--plain", "--steps", "30", "--fault", "nan_loss@30"]
    assert main(["drill", *words]) == 1
    assert "did not strike, or found nothing to break: nan_loss@30" in capsys.readouterr().err


def build_that_fails():
    raise KeyError("a mistake of mine")


def build_of_nothing():
    return None


def build_in_the_wrong_order():
    healer, train_step, loader = build()
    healer.exits.dismiss()
    return train_step, healer, loader


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("build_that_fails", r"raised KeyError\('a mistake of mine'\) at .*test_drill.py:\d+"),
        ("build_of_nothing", r"expected \(healer, train_step, loader\), got None"),
        ("build_in_the_wrong_order", r"expected .*, got \['function', 'Healer', 'DataLoader'\]"),
    ],
)
def test_a_function_that_makes_no_run_is_told_of(name, told, capsys):
    assert main(["drill", f"tests.heal.test_drill:{name}"]) == 2
    errors = capsys.readouterr().err
    assert re.search(told, errors)
    assert "Traceback" not in errors


@pytest.mark.parametrize("command", [["drill", "tests.heal.test_drill:build"], ["demo"]])
@pytest.mark.parametrize("steps", ["0", "-1", "many"])
def test_a_drill_has_at_least_one_step(command, steps, capsys):
    with pytest.raises(SystemExit) as left:
        main([*command, f"--steps={steps}"])
    assert left.value.code == 2
    assert "expected a whole number >= 1" in capsys.readouterr().err


def test_a_drill_without_a_step_is_refused():
    healer, train_step, loader = build()
    healer.exits.dismiss()
    with pytest.raises(ValueError, match="steps: expected 1 or more, got 0"):
        Drill(healer, []).run(train_step, loader, 0)


@pytest.mark.parametrize("target", ["nothing", "no_such_module:build", "tests.heal.runs:nothing"])
def test_a_drill_of_nothing_says_so(target, capsys):
    assert main(["drill", target]) == 2
    assert "heal drill:" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demonstration_notices_every_fault_and_ends_near_the_undisturbed_loss(tmp_path):
    from heal.testing.demo import console_for, demonstrate

    found = demonstrate(400, 0, tmp_path, console_for(plain=True), progress=False)
    assert all(outcome.detected_at is not None for outcome in found.outcomes)
    assert len(found.outcomes) == 12
    assert abs(found.healed_loss - found.undisturbed_loss) < 0.1
    assert "NaN" in found.unprotected
    page = json.loads((tmp_path / "postmortem.json").read_text())
    assert page["exit_reason"] == "completed"


def test_the_table_can_be_read_at_80_columns():
    outcomes = [
        Outcome(
            Strike(Fault(kind, at=1), 100, 100), 102, ["nonfinite_gradient", "oom"], ["Rollback"]
        )
        for kind in KINDS
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(outcome_table(outcomes))
    printed = console.file.getvalue()
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    for word in {word for kind in KINDS for word in kind.split("_")} | {"Rollback", "nonfinite"}:
        assert word in printed


def test_a_skipped_step_that_is_undone_later_is_lost_once():
    outcome = Outcome(Strike(Fault("nan_loss", 3), 3, 3))
    outcome.skipped += [3, 8, 9]
    outcome.roll_back(here=11, before_step=5)
    assert outcome.lost_steps == 1 + 6  # step 3, and 5 to 10
    outcome.roll_back(here=6, before_step=5)
    assert outcome.lost_steps == 8
