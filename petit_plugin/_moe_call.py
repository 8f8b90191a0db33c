"""The arguments of one fused_moe, in the operator's order; shared by ops and backends."""

from __future__ import annotations

from typing import NamedTuple

import torch

KINDS = ("silu", "gelu", "gelu_tanh", "relu2")  # the order is ActivationKind's in csrc/cpu/moe_activation.hpp


class MoeCall(NamedTuple):
    """See petit_plugin.fused_moe for meanings and PackedExperts for the tensors.

    activation is one of KINDS with its resolved alpha, beta and limit (infinity for none).
    """

    x: torch.Tensor
    w13_weight: torch.Tensor
    w13_scale: torch.Tensor
    w13_row_scale: torch.Tensor
    w13_row_exponent: torch.Tensor | None
    w13_bias: torch.Tensor | None
    w2_weight: torch.Tensor
    w2_scale: torch.Tensor
    w2_row_scale: torch.Tensor
    w2_row_exponent: torch.Tensor | None
    w2_bias: torch.Tensor | None
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None
    format: str
    arch: str
    num_experts: int
    hidden: int
    intermediate: int
    gated: bool
    exact: bool
    activation: str
    alpha: float
    beta: float
    limit: float
    apply_router_weight_on_input: bool
    routed_scaling_factor: float
    reduce: bool
    activation_format: str | None
    out_dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return self.x.shape[0]

    @property
    def topk(self) -> int:
        return self.topk_ids.shape[1]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.tokens, self.hidden) if self.reduce else (self.tokens, self.topk, self.hidden)
