"""The library as a stand-in for libamdhip64: the calls a host layer makes, through ctypes alone."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
from device_code import hip

import emulator

SOURCE = """
extern "C" __global__ void axpy(const float* x, float* y, float a, int n) {
  int i = GROUP * 64 + LANE;
  if (i < n) y[i] += a * x[i];
}"""


@pytest.fixture
def runtime() -> ctypes.CDLL:
    emulator.get().set_arch("gfx942")
    lib = ctypes.CDLL(str(emulator.library_path()))
    lib.hipGetErrorString.restype = ctypes.c_char_p
    lib.hipGetErrorName.restype = ctypes.c_char_p
    for name in ("hipMemcpy", "hipMemcpyAsync"):
        getattr(lib, name).argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            *([ctypes.c_void_p] if name.endswith("Async") else []),
        ]
    lib.hipFree.argtypes = [ctypes.c_void_p]
    lib.hipMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
    lib.hipModuleUnload.argtypes = [ctypes.c_void_p]
    lib.hipModuleLaunchKernel.argtypes = [
        ctypes.c_void_p,
        *[ctypes.c_uint] * 7,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    return lib


def test_device_properties(runtime: ctypes.CDLL) -> None:
    assert runtime.hipInit(0) == 0
    count = ctypes.c_int()
    assert runtime.hipGetDeviceCount(ctypes.byref(count)) == 0 and count.value == 1
    raw = ctypes.create_string_buffer(1472)
    assert runtime.hipGetDevicePropertiesR0600(raw, 0) == 0
    assert raw.raw[1160:].split(b"\0")[0].startswith(b"gfx942")
    assert struct.unpack_from("<i", raw.raw, 388)[0] == 304 and struct.unpack_from("<i", raw.raw, 308)[0] == 64
    value = ctypes.c_int()
    assert runtime.hipDeviceGetAttribute(ctypes.byref(value), 63, 0) == 0 and value.value == 304
    assert runtime.hipSetDevice(1) != 0


@pytest.mark.parametrize("how", ["params", "extra"])
def test_launch(runtime: ctypes.CDLL, how: str, rng: np.random.Generator) -> None:
    elf = hip(SOURCE, "gfx942")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    assert runtime.hipModuleLoadData(ctypes.byref(module), elf) == 0
    assert runtime.hipModuleGetFunction(ctypes.byref(function), module, b"axpy") == 0
    assert runtime.hipModuleGetFunction(ctypes.byref(ctypes.c_void_p()), module, b"missing") == 500
    n = 100
    x, y = rng.standard_normal(n).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    dx, dy = ctypes.c_void_p(), ctypes.c_void_p()
    for pointer, data in ((dx, x), (dy, y)):
        assert runtime.hipMalloc(ctypes.byref(pointer), data.nbytes) == 0
        assert runtime.hipMemcpyAsync(pointer, data.ctypes.data, data.nbytes, 1, None) == 0
    a, count = ctypes.c_float(2.5), ctypes.c_int(n)
    if how == "params":
        params = (ctypes.c_void_p * 4)(*(ctypes.addressof(v) for v in (dx, dy, a, count)))
        status = runtime.hipModuleLaunchKernel(function, 2, 1, 1, 64, 1, 1, 0, None, params, None)
    else:
        buffer = struct.pack("<QQfi", dx.value, dy.value, a.value, n)
        size = ctypes.c_size_t(len(buffer))
        extra = (ctypes.c_void_p * 5)(1, ctypes.cast(buffer, ctypes.c_void_p).value, 2, ctypes.addressof(size), 3)
        status = runtime.hipModuleLaunchKernel(function, 2, 1, 1, 64, 1, 1, 0, None, None, extra)
    assert status == 0 and runtime.hipDeviceSynchronize() == 0
    out = np.zeros_like(y)
    assert runtime.hipMemcpy(out.ctypes.data, dy, out.nbytes, 2) == 0
    want = y.astype(np.float64) + 2.5 * x.astype(np.float64)
    assert (np.abs(out - want) <= 1e-6 * (np.abs(y) + 2.5 * np.abs(x))).all()
    # One element more than allocated: the error names the kernel and comes back through hipGetErrorString.
    count.value = n + 1
    if how == "params":
        assert runtime.hipModuleLaunchKernel(function, 2, 1, 1, 64, 1, 1, 0, None, params, None) == 719
        assert runtime.hipGetErrorName(719) == b"hipErrorLaunchFailure"
        message = runtime.hipGetErrorString(719).decode()
        assert "axpy" in message and "outside every registered range" in message
        assert runtime.hipGetLastError() == 719 and runtime.hipGetLastError() == 0
    for pointer in (dx, dy):
        assert runtime.hipFree(pointer) == 0
    assert runtime.hipFree(dx) != 0
    assert runtime.hipModuleUnload(module) == 0


def test_code_for_another_architecture_is_refused(runtime: ctypes.CDLL) -> None:
    assert runtime.hipModuleLoadData(ctypes.byref(ctypes.c_void_p()), hip(SOURCE, "gfx950")) == 200
    assert "gfx950" in runtime.hipGetErrorString(200).decode()


def test_an_objdump_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIT_LLVM_OBJDUMP", "/nonexistent/llvm-objdump")
    with pytest.raises(RuntimeError, match="PETIT_LLVM_OBJDUMP=/nonexistent/llvm-objdump is not an executable"):
        emulator.disassemble(b"")
