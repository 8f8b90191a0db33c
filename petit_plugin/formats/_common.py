"""Argument checks and row chunking shared by the format modules."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

# Elements handled at a time: the float32 work space of a chunk (4 MB) stays in a core's share of the cache, and the
# temporaries of a 57344 x 8192 layer stay in the tens of megabytes.
CHUNK_ELEMENTS = 1 << 20

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RESULT_DTYPES = (torch.float32, torch.float64)


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    return value


def check_dtype(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    tensor = check_tensor(name, value)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype {dtype_names(dtypes)}, got {str(tensor.dtype).removeprefix('torch.')}")
    return tensor


def check_result_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in RESULT_DTYPES:
        raise TypeError(
            f"dtype must be {dtype_names(RESULT_DTYPES)}, got {dtype}: other types would be rounded twice, "
            "dequantize to float64 and convert the result"
        )
    return dtype


def check_weight(w: object, group: int) -> torch.Tensor:
    """A weight to quantise: floating point, at least one dimension, rows of whole blocks."""
    weight = check_dtype("w", w, WEIGHT_DTYPES)
    if weight.dim() == 0 or weight.shape[-1] % group:
        raise ValueError(
            f"w must have a last dimension that is a multiple of the block size {group}, got shape "
            f"{tuple(weight.shape)}: pad it with zeros or leave the layer unquantised"
        )
    return weight.detach()


def check_packed(weight: object, weight_scale: torch.Tensor, group: int) -> torch.Tensor:
    """Packed codes uint8 [..., K/2] whose scales [..., K/group] fit them."""
    packed = check_dtype("weight", weight, (torch.uint8,))
    if packed.dim() == 0 or packed.shape[-1] * 2 % group:
        raise ValueError(
            f"weight must be [..., K/2] with K a multiple of {group}, got shape {tuple(packed.shape)} "
            f"(K = {packed.shape[-1] * 2 if packed.dim() else 0})"
        )
    expected = (*packed.shape[:-1], packed.shape[-1] * 2 // group)
    if tuple(weight_scale.shape) != expected:
        raise ValueError(
            f"weight_scale must have shape {expected} (one scale per {group} elements of K) for weight of shape "
            f"{tuple(packed.shape)}, got {tuple(weight_scale.shape)}: on disk block scales are linear, not swizzled"
        )
    return packed


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., K] -> [R, K]; unlike reshape(-1, K), also for empty tensors."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices over `rows` holding about CHUNK_ELEMENTS elements each (at least one row)."""
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def check_finite(name: str, amax: torch.Tensor, hint: str) -> None:
    """`amax` holds maxima of absolute values, so it carries every NaN and infinity of the data."""
    if not bool(torch.isfinite(amax).all()):
        raise ValueError(f"{name} holds NaN or infinity: {hint}")


def block_amax(rows: torch.Tensor, group: int) -> torch.Tensor:
    """[R, K] -> float32 [R, K/group], the largest magnitude of each block (exact, NaN propagates)."""
    if rows.numel() == 0:
        return torch.zeros(rows.shape[0], rows.shape[1] // group, dtype=torch.float32, device=rows.device)
    blocks = rows.abs().reshape(rows.shape[0], rows.shape[1] // group, group)
    return blocks.amax(dim=-1).float()
