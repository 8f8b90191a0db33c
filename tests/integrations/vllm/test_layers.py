"""The plugin's methods in vLLM's own layers, without an engine: loading, exactness, and what must be an error."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fixtures import oracle
from petit_vllm.config import PetitConfig

from petit_plugin.formats import quantize_mxfp4, quantize_nvfp4

pytestmark = pytest.mark.usefixtures("single_rank")

K, HEADS, KV_HEADS, HEAD = 288, 4, 2, 32
SHARDS = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
UNIT = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-25}  # half a unit in the last place


def config(fmt: str, ignore: tuple[str, ...] = ()) -> PetitConfig:
    body = {"quant_method": "modelopt", "quant_algo": fmt.upper(), "ignore": list(ignore)}
    result = PetitConfig.from_config(body)
    result.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    return result


def quantized(rng: np.random.Generator, fmt: str, n: int, k: int, size: float) -> tuple[dict[str, Any], np.ndarray]:
    """Checkpoint tensors of one matrix and their exact float64 value."""
    w = torch.from_numpy(rng.standard_normal((n, k)) * size).to(torch.bfloat16)
    if fmt == "mxfp4":
        codes, scale = quantize_mxfp4(w)
        value = oracle.dequantize_mxfp4(codes.numpy(), scale.view(torch.uint8).numpy())
        return {"weight": codes, "weight_scale": scale}, value
    codes, scale, scale_2 = quantize_nvfp4(w)
    value = oracle.dequantize_nvfp4(codes.numpy(), scale.view(torch.uint8).numpy(), float(scale_2))
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": scale_2}, value


def load(layer: torch.nn.Module, tensors: dict[str, Any], *shard: Any) -> None:
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor, *shard)


def qkv(fmt: str, bias: bool = False) -> torch.nn.Module:
    from vllm.model_executor.layers.linear import QKVParallelLinear

    return QKVParallelLinear(K, HEAD, HEADS, KV_HEADS, bias=bias, quant_config=config(fmt), prefix="model.qkv_proj")


def assert_exact(y: torch.Tensor, x: torch.Tensor, w: np.ndarray, bias: np.ndarray | None = None) -> None:
    """Every element within half a unit in the last place plus the allowance for float32 accumulation."""
    x64 = x.double().numpy()
    want = x64 @ w.T + (0 if bias is None else bias)
    slack = np.abs(x64) @ np.abs(w).T * (4e-6 if y.dtype == torch.float32 else 2e-6)
    error = np.abs(y.double().numpy() - want)
    assert (error <= np.abs(want) * 2 * UNIT[y.dtype] + slack).all(), f"largest error {error.max()}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_qkv_with_different_global_scales(rng: np.random.Generator, fmt: str, dtype: torch.dtype) -> None:
    layer, values = qkv(fmt, bias=True), []
    for (shard, n), size in zip(SHARDS.items(), (1.0, 0.02, 300.0), strict=True):
        tensors, value = quantized(rng, fmt, n, K, size)
        load(layer, tensors, shard)
        values.append(value)
    if fmt == "nvfp4":
        assert layer.weight_scale_2.dtype == torch.float32, "the default dtype is bfloat16 here; scales would lose bits"
        assert len(set(layer.weight_scale_2.tolist())) == 3
    bias = rng.standard_normal(sum(SHARDS.values())).astype(np.float32)
    layer.bias.data = torch.from_numpy(bias).to(dtype)
    layer.quant_method.process_weights_after_loading(layer)
    w = np.concatenate(values)
    for shape in ((1, K), (5, K), (0, K), (2, 3, K)):
        x = torch.from_numpy(rng.standard_normal(shape)).to(dtype)
        y = layer.quant_method.apply(layer, x, layer.bias)
        assert y.shape == (*shape[:-1], w.shape[0])
        assert y.dtype == dtype
        assert_exact(y, x, w, layer.bias.double().numpy())
    # What MLA does to read weights back, and the reference it is compared with.
    eye = torch.eye(K, dtype=torch.float32)
    assert torch.equal(layer.quant_method.apply(layer, eye).T, layer.quant_method.dequantize_weight(layer))
    np.testing.assert_allclose(layer.quant_method.dequantize_weight(layer).numpy(), w, rtol=2.0**-23)


def test_every_kind_of_linear(rng: np.random.Generator) -> None:
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    common = {"bias": False, "quant_config": config("nvfp4")}
    x = torch.from_numpy(rng.standard_normal((3, K))).to(torch.bfloat16)
    for kind in (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear):
        layer = kind(K, 80, prefix=f"model.{kind.__name__}", **common)
        tensors, w = quantized(rng, "nvfp4", 80, K, 0.3)
        load(layer, tensors | {"input_scale": torch.tensor(torch.inf)})  # never used, so Inf does no harm
        layer.quant_method.process_weights_after_loading(layer)
        assert_exact(layer(x)[0], x, w)
    layer = MergedColumnParallelLinear(K, [48, 96], prefix="model.gate_up_proj", **common)
    values = []
    for shard, n in enumerate((48, 96)):
        tensors, value = quantized(rng, "nvfp4", n, K, 0.1 + shard)
        load(layer, tensors, shard)
        values.append(value)
    layer.quant_method.process_weights_after_loading(layer)
    assert_exact(layer(x)[0], x, np.concatenate(values))
    head = ParallelLMHead(100, K, quant_config=config("nvfp4"), prefix="lm_head")  # padded to 128 rows
    tensors, w = quantized(rng, "nvfp4", 100, K, 0.3)
    load(head, tensors)
    head.quant_method.process_weights_after_loading(head)
    y = head.quant_method.apply(head, x)
    assert_exact(y[:, :100], x, w)
    assert (y[:, 100:] == 0).all()


def test_fused_on_disk(rng: np.random.Generator) -> None:
    """One tensor and one global scale for q, k and v together (Phi-3 has such checkpoints)."""
    layer = qkv("nvfp4")
    tensors, w = quantized(rng, "nvfp4", sum(SHARDS.values()), K, 1.0)
    load(layer, tensors)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.from_numpy(rng.standard_normal((2, K))).float()
    assert_exact(layer.quant_method.apply(layer, x), x, w)


@pytest.mark.parametrize("parameter", ["weight", "weight_scale", "weight_scale_2"])
@pytest.mark.parametrize("shard", ["q", "v"])
def test_missing_shard_is_named(rng: np.random.Generator, shard: str, parameter: str) -> None:
    layer = qkv("nvfp4")
    for name, n in SHARDS.items():
        tensors, _ = quantized(rng, "nvfp4", n, K, 1.0)
        if name == shard:
            del tensors[parameter]
        load(layer, tensors, name)
    with pytest.raises(ValueError, match=rf"layer model\.qkv_proj: parameter {parameter} .*missing") as caught:
        layer.quant_method.process_weights_after_loading(layer)
    if parameter != "weight":
        assert f"{shard}_proj" in str(caught.value)


def test_16_bit_weights_are_not_cast_to_codes(rng: np.random.Generator) -> None:
    layer = qkv("nvfp4")
    with pytest.raises(ValueError, match=r"model\.qkv_proj: parameter weight \(shard q\) is bfloat16.*exclude_modules"):
        load(layer, {"weight": torch.zeros(SHARDS["q"], K // 2, dtype=torch.bfloat16)}, "q")
    with pytest.raises(ValueError, match=r"parameter weight_scale \(shard q\) is uint8"):
        load(layer, {"weight_scale": torch.zeros(SHARDS["q"], K // 16, dtype=torch.uint8)}, "q")
    with pytest.raises(ValueError, match=r"parameter weight_scale \(shard k\) is float8_e4m3fn"):
        load(qkv("mxfp4"), {"weight_scale": torch.zeros(SHARDS["k"], K // 32).to(torch.float8_e4m3fn)}, "k")


def test_nan_block_scale_names_the_layer(rng: np.random.Generator) -> None:
    layer = qkv("nvfp4")
    for name, n in SHARDS.items():
        tensors, _ = quantized(rng, "nvfp4", n, K, 1.0)
        tensors["weight_scale"].view(torch.uint8)[1, 2] = 0x7F
        load(layer, tensors, name)
    with pytest.raises(ValueError, match=r"model\.qkv_proj.*NaN"):
        layer.quant_method.process_weights_after_loading(layer)


def loaded(rng: np.random.Generator, fmt: str = "nvfp4") -> torch.nn.Module:
    layer = qkv(fmt)
    for name, n in SHARDS.items():
        load(layer, quantized(rng, fmt, n, K, 1.0)[0], name)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def test_processing_twice_changes_nothing(rng: np.random.Generator) -> None:
    layer = loaded(rng)
    before = {name: (p.data_ptr(), p.clone()) for name, p in layer.named_parameters()}
    layer.quant_method.process_weights_after_loading(layer)
    after = dict(layer.named_parameters())
    assert {*before} == {*after} == {"weight", "scale", "row_scale"}, "nothing of the checkpoint's layout is kept"
    for name, (pointer, value) in before.items():
        assert after[name].data_ptr() == pointer
        assert torch.equal(after[name], value)


def test_reload_into_the_same_storage(rng: np.random.Generator) -> None:
    """vLLM's reload: parameters as created, loaded again, processed, and copied into the first storage."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    layer = qkv("nvfp4")
    model = torch.nn.ModuleDict({"qkv_proj": layer})
    record_metadata_for_reloading(model)
    for name, n in SHARDS.items():
        load(layer, quantized(rng, "nvfp4", n, K, 1.0)[0], name)
    layer.quant_method.process_weights_after_loading(layer)
    pointers = {name: p.data_ptr() for name, p in layer.named_parameters()}
    initialize_layerwise_reload(model)
    values = []
    for name, n in SHARDS.items():
        tensors, value = quantized(rng, "nvfp4", n, K, 2.0)
        load(layer, tensors, name)
        values.append(value)
    finalize_layerwise_reload(model, mock.Mock(dtype=torch.bfloat16))
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == pointers
    x = torch.from_numpy(rng.standard_normal((2, K))).float()
    assert_exact(layer.quant_method.apply(layer, x), x, np.concatenate(values))


