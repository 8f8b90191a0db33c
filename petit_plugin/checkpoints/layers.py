"""FP4 layers as they lie on disk: which tensors belong to one, under which names, and whether they fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from petit_plugin.checkpoints.errors import BrokenCheckpointError
from petit_plugin.checkpoints.safetensors_files import TensorInfo
from petit_plugin.checkpoints.spec import LayerFormat

_SCALE_DTYPES = {"nvfp4": ("F8_E4M3", "U8"), "mxfp4": ("U8", "F8_E8M0")}
_GLOBAL_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Naming:
    """Suffixes of one dialect: tensor = module + suffix. `bank`: one tensor holds all experts of a layer."""

    weight: str
    scale: str
    global_scale: str | None = None
    divisor: bool = False  # the global scale is stored as 1 / multiplier
    bank: bool = False
    extras: tuple[str, ...] = ()
    weight_dtypes: tuple[str, ...] = ("U8",)


_LINEAR = Naming(
    ".weight",
    ".weight_scale",
    ".weight_scale_2",
    extras=(".bias", ".input_scale", ".input_scale_2", ".pre_quant_scale"),
)
# The weight has no suffix of its own here; its scale is what marks it.
_FUSED_BANK = Naming("", "_weight_scale", "_weight_scale_2", bank=True, extras=("_bias", "_input_scale"))
_PACKED = Naming(
    ".weight_packed",
    ".weight_scale",
    ".weight_global_scale",
    divisor=True,
    extras=(".bias", ".input_global_scale"),
)
_BLOCKS = Naming("_blocks", "_scales", bank=True, extras=("_bias",))
_DEEPSEEK = Naming(".weight", ".scale", weight_dtypes=("I8", "U8"))

NAMINGS: dict[str, tuple[Naming, ...]] = {
    "modelopt": (_LINEAR, _FUSED_BANK),
    "quark": (_LINEAR,),
    "compressed-tensors": (_PACKED,),
    "gpt-oss": (_BLOCKS,),
    "deepseek-v4": (_DEEPSEEK,),
}


@dataclass(frozen=True)
class Fp4Layer:
    """One FP4 weight matrix [n, k], or a bank of `experts` such matrices in one tensor.

    `transposed`: the bank is stored [experts, k/2, n] (batched-matmul order) instead of [experts, n, k/2].
    """

    name: str
    format: LayerFormat
    naming: Naming
    n: int
    k: int
    experts: int | None
    transposed: bool
    weight: TensorInfo
    scale: TensorInfo
    global_scale: TensorInfo | None
    extras: tuple[TensorInfo, ...]

    @property
    def numel(self) -> int:
        return self.n * self.k * (self.experts or 1)

    @property
    def nbytes(self) -> int:
        """Bytes of weight and scales on disk."""
        return self.weight.nbytes + self.scale.nbytes + (self.global_scale.nbytes if self.global_scale else 0)


def candidates(dialect: str, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Naming]]:
    """(module, naming) of everything that is stored like an FP4 layer, even if some of its tensors are missing."""
    seen: set[str] = set()
    for name, info in tensors.items():
        for naming in NAMINGS[dialect]:
            if naming.weight and name.endswith(naming.weight):
                module = name[: -len(naming.weight)]
                scale = tensors.get(module + naming.scale)
                stored_so = info.dtype in naming.weight_dtypes
                # Another dtype beside block scales is a broken layer, unless it is FP8, whose scales look alike.
                stored_so |= scale is not None and _looks_like_scale(scale) and not info.dtype.startswith("F8")
            elif name.endswith(naming.scale):
                module = name[: -len(naming.scale)]
                judged_by_weight = bool(naming.weight) and module + naming.weight in tensors
                stored_so = not judged_by_weight and _looks_like_scale(info)
            else:
                continue
            if stored_so and module not in seen:
                seen.add(module)
                yield module, naming


def _looks_like_scale(info: TensorInfo) -> bool:
    return info.dtype in ("U8", "F8_E4M3", "F8_E8M0") and len(info.shape) >= 2


def read_layer(module: str, fmt: LayerFormat, naming: Naming, tensors: Mapping[str, TensorInfo]) -> Fp4Layer:
    """The layer's tensors, checked against each other. Raises BrokenCheckpointError naming layer, tensor and remedy."""
    weight = _get(module, naming.weight, tensors)
    scale = _get(module, naming.scale, tensors)
    if weight.dtype not in naming.weight_dtypes:
        raise BrokenCheckpointError(
            f"layer {module}: {weight.name} has dtype {weight.dtype}; the quantization config says {fmt.algo}, "
            f"which is stored as {naming.weight_dtypes[0]} (two values a byte)"
        )
    if scale.dtype not in _SCALE_DTYPES[fmt.format]:
        raise BrokenCheckpointError(
            f"layer {module}: {scale.name} has dtype {scale.dtype}; {fmt.algo} scales are "
            f"{' or '.join(_SCALE_DTYPES[fmt.format])}"
        )
    experts, n, k, transposed = _geometry(module, fmt, naming, weight, scale)

    global_scale = None
    if fmt.format == "nvfp4":
        if naming.global_scale is None:
            raise BrokenCheckpointError(f"layer {module}: {fmt.algo} is not stored in this dialect")
        global_scale = _get(module, naming.global_scale, tensors)
        if global_scale.dtype not in _GLOBAL_DTYPES or global_scale.numel not in {1, experts or 1}:
            raise BrokenCheckpointError(
                f"layer {module}: {global_scale.name} is {global_scale.dtype} {list(global_scale.shape)}; expected one "
                + ("float32 value" if experts is None else f"float32 value or {experts}, one per expert")
            )
    extras = tuple(tensors[module + e] for e in naming.extras if module + e in tensors)
    for extra in extras:
        if extra.name.endswith(".pre_quant_scale") and extra.numel != k:
            raise BrokenCheckpointError(f"layer {module}: {extra.name} has {extra.numel} values, the layer's K is {k}")
    return Fp4Layer(module, fmt, naming, n, k, experts, transposed, weight, scale, global_scale, extras)


