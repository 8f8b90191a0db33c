"""petit::linear and petit::dequantize for one packed weight."""

from __future__ import annotations

import torch

from petit_plugin._types import GROUP_SIZE, PackedMeta
from petit_plugin.backends import backend_for
from petit_plugin.ops.library import DEVICES, LIBRARY
from petit_plugin.packing.packed_weight import PackedWeight

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
    dtype, contiguous: products accumulated in float32, row scales and bias applied before one rounding.
    Raises TypeError or ValueError naming the argument.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight must be a PackedWeight (see pack_nvfp4, pack_mxfp4), got {type(weight).__name__}")
    m = weight.meta
    result: torch.Tensor = torch.ops.petit.linear(
        *(x, weight.weight, weight.scale, weight.row_scale, weight.row_exponent, bias),
        *(m.format, m.arch, m.n, m.k, m.exact),
    )
    return result


def _check_weight(
    weight: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    row_exponent: torch.Tensor | None,
    meta: PackedMeta,
) -> None:
    """The kernels get raw pointers, so sizes that do not fit must stop here."""
    if meta.format not in GROUP_SIZE:
        raise ValueError(f"format is {meta.format!r}; expected one of {', '.join(GROUP_SIZE)}")
    layout = backend_for(meta.arch).layout(meta)
    given = {"weight": weight, "scale": scale, "row_scale": row_scale}
    if row_exponent is not None:
        given["row_exponent"] = row_exponent
    for name, tensor in given.items():
        shape, dtype = layout[name]
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}; a {meta.format} weight [{meta.n}, {meta.k}] packed "
                f"for {meta.arch} has contiguous {dtype} {list(shape)}"
            )
        if tensor.device != weight.device:
            raise ValueError(f"{name} is on {tensor.device} but weight on {weight.device}; move it there")


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


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    row_exponent: torch.Tensor | None,
    bias: torch.Tensor | None,
    format: str,
    arch: str,
    n: int,
    k: int,
    exact: bool,
) -> torch.Tensor:
    meta = PackedMeta(format, arch, n, k, exact)
    _check_weight(weight, scale, row_scale, row_exponent, meta)
    _check_activations(x, bias, weight.device, meta)
    return backend_for(arch).linear(x, weight, scale, row_scale, row_exponent, bias, meta)


def _linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    row_exponent: torch.Tensor | None,
    bias: torch.Tensor | None,
    format: str,
    arch: str,
    n: int,
    k: int,
    exact: bool,
) -> torch.Tensor:
    meta = PackedMeta(format, arch, n, k, exact)
    _check_weight(weight, scale, row_scale, row_exponent, meta)
    _check_activations(x, bias, weight.device, meta)
    return x.new_empty((*x.shape[:-1], n))


def _dequantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    row_exponent: torch.Tensor | None,
    format: str,
    arch: str,
    n: int,
    k: int,
    exact: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    meta = PackedMeta(format, arch, n, k, exact)
    _check_weight(weight, scale, row_scale, row_exponent, meta)
    if dtype not in _WEIGHTS:
        raise TypeError(f"dtype is {dtype}; expected float64, float32, bfloat16 or float16")
    return backend_for(arch).dequantize(weight, scale, row_scale, row_exponent, meta, dtype)


def _dequantize_fake(
    weight: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    row_exponent: torch.Tensor | None,
    format: str,
    arch: str,
    n: int,
    k: int,
    exact: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    return weight.new_empty((n, k), dtype=dtype)


for _device in DEVICES:
    LIBRARY.impl("linear", _linear, _device)
    LIBRARY.impl("dequantize", _dequantize, _device)
torch.library.register_fake("petit::linear", _linear_fake, lib=LIBRARY)
torch.library.register_fake("petit::dequantize", _dequantize_fake, lib=LIBRARY)
