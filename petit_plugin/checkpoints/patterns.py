"""Matching module names against the lists that quantizers write: plain names, wildcards and regular expressions.

Quantizers name modules as they stand in the checkpoint. A framework asks with its own names, which may carry another
prefix (`language_model.model.layers.0` for `model.layers.0`), so a plain name also matches as a run of whole path
components. It never matches as a bare substring: `mlp.gate` must not catch `mlp.gate_up_proj`, nor `shared_expert`
`shared_expert_gate`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from petit_plugin.checkpoints.errors import UnsupportedCheckpointError

NameMapper = Callable[[list[str]], list[str]]
_REGEX_META = set(".^$*+?{}[]|()")


def _split_regex(body: str) -> tuple[str, str]:
    """Split a regular expression into its leading literal text (unescaped) and the rest."""
    literal, i = "", 0
    while i < len(body):
        if body[i] == "\\" and i + 1 < len(body) and body[i + 1] in ".-_":
            step, char = 2, body[i + 1]
        elif body[i] not in _REGEX_META and body[i] != "\\":
            step, char = 1, body[i]
        else:
            break
        if i + step < len(body) and body[i + step] in "*+?{":  # the quantifier belongs to this character
            break
        literal, i = literal + char, i + step
    return literal, body[i:]


@dataclass(frozen=True)
class Pattern:
    """One entry of an exclude, ignore or target list.

    `text` is a plain module name, a wildcard (contains `*` or `?`), or `re:` followed by a regular expression that is
    matched from the start of the name, as compressed-tensors and Quark do. Raises UnsupportedCheckpointError for a
    regular expression that is none.
    """

    text: str

    def __post_init__(self) -> None:
        if self.is_regex:
            try:
                re.compile(self.text[3:])
            except (re.error, OverflowError, RecursionError) as error:
                raise UnsupportedCheckpointError(
                    f"pattern {self.text!r} is not a valid regular expression ({error}): correct it"
                ) from error

    @property
    def is_regex(self) -> bool:
        return self.text.startswith("re:")

    @property
    def is_glob(self) -> bool:
        return not self.is_regex and any(c in self.text for c in "*?[")

    @property
    def is_literal(self) -> bool:
        return not self.is_regex and not self.is_glob

    @cached_property
    def _compiled(self) -> tuple[re.Pattern[str], ...]:
        if self.is_regex:
            return (re.compile(self.text[3:]),)
        base = self.text[:-1]
        # ModelOpt writes "path*" for "the module path and everything below it": layers.1* is not layers.10. A text
        # without a dot ("*router*") is a wildcard over whole names and keeps its ordinary meaning.
        is_tree = (
            self.text.endswith("*") and not base.endswith((".", "*")) and base and ("." in base or "*" not in base)
        )
        globs = (base, base + ".*") if is_tree else (self.text,)
        return tuple(re.compile(fnmatch.translate(g)) for g in globs)

    def matches(self, name: str) -> bool:
        if self.is_literal:
            return name == self.text or f".{name}.".find(f".{self.text}.") >= 0
        return any(p.match(name) for p in self._compiled)

    def mapped(self, mapper: NameMapper) -> tuple[Pattern, ...]:
        """This pattern in a framework's names. A mapper may rewrite prefixes, drop a name or leave it alone."""
        if self.is_regex:
            literal, rest = _split_regex(self.text[3:])
            return tuple(Pattern("re:" + re.escape(m) + rest) for m in mapper([literal])) if literal else (self,)
        if self.is_glob and self.text.endswith("*") and len(self.text) > 1 and self.text[-2] not in ".*":
            base = self.text[:-1]
            if (
                "." in base or "*" not in base
            ):  # the tree form: both halves map on their own, "foo*" hides a prefix "foo."
                return tuple(Pattern(t) for t in dict.fromkeys(mapper([base]) + mapper([base + ".*"])))
        return tuple(Pattern(t) for t in mapper([self.text]))


class PatternSet:
    """Many patterns asked at once; plain names (there may be tens of thousands) go through a hash table."""

    def __init__(self, patterns: Iterable[Pattern]):
        self.patterns = tuple(patterns)
        self._literals = {p.text for p in self.patterns if p.is_literal}
        self._heads = {text.partition(".")[0] for text in self._literals}
        self._others = tuple(p for p in self.patterns if not p.is_literal)

    def matches(self, name: str) -> bool:
        return self._has_literal(name) or any(p.matches(name) for p in self._others)

    def _has_literal(self, name: str) -> bool:
        """Whether a plain entry is a run of whole components of `name`."""
        parts = name.split(".")
        return any(
            ".".join(parts[start:stop]) in self._literals
            for start in range(len(parts))
            if parts[start] in self._heads
            for stop in range(len(parts), start, -1)
        )

    def names_directly(self, name: str) -> bool:
        """Whether an entry means this very (fused) module: by its plain name, or by a wildcard that spells its leaf.

        `re:.*v_proj` happens to match `qkv_proj` as text but speaks of v_proj, so it does not count.
        """
        if self._has_literal(name):
            return True
        leaf = re.compile(r"(?<![A-Za-z0-9_])" + re.escape(name.rpartition(".")[2]) + r"(?![A-Za-z0-9_])")
        return any(leaf.search(p.text.replace("\\", "")) and p.matches(name) for p in self._others)

    def literals_below(self, name: str) -> list[str]:
        prefix = name + "."
        return [text for text in self._literals if text.startswith(prefix)]
