"""The record of a deployment: everything that its answers depend on, so that it can be repeated, compared, rolled back.

A record is a JSON object:

    jaxserve_lock   1, the version of this form
    model           its name, its commit on the hub, the format of its files, and the SHA-256 of each
    tokenizer       its name if it is not the model's, and one SHA-256 of its files
    chat_template   SHA-256 of a template given by --chat-template; null: the model's own, which `model` has
    flags           the flags that are not defaults, without keys
    settings        all settings of the engine, also those that are defaults, which another version may change
    versions        of the packages that compute
    bundle          the bundle's digest; null: it is no bundle
    kernels         the kernels that were measured to be the fastest on kinds of devices, which decide the bits of
                    answers: `tables`, and what starts on this machine have measured and `kept`; null: they count not
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.bundles.container import DIGEST, hashed, is_bundle
from jaxserve.bundles.environment import TOKENIZER, model_files
from jaxserve.checkpoints.hub import commit_of, resolve_model, resolve_tokenizer
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.pallas_kernels import installed, tuning

log = logging.getLogger(__name__)

FORM = "jaxserve_lock"
VERSIONS = ("jaxserve", "jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers", "llguidance",
            "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-triton", "libtpu")  # fmt: skip
OF_PROCESS = ("model", "host_id", "coordinator", "command_host", "command_port", "host_secret_file", "profile_dir",
              "download_dir", "platform")  # fmt: skip
_SHOWN = 12  # differences in a message


def is_record(values: Mapping[str, Any]) -> bool:
    """Whether a file's contents are a record. Raises ConfigError for one of another form."""
    if FORM not in values:
        return False
    if values[FORM] != 1:
        raise ConfigError(f"the record has the form {values[FORM]!r}, but this version reads 1")
    if not isinstance(values.get("model"), dict) or not isinstance(values.get("flags"), dict):
        raise ConfigError("the record has no model or no flags: it was not written by jaxserve")
    return True


def versions() -> dict[str, str]:
    """Package -> version, for those that are installed."""
    return {"python": platform.python_version()} | installed.versions(VERSIONS)


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """All settings of the engine as JSON has them, without those of one process."""
    values = {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__ if name not in OF_PROCESS}
    return msgspec.json.decode(msgspec.json.encode(values))


def bundle_digest(model: str) -> str | None:
    if not is_bundle(model):
        return None
    return (Path(model).expanduser() / DIGEST).read_text().split()[0]


def describe(config: EngineConfig, flags: Mapping[str, Any], template: str | None) -> dict[str, Any]:
    """The record without digests of the model's files, which takes no time. `template`: the source of a chat template
    that replaces the model's own."""
    return {
        FORM: 1,
        "model": {"name": config.model, "revision": config.revision},
        "tokenizer": {"name": config.tokenizer},
        "chat_template": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
        "flags": dict(flags),
        "settings": settings_of(config),
        "versions": versions(),
        "bundle": bundle_digest(config.model),
        "kernels": {"tables": tuning.describe(), "kept": tuning.describe_kept() if config.times_kernels else None},
    }


def with_kernels(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a running server, with what its own start has measured."""
    kernels = record["kernels"]
    return {**record, "kernels": kernels if kernels["kept"] is None else kernels | {"kept": tuning.describe_kept()}}


def full(config: EngineConfig, flags: Mapping[str, Any], template: str | None) -> dict[str, Any]:
    """The record. Reads all files of the model, which is downloaded if needed. Of a bundle, the digest stands for all
    files, which the engine checks when it loads them."""
    record = describe(config, flags, template)
    where = config.download_dir
    weights = config.load_format != "dummy"
    folder = resolve_model(config.model, weights=weights, revision=config.revision, download_dir=where)
    tokenizer = resolve_tokenizer(config.tokenizer, folder, where)
    files = {} if record["bundle"] else model_files(folder)
    record["model"] |= {"revision": commit_of(folder) or config.revision, "format": _format(config, folder)}
    record["model"]["files"] = files
    record["tokenizer"]["sha256"] = _tokenizer_digest(tokenizer)
    return record


def _format(config: EngineConfig, folder: Path) -> str:
    if is_bundle(config.model):
        return "bundle"
    return "gguf" if folder.is_file() else "orbax" if (folder / "orbax").is_dir() else "safetensors"


def _tokenizer_digest(folder: Path) -> str:
    """One SHA-256 of the tokenizer's files; of a GGUF file, which holds the tokenizer too, of the whole."""
    paths = (
        [folder] if folder.is_file() else sorted({p for name in TOKENIZER for p in folder.glob(name) if p.is_file()})
    )
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {hashed(path)[1]}\n".encode())
    return digest.hexdigest()


def verify(lock: Mapping[str, Any], found: Mapping[str, Any], source: Path) -> None:
    """Raises ConfigError if the model, the tokenizer, the template, the bundle or the versions are not those of the
    record. Flags are the operator's: those of the command line may differ. So may what starts have measured, of which a
    warning tells."""
    parts = "model", "tokenizer", "chat_template", "versions", "bundle"
    before, now = ({p: one.get(p) for p in parts} for one in (lock, found))
    if "kernels" in lock:  # records of earlier versions have none
        before["kernels"], now["kernels"] = ({"tables": one["kernels"]["tables"]} for one in (lock, found))
        if lock["kernels"]["kept"] and lock["kernels"]["kept"] != found["kernels"]["kept"]:
            log.warning("%s: the kernels that were measured to be the fastest were others, so bits may differ", source)
    wrong = list(differences(before, now))
    if wrong:
        shown = [f"{name}: {old} in the record, {new} here" for name, old, new in wrong[:_SHOWN]]
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ConfigError(f"{source} does not describe what is here: {'; '.join(shown)}{more}")


def differences(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """(path, value in one, value in the other) of everything that differs; "-" for what is missing."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in sorted(one.keys() | other.keys()):
            inner = f"{path}.{name}" if path else name
            yield from differences(one.get(name, _MISSING), other.get(name, _MISSING), inner)
    elif one != other:
        yield path, _text(one), _text(other)


_MISSING = object()


def _text(value: Any) -> str:
    return "-" if value is _MISSING else json.dumps(value)


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a record at once or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
