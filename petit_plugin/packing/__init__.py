"""Checkpoint tensors to packed weights, and back."""

from petit_plugin._types import PackedMeta, UnpackedWeight
from petit_plugin.packing.experts import PackedExperts, PackedExpertsMeta
from petit_plugin.packing.pack import pack_mxfp4, pack_nvfp4
from petit_plugin.packing.pack_experts import pack_experts
from petit_plugin.packing.packed_weight import PackedWeight, padded_rows

__all__ = [
    "PackedExperts",
    "PackedExpertsMeta",
    "PackedMeta",
    "PackedWeight",
    "UnpackedWeight",
    "pack_experts",
    "pack_mxfp4",
    "pack_nvfp4",
    "padded_rows",
]
