"""Values of a configuration, with their types checked: JSON that is valid may still be of the wrong shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petit_plugin.checkpoints.errors import UnsupportedCheckpointError


def _wrong(where: str, expected: str, value: Any) -> UnsupportedCheckpointError:
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return UnsupportedCheckpointError(
        f"configuration: {where} must be {expected}, not {text}: correct it or export the checkpoint again"
    )


def as_mapping(value: Any, where: str) -> Mapping[str, Any]:
    """`value`, which has to be an object. `where` is named in the error."""
    if not isinstance(value, Mapping):
        raise _wrong(where, "an object", value)
    return value


def mapping_of(body: Mapping[str, Any], key: str, where: str = "") -> Mapping[str, Any]:
    """The object under `key`. Exporters write "nothing" as null, [] or "" as well."""
    value = body.get(key)
    return {} if value is None or value == [] or value == "" else as_mapping(value, where + key)


def list_of_str(body: Mapping[str, Any], key: str, where: str = "") -> list[str]:
    """The list of strings under `key`; an empty one when there is none. A single string is not a list."""
    value = body.get(key)
    if value is None:
        return []
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, str) for entry in value):
        raise _wrong(where + key, "a list of strings", value)
    return list(value)
