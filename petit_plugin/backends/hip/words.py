"""Bit orders of a 32-bit word of eight E2M1 codes, and of a dword of four scales. docs/layout.md has the pictures.

Plain order: nibble i (bits 4i .. 4i + 3) is k = 8t + i, as in a checkpoint. Mask order serves the f16 core, which takes
{q, q << 8, bitreverse(q), bitreverse(q) << 8} & 0x8e008e00 as four f16 pairs: sign to bit 15, the other three bits to
11, 10, 9 of each half. Both are permutations of the 32 bits, done here a byte at a time through tables.
"""

from __future__ import annotations

from functools import cache

import torch

_HALF_BITS = (9, 10, 11, 15)  # where mantissa, low and high exponent bit and sign of a code sit in its f16


def _mask_bit(source: int) -> int:
    """The bit of the mask-order word that holds plain bit `source`."""
    nibble, bit = divmod(source, 4)
    pair, high = divmod(nibble, 2)
    shown = _HALF_BITS[bit] + 16 * high  # bit of the pair the mask extracts
    return {0: shown, 1: shown - 8, 2: 31 - shown, 3: 39 - shown}[pair]


MASK_BITS = tuple(_mask_bit(i) for i in range(32))


@cache
def _tables(inverse: bool) -> torch.Tensor:
    """int32 [4, 256]: what byte b with value v contributes to the permuted word."""
    target = [0] * 32
    for plain, mask in enumerate(MASK_BITS):
        if inverse:
            target[mask] = plain
        else:
            target[plain] = mask
    value = torch.arange(256, dtype=torch.int64)
    out = torch.zeros(4, 256, dtype=torch.int64)
    for byte in range(4):
        for bit in range(8):
            out[byte] |= (value >> bit & 1) << target[8 * byte + bit]
    return out.to(torch.int32)  # wraps: bit 31 is the sign


def permute_words(words: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """uint8 [..., 4] plain-order words (little endian) to mask order, or back."""
    tables = _tables(inverse).to(words.device)
    flat = words.reshape(-1, 4).to(torch.int32)
    out = tables[0][flat[:, 0]]
    for byte in (1, 2, 3):
        out |= tables[byte][flat[:, byte]]
    return out.view(torch.uint8).reshape(words.shape)


def pack_e5m3(scales: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4], E5M3 scales of n-tiles 0..3, to the dword the kernels decode with two ANDs and a rotate.

    The dword is (s0 | s3 << 8 | s1 << 16 | s2 << 24) rotated left by 7: s0 and s1 then sit at f16 bits 14..7 of the
    halves, s2 and s3 after a rotation by 8.
    """
    s = scales.to(torch.int64)
    plain = s[..., 0] | s[..., 3] << 8 | s[..., 1] << 16 | s[..., 2] << 24
    rotated = (plain << 7 | plain >> 25) & 0xFFFFFFFF
    return rotated.to(torch.int32).view(torch.uint8).reshape(scales.shape)


def unpack_e5m3(dwords: torch.Tensor) -> torch.Tensor:
    """The inverse of pack_e5m3."""
    d = dwords.contiguous().view(torch.int32).to(torch.int64).squeeze(-1) & 0xFFFFFFFF
    plain = (d >> 7 | d << 25) & 0xFFFFFFFF
    return torch.stack([plain & 255, plain >> 16 & 255, plain >> 24 & 255, plain >> 8 & 255], -1).to(torch.uint8)
