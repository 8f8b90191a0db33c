"""The HIP runtime layer over a fake libamdhip64 built here: what is opened, what is called, and what errors say."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numerics import random_checkpoint

import petit_plugin as pp
from petit_plugin import _native
from petit_plugin.backends import default_arch
from petit_plugin.backends.hip import device as hip_device
from petit_plugin.backends.hip import emulation, solutions

CODE = b"\x7fELF" + bytes(64)
GRID = (256, 608, 3, 1, 1, 8)  # threads, workgroups, units_q, units_r, m_blocks, xcds


def compile_fake(directory: Path, name: str = "libfake_hip.so", *flags: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on PATH")
    out = directory / name
    source = Path(__file__).with_name("fake_runtime.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", *flags, str(source), "-o", str(out)], check=True)
    return out


@pytest.fixture
def fake(tmp_path: Path) -> tuple[_native.HipRuntime, ctypes.CDLL]:
    path = compile_fake(tmp_path)
    library = ctypes.CDLL(str(path))
    library.fake_log.restype = ctypes.c_char_p
    return _native.HipRuntime(str(path)), library


def calls(library: ctypes.CDLL) -> list[str]:
    lines = library.fake_log().decode().split("\n")[:-1]
    library.fake_clear()
    return lines


def make_plan(runtime: _native.HipRuntime, device: int = 0) -> tuple[_native.DeviceCode, _native.LinearPlan]:
    code = _native.DeviceCode(runtime, device, CODE, "petit_gfx942.co")
    shape = "x [16, 4096] bf16 x nvfp4 [8192, 4096]"
    names = ("petit_convert_bf16", "petit_decode_nvfp4_bf16_m16")
    return code, _native.LinearPlan(code, *names, shape, (8192, 4096, 16), GRID, 2, (1024, 512, 4096, 0, 131072))


def run(plan: _native.LinearPlan, stream: int) -> None:
    space = torch.zeros(64, dtype=torch.uint8).data_ptr()  # the fake touches nothing
    plan.run(space, 8192, space, space, space, space, 0, False, space, 8192, space, stream)


def test_a_launch_is_two_launches_on_the_callers_stream_and_nothing_else(
    fake: tuple[_native.HipRuntime, ctypes.CDLL],
) -> None:
    runtime, library = fake
    _, plan = make_plan(runtime)
    assert calls(library) == ["ModuleLoadData", "ModuleGetFunction", "ModuleGetFunction"]
    run(plan, 0x1234)
    assert calls(library) == [
        "LaunchKernel grid 16 2 1 block 256 1 1 lds 0 stream 0x1234 device 0",
        "LaunchKernel grid 608 1 1 block 256 1 1 lds 0 stream 0x1234 device 0",
    ]


def test_the_device_is_current_during_a_launch_and_put_back(fake: tuple[_native.HipRuntime, ctypes.CDLL]) -> None:
    runtime, library = fake
    _, plan = make_plan(runtime, device=1)
    calls(library)
    run(plan, 0)
    log = calls(library)
    assert [line for line in log if line.startswith("Launch")][-1].endswith("device 1")
    assert log.count("SetDevice 1") == log.count("SetDevice 0") == 2 and log[-1] == "SetDevice 0"


def test_a_failing_launch_names_kernel_and_shape(fake: tuple[_native.HipRuntime, ctypes.CDLL]) -> None:
    runtime, library = fake
    code, plan = make_plan(runtime)
    library.fake_fail_launch(719)
    with pytest.raises(_native.HipError) as caught:
        run(plan, 0)
    text = str(caught.value)
    for part in ("719", "unspecified launch failure", "petit_convert_bf16", "x [16, 4096] bf16 x nvfp4 [8192, 4096]"):
        assert part in text
    assert "GetLastError" in calls(library), "HIP would report the error again from an unrelated call"
    with pytest.raises(_native.HipError, match=r"petit_dequantize_nvfp4_bf16 for rows 64 and on, \[128, 4096\]"):
        code.dequantize("petit_dequantize_nvfp4_bf16", 0, 0, 0, 64, 128, 4096, 0)


def test_missing_kernels_and_unloaded_code(fake: tuple[_native.HipRuntime, ctypes.CDLL]) -> None:
    runtime, _ = fake
    code, plan = make_plan(runtime)
    with pytest.raises(_native.HipError, match="petit_missing"):
        code.function("petit_missing")
    with pytest.raises(_native.HipError, match=r"petit_other.co"):
        _native.DeviceCode(runtime, 0, b"no code object" * 9, "petit_other.co")
    code.unload()
    with pytest.raises(_native.HipError, match="unloaded"):
        run(plan, 0)


def test_what_the_runtime_says_about_devices(fake: tuple[_native.HipRuntime, ctypes.CDLL]) -> None:
    runtime, _ = fake
    assert (runtime.device_count, runtime.arch(1), runtime.compute_units(1)) == (2, "gfx942", 305)


def test_missing_runtimes_are_explained(tmp_path: Path) -> None:
    with pytest.raises(_native.HipError, match=r"nowhere.so.*install ROCm"):
        _native.HipRuntime(str(tmp_path / "nowhere.so"))
    with pytest.raises(_native.HipError, match=r"libm.so.6 has no hip\w+; ROCm >= 6.2 is needed"):
        _native.HipRuntime("libm.so.6")


OPEN = "import ctypes, petit_plugin as pp\n{before}\nprint(pp._native.HipRuntime('').path)"


def opened(environment: Path, before: str = "") -> str:
    """The runtime that a fresh process opens, with `environment` on its library path."""
    root = str(Path(pp.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", OPEN.format(before=before)],
        env={"LD_LIBRARY_PATH": str(environment), "PYTHONPATH": root, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_the_order_of_runtimes(tmp_path: Path) -> None:
    """The newest by name; but one that is mapped already wins, since two runtimes cannot share streams."""
    libraries = tmp_path / "lib"
    libraries.mkdir()
    compile_fake(libraries, "libamdhip64.so.6")
    assert opened(libraries) == "libamdhip64.so.6"
    compile_fake(libraries, "libamdhip64.so.7")
    assert opened(libraries) == "libamdhip64.so.7"
    mapped = compile_fake(tmp_path, "libamdhip64.so.6")
    assert opened(libraries, f"ctypes.CDLL({str(mapped)!r})") == str(mapped)


def test_another_gpu_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for name, expected in (("gfx1100", "cuda:0 is gfx1100; petit_plugin has kernels for gfx90a, gfx942, gfx950"),):
        properties = SimpleNamespace(gcnArchName=name, name="Radeon", multi_processor_count=96)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, p=properties: p)
        with pytest.raises(ValueError, match=expected):
            default_arch(torch.device("cuda", 0))
        with pytest.raises(ValueError, match=expected):
            hip_device.Device(0, "gfx942")
    properties.gcnArchName = "gfx950:sramecc+:xnack-"
    assert default_arch(torch.device("cuda", 0)) == "gfx950"
    monkeypatch.setenv("PETIT_GFX950_CORE", "mask")
    assert default_arch(torch.device("cuda", 0)) == "gfx950-mask"
    with pytest.raises(ValueError, match=r"cuda:0 is gfx950, but the weight is packed for gfx942"):
        hip_device.Device(0, "gfx942")
    monkeypatch.setattr(torch.version, "hip", None)
    properties.gcnArchName = ""
    with pytest.raises(ValueError, match="no AMD GPU"):
        default_arch(torch.device("cuda", 0))


def test_weights_of_another_arch(code_objects: Path, rng: np.random.Generator) -> None:
    c = random_checkpoint(rng, "nvfp4", 20, 64)
    w = pp.pack_nvfp4(*c.torch_arguments(), arch="gfx942")
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"packed for gfx942.*no emulator is active.*emulated\('gfx942'\)"):
        pp.linear(x, w)
    with pp.emulated("gfx950"):
        with pytest.raises(ValueError, match=r"packed for gfx942.*emulator is running gfx950"):
            pp.linear(x, w)
        with pytest.raises(ValueError, match="does not nest"), pp.emulated("gfx942"):
            pass
        own = pp.pack_nvfp4(*c.torch_arguments())
        assert own.meta.arch == "gfx950"
        with pytest.raises(TypeError, match=r"x is torch.float32; the gfx950 kernels take bfloat16 or float16"):
            pp.linear(x.float(), own)
        with pytest.raises(ValueError, match="row_exponent is missing"):
            pp.linear(x, pp.PackedWeight(own.meta, own.weight, own.scale, own.row_scale))
    assert pp.pack_nvfp4(*c.torch_arguments()).meta.arch == "cpu"
    with pytest.raises(ValueError, match="gfx1100"), pp.emulated("gfx1100"):
        pass


def test_no_emulator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PETIT_HIP_RUNTIME", raising=False)
    monkeypatch.setattr(emulation, "__file__", str(tmp_path / "site" / "petit_plugin" / "backends" / "hip" / "e.py"))
    with pytest.raises(RuntimeError, match=r"no emulator beside .*pip install -e"), pp.emulated("gfx942"):
        pass
    monkeypatch.setenv("PETIT_HIP_RUNTIME", str(compile_fake(tmp_path)))
    with pytest.raises(RuntimeError, match="is not the emulator"), pp.emulated("gfx942"):
        pass


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_workspaces_are_sized_up_front(fmt: str, rng: np.random.Generator) -> None:
    """After packing, no number of rows and neither dtype needs more than what was reserved."""
    device = object.__new__(hip_device.Device)
    device.arch, device.cus, device.dense, device._reserved = "gfx942", 304, True, 0
    metas = [pp.PackedMeta(fmt, "gfx942", int(n), int(k) * 32) for n, k in rng.integers(1, 900, (4, 2))]
    for meta in metas:
        device.reserve(meta)
    for meta in metas:
        for m in rng.integers(1, solutions.DENSE_ABOVE + 1, 40):
            for dtype in ("bf16", "f16"):
                launch = device.launch(meta, dtype, int(m))
                convert = solutions.conversion_kernel("gfx942", fmt, dtype, False, False)
                assert device.workspace_layout(meta, dtype, int(m), launch, convert)[1] <= device._reserved
