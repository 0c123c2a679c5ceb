"""Data parallelism: which settings and models it is made for, and the scheduler of its groups."""

from __future__ import annotations

import logging
from typing import Any

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.combinations import check_combined, check_lookup
from jaxserve.models.spec import ModelConfig
from jaxserve.scheduling.groups import GroupBlocks, GroupScheduler
from jaxserve.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

NOT_COMBINED = {  # settings that must have these values beside several groups
    "role": "both",
    "enable_lora": False,
    "kv_offload_gib": 0,
    "deterministic": False,
    "bundle_key_file": None,
}


def check_settings(config: EngineConfig) -> None:
    """Raises ConfigError for settings that data parallelism is not made for yet."""
    check_combined(config, "data_parallel_size", 1, NOT_COMBINED)
    check_lookup(config, "data_parallel_size")


def check_model(config: EngineConfig, model: ModelConfig, *, pools: bool) -> None:
    """Raises ConfigError for models that data parallelism is not made for yet. pools: the model embeds or scores."""
    if config.data_parallel_size > 1 and (pools or model.recurrent is not None):
        kind = "embed or score" if pools else "have recurrent layers"
        raise ConfigError(f"data_parallel_size must be 1 for models that {kind}, got {config.data_parallel_size}")


def group_scheduler(
    groups: int, num_pages: int, page_size: int, pages: dict[str, Any], sizes: dict[str, Any]
) -> Scheduler:
    """The scheduler of several groups, each with `num_pages` pages. pages: options of `BlockManager`. sizes: options of
    `Scheduler` for each group."""
    log.info("%d groups of devices; each has %d sequences and %d pages", groups, sizes["max_num_seqs"], num_pages)
    return GroupScheduler(GroupBlocks(groups, num_pages, page_size, **pages), **sizes)
