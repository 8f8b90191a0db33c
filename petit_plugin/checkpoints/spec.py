"""QuantSpec: which layers of a model are FP4, and how. One frozen object, whatever dialect the checkpoint speaks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from petit_plugin.checkpoints.errors import NotFp4CheckpointError, UnsupportedCheckpointError
from petit_plugin.checkpoints.patterns import NameMapper, Pattern, PatternSet

GROUP_SIZES = {"nvfp4": 16, "mxfp4": 32}
EXPERT_LEAVES = (
    ("0.gate_proj", "0.up_proj", "0.down_proj"),
    ("0.w1", "0.w2", "0.w3"),
    ("gate_proj.0", "up_proj.0", "down_proj.0"),
    ("gate_up_proj", "down_proj"),
)
# Names that only ever mean "the linear that picks experts". They stay 16-bit unless the checkpoint stores them as FP4.
ROUTER_LEAVES = frozenset({"gate", "router", "shared_expert_gate"})
_MTP_LAYER = re.compile(r"^((?:.*\.)?mtp\.layers\.)(\d+)(?=\.|$)")


@dataclass(frozen=True)
class LayerFormat:
    """An FP4 layer. `format` is "nvfp4" (E4M3 scales, 16 values each) or "mxfp4" (E8M0 scales, 32 values each)."""

    format: str
    group_size: int
    algo: str
    pre_quant_scale: bool = False  # AWQ: activations are multiplied by a vector [K] first, where the tensor exists


@dataclass(frozen=True)
class ForeignFormat:
    """A layer that is quantized, but not to FP4: the framework's own method has to run it."""

    algo: str
    reason: str = ""


Scheme = LayerFormat | ForeignFormat | None  # None: stored in 16 or 32 bits


@dataclass(frozen=True)
class Rule:
    """Modules matching one of `patterns` have `scheme`. The lowest rank that matches decides."""

    patterns: tuple[Pattern, ...]
    scheme: Scheme
    rank: int = 0

    @cached_property
    def names(self) -> PatternSet:
        return PatternSet(self.patterns)


def rule(patterns: Iterable[str], scheme: Scheme, rank: int = 0) -> Rule:
    return Rule(tuple(Pattern(p) for p in patterns), scheme, rank)


