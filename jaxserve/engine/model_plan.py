"""What the settings, the model's config and the devices determine before weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import ConfigError, EngineConfig, default_page_size
from jaxserve.devices.mesh import make_mesh, tell_devices
from jaxserve.engine.data_parallel import check_model
from jaxserve.engine.determinism import ordered
from jaxserve.engine.eyes import Eyes, with_eyes
from jaxserve.execution import memory
from jaxserve.execution.kv_cache import CacheLayout, cache_dtype, fitting_page_size
from jaxserve.models.adapter_targets import PoolSizes, with_adapters
from jaxserve.models.decoder import Decoder
from jaxserve.models.load import compute_dtype, find_files, make_decoder, read_model
from jaxserve.models.pooling import Pooler
from jaxserve.models.pooling_files import read_pooler
from jaxserve.models.spec import ModelConfig
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import InvalidRequestError

PASSING_MORE = "whose layers share keys and values or have inputs of their own"  # `ModelConfig.passes_more`


@dataclass(frozen=True)
class ModelPlan:
    """Everything that the settings, the model's config and the devices determine before weights are read.

    Attributes:
      folder, tokenizer: the folders with the model's files and with the tokenizer's files.
      dtype: the dtype of the computation.
      longest: most tokens of a request, prompt and output.
      one_page: the cache's layout with a single page; `Sizing` chooses the number of pages.
      pooler: for a model that embeds or scores, whose decoder has no output head; else None.
      eyes: of a model that sees; else None.
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
    eyes: Eyes | None = None

    @classmethod
    def of(cls, config: EngineConfig, devices: list[jax.Device] | None = None, *, checks: bool = False) -> ModelPlan:
        """The plan for an engine's settings. With `checks`, kernels of accelerators begin to compute a few examples
        (`pallas_kernels.checked_ops`), for which `models.load.check_kernels` waits.

        Raises ConfigError or CheckpointError for a model that cannot be served with these settings."""
        folder, tokenizer = find_files(config)
        model, eyes = with_eyes(
            config, folder, read_model(folder, config.ignore_config_keys, sees=not config.language_model_only)
        )
        if config.enable_expert_parallel and not model.num_experts:
            raise ConfigError("enable_expert_parallel must be False for a model without experts")
        shares = config.decode_context_parallel_size
        mesh = mesh_of(config, devices)
        pooler = read_pooler(config, folder, model, lambda text: _token_of(tokenizer, folder, text))
        check_model(config, model, pools=pooler is not None)
        if pooler is not None:
            model = replace(model, tie_embeddings=True, head_bias=False)  # files may have no head, and none is needed
        if config.enable_lora and folder.suffix == ".gguf" and model.family == "falcon_h1":
            raise ConfigError("enable_lora must be False for GGUF files of Falcon-H1, whose weights are multiplied")
        if config.speculative_config is not None and pooler is not None:
            raise ConfigError("speculative_config must be None for models that embed or score")
        if config.kv_offload_gib and (pooler is not None or model.recurrent is not None):
            kind = "embed or score" if pooler is not None else "have recurrent layers, whose states are not in pages"
            raise ConfigError(f"kv_offload_gib must be 0 for models that {kind}")
        longest = memory.max_model_len(config, model)
        model = model.limited_to(longest)
        platform = mesh.devices.flat[0].platform
        dtype = compute_dtype(config, model, platform)
        usual = default_page_size(platform) * shares
        page_size = fitting_page_size(model, longest, config.page_size, usual, shares)
        if page_size % shares:
            raise ConfigError(f"page_size {page_size} must be a multiple of decode_context_parallel_size {shares}")
        facts = mesh, np.dtype(dtype), longest
        pools = pooler is not None
        decoder, one_page = decoder_and_page(config, model, *facts, page_size, pools=pools, checks=checks)
        return cls(folder, tokenizer, model, mesh, np.dtype(dtype), longest, decoder, one_page, pooler, eyes)

    def with_layers(self, config: EngineConfig, layers: Sequence[int]) -> ModelPlan:
        """The same plan for a model that has only these layers, by index."""
        model = replace(self.model, layers=tuple(self.model.layers[i] for i in layers))
        facts = self.mesh, self.dtype, self.longest
        decoder, one_page = decoder_and_page(config, model, *facts, self.one_page.page_size)
        return replace(self, model=model, decoder=decoder, one_page=one_page)

    def adapter_pool(self, config: EngineConfig) -> PoolSizes | None:
        """The pool of LoRA adapters. With lora_dtype "auto" their matrices are as wide as the model's. A CPU computes
        in float32, and keeps bfloat16 as it is."""
        if not config.enable_lora:
            return None
        stored = self.model.dtype if config.dtype == "auto" else config.dtype
        own = jnp.dtype(stored) if self.dtype == np.float32 and stored == "bfloat16" else self.dtype
        dtype = own if config.lora_dtype == "auto" else jnp.dtype(config.lora_dtype)
        return PoolSizes(config.max_loras, config.max_lora_rank, dtype)


def mesh_of(config: EngineConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a model, or of one stage of a pipeline. Raises ConfigError as `make_mesh`."""
    sizes = config.decode_context_parallel_size, config.data_parallel_size
    mesh = make_mesh(config.tensor_parallel_size, devices, config.enable_expert_parallel, *sizes)
    tell_devices(mesh)
    return mesh


def decoder_and_page(
    config: EngineConfig,
    model: ModelConfig,
    mesh: Mesh,
    dtype: np.dtype,
    longest: int,
    page_size: int,
    *,
    pools: bool = False,
    checks: bool = False,
) -> tuple[Decoder, CacheLayout]:
    """The decoder of a model on a mesh, and its cache's layout with a single page. pools: the model embeds or scores.
    checks: kernels are on trial, see `make_decoder`."""
    platform = mesh.devices.flat[0].platform
    shares = config.decode_context_parallel_size
    kv_dtype = cache_dtype(config.kv_cache_dtype, dtype)
    decoder = make_decoder(
        model,
        mesh,
        dtype,
        page_size=page_size,
        kv_dtype=kv_dtype,
        attention=config.attention_backend,
        matmul=config.matmul_backend,
        checks=checks,
    )
    if config.deterministic:
        decoder = ordered(decoder, config, mesh, pools=pools)
    decoder = with_adapters(decoder, mesh) if config.enable_lora else decoder
    states = config.max_num_seqs, config.num_snapshots
    layout = CacheLayout.of(model, decoder.kv_heads, 1, page_size, kv_dtype, platform, longest, *states, shares)
    return decoder, layout


def _token_of(tokenizer: Path, folder: Path, text: str) -> int:
    """The id of a text that is one token. Raises ConfigError for a text of several tokens."""
    try:
        ids = load_tokenizer(folder, source=tokenizer).encode(text, add_special_tokens=False)
    except (InvalidRequestError, OSError, ValueError) as error:
        raise ConfigError(f"score_tokens need the model's tokenizer: {error}") from None
    if len(ids) != 1:
        raise ConfigError(f"score_tokens: {text!r} is {len(ids)} tokens in this model's tokenizer, not one")
    return ids[0]
