"""Every kind of damage to a checkpoint directory is found before anything is loaded, and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import layouts

from petit_plugin.checkpoints import BrokenCheckpointError, NotFp4CheckpointError
from petit_plugin.checkpoints.checkpoint import Checkpoint
from petit_plugin.checkpoints.data_checks import scale_problems

MODELOPT = Path(__file__).parents[1] / "fixtures" / "modelopt"
DOWN = "model.layers.1.mlp.down_proj"


def _set(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[layouts.Tensors], None]:
    return lambda tensors: tensors.update({name: make(tensors[name])})


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda t: t.pop(f"{DOWN}.weight_scale"), rf"layer {DOWN}: tensor {DOWN}\.weight_scale is missing"),
        (lambda t: t.pop(f"{DOWN}.weight_scale_2"), rf"tensor {DOWN}\.weight_scale_2 is missing"),
        (lambda t: t.pop(f"{DOWN}.weight"), rf"tensor {DOWN}\.weight is missing"),
        (_set(f"{DOWN}.weight", lambda w: w[:, :-8]), r"\[N, K/2\] codes and \[N, K/16\] scales"),
        (_set(f"{DOWN}.weight_scale", lambda s: s[:-1]), "do not fit together"),
        (_set(f"{DOWN}.weight", lambda w: w.view(torch.int8)), rf"{DOWN}\.weight has dtype I8"),
        (_set(f"{DOWN}.weight", lambda w: w.to(torch.bfloat16)), rf"{DOWN}\.weight has dtype BF16"),
        (_set(f"{DOWN}.weight", lambda w: w.to(torch.float8_e4m3fn)), rf"{DOWN}\.weight is F8_E4M3"),
        (_set(f"{DOWN}.weight_scale", lambda s: s.float()), rf"{DOWN}\.weight_scale has dtype F32"),
        (_set(f"{DOWN}.weight_scale_2", lambda s: s.repeat(3)), "expected one float32 value"),
        (_set(f"{DOWN}.weight_scale_2", lambda s: s.to(torch.float64)), "F64"),
    ],
)
def test_broken_layers_are_named(edit: Callable[[layouts.Tensors], object], text: str, tmp_path: Path) -> None:
    path = layouts.edited(MODELOPT / "llama-nvfp4-kvfp8", tmp_path / "broken", edit)
    with pytest.raises(BrokenCheckpointError, match=text):
        Checkpoint(path).check()


def test_fp4_layer_that_the_config_excludes(tmp_path: Path) -> None:
    path = layouts.with_config(MODELOPT / "llama-mxfp4", tmp_path / "m", ignore=["lm_head", "*.o_proj"])
    with pytest.raises(BrokenCheckpointError, match=r"self_attn\.o_proj is stored as FP4, but .* excludes it.*1 more"):
        Checkpoint(path).check()


@pytest.mark.parametrize(
    ("fmt", "byte", "zero_block", "found"),
    [
        ("nvfp4", 0x7F, False, True),
        ("nvfp4", 0xFF, False, True),
        ("mxfp4", 255, False, True),
        ("nvfp4", 0x7F, True, False),
        ("mxfp4", 255, True, False),
        ("mxfp4", 0x7F, False, False),
    ],
)
def test_nan_scales(fmt: str, byte: int, zero_block: bool, found: bool, tmp_path: Path) -> None:
    source = MODELOPT / {"nvfp4": "llama-w4a16-nvfp4", "mxfp4": "llama-mxfp4"}[fmt]
    half = {"nvfp4": 8, "mxfp4": 16}[fmt]

    def edit(tensors: layouts.Tensors) -> None:
        tensors[f"{DOWN}.weight_scale"].view(torch.uint8)[5, 3] = byte
        block = tensors[f"{DOWN}.weight"][5, 3 * half : 4 * half]
        block.copy_(torch.full((half,), 0x88 if zero_block else 0x21, dtype=torch.uint8))

    checkpoint = Checkpoint(layouts.edited(source, tmp_path / "m", edit))
    problems = [p for layer in checkpoint.layers for p in scale_problems(checkpoint, layer)]
    assert len(problems) == found
    if found:
        assert f"{DOWN}.weight_scale is NaN at row 5, block 3" in problems[0]


def test_infinite_global_scale_is_named_and_infinite_input_scale_is_not(tmp_path: Path) -> None:
    def edit(tensors: layouts.Tensors) -> None:
        tensors[f"{DOWN}.weight_scale_2"].fill_(float("inf"))
        tensors[f"{DOWN}.input_scale"].fill_(float("inf"))

    checkpoint = Checkpoint(layouts.edited(MODELOPT / "llama-nvfp4-kvfp8", tmp_path / "m", edit))
    problems = [p for layer in checkpoint.layers for p in scale_problems(checkpoint, layer)]
    assert len(problems) == 1 and "weight_scale_2 gives a global scale of inf" in problems[0]


def _damage_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def _entry(**keys: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[f"{DOWN}.weight"].update(keys)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_entry(dtype="BF16"), "needs .* bytes, it has"),
        (_entry(shape=[1, 2]), "needs 2 bytes"),
        (_entry(dtype="U3"), "unknown dtype U3"),
        (_entry(shape=[-1, 2]), "needs"),
        (lambda h: h[f"{DOWN}.weight"].pop("shape"), "malformed header entry"),
        (lambda h: h.pop(f"{DOWN}.weight"), "leaves a gap"),
    ],
)
def test_headers_are_validated(change: Callable[[dict[str, Any]], None], text: str, tmp_path: Path) -> None:
    shutil.copytree(MODELOPT / "llama-mxfp4", tmp_path / "m")
    _damage_header(tmp_path / "m" / "model.safetensors", change)
    with pytest.raises(BrokenCheckpointError, match=text):
        Checkpoint(tmp_path / "m")


@pytest.mark.parametrize(
    ("missing", "text"), [(1, "truncated"), (100_000, "truncated"), (10**9, "not a complete safetensors file")]
)
def test_truncated_file(missing: int, text: str, tmp_path: Path) -> None:
    with pytest.raises(BrokenCheckpointError, match=rf"model\.safetensors: {text}"):
        Checkpoint(layouts.truncated(MODELOPT / "llama-mxfp4", tmp_path / "m", missing))


def test_shards_and_index(tmp_path: Path) -> None:
    path = tmp_path / "m"
    shutil.copytree(MODELOPT / "llama-mxfp4", path)
    whole = Checkpoint(path)
    names = sorted(whole.tensors)
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [layer.name for layer in Checkpoint(path).layers] == [layer.name for layer in whole.layers]
    index["weight_map"][names[0]] = "model-00002-of-00002.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BrokenCheckpointError, match=r"model-00002-of-00002\.safetensors: file is missing"):
        Checkpoint(path)
    index["weight_map"] = {
        **dict.fromkeys(names, "model-00001-of-00002.safetensors"),
        "ghost": "model-00001-of-00002.safetensors",
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BrokenCheckpointError, match="places tensor ghost"):
        Checkpoint(path)
    index["weight_map"] = {"a": "../elsewhere.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BrokenCheckpointError, match="not a file name of this directory"):
        Checkpoint(path)


def test_the_two_json_files_must_agree(tmp_path: Path) -> None:
    shutil.copytree(MODELOPT / "llama-mxfp4", tmp_path / "m")
    shutil.copy(MODELOPT / "llama-w4a16-nvfp4" / "hf_quant_config.json", tmp_path / "m")
    with pytest.raises(BrokenCheckpointError, match=r"config\.json says mxfp4, hf_quant_config\.json says nvfp4"):
        Checkpoint(tmp_path / "m")


def test_directories_that_are_no_fp4_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(BrokenCheckpointError, match="not a directory"):
        Checkpoint(tmp_path / "absent")
    with pytest.raises(BrokenCheckpointError, match=r"config\.json: file is missing"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BrokenCheckpointError, match="not valid JSON"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotFp4CheckpointError, match="not a quantized checkpoint"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(BrokenCheckpointError, match=r"no \.safetensors file"):
        Checkpoint(tmp_path)
