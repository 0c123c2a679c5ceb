"""What must be the same on all hosts of a replica, as texts by name: versions, settings, tables of block sizes, and
checkpoints. Hosts that differ in one of these would compile different programs, and wait for each other without end.

Of a checkpoint this covers the bytes of config.json, and of each file with weights its name, its size, its first MiB
(where safetensors and GGUF keep the table of tensors) and SAMPLES blocks spread evenly over it, to its end. Two
checkpoints of the same shapes that differ in only a few tensors may look the same.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from jaxserve.checkpoints.hub import resolve_model
from jaxserve.config import EngineConfig
from jaxserve.pallas_kernels import installed, tuning

# Programs depend on them. Those that no kernel of a host's devices needs may be missing, on all hosts.
PACKAGES = (
    "jax", "jaxlib", "jax-triton", "triton", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin",
    "jax-cuda13-pjrt", "libtpu",
)  # fmt: skip
HEAD_BYTES = 2**20
SAMPLES = 16
SAMPLE_BYTES = 2**16
CONFIGS = ("config.json", "params.json")
WEIGHTS = (".safetensors", ".gguf")
# Settings that only the first host uses, or that name places on one host.
OWN = {
    "model", "mmproj", "revision", "tokenizer", "coordinator", "host_id", "command_host", "command_port",
    "host_secret_file", "profile_dir", "max_waiting", "max_waiting_tokens", "scheduling_policy", "lora_modules",
    "max_cpu_loras", "host_timeout", "generation_config", "override_generation_config", "max_logprobs", "download_dir",
    "prompts_first",
}  # fmt: skip


def identity_of(config: EngineConfig) -> dict[str, str]:
    """For a host with these settings. Reads the checkpoint's files, or downloads them. Raises CheckpointError."""
    from jaxserve import __version__  # here, because the package imports `LLM`, which imports this module

    found = {"version of jaxserve": __version__, "version of Python": ".".join(platform.python_version_tuple()[:2])}
    found |= {f"version of {name}": version for name, version in installed.versions(PACKAGES).items()}
    tables = sorted(folder.glob("*.json")) if (folder := tuning.user_folder()) is not None else []
    found |= {f"table of block sizes {path.name} (from jaxserve tune)": _digest(path) for path in tables}
    settings = asdict(config)
    draft = config.speculative_config
    if draft is not None:
        settings["speculative_config"].pop("model")
    found |= {name: repr(value) for name, value in settings.items() if name not in OWN}
    where = {"download_dir": config.download_dir}
    weights = config.load_format != "dummy"
    found |= checkpoint_files(config.model, config.revision, "checkpoint", weights=weights, **where)
    if draft is not None and draft.model is not None:
        found |= checkpoint_files(draft.model, None, "draft's checkpoint", weights=True, **where)
    return found


def difference(first: Mapping[str, str], other: Mapping[str, str], who: str = "the first host") -> str | None:
    """The first difference in words, `who` has the `first` one; None if there is none."""
    for name in dict.fromkeys([*first, *other]):
        mine, theirs = (given.get(name, "none") for given in (first, other))
        if mine != theirs:
            return f"its {name} is {theirs}, and that of {who} is {mine}"
    return None


def checkpoint_files(
    model: str, revision: str | None, what: str, *, weights: bool, download_dir: str | None = None
) -> dict[str, str]:
    """The files of a checkpoint, called `what`: for each its size and a digest, see above. Raises CheckpointError."""
    folder = resolve_model(model, weights=weights, revision=revision, download_dir=download_dir)
    paths = [folder] if folder.is_file() else [path for path in sorted(folder.iterdir()) if path.is_file()]
    wanted = [path for path in paths if path.name in CONFIGS or (weights and path.suffix in WEIGHTS)]
    return {f"{what} ({_name(path)})": _digest(path) for path in wanted}


def _name(path: Path) -> str:
    """A GGUF file may have any name, as it is given by its path."""
    return "GGUF" if path.suffix == ".gguf" else path.name


def _digest(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(size if path.name in CONFIGS else HEAD_BYTES))
        for number in range(SAMPLES):
            file.seek(max(size - SAMPLE_BYTES, 0) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return f"{size} bytes with digest {digest.hexdigest()[:16]}"
