"""FP4 (NVFP4 and MXFP4) weights for serving: packing, linear and fused MoE on AMD Instinct GPUs and CPUs."""

import torch  # noqa: F401  first: its OpenMP runtime is the one the native module uses

from petit_plugin import _load
from petit_plugin._version import __version__

_load.native()

from petit_plugin.ops import linear  # noqa: E402  needs the native module, whose absence is reported above
from petit_plugin.packing import (  # noqa: E402
    PackedMeta,
    PackedWeight,
    UnpackedWeight,
    pack_mxfp4,
    pack_nvfp4,
)

__all__ = [
    "PackedMeta",
    "PackedWeight",
    "UnpackedWeight",
    "__version__",
    "linear",
    "pack_mxfp4",
    "pack_nvfp4",
]
