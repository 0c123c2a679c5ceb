"""jaxserve: serve open-weight language models with JAX on NVIDIA GPUs, TPUs and CPUs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.llm import LLM
    from jaxserve.offline import CompletionOutput, LoRARequest, RequestOutput
    from jaxserve.types import SamplingParams

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "LoRARequest", "RequestOutput", "SamplingParams"]

try:
    __version__ = version("jaxserve")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

_HOMES = {
    "LLM": "jaxserve.llm",
    "CompletionOutput": "jaxserve.offline",
    "LoRARequest": "jaxserve.offline",
    "RequestOutput": "jaxserve.offline",
    "EngineConfig": "jaxserve.config",
    "SamplingParams": "jaxserve.types",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that the command line's help does not wait for JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
