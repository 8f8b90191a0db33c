"""Checks of checkpoint tensors. Every message names the tensor, what it is, and what to do."""

from __future__ import annotations

import math

import torch

from petit_plugin._types import GROUP_SIZE, CheckpointTensors

_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_E8M0 = getattr(torch, "float8_e8m0fnu", None)  # torch >= 2.7
_SCALE_DTYPES = {
    "nvfp4": (torch.float8_e4m3fn, torch.uint8),
    "mxfp4": (torch.uint8,) if _E8M0 is None else (_E8M0, torch.uint8),
}


def label(name: str, tensor: str) -> str:
    """How a message calls a tensor: with its layer's name when there is one."""
    return f"{name}.{tensor}" if name else tensor


_FLOAT32_OVERFLOW = 2.0**128 - 2.0**103  # and more rounds to infinity
_FLOAT32_UNDERFLOW = 2.0**-150  # and less rounds to zero


def check_float32(name: str, value: object) -> None:
    """A Python number that float32 can hold: kernels compute with that. TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a Python number, got {type(value).__name__}")
    if not abs(value) < _FLOAT32_OVERFLOW:
        raise ValueError(f"{name} is {value}; it must be a finite number in the range of float32")
    if value != 0 and abs(value) <= _FLOAT32_UNDERFLOW:
        raise ValueError(f"{name} is {value}, which is zero in float32; pass 0.0 if that is meant")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _tensor(value: object, what: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, got {type(value).__name__}")
    return value


def _bytes(value: torch.Tensor, what: str, allowed: tuple[torch.dtype, ...], columns: str) -> torch.Tensor:
    """The tensor as uint8 with rows of unit stride; only an oddly strided one is copied."""
    if value.dtype in _FNUZ:
        raise TypeError(
            f"{what} is {_names((value.dtype,))}, whose bytes mean other values than a checkpoint's; load it as "
            f"{_names(allowed)} (do not convert it for the GPU first)"
        )
    if value.dtype not in allowed:
        raise TypeError(f"{what} is {_names((value.dtype,))}; expected {_names(allowed)} with the checkpoint's bytes")
    if value.dim() != 2:
        raise ValueError(f"{what} has shape {list(value.shape)}; expected two dimensions, [N, {columns}]")
    data = value.detach().view(torch.uint8)
    return data if data.stride(1) == 1 or data.shape[1] == 1 else data.contiguous()


def check_global_scale(value: object, what: str, n: int, device: torch.device) -> torch.Tensor:
    """float32 [1] or [n], contiguous and finite. Any sign is fine: it only multiplies."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isfinite(value):  # infinity and NaN have their own message below
            check_float32(what, value)
        value = torch.tensor([value], dtype=torch.float32, device=device)
    scale = _tensor(value, what)
    if scale.dtype != torch.float32:
        raise TypeError(f"{what} is {_names((scale.dtype,))}; keep it in float32, which the checkpoint stores")
    if scale.device != device:
        raise ValueError(f"{what} is on {scale.device} but the weight on {device}; move it there")
    if scale.dim() > 1 or scale.numel() not in (1, n):
        raise ValueError(f"{what} has shape {list(scale.shape)}; expected a scalar, [1] or one per row, [{n}]")
    scale = scale.detach().reshape(-1).contiguous()
    finite = torch.isfinite(scale)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise ValueError(f"{what} is {float(scale[row])} at row {row}; the checkpoint is damaged or was not calibrated")
    return scale


def check_checkpoint(
    fmt: str, weight: object, weight_scale: object, global_scale: object | None, name: str
) -> CheckpointTensors:
    """Validate one layer's tensors (shapes as in pack_nvfp4 and pack_mxfp4). Raises TypeError or ValueError."""
    group = GROUP_SIZE[fmt]
    weight_name, scale_name = label(name, "weight"), label(name, "weight_scale")
    codes = _bytes(_tensor(weight, weight_name), weight_name, (torch.uint8,), "K/2")
    scales = _bytes(_tensor(weight_scale, scale_name), scale_name, _SCALE_DTYPES[fmt], f"K/{group}")
    n, k = codes.shape[0], 2 * codes.shape[1]
    if n == 0 or k == 0:
        raise ValueError(f"{weight_name} has shape {list(codes.shape)}; it needs at least one row and one group")
    if k % group != 0:
        raise ValueError(
            f"{weight_name} has shape {list(codes.shape)}, so K = {k}, which is no multiple of the {fmt} group "
            f"{group}; shard on group boundaries"
        )
    if scales.shape != (n, k // group):
        raise ValueError(
            f"{scale_name} has shape {list(scales.shape)}; {weight_name} with shape {list(codes.shape)} needs "
            f"[{n}, {k // group}] (one scale per {group} values, not swizzled)"
        )
    if scales.device != codes.device:
        raise ValueError(f"{scale_name} is on {scales.device} but {weight_name} on {codes.device}; move it there")
    if codes.device.type == "meta":
        raise ValueError(f"{weight_name} is on the meta device, without data; load the checkpoint first")
    if fmt == "nvfp4":
        factor = check_global_scale(global_scale, label(name, "global_scale"), n, codes.device)
    else:
        factor = torch.ones(1, dtype=torch.float32, device=codes.device)
    return CheckpointTensors(fmt, name, codes, scales, factor)
