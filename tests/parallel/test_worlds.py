"""Many ranks, real processes: the checks of this folder, under torchrun, for W = 2, 3 and 4."""

import pytest

from tests.parallel.registry import cases
from tests.parallel.world import run_world


def _params(slow):
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in cases(slow)]


CASES, SLOW_CASES = _params(slow=False), _params(slow=True)


def _assert_ok(reports, name):
    for rank, report in enumerate(reports):
        if name not in report:
            failed = {n: r["error"] for n, r in report.items() if n != "log" and r["error"]}
            pytest.fail(f"rank {rank} did not get to {name}: {failed or reports[0]['log']}")
        assert report[name]["error"] is None, f"rank {rank}:\n{report[name]['error']}"


@pytest.mark.parametrize(("size", "name", "needs"), CASES)
def test_world(size, name, needs):
    if needs:
        pytest.importorskip(needs)
    _assert_ok(run_world(size), name)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name", "_needs"), SLOW_CASES)
def test_world_at_length(size, name, _needs):
    _assert_ok(run_world(size, name), name)
