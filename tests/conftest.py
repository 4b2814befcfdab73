"""Fixtures shared by all tests."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it once, when first imported

from tests.backends import BACKENDS
from zclip.backends import OPS, triton

REFERENCE_ONLY = {f"test_{op}.py" for op in OPS if op not in triton.MODULE_OF}


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request):
    return BACKENDS[request.param]


def pytest_collection_modifyitems(items):
    """Where Triton has no kernel the reference answers, and would only be tested twice."""
    items[:] = [
        item
        for item in items
        if item.path.name not in REFERENCE_ONLY or "triton-interpret" not in item.name
    ]
