"""Settings that cannot be combined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.config import ConfigError, EngineConfig

LOOKUP = ("ngram", "suffix")  # methods of speculation without a model of their own


def check_combined(config: EngineConfig, name: str, off: Any, others: Mapping[str, Any]) -> None:
    """Raises ConfigError if the setting `name` is not `off`, and one of the others has another value than is given."""
    own = getattr(config, name)
    for other, only in others.items():
        if own != off and (value := getattr(config, other)) != only:
            raise ConfigError(
                f"{name} {own:g} cannot be combined with {other} {value!r}: leave {other} at {only!r}, or {name} at "
                f"{off}"
            )


def check_lookup(config: EngineConfig, name: str) -> None:
    """Raises ConfigError if the setting `name` is above 1 and speculation needs a draft, which has other layers."""
    size = getattr(config, name)
    given = config.speculative_config
    if size > 1 and given is not None and given.method not in LOOKUP:
        raise ConfigError(
            f"{name} {size} cannot be combined with speculation by {given.method!r}: choose one of "
            f"{', '.join(LOOKUP)}, or leave {name} at 1"
        )