def _get(module: str, suffix: str, tensors: Mapping[str, TensorInfo]) -> TensorInfo:
    try:
        return tensors[module + suffix]
    except KeyError:
        raise BrokenCheckpointError(
            f"layer {module}: tensor {module}{suffix} is missing from the checkpoint: download or export it again"
        ) from None


def _geometry(
    module: str, fmt: LayerFormat, naming: Naming, weight: TensorInfo, scale: TensorInfo
) -> tuple[int | None, int, int, bool]:
    """(experts or None, n, k, transposed) from the shapes of the codes and of their scales."""
    w, s, group = weight.shape, scale.shape, fmt.group_size
    problem = BrokenCheckpointError(
        f"layer {module}: {weight.name} {list(w)} and {scale.name} {list(s)} do not fit together: {fmt.algo} needs "
        f"[N, K/2] codes and [N, K/{group}] scales" + (", for each expert" if naming.bank else "")
    )
    if not naming.bank:
        if len(w) != 2 or len(s) != 2 or s[0] != w[0] or s[1] * group != w[1] * 2 or 0 in w:
            raise problem
        return None, w[0], w[1] * 2, False
    if naming is _BLOCKS:  # [E, N, K/32, 16] and [E, N, K/32]
        if len(w) != 4 or w[:3] != s or w[3] * 2 != group or 0 in w:
            raise problem
        return w[0], w[1], w[2] * group, False
    if len(w) != 3 or len(s) != 3 or w[0] != s[0] or 0 in w:
        raise problem
    if w[2] == s[2] and w[1] * 2 == s[1] * group:
        return w[0], w[2], w[1] * 2, True
    if w[1] == s[1] and w[2] * 2 == s[2] * group:
        return w[0], w[1], w[2] * 2, False
    raise problem
