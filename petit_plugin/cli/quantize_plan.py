"""Which modules of a 16-bit checkpoint become FP4. Decided from names and shapes alone, before anything is read.

A linear of a numbered block ("model.layers.3.mlp.up_proj") is quantized unless a pattern excludes it. What a framework
fuses into one kernel must have one format: if one of q/k/v, of gate/up, or one leaf of a bank of experts has to stay in
16 bits, so do the others.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from petit_plugin.checkpoints.errors import UnsupportedCheckpointError
from petit_plugin.checkpoints.patterns import Pattern, PatternSet
from petit_plugin.checkpoints.safetensors_files import FLOATS, TensorInfo
from petit_plugin.checkpoints.spec import GROUP_SIZES, ROUTER_LEAVES

# Besides routers: heads and embeddings, vision and audio towers, multi-token-prediction blocks, the tiny gates of
# linear attention, and MLA's kv_b_proj, which servers read as a plain matrix.
DEFAULT_EXCLUDES = (
    "lm_head",
    "*embed*",
    "*vision*",
    "*visual*",
    "*audio*",
    "*multi_modal_projector*",
    "mtp*",
    "*.in_proj_a",
    "*.in_proj_b",
    "*.in_proj_ba",
    "*.kv_b_proj",
)
FAMILIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_BLOCK = re.compile(r"\.\d+\.")
# Models whose linears are stored as [in, out].
_TRANSPOSED = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})


@dataclass(frozen=True)
class Plan:
    """quantize: tensor name -> names of the tensors that share its global scale (itself included).
    kept: linear modules that stay as they are. notes: one line for each that a user might not expect."""

    quantize: Mapping[str, tuple[str, ...]]
    kept: tuple[str, ...]
    notes: tuple[str, ...]


def family(module: str) -> tuple[str, ...]:
    """The modules that a framework fuses with `module` and that share a global scale, itself included."""
    parent, _, leaf = module.rpartition(".")
    for leaves in FAMILIES:
        if leaf in leaves:
            return tuple(f"{parent}.{other}" for other in leaves)
    return (module,)


def _unit(module: str) -> str:
    """What has to have one format: a bank of experts, a fused layer, or the module."""
    head, found, _ = module.partition(".experts.")
    return f"{head}.experts" if found else family(module)[0]


def user_pattern(text: str) -> Pattern:
    """A pattern of the command line: a name, a wildcard with its ordinary meaning, or `re:` and a regular expression.

    In ModelOpt's lists "path*" means the path and what is below it; a shell's "up*" means up_proj.
    """
    pattern = Pattern(text)
    return Pattern("re:" + fnmatch.translate(text)) if pattern.is_glob else pattern


def unmatched(tensors: Iterable[str], exclude: Iterable[str]) -> list[str]:
    """The patterns of the command line that mean no module of the model."""
    modules = {name.rpartition(".")[0] or name for name in tensors} | {"lm_head"}  # a tied head has no tensor
    # Banks of experts are tensors without a ".weight".
    modules.update(name for name in tensors if ".experts." in name)
    return [text for text in exclude if not any(map(user_pattern(text).matches, modules))]


def check_source(config: Mapping[str, object], tensors: Mapping[str, TensorInfo], exclude: PatternSet) -> None:
    """Raise UnsupportedCheckpointError for a source that cannot be quantized as it lies there."""
    if config.get("quantization_config") or config.get("compression_config"):
        raise UnsupportedCheckpointError("the model is quantized already: start from its BF16, FP16 or FP32 weights")
    if str(config.get("model_type")) in _TRANSPOSED:
        raise UnsupportedCheckpointError(f"{config['model_type']} stores its linears as [in, out]: not supported")
    for info in tensors.values():
        module = info.name.removesuffix(".weight")
        if module != info.name and len(info.shape) == 2 and info.dtype not in FLOATS:
            raise UnsupportedCheckpointError(f"{info.name} is {info.dtype}: start from BF16, FP16 or FP32 weights")
        bank = len(info.shape) == 3 and ".experts." in info.name and not info.name.endswith("bias")
        if bank and info.dtype in {*FLOATS, "F64"} and not exclude.matches(module):
            raise UnsupportedCheckpointError(
                f"{info.name} holds all experts of a layer in one tensor: save it with one tensor per expert, or "
                "keep the experts in 16 bits with --exclude '*.experts*'"
            )


def make_plan(tensors: Mapping[str, TensorInfo], fmt: str, exclude: Iterable[str]) -> Plan:
    """Decide for every 2-D weight. Raises UnsupportedCheckpointError when nothing is left to quantize."""
    by_user = PatternSet(map(user_pattern, exclude))
    excluded = PatternSet((*map(Pattern, DEFAULT_EXCLUDES), *by_user.patterns))
    group = GROUP_SIZES[fmt]
    linears = [
        n.removesuffix(".weight")
        for n, t in tensors.items()
        if n.endswith(".weight") and len(t.shape) == 2 and t.dtype in FLOATS
    ]
    blocked: dict[str, str] = {}  # unit -> why it cannot be FP4
    candidates: list[str] = []
    for module in linears:
        if not _BLOCK.search(module) or module.rpartition(".")[2] in ROUTER_LEAVES:
            continue
        if excluded.matches(module):
            if by_user.matches(module):
                blocked.setdefault(_unit(module), f"{module} is excluded")
            continue
        k = tensors[module + ".weight"].shape[1]
        if k % group:
            blocked.setdefault(_unit(module), f"{module} has K = {k}, no multiple of the {fmt} group {group}")
        candidates.append(module)
    chosen = [m for m in candidates if _unit(m) not in blocked]
    if not chosen:
        raise UnsupportedCheckpointError(
            "no linear layer is left to quantize" + "".join(f"; {w}" for w in blocked.values())
        )
    present = set(chosen)
    shared = {f"{m}.weight": tuple(f"{f}.weight" for f in family(m) if f in present) for m in chosen}
    notes = []
    for unit, why in blocked.items():
        others = sum(_unit(m) == unit for m in candidates)
        if others or "K =" in why:
            notes.append(f"{unit}: kept in 16 bits, {why}")
    return Plan(shared, tuple(m for m in linears if m not in present), tuple(notes))


def ignore_list(quantized_weights: Iterable[str], kept: Iterable[str]) -> list[str]:
    """ModelOpt's `ignore`: each kept module, or "path*" for the highest path below which nothing is quantized."""
    inner: set[str] = set()
    for name in quantized_weights:
        parts = name.removesuffix(".weight").split(".")
        inner.update(".".join(parts[:i]) for i in range(1, len(parts) + 1))
    entries: dict[str, None] = {"lm_head": None}  # tied heads have no tensor, but frameworks ask for them
    for module in kept:
        parts = module.split(".")
        top = next(".".join(parts[:i]) for i in range(1, len(parts) + 1) if ".".join(parts[:i]) not in inner)
        entries[module if top == module else f"{top}*"] = None
    return sorted(entries)
