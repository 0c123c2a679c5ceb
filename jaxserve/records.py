"""Records of answered requests: written by `jaxserve serve --record`, and run again by `jaxserve replay`.

A file holds a line of JSON for each prompt. A record has what the answer followed from: the engine's settings, the
request as the engine got it (token ids, parameters), and the answer's tokens and log-probabilities, as bits.
"""

from __future__ import annotations

import base64
import platform
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxserve.config import EngineConfig, SpeculativeConfig
from jaxserve.types import FinishReason, Request, TokenLogprob

VERSION = 1

# Settings that are left out of records: they name the operator's hosts and folders, or do not concern an answer.
PRIVATE = frozenset(
    {"coordinator", "num_hosts", "host_id", "command_host", "command_port", "host_secret_file",
     "host_timeout", "profile_dir", "role", "prefill_listen", "prefill_servers", "prefill_min_tokens",
     "prefill_timeout", "kv_offload_dir", "kv_offload_gib", "kv_offload_dir_gib", "cpu_offload_gib", "max_waiting",
     "max_waiting_tokens", "max_logprobs", "generation_config", "override_generation_config", "forbid_compile",
     "download_dir", "platform"}
)  # fmt: skip


class Output(msgspec.Struct, omit_defaults=True):
    """One completion.

    Attributes:
      logprobs: `pack_bits` of the tokens' log-probabilities; None: the request did not ask for them.
      ended: why the engine ended it; None: a stop string, or the client, ended it earlier.
    """

    tokens: list[int]
    logprobs: str | None = None
    ended: FinishReason | None = None


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One prompt and its completions.

    Attributes:
      fingerprint: the server's `system_fingerprint`.
      processor: the name of the host's processor.
      settings: the engine's settings that differ from their defaults, without those in PRIVATE.
      prompt_logprobs: `pack_bits` of the log-probabilities of the prompt's tokens from the second on; None: the
        request did not ask for them.
    """

    version: int = VERSION
    fingerprint: str = ""
    processor: str = ""
    settings: dict[str, Any]
    request: Request
    outputs: list[Output]
    prompt_logprobs: str | None = None


def pack_bits(logprobs: Sequence[TokenLogprob | None]) -> str:
    """The log-probabilities as little-endian float32 in base64. None, that of a prompt's first token, is left out."""
    values = np.array([one.logprob for one in logprobs if one is not None], "<f4")
    return base64.b64encode(values.tobytes()).decode()


def unpack_bits(text: str) -> np.ndarray:
    """The float32 numbers of `pack_bits`."""
    return np.frombuffer(base64.b64decode(text, validate=True), "<f4")


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """`Record.settings` of an engine's settings, as JSON can hold them."""
    own = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in PRIVATE}
    default = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    changed = {name: value for name, value in own.items() if name not in default or value != default[name]}
    result: dict[str, Any] = msgspec.to_builtins(changed, enc_hook=_plain)
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, SpeculativeConfig | Path):
        return str(value) if isinstance(value, Path) else vars(value)
    raise NotImplementedError(f"{type(value).__name__} in settings")


def processor_name() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
