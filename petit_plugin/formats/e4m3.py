"""E4M3FN, the block scale of NVFP4 (OCP 8-bit Floating Point Specification v1.0: E4M3, bias 7).

Normal codes are (-1)^s * 2^(e-7) * (1 + m/8), e = 0 is subnormal m * 2^-9, the largest magnitude is 448 (0x7E) and 0x7F
and 0xFF are NaN. This is not the FNUZ variant of some hardware, whose bias is 8 and whose 0x80 is NaN.
"""

from __future__ import annotations

import torch

from petit_plugin.formats._common import check_dtype, check_result_dtype

MAX = 448.0
MIN_SUBNORMAL = 2.0**-9

# Largest magnitude that still rounds to 448: the tie with the NaN code above it goes to the even code.
OVERFLOW = 464.0

_NAN_CODES = (0x7F, 0xFF)


def _value(code: int) -> float:
    if code in _NAN_CODES:
        return float("nan")
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else mantissa * 2.0**-9
    return -magnitude if code & 0x80 else magnitude


_VALUES = torch.tensor([_value(c) for c in range(256)], dtype=torch.float32)


def as_codes(scale: torch.Tensor, name: str = "scale") -> torch.Tensor:
    """The bytes of a scale tensor given as float8_e4m3fn or as uint8 (no copy). Raises TypeError for other dtypes."""
    scale = check_dtype(name, scale, (torch.float8_e4m3fn, torch.uint8))
    return scale if scale.dtype == torch.uint8 else scale.view(torch.uint8)


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of codes, exact: uint8 or float8_e4m3fn [...] -> `dtype` (float32 or float64), NaN for 0x7F and 0xFF."""
    raw = as_codes(codes, "codes")
    table = _VALUES.to(device=raw.device, dtype=check_result_dtype(dtype))
    return table.index_select(0, raw.reshape(-1).int()).view(raw.shape)


def encode_rne(values: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3FN codes, ties to even, as uint8 of the same shape.

    values: float64, float32, bfloat16 or float16. Nothing saturates: magnitudes that round beyond 448 (above 464) and
    infinities become NaN, as in the format's non-saturating conversion; clamp first to saturate. Signs are kept.
    """
    values = check_dtype("values", values, (torch.float64, torch.float32, torch.bfloat16, torch.float16))
    if values.dtype == torch.float64:
        # Round on the format's own grid, so that going through float32 cannot round a second time.
        exponent = torch.frexp(values).exponent.clamp(min=-5) - 4
        quantum = torch.ldexp(torch.ones_like(values), exponent)
        finite = torch.where(values.isfinite(), values / quantum, values)
        values = torch.where(values.isfinite(), finite.round() * quantum, values)
    codes = values.float().to(torch.float8_e4m3fn).view(torch.uint8)
    # torch versions differ in whether this conversion saturates: decide here.
    overflow = (values.abs() > OVERFLOW) | values.isnan()
    return torch.where(overflow, torch.signbit(values).to(torch.uint8) * 0x80 + 0x7F, codes)
