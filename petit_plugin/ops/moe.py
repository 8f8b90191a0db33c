"""petit::fused_moe and the Python function on top."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from petit_plugin._moe_call import KINDS, MoeCall
from petit_plugin.backends.moe import MoeBackend, moe_backend_for
from petit_plugin.ops.arguments import check_plain_tensor
from petit_plugin.ops.library import DEVICES, LIBRARY
from petit_plugin.ops.moe_activation import check_limit, resolve_activation
from petit_plugin.packing.experts import (
    PARTS,
    WEIGHT_TENSORS,
    ExpertLayout,
    PackedExperts,
    PackedExpertsMeta,
    check_expert_tensor,
)
from petit_plugin.packing.validate import check_float32

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INDICES = (torch.int32, torch.int64)
_BANKS = tuple(f"{part}_{name}" for part in PARTS for name in (*WEIGHT_TENSORS, "bias"))

_ARGUMENTS = (
    "Tensor x, "
    "Tensor w13_weight, Tensor w13_scale, Tensor w13_row_scale, Tensor? w13_row_exponent, Tensor? w13_bias, "
    "Tensor w2_weight, Tensor w2_scale, Tensor w2_row_scale, Tensor? w2_row_exponent, Tensor? w2_bias, "
    "Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, "
    "str format, str arch, int num_experts, int hidden, int intermediate, bool gated, bool exact, "
    "str activation, float alpha, float beta, float limit, bool apply_router_weight_on_input, "
    "float routed_scaling_factor, bool reduce, str? activation_format, ScalarType out_dtype"
)
LIBRARY.define(f"fused_moe({_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(f"fused_moe_out({_ARGUMENTS}, Tensor(a!) out) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def fused_moe(
    x: torch.Tensor,
    experts: PackedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float = 1.0,
    reduce: bool = True,
    activation_format: str | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The routed experts of a layer.

    y[t] = routed_scaling_factor * sum_j topk_weights[t, j] * expert(topk_ids[t, j], x[t]),
    expert(e, x) = w2[e] @ act(w13[e] @ x + w13_bias[e]) + w2_bias[e]. Sums, biases, the activation and the weighted sum
    (in the order of j) are float32; act's result is rounded once to x's dtype, y once to its own. Shared experts stay
    outside.

    x: [T, H] bfloat16, float16 or float32, any strides. topk_weights: float32 [T, topk]. topk_ids: int32 or int64
    [T, topk]; an id of -1 contributes exactly zero, whatever x holds. expert_map: int32 or int64 [global experts]: ids
    are global, and an entry is the local expert or -1 (elsewhere: contributes zero; add up the ranks' float32 outputs).
    activation, alpha, beta, limit: see resolve_activation.
    apply_router_weight_on_input: the weight multiplies x (before w13_bias) rather than the expert's output; topk = 1.
    reduce: False gives the terms of the sum, [T, topk, H]. activation_format: how activations are quantised; the CPU
    has only None (not at all). out_dtype: bfloat16, float16 or float32, default x's. out: a contiguous tensor to fill;
    it may be x itself.

    Returns [T, H] (or [T, topk, H]). For inference: nothing here has gradients, so x or topk_weights that require one
    are refused unless torch.no_grad() or torch.inference_mode() is on. Raises TypeError or ValueError naming the
    argument; on the CPU that includes expert ids that are out of range.
    """
    if not isinstance(experts, PackedExperts):
        raise TypeError(f"experts must be PackedExperts (see pack_experts), got {type(experts).__name__}")
    for name, tensor in (("x", x), ("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        check_plain_tensor(name, tensor)
    for name, optional in (("expert_map", expert_map), ("out", out)):
        if optional is not None:
            check_plain_tensor(name, optional)
    if activation_format is not None and not isinstance(activation_format, str):
        raise TypeError(f"activation_format must be a string or None, got {type(activation_format).__name__}")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be a torch.dtype or None, got {type(out_dtype).__name__}")
    check_float32("routed_scaling_factor", routed_scaling_factor)
    _refuse_gradients(x, topk_weights, out)
    call = make_call(
        x,
        experts,
        topk_weights,
        topk_ids,
        activation=activation,
        alpha=alpha,
        beta=beta,
        limit=limit,
        expert_map=expert_map,
        apply_router_weight_on_input=apply_router_weight_on_input,
        routed_scaling_factor=routed_scaling_factor,
        reduce=reduce,
        activation_format=activation_format,
        out_dtype=out_dtype if out_dtype is not None else x.dtype if out is None else out.dtype,
    )
    if out is None:
        result: torch.Tensor = torch.ops.petit.fused_moe(*call)
        return result
    torch.ops.petit.fused_moe_out(*call, out)
    return out


def _refuse_gradients(x: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor | None) -> None:
    """Rather an error than a result that looks differentiable and is not."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in (("x", x), ("topk_weights", topk_weights), ("out", out)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, but fused_moe is for inference and has none; "
                f"call it under torch.no_grad() or torch.inference_mode(), or pass {name}.detach()"
            )


def make_call(
    x: torch.Tensor,
    experts: PackedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str,
    alpha: float | None,
    beta: float | None,
    limit: float | None,
    expert_map: torch.Tensor | None,
    apply_router_weight_on_input: bool,
    routed_scaling_factor: float,
    reduce: bool,
    activation_format: str | None,
    out_dtype: torch.dtype,
) -> MoeCall:
    """The operator's arguments, with the activation resolved; nothing else is checked here."""
    m = experts.meta
    act = resolve_activation(activation, gated=m.gated, alpha=alpha, beta=beta, limit=limit)
    return MoeCall(
        x=x,
        w13_weight=experts.w13_weight,
        w13_scale=experts.w13_scale,
        w13_row_scale=experts.w13_row_scale,
        w13_row_exponent=experts.w13_row_exponent,
        w13_bias=experts.w13_bias,
        w2_weight=experts.w2_weight,
        w2_scale=experts.w2_scale,
        w2_row_scale=experts.w2_row_scale,
        w2_row_exponent=experts.w2_row_exponent,
        w2_bias=experts.w2_bias,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        expert_map=expert_map,
        format=m.format,
        arch=m.arch,
        num_experts=m.num_experts,
        hidden=m.hidden,
        intermediate=m.intermediate,
        gated=m.gated,
        exact=m.exact,
        activation=act.kind,
        alpha=act.alpha,
        beta=act.beta,
        limit=act.limit,
        apply_router_weight_on_input=apply_router_weight_on_input,
        routed_scaling_factor=routed_scaling_factor,
        reduce=reduce,
        activation_format=activation_format,
        out_dtype=out_dtype,
    )


class _Packed(NamedTuple):
    """What a call derives from the numbers of the experts; the same for every call of a layer, so it is kept."""

    meta: PackedExpertsMeta
    backend: MoeBackend
    layout: ExpertLayout


@lru_cache(maxsize=1024)
def _packed(
    format: str, arch: str, num_experts: int, hidden: int, intermediate: int, gated: bool, exact: bool, activation: str
) -> _Packed:
    if activation not in KINDS:
        raise ValueError(f"activation is {activation!r}; the operator takes {', '.join(KINDS)}")
    layout = "gate_up" if gated else "ungated"
    meta = PackedExpertsMeta(format, arch, num_experts, hidden, intermediate, layout, exact)
    return _Packed(meta, moe_backend_for(arch), meta.tensor_layout())


def _check(call: MoeCall) -> MoeBackend:
    """The kernels get raw pointers, so sizes that do not fit must stop here. Gives the backend."""
    packed = _packed(
        *(call.format, call.arch, int(call.num_experts), int(call.hidden), int(call.intermediate)),
        *(call.gated, call.exact, call.activation),  # int(): a traced number becomes a constant of the graph
    )
    device = call.w13_weight.device
    for name in _BANKS:
        tensor = getattr(call, name)
        if tensor is not None:
            check_expert_tensor(name, tensor, packed.meta, packed.layout, device)
    _check_tokens(call)
    return packed.backend


def _check_tokens(call: MoeCall) -> None:
    x, ids, weights, expert_map = call.x, call.topk_ids, call.topk_weights, call.expert_map
    device = call.w13_weight.device
    if x.dtype not in _DTYPES:
        raise TypeError(f"x is {x.dtype}; expected bfloat16, float16 or float32")
    if x.dim() != 2 or x.shape[1] != call.hidden:
        raise ValueError(f"x has shape {list(x.shape)}; these experts need [tokens, {call.hidden}]")
    if ids.dtype not in _INDICES:
        raise TypeError(f"topk_ids is {ids.dtype}; expected int32 or int64")
    if ids.dim() != 2 or ids.shape[0] != x.shape[0]:
        raise ValueError(f"topk_ids has shape {list(ids.shape)}; x with {x.shape[0]} tokens needs [{x.shape[0]}, topk]")
    if weights.dtype != torch.float32:
        raise TypeError(
            f"topk_weights is {weights.dtype}; router weights are float32, convert them where they are made"
        )
    if weights.shape != ids.shape:
        raise ValueError(f"topk_weights has shape {list(weights.shape)} but topk_ids {list(ids.shape)}")
    if expert_map is not None and (expert_map.dtype not in _INDICES or expert_map.dim() != 1):
        raise ValueError(
            f"expert_map is {expert_map.dtype} {list(expert_map.shape)}; expected int32 or int64 [global experts] "
            f"with the local expert or -1"
        )
    if expert_map is not None and expert_map.shape[0] == 0:
        raise ValueError("expert_map is empty: it needs an entry for every global expert; pass None for no map")
    for name, tensor in (("x", x), ("topk_ids", ids), ("topk_weights", weights), ("expert_map", expert_map)):
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device} but the experts, packed for {call.arch}, on {device}; move one of them"
            )
    if call.apply_router_weight_on_input and ids.shape[1] != 1:
        raise ValueError(
            f"apply_router_weight_on_input needs topk = 1, got {ids.shape[1]}: each expert would need another x"
        )
    if call.out_dtype not in _DTYPES:
        raise TypeError(f"out_dtype is {call.out_dtype}; expected bfloat16, float16 or float32")
    for name in ("alpha", "beta", "routed_scaling_factor"):
        check_float32(name, getattr(call, name))
    check_limit(call.limit)


