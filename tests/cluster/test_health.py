"""Pings, replicas and stragglers, among real ranks."""

import pytest
import torch

from heal.cluster import ReplicaCheck, StragglerWatch, check_nccl_health, fingerprints
from heal.cluster.fingerprints import odd_ranks
from heal.cluster.hardware import GroupPing
from tests.cluster import ranks
from tests.cluster.jobs import Job, read_json
from tests.fake_cuda import fake_cuda, fake_parameters
from zclip import mailbox


def told_by_all(folder, size, function, *arguments):
    with Job(folder, size, function, *arguments) as job:
        assert job.wait() == [0] * size, job.logs()
    return [read_json(folder / f"told{rank}") for rank in range(size)]


@pytest.mark.parametrize(("size", "absent"), [(2, 0), (3, 1)])
def test_a_rank_that_does_not_come_to_a_ping_is_named_by_the_others(tmp_path, size, absent):
    told = told_by_all(tmp_path, size, ranks.ping, absent, 10.0)
    for rank, (first_ok, first_missing, *later) in enumerate(told):
        assert (first_ok, first_missing) == (True, [])
        if rank != absent:
            ok, missing, reason, again_ok, _, again_reason = later
            assert (ok, missing) == (False, [absent])
            assert reason == f"no answer within 10 s; missing: rank {absent}"
            assert not again_ok
            assert again_reason.startswith("an earlier ping failed")


def test_without_other_ranks_a_ping_has_nothing_to_say():
    assert check_nccl_health().ok


def test_a_ping_without_time_is_refused():
    with pytest.raises(ValueError, match="timeout_seconds: expected more than 0, got 0"):
        GroupPing(timeout_seconds=0)


def test_a_flipped_bit_is_named_by_rank_and_tensor(tmp_path):
    told = told_by_all(tmp_path, 3, ranks.replicas, 2)
    assert told[0] == told[1] == told[2]
    where = [(heard_at, step, name, odd) for heard_at, step, name, odd, _ in told[0]]
    assert where == [(6, 4, "1.weight", [2])]
    assert "rank 2 differs from the majority of ranks 0, 1, 2" in told[0][0][-1]


def test_between_two_ranks_there_is_no_majority_but_the_tensor_is_named(tmp_path):
    told = told_by_all(tmp_path, 2, ranks.replicas, 1)
    assert told[0] == told[1]
    (_, _, name, odd, text) = told[0][0]
    assert (name, odd) == ("1.weight", [])
    assert "ranks 0, 1 differ, and there is no majority" in text


def test_shards_are_compared_with_their_copies_and_with_nothing_else(tmp_path):
    told = told_by_all(tmp_path, 4, ranks.sharded_replicas, 3)
    plain = ["plain", [0, 1, 2, 3], [3]]
    assert told[0] == told[2] == [plain]
    assert told[1] == told[3] == [["sharded", [1, 3], []], plain]


def test_the_majority_is_more_than_half():
    assert odd_ranks([(0, 5), (1, 5), (2, 9)]) == (2,)
    assert odd_ranks([(0, 5), (1, 9)]) == ()
    assert odd_ranks([(0, 5), (1, 5), (2, 9), (3, 9)]) == ()
    assert odd_ranks([(4, 5), (6, 8), (8, 5), (9, 9), (10, 5)]) == (6, 9)


def test_one_process_has_no_replicas_to_compare():
    check = ReplicaCheck([("weight", torch.ones(3))], lag=0)
    check.post(0)
    assert check.read() == []


def test_a_slow_rank_is_named_by_all_until_it_recovers(tmp_path):
    told = told_by_all(tmp_path, 3, ranks.slow_rank, 1)
    assert told[0] == told[1] == told[2]
    assert {rank for _, rank, _ in told[0]} == {1}
    assert [windows for _, _, windows in told[0]] == [2, 3, 4, 5, 6]
    assert max(step for step, _, _ in told[0]) == 30


def test_one_slow_window_is_not_a_straggler():
    watch = StragglerWatch(factor=1.5, patience=2)
    fine, slow = {0: 1.0, 1: 1.0, 2: 1.1}, {0: 1.0, 1: 1.6, 2: 1.0}
    assert watch.judge(slow) == []
    assert watch.judge(fine) == []
    assert watch.judge(slow) == []
    (found,) = watch.judge(slow)
    assert str(found) == (
        "rank 1 takes 1.6 s of its own per step, the others 1 s, for 2 windows in a row"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every: .* got 0"),
        ({"factor": 1.0}, "factor: .* got 1"),
        ({"patience": 0}, "pat"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        StragglerWatch(**arguments)
    with pytest.raises(ValueError, match="lag: expected 0 or more, got -1"):
        ReplicaCheck([], lag=-1)


def test_a_check_of_replicas_waits_for_nothing(monkeypatch):
    """On fake CUDA tensors, which raise when asked for a value."""
    reduced = []

    monkeypatch.setattr(fingerprints, "has_peers", lambda: True)
    monkeypatch.setattr(fingerprints.dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(fingerprints.dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(
        fingerprints.dist, "all_reduce", lambda tensor, op, group: reduced.append(tensor)
    )
    monkeypatch.setattr(mailbox, "record_event", lambda device: None)
    monkeypatch.setattr(mailbox.Mailbox, "_new_slot", lambda self, pinned: torch.empty(self.width))
    with fake_cuda():
        params = fake_parameters([(4, 3), (7,)])
        check = ReplicaCheck([("a", params[0]), ("b", params[1])], group=object(), lag=2)
        for step in range(3):
            check.post(step)
        assert [t.device.type for t in reduced] == ["cuda"] * 3
        assert reduced[0].shape == (4,)
