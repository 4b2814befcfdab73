"""Trouble that stops the ranks in the middle of a step is not met again by the next start."""

import pytest

from heal.exit_codes import ExitCode
from tests.cluster import crash_loops
from tests.cluster.jobs import Job, read_json

PLACES = [("fsdp", "forward"), ("fsdp", "backward"), ("ddp", "backward")]


def started(folder, *arguments):
    """Start a world; return what its ranks told, and their exit codes."""
    with Job(folder, 2, crash_loops.main, *arguments) as job:
        codes = job.wait()
        told = [read_json(folder / f"told{rank}") for rank in range(2)]
        return told, codes, job.logs()


@pytest.mark.parametrize(("wrap", "where"), PLACES)
@pytest.mark.parametrize("what", ["data", "memory"])
def test_the_second_start_passes_the_batch_that_stopped_the_first(tmp_path, wrap, where, what):
    told, codes, logs = started(tmp_path, wrap, where, what)
    assert codes == [ExitCode.DISTRIBUTED] * 2, logs
    assert all("on rank 1" in rank["halt"] for rank in told), told
    assert all("start the job again" in rank["halt"] for rank in told), told
    pages = [read_json(tmp_path / "run" / f"postmortem{r}.json") for r in ("", ".rank1")]
    assert [page["exit_code"] for page in pages] == [47, 47]
    assert all("on rank 1" in page["halted_because"] for page in pages)
    told, codes, logs = started(tmp_path, wrap, where, what)
    assert codes == [0, 0], logs
    assert [rank["began"] for rank in told] == [10, 10]
    assert [rank["step"] for rank in told] == [crash_loops.STEPS - 1] * 2
    if what == "data":
        assert [rank["skipped"] for rank in told] == [1, 1]
    else:
        assert [rank["pieces"] for rank in told] == [2, 2]
    assert any("rank 1 could not take step 13" in note for note in told[0]["notes"])


def test_an_error_without_a_cure_ends_all_ranks_with_one_reason_and_one_code(tmp_path):
    told, codes, logs = started(tmp_path, "fsdp", "forward", "bug")
    assert codes == [ExitCode.UNRECOVERABLE] * 2, logs
    assert told[0]["halt"] == told[1]["halt"]
    assert "ValueError: the program is wrong" in told[0]["halt"]
    for name in ("postmortem.json", "postmortem.rank1.json"):
        page = read_json(tmp_path / "run" / name)
        assert page["exit_code"] == ExitCode.UNRECOVERABLE
        assert "on rank 1 (ValueError: the program is wrong)" in page["halted_because"]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp", "tp"])
def test_a_rank_that_raises_before_forward_is_named_by_all(tmp_path, wrap):
    told, codes, logs = started(tmp_path, wrap, "before", "bug")
    assert codes == [ExitCode.UNRECOVERABLE] * 2, logs
    assert told[0]["halt"] == told[1]["halt"]
    assert "rank 1 raised ValueError: the program is wrong" in told[0]["halt"]
    for name in ("postmortem.json", "postmortem.rank1.json"):
        page = read_json(tmp_path / "run" / name)
        assert page["exit_code"] == ExitCode.UNRECOVERABLE
        assert "rank 1 raised ValueError" in page["halted_because"]
    assert page["exception_type"] == "ValueError"


@pytest.mark.parametrize("wrap", ["ddp", "fsdp", "tp"])
def test_a_batch_that_one_rank_cannot_use_before_forward_costs_the_batch_alone(tmp_path, wrap):
    told, codes, logs = started(tmp_path, wrap, "before", "data")
    assert codes == [0, 0], logs
    assert [rank["step"] for rank in told] == [crash_loops.STEPS - 1] * 2
