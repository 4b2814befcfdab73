"""However a process ends, it leaves a postmortem that says so, and the exit code is its own."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.heal.healer import endings

ROOT = Path(__file__).parents[3]

STOPPED = "heal.actions.HealingError"

WANTED = {
    # case: exit status of the process, exit_reason, exit_code and exception_type of the postmortem
    "end": (0, "completed", 0, None),
    "end_by_break": (0, "completed", 0, None),
    "error": (1, "exception", 1, "ValueError"),
    "exit_three": (3, "exited", None, None),
    "exit_zero": (0, "exited", None, None),
    "exit_three_between_epochs": (3, "exited", None, None),
    "exit_three_in_with": (3, "exited", 3, "SystemExit"),
    "exit_none_in_with": (0, "completed", 0, "SystemExit"),
    "sigterm": (75, "sigterm", 75, STOPPED),
    "sigterm_in_evaluation": (-15, "sigterm", 143, None),
    "sigterm_with_a_handler_of_ones_own": (0, "sigterm", None, None),
    "sigterm_after_close": (-15, "completed", 0, None),
    "sigint": (-2, "sigint", 130, "KeyboardInterrupt"),
    "halt": (43, "nan", 43, STOPPED),
    "halt_with_a_hook_of_ones_own": (43, "nan", 43, STOPPED),
    "halt_that_is_caught": (0, "nan", 43, STOPPED),
    "out_of_memory": (44, "oom", 44, "torch.OutOfMemoryError"),
    "collected": (0, "completed", 0, None),
    "collected_after_break": (0, "completed", 0, None),
    "collected_after_break_and_error": (1, "exception", 1, "ValueError"),
    "collected_and_error": (1, "completed", 0, None),
    "thread": (0, "exception", 1, "ValueError"),
    "fork": (0, "completed", 0, None),
    "process": (0, "completed", 0, None),
    "process_with_error": (0, "exited", None, None),
    "two_healers_closed_in_their_order": (-15, "completed", 0, None),
    "sigterm_after_a_loop_that_nobody_closed": (75, "sigterm", 75, STOPPED),
    "sigterm_in_run_after_a_loop_that_nobody_closed": (75, "sigterm", 75, STOPPED),
    "sigterm_beside_a_loop_that_was_closed_since": (75, "sigterm", 75, STOPPED),
    "sigterm_in_with_after_the_last_step": (75, "sigterm", 75, STOPPED),
    "sigterm_in_run_at_the_last_step": (75, "sigterm", 75, STOPPED),
    "sigterm_at_the_last_step_of_a_loop": (0, "sigterm", None, None),
    "sigterm_to_the_outer_of_two": (75, "sigterm", 75, STOPPED),
    "sigterm_to_two_in_evaluation": (-15, "sigterm", 143, None),
    "sigterm_to_two_with_a_handler_of_ones_own": (0, "sigterm", None, None),
}
FIRST_OF_TWO = {
    # what is told of the other healer, the one that was made first
    "sigterm_after_a_loop_that_nobody_closed": ("sigterm", 75),
    "sigterm_in_run_after_a_loop_that_nobody_closed": ("sigterm", 75),
    "sigterm_beside_a_loop_that_was_closed_since": ("completed", 0),
    "sigterm_to_the_outer_of_two": ("sigterm", 75),
    "sigterm_to_two_in_evaluation": ("sigterm", 143),
    "sigterm_to_two_with_a_handler_of_ones_own": ("sigterm", None),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Every case, and the exit status of its process."""
    folder = tmp_path_factory.mktemp("endings")
    words = [sys.executable, "-m", "tests.heal.healer.endings", str(folder)]
    done = subprocess.run(
        words,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        # A shell has what runs in the background ignore Ctrl-C, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.returncode == 0, done.stderr
    return folder, {name: int(code) for name, code in map(str.split, done.stdout.splitlines())}


def page_of(folder, name):
    return json.loads((folder / name / "postmortem.json").read_text())


def test_every_way_to_end_is_wanted():
    assert [case.__name__ for case in endings.CASES] == list(WANTED)


@pytest.mark.parametrize("name", WANTED)
def test_a_run_that_nobody_closes_leaves_a_postmortem(ended, name):
    folder, codes = ended
    errors = (folder / f"{name}.stderr").read_text()
    page = page_of(folder, name)
    told = (page["exit_reason"], page["exit_code"], page["exception_type"])
    assert (codes[name], *told) == WANTED[name], errors
    assert page["last_step"] >= 0 or name == "out_of_memory"


@pytest.mark.parametrize("name", FIRST_OF_TWO)
def test_a_healer_beside_the_one_that_is_stopped_leaves_a_postmortem_too(ended, name):
    folder, _ = ended
    page = page_of(folder, f"{name}-first")
    assert (page["exit_reason"], page["exit_code"]) == FIRST_OF_TWO[name]


def test_a_halt_prints_its_traceback_once_and_calls_the_hook_that_was_there(ended):
    folder, _ = ended
    plain = (folder / "halt.stderr").read_text()
    assert plain.count("Traceback (most recent call last)") == 1
    assert "heal.actions.HealingError" in plain
    hooked = (folder / "halt_with_a_hook_of_ones_own.stderr").read_text()
    assert "own hook:" in hooked
    assert "a hook that fails" in hooked


def test_the_postmortem_tells_what_could_not_be_healed_in_the_words_of_the_seed(ended):
    folder, _ = ended
    page = page_of(folder, "out_of_memory")
    assert page["exception_message"].startswith("CUDA out of memory")
    assert "memory" in page["halted_because"]
    first, *_ = page["recovery_actions"]
    assert first["failure"] == "oom"
    assert set(first["actions"]) <= {"clear_cache", "halve_batch_size", "halt"}
    assert first["before"] == {"lr_scale": 1.0, "micro_batches": 1}
    assert page_of(folder, "error")["halted_because"] is None
