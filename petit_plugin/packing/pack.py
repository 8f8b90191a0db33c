"""pack_nvfp4 and pack_mxfp4."""

from __future__ import annotations

import torch

from petit_plugin._types import CheckpointTensors
from petit_plugin.backends import backend_for, default_arch
from petit_plugin.packing.packed_weight import PackedWeight
from petit_plugin.packing.validate import check_checkpoint


def pack_nvfp4(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    arch: str | None = None,
    out: PackedWeight | None = None,
    name: str = "",
) -> PackedWeight:
    """Pack an NVFP4 layer: w[n, k] = E2M1 code * weight_scale[n, k/16] * global_scale[n].

    weight: uint8 [N, K/2], low nibble = even k. weight_scale: float8_e4m3fn (or its bytes, uint8) [N, K/16], not
    swizzled. global_scale: float32 scalar, [1] or [N]; it multiplies (invert a compressed-tensors divisor first).
    arch: "cpu", "gfx942", ...; None means the device the tensors are on. out: pack into this weight's storage, which
    stays untouched if there is an error. name: the layer's, for messages.

    Any N >= 1, any K that is a multiple of 16. Raises TypeError or ValueError naming the tensor; NaN block scales over
    non-zero codes and non-finite global scales are refused.
    """
    return _pack(check_checkpoint("nvfp4", weight, weight_scale, global_scale, name), arch, out)


def pack_mxfp4(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    arch: str | None = None,
    out: PackedWeight | None = None,
    name: str = "",
) -> PackedWeight:
    """Pack an MXFP4 layer: w[n, k] = E2M1 code * 2^(weight_scale[n, k/32] - 127).

    weight: uint8 [N, K/2], low nibble = even k. weight_scale: float8_e8m0fnu or uint8 [N, K/32], not swizzled: both
    hold the biased exponent. arch, out, name as in pack_nvfp4.

    Any N >= 1, any K that is a multiple of 32. Raises TypeError or ValueError naming the tensor; the scale byte 255
    (NaN) over non-zero codes is refused.
    """
    return _pack(check_checkpoint("mxfp4", weight, weight_scale, None, name), arch, out)


def _pack(source: CheckpointTensors, arch: str | None, out: PackedWeight | None) -> PackedWeight:
    if arch is None:
        arch = out.meta.arch if out is not None else default_arch(source.weight.device)
    backend = backend_for(arch)
    if out is None:
        meta, tensors = backend.pack(source, arch, None)
        return PackedWeight(meta, **tensors)
    have = (out.meta.format, out.meta.arch, out.meta.n, out.meta.k, out.device)
    want = (source.format, arch, source.n, source.k, source.weight.device)
    if have != want:
        raise ValueError(f"out is {have}, but the weight to pack is {want}; pack without out= to get new storage")
    meta, _ = backend.pack(source, arch, out.tensors())
    out.meta = meta
    return out
