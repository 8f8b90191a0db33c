"""`petit verify` passes good checkpoints of every dialect and catches a wrong kernel, layout or packer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import layouts
from cli.runner import FIXTURES, MODELOPT, petit

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
    if kind == "product":

        def wrong_linear(x: torch.Tensor, w: Any, *rest: Any) -> torch.Tensor:
            y = linear(x, w, *rest)
            y[1, 7] += 1e-3 * y.abs().max()
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
        ("product", "further from float64"),
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
