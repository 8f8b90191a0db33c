"""What `import petit_plugin` costs, brings along, and says when it cannot work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trees import copy_sources, python

import petit_plugin as pp

COST = """
import time, torch
start = time.perf_counter()
import petit_plugin
print(time.perf_counter() - start)
"""


def test_import_is_fast() -> None:
    """Less than 0.2 s beyond torch; the best of several, since whatever else runs here only adds to it."""
    assert min(float(python(COST)) for _ in range(4)) < 0.2


def test_import_brings_no_framework_and_starts_no_thread() -> None:
    code = """
import os, sys, torch
threads = len(os.listdir("/proc/self/task"))
import petit_plugin
assert len(os.listdir("/proc/self/task")) == threads
heavy = "vllm sglang transformers safetensors typer rich petit_vllm torch._dynamo".split()
print([name for name in heavy if name in sys.modules])
"""
    assert python(code).strip() == "[]"


def test_native_module_has_no_torch_openmp_or_gpu_dependency() -> None:
    listing = subprocess.run(["readelf", "-d", pp._native.__file__], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].split("]")[0] for line in listing.splitlines() if "(NEEDED)" in line}
    allowed = ("libstdc++.so", "libgcc_s.so", "libc.so", "libm.so", "libdl.so", "libpthread.so", "ld-linux", "libc++")
    assert [name for name in needed if not name.startswith(allowed)] == []


def test_source_tree_without_native_module_says_so(tmp_path: Path) -> None:
    tree = copy_sources(tmp_path / "tree")
    done = subprocess.run([sys.executable, "-c", "import petit_plugin"], cwd=tree, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"ImportError: petit_plugin in {tree / 'petit_plugin'} has no native module"), done.stderr
    assert "pip install -e ." in last


def test_native_module_of_another_version_is_refused(tmp_path: Path) -> None:
    tree = copy_sources(tmp_path / "tree")
    (tree / "petit_plugin" / "_version.py").write_text('__version__ = "99.0"\n')
    (tree / "petit_plugin" / Path(pp._native.__file__).name).write_bytes(Path(pp._native.__file__).read_bytes())
    done = subprocess.run([sys.executable, "-c", "import petit_plugin"], cwd=tree, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "is version 99.0 but its native module is" in last and "pip install -e ." in last


def test_importing_twice_registers_once() -> None:
    code = """
import sys, torch, petit_plugin
first = petit_plugin.linear
import petit_plugin.ops.linear, petit_plugin as again
assert again.linear is first
print(torch._C._dispatch_get_all_op_names().count("petit::linear"))
"""
    assert python(code).strip() == "1"


def test_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert pp.__version__ == pp._native.__version__ == version("petit-plugin")


@pytest.mark.parametrize("name", ["", "avx2 ", "sse", "avx512_bf16", "avx512", "avx2", "portable"])
def test_isa_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PETIT_CPU_ISA picks one that runs here, or fails with what is wrong; it never falls back."""
    monkeypatch.setenv("PETIT_CPU_ISA", name)
    numbers = {pp._native.isa_name(number): number for number in range(4)}
    w = pp.pack_mxfp4(torch.full((1, 16), 0x22, dtype=torch.uint8), torch.full((1, 1), 127, dtype=torch.uint8))
    x = torch.ones(1, 32)
    if name == "" or (name in numbers and pp._native.isa_supported(numbers[name])):
        assert pp.linear(x, w).item() == 32
        assert name == "" or pp._native.best_isa() == numbers[name]
        return
    message = "support|contain" if name in numbers else "not one of portable, avx2, avx512, avx512_bf16"
    with pytest.raises(ValueError, match=f"PETIT_CPU_ISA={name}.*({message})"):
        pp.linear(x, w)
