"""Checkpoint directories: every layout gives the same matrices, and every kind of damage is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import layouts
from fixtures import tiny_models

from petit_plugin.checkpoints import BrokenCheckpointError, NotFp4CheckpointError, QuantSpec, UnsupportedCheckpointError
from petit_plugin.checkpoints.checkpoint import Checkpoint
from petit_plugin.checkpoints.data_checks import scale_problems

MODELOPT = Path(__file__).parents[1] / "fixtures" / "modelopt"
FIXTURES = sorted(p.name for p in MODELOPT.iterdir() if p.is_dir())
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def matrices(path: Path) -> dict[str, Any]:
    checkpoint = Checkpoint(path)
    checkpoint.check()
    return {m.name: m for layer in checkpoint.layers for m in checkpoint.matrices(layer)}


def assert_equal(matrix: Any, codes: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor | None) -> None:
    assert torch.equal(matrix.weight, codes)
    assert torch.equal(matrix.weight_scale.view(torch.uint8), scales.view(torch.uint8))
    assert (matrix.global_scale is None) == (factor is None)
    if factor is not None:
        assert matrix.global_scale.dtype == torch.float32 and matrix.global_scale.dim() == 0
        assert float(matrix.global_scale) == float(factor)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("order", ["{e}.{leaf}", "{leaf}.{e}"])
def test_both_orders_of_expert_names(fmt: str, order: str, tmp_path: Path, rng: np.random.Generator) -> None:
    weights = layouts.random_experts(fmt, int(rng.integers(2**31)))
    found = matrices(layouts.per_expert(tmp_path / "m", fmt, weights, order))
    assert len(found) == len(weights)
    for name, expected in weights.items():
        e, leaf = name.split(".")
        assert_equal(found[f"model.layers.0.mlp.experts.{order.format(e=e, leaf=leaf)}"], *expected)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_compressed_tensors_divisors_are_inverted_once(fmt: str, tmp_path: Path, rng: np.random.Generator) -> None:
    weights = layouts.random_experts(fmt, int(rng.integers(2**31)))
    if fmt == "nvfp4":  # powers of two survive the inversion bit for bit
        weights = {n: (c, s, torch.tensor(2.0**-i)) for i, (n, (c, s, _)) in enumerate(weights.items())}
    found = matrices(layouts.packed(tmp_path / "m", fmt, weights))
    for name, expected in weights.items():
        assert_equal(found[f"model.layers.0.mlp.experts.{name}"], *expected)


def test_one_layer_in_both_nvfp4_conventions(tmp_path: Path) -> None:
    weights = layouts.random_experts("nvfp4", 1)
    weights = {n: (c, s, torch.tensor(1.0) / 3584) for n, (c, s, _) in weights.items()}
    divisor = layouts.edited(
        layouts.packed(tmp_path / "ct", "nvfp4", weights),
        tmp_path / "ct2",
        lambda t: t.update({k: torch.tensor([3584.0]) for k in t if k.endswith("global_scale")}),
    )
    a, b = matrices(layouts.per_expert(tmp_path / "mo", "nvfp4", weights)), matrices(divisor)
    assert a.keys() == b.keys() and all(torch.equal(a[n].global_scale, b[n].global_scale) for n in a)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("scalar", [True, False])
def test_fused_nvfp4_banks(transposed: bool, scalar: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    weights = layouts.random_experts("nvfp4", int(rng.integers(2**31)))
    found = matrices(layouts.fused_bank(tmp_path / "m", weights, transposed, scalar))
    assert len(found) == 2 * layouts.EXPERTS
    for e in range(layouts.EXPERTS):
        for bank, leaves in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            codes, scales = (torch.cat([weights[f"{e}.{leaf}"][i] for leaf in leaves]) for i in (0, 1))
            factor = weights[f"{0 if scalar else e}.{leaves[0]}"][2]
            assert_equal(found[f"model.layers.0.mlp.experts.{bank}[{e}]"], codes, scales, factor)


def test_gpt_oss_blocks_keep_interleaved_rows(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = layouts.random_experts("mxfp4", int(rng.integers(2**31)))
    found = matrices(layouts.blocks(tmp_path / "m", weights))
    for e in range(layouts.EXPERTS):
        fused = found[f"model.layers.0.mlp.experts.gate_up_proj[{e}]"]
        for row, leaf in ((0, "gate_proj"), (1, "up_proj")):
            assert torch.equal(fused.weight[row::2], weights[f"{e}.{leaf}"][0])
            assert torch.equal(fused.weight_scale[row::2], weights[f"{e}.{leaf}"][1])
        assert_equal(found[f"model.layers.0.mlp.experts.down_proj[{e}]"], *weights[f"{e}.down_proj"])


def test_deepseek_v4_experts(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = layouts.random_experts("mxfp4", int(rng.integers(2**31)))
    path = layouts.deepseek(tmp_path / "m", weights)
    found = matrices(path)
    assert len(found) == 3 * layouts.EXPERTS
    for leaf, name in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        assert_equal(found[f"layers.0.ffn.experts.2.{name}"], *weights[f"2.{leaf}"])
    checkpoint = Checkpoint(path)
    assert set(checkpoint.foreign) == {"layers.0.attn.wq"} and not checkpoint.problems


@pytest.mark.parametrize("name", FIXTURES)
def test_modelopt_exports(name: str, tmp_path: Path) -> None:
    """Either JSON file alone, or both, give one spec; every layer is complete."""
    both = Checkpoint(MODELOPT / name)
    both.check()
    assert not any(scale_problems(both, layer) for layer in both.layers)
    assert both.spec.formats == {"mxfp4" if "mxfp4" in name else "nvfp4"}
    assert both.spec.kv_cache == ("fp8" if "kvfp8" in name else None)
    for keep in ("config.json", "hf_quant_config.json"):
        copy = tmp_path / keep
        shutil.copytree(MODELOPT / name, copy)
        if keep == "config.json":
            (copy / "hf_quant_config.json").unlink()
        else:
            config = json.loads((copy / "config.json").read_text())
            del config["quantization_config"]
            (copy / "config.json").write_text(json.dumps(config))
        assert QuantSpec.from_checkpoint(copy) == both.spec
    assert both.spec.layer_format("lm_head") is None
    assert both.spec.layer_format("model.layers.0.self_attn.qkv_proj", PACKED) is not None
    if "moe" in name:
        assert both.spec.layer_format("model.layers.1.mlp.experts") is not None
        assert both.spec.layer_format("model.layers.1.mlp.gate") is None


def test_layers_without_input_scales_are_complete() -> None:
    checkpoint = Checkpoint(MODELOPT / "llama-w4a16-nvfp4")
    assert checkpoint.layers and not any("input" in e.name for layer in checkpoint.layers for e in layer.extras)


# ---- headers against the configuration


def test_what_is_stored_in_bf16_is_not_quantized(tmp_path: Path) -> None:
    tiny = tiny_models.build(tmp_path / "m", "qwen3_moe", list_router=False)
    spec = QuantSpec.from_checkpoint(tiny.path)
    assert spec.layer_format("model.layers.0.mlp.gate") is None
    assert spec.layer_format("model.layers.0.mlp.experts") is not None

    # A linear and a bank that no list mentions: config alone says FP4, the headers know better.
    def to_bf16(tensors: layouts.Tensors) -> None:
        for name in [n for n in tensors if "layers.1.mlp.experts" in n or "layers.1.self_attn.o_proj" in n]:
            tensor = tensors.pop(name)
            if name.endswith(".weight"):
                tensors[name] = torch.zeros(tensor.shape[0], 2 * tensor.shape[1], dtype=torch.bfloat16)

    mixed = Checkpoint(layouts.edited(tiny.path, tmp_path / "mixed", to_bf16))
    mixed.check()
    assert mixed.spec.layer_format("model.layers.1.mlp.experts") is None
    assert mixed.spec.layer_format("model.layers.1.self_attn.o_proj") is None
    assert mixed.spec.layer_format("model.layers.0.mlp.experts") is not None
    config_only = QuantSpec.from_config(tiny.config["quantization_config"])
    assert config_only.layer_format("model.layers.1.self_attn.o_proj") is not None
    assert config_only.with_checkpoint(mixed.path).layer_format("model.layers.1.self_attn.o_proj") is None
    mapped = mixed.spec.map_names(lambda names: [f"language_model.{n}" for n in names])
    assert mapped.layer_format("language_model.model.layers.1.self_attn.o_proj") is None
    assert mapped.layer_format("language_model.model.layers.0.self_attn.o_proj") is not None


def test_a_router_that_really_is_fp4_stays_fp4(tmp_path: Path) -> None:
    tiny = tiny_models.build(tmp_path / "m", "llama")

    def rename(tensors: layouts.Tensors) -> None:
        for name in [n for n in tensors if "layers.0.mlp.up_proj" in n]:
            tensors[name.replace("up_proj", "router")] = tensors.pop(name)

    spec = QuantSpec.from_checkpoint(layouts.edited(tiny.path, tmp_path / "router", rename))
    assert spec.layer_format("model.layers.0.mlp.router") is not None


def test_tied_head_is_not_quantized(tmp_path: Path) -> None:
    tiny = tiny_models.build(tmp_path / "m", "llama", exclude=["lm_head"])
    path = layouts.edited(tiny.path, tmp_path / "tied", lambda t: t.pop("lm_head.weight"))
    assert (
        QuantSpec.from_checkpoint(layouts.with_config(path, tmp_path / "t2", ignore=[])).layer_format("lm_head") is None
    )


def test_bank_with_some_experts_in_bf16_is_refused(tmp_path: Path) -> None:
    weights = layouts.random_experts("mxfp4", 3)
    name = "model.layers.0.mlp.experts.1.down_proj"

    def to_bf16(tensors: layouts.Tensors) -> None:
        del tensors[f"{name}.weight_scale"]
        tensors[f"{name}.weight"] = torch.zeros(layouts.HIDDEN, layouts.INTERMEDIATE, dtype=torch.bfloat16)

    checkpoint = Checkpoint(
        layouts.edited(layouts.per_expert(tmp_path / "m", "mxfp4", weights), tmp_path / "b", to_bf16)
    )
    with pytest.raises(UnsupportedCheckpointError, match="some experts are stored as FP4 and others are not"):
        checkpoint.check()
    with pytest.raises(UnsupportedCheckpointError, match=r"model\.layers\.0\.mlp\.experts"):
        checkpoint.spec.layer_format("model.layers.0.mlp.experts")


# ---- damage

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


_BANK_MEMORY = """
import sys
from pathlib import Path
from petit_plugin.checkpoints.checkpoint import Checkpoint

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

checkpoint = Checkpoint(sys.argv[1])
matrices = checkpoint.matrices(checkpoint.layers[0])
next(matrices)
before = peak = anonymous()
for matrix in matrices:
    matrix.weight.max(), matrix.weight_scale.max()
    peak = max(peak, anonymous())
print(peak - before)
"""


def test_a_bank_is_read_one_expert_at_a_time(tmp_path: Path) -> None:
    """48 experts of 1.5 MB: iterating holds a few of them, not the 72 MB bank."""
    experts, n, k = 48, 1024, 3072
    path = tmp_path / "m"
    path.mkdir()
    base = "model.layers.0.mlp.experts.down_proj"
    tensors = {
        f"{base}_blocks": torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8),
        f"{base}_scales": torch.full((experts, n, k // 32), 120, dtype=torch.uint8),
    }
    from safetensors.torch import save_file

    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    run = subprocess.run([sys.executable, "-c", _BANK_MEMORY, str(path)], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 12_000, f"{run.stdout} kB of anonymous memory for a bank of 72 MB"
