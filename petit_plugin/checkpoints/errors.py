"""What can be wrong with a checkpoint, seen from its configuration and its headers."""

from __future__ import annotations


class UnsupportedCheckpointError(ValueError):
    """The checkpoint is well formed, but holds something that cannot be served. The text names layer and algorithm."""


class NotFp4CheckpointError(UnsupportedCheckpointError):
    """The checkpoint holds no FP4 layer at all (FP8, INT4, BF16 ...): it belongs to another quantization method."""


class BrokenCheckpointError(ValueError):
    """The files contradict themselves or each other: truncated, missing tensors, wrong shapes or dtypes."""
