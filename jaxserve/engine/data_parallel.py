"""Data parallelism: which settings and models it is made for."""

from __future__ import annotations

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.combinations import check_combined, check_lookup
from jaxserve.models.spec import ModelConfig

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
