"""A name for everything beside the tokens that the contents of KV pages depend on."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path

from jaxserve.checkpoints.files import open_regular
from jaxserve.checkpoints.gguf import encoders_beside
from jaxserve.config import EngineConfig
from jaxserve.execution.runner import ModelRunner

# Settings that change which pages there are, and when, but not their contents. Every other setting counts.
UNRELATED = {
    "model", "tokenizer", "revision", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "max_penalty_seqs",
    "max_waiting", "max_waiting_tokens", "scheduling_policy", "kv_pages", "memory_utilization", "enable_lora",
    "max_loras", "max_lora_rank", "max_cpu_loras", "lora_modules", "async_scheduling", "decode_steps",
    "latency_goal_ms", "forbid_compile", "prefix_caching", "state_snapshots", "state_snapshot_interval", "profile_dir",
    "kv_offload_gib", "kv_offload_dir", "kv_offload_dir_gib", "role", "prefill_listen", "prefill_servers",
    "prefill_min_tokens", "prefill_timeout", "generation_config", "override_generation_config", "max_logprobs",
    "download_dir", "platform", "prompts_first",
}  # fmt: skip
_FILES = ("*.json", "*.safetensors", "*.gguf", "*.bin")
# samples per file, which is far faster than reading whole files
_SAMPLES = 16
_SAMPLE_BYTES = 2**16


def page_fingerprint(config: EngineConfig, folder: Path, runner: ModelRunner) -> str:
    """32 hexadecimal digits, hashed from settings, the shapes of pages, and the model's files: names, sizes, times of
    the last change, and samples of their contents. Files that are copied anew count as changed.

    Raises OSError for files that cannot be read.
    """
    from jaxserve import __version__  # which imports the engine

    digest = hashlib.blake2b(digest_size=16)
    settings = {name: value for name, value in asdict(config).items() if name not in UNRELATED}
    contents = [(x.shape, str(x.dtype)) for x in runner.layout.contents(runner.mesh, 1)]
    platform = runner.mesh.devices.flat[0].device_kind
    for text in (__version__, settings, contents, runner.layout.groups, runner.layout.kind, platform):
        _add(digest, repr(text).encode())
    _add_files(digest, folder, times=True)
    return digest.hexdigest()


def weights_digest(folder: Path) -> str:
    """32 hexadecimal digits, hashed from the model's files in a folder: names, sizes, and samples of their contents.

    Raises OSError for files that cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    _add_files(digest, folder, times=False)
    return digest.hexdigest()


def _add_files(digest: hashlib.blake2b, folder: Path, *, times: bool) -> None:
    """Adds the model's files to a digest, with the times of their last change if `times` is set."""
    if folder.is_file():
        files = [folder, *encoders_beside(folder)]
    else:
        files = sorted({path for pattern in _FILES for path in folder.glob(pattern)})
    for path in files:
        stat = path.stat()
        changed = f" {stat.st_mtime_ns}" if times else ""
        _add(digest, f"{path.name} {stat.st_size}{changed}".encode())
        with open_regular(path) as file:
            for i in range(_SAMPLES):
                file.seek(stat.st_size * i // _SAMPLES)
                _add(digest, file.read(_SAMPLE_BYTES))


def _add(digest: hashlib.blake2b, data: bytes) -> None:
    """Adds data with its length before it, so that different sequences of parts never give the same bytes."""
    digest.update(len(data).to_bytes(8, "little") + data)
