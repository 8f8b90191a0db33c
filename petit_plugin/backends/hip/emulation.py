"""`with emulated("gfx942"):` runs the HIP backend on the emulator, for tensors on the CPU.

The emulator is a development tool beside this package in the source tree, not part of a wheel.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch

from petit_plugin import _native
from petit_plugin.backends.hip import solutions
from petit_plugin.backends.hip.device import COUNTERS, Device, load_code

_current: ContextVar[EmulatedDevice | None] = ContextVar("petit_emulated_device", default=None)


def library() -> Path:
    """The emulator's library: PETIT_HIP_RUNTIME, else the source tree's, built if needed. RuntimeError if neither."""
    if chosen := os.environ.get("PETIT_HIP_RUNTIME"):
        return Path(chosen)
    root = Path(__file__).resolve().parents[3]
    if not (root / "emulator" / "build.py").exists():
        raise RuntimeError(
            f"no emulator beside {root}: it is in the source tree only; install with `pip install -e .`, or set "
            f"PETIT_HIP_RUNTIME to its library"
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    path: Path = importlib.import_module("emulator.build").library()
    return path


class EmulatedDevice(Device):
    """The emulator as device 0 of `arch` with `cus` compute units; memory is registered call by call."""

    def __init__(self, arch: str, cus: int) -> None:
        path = library()
        self.library = ctypes.CDLL(str(path))
        if not hasattr(self.library, "petit_emu_set_arch"):
            raise RuntimeError(
                f"{path} is not the emulator; unset PETIT_HIP_RUNTIME or point it to libpetit_emulator.so"
            )
        self.library.petit_emu_last_error.restype = ctypes.c_char_p
        self._call("petit_emu_set_arch", arch.encode())
        self._call("petit_emu_set_option", b"cus", ctypes.c_uint64(cus))
        self.index, self.arch, self.dense = 0, arch, True
        self.runtime = _native.HipRuntime(str(path))
        self.cus = self.runtime.compute_units(0)
        self.code = load_code(self.runtime, 0, arch)
        self._plans = {}

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self.library, name)(*arguments) != 0:
            raise RuntimeError(f"{name}: {self.library.petit_emu_last_error().decode()}")

    def close(self) -> None:
        self._plans.clear()
        self.code.unload()

    def counters(self) -> dict[str, int]:
        """What the last launch did: wave instructions by unit, bytes, cycles."""
        count = self.library.petit_emu_counter_count()
        values = (ctypes.c_uint64 * count)()
        self.library.petit_emu_counters(1, values)
        self.library.petit_emu_counter_name.restype = ctypes.c_char_p
        return {self.library.petit_emu_counter_name(i).decode(): values[i] for i in range(count)}

    def stream(self) -> int:
        return 0

    def reserve(self, meta: object) -> None:
        pass

    def workspace(self, nbytes: int, stream: int) -> torch.Tensor:
        """Poisoned, so that a read of something never written shows; only the counters are zero."""
        space = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
        space[: COUNTERS * 4] = 0
        return space

    @contextmanager
    def visible(self, tensors: Sequence[torch.Tensor | None], writable: Sequence[torch.Tensor]) -> Iterator[None]:
        with ExitStack() as stack:
            for group, write in ((tensors, 0), (writable, 1)):
                for tensor in group:
                    if tensor is None:
                        continue
                    pointer = ctypes.c_void_p(tensor.data_ptr())
                    span = 1 + sum(
                        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
                    )
                    nbytes = ctypes.c_uint64(span * tensor.element_size())
                    name = f"{tensor.dtype} {list(tensor.shape)}".encode()
                    self._call("petit_emu_register", pointer, nbytes, name, write)
                    stack.callback(self._call, "petit_emu_unregister", pointer)
            yield

    def matmul_f32(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.float() @ w.float().t()


def current() -> EmulatedDevice | None:
    return _current.get()


@contextmanager
def emulated(arch: str, *, cus: int | None = None) -> Iterator[EmulatedDevice]:
    """CPU tensors run the HIP backend on the emulator inside this context.

    arch: "gfx90a", "gfx942" or "gfx950". cus: compute units of the device posed as (default: that arch's usual one);
    they decide the grid. Weights packed inside are for `arch`. Raises ValueError for another arch or when nested.
    """
    if arch not in solutions.ARCHS:
        raise ValueError(f"arch is {arch!r}; the emulator runs {', '.join(solutions.ARCHS)}")
    if current() is not None:
        raise ValueError("emulated() does not nest: one architecture at a time")
    device = EmulatedDevice(arch, cus or solutions.DEFAULT_CUS[arch])
    token = _current.set(device)
    try:
        yield device
    finally:
        _current.reset(token)
        device.close()
