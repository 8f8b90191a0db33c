"""Import of the native module, with one sentence for the two ways it can be missing or wrong."""

from __future__ import annotations

import importlib
import importlib.machinery
from pathlib import Path

from petit_plugin._version import __version__

REMEDY = "run `pip install -e .` in the source tree, or `pip install .` and start Python outside it"


def native() -> None:
    """Load petit_plugin._native.

    Raises ImportError if it has not been built for this Python, cannot be loaded, or was built from another version.
    """
    here = Path(__file__).parent
    # Looked for on disk: an editable install elsewhere would answer the import with another tree's module.
    if not any((here / f"_native{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        raise ImportError(f"petit_plugin in {here} has no native module for this Python: {REMEDY}.")
    module = importlib.import_module("petit_plugin._native")
    if module.__version__ != __version__:
        raise ImportError(
            f"petit_plugin in {here} is version {__version__} but its native module is {module.__version__}: {REMEDY}."
        )
