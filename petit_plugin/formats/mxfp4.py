"""MXFP4: E2M1 elements in blocks of 32 along K, one E8M0 (power of two) scale per block (OCP MX specification v1.0).

    w[n, k] = e2m1(weight[n, k]) * 2^(weight_scale[n, k // 32] - 127)

Tools choose the block exponent differently, so the rule is an argument. With a the block's largest magnitude:

=========  ============================================  =======================================================
round_up   ceil(log2(a / 6))                             nothing saturates; what NVIDIA ModelOpt writes
floor      floor(log2(a)) - 2                            the specification, section 6.3; 6 < a / scale < 8 saturates
even       floor(log2(a rounded to 2 leading bits)) - 2  AMD Quark's "even": as floor, but 7 and above moves up
=========  ============================================  =======================================================

and all clamped to [-127, 127]. The element rounding goes with it (argument `rounding`): ModelOpt rounds ties towards
zero and writes every exact zero as code 8, negative zero; "nearest_even" is the specification's conversion and keeps
signs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from petit_plugin.formats import e2m1, e8m0
from petit_plugin.formats._common import (
    as_rows,
    block_amax,
    check_finite,
    check_packed,
    check_result_dtype,
    check_weight,
    row_chunks,
)

GROUP = 32

ScaleMode = Literal["round_up", "floor", "even"]
Rounding = Literal["modelopt", "nearest_even"]


class MxFp4Tensors(NamedTuple):
    """A quantised weight, named as in a ModelOpt checkpoint."""

    weight: torch.Tensor  # uint8 [..., K/2], element 2i in the low nibble of byte i
    weight_scale: torch.Tensor  # uint8 [..., K/32], E8M0


def quantize(w: torch.Tensor, *, scale_mode: ScaleMode = "round_up", rounding: Rounding | None = None) -> MxFp4Tensors:
    """Quantise a weight to MXFP4.

    w: float32, bfloat16 or float16 [..., K] with K a multiple of 32, on any device. `scale_mode` is one of the rules of
    the module's table. `rounding` defaults to "modelopt" for "round_up", so that the default equals ModelOpt's tensors
    bit for bit (compared with 0.47), and to "nearest_even" for the other two. A block of zeros has scale byte 0.

    Raises TypeError for another dtype, ValueError for a bad K, an unknown mode, or a NaN or infinity in w.
    """
    if scale_mode not in get_args(ScaleMode):
        raise ValueError(f"scale_mode must be one of {', '.join(get_args(ScaleMode))}, got {scale_mode!r}")
    if rounding is None:
        rounding = "modelopt" if scale_mode == "round_up" else "nearest_even"
    if rounding not in get_args(Rounding):
        raise ValueError(f"rounding must be one of {', '.join(get_args(Rounding))}, got {rounding!r}")
    weight = check_weight(w, GROUP)
    rows = as_rows(weight)

    packed = torch.empty(rows.shape[0], rows.shape[1] // 2, dtype=torch.uint8, device=rows.device)
    scale = torch.empty(rows.shape[0], rows.shape[1] // GROUP, dtype=torch.uint8, device=rows.device)
    for part in row_chunks(*rows.shape):
        maxima = block_amax(rows[part], GROUP)
        check_finite("w", maxima, "a quantised weight must be finite; check the checkpoint this tensor came from")
        exponent = block_exponent(maxima, scale_mode)
        scale[part] = (exponent + e8m0.BIAS).to(torch.uint8)
        # A power of two divides exactly (what underflows is far below the first rounding bound), in float32 for every
        # dtype.
        scaled = _blocks(rows[part]) / e8m0.decode(scale[part]).unsqueeze(-1)
        if rounding == "modelopt":
            negative = scaled <= 0
            codes = e2m1.magnitude_codes(scaled.abs(), ties="zero")
        else:
            negative = torch.signbit(scaled)
            codes = e2m1.magnitude_codes(scaled.abs())
        codes = codes.bitwise_or_(negative.to(torch.uint8).mul_(8)).flatten(1)
        torch.bitwise_or(codes[:, 1::2] << 4, codes[:, 0::2], out=packed[part])
    lead = weight.shape[:-1]
    return MxFp4Tensors(packed.view(*lead, packed.shape[1]), scale.view(*lead, scale.shape[1]))


def block_exponent(amax: torch.Tensor, scale_mode: ScaleMode) -> torch.Tensor:
    """Exponents of the block scales, int32 in [-127, 127], for float32 block maxima (finite, >= 0) of any shape."""
    if scale_mode == "round_up":
        # In float32 with torch's own log2, as ModelOpt computes it: just above a power of two the rounded logarithm may
        # be the integer itself, which keeps the smaller scale and saturates the block's maximum.
        exponent = torch.log2(amax / e2m1.MAX).clamp_(min=-e8m0.BIAS).ceil_().to(torch.int32)
    else:
        if scale_mode == "even":
            # Round to one mantissa bit with a carry: adding a quarter of the leading bit moves 1.75 and above to the
            # next power of two. Exact in float64.
            mantissa, exponent = torch.frexp(amax.double())
            exponent = exponent + (mantissa >= 0.875)
        else:
            exponent = torch.frexp(amax).exponent
        # frexp has its mantissa in [0.5, 1): floor(log2(amax)) is exponent - 1; 2 is the exponent of E2M1's largest
        # value.
        exponent = torch.where(amax == 0, -e8m0.BIAS, exponent - 3)
    return exponent.to(torch.int32).clamp_(-e8m0.BIAS, e8m0.BIAS)


def dequantize(weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of an MXFP4 weight, [..., K] in `dtype` (float32 or float64).

    weight: uint8 [..., K/2]. weight_scale: uint8 or float8_e8m0fnu [..., K/32], both read as 2^(byte - 127). Exact in
    both types, but for float32 magnitudes beyond its largest number (possible for bytes 253 and 254), which become
    infinite. A scale byte 255 gives NaN. Raises ValueError or TypeError for shapes and dtypes that do not fit.
    """
    check_result_dtype(dtype)
    scales = e8m0.as_codes(weight_scale, "weight_scale")
    packed = check_packed(weight, scales, GROUP)
    k = packed.shape[-1] * 2
    flat, flat_scales = as_rows(packed), as_rows(scales)
    out = torch.empty(flat.shape[0], k, dtype=dtype, device=packed.device)
    for part in row_chunks(*out.shape):
        values = _blocks(e2m1.decode_packed(flat[part], dtype))
        torch.mul(values, e8m0.decode(flat_scales[part], dtype).unsqueeze(-1), out=out[part].view_as(values))
    return out.view(*packed.shape[:-1], k)


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    """[R, K] -> [R, K/GROUP, GROUP]."""
    return rows.reshape(rows.shape[0], rows.shape[1] // GROUP, GROUP)
