"""Fresh builds with each compiler: no warnings, no code of a wider instruction set that others could be given."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from test_threads import one_runtime
from trees import build_inplace, copy_sources, python, run

pytestmark = pytest.mark.slow

COMPILERS = {
    "gcc": shutil.which("g++"),
    "clang": next(
        filter(None, (shutil.which(f"clang++{v}") for v in ("", *(f"-{n}" for n in range(30, 13, -1))))), None
    ),
}

CHECK = """
import torch, petit_plugin as pp
torch.manual_seed(1)
for fmt, group in (("nvfp4", 16), ("mxfp4", 32)):
    weight = torch.randint(0, 256, (37, 320), dtype=torch.uint8)
    scale = torch.randint(100, 120, (37, 640 // group), dtype=torch.uint8)
    w = getattr(pp, "pack_" + fmt)(weight, scale, *([0.5] if fmt == "nvfp4" else []))
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
        for rows in (1, 5, 40):
            x = torch.randn(rows, 640).to(dtype)
            y = pp.linear(x, w).double()
            exact = x.double() @ w.dequantize(torch.float64).T
            assert (y - exact).norm() <= bound * exact.norm(), (fmt, dtype, rows)
print(pp.__file__, pp._native.compiler)
"""


@pytest.fixture(scope="module", params=COMPILERS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    compiler = COMPILERS[request.param]
    if compiler is None:
        pytest.skip(f"no {request.param} on PATH")
    tree = copy_sources(tmp_path_factory.mktemp(request.param))
    build_inplace(tree, compiler, "-DPETIT_WERROR=ON")
    return request.param, tree


def test_built_module_works_with_one_openmp_runtime(built: tuple[str, Path]) -> None:
    name, tree = built
    where, compiler = python(CHECK, tree=tree).split(maxsplit=1)
    assert Path(where).is_relative_to(tree)
    assert compiler.lower().startswith({"gcc": "gnu", "clang": "clang"}[name])
    one_runtime(tree)


def test_files_for_wider_instruction_sets_export_no_shared_code(built: tuple[str, Path]) -> None:
    """A weak symbol (inline function, template) may be taken from any file that has it: from a file compiled for AVX it
    would crash an older CPU. Such files may define only what is theirs alone."""
    _, tree = built
    objects = [
        o for o in (tree / "build" / "cmake").rglob("*.o") if re.search(r"_avx(2|512|512_bf16)\.cpp\.o$", o.name)
    ]
    assert objects, "no kernel for a wider instruction set was built"
    for file in objects:
        defined = [
            line.split(maxsplit=2) for line in run(["nm", "-C", "--defined-only", str(file)]).stdout.splitlines()
        ]
        weak = [name for _, kind, name in defined if kind in "WVuwv" and not name.startswith("DW.ref.")]
        assert weak == [], f"{file.name} shares {weak[:5]}"
        exported = [name for _, kind, name in defined if kind == "T"]
        assert all("petit::cpu::" in name and "avx" in name for name in exported), exported


def test_no_wide_instructions_outside_those_files(built: tuple[str, Path]) -> None:
    """The rest runs on any x86-64: no ymm or zmm register in its code."""
    _, tree = built
    for file in (tree / "build" / "cmake").rglob("*.o"):
        if "avx" not in file.name:
            assert not re.search(r"%[yz]mm\d", run(["objdump", "-d", str(file)]).stdout), file.name


def test_second_build_compiles_nothing(built: tuple[str, Path]) -> None:
    _, tree = built
    before = {o: o.stat().st_mtime_ns for o in (tree / "build" / "cmake").rglob("*.o")}
    build_inplace(tree, COMPILERS[built[0]], "-DPETIT_WERROR=ON")
    assert {o: o.stat().st_mtime_ns for o in (tree / "build" / "cmake").rglob("*.o")} == before
