"""The adapters of one engine: their names, and uploads of their weights to places on the devices.

A place is overwritten only while no sequence holds it. The devices run calls in the order in which they are dispatched:
earlier steps, which may use the place's last adapter, then the uploads, then the first step of a sequence that uses the
new one. Uploads are cut into small calls. While sequences run, only some of them are made before each step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxserve.adapters.adapter import Adapter, load_adapter
from jaxserve.adapters.reading import FileReader
from jaxserve.adapters.registry import AdapterError, Registry, ServedAdapter
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.execution.runner import ModelRunner
from jaxserve.scheduling.adapter_pool import AdapterPool, Place
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.waiting import Waiting
from jaxserve.types import InvalidRequestError, Request

log = logging.getLogger(__name__)

BUSY_SECONDS = 0.002  # for uploads before each step while sequences run
IDLE_SECONDS = 0.02  # for uploads while none runs, before the engine looks for new requests
PATIENCE = 0.005  # seconds that an engine with nothing else to do waits for an adapter's files


class Adapters:
    """The adapters that an engine serves."""

    def __init__(self, registry: Registry, pool: AdapterPool, runner: ModelRunner):
        self.registry = registry
        self.pool = pool
        self._runner = runner
        self._upload: tuple[Place, Iterator[Callable[[], Any]]] | None = None  # what is left to do for a place

    @classmethod
    def of(cls, config: EngineConfig, runner: ModelRunner) -> Adapters | None:
        """With the adapters that the settings name; None if they turn adapters off. Raises ConfigError."""
        if not config.enable_lora:
            return None
        if runner.pooling is not None:
            raise ConfigError("adapters are served for models that generate, not for embeddings or scores")

        assert runner.stacks is not None
        targets = runner.stacks.adapters
        dtype = runner.stacks.sizes.dtype

        reader = FileReader(targets.changeable(config.max_lora_rank))

        def load(path: Path, name: str) -> Adapter:
            return load_adapter(path, name, targets, config.max_lora_rank, dtype, reader.read_adapter)

        adapters = cls(Registry(load, config.host_adapters), AdapterPool(config.max_loras), runner)
        for module in config.lora_modules:
            try:
                adapter = adapters.registry.read(module.name, module.path).result()
                adapters.registry.add(adapter, module.path, module.base_model_name)
            except (ValueError, OSError) as error:
                if module.required:
                    raise ConfigError(f"the adapter {module.name!r} cannot be loaded: {error}") from error
                log.error("the adapter %r is left out: %s", module.name, error)
        return adapters

    @property
    def uploading(self) -> bool:
        return self._upload is not None

    def place(self, waiting: Waiting, *, busy: bool, at_once: bool) -> dict[str, str]:
        """Uploads adapters that sequences wait for, and releases the sequences whose adapter is complete.

        Takes BUSY_SECONDS while sequences run (`busy`), else IDLE_SECONDS, and one call more; with `at_once` no upload
        is left for later. Returns the requests whose adapter cannot be read any more, with the reason.
        """
        failed: dict[str, str] = {}
        waiting.release(self.pool.reopened())
        end = time.perf_counter() + (BUSY_SECONDS if busy else IDLE_SECONDS)
        while True:
            if self._upload is None:
                patience = None if at_once else 0.0 if busy else PATIENCE
                self._upload = self._begin(patience, failed)
            if self._upload is None:
                return failed
            place, calls = self._upload
            if (call := next(calls, None)) is None:
                self._upload = None
                waiting.release(self.pool.open(place))
                continue
            call()
            if not at_once and time.perf_counter() > end:
                return failed

    def _begin(
        self, patience: float | None, failed: dict[str, str]
    ) -> tuple[Place, Iterator[Callable[[], Any]]] | None:
        """Begins to upload the next adapter, if there is one with its weights in memory, and a place for it."""
        if not (wanted := self.pool.needed()):
            return None
        try:
            weights = self.registry.weights(wanted, patience=patience)
        except AdapterError as error:
            log.error("%s", error)
            failed |= {seq.request_id: str(error) for seq in self.pool.parked_for(wanted[0])}
            return None
        if weights is None or (place := self.pool.grant(wanted[0])) is None:
            return None
        return place, self._runner.adapter_uploads(place.number, weights)

    def restore(self) -> None:
        """Uploads all adapters again after a step that failed, because the devices may have lost them. Raises
        AdapterError if the files of one cannot be read any more."""
        if self._upload is not None:
            self.pool.lose(self._upload[0])
            self._upload = None
        for place in self.pool.places:
            weights = self.registry.weights([place.adapter], patience=None)
            assert weights is not None
            for call in self._runner.adapter_uploads(place.number, weights):
                call()

    def stats(self, scheduler: Scheduler) -> dict[str, Any]:
        """The fields of EngineStats that concern adapters."""
        return {
            "adapters_running": sorted({seq.adapter.name for seq in scheduler.running if seq.adapter is not None}),
            "adapters_waiting": sorted({seq.adapter.name for seq in scheduler.waiting if seq.adapter is not None}),
            "adapter_loads": self.pool.loads,
            "adapter_evictions": self.pool.evictions,
        }


def find_adapter(adapters: Adapters | None, request: Request) -> ServedAdapter | None:
    """The adapter that a request asks for, if it does. Raises InvalidRequestError if there is none."""
    if not request.adapter:
        return None
    found = None if adapters is None else adapters.registry.find(request.adapter)
    if found is None or found.digest != request.adapter_digest:
        what = "is not loaded" if found is None else "has been replaced; try again"
        raise InvalidRequestError(f"the adapter {request.adapter!r} {what}", "model", "model_not_found")
    return found
