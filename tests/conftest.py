"""Fixtures shared by all tests."""

import pytest

from tests.backends import BACKENDS


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request):
    return BACKENDS[request.param]
