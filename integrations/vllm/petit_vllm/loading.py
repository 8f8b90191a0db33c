"""Watching checkpoint tensors arrive: wrong types are refused, missing ones named."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch

BLOCK_SCALE_DTYPE = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.uint8}
_NAN_BYTE = {"nvfp4": 0x7F, "mxfp4": 0xFF}
_BYTES = frozenset({torch.uint8, torch.int8})
_SHARD_KEYS = ("loaded_shard_id", "shard_id", "expert_id")
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
_ALLOWED = {
    ("nvfp4", "weight"): _BYTES,
    ("mxfp4", "weight"): _BYTES,
    ("nvfp4", "weight_scale"): frozenset({torch.float8_e4m3fn}),
    ("mxfp4", "weight_scale"): frozenset({torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8)}),
    ("nvfp4", "weight_scale_2"): _FLOATS,
    ("nvfp4", "input_scale"): _FLOATS,
}


def block_scales(fmt: str, *shape: int) -> torch.Tensor:
    """A block-scale tensor full of NaN codes, so that what no checkpoint tensor overwrote is found out."""
    codes = torch.full(shape, _NAN_BYTE[fmt], dtype=torch.uint8)
    return codes.view(BLOCK_SCALE_DTYPE[fmt])


def never_loaded(fmt: str, scales: torch.Tensor) -> torch.Tensor:
    """Boolean per leading index of `scales` [..., groups]: True where all codes still are NaN."""
    return (scales.view(torch.uint8) == _NAN_BYTE[fmt]).all(dim=-1)


def nan_scalars(*shape: int) -> torch.Tensor:
    """float32 whatever vLLM's default dtype is: model code runs under bfloat16, which would round the scales."""
    return torch.full(shape, float("nan"), dtype=torch.float32)


class LoadWatch:
    """Wraps the weight loaders of one layer and remembers which shards of which parameter came."""

    def __init__(self, prefix: str, fmt: str) -> None:
        self.prefix = prefix
        self.format = fmt
        self.seen: dict[str, set[Hashable]] = {}

    def wrap(self, parameter: str, loader: Callable[..., Any], base: str = "") -> Callable[..., Any]:
        """`loader` with a check of the incoming dtype. `base`: the checkpoint's name of `parameter` if it differs."""
        allowed = _ALLOWED[self.format, base or parameter]
        signature = inspect.signature(loader)

        @functools.wraps(loader)
        def checked(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(param, loaded_weight, *args, **kwargs).arguments
            shard = tuple(bound[key] for key in _SHARD_KEYS if bound.get(key) is not None)
            if loaded_weight.dtype not in allowed:
                names = " or ".join(sorted(str(d).removeprefix("torch.") for d in allowed))
                of = f" (shard {', '.join(map(str, shard))})" if shard else ""
                got = str(loaded_weight.dtype).removeprefix("torch.")
                raise ValueError(
                    f"layer {self.prefix}: parameter {base or parameter}{of} is {got} in the checkpoint, but "
                    f"{self.format} needs {names}. "
                    "If this layer is not quantized, list it under exclude_modules (ignore) in the quantization config."
                )
            if loaded_weight.ndim == 0:
                loaded_weight = loaded_weight.reshape(1)
            if loaded_weight.dtype != param.dtype and loaded_weight.element_size() == param.element_size() == 1:
                loaded_weight = loaded_weight.view(param.dtype)  # same codes under another name (int8, e8m0)
            result = loader(param, loaded_weight, *args, **kwargs)
            if result is not False:  # False: an expert of another rank
                self.seen.setdefault(parameter, set()).add(shard)
            return result

        return checked

    def missing(self, parameter: str, where: str = "") -> ValueError:
        """The error for a tensor the checkpoint does not have."""
        return ValueError(f"layer {self.prefix}: parameter {parameter}{where} is missing from the checkpoint")


def loaded_from_checkpoint() -> bool:
    """False under --load-format dummy, where no tensor ever arrives."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is None or str(config.load_config.load_format) != "dummy"
