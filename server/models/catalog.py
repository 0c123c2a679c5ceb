"""The models of a server: what a file of models says, and what is in a folder of models."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.checkpoints.hub import BUNDLE
from jaxserve.config import ADAPTER_NAME, ConfigError

log = logging.getLogger("jaxserve.server")

_FIELDS = ("name", "source", "aliases", "pinned", "keep_alive", "memory", "devices", "settings")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, kw_only=True)
class Model:
    """One of a server's models.

    Attributes:
      name: what requests call it; metrics and logs have this name.
      source: folder, GGUF file, bundle, hub id or "demo".
      aliases: its other names.
      pinned: it starts with the server, and is not stopped for others or by `keep_alive`.
      keep_alive: seconds without a request after which it is stopped; infinite: never; None: as the server has it.
      memory: bytes of each of its devices that it is given; None: what it needs.
      devices: numbers of the GPUs that it runs on; empty: the first ones.
      settings: flags of `jaxserve serve` by name.
    """

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    keep_alive: float | None = None
    memory: int | None = None
    devices: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def models_of(values: Mapping[str, Any], file: Path) -> list[Model]:
    """The models of a file, which has been read: a list named `models`, whose entries have the fields of `Model`.
    Relative paths are those of the file's folder. Raises ConfigError."""
    if set(values) != {"models"} or not isinstance(values["models"], list) or not values["models"]:
        found = ", ".join(map(str, values)) or "nothing"
        raise ConfigError(f"{file} must have a list named `models` that is not empty, and nothing else; got {found}")
    models = [_model(entry, f"{file}: model {number}", file) for number, entry in enumerate(values["models"], start=1)]
    check_names(models, file)
    return models


def models_in(folder: Path) -> list[Model]:
    """The models in a folder, by name: each subfolder with config.json, params.json or a bundle, and each GGUF file but
    image encoders (mmproj). Entries that lead out of the folder are left out. Raises ConfigError if there are none."""
    if not folder.is_dir():
        raise ConfigError(f"--model-dir must be a folder, got {folder}")
    root = folder.resolve()
    models = []
    for path in sorted(folder.iterdir()):
        is_model = any((path / name).is_file() for name in ("config.json", "params.json", BUNDLE))
        is_gguf = path.suffix == ".gguf" and path.is_file() and "mmproj" not in path.name
        name = path.stem if is_gguf else path.name
        if not (is_model or is_gguf):
            continue
        if not path.resolve().is_relative_to(root):
            log.error("%s is left out: it leads to %s, out of the folder of models", path, path.resolve())
        elif not _is_name(name):
            log.error("%s is left out: %s", path, _NAMES)
        else:
            models.append(Model(name=name, source=str(path)))
    if not models:
        raise ConfigError(f"{folder} has no models: subfolders with config.json, bundles, or .gguf files")
    check_names(models, folder)
    return models


def check_names(models: Iterable[Model], where: Path) -> None:
    """Raises ConfigError if two models have a name in common."""
    owners: dict[str, Model] = {}
    for model in models:
        for name in model.names:
            if (other := owners.setdefault(name, model)) is not model:
                raise ConfigError(f"{where}: two models are called {name!r}: {other.source} and {model.source}")


def seconds_of(value: Any, name: str = "keep_alive") -> float:
    """A time as a number of seconds or as text such as "90s", "10m" or "1h"; negative ones are infinite. Raises
    ConfigError."""
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)(ms|s|m|h)?", value) if isinstance(value, str) else None
    if found:
        value = float(found[1]) * _UNITS[found[2] or "s"]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ConfigError(f"{name} must be seconds, or a text such as '90s', '10m' or '1h', got {value!r}")
    return math.inf if value < 0 else float(value)


def _model(entry: Any, where: str, file: Path) -> Model:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must have {', '.join(_FIELDS)}, got {entry!r}")
    if unknown := [key for key in entry if key not in _FIELDS]:
        raise ConfigError(f"{where} must have only {', '.join(_FIELDS)}, got {unknown[0]!r}")
    name: Any = entry.get("name")
    if not _is_name(name):
        raise ConfigError(f"{where}: {_NAMES}, got {name!r}")
    where = f"{file}: {name}"
    source = entry.get("source")
    if not isinstance(source, str) or not source:
        raise ConfigError(f"{where}: source must be a folder, a file or a hub id, got {source!r}")
    if (beside := file.parent / source).exists():
        source = str(beside)
    aliases = entry.get("aliases", [])
    if not isinstance(aliases, list) or not all(map(_is_name, aliases)):
        raise ConfigError(f"{where}: aliases must be a list of names; {_NAMES}, got {aliases!r}")
    if not isinstance(pinned := entry.get("pinned", False), bool):
        raise ConfigError(f"{where}: pinned must be true or false, got {pinned!r}")
    devices = entry.get("devices", [])
    if not isinstance(devices, list) or not all(type(one) is int and 0 <= one < 1024 for one in devices):
        raise ConfigError(f"{where}: devices must be a list of numbers of GPUs, such as [0, 1], got {devices!r}")
    settings = entry.get("settings", {})
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ConfigError(f"{where}: settings must be flags of jaxserve serve by name, got {settings!r}")
    return Model(
        name=name,
        source=source,
        aliases=tuple(aliases),
        pinned=pinned,
        keep_alive=seconds_of(entry["keep_alive"], f"{where}: keep_alive") if "keep_alive" in entry else None,
        memory=_bytes(entry["memory"], where) if "memory" in entry else None,
        devices=tuple(map(str, devices)),
        settings=settings,
    )


_NAMES = "a name must consist of letters, digits and . _ : / @ + -, at most 256, without the parts . and .."


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(ADAPTER_NAME.fullmatch(name)) and not {".", "..", ""} & set(name.split("/"))


def _bytes(value: Any, where: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MiB|GiB|MB|GB)", value) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(f"{where}: memory must be a text such as '800 MiB' or '3.5 GiB', got {value!r}")
    return int(float(found[1]) * _BYTES[found[2]])
