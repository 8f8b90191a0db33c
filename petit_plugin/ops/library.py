"""The one owner of the `petit` operator namespace.

Library.define and impl rather than torch.library.custom_op: 5 microseconds a call instead of 12.
"""

import torch

LIBRARY = torch.library.Library("petit", "DEF")
DEVICES = ("CPU", "CUDA")  # dispatch keys; ROCm tensors are "CUDA" to torch
