"""Banks whose element counts pass 2^31: the index arithmetic must be 64-bit."""

from __future__ import annotations

import numpy as np
import torch
from moe_cases import Case, check, make_checkpoint, make_tokens

import petit_plugin as pp
from petit_plugin.packing.experts import PackedExpertsMeta


def test_the_last_of_many_large_experts() -> None:
    """w13 of 320 experts: 5.4e9 weights in 2.7e9 bytes, of which only the last expert's pages are touched."""
    small = Case("nvfp4", "float32", 1, 1, 3, 4096, 2048, seed=1)
    checkpoint = make_checkpoint(small)
    one = checkpoint.pack()
    meta = PackedExpertsMeta("nvfp4", "cpu", 320, 4096, 2048, "gate_up")
    tensors = {}
    for name, (shape, dtype) in meta.tensor_layout().items():
        if name in one.tensors():
            tensors[name] = torch.empty(shape, dtype=dtype)  # not touched, so not resident
            tensors[name][319] = one.tensors()[name][0]
    assert tensors["w13_weight"].numel() > 2**31
    experts = pp.PackedExperts.from_tensors(meta, tensors)
    tokens = make_tokens(small)
    local = torch.zeros_like(tokens.ids)
    tokens.ids.fill_(319)
    check(checkpoint, tokens, local_ids=local, experts=experts)


def test_tensor_layout_of_a_bank_beyond_32_bits() -> None:
    meta = PackedExpertsMeta("nvfp4", "cpu", 384, 7168, 4096, "gate_up")
    shape, _ = meta.tensor_layout()["w13_weight"]
    assert int(np.prod(shape, dtype=object)) == 384 * 8192 * 7168 // 2 > 2**32
