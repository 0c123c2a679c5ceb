"""jaxserve: serve open-weight language models with JAX on NVIDIA GPUs, TPUs and CPUs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
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

# In a checkout, the packages `server`, `checkpoints` and `pallas_kernels` are folders beside this one. An installation
# has them inside it (see `package-dir` in pyproject.toml).
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "pallas_kernels").is_dir():
    __path__.append(str(_ROOT))

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
