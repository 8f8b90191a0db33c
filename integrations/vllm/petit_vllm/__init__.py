"""petit_plugin for vLLM: the entry point ``vllm.general_plugins`` calls :func:`register` in every vLLM process."""

from __future__ import annotations

METHODS = ("petit", "petit_nvfp4", "petit_mxfp4")
"""Names accepted by ``--quantization``: any FP4 format, NVFP4 only, MXFP4 only."""


def register() -> None:
    """Make vLLM know the quantization methods of :data:`METHODS`.

    Runs in the API server, the engine and every worker of any vLLM user who has this package installed, so it only
    fills tables: no device is touched and no thread started. Calling it again does nothing. It raises when the
    installed vLLM no longer has the interfaces needed: going on would let vLLM pick its own FP4 method, which does
    something else with the same checkpoint.
    """
    # vLLM logs and swallows an exception raised while a plugin is *imported*, but not one raised while it is *called*:
    # so nothing of vLLM is imported above.
    from petit_vllm import compat

    try:
        from petit_vllm.config import register_methods
        from petit_vllm.modelopt_json import accept_more_algorithms
    except ImportError as error:
        if not (error.name or "").startswith("vllm"):
            raise
        raise RuntimeError(compat.incompatible_message(error)) from error
    compat.adopt_vllm_logging()
    compat.warn_if_untested()
    register_methods()
    accept_more_algorithms()
