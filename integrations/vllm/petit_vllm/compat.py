"""What depends on the vLLM version and platform."""

from __future__ import annotations

import functools
import logging
import re

TESTED = ((0, 32), (0, 33))
"""First and last vLLM minor version whose interfaces this plugin was written against (the tests run 0.32)."""

logger = logging.getLogger("petit_plugin.vllm")


def vllm_version() -> str:
    """Version text of the installed vLLM, "unknown" if it does not say."""
    try:
        import vllm

        return str(vllm.__version__)
    except Exception:
        return "unknown"


def _minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def version_problem(version: str) -> str | None:
    """A sentence when `version` lies outside :data:`TESTED`, else None."""
    minor = _minor(version)
    if minor is not None and TESTED[0] <= minor <= TESTED[1]:
        return None
    first, last = (".".join(map(str, v)) for v in TESTED)
    return f"petit_plugin was written for vLLM {first} to {last}; this is vLLM {version}"


def incompatible_message(error: BaseException) -> str:
    """Text for an interface of vLLM that is missing."""
    problem = version_problem(vllm_version()) or f"vLLM {vllm_version()} lacks an interface it should have"
    return (
        f"petit_plugin cannot register with vLLM ({error}). {problem}. Install a matching vLLM or a newer "
        "petit_plugin, or leave the plugin out with VLLM_PLUGINS=<the names of your other plugins>."
    )


@functools.cache
def warn_if_untested() -> None:
    """One warning a process for a vLLM outside the tested range."""
    problem = version_problem(vllm_version())
    if problem:
        logger.warning("%s. It may work; report what does not.", problem)


def platform() -> str:
    """ "rocm", "cpu", "cuda" or another name: the platform vLLM runs on. Initialises no device."""
    from vllm.platforms import current_platform

    if current_platform.is_rocm():
        return "rocm"
    if current_platform.is_cpu():
        return "cpu"
    if current_platform.is_cuda():
        return "cuda"
    return str(getattr(current_platform, "device_type", "unknown"))


class _ToVllm(logging.Handler):
    """Hands records to vLLM's logger, whose handlers and level are configured later than plugins are registered."""

    def emit(self, record: logging.LogRecord) -> None:
        target = logging.getLogger("vllm")
        if target.isEnabledFor(record.levelno):
            target.handle(record)


def adopt_vllm_logging() -> None:
    """Let petit_plugin's log lines come out with vLLM's, unless the user configured that logger."""
    ours = logging.getLogger("petit_plugin")
    if not ours.handlers and ours.level == logging.NOTSET:
        ours.addHandler(_ToVllm())
        ours.setLevel(logging.DEBUG)
        ours.propagate = False
