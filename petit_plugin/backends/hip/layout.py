"""The Petit CDNA layout: checkpoint tensors to packed tensors and back, in torch operations on any device.

Tensors (rows padded to 64, k to 128; R row groups, T k-tiles; docs/layout.md):
  weight  uint8 [R, T, 4, 64, 16]  n-tile j, lane 16g + r: codes of row 16j + r, k = 32g .. 32g + 31, a word per 8
  scale   uint8 [R, T, 64, 4 * h]  lane 16g + r: h dwords (2 NVFP4, 1 MXFP4) of four scales, n-tiles 0..3
  row_scale f32 [64 R], row_exponent i32 [64 R]:  y = sum * row_scale * 2^row_exponent
What a scale byte means depends on the core that reads it; `Encoding` says how.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from petit_plugin._types import CheckpointTensors, PackedMeta
from petit_plugin.backends.hip.words import pack_e5m3, permute_words, unpack_e5m3

ROW_GROUP, TILE_K = 64, 128
WINDOW_TOP = 255  # EXACT MXFP4: each row's largest scale byte
FUSED_TOP = 140  # gfx950 conversion: the row's largest scale is 2^13, 6 * 2^13 < 65504
EXACT_WARNING = "%s has rows outside the number window of the fast %s kernels; this layer runs their EXACT variant"


class Encoding(NamedTuple):
    """How (arch, format, exact) stores scales.

    e5m3: bytes are f16 bits >> 7 in rotated dwords (else E8M0-like bytes in plain dwords). top: f16 exponent (unbiased)
    the largest scale of a row is moved to. field: the operand is code * 2^-field * scale. mask: nibble order.
    """

    mask: bool
    e5m3: bool
    top: int
    field: int


def encoding(fmt: str, arch: str, exact: bool) -> Encoding:
    base, _, variant = arch.partition("-")
    mask = base != "gfx950" or variant == "mask"
    if fmt == "mxfp4" and (exact or not mask):
        return Encoding(mask, False, 13, 0)  # windowed, or fused into the conversion
    if mask and not exact:
        return Encoding(True, True, 15, 14)
    return Encoding(mask, True, 12, 0)  # 6 * 1.875 * 2^12 < 65504


def padded(meta: PackedMeta) -> tuple[int, int]:
    """Row groups and k-tiles."""
    return -(-meta.n // ROW_GROUP), -(-meta.k // TILE_K)


def shapes(meta: PackedMeta) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    groups, tiles = padded(meta)
    dwords = TILE_K // 4 // meta.group_size
    return {
        "weight": ((groups, tiles, 4, 64, 16), torch.uint8),
        "scale": ((groups, tiles, 64, 4 * dwords), torch.uint8),
        "row_scale": ((groups * ROW_GROUP,), torch.float32),
        "row_exponent": ((groups * ROW_GROUP,), torch.int32),
    }


class Canonical(NamedTuple):
    """A checkpoint weight with signs folded and scales taken apart: scale = significand * 2^exponent.

    codes uint8 [n, k/2]; significand f32 [n, k/g] (0 for a block without scale, else in [1, 2)); exponent i32 [n, k/g];
    smallest f32 [n, k/g], the least non-zero |code| of a block, 0 if it has none.
    """

    codes: torch.Tensor
    significand: torch.Tensor
    exponent: torch.Tensor
    smallest: torch.Tensor


_MAGNITUDE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def canonical(source: CheckpointTensors) -> Canonical:
    """Raises ValueError naming the tensor if the scale of a block with non-zero codes is NaN."""
    group = 16 if source.format == "nvfp4" else 32
    blocks = source.weight.reshape(source.n, -1, group // 2)
    low, high = blocks & 7, blocks >> 4 & 7
    least = torch.where(low == 0, 8, low).amin(-1).minimum(torch.where(high == 0, 8, high).amin(-1))
    empty = least == 8
    smallest = _MAGNITUDE.to(least.device)[torch.where(empty, 0, least).long()]
    raw, codes = source.scale, source.weight
    if source.format == "nvfp4":
        nan = (raw & 0x7F) == 0x7F
        if bool((raw >= 0x80).any()):
            flip = torch.where(raw >= 0x80, 0x88, 0).to(torch.uint8)
            codes = (blocks ^ flip[..., None]).reshape(codes.shape)
        magnitude = torch.where(nan, 0, raw & 0x7F).view(torch.float8_e4m3fn).float()
    else:
        nan = raw == 255
        magnitude = torch.ones_like(smallest)
    bad = nan & ~empty
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        name = f"{source.name}.weight_scale" if source.name else "weight_scale"
        raise ValueError(f"{name}[{row}, {column}] is NaN and its block is not all zero; the checkpoint is damaged")
    if source.format == "mxfp4":
        # The scale of an empty block says nothing; 0 keeps it out of the row's range.
        return Canonical(codes, torch.where(empty, 0.0, magnitude), raw.int() - 127, smallest)
    mantissa, exponent = torch.frexp(magnitude)
    return Canonical(codes, mantissa * 2, exponent.int() - 1, smallest)


def row_tops(c: Canonical) -> torch.Tensor:
    """i32 [n]: exponent of each row's largest scale; 0 for rows without one."""
    low = torch.iinfo(torch.int32).min
    top = torch.where(c.significand > 0, c.exponent, low).amax(-1)
    return torch.where(top == low, 0, top).int()


