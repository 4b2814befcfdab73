"""Fixtures shared by all tests."""

import gc
import os
import signal
import threading
import time
from collections import defaultdict

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it once, when first imported

from tests.backends import BACKENDS
from zclip.backends import OPS, triton

REFERENCE_ONLY = {f"test_{op}.py" for op in OPS if op not in triton.MODULE_OF}
RULES = ("zclip_", "adagc_", "spike_skip_", "auto_clip_", "watch_loss_", "rules_agree")
THINNED = {f"test_{rule}.py" for rule in RULES}
MOST_CASES = 3
"""Of a test of rules in Triton's interpreter, which takes a twentieth of a second for one step."""


WATCHED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
THREAD_SECONDS = 60.0  # for a thread that was told to end, on a busy machine


@pytest.fixture(autouse=True)
def _nothing_outlives_the_test():
    """Put signals back, and fail a test whose threads go on: one may end the process much later.

    A healer that is open would also answer the signals that later tests send.
    """
    handlers = {number: signal.getsignal(number) for number in WATCHED_SIGNALS}
    threads = set(_threads_of_heal())
    yield
    leaked = _leaked(threads)
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    signal.set_wakeup_fd(-1)
    assert not leaked, f"{leaked} still run: close the healer, or leave its `with` block"


def _threads_of_heal():
    return [t for t in threading.enumerate() if t.name.startswith("heal-")]


def _leaked(before):
    """Names of threads that a test left behind; a healer that nobody refers to closes itself."""
    if not set(_threads_of_heal()) - before:
        return []
    gc.collect()
    until = time.monotonic() + THREAD_SECONDS
    while (left := set(_threads_of_heal()) - before) and time.monotonic() < until:
        time.sleep(0.01)
    return sorted(thread.name for thread in left)


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request):
    return BACKENDS[request.param]


def pytest_collection_modifyitems(items):
    """Where Triton has no kernel the reference answers, and would only be tested twice."""
    cases = defaultdict(list)
    for item in items:
        if "triton-interpret" in item.name:
            cases[item.path.name, item.originalname].append(item)
    dropped = set()
    for (file, _), same in cases.items():
        if file in REFERENCE_ONLY:
            dropped.update(same)
        elif file in THINNED and len(same) > MOST_CASES:
            steps = [i * (len(same) - 1) // (MOST_CASES - 1) for i in range(MOST_CASES)]
            dropped.update(item for i, item in enumerate(same) if i not in steps)
    items[:] = [item for item in items if item not in dropped]