def test_apply_never_waits_for_a_value(rng: np.random.Generator) -> None:
    """No host read of a tensor: such a call cannot be captured in a graph."""
    layer = loaded(rng, "mxfp4")
    x = torch.from_numpy(rng.standard_normal((2, K))).to(torch.bfloat16)
    error = AssertionError("a tensor was read on the host")
    with (
        mock.patch.object(torch.Tensor, "item", side_effect=error),
        mock.patch.object(torch.Tensor, "tolist", side_effect=error),
        mock.patch.object(torch.Tensor, "__bool__", side_effect=error),
    ):
        layer.quant_method.apply(layer, x)


def test_compiles_as_one_graph(rng: np.random.Generator) -> None:
    layer = loaded(rng)
    compiled = torch.compile(lambda x: layer.quant_method.apply(layer, x) * 2, fullgraph=True, backend="aot_eager")
    for m in (1, 7, 0, 16):
        x = torch.from_numpy(rng.standard_normal((m, K))).to(torch.bfloat16)
        assert torch.equal(compiled(x), layer.quant_method.apply(layer, x) * 2)


@pytest.mark.parametrize(("fmt", "group"), [("nvfp4", 16), ("mxfp4", 32)])
def test_tensor_parallel_slices_must_hold_whole_groups(fmt: str, group: int) -> None:
    """Found when the layer is created, before any tensor is read: 1856 / 8 = 232 cuts a group of 16 in two."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    layer = torch.nn.Module()
    method = config(fmt).get_quant_method(mock.MagicMock(spec=RowParallelLinear), "model.layers.0.mlp.down_proj")
    with pytest.raises(
        ValueError, match=rf"model\.layers\.0\.mlp\.down_proj: input size 1856 over 8 .* gives 232, .*the {group}-wide"
    ):
        method.create_weights(layer, 232, [64], 1856, 64, torch.bfloat16, weight_loader=lambda *a: None)
    assert not list(layer.parameters())


def test_excluded_layers_get_vllms_own_method(rng: np.random.Generator) -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

    for prefix in ("model.layers.0.mlp.gate", "lm_head"):
        layer = ReplicatedLinear(K, 8, quant_config=config("nvfp4", ignore=("lm_head",)), prefix=prefix)
        assert type(layer.quant_method) is UnquantizedLinearMethod, prefix


def test_tied_lm_head_is_16_bit() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    quant = config("nvfp4")
    embedding = VocabParallelEmbedding(64, K, quant_config=quant, prefix="model.embed_tokens")
    head = ParallelLMHead(64, K, quant_config=quant, prefix="lm_head")
    head = head.tie_weights(embedding)
    assert head.weight is embedding.weight
    assert head.quant_method is embedding.quant_method
    assert [name for name, _ in head.named_parameters()] == ["weight"]


def test_nvfp4_cache_is_refused_in_plain_words() -> None:
    from vllm.model_executor.layers.attention import Attention

    attention = mock.MagicMock(spec=Attention, kv_cache_dtype="nvfp4")
    with pytest.raises(ValueError, match=r"layers\.0\.attn: .*NVFP4 KV cache.*--kv-cache-dtype"):
        config("nvfp4").get_quant_method(attention, "layers.0.attn")


def test_kv_scales_reach_the_attention_layer() -> None:
    """Checkpoint name -> vLLM's name -> the value the cache is written with."""
    from vllm.model_executor.layers.attention import Attention

    quant = config("nvfp4")
    quant.kv_scales_on_disk = True
    mapper = quant.get_cache_scale_mapper()
    names = [f"model.layers.0.self_attn.{p}_proj.{p}_scale" for p in "kv"]
    assert mapper.apply_list(names) == [f"model.layers.0.self_attn.attn.{p}_scale" for p in "kv"]
    layer = mock.MagicMock(spec=Attention)
    layer.kv_cache_dtype = "fp8_e4m3"
    method = quant.get_quant_method(layer, "model.layers.0.self_attn.attn")
    layer = torch.nn.Module()
    layer.kv_cache_dtype = "fp8_e4m3"
    for p in ("k", "v", "q", "prob"):
        setattr(layer, f"_{p}_scale", torch.ones(()))
    layer._k_scale_cpu, layer._v_scale_cpu = torch.ones(()), torch.ones(())
    method.create_weights(layer)
    for name, value in (("k_scale", 0.031), ("v_scale", 0.0079)):
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, torch.tensor(value, dtype=torch.float32))
    method.process_weights_after_loading(layer)
    assert layer._k_scale_float == pytest.approx(0.031)
    assert layer._v_scale_float == pytest.approx(0.0079)


def test_lost_kv_scales_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.model_executor.layers.attention import Attention

    quant = config("nvfp4")
    quant.kv_scales_on_disk = True
    method = quant.get_quant_method(mock.MagicMock(spec=Attention, kv_cache_dtype="auto"), "layers.0.attn")
    layer = torch.nn.Module()
    layer.kv_cache_dtype = "auto"
    layer._q_scale, layer._prob_scale = torch.ones(()), torch.ones(())
    method.create_weights(layer)
    with mock.patch("petit_vllm.kv_cache.logger.warning") as warning:
        method.process_weights_after_loading(layer)
    assert warning.call_count == 1
    assert "layers.0.attn" in warning.call_args.args
