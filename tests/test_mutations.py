"""Some check fails for every bent kernel; see tests/mutations.py."""

import pytest

from tests import mutations
from tests.simt import build

pytestmark = pytest.mark.skipif(not build.CAN_RUN, reason="needs g++ on x86-64")


def assert_all_caught(chosen):
    results = mutations.sweep(chosen)
    assert len(results) == len(chosen)
    assert not [name for name, noticed in results.items() if not noticed]
    assert not [name for name, noticed in results.items() if "does not compile" in noticed]


def test_every_barrier_and_fence_has_a_mutation():
    names = [m.name for m in mutations.mutations()]
    assert len(names) == len(set(names)) >= 80
    text = "".join(path.read_text() for path in mutations.KERNELS.glob("*.cuh"))
    for call in ("__syncthreads()", "__threadfence()"):
        assert sum(f"delete {call}" in name for name in names) == text.count(call)


def test_a_bent_kernel_is_noticed():
    by_name = {m.name: m for m in mutations.mutations()}
    assert_all_caught([by_name[name] for name in mutations.QUICK])


@pytest.mark.slow
def test_every_bent_kernel_is_noticed():
    assert_all_caught(mutations.mutations())
