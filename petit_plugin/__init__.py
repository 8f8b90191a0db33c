"""FP4 (NVFP4 and MXFP4) weights for serving: packing, linear and fused MoE on AMD Instinct GPUs and CPUs."""

import torch  # noqa: F401  first: its OpenMP runtime is the one the native module uses

from petit_plugin import _load
from petit_plugin._version import __version__

_load.native()

# The rest needs the native module, whose absence is reported above.
from petit_plugin.backends.hip.emulation import emulated  # noqa: E402
from petit_plugin.formats import quantize_mxfp4, quantize_nvfp4  # noqa: E402
from petit_plugin.ops import fused_moe, linear  # noqa: E402
from petit_plugin.packing import (  # noqa: E402
    PackedExperts,
    PackedExpertsMeta,
    PackedMeta,
    PackedWeight,
    UnpackedWeight,
    pack_experts,
    pack_mxfp4,
    pack_nvfp4,
)

__all__ = [
    "PackedExperts",
    "PackedExpertsMeta",
    "PackedMeta",
    "PackedWeight",
    "UnpackedWeight",
    "__version__",
    "emulated",
    "fused_moe",
    "linear",
    "pack_experts",
    "pack_mxfp4",
    "pack_nvfp4",
    "quantize_mxfp4",
    "quantize_nvfp4",
]
