"""The healer on a cluster: it stops, compares and pings by itself."""

import json
import signal

from heal.exit_codes import ExitCode
from tests.cluster import healed
from tests.cluster.jobs import Job, read_json
from tests.cluster.test_health import told_by_all


def test_a_signal_to_one_rank_makes_every_healer_stop_after_the_same_step(tmp_path):
    with Job(tmp_path, 2, healed.told_to_stop) as job:
        job.wait_for(lambda: min(job.steps()) >= 10)
        job.send(1, signal.SIGTERM)
        assert job.wait() == [ExitCode.PREEMPTED] * 2, job.logs()
    first, second = (read_json(tmp_path / f"told{rank}") for rank in range(2))
    assert first == second


def test_a_bit_that_flips_in_one_replica_is_healed_bit_by_bit(tmp_path):
    healthy = told_by_all(tmp_path / "healthy", 3, healed.silent_flip, 1, -1)
    assert healthy[0]["causes"] == []
    sick = told_by_all(tmp_path / "sick", 3, healed.silent_flip, 1, 12)
    assert sick[0] == sick[1] == sick[2]
    assert sick[0]["causes"] == ["weight_corruption"]
    assert "Rollback" in sick[0]["plans"][0]
    assert sick[0]["digest"] == healthy[0]["digest"]
    lines = (tmp_path / "sick" / "events.jsonl").read_text().splitlines()
    (event,) = [e for e in map(json.loads, lines) if e["event"] == "replicas_differ"]
    assert (event["tensor"], event["odd_ranks"]) == ("module.weight", [1])


def test_replicas_that_were_never_the_same_are_left_alone(tmp_path):
    for told in told_by_all(tmp_path, 2, healed.differing_from_the_start):
        assert told["history"] == 0
        assert any("replicas differ from the start" in note for note in told["notes"])


def test_a_rank_that_misses_the_ping_ends_the_run_of_the_others_by_name(tmp_path):
    told = told_by_all(tmp_path, 2, healed.absent_at_the_ping, 1)
    code, why = told[0]
    assert code == ExitCode.DISTRIBUTED
    assert "missing: rank 1" in why
