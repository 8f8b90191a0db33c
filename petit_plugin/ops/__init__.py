"""torch.ops.petit.* and the Python functions on top."""

from petit_plugin.ops.linear import linear
from petit_plugin.ops.moe import fused_moe

__all__ = ["fused_moe", "linear"]
