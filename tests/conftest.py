"""Fixtures shared by all tests."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it once, when first imported

from tests.backends import BACKENDS


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request):
    return BACKENDS[request.param]
