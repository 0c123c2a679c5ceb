"""Stamps of checks that have passed, so that a start on the same kind of device need not repeat them.

A stamp is a text in JSON: what was checked, and all that the result depends on (`surroundings`). It is kept as the file
`checks/DIGEST.json` in the folder of the compilation cache. A file counts if its text is exactly the expected one.
Failed checks leave no stamp. To check anew, delete the folder. Without a folder to write to, each start checks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from jaxserve.pallas_kernels import installed, tuning
from jaxserve.pallas_kernels.cache_folder import CacheFolder, is_writable, open_cache

FOLDER = "checks"
# What compiles kernels, beside the driver and XLA_FLAGS. Those that are not installed are left out.
PACKAGES = (
    "jax", "jaxlib", "jax-triton", "triton", "libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin",
    "jax-cuda13-pjrt", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc",
)  # fmt: skip
CODE = (".py", ".json")  # suffixes of code, and of tables
NVIDIA_DRIVER = Path("/sys/module/nvidia/version")

_passed: set[str] = set()  # stamps that this process has made, found or been given


def stamp_of(kernels: Sequence[Any], **checked: Any) -> str | None:
    """The stamp of a check of these functions and modules; `checked` says with what. None for functions from elsewhere,
    whose code `surroundings` does not know, and on a CPU, where checks are rehearsals."""
    names = [_name(kernel) for kernel in kernels]
    around = surroundings()
    if None in names or around["platform"].startswith("cpu"):
        return None
    said = {name: str(value) for name, value in checked.items()}
    return json.dumps({"kernels": names, **said, **around}, indent=1) + "\n"


def _name(kernel: Any) -> str | None:
    """Where a function or module of this package is; None: it is of another, or was made at run time."""
    if isinstance(kernel, partial):
        name = _name(kernel.func)
        return name and f"{name}{kernel.args}{kernel.keywords or ''}"
    module = kernel.__name__ if isinstance(kernel, ModuleType) else getattr(kernel, "__module__", None) or ""
    name = module if isinstance(kernel, ModuleType) else f"{module}.{getattr(kernel, '__qualname__', '<unknown>')}"
    return name if module.startswith(f"{__package__}.") and "<" not in name else None


@cache
def surroundings() -> dict[str, Any]:
    """What the result of a check depends on: device, driver, versions, flags, the kernels' code, the user's tables of
    block sizes."""
    device = jax.local_devices()[0]
    tables = tuning.user_folder()
    driver = NVIDIA_DRIVER.read_text().strip() if NVIDIA_DRIVER.exists() else ""
    return {
        "device": device.device_kind,
        "platform": f"{device.platform} {device.client.platform_version}",
        "driver": driver,
        "versions": installed.versions(PACKAGES),
        "xla_flags": " ".join(sorted(os.environ.get("XLA_FLAGS", "").split())),
        "code": installed.digest({"kernels": Path(__file__).parent}, CODE),
        "tables": installed.digest({} if tables is None else {"tables": tables}, CODE),
    }


def has_passed(stamp: str) -> bool:
    """Whether this process knows the stamp, or the folder has it."""
    if stamp in _passed:
        return True
    folder = _folder()
    if folder is None:
        return False
    try:
        found = (folder.path / _file(stamp)).read_bytes() == stamp.encode()
    except OSError:
        return False
    if found:
        _passed.add(stamp)
    return found


def add(stamps: Iterable[str]) -> None:
    """Keeps the stamps in this process, and in the folder if it can be written to."""
    stamps = list(stamps)
    _passed.update(stamps)
    folder = _folder(create=bool(stamps))
    if folder is None or not folder.is_private:
        return
    for stamp in stamps:
        path = folder.path / _file(stamp)
        part = path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            part.write_text(stamp)
            part.replace(path)


def passed() -> list[str]:
    """All stamps that this process knows."""
    return sorted(_passed)


def _file(stamp: str) -> str:
    return f"{hashlib.sha256(stamp.encode()).hexdigest()[:32]}.json"


def _folder(create: bool = False) -> CacheFolder | None:
    """The folder of stamps; None: there is none, or it cannot be created."""
    base = jax.config.values["jax_compilation_cache_dir"]
    if not base or "://" in base:
        return None
    path = Path(base) / FOLDER
    exists = path.is_dir() or (create and Path(base).is_dir() and is_writable(Path(base)))
    return open_cache(path) if exists else None
