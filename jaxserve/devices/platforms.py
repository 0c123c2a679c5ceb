"""Which platform JAX runs on: the one that the operator asked for, and the CPU only where it is meant.

JAX falls back to the CPU with a warning if a plugin for an accelerator does not start, or if none is installed. A model
would then be served a hundred times as slowly as expected.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxserve.config import ConfigError, EngineConfig

NVIDIA_FILES = ("nvidiactl", "nvidia[0-9]*")  # in /dev
TPU_FILES = ("accel[0-9]*", "vfio/[0-9]*")
_GOOGLE = "0x1ae0"  # PCI vendor; other devices have files in /dev/vfio, too
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
_ORDERS = {"cpu": "cpu", "cuda": "cuda,cpu", "tpu": "tpu,cpu"}  # JAX's list of platforms; the first is the default
_NAMES = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}  # as `jax.default_backend` has it


def choose_platform(config: EngineConfig) -> None:
    """Has JAX start the platform that the settings name. Call it before JAX has looked for devices."""
    if config.platform != "auto":
        jax.config.update("jax_platforms", _ORDERS[config.platform])


def check_platform(config: EngineConfig) -> None:
    """Starts JAX's devices, unless they have started. Raises ConfigError if they are not those of the platform that the
    settings name, and if JAX took the CPU of a machine with an accelerator although nobody asked for the CPU."""
    choose_platform(config)
    wanted = config.platform
    with _heard() as messages:
        try:
            found = jax.default_backend()
        except (RuntimeError, AssertionError) as error:  # JAX asserts that one of the wanted platforms is there
            told = str(error) or f"there is none of {jax.config.values['jax_platforms']}"
            raise ConfigError(_refusal(wanted, [told, *messages])) from error
    if wanted != "auto":
        if found != _NAMES[wanted]:
            raise ConfigError(_refusal(wanted, [f"JAX runs on {found} in this process", *messages]))
        return
    if found != "cpu" or asks_for_cpu():
        return
    if accelerators := [*device_files(), *plugins()]:
        why = _recorded() + messages or ["JAX says nothing; JAX_LOGGING_LEVEL=DEBUG shows how it starts its devices"]
        raise ConfigError(
            f"JAX found no usable accelerator and would run on the CPU, although this machine has "
            f"{', '.join(accelerators)}: {'; '.join(why)}. Remove the cause (jaxserve[cuda12], jaxserve[cuda13] and "
            "jaxserve[tpu] install plugins), or say with --platform cpu or JAX_PLATFORMS=cpu that the CPU is meant"
        )


def asks_for_cpu() -> bool:
    """Whether the environment (or this process) told JAX to use the CPU."""
    values = jax.config.values
    return (values["jax_platforms"] or values["jax_platform_name"] or "").split(",")[0] == "cpu"


def device_files(dev: Path = Path("/dev"), pci: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """Files by which NVIDIA's driver and libtpu reach their devices, the first of each kind."""
    kinds: list[Sequence[str]] = [NVIDIA_FILES, TPU_FILES]
    if not any(_line(file) == _GOOGLE for file in pci.glob("*/vendor")):
        kinds[1] = tuple(name for name in TPU_FILES if not name.startswith("vfio"))
    found = [[path for pattern in patterns for path in sorted(dev.glob(pattern))] for patterns in kinds]
    return [str(paths[0]) for paths in found if paths]


def plugins() -> list[str]:
    """The installed plugins for accelerators."""
    points = importlib.metadata.entry_points(group="jax_plugins")
    found = {f"the JAX plugin {point.name}" for point in points}
    for name in _PLUGINS:
        try:
            found.add(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return sorted(found)


def _refusal(wanted: str, why: Sequence[str]) -> str:
    asked = f"platform {wanted} (--platform {wanted}) was asked for" if wanted != "auto" else "JAX does not start"
    return f"{asked}: {'; '.join(why)}"


def _line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _recorded() -> list[str]:
    """Why accelerators did not start, as JAX noted it."""
    found = []
    for platform in ("cuda", "tpu"):
        try:
            jax.devices(platform)
        except RuntimeError as error:
            if "failed to initialize" in str(error):  # otherwise it only lists the platforms that are there
                found.append(str(error))
    return found


@contextmanager
def _heard() -> Iterator[list[str]]:
    """Collects the warnings and errors of JAX's start, with the exceptions of plugins, which JAX only logs."""
    texts: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            texts.append(record.getMessage() + (f": {error}" if error else ""))

    logger = logging.getLogger("jax._src.xla_bridge")
    listener = Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield texts
    finally:
        logger.removeHandler(listener)