def fits(c: Canonical, tops: torch.Tensor, fmt: str, arch: str) -> torch.Tensor:
    """bool [n]: every operand of the row is exact in the fast kernel.

    The operand is code * 2^-field * scale in f16: normal on gfx90a, whose MFMA flushes subnormals, and a multiple of
    2^-24 elsewhere; the unscaled mask field is subnormal itself, but only the product reaches the MFMA. gfx950's fused
    conversion must give normal numbers, since its rounding of subnormals is not documented.
    """
    e = encoding(fmt, arch, False)
    scale = c.exponent - tops[:, None] + e.top  # exponent of the stored scale
    used = (c.smallest > 0) & (c.significand > 0)
    if not e.e5m3:
        good = scale - 1 >= -14  # 0.5 * 2^scale
    else:
        least = c.significand * c.smallest  # times 2^(scale - field)
        product = torch.ldexp(least, (scale - e.field).clamp(-60, 60))
        grid_bits = 1 + (3 if fmt == "nvfp4" else 0)  # of 0.5 in E2M1, of the significand
        normal_only = arch == "gfx90a"
        good = product >= 2.0**-14 if normal_only else (product >= 2.0**-14) | (scale - e.field - grid_bits >= -24)
        good &= scale >= -14  # the stored scale is a normal E5M3
    return (good | ~used).all(-1)


def _scale_bytes(c: Canonical, tops: torch.Tensor, e: Encoding, exact: bool) -> torch.Tensor:
    moved = c.exponent - tops[:, None]
    if not e.e5m3:
        return (
            torch.where(c.significand > 0, moved + (WINDOW_TOP if exact else FUSED_TOP), 0)
            .clamp(0, 255)
            .to(torch.uint8)
        )
    value = torch.ldexp(c.significand, (moved + e.top).clamp(-30, 15))
    return (value.half().view(torch.int16) >> 7).to(torch.uint8)


