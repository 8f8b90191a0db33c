"""Fixtures for every test. Its place also makes pytest put tests/ on sys.path: `from fixtures import ...` works."""

from __future__ import annotations

import os
import zlib

import numpy as np
import pytest

_SEED = int(os.environ.get("PETIT_TEST_SEED", "0")) or int.from_bytes(os.urandom(4), "little")


def pytest_report_header() -> str:
    return f"random inputs: PETIT_TEST_SEED={_SEED}"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh random input in every run, the same again under the PETIT_TEST_SEED that the report header names."""
    return np.random.default_rng((_SEED, zlib.crc32(request.node.nodeid.encode())))
