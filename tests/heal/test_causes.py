"""Everything that is known about a cause is one row, and a row has every column."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import heal.causes
from heal.causes import About, Cause, Family, Severity
from heal.config import HealingConfig
from heal.detectors.watch import Watch
from heal.exit_codes import ExitCode, ExitReason
from heal.record import Flag, Record

NEW_ROW = """    COSMIC_RAY = "cosmic_ray", About(
        title="A bit flipped", summary="A cosmic ray hit the memory.",
        family=Family.STOP, severity=Severity.FATAL, blames=Blames.DEVICE, is_fact=True,
        onset=Onset.AT_ONCE, needs_snapshot=False, explains=("loss_spike",), sent_as=None,
        exit_code=ExitCode.HARDWARE, exit_reason=ExitReason.DIVERGENCE, reference="Physics",
    )
"""

USE_OF_IT = """
import sys
from importlib.machinery import SourceFileLoader

table, get_code = compile(sys.stdin.read(), "heal/causes.py", "exec"), SourceFileLoader.get_code
SourceFileLoader.get_code = lambda s, name: table if name == "heal.causes" else get_code(s, name)

from heal.actions import HealingError, Halt
from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.diagnose import diagnose
from heal.history import History
from heal.policy import decide
from heal.journal import exit_reason
from heal.report.words import title

ray, spike = Cause("cosmic_ray"), Cause.LOSS_SPIKE
seen = {"step": 9, "bad_step": 9, "severity": Severity.FATAL, "evidence": {}}
history = History()
found = [Finding(cause=spike, **seen), Finding(cause=ray, **seen)]
diagnosis = diagnose(found, history)
(halt,) = decide(diagnosis, history, HealingConfig(), [])
print(diagnosis.cause.value, diagnosis.reference, diagnosis.confidence, halt.exit_code)
print(exit_reason(HealingError("over", 40), "cosmic_ray").value, title(ray), diagnosis.family.value)
history.note_findings([Finding(cause=ray, **{**seen, "severity": Severity.WARN})])
later = {**seen, "step": 11, "severity": Severity.ERROR}
print(diagnose([Finding(cause=spike, **later)], history).evidence)
"""


def source_with(row: str) -> str:
    """Return the table with one more row, before those it shall explain."""
    source = Path(heal.causes.__file__).read_text()
    before, mark, after = source.partition("    LOSS_SPIKE = ")
    return before + row + mark + after


def run(source: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", USE_OF_IT]
    return subprocess.run(command, input=source, capture_output=True, text=True, timeout=120)


def test_a_cause_is_added_by_one_row():
    done = run(source_with(NEW_ROW))
    assert done.returncode == 0, done.stderr
    diagnosed, ended, suspected = done.stdout.splitlines()
    assert diagnosed == "cosmic_ray Physics 0.99 48"
    assert ended == "divergence A bit flipped stop"
    assert suspected == "{'suspect': 'cosmic_ray', 'suspect_step': 9}"


@pytest.mark.parametrize("column", [f.name for f in dataclasses.fields(About)])
def test_a_row_without_a_column_is_an_error_at_import(column):
    values = {f.name: getattr(Cause.LOSS_SPIKE.about, f.name) for f in dataclasses.fields(About)}
    del values[column]
    with pytest.raises(TypeError, match=column):
        About(**values)


def test_a_cause_without_a_row_is_an_error_at_import():
    done = run(source_with('    COSMIC_RAY = "cosmic_ray"\n'))
    assert done.returncode != 0
    assert "ValueError: not enough values" in done.stderr


@pytest.mark.parametrize("cause", Cause)
def test_a_row_does_not_contradict_itself(cause):
    about = cause.about
    assert Cause(cause.value) is cause
    assert about.summary.endswith(".")
    assert not about.title.endswith(".")
    assert all(Cause(symptom) for symptom in about.explains)
    assert (about.severity is Severity.FATAL) == (about.family is Family.STOP)
    assert about.is_nonfinite == (about.exit_reason is ExitReason.NAN)
    assert not (about.is_skipped and about.may_be_in_snapshots)
    assert not about.is_found_late or about.may_be_in_snapshots
    if about.family is Family.STOP and cause is not Cause.UNKNOWN:
        assert about.exit_code is not ExitCode.UNRECOVERABLE


def test_no_two_causes_have_the_same_title():
    assert len({cause.about.title for cause in Cause}) == len(Cause)


@pytest.mark.parametrize("flag", [flag for flag in Flag if flag >= Flag.DESYNC])
def test_findings_of_the_host_are_as_severe_as_their_row_says(flag):
    found = Watch(HealingConfig()).observe(Record(step=9, flags=flag))
    for finding in found:
        if finding.evidence.get("flag") == flag.name:
            assert finding.severity is finding.cause.about.severity


def test_what_the_device_skips_is_a_fact_and_in_no_snapshot():
    skipped = {cause for cause in Cause if cause.about.is_skipped}
    assert skipped == {Cause.NONFINITE_GRADIENT, Cause.NONFINITE_LOSS, Cause.GRADIENT_SPIKE}
    facts = {cause for cause in Cause if cause.about.is_fact}
    assert Cause.NONFINITE_GRADIENT in facts
    assert Cause.GRADIENT_SPIKE not in facts
