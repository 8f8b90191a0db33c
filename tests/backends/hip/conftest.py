"""The HIP backend on the emulator. Code objects are brought up to date first (cached when sources are unchanged)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import petit_plugin as pp
from petit_plugin.backends.hip import device as hip_device
from petit_plugin.backends.hip import solutions
from petit_plugin.backends.hip.emulation import EmulatedDevice

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def code_objects() -> Path:
    """Where the code objects are. PETIT_DEVICE_ARCHS="" tests those of the installation as they are."""
    sys.path.insert(0, str(ROOT / "csrc"))
    backend = importlib.import_module("build_backend")
    sys.path.remove(str(ROOT / "csrc"))
    build = backend.device_build()
    try:
        for arch in backend.device_archs(build):
            build.find_compiler(arch)
    except RuntimeError as error:
        pytest.skip(str(error))
    backend.build_device_code(hip_device.CODE_OBJECTS, 2)
    return hip_device.CODE_OBJECTS


@pytest.fixture(scope="module", params=solutions.ARCHS)
def emulated(request: pytest.FixtureRequest, code_objects: Path) -> Iterator[EmulatedDevice]:
    """Every arch in turn, CPU tensors running on its emulated device."""
    with pp.emulated(request.param) as device:
        yield device


@pytest.fixture
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are allocated full of NaN: an element nobody writes shows."""
    allocate = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        out = allocate(self, *args, **kwargs)  # type: ignore[arg-type]
        out.untyped_storage().fill_(0xFF)
        return out

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
