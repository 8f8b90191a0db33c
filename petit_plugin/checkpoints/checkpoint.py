"""A checkpoint directory: configuration, headers, and its FP4 matrices one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from petit_plugin.checkpoints import deepseek
from petit_plugin.checkpoints.errors import (
    BrokenCheckpointError,
    NotFp4CheckpointError,
    UnsupportedCheckpointError,
)
from petit_plugin.checkpoints.layers import Fp4Layer, candidates, read_layer
from petit_plugin.checkpoints.safetensors_files import FLOATS, TensorInfo, load_json, read_tensors
from petit_plugin.checkpoints.spec import ROUTER_LEAVES, ForeignFormat, LayerFormat, QuantSpec, Scheme, describe
from petit_plugin.checkpoints.values import mapping_of

if TYPE_CHECKING:
    import torch


class Fp4Matrix(NamedTuple):
    """One FP4 matrix as a kernel wants it: row-major, codes along K, a multiplying global scale."""

    name: str
    weight: torch.Tensor  # uint8 [N, K/2]
    weight_scale: torch.Tensor  # [N, K/16] float8_e4m3fn (or its bytes) or [N, K/32] uint8
    global_scale: torch.Tensor | None  # float32 [], NVFP4 only


def read_quantization(directory: Path, config: dict[str, Any]) -> QuantSpec:
    """The QuantSpec of a checkpoint's configuration files (config.json decides; hf_quant_config.json must agree)."""
    if deepseek.is_fp4(config):
        return deepseek.read(config)
    text = mapping_of(config, "text_config")
    main = next(
        (c[key] for c in (config, text) for key in ("quantization_config", "compression_config") if c.get(key)), None
    )
    nested_file = directory / "hf_quant_config.json"
    nested = load_json(nested_file) if nested_file.exists() else None
    if main is None and nested is None:
        raise NotFp4CheckpointError(
            f"{directory}: not a quantized checkpoint (neither config.json nor hf_quant_config.json says how)"
        )
    spec = QuantSpec.from_config(main if main is not None else nested or {})
    if main is not None and nested is not None:
        try:
            other = QuantSpec.from_config(nested)
        except UnsupportedCheckpointError as error:
            raise BrokenCheckpointError(f"hf_quant_config.json contradicts config.json: {error}") from error
        if other.formats != spec.formats:
            raise BrokenCheckpointError(
                f"config.json says {'+'.join(sorted(spec.formats))}, hf_quant_config.json says "
                f"{'+'.join(sorted(other.formats))}: delete the file that is wrong"
            )
    return spec


def hidden_layers(config: dict[str, Any]) -> int | None:
    """How many decoder layers the model has, where its config.json says so."""
    layers = config.get("num_hidden_layers") or mapping_of(config, "text_config").get("num_hidden_layers")
    return layers if isinstance(layers, int) else None


def _with_pre_quant_scales(spec: QuantSpec, present: bool) -> QuantSpec:
    """AWQ exporters fold these scales into earlier layers where they can: only the tensors say whether any are left."""

    def known(scheme: Scheme) -> Scheme:
        return replace(scheme, pre_quant_scale=present) if isinstance(scheme, LayerFormat) else scheme

    rules = tuple(replace(r, scheme=known(r.scheme)) for r in spec.rules)
    return replace(spec, default=known(spec.default), rules=rules, _cache={})


def correct_by_headers(spec: QuantSpec, tensors: dict[str, TensorInfo]) -> QuantSpec:
    """What is stored in 16 or 32 bits is not quantized, whatever the exclude list forgot (routers, a tied lm_head)."""
    svd = next((n for n in tensors if ".svdquant_lora_" in n), None)
    if svd is not None:
        layer = svd.partition(".svdquant_lora_")[0]
        raise UnsupportedCheckpointError(f"layer {layer}: NVFP4_SVD cannot be served: {svd} is a low-rank branch")
    spec = _with_pre_quant_scales(spec, any(n.endswith(".pre_quant_scale") for n in tensors))
    stored_fp4 = {module for module, _ in candidates(spec.dialect, tensors)}
    spec = replace(
        spec, fp4_on_disk=frozenset(m for m in stored_fp4 if m.rpartition(".")[2] in ROUTER_LEAVES), _cache={}
    )
    plain: set[str] = set()
    for name, info in tensors.items():
        module = name.removesuffix(".weight")
        if info.dtype in FLOATS and len(info.shape) in (2, 3) and module not in stored_fp4:
            # 2-D "X.weight" is a linear (or an embedding); 3-D "experts.gate_up_proj" a bank of experts.
            is_bank = len(info.shape) == 3 and ".experts." in name and not name.endswith("_bias")
            if is_bank or (module != name and len(info.shape) == 2):
                plain.add(module)
    unquantized = {m for m in plain if _config_says_fp4(spec, m)}
    if not any(n.rpartition(".")[0].endswith("lm_head") for n in tensors) and _config_says_fp4(spec, "lm_head"):
        unquantized.add("lm_head")  # shares the embedding's tensor
    banks: dict[str, set[bool]] = {}
    for modules, is_fp4 in ((plain, False), (stored_fp4, True)):
        for module in modules:
            head, found, _ = f"{module}.".partition(".experts.")
            if found:
                banks.setdefault(head + ".experts", set()).add(is_fp4)
    unquantized |= {bank for bank, states in banks.items() if states == {False}}
    split = frozenset(bank for bank, states in banks.items() if len(states) == 2)
    return replace(spec, unquantized=frozenset(unquantized), split_banks=split, _cache={})


