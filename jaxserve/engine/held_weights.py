"""The weights on this process's devices: kept in host memory while the engine sleeps, and replaced by others.

`live_weights.Weights` decides what happens to them. On several hosts each has a `HeldWeights`, and the first host sends
the calls of its own to the others as commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format

from jaxserve import heap
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.files import contents_of
from jaxserve.checkpoints.given import given_tensors
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.layouts import place_of
from jaxserve.engine import streaming
from jaxserve.engine.draft_loading import load_draft, load_head
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.engine.prepared import Prepared
from jaxserve.execution import runner_commands
from jaxserve.execution.layer_uploads import HOST
from jaxserve.execution.runner import ModelRunner
from jaxserve.hosts.identity import checkpoint_files
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.load import check_kernels, make_params, read_model
from jaxserve.models.spec import ModelConfig

# A folder or file, or arrays by the names of a checkpoint's tensors; None: the files from which the engine started.
Source = str | Mapping[str, Any] | None


@dataclass(frozen=True)
class HostCopy:
    """The parts of an array that this process's devices have, in host memory."""

    shape: tuple[int, ...]
    place: Any  # on the devices, as of `place_of`
    parts: dict[Any, np.ndarray]  # by their place in the array; what several devices have is here once

    @classmethod
    def of(cls, x: jax.Array) -> HostCopy:
        of_devices = {_key(shard.index): shard for shard in x.addressable_shards}
        return cls(x.shape, place_of(x), {key: _copied(shard.data) for key, shard in of_devices.items()})

    def back(self) -> jax.Array:
        """The array on the devices again."""
        ordered = isinstance(self.place, Format)
        sharding = self.place.sharding if ordered else self.place
        x = jax.make_array_from_callback(self.shape, sharding, lambda index: self.parts[_key(index)])
        if not ordered:
            return x
        made = jax.block_until_ready(jax.device_put(x, self.place))
        x.delete()
        return made


