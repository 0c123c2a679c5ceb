"""Seeds of requests that bring none."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.types import Request


class Seeds:
    """Seeds for requests without one. They are drawn in the order of arrival. The answers of a deterministic engine
    must not depend on this order. It makes them of its own seed and the request, so equal requests get equal answers.
    """

    def __init__(self, config: EngineConfig):
        self._config = config
        self._drawn = np.random.default_rng(config.seed)

    def of(self, request: Request) -> int:
        """The request's seed, from 0 on."""
        if request.params.seed is not None:
            return request.params.seed
        if not self._config.deterministic:
            return int(self._drawn.integers(2**63))
        content = self._config.seed, list(request.prompt_token_ids), request.params, request.adapter_digest
        return int.from_bytes(hashlib.sha256(msgspec.msgpack.encode(content)).digest()[:8], "little") >> 1