def _config_says_fp4(spec: QuantSpec, module: str) -> bool:
    try:
        return isinstance(spec.scheme(module), LayerFormat)
    except UnsupportedCheckpointError:
        return False


class Checkpoint:
    """A checkpoint directory. Opening it reads config.json and the safetensors headers, no tensor data.

    spec: use this one (a framework's) instead of reading the configuration files.
    Raises BrokenCheckpointError, UnsupportedCheckpointError or NotFp4CheckpointError. Problems of single layers are
    collected in `problems`; `check()` raises them.
    """

    def __init__(self, path: str | Path, spec: QuantSpec | None = None):
        self.path = Path(path)
        if not self.path.is_dir():
            raise BrokenCheckpointError(f"{self.path}: not a directory")
        self.config = load_json(self.path / "config.json")
        if spec is None:
            spec = read_quantization(self.path, self.config)
        self.tensors = read_tensors(self.path)
        self.spec = correct_by_headers(replace(spec, num_hidden_layers=hidden_layers(self.config)), self.tensors)

    @cached_property
    def _scan(self) -> tuple[tuple[Fp4Layer, ...], tuple[str, ...], tuple[tuple[str, str], ...]]:
        layers: list[Fp4Layer] = []
        problems: list[str] = []
        refused: list[tuple[str, str]] = []
        for module, naming in candidates(self.spec.dialect, self.tensors):
            try:
                scheme = self.spec.scheme(module)
                if isinstance(scheme, ForeignFormat):
                    continue  # e.g. MXFP8, whose scales look alike; reported through `foreign`
                if scheme is None:
                    problems.append(
                        f"layer {module} is stored as FP4, but the quantization config excludes it: correct the config"
                    )
                    continue
                layers.append(read_layer(module, scheme, naming, self.tensors))
            except BrokenCheckpointError as error:
                problems.append(str(error))
            except UnsupportedCheckpointError as error:
                refused.append((module, str(error)))
        refused += [(bank, self._why_split(bank)) for bank in sorted(self.spec.split_banks)]
        found = {module for module, _ in candidates(self.spec.dialect, self.tensors)}
        for name, info in self.tensors.items():
            module = name.removesuffix(".weight")
            integers = info.dtype.startswith(("F8", "I", "U")) and len(info.shape) == 2
            if module != name and integers and module not in found and _config_says_fp4(self.spec, module):
                algo = describe(self.spec.scheme(module))
                problems.append(f"layer {module}: the quantization config says {algo}, but {name} is {info.dtype}")
        if not layers and not problems and not refused:
            problems.append(
                f"{self.path}: the quantization config announces FP4 layers, but no tensor is stored as FP4"
            )
        return tuple(layers), tuple(problems), tuple(refused)

    def _why_split(self, bank: str) -> str:
        try:
            self.spec.scheme(bank)
        except UnsupportedCheckpointError as error:
            return str(error)
        return ""

    @property
    def layers(self) -> tuple[Fp4Layer, ...]:
        """The FP4 layers whose tensors are complete and fit together, in the order of the files."""
        return self._scan[0]

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for every layer that is broken."""
        return self._scan[1]

    @property
    def refused(self) -> tuple[tuple[str, str], ...]:
        """(layer, why) of well-formed layers that petit cannot serve."""
        return self._scan[2]

    @cached_property
    def foreign(self) -> dict[str, ForeignFormat]:
        """Layers that are quantized to something else (FP8, MXFP8): module -> format."""
        out: dict[str, ForeignFormat] = {}
        for name in self.tensors:
            module = name.removesuffix(".weight")
            if module != name and self.tensors[name].dtype not in FLOATS:
                try:
                    scheme = self.spec.scheme(module)
                except UnsupportedCheckpointError:
                    continue
                if isinstance(scheme, ForeignFormat):
                    out[module] = scheme
        return out

    def check(self) -> None:
        """Raise BrokenCheckpointError with the first problem and how many there are, or UnsupportedCheckpointError."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise BrokenCheckpointError(self.problems[0] + more)
        if self.refused:
            raise UnsupportedCheckpointError(self.refused[0][1])

    # ---- tensor data

    def matrices(self, layer: Fp4Layer) -> Iterator[Fp4Matrix]:
        """The matrices of one layer, an expert at a time: memory is bounded by one matrix, not by a bank."""
        import torch
        from safetensors import safe_open

        with ExitStack() as stack:
            files = {
                info.file: stack.enter_context(safe_open(str(info.file), framework="pt"))
                for info in (layer.weight, layer.scale, layer.global_scale)
                if info is not None
            }
            factors = None
            if layer.global_scale is not None:
                factors = files[layer.global_scale.file].get_tensor(layer.global_scale.name).float().reshape(-1)
                if layer.naming.divisor:
                    factors = factors.reciprocal()
            if layer.experts is None:
                weight = files[layer.weight.file].get_tensor(layer.weight.name)
                scale = files[layer.scale.file].get_tensor(layer.scale.name)
                yield Fp4Matrix(layer.name, weight.view(torch.uint8), scale, None if factors is None else factors[0])
                return
            weights = files[layer.weight.file].get_slice(layer.weight.name)
            scales = files[layer.scale.file].get_slice(layer.scale.name)
            for expert in range(layer.experts):
                weight, scale = weights[expert : expert + 1][0], scales[expert : expert + 1][0]
                if layer.transposed:
                    weight, scale = weight.t().contiguous(), scale.view(torch.uint8).t().contiguous()
                weight = weight.reshape(layer.n, layer.k // 2)
                factor = None if factors is None else factors[expert if factors.numel() > 1 else 0]
                yield Fp4Matrix(f"{layer.name}[{expert}]", weight, scale, factor)
