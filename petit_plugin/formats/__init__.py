"""FP4 number formats: exact decoding, round-to-nearest-even encoding, reference quantisers.

This package is the arithmetic reference for everything else. It is pure torch, needs no native module and works on any
device. One module per format:

========  ==========================================================================================================
e2m1      4-bit element: codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign; two codes a byte, low nibble first
e4m3      8-bit NVFP4 block scale (E4M3FN: no infinities, one NaN per sign)
e8m0      8-bit MXFP4 block scale (a power of two)
nvfp4     E2M1 in blocks of 16 with E4M3 scales and one float32 scale for the tensor
mxfp4     E2M1 in blocks of 32 with E8M0 scales
========  ==========================================================================================================

Sources: OCP Microscaling Formats (MX) Specification v1.0 for E2M1, E8M0 and MXFP4; OCP 8-bit Floating Point
Specification (OFP8) v1.0 for E4M3; the tensors written by NVIDIA ModelOpt for the NVFP4 convention.
"""

from petit_plugin.formats import e2m1, e4m3, e8m0, mxfp4, nvfp4
from petit_plugin.formats.mxfp4 import MxFp4Tensors
from petit_plugin.formats.mxfp4 import dequantize as dequantize_mxfp4
from petit_plugin.formats.mxfp4 import quantize as quantize_mxfp4
from petit_plugin.formats.nvfp4 import NvFp4Tensors
from petit_plugin.formats.nvfp4 import dequantize as dequantize_nvfp4
from petit_plugin.formats.nvfp4 import quantize as quantize_nvfp4

__all__ = [
    "MxFp4Tensors",
    "NvFp4Tensors",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "e2m1",
    "e4m3",
    "e8m0",
    "mxfp4",
    "nvfp4",
    "quantize_mxfp4",
    "quantize_nvfp4",
]
