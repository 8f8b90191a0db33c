"""Writing a safetensors file tensor by tensor, in pieces, without ever holding a whole tensor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from petit_plugin.checkpoints.safetensors_files import BITS


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written. `dtype` as safetensors writes it ("BF16", "U8", "F8_E4M3", ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


class SafetensorsWriter:
    """The header is written first (sizes are known), then `write` fills the tensors' bytes in any order."""

    def __init__(self, path: Path, tensors: Iterable[TensorSpec]):
        # Wide types first, as the reference implementation orders them: every tensor stays aligned to its type.
        ordered = sorted(tensors, key=lambda t: (-BITS[t.dtype], t.name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position, self._start, self._left = 0, {}, {}
        for tensor in ordered:
            end = position + tensor.nbytes
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            self._start[tensor.name], self._left[tensor.name] = position, tensor.nbytes
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self.path = path
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        os.pwrite(self._file, len(text).to_bytes(8, "little") + text, 0)
        os.truncate(self._file, self._data + position)

    def write(self, name: str, data: bytes | memoryview, offset: int = 0) -> None:
        """Put `data` at byte `offset` of tensor `name`. Raises ValueError beyond what the tensor still lacks."""
        view = memoryview(data).cast("B")
        self._left[name] -= len(view)
        if self._left[name] < 0:
            raise ValueError(f"{name}: more bytes written than the tensor has")
        position = self._data + self._start[name] + offset
        while len(view):
            written = os.pwrite(self._file, view, position)
            view, position = view[written:], position + written

    def close(self) -> None:
        """Flush to disk. Raises ValueError if a tensor is incomplete."""
        incomplete = [name for name, left in self._left.items() if left]
        os.fsync(self._file)
        os.close(self._file)
        if incomplete:
            raise ValueError(f"{self.path.name}: tensor {incomplete[0]} was not written completely")

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            os.close(self._file)
