"""Banks of FP4 experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEMethodBase, FusedMoeWeightScaleSupported
from vllm.model_executor.utils import set_weight_attrs

import petit_plugin as pp
from petit_plugin.ops.moe_activation import resolve_activation
from petit_plugin.packing import PackedExperts, PackedExpertsMeta, padded_rows
from petit_vllm.linear import check_group
from petit_vllm.loading import LoadWatch, block_scales, loaded_from_checkpoint, nan_scalars, never_loaded

if TYPE_CHECKING:
    from petit_plugin.checkpoints import LayerFormat
    from petit_vllm.config import PetitConfig

_PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale", "bias")
_RAW = tuple(f"{w}_{part}" for w in ("w13", "w2") for part in _PARTS)
PACKED = tuple(f"{w}_{p}" for w in ("w13", "w2") for p in ("weight", "scale", "row_scale", "row_exponent", "bias"))


class PetitMoEMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Loads the experts of this rank, packs them, and runs them in one call."""

    # The name must not contain "ModelOpt": vLLM's loader takes other paths for such classes. Its scales are told apart
    # by the `quant_method` attribute of the parameters instead.

    def __init__(self, config: PetitConfig, layer_format: LayerFormat, moe: FusedMoEConfig, prefix: str) -> None:
        super().__init__(moe)
        self.config = config
        self.format: str = layer_format.format
        self.group: int = layer_format.group_size
        self.prefix = prefix
        self.watch = LoadWatch(prefix, self.format)
        self.from_checkpoint = loaded_from_checkpoint()
        self.meta: PackedExpertsMeta | None = None
        self.names: frozenset[str] = frozenset()  # of the packed tensors
        self.activation: str = moe.activation.value
        # vLLM's loader puts gate rows before up rows, whatever the model; ungated experts have up rows only.
        self.layout = "gate_up" if moe.is_act_and_mul else "ungated"

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition  # tails are padded when packed

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """w13 [E, 2I, H/2] (gate rows, then up rows; I rows if ungated), w2 [E, H, I/2], block scales [.., K/g] and
        global scales [E, 2] (gate, up) and [E]."""
        e, h, i = num_experts, hidden_size, intermediate_size_per_partition
        halves = 1 if self.layout == "ungated" else 2
        self._check_activation(layer)
        check_group(self.prefix, "hidden size", h, h, self.format, self.group)
        check_group(self.prefix, "expert intermediate size", i, self.moe.intermediate_size, self.format, self.group)
        loader = extra_weight_attrs.pop("weight_loader")
        kinds = FusedMoeWeightScaleSupported

        def add(name: str, base: str, data: torch.Tensor, kind: FusedMoeWeightScaleSupported | None = None) -> None:
            parameter = torch.nn.Parameter(data, requires_grad=False)
            layer.register_parameter(name, parameter)
            attrs = {**extra_weight_attrs, "weight_loader": self.watch.wrap(name, loader, base) if base else loader}
            set_weight_attrs(parameter, attrs | ({"quant_method": kind.value} if kind else {}))

        for w, rows, k in (("w13", halves * i, h), ("w2", h, i)):
            add(f"{w}_weight", "weight", torch.zeros(e, rows, k // 2, dtype=torch.uint8))
            add(f"{w}_weight_scale", "weight_scale", block_scales(self.format, e, rows, k // self.group), kinds.BLOCK)
            slots = (e, halves) if w == "w13" else (e,)
            if self.format == "nvfp4":
                add(f"{w}_weight_scale_2", "weight_scale_2", nan_scalars(*slots), kinds.TENSOR)
                add(f"{w}_input_scale", "input_scale", nan_scalars(*slots), kinds.TENSOR)
            if self.moe.has_bias:
                add(f"{w}_bias", "", torch.zeros(e, rows, dtype=params_dtype))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every expert came, pack, and let the checkpoint's tensors go. Doing it again does nothing."""
        if not hasattr(layer, "w13_weight_scale"):
            return
        raw = {name: getattr(layer, name).data for name in _RAW if hasattr(layer, name)}
        if self.from_checkpoint:
            self._check_complete(layer, raw)
        else:
            _fill_dummy(self.format, raw)
        packed = pp.pack_experts(
            self.format,
            raw["w13_weight"],
            raw["w13_weight_scale"],
            raw["w2_weight"],
            raw["w2_weight_scale"],
            w13_global_scale=raw.get("w13_weight_scale_2"),
            w2_global_scale=raw.get("w2_weight_scale_2"),
            w13_bias=raw.get("w13_bias"),
            w2_bias=raw.get("w2_bias"),
            layout=self.layout,
            name=self.prefix,
        )
        names = frozenset(packed.tensors())
        if self.meta is not None and (self.meta, self.names) != (packed.meta, names):
            raise ValueError(
                f"layer {self.prefix}: the reloaded experts need another kernel than the first ones "
                f"({packed.meta} instead of {self.meta}); restart vLLM with the new checkpoint"
            )
        self.meta, self.names = packed.meta, names
        self.watch.seen.clear()
        for name in raw:
            delattr(layer, name)
        tensors = packed.tensors()
        for name in PACKED:
            tensor = tensors.get(name)
            layer.register_parameter(name, None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False))
        self._count(packed, raw)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None  # no modular kernel of vLLM runs

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, H] -> this rank's share of the routed sum, [T, H]. Shared experts and the all-reduce are vLLM's."""
        assert self.meta is not None
        tensors = {name: t for name in PACKED if (t := getattr(layer, name)) is not None}
        return pp.fused_moe(
            x,
            PackedExperts.from_tensors(self.meta, tensors),
            topk_weights,
            topk_ids,
            activation=self.activation,
            alpha=layer.swiglu_alpha,
            beta=layer.swiglu_beta,
            limit=layer.swiglu_limit,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
        )

    def _check_activation(self, layer: Any) -> None:
        if self.activation == "swigluoai":
            raise ValueError(
                f"layer {self.prefix}: gpt-oss experts (interleaved gate and up rows) are not served through vLLM yet"
            )
        numbers = {"alpha": layer.swiglu_alpha, "beta": layer.swiglu_beta, "limit": layer.swiglu_limit}
        try:
            resolve_activation(self.activation, gated=self.moe.is_act_and_mul, **numbers)
        except ValueError as error:
            raise ValueError(f"layer {self.prefix}: {error}") from error

    def _check_complete(self, layer: Any, raw: dict[str, torch.Tensor]) -> None:
        ids = _global_ids(layer, raw["w13_weight"].shape[0])
        halves = 1 if self.layout == "ungated" else 2
        names = {"w13": ("w1 (gate_proj)", "w3 (up_proj)")[:halves], "w2": ("w2 (down_proj)",)}
        if self.layout == "ungated":
            names["w13"] = ("up_proj",)
        for w, parts in names.items():
            lost = never_loaded(self.format, raw[f"{w}_weight_scale"])
            lost = lost.view(len(ids), len(parts), -1).all(dim=-1)
            self._raise_for("weight_scale", lost, parts, ids)
            if self.format == "nvfp4":
                nan = raw[f"{w}_weight_scale_2"].view(len(ids), len(parts)).isnan()
                self._raise_for("weight_scale_2", nan, parts, ids)
            came, wanted = self.watch.seen.get(f"{w}_weight", set()), self.watch.seen.get(f"{w}_weight_scale", set())
            if came != wanted:
                raise self.watch.missing("weight", f" of (shard, expert) {sorted(map(str, came ^ wanted))[:8]}")

    def _raise_for(self, parameter: str, lost: torch.Tensor, parts: tuple[str, ...], ids: list[int]) -> None:
        for column, part in enumerate(parts):
            experts = [ids[row] for row in lost[:, column].nonzero().flatten().tolist()]
            if experts:
                listed = ", ".join(map(str, experts[:16])) + (" ..." if len(experts) > 16 else "")
                raise self.watch.missing(parameter, f" for {part} of experts {listed}")

    def _count(self, packed: PackedExperts, raw: dict[str, torch.Tensor]) -> None:
        padded = []
        for w in ("w13", "w2"):
            _, rows, half_k = raw[f"{w}_weight"].shape
            have = padded_rows(packed.meta.part(w))
            if have != rows:
                padded.append(f"{w} {rows}x{2 * half_k} to {have} rows")
        weights = 2 * sum(raw[f"{w}_weight"].numel() for w in ("w13", "w2"))
        self.config.summary.packed(
            self.prefix, packed.meta.arch, weights, packed.tensors().values(), padded, packed.meta.exact
        )


def _global_ids(layer: Any, local: int) -> list[int]:
    """Expert number in the checkpoint of every local slot."""
    expert_map = layer.expert_map
    if expert_map is None:
        return list(range(local))
    ids = [-1] * local
    for number, slot in enumerate(expert_map.tolist()):
        if slot >= 0:
            ids[slot] = number
    return ids


def _fill_dummy(fmt: str, raw: dict[str, torch.Tensor]) -> None:
    """--load-format dummy: any valid numbers."""
    for w in ("w13", "w2"):
        raw[f"{w}_weight_scale"].view(torch.uint8).fill_(0x38 if fmt == "nvfp4" else 120)
        if fmt == "nvfp4":
            raw[f"{w}_weight_scale_2"].fill_(1e-2)
