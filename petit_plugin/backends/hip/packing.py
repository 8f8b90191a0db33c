"""Packing for CDNA by csrc/host/pack.cpp: the same bytes as the reference in layout.py, threaded, on the host.

Tensors on a GPU go to the host and back: packing happens once, and the host packs faster than a checkpoint loads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from petit_plugin import _native
from petit_plugin._types import CheckpointTensors, PackedMeta
from petit_plugin.backends.hip.layout import shapes

logger = logging.getLogger("petit_plugin.backends.hip")

FORMATS = {"nvfp4": 0, "mxfp4": 1}
TARGETS = {"gfx90a": 0, "gfx942": 1, "gfx950": 2, "gfx950-mask": 3}
OUT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float64: 3}
NAMES = ("weight", "scale", "row_scale", "row_exponent")


def _numbers(meta: PackedMeta) -> tuple[int, int, int, int, bool]:
    return FORMATS[meta.format], TARGETS[meta.arch], meta.n, meta.k, meta.exact


def pack(
    source: CheckpointTensors, arch: str, out: Mapping[str, torch.Tensor] | None
) -> tuple[PackedMeta, dict[str, torch.Tensor]]:
    """Pack into `out` (same storage) or new tensors on the source's device.

    A layer with a row outside the fast kernels' number window is packed for their EXACT variant (one log line). Raises
    ValueError naming the tensor for a NaN scale over non-zero codes; `out` is untouched then.
    """
    n, k, threads = source.n, source.k, torch.get_num_threads()
    device = source.weight.device
    weight, scales = source.weight.cpu(), source.scale.cpu()
    codes = (weight.data_ptr(), weight.stride(0), scales.data_ptr(), scales.stride(0))
    row, group = _native.hip_find_nan(FORMATS[source.format], n, k, *codes, threads)
    scale_name = f"{source.name}.weight_scale" if source.name else "weight_scale"
    if row >= 0:
        raise ValueError(
            f"{scale_name}[{row}, {group}] is NaN and its block is not all zero; the checkpoint is damaged"
        )
    meta = PackedMeta(source.format, arch, n, k)
    on_host = out is not None and out["weight"].device.type == "cpu"
    layout = shapes(meta)
    host = dict(out) if on_host and out else {name: torch.empty(s, dtype=dtype) for name, (s, dtype) in layout.items()}
    pointers = (host["weight"].data_ptr(), host["scale"].data_ptr(), host["row_exponent"].data_ptr())
    if not _native.hip_pack(*_numbers(meta), *codes, *pointers, threads):
        meta = PackedMeta(source.format, arch, n, k, exact=True)
        _native.hip_pack(*_numbers(meta), *codes, *pointers, threads)
        logger.warning(
            "%s has rows outside the number window of the fast %s kernels; this layer runs their EXACT variant",
            scale_name,
            arch,
        )
    host["row_scale"][:n] = source.global_scale.cpu()
    host["row_scale"][n:] = 0
    if out is None:
        return meta, {name: tensor.to(device) for name, tensor in host.items()}
    if not on_host:
        for name in NAMES:
            out[name].copy_(host[name])
    return meta, dict(out)


def unpack(meta: PackedMeta, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Checkpoint codes uint8 [n, k/2] and scale bytes uint8 [n, k/group], on the tensors' device."""
    weight, scale, row_exponent = (tensors[name].cpu() for name in ("weight", "scale", "row_exponent"))
    codes = torch.empty(meta.n, meta.k // 2, dtype=torch.uint8)
    scales = torch.empty(meta.n, meta.k // meta.group_size, dtype=torch.uint8)
    _native.hip_unpack(
        *(*_numbers(meta), weight.data_ptr(), scale.data_ptr(), row_exponent.data_ptr()),
        *(codes.data_ptr(), scales.data_ptr(), torch.get_num_threads()),
    )
    device = tensors["weight"].device
    return codes.to(device), scales.to(device)


def dequantize(tensors: Mapping[str, torch.Tensor], meta: PackedMeta, dtype: torch.dtype) -> torch.Tensor:
    """[n, k]: code * block scale * row scale, exact in float64, rounded once to dtype; on the tensors' device."""
    weight, scale, row_scale, row_exponent = (tensors[name].cpu() for name in NAMES)
    out = torch.empty(meta.n, meta.k, dtype=dtype)
    _native.hip_dequantize(
        *(*_numbers(meta), weight.data_ptr(), scale.data_ptr(), row_scale.data_ptr(), row_exponent.data_ptr()),
        *(out.data_ptr(), OUT_TYPES[dtype], torch.get_num_threads()),
    )
    return out.to(tensors["weight"].device)
