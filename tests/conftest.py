"""Fixtures shared by all tests."""

import os
import signal
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


@pytest.fixture(autouse=True)
def _signals_come_back():
    """A healer that no test closed would answer the signals that later tests send."""
    before = {number: signal.getsignal(number) for number in WATCHED_SIGNALS}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    signal.set_wakeup_fd(-1)


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
