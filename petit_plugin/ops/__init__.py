"""torch.ops.petit.* and the Python functions on top."""

from petit_plugin.ops.linear import linear

__all__ = ["linear"]