def pack(
    source: CheckpointTensors, arch: str, out: dict[str, torch.Tensor] | None
) -> tuple[PackedMeta, dict[str, torch.Tensor]]:
    c = canonical(source)
    tops = row_tops(c)
    exact = not bool(fits(c, tops, source.format, arch).all())
    meta = PackedMeta(source.format, arch, source.n, source.k, exact)
    e = encoding(source.format, arch, exact)
    groups, tiles = padded(meta)
    device = source.weight.device

    codes = torch.zeros(groups * ROW_GROUP, tiles * TILE_K // 2, dtype=torch.uint8, device=device)
    codes[: source.n, : source.k // 2] = c.codes
    words = codes.reshape(groups, 4, 16, tiles, 4, 4, 4).permute(0, 3, 1, 4, 2, 5, 6)  # [R, T, j, g, r, t, byte]
    weight = permute_words(words) if e.mask else words.contiguous()

    per_lane = TILE_K // 4 // meta.group_size
    scales = torch.zeros(groups * ROW_GROUP, tiles * 4 * per_lane, dtype=torch.uint8, device=device)
    scales[: source.n, : source.k // meta.group_size] = _scale_bytes(c, tops, e, exact)
    lanes = scales.reshape(groups, 4, 16, tiles, 4, per_lane).permute(0, 3, 4, 2, 5, 1)  # [R, T, g, r, h, j]
    scale = pack_e5m3(lanes) if e.e5m3 else lanes.contiguous()

    rows = groups * ROW_GROUP
    row_scale = torch.zeros(rows, dtype=torch.float32, device=device)
    row_scale[: source.n] = source.global_scale
    row_exponent = torch.zeros(rows, dtype=torch.int32, device=device)
    row_exponent[: source.n] = tops - e.top + e.field
    packed = {"weight": weight, "scale": scale, "row_scale": row_scale, "row_exponent": row_exponent}
    packed = {name: packed[name].reshape(shape) for name, (shape, _) in shapes(meta).items()}
    if out is None:
        return meta, packed
    for name, tensor in packed.items():
        out[name].copy_(tensor)
    return meta, dict(out)


def unpack_codes(meta: PackedMeta, weight: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k/2] checkpoint codes."""
    groups, tiles = padded(meta)
    words = weight.reshape(groups, tiles, 4, 4, 16, 4, 4)
    if encoding(meta.format, meta.arch, meta.exact).mask:
        words = permute_words(words, inverse=True)
    codes = words.permute(0, 2, 4, 1, 3, 5, 6).reshape(groups * ROW_GROUP, tiles * TILE_K // 2)
    return codes[: meta.n, : meta.k // 2].contiguous()


def unpack_scales(
    meta: PackedMeta, scale: torch.Tensor, row_exponent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Significand f32 and exponent i32 [n, k/group] of the true block scales."""
    groups, tiles = padded(meta)
    e = encoding(meta.format, meta.arch, meta.exact)
    per_lane = TILE_K // 4 // meta.group_size
    lanes = scale.reshape(groups, tiles, 4, 16, per_lane, 4)
    stored = (unpack_e5m3(lanes.contiguous()) if e.e5m3 else lanes).permute(0, 5, 3, 1, 2, 4)
    stored = stored.reshape(groups * ROW_GROUP, -1)[: meta.n, : meta.k // meta.group_size]
    if e.e5m3:
        value = (stored.to(torch.int16) << 7).view(torch.float16).float()
    else:
        top = (WINDOW_TOP if meta.exact else FUSED_TOP) - e.top
        significand = (stored > 0).float()
        return significand, stored.int() - top - e.field + row_exponent[: meta.n, None]
    mantissa, exponent = torch.frexp(value)
    return mantissa * 2, exponent.int() - 1 - e.field + row_exponent[: meta.n, None]


def unpack(meta: PackedMeta, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Checkpoint codes and scale bytes. Scales of empty MXFP4 blocks, which mean nothing, come back as 127."""
    significand, exponent = unpack_scales(meta, tensors["scale"], tensors["row_exponent"])
    if meta.format == "mxfp4":
        scales = torch.where(significand > 0, exponent + 127, 127).to(torch.uint8)
    else:
        value = torch.ldexp(significand, exponent)
        scales = value.to(torch.float8_e4m3fn).view(torch.uint8)
    return unpack_codes(meta, tensors["weight"]), scales


def dequantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    row_exponent: torch.Tensor,
    meta: PackedMeta,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[n, k]: code * scale * row_scale, exact in float64, rounded once to dtype."""
    codes = unpack_codes(meta, weight)
    significand, exponent = unpack_scales(meta, scale, row_exponent)
    values = torch.cat([_MAGNITUDE, -_MAGNITUDE]).double().to(codes.device)
    w = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1).reshape(meta.n, -1, meta.group_size)
    factor = torch.ldexp(significand.double(), exponent.clamp(-200, 200)) * row_scale[: meta.n, None].double()
    return (w * factor[..., None]).reshape(meta.n, meta.k).to(dtype)
