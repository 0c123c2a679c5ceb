"""How many pages the KV cache gets."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.kv_cache import CacheLayout
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder

log = logging.getLogger(__name__)

CPU_CACHE_BYTES = 2**30  # default on CPU, where the memory is shared with everything else
RESERVE_BYTES = 2**30  # per accelerator: context, temporaries of a step, collectives


def plan(config: EngineConfig, model: ModelConfig, decoder: Decoder, params: Any, mesh: Mesh) -> tuple[int, int]:
    """(max_model_len, pages of the KV cache). Raises ConfigError when they do not fit each other or the devices."""
    limit = model.max_position
    if model.rope.scaling in ("linear", "yarn", "dynamic"):
        limit = max(limit, int(model.rope.original_max_position * model.rope.factor))
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len {config.max_model_len} is beyond the model's own limit of {limit} tokens")
    max_model_len = config.max_model_len or limit
    page = CacheLayout.of(model, decoder.kv_heads, 1, config.page_size, decoder.dtype)
    page_bytes = page.page_bytes // mesh.size
    longest = -(-max_model_len // config.page_size)  # pages of one request of full length
    pages = config.kv_pages
    if pages is None:
        useful = longest * config.max_num_seqs + 1
        pages = min(useful, _budget(config, params, mesh) // page_bytes)
    if pages - 1 < longest:
        fits = max(pages - 1, 0) * config.page_size
        if config.max_model_len is not None or fits < min(max_model_len, 2 * config.page_size):
            shorter = f"lower --max-model-len to {fits} or less, or " if fits else ""
            larger = "give more memory" if config.kv_pages is None else "raise --kv-pages, of which one is kept free"
            raise ConfigError(
                f"a request of max_model_len {max_model_len} tokens needs {longest} KV pages of {config.page_size}, "
                f"but only {max(pages - 1, 0)} fit; {shorter}{larger}"
            )
        log.warning(
            "max_model_len lowered from the model's %d to %d tokens, which fit the KV cache", max_model_len, fits
        )
        max_model_len = fits
    log.info(
        "KV cache: %d pages of %d tokens (%s), %d tokens; longest request %d tokens",
        pages, config.page_size, _size(pages * page_bytes * mesh.size), (pages - 1) * config.page_size, max_model_len,
    )  # fmt: skip
    return max_model_len, pages


def _budget(config: EngineConfig, params: Any, mesh: Mesh) -> int:
    """Bytes per device for the cache."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return min(CPU_CACHE_BYTES, int(_available_host_bytes() * config.memory_utilization)) // mesh.size
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(f"{device.device_kind} does not tell its memory size: set --kv-pages")
    weights = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
    return int(stats["bytes_limit"] * config.memory_utilization) - weights - RESERVE_BYTES


def _available_host_bytes() -> int:
    meminfo = Path("/proc/meminfo")  # of Linux alone
    for line in meminfo.read_text().splitlines() if meminfo.exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 * CPU_CACHE_BYTES


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
