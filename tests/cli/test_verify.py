"""`petit verify` passes good checkpoints of every dialect and catches a wrong kernel, layout or packer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import layouts
from cli.runner import EXPORTS, FIXTURES, MODELOPT, OTHERS, petit

import petit_plugin as pp
from petit_plugin.cli import verify


@pytest.mark.parametrize("name", FIXTURES)
def test_modelopt_exports_pass(name: str) -> None:
    result = petit("verify", MODELOPT / name)
    assert result.code == 0 and result.err == ""
    count = 56 if "moe" in name else 14
    assert f"{count} FP4 matrices verified, 0 problems" in result.out
    report = json.loads(petit("verify", MODELOPT / name, "--json").out)
    assert report["ok"] and len(report["layers"]) == count and all(layer["ok"] for layer in report["layers"])


@pytest.mark.parametrize("name", OTHERS)
def test_exports_of_other_tools_pass(name: str) -> None:
    result = petit("verify", EXPORTS / name)
    assert result.code == 0 and result.err == "" and " 0 problems" in result.out


def test_other_dialects_pass(tmp_path: Path, rng: np.random.Generator) -> None:
    mxfp4, nvfp4 = (layouts.random_experts(f, int(rng.integers(2**31))) for f in ("mxfp4", "nvfp4"))
    for path, count in (
        (layouts.blocks(tmp_path / "gpt-oss", mxfp4), 6),
        (layouts.packed(tmp_path / "ct", "nvfp4", nvfp4), 9),
        (layouts.packed(tmp_path / "ct-mx", "mxfp4", mxfp4), 9),
        (layouts.deepseek(tmp_path / "ds", mxfp4), 9),
        (layouts.fused_bank(tmp_path / "bank", nvfp4, transposed=True, scalar=False), 6),
        (layouts.per_expert(tmp_path / "before", "nvfp4", nvfp4, "{leaf}.{e}"), 9),
    ):
        result = petit("verify", path)
        assert result.code == 0, result.err
        assert f"{count} FP4 matrices verified" in result.out


def test_odd_but_legal_values_pass(tmp_path: Path) -> None:
    """Negative zeros, negative and subnormal block scales, zero blocks with NaN scales, far apart E8M0 bytes."""

    def nvfp4(tensors: layouts.Tensors) -> None:
        scale = tensors["model.layers.0.mlp.down_proj.weight_scale"].view(torch.uint8)
        scale[0, :4] = torch.tensor([0x01, 0x81, 0xB8, 0x00], dtype=torch.uint8)
        scale[1, 0] = 0x7F
        tensors["model.layers.0.mlp.down_proj.weight"][1, :8] = 0x88

    def mxfp4(tensors: layouts.Tensors) -> None:
        scale = tensors["model.layers.0.mlp.down_proj.weight_scale"]
        scale[0, :4] = torch.tensor([0, 60, 100, 120], dtype=torch.uint8)
        scale[1, :2] = torch.tensor([5, 200], dtype=torch.uint8)  # one row beyond every fast window

    for name, edit in (("llama-w4a16-nvfp4", nvfp4), ("llama-mxfp4", mxfp4)):
        path = layouts.edited(MODELOPT / name, tmp_path / name, edit)
        result = petit("verify", path)
        assert result.code == 0, result.err


def test_rows_are_checked_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "SLICE_ELEMENTS", 20_000)
    assert petit("verify", MODELOPT / "llama-mxfp4").code == 0


def _break(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    linear, dequantize, unpack = pp.linear, pp.PackedWeight.dequantize, pp.PackedWeight.unpack
    if kind in ("product", "many rows", "nan", "infinity"):

        def wrong_linear(x: torch.Tensor, w: Any, *rest: Any) -> torch.Tensor:
            y = linear(x, w, *rest)
            if kind == "product":
                y[1, 7] += 1e-3 * y.abs().max()
            elif kind == "many rows" and x.dtype == torch.bfloat16:
                y[19, 7] += 2e-2 * y.abs().max()
            elif kind in ("nan", "infinity"):
                y[1, 7] = float("nan") if kind == "nan" else float("-inf")
            return y

        monkeypatch.setattr(pp, "linear", wrong_linear)
    elif kind == "values":

        def wrong_values(self: pp.PackedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            values = dequantize(self, dtype)
            values[3, 5] = values[3, 5] * 2 + 1
            return values

        monkeypatch.setattr(pp.PackedWeight, "dequantize", wrong_values)
    else:

        def wrong_bytes(self: pp.PackedWeight) -> Any:
            found = unpack(self)
            (found.weight if kind == "codes" else found.weight_scale.view(torch.uint8))[3, 5] ^= 1
            return found

        monkeypatch.setattr(pp.PackedWeight, "unpack", wrong_bytes)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("product", "float32, 3 rows of x: a product is"),
        ("many rows", "bfloat16, 20 rows of x: a product is"),
        ("nan", "a product is nan"),
        ("infinity", "a product is -inf"),
        ("values", "dequantizes to other values"),
        ("codes", "does not give the checkpoint's tensors back"),
        ("scales", "does not give the checkpoint's tensors back"),
    ],
)
@pytest.mark.parametrize("name", ["llama-mxfp4", "llama-w4a16-nvfp4"])
def test_a_mismatch_is_found(kind: str, text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, kind)
    result = petit("verify", MODELOPT / name)
    assert result.code == 1 and text in result.err
    assert "0 FP4 matrices verified, 14 problems" in result.out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_overflow_must_be_the_right_infinity(dtype: torch.dtype) -> None:
    x, w = torch.ones(1, 2, dtype=torch.float64), torch.full((3, 2), 3e38, dtype=torch.float64)
    w[1] = -w[1]
    w[2, 1] = 0
    good = torch.tensor([[float("inf"), float("-inf"), 3e38]]).to(dtype)
    assert verify.product_problem(x, good, w, 4e-6) is None
    largest = torch.finfo(dtype).max
    for column, value in ((0, float("-inf")), (0, largest), (1, float("nan")), (2, float("inf")), (1, 0.0)):
        bad = good.clone()
        bad[0, column] = value
        assert verify.product_problem(x, bad, w, 4e-6) is not None, (column, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bound_on_products(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Rounding to nearest passes, the second next number does not (K = 1: there is nothing to accumulate)."""
    x, w = torch.from_numpy(rng.standard_normal((5, 1))), torch.from_numpy(rng.standard_normal((7, 1)))
    y = (x @ w.T).to(dtype)
    assert verify.product_problem(x, y, w, 0.0) is None
    bits = y.clone().view({torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype])
    bits[2, 3] += 2
    assert verify.product_problem(x, bits.view(dtype), w, 0.0) is not None