def _check_out(call: MoeCall, out: torch.Tensor) -> None:
    shape = call.out_shape
    if out.shape != shape or out.dtype != call.out_dtype or not out.is_contiguous() or out.device != call.x.device:
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device} with strides {list(out.stride())}; "
            f"expected contiguous {call.out_dtype} {list(shape)} on {call.x.device}"
        )


def _overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the address ranges do: two storages may share memory (slices of one NumPy array)."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    (a_first, a_last), (b_first, b_last) = (
        (
            t.data_ptr(),
            t.data_ptr() + (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.itemsize,
        )
        for t in (a, b)
    )
    return a_first < b_last and b_first < a_last


def _fused_moe(*args: Any) -> torch.Tensor:
    call = MoeCall(*args)
    backend = _check(call)
    out = call.x.new_empty(call.out_shape, dtype=call.out_dtype)
    backend.fused_moe(call, out)
    return out


def _fused_moe_fake(*args: Any) -> torch.Tensor:
    call = MoeCall(*args)
    _check(call)
    return call.x.new_empty(call.out_shape, dtype=call.out_dtype)


def _fused_moe_out(*args: Any) -> None:
    call, out = MoeCall(*args[:-1]), args[-1]
    backend = _check(call)
    _check_out(call, out)
    x = call.x
    # Tokens are finished in order, so x may be overwritten row by row, but only by its own rows.
    same = (x.data_ptr(), x.shape, x.stride(), x.dtype) == (out.data_ptr(), out.shape, out.stride(), out.dtype)
    if _overlaps(out, x) and not same:
        raise ValueError("out overlaps x without being x; give it memory of its own")
    for name in ("topk_ids", "topk_weights", "expert_map"):
        tensor = getattr(call, name)
        if tensor is not None and _overlaps(out, tensor):
            raise ValueError(f"out overlaps {name}, which is read until the end; give it memory of its own")
    backend.fused_moe(call, out)


def _fused_moe_out_fake(*args: Any) -> None:
    call, out = MoeCall(*args[:-1]), args[-1]
    _check(call)
    _check_out(call, out)


for _device in DEVICES:
    LIBRARY.impl("fused_moe", _fused_moe, _device)
    LIBRARY.impl("fused_moe_out", _fused_moe_out, _device)
torch.library.register_fake("petit::fused_moe", _fused_moe_fake, lib=LIBRARY)
torch.library.register_fake("petit::fused_moe_out", _fused_moe_out_fake, lib=LIBRARY)
