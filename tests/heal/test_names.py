"""``heal`` exports what a loop, a hook, a detector and an action need; old names warn."""

import subprocess
import sys
from pathlib import Path

import pytest

import heal
from heal import actions
from heal.report.words import action_words
from tests.heal.runs import regression

NEEDED_BY_A_HOOK = {
    "Action",
    "Cause",
    "Detector",
    "Diagnosis",
    "Finding",
    "Healer",
    "HealingConfig",
    "HealingError",
    "Record",
    "SelfHealingCallback",
    "SelfHealingLightningCallback",
    "SelfHealingTrainer",
    "Severity",
}


def test_every_public_name_can_be_imported():
    assert set(heal.__all__) >= NEEDED_BY_A_HOOK
    assert set(heal.__all__) <= set(dir(heal))
    for name in heal.__all__:
        assert getattr(heal, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Heeler'"):
        _ = heal.Heeler


def test_every_action_is_exported():
    defined = {"Action", *(kind.__name__ for kind in actions.ACTIONS)}
    assert len(defined) > 15
    assert defined <= set(heal.__all__)


def test_import_heal_imports_no_torch():
    source = "import heal, sys; dir(heal), heal.Skip(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(("old", "new"), [("CannotHeal", "HealingError"), ("Refuse", "Skip")])
def test_an_old_name_works_and_names_the_new_one(old, new):
    with pytest.warns(DeprecationWarning, match=f"heal.actions.{old} is {new} now"):
        found = getattr(actions, old)
    assert found is getattr(heal, new)


@pytest.mark.parametrize(
    ("path", "name", "new"),
    [
        ("heal.chaos", "Fault", "heal.testing"),
        ("heal.checkpointing", "Durable", "heal.durable"),
        ("heal.detect", "Watch", "heal.detectors.watch"),
        ("heal.exceptions", "classify", "heal.exception_causes"),
        ("heal.probes", "sharpness", "heal.lab.probes"),
        ("heal.run", "TorchRun", "heal.training_run"),
        ("heal.settings", "settings_of", "heal.config_fields"),
        ("heal.verdict", "Record", "heal.record"),
    ],
)
def test_an_old_import_path_works_in_every_form_and_names_the_new_one(path, name, new):
    expected = f"{path} has moved: import {new}"
    source = f"import {new}; from {path} import {name}; assert {name} is {new}.{name}"
    source += f"; import {path} as old; assert old.{name} is {name} is {path}.{name}"
    ways = f"import heal; {source}", f"import {path}; import heal; {path}.{name}", source
    for text in ways:
        with pytest.warns(DeprecationWarning, match=expected):
            exec(text, {})
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", f"import {path}"]
    root = Path(__file__).parents[2]
    assert subprocess.run(command, capture_output=True, cwd=root).returncode == 0  # nothing used
    command[-1] = f"from {path} import *"
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert expected in done.stderr


def test_a_loop_of_version_01_catches_what_is_raised_today():
    with pytest.warns(DeprecationWarning, match="HealingError"):
        from heal.actions import CannotHeal
    setup = regression()
    healer = setup.healer()
    healer.on_instability(lambda diagnosis, plan: (heal.Halt("enough", 99),))
    setup.train_step = lambda batch: float("nan") * sum(p.sum() for p in setup.model.parameters())
    with pytest.raises(CannotHeal) as caught:
        healer.run(setup.train_step, setup.loader, 9, progress=False)
    assert (type(caught.value), caught.value.exit_code) == (heal.HealingError, 99)


def test_journals_of_version_01_are_read_as_those_of_today():
    assert action_words({"action": "Refuse"}, None) == action_words({"action": "Skip"}, None)


def test_methods_of_a_healer_that_were_renamed_work_and_name_the_new_one():
    healer = regression().healer()
    with pytest.warns(DeprecationWarning, match="Healer.hear_the_rest is Healer.finish now"):
        assert healer.hear_the_rest == healer.finish
    with pytest.warns(DeprecationWarning, match="Healer.treat is Healer.recover_from now"):
        assert healer.treat([]) is None
    with pytest.warns(DeprecationWarning, match="is_in_loop is Healer.stream.is_open now"):
        assert healer.is_in_loop is False
    with pytest.raises(AttributeError, match="'Healer' object has no attribute 'heel'"):
        _ = healer.heel
