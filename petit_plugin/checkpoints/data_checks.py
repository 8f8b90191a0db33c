"""Checks that need tensor data: scales that are NaN or infinite. Reads scales; codes only where a scale is NaN."""

from __future__ import annotations

from petit_plugin.checkpoints.checkpoint import Checkpoint, Fp4Matrix
from petit_plugin.checkpoints.layers import Fp4Layer


def scale_problem(matrix: Fp4Matrix, layer: Fp4Layer) -> str | None:
    """One sentence about the first unusable scale of `matrix`, or None.

    A NaN scale (E4M3 0x7F and 0xFF, E8M0 255) is harmless where the whole block is zero.
    """
    import torch

    group = layer.format.group_size
    codes = matrix.weight_scale.view(torch.uint8)
    bad = codes == 255 if layer.format.format == "mxfp4" else codes.bitwise_and(0x7F) == 0x7F
    for row, block in bad.nonzero().tolist() if bool(bad.any()) else ():
        start = block * group // 2
        if bool((matrix.weight[row, start : start + group // 2] & 0x77).any()):
            return (
                f"layer {matrix.name}: {layer.scale.name} is NaN at row {row}, block {block}, where weights are not "
                "zero: the checkpoint is damaged, export it again"
            )
    factor = matrix.global_scale
    if factor is not None and layer.global_scale is not None and not bool(torch.isfinite(factor).all()):
        return (
            f"layer {matrix.name}: {layer.global_scale.name} gives a global scale of {float(factor)}: it must be finite"
        )
    return None


def scale_problems(checkpoint: Checkpoint, layer: Fp4Layer) -> list[str]:
    """The unusable scales of all matrices of `layer`, one sentence each."""
    return [p for matrix in checkpoint.matrices(layer) if (p := scale_problem(matrix, layer)) is not None]
