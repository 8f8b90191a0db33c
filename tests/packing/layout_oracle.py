"""The CPU layout written down a second time, in NumPy, from its description in csrc/cpu/gemm.hpp."""

from __future__ import annotations

import numpy as np
from fixtures import oracle


def layout(fmt: str, weight: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes [n_pad/16, k/8, 64] and scales [n_pad/16, k/g, 16] of a weight without negative or NaN scales and,
    for MXFP4, without row exponents."""
    codes = oracle.unpack(weight)
    n, k = codes.shape
    group = 16 if fmt == "nvfp4" else 32
    rows = -(-n // 16) * 16
    units = np.zeros((rows // 16, k // 8, 16), np.uint32)
    scales = np.full((rows // 16, k // group, 16), 0 if fmt == "nvfp4" else 127, np.uint8)
    for row in range(n):
        for column in range(k):
            pair, odd = column % 8 // 2, column % 2
            units[row // 16, column // 8, row % 16] |= np.uint32(codes[row, column]) << np.uint32(4 * pair + 16 * odd)
        for g in range(k // group):
            byte = scale[row, g]
            scales[row // 16, g, row % 16] = e5m3(oracle.e4m3_values(byte)) if fmt == "nvfp4" else byte
    return units.astype("<u4").view(np.uint8).reshape(rows // 16, k // 8, 64), scales


def e5m3(value: float) -> int:
    """The code whose value is 2^((c>>3)-16) * (1 + (c&7)/8), or 0."""
    if value == 0:
        return 0
    mantissa, exponent = np.frexp(value)  # value = mantissa * 2^exponent, mantissa in [0.5, 1)
    code = (int(exponent) - 1 + 16) * 8 + int(mantissa * 16 - 8)
    assert 2.0 ** ((code >> 3) - 16) * (1 + (code & 7) / 8) == value
    return code


def round_to(values: np.ndarray, mantissa: int, smallest: int, largest: int) -> np.ndarray:
    """float64 to the nearest number with so many stored fraction bits, ties to even, subnormals kept, in one step."""
    exponent = np.maximum(np.frexp(values)[1] - 1, smallest) - mantissa
    rounded = np.ldexp(np.rint(np.ldexp(values, -exponent)), exponent)
    return np.where(np.abs(rounded) > np.ldexp(2 - 0.5**mantissa, largest), np.copysign(np.inf, values), rounded)
