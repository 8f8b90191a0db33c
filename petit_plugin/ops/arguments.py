"""Checks of Python arguments before torch's dispatcher sees them: its messages do not name them."""

from __future__ import annotations

import torch


def check_plain_tensor(name: str, value: object) -> None:
    """TypeError unless value is a strided tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}; convert it with torch.as_tensor")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} is a {value.layout} tensor; pass a dense one, {name}.to_dense()")
