"""`petit inspect`: snapshots of the fixtures, and the right sentence for every kind of damage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import layouts
from cli.runner import EXPORTS, FIXTURES, MODELOPT, OTHERS, petit
from fixtures import tiny_models

from petit_cli import machine
from petit_cli.output import collapse

SNAPSHOTS = Path(__file__).parent / "snapshots"
DOWN = "model.layers.1.mlp.down_proj"
EXPERT = "model.layers.1.mlp.experts.5.down_proj"


def check_snapshot(name: str, text: str) -> None:
    """Compare with the committed file; PETIT_UPDATE_SNAPSHOTS=1 rewrites it."""
    file = SNAPSHOTS / name
    if os.environ.get("PETIT_UPDATE_SNAPSHOTS"):
        SNAPSHOTS.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), f"{file.name} differs"


@pytest.fixture
def same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_kernel", lambda: ("avx2", ""))


@pytest.mark.parametrize("name", FIXTURES + OTHERS)
@pytest.mark.usefixtures("same_machine")
def test_snapshots(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MODELOPT if name in FIXTURES else EXPORTS)
    text = petit("inspect", name)
    assert text.code == 0 and text.err == ""
    check_snapshot(f"{name}.txt", text.out)
    found = petit("inspect", name, "--json")
    assert found.code == 0 and found.err == ""
    check_snapshot(f"{name}.json", found.out)


@pytest.mark.parametrize("name", FIXTURES)
def test_numbers_against_the_tensors(name: str) -> None:
    from safetensors.torch import load_file

    tensors = load_file(MODELOPT / name / "model.safetensors")
    found = json.loads(petit("inspect", MODELOPT / name, "--json").out)
    codes = {
        n.removesuffix(".weight"): t for n, t in tensors.items() if t.dtype == torch.uint8 and n.endswith(".weight")
    }
    assert {layer["name"]: (layer["n"], layer["k"]) for layer in found["layers"]} == {
        n: (t.shape[0], 2 * t.shape[1]) for n, t in codes.items()
    }
    numbers = found["summary"]
    assert numbers["fp4_parameters"] == sum(2 * t.numel() for t in codes.values())
    assert numbers["total_bytes"] == sum(t.nbytes for t in tensors.values())
    dense = sum(4 * t.numel() for t in codes.values())
    rest = [n for n in tensors if n.removesuffix(".weight") not in codes and not _belongs_to_fp4(n, codes)]
    assert numbers["bf16_bytes"] == dense + sum(tensors[n].nbytes for n in rest)


def _belongs_to_fp4(name: str, codes: dict[str, torch.Tensor]) -> bool:
    return name.rpartition(".")[0] in codes and name.rpartition(".")[2] in ("weight_scale", "weight_scale_2")


def test_a_pipe_gets_whole_names(tmp_path: Path) -> None:
    result = petit("inspect", MODELOPT / "qwen3-moe-nvfp4")
    assert "model.layers.{0-1}.mlp.experts.{0-7}.down_proj" in result.out
    assert "\x1b[" not in result.out


def test_other_layouts_are_explained(tmp_path: Path) -> None:
    mxfp4, nvfp4 = layouts.random_experts("mxfp4", 1), layouts.random_experts("nvfp4", 1)
    for path in (
        layouts.blocks(tmp_path / "gpt-oss", mxfp4),
        layouts.packed(tmp_path / "ct", "nvfp4", nvfp4),
        layouts.deepseek(tmp_path / "ds", mxfp4),
        layouts.fused_bank(tmp_path / "bank", nvfp4, transposed=True, scalar=True),
    ):
        found = petit("inspect", path, "--json")
        assert found.code == 0, found.err
        report = json.loads(found.out)
        assert not report["vllm"]["ok"] and report["vllm"]["not_yet"]
        assert report["ok"] and report["summary"]["fp4_parameters"] == 3 * 3 * 64 * 96
    assert json.loads(petit("inspect", tmp_path / "ds", "--json").out)["foreign"] == [
        {"name": "layers.0.attn.wq", "algo": "FP8_BLOCK_SCALES"}
    ]
    assert "Left to the framework (FP8_BLOCK_SCALES): layers.0.attn.wq" in petit("inspect", tmp_path / "ds").out


def test_router_that_no_list_names_is_pointed_out(tmp_path: Path) -> None:
    tiny = tiny_models.build(tmp_path / "m", "llama")

    def to_bf16(tensors: layouts.Tensors) -> None:
        weight = tensors[f"{DOWN}.weight"]
        for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            del tensors[f"{DOWN}.{suffix}"]
        tensors[f"{DOWN}.weight"] = torch.zeros(weight.shape[0], 2 * weight.shape[1], dtype=torch.bfloat16)

    result = petit("inspect", layouts.edited(tiny.path, tmp_path / "e", to_bf16))
    assert result.code == 0
    assert f"Not quantized although the config does not exclude it: {DOWN}" in result.out


# ---- damage


def _nan(module: str) -> Callable[[layouts.Tensors], object]:
    def edit(tensors: layouts.Tensors) -> None:
        scale = tensors[f"{module}.weight_scale"]
        scale.view(torch.uint8)[2, 1] = 0x7F if scale.dtype == torch.float8_e4m3fn else 255
        tensors[f"{module}.weight"][2].fill_(0x33)

    return edit


def test_damage_to_other_dialects(tmp_path: Path) -> None:
    """The same for Quark and compressed-tensors exports, whose tensors have other names."""
    module = "model.layers.1.mlp.down_proj"
    for name in OTHERS:
        if "moe" in name:
            continue
        source = EXPORTS / name
        weight = f"{module}.weight" + ("_packed" if name.startswith("compressed") else "")

        def short(t: layouts.Tensors, weight: str = weight) -> None:
            t[weight] = t[weight][:-2]

        def nan(t: layouts.Tensors, weight: str = weight) -> None:
            scale = t[f"{module}.weight_scale"]
            scale.view(torch.uint8)[2, 1] = 0x7F if scale.dtype == torch.float8_e4m3fn else 255
            t[weight][2].fill_(0x33)

        for what, edit, text in (
            ("missing", lambda t: t.pop(f"{module}.weight_scale"), f"tensor {module}.weight_scale is missing"),
            ("shape", short, "do not fit together"),
            ("nan", nan, f"layer {module}: {module}.weight_scale is NaN at row 2, block 1"),
        ):
            result = petit("inspect", layouts.edited(source, tmp_path / f"{name}-{what}", edit))
            assert result.code == 1 and text in result.err, (name, what, result.err)
        assert petit("inspect", layouts.truncated(source, tmp_path / f"{name}-truncated", 4000)).code == 1


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_damage(name: str, command: str, tmp_path: Path) -> None:
    """Missing scale, wrong shape, wrong dtype, NaN scale, unknown algo, truncated file: exit code 1, and a sentence."""
    source = MODELOPT / name
    module = EXPERT if "moe" in name else DOWN
    edits: dict[str, tuple[Callable[[layouts.Tensors], object], str]] = {
        "missing": (lambda t: t.pop(f"{module}.weight_scale"), f"tensor {module}.weight_scale is missing"),
        "shape": (lambda t: t.update({f"{module}.weight": t[f"{module}.weight"][:-2]}), "do not fit together"),
        "dtype": (
            lambda t: t.update({f"{module}.weight": t[f"{module}.weight"].int()}),
            f"{module}.weight has dtype I32",
        ),
        "nan": (_nan(module), f"layer {module}: {module}.weight_scale is NaN at row 2, block 1"),
    }
    broken = {what: (layouts.edited(source, tmp_path / what, edit), text) for what, (edit, text) in edits.items()}
    algo = layouts.with_config(source, tmp_path / "algo", quant_algo="NVFP7")
    svd = layouts.with_config(source, tmp_path / "svd", quant_algo="NVFP4_SVD")
    broken["algo"] = (algo, "unknown quant_algo 'NVFP7'")
    broken["svd"] = (svd, "NVFP4_SVD cannot be served")
    broken["truncated"] = (layouts.truncated(source, tmp_path / "truncated", 4000), "model.safetensors: truncated")
    for what, (path, text) in broken.items():
        result = petit(command, path)
        assert result.code == 1, what
        assert text in result.err, (what, result.err)
        assert "Traceback" not in result.err
        found = petit(command, path, "--json")
        report = json.loads(found.out)
        assert found.code == 1 and report["ok"] is False and any(text in p for p in report["problems"]), what


def test_quick_reads_no_data(tmp_path: Path) -> None:
    path = layouts.edited(MODELOPT / "llama-mxfp4", tmp_path / "m", _nan(DOWN))
    assert petit("inspect", path).code == 1
    assert petit("inspect", path, "--quick").code == 0


def test_collapse() -> None:
    names = [f"model.layers.{i}.mlp.experts.{e}.w1" for i in (0, 1, 2, 5) for e in (0, 1)] + [
        "lm_head",
        "bank[0]",
        "bank[1]",
    ]
    labels = [label for label, _ in collapse(names)]
    assert labels == ["model.layers.{0-2,5}.mlp.experts.{0-1}.w1", "lm_head", "bank[{0-1}]"]
    by_layer = [label for label, _ in collapse(names[:4], expert_only=True)]
    assert by_layer == ["model.layers.{}.mlp.experts.{}.w1".format(i, "{0-1}") for i in (0, 1)]
