"""Builds the parts of an engine from its settings: decoder, parameters, runner, buckets and the cache's size."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve import heap
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.compile_cache import enable_compile_cache
from jaxserve.devices.mesh import make_mesh, num_devices, on_one_cpu
from jaxserve.engine.sizing import Sizing
from jaxserve.execution import memory
from jaxserve.execution.cost import StepCost, prefill_chunk
from jaxserve.execution.kv_cache import CacheLayout, cache_dtype
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.step_buffer import step_shapes
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.decoder import Decoder
from jaxserve.models.load import compute_dtype, find_files, make_decoder, make_params, read_model, trust_matmul
from jaxserve.models.pooling import Pooler
from jaxserve.models.pooling_files import read_pooler
from jaxserve.models.spec import ModelConfig
from jaxserve.pallas_kernels import cpu_build
from jaxserve.pallas_kernels.types import default_page_size
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import InvalidRequestError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelPlan:
    """Everything that the settings, the model's config and the devices determine before weights are read.

    Attributes:
      folder, tokenizer: the folders with the model's files and with the tokenizer's files.
      dtype: the dtype of the computation.
      longest: most tokens of a request, prompt and output.
      one_page: the cache's layout with a single page; `Sizing` chooses the number of pages.
      pooler: for a model that embeds or scores, whose decoder has no output head; else None.
    """

    folder: Path
    tokenizer: Path
    model: ModelConfig
    mesh: Mesh
    dtype: np.dtype
    longest: int
    decoder: Decoder
    one_page: CacheLayout
    pooler: Pooler | None = None

    @classmethod
    def of(cls, config: EngineConfig, devices: list[jax.Device] | None = None) -> ModelPlan:
        """The plan for an engine's settings. Raises ConfigError or CheckpointError for a model that cannot be served
        with them."""
        folder, tokenizer = find_files(config)
        model, mesh = read_model(folder, config.ignore_config_keys), make_mesh(config.tensor_parallel_size, devices)
        pooler = read_pooler(config, folder, model, lambda text: _token_of(tokenizer, folder, text))
        if pooler is not None:
            model = replace(model, tie_embeddings=True, head_bias=False)  # files may have no head, and none is needed
        if config.speculative_config is not None and (pooler is not None or model.recurrent is not None):
            kind = "embed or score" if pooler is not None else "have recurrent layers"
            raise ConfigError(f"speculative_config must be None for models that {kind}")
        longest = memory.max_model_len(config, model)
        model = model.limited_to(longest)
        platform = mesh.devices.flat[0].platform
        dtype = compute_dtype(config, model, platform)
        kv_dtype = cache_dtype(config.kv_cache_dtype, dtype)
        page_size = config.page_size or default_page_size(platform)
        backends = {"attention": config.attention_backend, "matmul": config.matmul_backend}
        decoder = make_decoder(model, mesh, dtype, page_size=page_size, kv_dtype=kv_dtype, **backends)
        states = config.max_num_seqs, config.num_snapshots
        one_page = CacheLayout.of(model, decoder.kv_heads, 1, page_size, kv_dtype, platform, longest, *states)
        return cls(folder, tokenizer, model, mesh, np.dtype(dtype), longest, decoder, one_page, pooler)


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine that depend on model and devices.

    Attributes:
      folders: the folders of the model and of the tokenizer.
      shapes: the buckets that steps are padded to.
      cost: estimates the time of a step; None on CPU.
    """

    model: ModelConfig
    runner: ModelRunner
    folders: tuple[Path, Path]
    shapes: list[StepShape]
    cost: StepCost | None
    sizing: Sizing
    pooler: Pooler | None = None


def load_parts(
    config: EngineConfig, devices: list[jax.Device] | None, *, progress: bool, static_steps: bool | None
) -> EngineParts:
    """Reads the model, places it on the mesh and chooses the number of KV pages. See `Engine.load`."""
    start = time.perf_counter()
    enable_compile_cache()
    plan = ModelPlan.of(config, devices)
    mesh, model = plan.mesh, plan.model
    params = make_params(plan.decoder, plan.folder, mesh, config, progress=progress)
    decoder, params = trust_matmul(plan.decoder, params, mesh, config.matmul_backend)
    heap.trim()
    log.info("loaded %s in %.1f s", config.model, time.perf_counter() - start)
    log.info("%s", memory.describe_weights(params))
    rows = config.max_num_seqs, memory.penalty_rows(config, model)
    pooling = None if plan.pooler is None else plan.pooler.method
    options: Any = {"max_tokens_per_call": config.decode_steps, "static": static_steps, "pooling": pooling}
    runner = ModelRunner(decoder, params, mesh, *rows, proposals=config.num_proposals, **options)
    device = mesh.devices.flat[0]
    cost = StepCost.of(params, model, device, num_devices(mesh), plan.dtype)
    shapes = _shapes(config, plan, cost)
    runner.set_cache_size(plan.one_page, -(-plan.longest // plan.one_page.page_size))
    held = runner.weight_bytes, runner.slot_bytes, plan.one_page.state_bytes(mesh)
    budget = memory.budget(config, device, num_devices(mesh), *held)
    sizing = Sizing(config, runner, plan.one_page, budget, shapes, plan.longest)
    sizing.begin()
    return EngineParts(model, runner, (plan.folder, plan.tokenizer), shapes, cost, sizing, plan.pooler)


def _shapes(config: EngineConfig, plan: ModelPlan, cost: StepCost | None) -> list[StepShape]:
    """The buckets of steps. No bucket is larger than the largest possible step."""
    tokens = memory.max_batched_tokens(config)
    if cost is not None:
        tokens = min(tokens, config.max_num_seqs * plan.longest)
    free = on_one_cpu(plan.mesh) and plan.dtype == np.float32 and cpu_build.possible()
    sizes = config.max_num_seqs, tokens, plan.one_page.page_size
    options: Any = {"cost": cost, "chunk": prefill_chunk(config, cost), "padding_is_free": free}
    shapes = step_shapes(*sizes, num_groups=plan.one_page.groups.num_groups, **options)
    return shapes if plan.pooler is None else [shape for shape in shapes if not shape.decode_only]


def _token_of(tokenizer: Path, folder: Path, text: str) -> int:
    """The id of a text that is one token. Raises ConfigError for a text of several tokens."""
    try:
        ids = load_tokenizer(folder, source=tokenizer).encode(text, add_special_tokens=False)
    except (InvalidRequestError, OSError, ValueError) as error:
        raise ConfigError(f"score_tokens need the model's tokenizer: {error}") from None
    if len(ids) != 1:
        raise ConfigError(f"score_tokens: {text!r} is {len(ids)} tokens in this model's tokenizer, not one")
    return ids[0]
