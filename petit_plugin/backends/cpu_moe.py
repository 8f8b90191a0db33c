"""fused_moe on the CPU: csrc/cpu/moe.hpp over tensors."""

from __future__ import annotations

import torch

from petit_plugin import _native
from petit_plugin._moe_call import KINDS, MoeCall
from petit_plugin.backends.cpu import DTYPES, FORMATS, pointer, report_kernels, row_scale_at

WORKSPACE_BUDGET = 256 << 20  # bytes; longer batches are done in chunks of tokens


def _index(tensor: torch.Tensor | None) -> tuple[int, bool]:
    """Address of an index tensor and whether it is int64; the caller keeps it alive and contiguous."""
    return (0, False) if tensor is None else (tensor.data_ptr(), tensor.dtype == torch.int64)


def allocate_workspace(nbytes: int) -> torch.Tensor:
    """Scratch memory, from torch so that its allocator reuses it; what it holds does not matter."""
    return torch.empty(nbytes, dtype=torch.uint8)


class CpuMoe:
    def fused_moe(self, call: MoeCall, out: torch.Tensor, intermediate: torch.Tensor | None = None) -> None:
        if call.activation_format is not None:
            raise ValueError(
                f"activation_format is {call.activation_format!r}; the CPU multiplies activations in their own dtype "
                f"only, leave it None"
            )
        if out.numel() == 0:
            return
        report_kernels(_native.best_isa())
        x = call.x if call.x.stride(1) == 1 else call.x.contiguous()
        ids, weights = call.topk_ids.contiguous(), call.topk_weights.contiguous()
        expert_map = None if call.expert_map is None else call.expert_map.contiguous()
        dtype = DTYPES[x.dtype]
        workspace = allocate_workspace(
            _native.moe_workspace_bytes(
                call.tokens, call.topk, call.hidden, call.intermediate, call.gated, dtype, WORKSPACE_BUDGET
            )
        )
        _native.fused_moe(
            x.data_ptr(),
            x.stride(0),
            dtype,
            call.tokens,
            call.topk,
            call.num_experts,
            call.hidden,
            call.intermediate,
            FORMATS[call.format],
            call.exact,
            _bank(call.w13_weight, call.w13_scale, call.w13_row_scale, call.w13_row_exponent, call.w13_bias),
            _bank(call.w2_weight, call.w2_scale, call.w2_row_scale, call.w2_row_exponent, call.w2_bias),
            _index(ids),
            weights.data_ptr(),
            _index(expert_map),
            0 if expert_map is None else expert_map.shape[0],
            KINDS.index(call.activation),
            call.gated,
            call.alpha,
            call.beta,
            call.limit,
            call.apply_router_weight_on_input,
            call.routed_scaling_factor,
            call.reduce,
            out.data_ptr(),
            DTYPES[out.dtype],
            pointer(intermediate),
            workspace.data_ptr(),
            WORKSPACE_BUDGET,
            torch.get_num_threads(),
        )


def _bank(
    weight: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    row_exponent: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[int, ...]:
    """Addresses of one weight bank, 0 for what it does not have, and the stride of its row scales."""
    scales, stride = row_scale_at(row_scale)
    return (weight.data_ptr(), scale.data_ptr(), scales, pointer(row_exponent), pointer(bias), stride)
