"""One line at the end of loading that says what was loaded and how."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

logger = logging.getLogger("petit_plugin.vllm")


@dataclass
class LoadSummary:
    """Counts modules (a fused qkv counts once, all experts of one layer count once) as they are created and packed."""

    formats: dict[str, str] = field(default_factory=dict)  # FP4 module -> format
    plain: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    fp4_bytes: int = 0
    weights: int = 0
    archs: Counter[str] = field(default_factory=Counter)
    padded: Counter[str] = field(default_factory=Counter)
    exact: int = 0

    def saw(self, prefix: str, found: Any | None) -> None:
        """A module was created: `found` is its LayerFormat, None for 16-bit."""
        if found is None:
            self.plain.add(prefix)
        else:
            self.formats[prefix] = found.format
            self.waiting.add(prefix)

    def forget(self, prefix: str) -> None:
        """An FP4 module turned out to share a 16-bit weight (tied embeddings)."""
        self.formats.pop(prefix, None)
        self.waiting.discard(prefix)
        self.plain.add(prefix)

    def packed(
        self, prefix: str, arch: str, weights: int, tensors: Iterable[torch.Tensor], padded: Iterable[str], exact: bool
    ) -> None:
        """A module was packed; logs the summary after the last one. Packing again (a reload) counts nothing."""
        if prefix not in self.waiting:
            return
        self.waiting.discard(prefix)
        self.fp4_bytes += sum(t.numel() * t.element_size() for t in tensors)
        self.weights += weights
        self.archs[arch] += 1
        self.padded.update(padded)
        self.exact += exact
        if not self.waiting:
            logger.info("%s", self.text())

    def text(self) -> str:
        """The summary line. Bytes are those of this process' FP4 layers, against 2 bytes a weight."""
        counts = Counter(self.formats.values())
        layers = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
        fp4, bf16 = self.fp4_bytes / 1e6, 2 * self.weights / 1e6
        padded = ", ".join(f"{shape} ({n})" for shape, n in self.padded.most_common(4)) or "none"
        parts = [
            f"petit: {sum(counts.values())} FP4 layers ({layers}), {len(self.plain)} in 16 bit",
            f"FP4 layers take {fp4:.1f} MB, {bf16:.1f} MB in BF16 ({bf16 / max(fp4, 1e-6):.2f}x)",
            f"backend {', '.join(sorted(self.archs))}",
            f"padded {padded}",
            "input_scale not used (activations stay 16 bit)",
        ]
        if self.exact:
            parts.append(f"{self.exact} layers on the exact kernel")
        return "; ".join(parts)
