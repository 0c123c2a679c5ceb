"""`system_fingerprint`: a name for the weights and settings that an answer comes from.

Two answers with the same fingerprint, seed and request come from the same computation.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from jaxserve.config import EngineConfig
from jaxserve.server.ipc.messages import Ready

_SETTINGS = (
    "load_format", "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size",
    "enable_expert_parallel",
    "quantization", "dequantize", "attention_backend", "matmul_backend", "activation_quantization", "seed",
    "deterministic",
)  # fmt: skip
_FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.gguf", "*.bin")
_SAMPLES, _SAMPLE_BYTES = 16, 2**16  # samples per file: they tell weights apart, far faster than reading whole files


def fingerprint(info: Ready, config: EngineConfig, version: str, chat_template: str | None) -> str:
    """ "fp_" and ten hexadecimal digits, hashed from samples of the model's files and settings that change its numbers.

    Slow: call it off the event loop. Raises OSError for files that cannot be read.
    """
    digest = hashlib.sha256()
    settings = [getattr(config, name) for name in _SETTINGS]
    for text in (version, info.dtype, info.max_model_len, chat_template, *settings):
        _add(digest, repr(text).encode())
    folder = Path(info.model_folder)
    files = [folder] if folder.is_file() else sorted({path for pattern in _FILES for path in folder.glob(pattern)})
    for path in files:
        size = path.stat().st_size
        _add(digest, path.name.encode())
        _add(digest, str(size).encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(size * i // _SAMPLES)
                _add(digest, file.read(_SAMPLE_BYTES))
    return f"fp_{digest.hexdigest()[:10]}"


def _add(digest: hashlib._Hash, data: bytes) -> None:
    """Adds data with its length before it, so that different sequences of parts never give the same bytes."""
    digest.update(len(data).to_bytes(8, "little") + data)
