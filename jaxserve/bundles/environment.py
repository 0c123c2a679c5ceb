"""What compiled programs and prepared weights depend on: the model's files, by their SHA-256, and the environment; and
how two such environments differ."""

from __future__ import annotations

import hashlib
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.bundles.container import hashed
from jaxserve.checkpoints.hub import BUNDLE
from jaxserve.config import EngineConfig
from jaxserve.pallas_kernels import cpu_build, installed

# Settings that programs and weights do not depend on: what requests wait for, where things are, and sizes that the
# manifest has by their results (`pages`).
FREE = {
    "model", "revision", "tokenizer", "max_waiting", "max_waiting_tokens", "scheduling_policy", "latency_goal_ms",
    "memory_utilization", "kv_pages", "coordinator", "num_hosts", "host_id", "command_host", "command_port",
    "host_secret_file", "host_timeout", "async_scheduling", "forbid_compile", "profile_dir", "seed", "kv_offload_dir",
    "kv_offload_dir_gib", "score_prompt", "bundle_key_file", "role", "prefill_listen", "prefill_servers",
    "prefill_min_tokens", "prefill_timeout", "generation_config", "override_generation_config", "max_logprobs",
    "download_dir", "platform", "prompts_first", "kernel_timing",
}  # fmt: skip
# Settings that the prepared weights depend on, and with them everything else.
OF_WEIGHTS = (
    "dtype", "load_format", "quantization", "dequantize", "activation_quantization", "matmul_backend", "task",
    "tensor_parallel_size", "data_parallel_size", "decode_context_parallel_size", "enable_expert_parallel",
    "ignore_config_keys", "speculative_config", "enable_lora",
)  # fmt: skip
# Entries of an environment that weights depend on: a device's kernels choose the order of numbers.
PLACES = ("platform", "device", "panels")
PLUGINS = {"gpu": ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"), "tpu": ("libtpu",)}
CODE = (
    "config.py",
    "limits.py",
    "setting.py",
    "types.py",
    "devices",
    "execution",
    "models",
    "scheduling",
    "pallas_kernels",
)


def describe(device: Any, panels: bool) -> dict[str, Any]:
    """What this process compiles with, for a device that may be one of a target."""
    cpu = device.platform == "cpu"
    kind = "gpu" if device.platform in ("gpu", "cuda") else device.platform
    return {
        "platform": kind,
        "device": device.device_kind,
        "panels": panels,
        "versions": installed.versions(("jax", "jaxlib", *PLUGINS.get(kind, ()))),
        "code": code_digest(),
        "xla_flags": " ".join(sorted(os.environ.get("XLA_FLAGS", "").split())) if cpu else "",
        "machine": _machine() if cpu else "",
        "libraries": {name: cpu_build.key(name) for name in cpu_build.NAMES} if cpu else {},
    }


@cache
def code_digest() -> str:
    """The SHA-256 of the code that determines programs and their arguments."""
    root = Path(__file__).parent.parent
    kernels = Path(cpu_build.__file__).parent
    tops = {name: kernels if name == "pallas_kernels" else root / name for name in CODE}
    return installed.digest(tops, (".py", ".cc", ".h", ".json"))


def _machine() -> str:
    """The processor's name and a digest of its features, which XLA compiles for."""
    lines = cpu_build.processor()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    features = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return f"{name or platform.machine()} (features {features})"


def differences(made: dict[str, Any], here: dict[str, Any], names: tuple[str, ...] = ()) -> list[str]:
    """What differs between the environment of a bundle and this one, for people to read; of these entries, or of all
    but the libraries, which are compared one by one."""
    found = []
    for name in names or [one for one in here if one != "libraries"]:
        before = made.get(name)
        now = here.get(name)
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            found += [
                f"{key} is {now.get(key, 'missing')}, not {before.get(key, 'missing')}"
                for key in sorted(before.keys() | now.keys())
                if before.get(key) != now.get(key)
            ]
        elif name == "code":
            found.append("jaxserve's code differs")
        else:
            found.append(f"{name} is {now!r}, not {before!r}")
    return found


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """The settings as JSON has them, without the model's name and those of one process."""
    own = {
        "model", "revision", "coordinator", "num_hosts", "host_id", "command_host", "command_port", "host_secret_file",
    }  # fmt: skip
    names = (name for name in EngineConfig.__dataclass_fields__ if name not in own)
    return msgspec.json.decode(msgspec.json.encode({name: getattr(config, name) for name in names}))


def changed_settings(made: dict[str, Any], config: EngineConfig, names: tuple[str, ...] = ()) -> list[str]:
    """The settings that differ from those of a bundle: of these names, or of all that are not FREE."""
    here = settings_of(config)
    return [
        f"{name} is {here[name]!r}, not {made[name]!r}"
        for name in here
        if name in made and here[name] != made[name] and (name in names if names else name not in FREE)
    ]


FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.gguf", "*.tiktoken", "*.txt")
TOKENIZER = ("tokenizer*", "tekken.json", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json")


def model_files(model: Path) -> dict[str, str]:
    """Name -> SHA-256 of the files of a model that answers depend on: weights, config, tokenizer, templates. `model` is
    a folder or a GGUF file. Of an Orbax checkpoint these are all of its files. Raises BundleError for one that cannot
    be read."""
    if model.is_file():
        part = model.name.rpartition("-00001-of-")
        found = sorted(model.parent.glob(f"{part[0]}-*-of-{part[2]}")) if part[1] else [model]
    elif (model / BUNDLE).is_file():
        found = [model / BUNDLE]
    else:
        found = sorted({p for pattern in (*FILES, "orbax/**/*") for p in model.glob(pattern) if p.is_file()})
    root = model.parent if model.is_file() else model
    with ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as pool:
        digests = pool.map(lambda path: hashed(path)[1], found)
        return {str(path.relative_to(root)): digest for path, digest in zip(found, digests, strict=True)}
