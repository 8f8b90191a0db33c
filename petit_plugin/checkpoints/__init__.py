"""Reading checkpoints: which layers are FP4 and how, whatever tool wrote them. Knows no framework."""

from petit_plugin.checkpoints.errors import (
    BrokenCheckpointError,
    NotFp4CheckpointError,
    UnsupportedCheckpointError,
)
from petit_plugin.checkpoints.kv_cache import attention_scale_name
from petit_plugin.checkpoints.spec import ForeignFormat, LayerFormat, QuantSpec

__all__ = [
    "BrokenCheckpointError",
    "ForeignFormat",
    "LayerFormat",
    "NotFp4CheckpointError",
    "QuantSpec",
    "UnsupportedCheckpointError",
    "attention_scale_name",
]
