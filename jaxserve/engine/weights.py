"""The weights of an engine that has loaded them: put aside while it sleeps, and replaced by others of the same model.

Programs stay compiled through all of this: they take weights as arguments, and new ones have the shapes, dtypes and
places of the old ones. There must be no requests meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxserve import heap
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.given import given_tensors
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.layouts import place_of
from jaxserve.engine.draft_loading import load_draft, load_head
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.engine.page_fingerprint import weights_digest
from jaxserve.engine.prepared import Prepared
from jaxserve.execution.runner import ModelRunner
from jaxserve.hosts.first_host import FirstHost
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.load import make_params, read_model, trust_matmul
from jaxserve.models.spec import ModelConfig
from jaxserve.speculation.speculator import Proposer
from jaxserve.types import InvalidRequestError, QueueFullError

log = logging.getLogger(__name__)

Source = Path | Mapping[str, Any]  # a folder or file, or arrays by the names of a checkpoint's tensors
Kept = list[tuple[np.ndarray, Any]]  # arrays in host memory, and their places on the devices


class OfWeights(Protocol):
    """The parts of an engine that change with its weights."""

    config: EngineConfig
    runner: ModelRunner
    hosts: FirstHost | None
    speculator: Proposer | None

    @property
    def has_work(self) -> bool: ...
    def reset_prefix_cache(self) -> None: ...


class Weights:
    """The weights of an engine's model and of its draft.

    Attributes:
      version: how often the weights were replaced.
      level: how deeply the engine sleeps; 0: it is awake. 1: weights are in host memory. 2: they are dropped.
    """

    def __init__(self, engine: OfWeights, plan: ModelPlan, draft: ModelRunner | None):
        self._engine, self._plan = engine, plan
        self._folder: Path | None = plan.folder  # None: the weights were given as arrays
        self._runners = [engine.runner] if draft is None else [engine.runner, draft]
        self._forms = [_forms(one.weights) for one in self._runners]
        self._kept: list[Kept] = []
        self.version = self.level = 0

    def check_awake(self) -> None:
        """Raises QueueFullError while the engine sleeps."""
        if self.level:
            raise QueueFullError("the engine sleeps: its weights are not on the devices until it is woken up")

    def sleep(self, level: int = 1) -> None:
        """Frees the devices' memory of weights, cache and slots, until `wake_up`. Level 1 keeps the weights in host
        memory, level 2 reads them from their files again. Cached pages are forgotten, in lower tiers too. An engine
        that sleeps already sleeps on as it does.

        Raises InvalidRequestError for another level, while there are requests, with several hosts, pipeline stages or
        weights in host memory.
        """
        self.check_sleep(level)
        self._require_rest("sleep")
        if self.level:
            return
        self._engine.reset_prefix_cache()
        for runner in self._runners:
            own = runner.weights if level == 1 else runner.pool_arrays  # adapters are not read from their files again
            self._kept.append([(np.array(x), place_of(x)) for x in own])
            runner.release()
        self.level = level
        heap.trim()

    def check_sleep(self, level: int) -> None:
        """Raises InvalidRequestError where `sleep` is not possible, requests aside."""
        if level not in (1, 2):
            raise InvalidRequestError(f"level must be 1 or 2, got {level!r}", "level")
        self._require_one_host("sleep")
        if level == 2 and self._folder is None:
            text = "level must be 1 after an update from arrays: level 2 reads the weights from their files again"
            raise InvalidRequestError(text, "level")

    def wake_up(self) -> None:
        """Ends `sleep`. Raises CheckpointError or ConfigError for files that cannot be read any more; then the engine
        sleeps on."""
        if self.level:
            self._wake(self._folder if self.level == 2 else None)

    def update(self, source: Source) -> str:
        """Replaces the weights and wakes an engine that sleeps. Cached pages are forgotten. The devices hold the old
        and the new weights meanwhile, unless the engine sleeps.

        source: a folder or file with the same model; or a mapping from the names of a checkpoint's tensors to arrays in
        floats, each of which is asked for when it is brought to the devices. Returns a digest of the files; "" for
        arrays.

        Raises InvalidRequestError while there are requests and with several hosts, and CheckpointError or ConfigError
        for weights that cannot be used. Then nothing has changed.
        """
        start = time.perf_counter()
        self._require_rest("update")
        self.check_update(source)
        digest = weights_digest(source) if isinstance(source, Path) else ""
        if self.level:
            self._wake(source)
        else:
            for runner, read in zip(self._runners, self._read(source), strict=True):
                runner.weights = read + runner.pool_arrays
            self._engine.reset_prefix_cache()
        self._folder = source if isinstance(source, Path) else None
        self.version += 1
        log.info("replaced the weights by those of %s in %.1f s", _name(source), time.perf_counter() - start)
        return digest

    def check_update(self, source: Source) -> None:
        """Raises ConfigError, CheckpointError or InvalidRequestError where `update` is not possible, as far as that is
        known without requests and before weights are read."""
        config = self._engine.config
        self._require_one_host("update")
        if config.kv_offload_dir is not None:
            raise ConfigError("kv_offload_dir must be None to replace weights: its files belong to those of the start")
        if config.load_format == "dummy":
            raise ConfigError("load_format must be auto to replace weights; dummy weights are random")
        if not isinstance(source, Path):
            if self._files.reader is not None:
                raise ConfigError("arrays replace only weights that were read as floats; give a folder instead")
            return
        given = read_model(source, config.ignore_config_keys).limited_to(self._plan.longest)
        if self._plan.pooler is not None:
            given = replace(given, tie_embeddings=True, head_bias=False)  # as in ModelPlan
        if set(given.eos_token_ids) <= set(self._plan.model.eos_token_ids):  # no generation_config.json tells of others
            given = replace(given, eos_token_ids=self._plan.model.eos_token_ids)
        if differing := _differing(given, self._plan.model):
            raise ConfigError(f"{source} is another model than the one that is served: it differs in {differing}")

    @property
    def _files(self) -> Checkpoint:
        """The files from which the engine started."""
        config = self._engine.config
        return Checkpoint.open(self._plan.folder, config.quantization, config.ignore_config_keys)

    def _wake(self, source: Source | None) -> None:
        """Brings weights back, from `source` or from host memory, and allocates cache and slots."""
        made = [[] for _ in self._runners] if source is None else self._read(source)
        for runner, read, kept, forms in zip(self._runners, made, self._kept, self._forms, strict=True):
            missing = len(forms) - len(read)
            runner.weights = read + [jax.device_put(*one) for one in kept[len(kept) - missing :]]
            runner.allocate()
        if self._engine.speculator is not None:
            self._engine.speculator.restore()
        self._kept, self.level = [], 0

    def _require_rest(self, call: str) -> None:
        if self._engine.has_work:
            raise InvalidRequestError(f"{call} needs an engine without requests; some are unfinished")

    def _require_one_host(self, call: str) -> None:
        if self._engine.hosts is not None:
            raise InvalidRequestError(f"{call} is not possible for a replica of several hosts")
        if self._engine.runner.num_stages > 1:
            raise InvalidRequestError(f"{call} is not possible with pipeline_parallel_size above 1")
        if self._engine.config.cpu_offload_gib:
            raise InvalidRequestError(f"{call} is not possible with weights in host memory (cpu_offload_gib)")

    def _read(self, source: Source) -> list[list[jax.Array]]:
        """The weights of each runner, without its pool of adapters, as they were read at the start. Weights that arrays
        do not give, those of drafts, are read from the files of the start."""
        config, plan, files = self._engine.config, self._plan, None
        if source == self._plan.folder and (prepared := Prepared.of(config)) is not None:
            return [prepared.arrays(plan.mesh)]
        if isinstance(source, Path):
            plan = replace(plan, folder=source)
        else:
            start = self._files
            files = replace(start, tensors=given_tensors(source, start.family.every_name))
        params = make_params(plan.decoder, plan.folder, plan.mesh, config, progress=False, source=files)
        _, params = trust_matmul(plan.decoder, params, plan.mesh, config.matmul_backend)
        if (head := load_head(config, plan)) is not None:
            params["draft"] = head[1]
        made = [self._runners[0].bundled(params)]
        if len(self._runners) > 1:
            draft = load_draft(config, plan, list(plan.mesh.devices.flat))
            assert draft is not None
            made.append(draft.runner.weights)
        heap.trim()
        for arrays, forms in zip(made, self._forms, strict=True):
            if _forms(arrays) != forms[: len(arrays)]:
                raise CheckpointError(f"{_name(source)} has weights in other forms than those that are served")
        return made


def _name(source: Source) -> str:
    return str(source) if isinstance(source, Path) else "given arrays"


def _forms(arrays: list[jax.Array]) -> list[Any]:
    return [(x.shape, x.dtype, place_of(x)) for x in arrays]


def _differing(one: ModelConfig, other: ModelConfig) -> str:
    """The names of the fields in which two models differ."""
    names = (field.name for field in fields(ModelConfig))
    return ", ".join(name for name in names if getattr(one, name) != getattr(other, name))
