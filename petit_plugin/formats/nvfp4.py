"""NVFP4: E2M1 elements in blocks of 16 along K, E4M3 block scales, one float32 scale for the tensor.

    w[n, k] = e2m1(weight[n, k]) * e4m3(weight_scale[n, k // 16]) * weight_scale_2

The tensor scale multiplies. The quantiser writes the tensors of NVIDIA ModelOpt (compared with 0.47, bit for bit) for
the same weight and amax: weight_scale_2 = amax / (6 * 448), weight_scale = block amax / (6 * weight_scale_2) clamped to
[2^-9, 448] and rounded to E4M3, elements rounded to nearest even.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from petit_plugin.formats import e2m1, e4m3
from petit_plugin.formats._common import (
    as_rows,
    block_amax,
    check_dtype,
    check_finite,
    check_packed,
    check_result_dtype,
    check_weight,
    row_chunks,
)

logger = logging.getLogger("petit_plugin.formats")

GROUP = 16

# Tensor scale given to a tensor of zeros, whose amax / 2688 would be zero and divide by zero in whoever inverts it.
ZERO_TENSOR_SCALE = 2.0**-126


class NvFp4Tensors(NamedTuple):
    """A quantised weight, named as in a ModelOpt checkpoint."""

    weight: torch.Tensor  # uint8 [..., K/2], element 2i in the low nibble of byte i
    weight_scale: torch.Tensor  # float8_e4m3fn [..., K/16]
    weight_scale_2: torch.Tensor  # float32 [], multiplies


def quantize(
    w: torch.Tensor,
    *,
    amax: torch.Tensor | float | None = None,
    global_scale: torch.Tensor | float | None = None,
) -> NvFp4Tensors:
    """Quantise a weight to NVFP4 exactly as ModelOpt does.

    w: float32, bfloat16 or float16 [..., K] with K a multiple of 16, on any device. `amax` is the calibrated largest
    magnitude of the tensor (default: the tensor's own; shards that will be fused may share the largest); `global_scale`
    sets weight_scale_2 itself instead. Blocks too large for the tensor scale saturate, with one warning.

    Negative values that round to zero become code 8 (negative zero), an exact zero of either sign becomes code 0, and a
    block of zeros has scale 1. A tensor of zeros gets zero codes and weight_scale_2 = 2^-126.

    Raises TypeError for another dtype, ValueError for a bad K, a NaN or infinity in w, both `amax` and `global_scale`,
    one of them not a positive finite scalar, or an amax so small (below about 2e-42) that weight_scale_2 is zero in
    float32.
    """
    weight = check_weight(w, GROUP)
    rows = as_rows(weight)
    maxima = block_amax_chunked(rows)
    check_finite("w", maxima, "a quantised weight must be finite; check the checkpoint this tensor came from")
    scale_2 = _tensor_scale(maxima, amax, global_scale).to(rows.device)

    block_scale = maxima.div_(e2m1.MAX * scale_2)
    block_scale.masked_fill_(block_scale == 0, 1.0)
    _warn_if_saturated(block_scale)
    block_scale = block_scale.clamp_(e4m3.MIN_SUBNORMAL, e4m3.MAX).to(torch.float8_e4m3fn)

    packed = torch.empty(rows.shape[0], rows.shape[1] // 2, dtype=torch.uint8, device=rows.device)
    for part in row_chunks(*rows.shape):
        step = (block_scale[part].float() * scale_2).unsqueeze(-1)
        # The division, not a product with the reciprocal: ModelOpt's bits depend on it. It is float32 for every dtype
        # of w.
        scaled = _blocks(rows[part]) / step
        codes = e2m1.magnitude_codes(scaled.abs()).bitwise_or_((scaled < 0).to(torch.uint8).mul_(8)).flatten(1)
        torch.bitwise_or(codes[:, 1::2] << 4, codes[:, 0::2], out=packed[part])
    lead = weight.shape[:-1]
    return NvFp4Tensors(packed.view(*lead, packed.shape[1]), block_scale.view(*lead, block_scale.shape[1]), scale_2)


def dequantize(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor | float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values of an NVFP4 weight, [..., K] in `dtype`.

    weight: uint8 [..., K/2]. weight_scale: float8_e4m3fn or uint8 [..., K/16]. global_scale: float32 scalar or [1], or
    one per leading index (weight.shape[:j] for some j: one per row of a matrix, one per expert of a stack); it
    multiplies.

    float64 results are exact. float32 results are rounded once, in the product with global_scale: element times block
    scale is exact. A NaN block scale gives NaN. Raises ValueError or TypeError for shapes and dtypes that do not fit.
    """
    check_result_dtype(dtype)
    scales = e4m3.as_codes(weight_scale, "weight_scale")
    packed = check_packed(weight, scales, GROUP)
    factor = _row_factor(global_scale, packed, dtype)

    k = packed.shape[-1] * 2
    flat, flat_scales = as_rows(packed), as_rows(scales)
    out = torch.empty(flat.shape[0], k, dtype=dtype, device=packed.device)
    for part in row_chunks(*out.shape):
        values = _blocks(e2m1.decode_packed(flat[part], dtype))
        values *= e4m3.decode(flat_scales[part], dtype).unsqueeze(-1)
        torch.mul(values.flatten(1), factor[part] if factor.shape[0] > 1 else factor, out=out[part])
    return out.view(*packed.shape[:-1], k)


def block_amax_chunked(rows: torch.Tensor) -> torch.Tensor:
    """[R, K] -> float32 [R, K/16] largest magnitudes, without a temporary of the size of `rows`."""
    maxima = torch.empty(rows.shape[0], rows.shape[1] // GROUP, dtype=torch.float32, device=rows.device)
    for part in row_chunks(*rows.shape):
        maxima[part] = block_amax(rows[part], GROUP)
    return maxima


def _tensor_scale(
    maxima: torch.Tensor, amax: torch.Tensor | float | None, global_scale: torch.Tensor | float | None
) -> torch.Tensor:
    """weight_scale_2, a positive float32 scalar."""
    if amax is not None and global_scale is not None:
        raise ValueError("give amax or global_scale, not both")
    if global_scale is not None:
        return _positive_scalar("global_scale", global_scale)
    if amax is not None:
        largest = _positive_scalar("amax", amax)
    elif maxima.numel() and bool(maxima.any()):
        largest = maxima.max()
    else:
        return torch.tensor(ZERO_TENSOR_SCALE, dtype=torch.float32)
    scale = largest / (e2m1.MAX * e4m3.MAX)
    if float(scale) == 0.0:
        raise ValueError(f"amax {float(largest):g} is too small: amax / 2688 is zero in float32; rescale the weight")
    return scale


def _positive_scalar(name: str, value: torch.Tensor | float) -> torch.Tensor:
    scalar = torch.as_tensor(value).detach()
    if scalar.numel() != 1:
        raise ValueError(f"{name} must be one number for the whole tensor, got shape {tuple(scalar.shape)}")
    scalar = scalar.reshape(()).to(torch.float32)
    if not 0.0 < float(scalar) < float("inf"):
        raise ValueError(f"{name} must be positive and finite in float32, got {float(value):g}")
    return scalar


def _warn_if_saturated(block_scale: torch.Tensor) -> None:
    # A correct amax reaches 448 up to float32 rounding.
    saturated = int((block_scale > e4m3.MAX * (1 + 2.0**-10)).sum())
    if saturated:
        logger.warning(
            "NVFP4: %d of %d blocks hold values beyond 6 * 448 * weight_scale_2 and saturate: the given amax or "
            "global_scale is smaller than the weight needs",
            saturated,
            block_scale.numel(),
        )


def _row_factor(global_scale: torch.Tensor | float, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The global scale as [1, 1] or [rows, 1]."""
    if not isinstance(global_scale, torch.Tensor):
        global_scale = torch.tensor(float(global_scale), dtype=torch.float32)
    scale = check_dtype("global_scale", global_scale, (torch.float32, torch.bfloat16, torch.float16, torch.float64))
    scale = scale.detach().to(device=packed.device, dtype=dtype)
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    lead = packed.shape[:-1]
    if scale.shape != lead[: scale.dim()]:
        raise ValueError(
            f"global_scale must be a scalar or have one value per leading index of weight {tuple(packed.shape)} "
            f"(shape {tuple(lead)} or a prefix of it), got {tuple(scale.shape)}"
        )
    spread = scale.reshape(*scale.shape, *([1] * (len(lead) - scale.dim()))).expand(lead)
    return spread.reshape(-1, 1)


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    """[R, K] -> [R, K/GROUP, GROUP]."""
    return rows.reshape(rows.shape[0], rows.shape[1] // GROUP, GROUP)
