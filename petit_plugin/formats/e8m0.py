"""E8M0, the block scale of MXFP4 (OCP MX specification v1.0, section 5.4.1): value 2^(code - 127), 255 is NaN.

Code 0 is 2^-127, a float32 subnormal; there is no zero and no sign.
"""

from __future__ import annotations

import torch

from petit_plugin.formats._common import check_dtype, check_result_dtype

BIAS = 127
NAN_CODE = 255

# torch has the dtype from 2.7 on; uint8 is accepted with any version.
DTYPE: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)
_DTYPES: tuple[torch.dtype, ...] = (torch.uint8,) if DTYPE is None else (torch.uint8, DTYPE)

_VALUES = torch.tensor([2.0 ** (c - BIAS) for c in range(NAN_CODE)] + [float("nan")], dtype=torch.float64)


def as_codes(scale: torch.Tensor, name: str = "scale") -> torch.Tensor:
    """The bytes of a scale tensor given as uint8 or float8_e8m0fnu (no copy). Raises TypeError for other dtypes."""
    scale = check_dtype(name, scale, _DTYPES)
    return scale if scale.dtype == torch.uint8 else scale.view(torch.uint8)


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of codes, exact (2^-127 included): uint8 or float8_e8m0fnu [...] -> `dtype` (float32 or float64)."""
    raw = as_codes(codes, "codes")
    table = _VALUES.to(device=raw.device, dtype=check_result_dtype(dtype))
    return table.index_select(0, raw.reshape(-1).int()).view(raw.shape)


def from_exponent(exponent: torch.Tensor) -> torch.Tensor:
    """Codes of the scales 2^exponent: integer tensor -> uint8. Raises ValueError outside [-127, 127]."""
    if exponent.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8):
        raise TypeError(f"exponent must be a signed integer tensor, got {exponent.dtype}")
    if exponent.numel():
        low, high = (int(v) for v in torch.aminmax(exponent))
        if low < -BIAS or high > BIAS:
            raise ValueError(f"exponent must be in [-127, 127], got values from {low} to {high}")
    return (exponent.to(torch.int32) + BIAS).to(torch.uint8)


def encode_nearest(values: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest powers of two, halfway (1.5 * 2^e) going up, as uint8 of the same shape.

    values: float64, float32, bfloat16 or float16. Values below 2^-127 give code 0; zero, negative values, NaN and
    values that round beyond 2^127 give 255 (NaN), since the format has neither zero nor sign nor infinity.
    """
    values = check_dtype("values", values, (torch.float64, torch.float32, torch.bfloat16, torch.float16)).double()
    mantissa, exponent = torch.frexp(values)  # values = mantissa * 2^exponent, mantissa in [0.5, 1)
    code = (exponent - 1 + BIAS + (mantissa >= 0.75)).clamp(min=0)
    invalid = ~(values > 0) | values.isinf() | (code >= NAN_CODE)
    return torch.where(invalid, NAN_CODE, code).to(torch.uint8)