class HeldWeights(runner_commands.Commanded, calls=runner_commands.OF_WEIGHTS):
    """The weights of a model and of its draft on this process's devices.

    Args:
      config: on several hosts with the number of all devices.
      runners: of the model; of a pipeline, those of the stages that are here.
      draft: the runner of the draft model, if there is one.
    """

    def __init__(
        self, config: EngineConfig, plan: ModelPlan, runners: Sequence[ModelRunner], draft: ModelRunner | None = None
    ):
        self._config = config
        self._plan = plan
        self._of_model = list(runners)
        self._draft = draft
        self._runners = [*runners] if draft is None else [*runners, draft]
        self._forms = [_forms(one.weights) for one in self._runners]
        self._kept: list[list[HostCopy | jax.Array]] = []  # for each runner, while the engine sleeps
        self._new: list[list[jax.Array]] = []  # for each runner, between `read` and `take`

    @property
    def files(self) -> Checkpoint:
        """The files from which the engine started."""
        return self._open(self._plan.folder)

    def _open(self, path: Path) -> Checkpoint:
        return Checkpoint.open(path, self._config.quantization, self._config.ignore_config_keys)

    # Sleep

    def keep(self, level: int) -> None:
        """Copies to host memory what must not be lost when the devices' memory is freed: at level 1 all weights, at
        level 2 only adapters, which are not read again. Weights that are in host memory anyway stay there at level 1,
        and are freed at level 2."""
        arrays = [one.weights if level == 1 else one.pool_arrays for one in self._runners]
        self._kept = [[x if _is_on_host(x) else HostCopy.of(x) for x in some] for some in arrays]
        if level == 2:
            for x in filter(_is_on_host, [x for one in self._runners for x in one.weights]):
                x.delete()

    def bring_back(self) -> None:
        """Brings all weights back that `keep` has kept."""
        for runner, kept in zip(self._runners, self._kept, strict=True):
            runner.weights = _back(kept)
        self._kept = []

    # New weights

    def check_model(self, path: Path) -> None:
        """Raises ConfigError or CheckpointError unless a folder or file has the model that is served."""
        plan = self._plan
        with contents_of(path):
            given = read_model(path, self._config.ignore_config_keys).limited_to(plan.longest)
        given = replace(given, dtype=plan.model.dtype)  # weights are read in the server's own, as at a start
        if plan.pooler is not None:
            given = replace(given, tie_embeddings=True, head_bias=False)  # as in ModelPlan
        if set(given.eos_token_ids) <= set(plan.model.eos_token_ids):  # no generation_config.json tells of others
            given = replace(given, eos_token_ids=plan.model.eos_token_ids)
        if differing := _differing(given, plan.model):
            raise ConfigError(f"{path} is another model than the one that is served: it differs in {differing}")

    def check(self, folder: str | None) -> dict[str, str]:
        """What must be the same on all hosts before any of them reads new weights: the digests of the files. Raises
        ConfigError, CheckpointError or OSError for files that cannot be used here, as far as that is known before
        weights are read."""
        path = self._plan.folder if folder is None else Path(folder)
        self.check_model(path)
        return checkpoint_files(str(path), None, "checkpoint", weights=self._config.load_format != "dummy")

    def read(self, source: Source) -> None:
        """Reads weights beside the present ones, as they were read at the start, for `take` or `drop`. Weights that
        arrays do not give, those of drafts, are read from the files of the start. Until then there is no cache, unless
        the engine sleeps.

        Raises CheckpointError or ConfigError for weights that cannot take the place of the present ones.
        """
        if not self._kept:
            for runner in self._runners:  # the cache fills the memory that the present weights leave
                runner.free_cache()
        path = self._plan.folder if source is None else Path(source) if isinstance(source, str) else None
        with contents_of(path or "given arrays"):
            made = self._read(path, source)
        heap.trim()
        for arrays, forms in zip(made, self._forms, strict=True):
            if _forms(arrays) != forms[: len(arrays)]:
                raise CheckpointError(f"{path or 'given arrays'} has weights in other forms than those that are served")
        self._new = made

    def take(self) -> None:
        """Replaces the weights by those that were read. Adapters stay."""
        for i, (runner, read, forms) in enumerate(zip(self._runners, self._new, self._forms, strict=True)):
            if self._kept:
                pool = _back(self._kept[i][len(self._kept[i]) - (len(forms) - len(read)) :])
            else:
                pool = runner.pool_arrays
            runner.weights = read + pool
        self._new = []
        self._kept = []
        self._create_caches()

    def drop(self) -> None:
        """Forgets weights that were read."""
        self._new = []
        self._create_caches()

    def _create_caches(self) -> None:
        for runner in self._runners:
            runner.create_cache()

    def _read(self, path: Path | None, source: Source) -> list[list[jax.Array]]:
        """The weights of each runner, without its pool of adapters. path: None if `source` is arrays."""
        config = self._config
        plan = self._plan
        if path == plan.folder and (prepared := Prepared.of(config)) is not None:
            return [prepared.arrays(plan.mesh)]
        if path is not None:
            plan = replace(plan, folder=path)
            files = None if config.load_format == "dummy" else self._open(path)
        else:
            assert isinstance(source, Mapping)
            start = self.files
            files = replace(
                start, tensors=given_tensors(source, start.family.every_name, start.family.joined(start.hf))
            )
        stored = None if path in (None, self._plan.folder) else self._stored_dtype(path)
        made = [self._read_for(runner, plan, files, stored) for runner in self._of_model]
        if self._draft is not None:
            draft = load_draft(config, plan, list(self._draft.mesh.devices.flat))
            assert draft is not None
            made.append(draft.runner.weights)
        return made

    def _stored_dtype(self, path: Path | None) -> np.dtype | None:
        """For `make_params`: that of the served model, if a copy of it is in another dtype."""
        assert path is not None
        own = self._plan.model.dtype
        return None if read_model(path, self._config.ignore_config_keys).dtype == own else jnp.dtype(own)

    def _read_for(
        self, runner: ModelRunner, plan: ModelPlan, files: Checkpoint | None, stored: np.dtype | None
    ) -> list[jax.Array]:
        config = self._config
        if runner.streamed is not None:
            return streaming.read_anew(config, plan, runner, files)
        params = make_params(
            runner.model, plan.folder, runner.mesh, config, progress=False, source=files, stored=stored
        )
        _, params = check_kernels(runner.model, params, runner.mesh, config.matmul_backend)
        if runner.drafter is not None:
            head = load_head(config, plan)
            assert head is not None
            params["draft"] = head[1]
        return runner.bundled(params)


def _copied(x: jax.Array) -> np.ndarray:
    """The numbers of an array on one device. JAX copies those of an accelerator to the host, and holds this copy until
    the array is deleted, so that another copy would need the memory twice. Of a CPU's array it gives a view."""
    found = np.asarray(x)
    return found if found.flags.owndata else found.copy()


def _key(index: Any) -> tuple[tuple[int | None, int | None], ...]:
    """The place of a part in an array, a slice for each axis, as a key."""
    return tuple((along.start, along.stop) for along in index)


def _is_on_host(x: jax.Array) -> bool:
    return x.sharding.memory_kind == HOST


def _back(kept: list[HostCopy | jax.Array]) -> list[jax.Array]:
    return [x.back() if isinstance(x, HostCopy) else x for x in kept]


def _forms(arrays: list[jax.Array]) -> list[Any]:
    return [(x.shape, x.dtype, place_of(x)) for x in arrays]


def _differing(one: ModelConfig, other: ModelConfig) -> str:
    """The names of the fields in which two models differ."""
    names = (field.name for field in fields(ModelConfig))
    return ", ".join(name for name in names if getattr(one, name) != getattr(other, name))
