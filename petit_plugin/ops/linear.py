"""petit::linear and petit::dequantize for one packed weight."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from petit_plugin._types import PackedMeta
from petit_plugin.backends import Backend, backend_for
from petit_plugin.ops.arguments import check_plain_tensor
from petit_plugin.ops.library import DEVICES, LIBRARY
from petit_plugin.packing.packed_weight import PackedWeight, fits, fits_shared

_ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
_WEIGHTS = (*_ACTIVATIONS, torch.float64)

LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor scale, Tensor row_scale, Tensor? row_exponent, Tensor? bias, "
    "str format, str arch, int n, int k, bool exact) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "dequantize(Tensor weight, Tensor scale, Tensor row_scale, Tensor? row_exponent, "
    "str format, str arch, int n, int k, bool exact, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ w.T + bias for a packed weight w [N, K].

    x: [..., K] bfloat16, float16 or float32, any strides. bias: [N], x's dtype or float32. Returns [..., N] in x's
    dtype, contiguous: products accumulated in float32, row scales and bias applied before one rounding. x and bias get
    gradients; the weight is frozen. Raises TypeError or ValueError naming the argument.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight must be a PackedWeight (see pack_nvfp4, pack_mxfp4), got {type(weight).__name__}")
    check_plain_tensor("x", x)
    if bias is not None:
        check_plain_tensor("bias", bias)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _with_gradient(x, weight, bias)
    return _call(x, weight, bias)


def _call(x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    m = w.meta
    result: torch.Tensor = torch.ops.petit.linear(
        x, w.weight, w.scale, w.row_scale, w.row_exponent, bias, m.format, m.arch, m.n, m.k, m.exact
    )
    return result


class _Linear(torch.autograd.Function):
    # Not register_autograd: that would cost every call without gradients as well.
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight, ctx.x_dtype, ctx.bias_dtype = weight, x.dtype, None if bias is None else bias.dtype
        return _call(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        grad_x = grad @ ctx.weight.dequantize(ctx.x_dtype) if ctx.needs_input_grad[0] else None
        grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).float().sum(0).to(ctx.bias_dtype)
        return grad_x, None, grad_bias


def _with_gradient(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


class _LinearCall(NamedTuple):
    """Arguments of petit::linear, in the order of its schema."""

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    row_scale: torch.Tensor
    row_exponent: torch.Tensor | None
    bias: torch.Tensor | None
    format: str
    arch: str
    n: int
    k: int
    exact: bool


class _DequantizeCall(NamedTuple):
    """Arguments of petit::dequantize, in the order of its schema."""

    weight: torch.Tensor
    scale: torch.Tensor
    row_scale: torch.Tensor
    row_exponent: torch.Tensor | None
    format: str
    arch: str
    n: int
    k: int
    exact: bool
    dtype: torch.dtype


class _Packed(NamedTuple):
    """What a call derives from the numbers of a weight; the same for every call of a layer, so it is kept."""

    meta: PackedMeta
    backend: Backend
    layout: dict[str, tuple[torch.Size, torch.dtype]]


@lru_cache(maxsize=4096)
def _packed(fmt: str, arch: str, n: int, k: int, exact: bool) -> _Packed:
    meta = PackedMeta(fmt, arch, n, k, exact)
    meta.check()
    backend = backend_for(arch)
    return _Packed(meta, backend, {name: (torch.Size(s), dtype) for name, (s, dtype) in backend.layout(meta).items()})


def _check_tensor(name: str, tensor: torch.Tensor, packed: _Packed, device: torch.device) -> None:
    """The kernels get raw pointers, so a size that does not fit must stop here."""
    m = packed.meta
    if name not in packed.layout:
        raise ValueError(f"{name} was given, but {m.format} weights packed for {m.arch} have none; pass None")
    shape, dtype = packed.layout[name]
    if not fits(tensor, shape, dtype) and not fits_shared(name, tensor, shape, packed.backend):
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; a {m.format} weight [{m.n}, {m.k}] packed for {m.arch} "
            f"has contiguous {dtype} {list(shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} but weight on {device}; move it there")


def _checked(call: _LinearCall | _DequantizeCall) -> _Packed:
    """What the weight's numbers mean, once its tensors have been checked against them."""
    # int(): a traced number becomes a constant of the graph
    packed = _packed(call.format, call.arch, int(call.n), int(call.k), call.exact)
    device = call.weight.device
    _check_tensor("weight", call.weight, packed, device)
    _check_tensor("scale", call.scale, packed, device)
    _check_tensor("row_scale", call.row_scale, packed, device)
    if call.row_exponent is not None:
        _check_tensor("row_exponent", call.row_exponent, packed, device)
    return packed


def _check_activations(x: torch.Tensor, bias: torch.Tensor | None, device: torch.device, meta: PackedMeta) -> None:
    if x.dtype not in _ACTIVATIONS:
        raise TypeError(f"x is {x.dtype}; expected bfloat16, float16 or float32")
    if x.dim() == 0 or x.shape[-1] != meta.k:
        raise ValueError(f"x has shape {list(x.shape)}; the weight [{meta.n}, {meta.k}] needs [..., {meta.k}]")
    if x.device != device:
        raise ValueError(f"x is on {x.device} but the weight, packed for {meta.arch}, on {device}; move one of them")
    if bias is None:
        return
    if bias.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"bias is {bias.dtype}; expected {x.dtype} (as x) or float32")
    if bias.shape != (meta.n,):
        raise ValueError(f"bias has shape {list(bias.shape)}; expected [{meta.n}]")
    if bias.device != device:
        raise ValueError(f"bias is on {bias.device} but the weight on {device}; move it there")


def _linear(*args: Any) -> torch.Tensor:
    call = _LinearCall(*args)
    packed = _checked(call)
    _check_activations(call.x, call.bias, call.weight.device, packed.meta)
    return packed.backend.linear(*call[:6], packed.meta)


def _linear_fake(*args: Any) -> torch.Tensor:
    call = _LinearCall(*args)
    packed = _checked(call)
    _check_activations(call.x, call.bias, call.weight.device, packed.meta)
    return call.x.new_empty((*call.x.shape[:-1], packed.meta.n))


def _dequantize(*args: Any) -> torch.Tensor:
    call = _DequantizeCall(*args)
    packed = _checked(call)
    if call.dtype not in _WEIGHTS:
        raise TypeError(f"dtype is {call.dtype}; expected float64, float32, bfloat16 or float16")
    return packed.backend.dequantize(*call[:4], packed.meta, call.dtype)


def _dequantize_fake(*args: Any) -> torch.Tensor:
    call = _DequantizeCall(*args)
    return call.weight.new_empty((call.n, call.k), dtype=call.dtype)


for _device in DEVICES:
    LIBRARY.impl("linear", _linear, _device)
    LIBRARY.impl("dequantize", _dequantize, _device)
torch.library.register_fake("petit::linear", _linear_fake, lib=LIBRARY)
torch.library.register_fake("petit::dequantize", _dequantize_fake, lib=LIBRARY)
