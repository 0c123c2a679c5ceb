"""Measured rates of devices in a file, which take the place of data sheets."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.pallas_kernels import cpu_build
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.roofline import Constants

# The settings on which rates depend, beside quantization and the dtype.
RATE_SETTINGS = (
    "quantization", "dtype", "kv_cache_dtype", "page_size", "dequantize", "attention_backend", "matmul_backend",
    "activation_quantization", "deterministic",
)  # fmt: skip

Known = Mapping[str, Mapping[str, Constants]]  # kind of device -> form of weights -> constants


def default_path() -> Path:
    """The file with measured rates in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve" / "plan-constants.json"


def read(path: Path, required: bool) -> dict[str, dict[str, Constants]]:
    """Kind of device -> form of weights -> constants. Raises ConfigError for an invalid file, or a missing one."""
    if not path.exists() and not required:
        return {}
    try:
        given = json.loads(path.read_text())
        return {kind: {form: Constants(**one) for form, one in forms.items()} for kind, forms in given.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no constants of devices: {error}") from None


def keep(path: Path, deployment: Deployment, constants: Constants) -> None:
    """Writes these constants to the file, beside those of other devices and forms. Raises ConfigError."""
    known = read(path, required=False)
    known.setdefault(kind_of(deployment), {})[form_of(deployment)] = constants
    plain = {kind: {form: asdict(one) for form, one in forms.items()} for kind, forms in known.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(json.dumps(plain, indent=1) + "\n")
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot keep measured rates in {path}: {error}") from None


def find(known: Known, deployment: Deployment) -> Constants | None:
    """The constants for a deployment's device and form of weights. Several devices of one CPU share what was measured
    with one device, so that there are none for them."""
    if deployment.device.platform == "cpu" and deployment.devices > 1:
        return None
    return known.get(kind_of(deployment), {}).get(form_of(deployment))


def kind_of(deployment: Deployment) -> str:
    """The kind of the device. A CPU's says which processor it is and how many cores this process may use."""
    device = deployment.device
    if device.platform != "cpu":
        return str(device.device_kind)
    lines = cpu_build.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
    return f"cpu: {' '.join([*names, digest])}, {cores} core{'s' if cores > 1 else ''}"


def form_of(deployment: Deployment) -> str:
    """The form of weights, and other settings on which rates depend where they are not at their defaults."""
    config = deployment.config
    fields = EngineConfig.__dataclass_fields__
    dtype = deployment.plan.model.dtype if config.dtype == "auto" else config.dtype
    others = [
        f"{name}={getattr(config, name)}"
        for name in RATE_SETTINGS
        if name not in ("quantization", "dtype") and getattr(config, name) != fields[name].default
    ]
    return " ".join([config.quantization, dtype, *others])
