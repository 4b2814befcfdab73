"""However a process ends, it leaves a postmortem that says so, and the exit code is its own."""

import gc
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from heal.actions import HealingError
from tests.heal.healer import endings

ROOT = Path(__file__).parents[3]

STOPPED = "heal.actions.HealingError"

WANTED = {
    # case: exit status of the process, exit_reason, exit_code and exception_type of the postmortem
    "end": (0, "completed", 0, None),
    "end_by_break": (0, "exited", None, None),
    "error": (1, "exception", 1, "ValueError"),
    "exit_three": (3, "exited", None, None),
    "exit_zero": (0, "exited", None, None),
    "exit_three_between_epochs": (3, "completed", 0, None),
    "exit_three_in_with": (3, "exited", 3, "SystemExit"),
    "exit_none_in_with": (0, "completed", 0, "SystemExit"),
    "break_in_with": (0, "completed", 0, None),
    "sigterm": (-15, None, None, None),
    "sigterm_with_a_handler_of_ones_own": (0, "completed", 0, None),
    "sigterm_in_with": (75, "sigterm", 75, STOPPED),
    "sigterm_in_with_and_a_handler_of_ones_own": (75, "sigterm", 75, STOPPED),
    "sigterm_in_with_after_the_last_step": (75, "sigterm", 75, STOPPED),
    "sigterm_in_with_that_is_closed": (75, "sigterm", None, None),
    "sigterm_after_with": (-15, "completed", 0, None),
    "sigterm_in_run": (75, "sigterm", 75, STOPPED),
    "sigterm_in_run_at_the_last_step": (75, "sigterm", 75, STOPPED),
    "sigterm_to_the_inner_of_two": (75, "sigterm", 75, STOPPED),
    "two_healers_closed_in_their_order": (-15, "completed", 0, None),
    "sigint": (-2, "sigint", 130, "KeyboardInterrupt"),
    "halt": (1, "nan", 43, STOPPED),
    "halt_in_with": (43, "nan", 43, STOPPED),
    "halt_in_with_and_a_hook_of_ones_own": (43, "nan", 43, STOPPED),
    "halt_in_with_that_is_caught": (0, "nan", 43, STOPPED),
    "halt_in_with_that_is_caught_and_another_error": (1, "nan", 43, STOPPED),
    "out_of_memory": (44, "oom", 44, "torch.OutOfMemoryError"),
    "collected": (0, "completed", 0, None),
    "collected_after_break": (0, "exited", None, None),
    "collected_after_break_and_error": (1, "exception", 1, "ValueError"),
    "collected_and_error": (1, "completed", 0, None),
    "thread": (0, "exited", None, None),
    "thread_in_with": (0, "exception", 1, "ValueError"),
    "fork": (0, "completed", 0, None),
    "process": (0, "completed", 0, None),
    "process_with_error": (0, "exited", None, None),
}
KILLED = "sigterm"  # outside of `with` the signal takes its course: nothing is left to write with


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


@pytest.mark.parametrize("name", [name for name in WANTED if name != KILLED])
def test_a_run_leaves_a_postmortem_however_it_ends(ended, name):
    folder, codes = ended
    errors = (folder / f"{name}.stderr").read_text()
    page = page_of(folder, name)
    found = (page["exit_reason"], page["exit_code"], page["exception_type"])
    assert (codes[name], *found) == WANTED[name], errors
    assert page["last_step"] >= 0 or name == "out_of_memory"


def test_outside_of_with_a_signal_takes_its_course(ended):
    folder, codes = ended
    assert codes[KILLED] == WANTED[KILLED][0]
    assert not (folder / KILLED / "postmortem.json").exists()


def test_a_signal_stops_the_outer_of_two_healers_as_well(ended):
    folder, _ = ended
    page = page_of(folder, "sigterm_to_the_inner_of_two-first")
    assert (page["exit_reason"], page["exit_code"]) == ("sigterm", 75)


def what_the_process_does():
    signals = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    return [*signals, sys.excepthook, threading.excepthook, sys.unraisablehook]


def test_a_loop_changes_nothing_of_the_process_and_with_only_until_it_ends():
    before = what_the_process_does()
    healer = endings.train(endings.make(None))
    assert what_the_process_does() == before
    with healer:
        assert what_the_process_does() != before
        endings.train(healer)
        assert sys.excepthook is before[-3]
    assert what_the_process_does() == before


def test_a_halt_that_is_caught_takes_its_exception_hook_along(tmp_path):
    before = what_the_process_does()
    with pytest.raises(HealingError) as caught:
        endings.halt_in_with(str(tmp_path))
    assert what_the_process_does() != before
    del caught
    gc.collect()
    assert what_the_process_does() == before


def test_a_halt_prints_its_traceback_once_and_calls_the_hook_that_was_there(ended):
    folder, _ = ended
    plain = (folder / "halt_in_with.stderr").read_text()
    assert plain.count("Traceback (most recent call last)") == 1
    assert "heal.actions.HealingError" in plain
    hooked = (folder / "halt_in_with_and_a_hook_of_ones_own.stderr").read_text()
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