@dataclass(frozen=True)
class QuantSpec:
    """Which layers are FP4.

    dialect: "modelopt", "quark", "compressed-tensors", "gpt-oss" or "deepseek-v4" (decides the tensors' names).
    default: scheme of a linear that no rule matches.
    kv_cache: None, "fp8" or "nvfp4".
    unquantized / fp4_on_disk / split_banks: what the safetensors headers say against the configuration (module names,
        see `with_checkpoint`); empty when only the configuration was read.
    """

    dialect: str
    default: Scheme = None
    rules: tuple[Rule, ...] = ()
    kv_cache: str | None = None
    producer: str = ""
    experts_only: bool = False
    num_hidden_layers: int | None = None
    warnings: tuple[str, ...] = ()
    unquantized: frozenset[str] = frozenset()
    fp4_on_disk: frozenset[str] = frozenset()
    split_banks: frozenset[str] = frozenset()
    _cache: dict[str, Scheme] = field(default_factory=dict, compare=False, repr=False)

    # ---- construction

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> QuantSpec:
        """Read a `quantization_config` (flat), a `hf_quant_config.json` (nested) or their equivalent in other dialects.

        Raises NotFp4CheckpointError when nothing in it is FP4, UnsupportedCheckpointError when something cannot be
        served.
        """
        from petit_plugin.checkpoints.dialects import spec_from_config

        return spec_from_config(config)

    @staticmethod
    def from_checkpoint(path: str | Path) -> QuantSpec:
        """Read a checkpoint directory: its configuration, corrected by what its safetensors headers say."""
        from petit_plugin.checkpoints.checkpoint import Checkpoint

        return Checkpoint(path).spec

    def with_checkpoint(self, path: str | Path) -> QuantSpec:
        """This spec, corrected by the headers of the checkpoint in `path` (nothing but headers is read)."""
        from petit_plugin.checkpoints.checkpoint import Checkpoint

        return Checkpoint(path, spec=self).spec

    # ---- questions

    @property
    def formats(self) -> frozenset[str]:
        """The FP4 formats that occur: a subset of {"nvfp4", "mxfp4"}."""
        schemes = [self.default, *(r.scheme for r in self.rules)]
        return frozenset(s.format for s in schemes if isinstance(s, LayerFormat))

    def layer_format(self, name: str, packed_modules: Mapping[str, Sequence[str]] | None = None) -> LayerFormat | None:
        """The FP4 format of module `name`, or None for a layer in 16 or 32 bits.

        name: module path without ".weight"; a fused module (`qkv_proj`, `gate_up_proj`) is resolved through
            `packed_modules` (leaf -> leaves of the shards in the checkpoint); a bank of experts ends in "experts".
        Raises UnsupportedCheckpointError for a layer quantized to something else, or a fused layer whose shards differ.
        """
        scheme = self.scheme(name, packed_modules)
        if isinstance(scheme, ForeignFormat):
            why = f": {scheme.reason}" if scheme.reason else ", which petit does not serve"
            raise UnsupportedCheckpointError(f"layer {name} is quantized with {scheme.algo}{why}")
        return scheme

    def foreign_format(
        self, name: str, packed_modules: Mapping[str, Sequence[str]] | None = None
    ) -> ForeignFormat | None:
        """The layer's format when it is quantized but not to FP4 (a framework may have its own method), else None."""
        scheme = self.scheme(name, packed_modules)
        return scheme if isinstance(scheme, ForeignFormat) else None

    def scheme(self, name: str, packed_modules: Mapping[str, Sequence[str]] | None = None) -> Scheme:
        """LayerFormat, ForeignFormat or None for module `name`; never guesses when the shards of a layer disagree."""
        name = self._canonical(name)
        parent, _, leaf = name.rpartition(".")
        shards = (packed_modules or {}).get(leaf, ())
        if len(shards) > 1 or (len(shards) == 1 and shards[0] != leaf):
            for r in self.rules:
                if r.names.names_directly(name):
                    return r.scheme
            prefix = parent + "." if parent else ""
            return self._agreed(name, [prefix + s for s in shards])
        if leaf == "experts":
            return self._bank_scheme(name)
        return self._leaf_scheme(name)

    def map_names(self, mapper: NameMapper) -> QuantSpec:
        """The same spec asked with a framework's module names. `mapper`: list of checkpoint names -> list of names."""

        def names(old: frozenset[str]) -> frozenset[str]:
            return frozenset(mapper(sorted(old)))

        rules = tuple(replace(r, patterns=tuple(m for p in r.patterns for m in p.mapped(mapper))) for r in self.rules)
        return replace(
            self,
            rules=rules,
            unquantized=names(self.unquantized),
            fp4_on_disk=names(self.fp4_on_disk),
            split_banks=names(self.split_banks),
            _cache={},
        )

    # ---- resolution

    def _canonical(self, name: str) -> str:
        name = name.removesuffix(".routed_experts")
        # Frameworks number MTP layers after the decoder's; checkpoints from zero.
        found = _MTP_LAYER.match(name)
        if found and self.num_hidden_layers and int(found[2]) >= self.num_hidden_layers:
            name = f"{found[1]}{int(found[2]) - self.num_hidden_layers}{name[found.end() :]}"
        return name

    def _leaf_scheme(self, name: str) -> Scheme:
        if name not in self._cache:
            self._cache[name] = self._resolve_leaf(name)
        return self._cache[name]

    def _resolve_leaf(self, name: str) -> Scheme:
        if name in self.unquantized:
            return None
        matching = [r for r in self.rules if r.names.matches(name)]
        if matching:
            first = min(r.rank for r in matching)
            schemes = list(dict.fromkeys(r.scheme for r in matching if r.rank == first))
            if len(schemes) > 1:
                raise UnsupportedCheckpointError(
                    f"layer {name} matches several groups of the quantization config with different formats: "
                    + ", ".join(describe(s) for s in schemes)
                )
            return schemes[0]
        if self.experts_only and "experts" not in name.split("."):
            return None
        if name.rpartition(".")[2] in ROUTER_LEAVES and name not in self.fp4_on_disk:
            return None
        return self.default

    def _agreed(self, name: str, members: Sequence[str]) -> Scheme:
        schemes = [self._leaf_scheme(m) for m in members]
        if len(set(schemes)) > 1:
            listed = ", ".join(f"{m.rpartition('.')[2]}: {describe(s)}" for m, s in zip(members, schemes, strict=True))
            raise UnsupportedCheckpointError(
                f"layer {name} fuses modules in different formats ({listed}): quantize or exclude all of them"
            )
        return schemes[0]

    def _bank_scheme(self, name: str) -> Scheme:
        """A bank of experts runs as one kernel: every expert must have one format; one excluded leaf excludes it."""
        if name in self.split_banks:
            raise UnsupportedCheckpointError(
                f"layer {name}: some experts are stored as FP4 and others are not: quantize or exclude all of them"
            )
        if name in self.unquantized:
            return None
        if any(r.names.names_directly(name) for r in self.rules):
            return self._leaf_scheme(name)
        # The bank's leaves, under the names models give them; only those that some rule speaks of count.
        found: dict[Scheme, None] = {}
        excluded = False
        for r in self.rules:
            if r.names.literals_below(name):
                found[r.scheme] = None
                excluded |= r.rank == 0 and r.scheme is None
        for family in EXPERT_LEAVES:
            leaves = [f"{name}.{leaf}" for leaf in family]
            touching = [r for r in self.rules if any(r.names.matches(leaf) for leaf in leaves)]
            if touching:
                found |= dict.fromkeys(self._leaf_scheme(leaf) for leaf in leaves)
                excluded |= any(r.rank == 0 and r.scheme is None for r in touching)
        if excluded:
            return None
        if len(found) > 1:
            raise UnsupportedCheckpointError(
                f"layer {name} has experts in different formats: " + ", ".join(describe(s) for s in found)
            )
        return next(iter(found), self.default)


def describe(scheme: Scheme) -> str:
    """One word for a scheme, for messages."""
    return "not quantized" if scheme is None else scheme.algo


def require_fp4(spec: QuantSpec, what: str) -> QuantSpec:
    """Hand the checkpoint back when nothing in it is FP4."""
    if not spec.formats:
        raise NotFp4CheckpointError(f"{what}: no layer is in an FP4 format that petit serves (NVFP4, MXFP4)")
    return spec
