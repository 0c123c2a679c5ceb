"""`system_fingerprint`: a name for the weights and settings that an answer comes from.

Two answers with the same fingerprint, seed and request come from the same computation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.checkpoints.files import open_regular
from jaxserve.checkpoints.gguf import encoders_beside
from jaxserve.config import EngineConfig
from jaxserve.deployment.record import bundle_digest, settings_of, versions
from jaxserve.server.ipc.messages import Ready

# Settings that say where something is. Adapters have names of their own, and `max_waiting` is the server's.
_PLACES = {"tokenizer", "mmproj", "revision", "bundle_key_file", "kv_offload_dir", "lora_modules", "max_waiting"}
_FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.gguf", "*.bin")
# samples per file: they tell weights apart, far faster than reading whole files
_SAMPLES = 16
_SAMPLE_BYTES = 2**16


def fingerprint(
    info: Ready,
    config: EngineConfig,
    version: str,
    chat_template: str | None,
    template_defaults: Mapping[str, Any] | None = None,
) -> str:
    """ "fp_" and ten hexadecimal digits, hashed from what a deployment's record has (`deployment.record`):
    all settings of the engine, the versions of the packages that compute, the chat template and the defaults of its
    variables, a bundle's digest, and, in the place of digests of the model's files, samples of them. Restarts keep it,
    and so do other ports and folders.

    Slow: call it off the event loop. Raises OSError for files that cannot be read.
    """
    digest = hashlib.sha256()
    settings = {name: value for name, value in settings_of(config).items() if name not in _PLACES}
    known = settings, versions(), bundle_digest(config.model)
    template = chat_template, template_defaults or {}
    for text in (version, info.dtype, info.max_model_len, template, *known):
        _add(digest, repr(text).encode())
    folder = Path(info.model_folder)
    if folder.is_file():
        files = [folder, *encoders_beside(folder)]
    else:
        files = sorted({path for pattern in _FILES for path in folder.glob(pattern)})
    for path in files:
        size = path.stat().st_size
        _add(digest, path.name.encode())
        _add(digest, str(size).encode())
        with open_regular(path) as file:
            for i in range(_SAMPLES):
                file.seek(size * i // _SAMPLES)
                _add(digest, file.read(_SAMPLE_BYTES))
    return f"fp_{digest.hexdigest()[:10]}"


def _add(digest: hashlib._Hash, data: bytes) -> None:
    """Adds data with its length before it, so that different sequences of parts never give the same bytes."""
    digest.update(len(data).to_bytes(8, "little") + data)
