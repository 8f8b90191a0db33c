"""One emulated device at a time: tests run arch by arch, with the code object loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from device.harness import Machine

ARCHS = ("gfx90a", "gfx942", "gfx950")


@pytest.fixture(scope="module", params=ARCHS)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    m = Machine(request.param)
    yield m
    m.close()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    seed = int(np.random.SeedSequence().entropy) % 2**32
    request.node.user_properties.append(("seed", seed))
    print(f"seed {seed}")  # shown when the test fails
    return np.random.default_rng(seed)
