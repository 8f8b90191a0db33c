"""FP4 linear layers (and a quantized lm_head)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter

import petit_plugin as pp
from petit_plugin.packing import PackedMeta, PackedWeight, padded_rows
from petit_vllm.loading import LoadWatch, block_scales, loaded_from_checkpoint, nan_scalars, never_loaded

if TYPE_CHECKING:
    from petit_plugin.checkpoints import LayerFormat
    from petit_vllm.config import PetitConfig

_RAW = ("weight", "weight_scale", "weight_scale_2", "input_scale")
PACKED = ("weight", "scale", "row_scale", "row_exponent")


@register_weight_loader_v2_supported_method
class PetitLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Weights of one layer, from checkpoint layout to Petit layout, and their product with activations."""

    def __init__(self, config: PetitConfig, layer_format: LayerFormat, prefix: str) -> None:
        self.config = config
        self.format: str = layer_format.format
        self.group: int = layer_format.group_size
        self.prefix = prefix
        self.watch = LoadWatch(prefix, self.format)
        self.from_checkpoint = loaded_from_checkpoint()
        self.meta: PackedMeta | None = None
        self.names: frozenset[str] = frozenset()  # of the packed tensors

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register what the checkpoint loads into: uint8 [N, K/2], block scales [N, K/g], one float32 per shard."""
        k, n, shards = input_size_per_partition, sum(output_partition_sizes), len(output_partition_sizes)
        check_group(self.prefix, "input size", k, input_size, self.format, self.group)
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = k
        layer.output_size_per_partition = n
        loader = extra_weight_attrs["weight_loader"]

        def matrix(name: str, data: torch.Tensor) -> None:
            wrapped = self.watch.wrap(name, loader)
            layer.register_parameter(
                name, ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=wrapped)
            )

        matrix("weight", torch.zeros(n, k // 2, dtype=torch.uint8))
        matrix("weight_scale", block_scales(self.format, n, k // self.group))
        if self.format == "nvfp4":
            for name in ("weight_scale_2", "input_scale"):
                wrapped = self.watch.wrap(name, loader)
                layer.register_parameter(name, PerTensorScaleParameter(data=nan_scalars(shards), weight_loader=wrapped))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that everything came, pack, and let the checkpoint's tensors go. Doing it again does nothing."""
        if not hasattr(layer, "weight_scale"):
            return
        if self.from_checkpoint:
            self._check_complete(layer)
        else:
            _fill_dummy(self.format, layer)
        if self.format == "nvfp4":
            packed = pp.pack_nvfp4(layer.weight.data, layer.weight_scale.data, _row_scales(layer), name=self.prefix)
        else:
            packed = pp.pack_mxfp4(layer.weight.data, layer.weight_scale.data, name=self.prefix)
        names = frozenset(packed.tensors())
        if self.meta is not None and (self.meta, self.names) != (packed.meta, names):
            raise ValueError(
                f"layer {self.prefix}: the reloaded weights need another kernel than the first ones "
                f"({packed.meta} instead of {self.meta}); restart vLLM with the new checkpoint"
            )
        self.meta, self.names = packed.meta, names
        self.watch.seen.clear()
        for name in _RAW:
            if hasattr(layer, name):
                delattr(layer, name)
        tensors = packed.tensors()
        for name in PACKED:
            tensor = tensors.get(name)
            layer.register_parameter(name, None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False))
        self._count(packed)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N], dtype of x; one rounding, after the bias."""
        meta = self.meta
        assert meta is not None
        y: torch.Tensor = torch.ops.petit.linear(
            x,
            layer.weight,
            layer.scale,
            layer.row_scale,
            layer.row_exponent,
            bias,
            meta.format,
            meta.arch,
            meta.n,
            meta.k,
            meta.exact,
        )
        return y

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """An lm_head tied to 16-bit embeddings has no FP4 tensors of its own: it becomes a 16-bit layer."""
        for name in _RAW:
            if hasattr(layer, name):
                delattr(layer, name)
        self.config.summary.forget(self.prefix)
        layer.quant_method = embed_tokens.quant_method
        return layer.quant_method.tie_weights(layer, embed_tokens)

    def dequantize_weight(self, layer: Any) -> torch.Tensor:
        """float32 [N, K], exactly what the kernels multiply by."""
        assert self.meta is not None
        tensors = {name: t for name in PACKED if (t := getattr(layer, name)) is not None}
        return PackedWeight.from_tensors(self.meta, tensors).dequantize(torch.float32)

    def _check_complete(self, layer: Any) -> None:
        names = _shard_names(self.prefix, self.config.packed_modules_mapping, len(layer.logical_widths))
        rows = torch.split(never_loaded(self.format, layer.weight_scale.data), layer.logical_widths)
        for name, lost in zip(names, rows, strict=True):
            if bool(lost.all()):
                raise self.watch.missing("weight_scale", name)
        if self.watch.seen.get("weight", set()) != self.watch.seen.get("weight_scale", set()):
            raise self.watch.missing("weight", f" (came: {sorted(map(str, self.watch.seen.get('weight', set())))})")
        if self.format == "nvfp4":
            for name, scale in zip(names, layer.weight_scale_2.tolist(), strict=True):
                if scale != scale:
                    raise self.watch.missing("weight_scale_2", f"{name} (or NaN)")

    def _count(self, packed: PackedWeight) -> None:
        meta, tensors = packed.meta, packed.tensors()
        rows = padded_rows(meta)
        padded = [f"{meta.n}x{meta.k} to {rows} rows"] if rows != meta.n else []
        self.config.summary.packed(self.prefix, meta.arch, meta.n * meta.k, tensors.values(), padded, meta.exact)


def check_group(prefix: str, what: str, size: int, full: int, fmt: str, group: int) -> None:
    """ValueError before anything is loaded when a rank's slice would cut through a block of `group` weights."""
    if size % group:
        ranks = full // size if size else 1
        raise ValueError(
            f"layer {prefix}: {what} {full} over {ranks} tensor-parallel ranks gives {size}, which cuts through the "
            f"{group}-wide blocks of {fmt}. Use a tensor_parallel_size that leaves multiples of {group}."
        )


def _row_scales(layer: Any) -> torch.Tensor:
    """float32 [N]: every row gets the global scale of its own shard, so that q, k and v may differ."""
    scales = layer.weight_scale_2.data
    widths = torch.tensor(layer.logical_widths, device=scales.device)
    return torch.repeat_interleave(scales, widths).contiguous()


def _shard_names(prefix: str, packed: dict[str, list[str]], count: int) -> list[str]:
    shards = packed.get(prefix.rpartition(".")[2], [])
    if count == 1:
        return [""]
    if len(shards) == count:
        return [f" of {name}" for name in shards]
    return [f" of shard {i}" for i in range(count)]


def _fill_dummy(fmt: str, layer: Any) -> None:
    """--load-format dummy: any valid numbers."""
    layer.weight_scale.data.view(torch.uint8).fill_(0x38 if fmt == "nvfp4" else 120)
    if fmt == "nvfp4":
        layer.weight_scale_2.data.fill_(1e-2)
