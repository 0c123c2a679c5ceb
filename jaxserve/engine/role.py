"""Connects an engine with servers of the other role: prefill and decode apart."""

from __future__ import annotations

import importlib.metadata
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.engine.page_exports import AddsRequests, PageExports
from jaxserve.engine.page_fetches import PageFetches
from jaxserve.engine.page_fingerprint import UNRELATED, weights_digest
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.step_shape import StepShape
from jaxserve.hosts.host_environment import read_secret
from jaxserve.hosts.identity import checkpoint_files
from jaxserve.roles import messages
from jaxserve.roles.page_listener import PageListener, listen
from jaxserve.roles.prefill_server import PrefillServer
from jaxserve.scheduling.block_manager import BlockManager

log = logging.getLogger(__name__)

# Settings that may differ between servers with different roles, beside those of UNRELATED: the contents of pages do not
# depend on them, or what depends on them is compared by itself.
_MAY_DIFFER = UNRELATED | {"tensor_parallel_size", "host_secret_file", "host_timeout", "seed"}


class Versioned(Protocol):
    version: int
    level: int


class HasRole(AddsRequests, Protocol):
    """What is needed of an engine."""

    config: EngineConfig
    runner: ModelRunner
    blocks: BlockManager
    max_model_len: int
    shapes: list[StepShape]

    @property
    def weights(self) -> Versioned: ...


class Role:
    """What an engine does for, or with, servers of the other role.

    Attributes:
      notify: called on any thread when the engine's loop, which may wait for messages, is to make a step.
    """

    def __init__(self, engine: HasRole, plan: ModelPlan, memory: list[np.ndarray], listener: socket.socket | None):
        """`memory`: see `PageCopies`. `listener`: of `begin_role`."""
        self._woken = threading.Event()
        self.notify: Callable[[], None] = lambda: None
        config = engine.config
        runner = engine.runner
        blocks = engine.blocks
        secret = read_secret(config)
        identity = page_identity(config, plan, runner)

        def unchanged() -> bool:
            return not (engine.weights.version or engine.weights.level)

        def load() -> int:
            return len(engine.scheduler.running) + len(engine.scheduler.waiting)

        self.pages: PageFetches | PageExports
        if listener is None:
            servers = [PrefillServer(one, secret, identity, self._wake) for one in config.prefill_servers]
            bounds = config.prefill_min_tokens, config.prefill_timeout
            page = runner.layout.page_bytes
            self.pages = PageFetches(servers, memory, page, *bounds, blocks, self._woken, unchanged)
            engine.scheduler.fetches = self.pages
        else:
            self.pages = PageExports(engine, blocks, runner, memory, self._woken, self._wake, unchanged)
            longest = messages.most_bytes(engine.max_model_len, blocks.page_size, blocks.num_groups)
            PageListener(listener, secret, identity, self.pages.begin, self._wake, load, longest)
            log.info("waiting for decode servers on %s", config.prefill_listen)

    def _wake(self) -> None:
        self._woken.set()
        self.notify()


def begin_role(config: EngineConfig) -> socket.socket | None:
    """Checks what can be checked before anything loads. Returns the socket of a prefill server, which refuses
    connections as yet. Raises ConfigError."""
    if config.role == "both":
        return None
    read_secret(config)
    return None if config.prefill_listen is None else listen(config.prefill_listen)


def page_identity(config: EngineConfig, plan: ModelPlan, runner: ModelRunner) -> dict[str, str]:
    """What the contents of pages depend on beside tokens, adapters and salts: texts by name."""
    from jaxserve import __version__  # which imports the engine

    settings: dict[str, Any] = asdict(config)
    layout = runner.layout
    contents = [f"{x.dtype}{list(x.shape[1:])}" for x in layout.contents(runner.mesh, 1)]
    found: dict[str, str] = {
        "version of jaxserve": __version__,
        "version of jax": importlib.metadata.version("jax"),
        "platform": runner.mesh.devices.flat[0].platform,
        "page": f"{layout.page_size} tokens, {' '.join(contents)}",
        "groups of layers": repr(layout.groups),
        "dtype of computation": str(plan.dtype),
    }
    if config.load_format == "dummy":
        found["checkpoint"] = f"random, seed {config.seed}"
    else:
        found |= checkpoint_files(str(plan.folder), None, "checkpoint", weights=True)
        found["checkpoint"] = weights_digest(plan.folder)
    return found | {name: repr(value) for name, value in settings.items() if name not in _MAY_DIFFER}
