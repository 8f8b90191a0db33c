"""E2M1, the 4-bit element of NVFP4 and MXFP4 (OCP MX specification v1.0, section 5.3.3).

A code is sign (bit 3), two exponent bits with bias 1 and one mantissa bit. There is no NaN and no infinity. Code 8 is
negative zero. Two codes share a byte: element 2i in the low nibble, element 2i + 1 in the high nibble.
"""

from __future__ import annotations

from typing import Literal

import torch

from petit_plugin.formats._common import check_dtype, check_result_dtype, row_chunks

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = 6.0

# Midpoint between magnitude i and i + 1. Every second one is a tie that goes up to the even code.
BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

Ties = Literal["even", "zero"]

_VALUES = torch.tensor([*MAGNITUDES, *(-v for v in MAGNITUDES)], dtype=torch.float32)
# Both elements of every possible byte: one table look-up decodes two weights.
_PAIRS = torch.stack([_VALUES[torch.arange(256) & 15], _VALUES[torch.arange(256) >> 4]], dim=1)


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of unpacked codes, exact.

    codes: uint8 [...], each 0..15. Returns `dtype` (float32 or float64) of the same shape; code 8 gives -0.0.
    Raises ValueError for a code above 15 (packed bytes go through `unpack` or `decode_packed`).
    """
    codes = check_dtype("codes", codes, (torch.uint8,))
    if codes.numel() and int(codes.max()) > 15:
        raise ValueError(f"codes must be 0..15, got {int(codes.max())}: unpack() the bytes first")
    table = _VALUES.to(device=codes.device, dtype=check_result_dtype(dtype))
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def decode_packed(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of packed bytes: uint8 [..., K/2] -> `dtype` [..., K], exact."""
    packed = check_dtype("packed", packed, (torch.uint8,))
    table = _PAIRS.to(device=packed.device, dtype=check_result_dtype(dtype))
    pairs = table.index_select(0, packed.reshape(-1).int())
    return pairs.view(*packed.shape[:-1], packed.shape[-1] * 2)


def magnitude_codes(magnitude: torch.Tensor, ties: Ties = "even") -> torch.Tensor:
    """Nearest codes 0..7 of non-negative values; above 5 is 7 (6.0), NaN is 0. uint8, same shape."""
    codes = torch.zeros(magnitude.shape, dtype=torch.uint8, device=magnitude.device)
    for i, bound in enumerate(BOUNDS):
        codes += magnitude >= bound if ties == "even" and i % 2 else magnitude > bound
    return codes


def encode_rne(values: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 codes, ties to the even code, magnitudes beyond 6 saturated to 6 (the specification's conversion).

    values: float64, float32, bfloat16 or float16 [...]. Returns uint8 codes 0..15 of the same shape. The sign bit is
    kept: -0.0 and negative values that round to zero give 8. Raises ValueError if a value is NaN.
    """
    values = check_dtype("values", values, (torch.float64, torch.float32, torch.bfloat16, torch.float16))
    flat = values.reshape(-1)
    out = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
    for part in row_chunks(flat.shape[0], 1):
        chunk = flat[part]
        if bool(torch.isnan(chunk).any()):
            raise ValueError("values holds NaN, which E2M1 cannot represent")
        out[part] = magnitude_codes(chunk.abs()).bitwise_or_(torch.signbit(chunk).to(torch.uint8).mul_(8))
    return out.view(values.shape)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, even element in the low nibble: uint8 [..., K] (0..15) -> uint8 [..., K/2].

    Raises ValueError if K is odd or a code is above 15.
    """
    codes = check_dtype("codes", codes, (torch.uint8,))
    if codes.dim() == 0 or codes.shape[-1] % 2:
        raise ValueError(f"codes must have an even last dimension, got shape {tuple(codes.shape)}")
    if codes.numel() and int(codes.max()) > 15:
        raise ValueError(f"codes must be 0..15, got {int(codes.max())}")
    return (codes[..., 1::2] << 4).bitwise_or_(codes[..., 0::2])


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`: uint8 [..., K/2] -> uint8 codes 0..15 [..., K]."""
    packed = check_dtype("packed", packed, (torch.uint8,))
    if packed.dim() == 0:
        raise ValueError("packed must have at least one dimension")
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.uint8, device=packed.device)
    torch.bitwise_and(packed, 15, out=out[..., 0::2])
    out[..., 1::2] = packed >> 4
    return out
