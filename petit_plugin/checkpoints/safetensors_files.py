"""Safetensors headers of a checkpoint directory, validated before anything relies on them. No tensor data is read.

File format: 8 bytes little endian header length, that many bytes of JSON {name: {dtype, shape, data_offsets}}, data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petit_plugin.checkpoints.errors import BrokenCheckpointError

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F4", "F4_E2M1"), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
}
FLOATS = frozenset({"BF16", "F16", "F32"})
MAX_HEADER_BYTES = 256 << 20
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its header describes it. `start` is the byte offset of its data in `file`."""

    name: str
    dtype: str  # as safetensors writes it: "U8", "F8_E4M3", "BF16", ...
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one file, in the order of their data. Raises BrokenCheckpointError naming file and tensor."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or not 2 <= length <= MAX_HEADER_BYTES or 8 + length > size:
                raise BrokenCheckpointError(
                    f"{file.name}: not a complete safetensors file ({size} bytes): download it again"
                )
            raw = stream.read(length)
    except FileNotFoundError as error:
        raise BrokenCheckpointError(f"{file.name}: file is missing") from error
    except OSError as error:
        raise BrokenCheckpointError(f"{file.name}: cannot be read: {error.strerror}") from error
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpointError(f"{file.name}: the safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise BrokenCheckpointError(f"{file.name}: the safetensors header is not an object")
    header.pop("__metadata__", None)
    infos = [_tensor_info(file, name, entry, 8 + length) for name, entry in header.items()]
    infos.sort(key=lambda t: (t.start, t.nbytes))
    end = 8 + length
    for info in infos:
        if info.start != end:
            raise BrokenCheckpointError(f"{file.name}: tensor {info.name} overlaps another or leaves a gap before it")
        end = info.start + info.nbytes
    if end > size:
        short = next(t for t in infos if t.start + t.nbytes > size)
        raise BrokenCheckpointError(
            f"{file.name}: truncated, {size} of {end} bytes, tensor {short.name} is incomplete: download it again"
        )
    if end < size:
        raise BrokenCheckpointError(
            f"{file.name}: {size - end} bytes follow the last tensor: not a valid safetensors file"
        )
    return {t.name: t for t in infos}


def _tensor_info(file: Path, name: str, entry: Any, data: int) -> TensorInfo:
    try:
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if not all(type(number) is int for number in (*shape, begin, end)):
            raise TypeError("shape and data_offsets are whole numbers")
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenCheckpointError(f"{file.name}: tensor {name}: malformed header entry {entry!r}") from error
    if dtype not in BITS:
        raise BrokenCheckpointError(f"{file.name}: tensor {name}: unknown dtype {dtype}")
    expected = math.prod(shape) * BITS[dtype]
    if min(shape, default=0) < 0 or begin < 0 or expected % 8 or end - begin != expected // 8:
        raise BrokenCheckpointError(
            f"{file.name}: tensor {name}: {dtype} {list(shape)} needs {expected // 8} bytes, it has {end - begin}"
        )
    return TensorInfo(name, dtype, shape, file, data + begin, end - begin)


def weight_files(directory: Path) -> tuple[list[Path], Mapping[str, str] | None]:
    """The safetensors files of a checkpoint and, when it has one, its index (tensor name -> file name).

    Raises BrokenCheckpointError when there are none, or when the index is not readable.
    """
    index = directory / INDEX_NAME
    if index.exists():
        weight_map = load_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise BrokenCheckpointError(f"{INDEX_NAME}: no weight_map")
        names = sorted(set(map(str, weight_map.values())))
        outside = [n for n in names if os.path.basename(n) != n]
        if outside:
            raise BrokenCheckpointError(f"{INDEX_NAME}: {outside[0]!r} is not a file name of this directory")
        return [directory / n for n in names], weight_map
    files = sorted(directory.glob("*.safetensors"))
    model = [f for f in files if not f.name.startswith("consolidated")]
    if not files:
        raise BrokenCheckpointError(f"{directory}: no .safetensors file: petit reads safetensors checkpoints only")
    return model or files, None


def read_tensors(directory: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint directory: name -> TensorInfo."""
    files, index = weight_files(directory)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if index is not None and index.get(name) not in (None, file.name):
                continue  # another file holds the copy that counts
            if name in tensors:
                raise BrokenCheckpointError(f"tensor {name} is in two files: {tensors[name].file.name} and {file.name}")
            tensors[name] = info
    for name, file_name in (index or {}).items():
        if name not in tensors:
            raise BrokenCheckpointError(f"{INDEX_NAME} places tensor {name} in {file_name}, which does not hold it")
    return tensors


def load_json(file: Path) -> dict[str, Any]:
    """A JSON object from `file`. Raises BrokenCheckpointError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BrokenCheckpointError(f"{file.name}: file is missing") from error
    except OSError as error:
        raise BrokenCheckpointError(f"{file.name}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpointError(f"{file.name}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BrokenCheckpointError(f"{file.name}: expected a JSON object")
    return value
