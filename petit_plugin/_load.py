"""Import of the native module, with one sentence for the two ways it can be missing or wrong."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import struct
from pathlib import Path

from petit_plugin._version import __version__

REMEDY = "run `pip install -e .` in the source tree, or `pip install .` and start Python outside it"


def _missing_bytes(file: Path) -> int:
    """How much shorter an ELF64 file is than its segments. The dynamic loader would die of it with SIGBUS.

    Format: ELF-64 file header (e_phoff, e_phentsize, e_phnum) and program headers (p_offset, p_filesz), System V ABI.
    What is no such file is left to the loader, which refuses it with a message.
    """
    with open(file, "rb") as content:
        header = content.read(64)
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
            return 0
        at: int
        size: int
        count: int
        at, size, count = struct.unpack("<32xQ14xHH6x", header)
        content.seek(at)
        table = content.read(size * count)
        ends: list[int] = [at + size * count]
        for start in range(0, len(table) // size * size if size >= 40 else 0, size):
            offset, length = struct.unpack_from("<8xQ16xQ", table, start)
            ends.append(offset + length)
        return max(0, max(ends) - os.fstat(content.fileno()).st_size)


def native() -> None:
    """Load petit_plugin._native.

    Raises ImportError if it has not been built for this Python, cannot be loaded, or was built from another version.
    """
    here = Path(__file__).parent
    # Looked for on disk: an editable install elsewhere would answer the import with another tree's module.
    files = [here / f"_native{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        raise ImportError(f"petit_plugin in {here} has no native module for this Python: {REMEDY}.")
    if missing := _missing_bytes(file):
        raise ImportError(f"{file} is cut off ({missing} bytes are missing; was the disk full?): {REMEDY}.")
    module = importlib.import_module("petit_plugin._native")
    if module.__version__ != __version__:
        raise ImportError(
            f"petit_plugin in {here} is version {__version__} but its native module is {module.__version__}: {REMEDY}."
        )
