"""Loads what proposes tokens in speculative decoding: a draft model, which is a second model with a runner of its own
on the same devices, or a draft head, whose layer runs in the steps of the target."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import jax

from jaxserve.checkpoints.hub import resolve_model
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.mesh import num_shards, replicated, to_devices
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.engine.sizing import Sized
from jaxserve.execution.cache_kinds import cache_kind
from jaxserve.execution.runner import ModelRunner
from jaxserve.models.draft_files import open_eagle, open_mtp
from jaxserve.models.drafter import Drafter
from jaxserve.models.load import check_kernels, make_decoder, make_params

log = logging.getLogger(__name__)


def load_draft(
    config: EngineConfig, target: ModelPlan, devices: list[jax.Device] | None, *, static: bool | None = None
) -> Sized | None:
    """The draft model that the settings name, if they do. static: see `ModelRunner`.

    Raises ConfigError for a model that does not go with the target.
    """
    given = config.speculative_config
    if given is None or given.method != "draft_model":
        return None
    assert given.model is not None
    start = time.perf_counter()
    own: Any = {
        "model": given.model,
        "revision": None,
        "tokenizer": None,
        "quantization": "auto",
        "max_model_len": None,
        "enable_lora": False,
        "lora_modules": (),
    }
    settings = replace(config, speculative_config=None, page_size=target.one_page.page_size, **own)
    plan = ModelPlan.of(settings, devices, checks=True)
    _check(plan, target, given.model, config.model)
    params = make_params(plan.decoder, plan.folder, plan.mesh, settings, progress=False)
    decoder, params = check_kernels(plan.decoder, params, plan.mesh, config.matmul_backend)
    runner = ModelRunner(decoder, params, plan.mesh, config.max_num_seqs, 1, static=static)
    runner.set_cache_size(plan.one_page, -(-target.longest // plan.one_page.page_size))
    log.info("loaded the draft model %s in %.1f s", given.model, time.perf_counter() - start)
    return Sized(runner, plan.one_page)


def load_head(config: EngineConfig, target: ModelPlan) -> tuple[Drafter, dict[str, Any], ModelPlan] | None:
    """The draft head that the settings name, its parameters, and the plan whose cache has room for it; None if the
    settings name none.

    Raises ConfigError or CheckpointError for a head that does not go with the target.
    """
    given = config.speculative_config
    if given is None or given.method not in ("eagle3", "mtp"):
        return None
    mesh = target.mesh
    layout = target.one_page
    if None not in layout.groups.windows:
        raise ConfigError(f"speculative_config's {given.method} needs a model with a layer that sees all tokens")
    if target.model.streams is not None:
        raise ConfigError(f"speculative_config's {given.method} needs a model with one residual stream, not several")
    start = time.perf_counter()
    if given.method == "eagle3":
        assert given.model is not None
        folder = resolve_model(given.model, download_dir=config.download_dir)
        shape, spec, files = open_eagle(folder, target.model, config.ignore_config_keys)
    else:
        folder = target.folder
        shape, spec, files = open_mtp(folder, target.model, config.ignore_config_keys)
    like = make_decoder(
        shape.limited_to(target.longest),
        mesh,
        target.dtype,
        page_size=layout.page_size,
        kv_dtype=layout.dtype,
        attention=config.attention_backend,
        matmul=config.matmul_backend,
        checks=True,
    )
    sizes = like.kv_heads, like.vocab_rows, target.model.vocab_size, target.decoder.vocab_rows
    drafter = Drafter(spec, like.config, *sizes, like.dtype, like.ops)
    own = replace(config, quantization="auto") if given.method == "eagle3" else config
    params = make_params(drafter, folder, mesh, own, progress=False, source=files)
    drafter, params = check_kernels(drafter, params, mesh, config.matmul_backend)
    if files.ids is not None:
        params["ids"] = to_devices(files.ids, replicated(mesh))
    platform = mesh.devices.flat[0].platform
    kind = cache_kind(drafter.config, drafter.kv_heads, layout.dtype, platform, num_shards(mesh, "cached_tokens"))
    log.info("loaded the draft head of %s in %.1f s", given.model or config.model, time.perf_counter() - start)
    return drafter, params, replace(target, one_page=replace(layout, draft=kind))


def _check(plan: ModelPlan, target: ModelPlan, name: str, target_name: str) -> None:
    if plan.model.vocab_size != target.model.vocab_size:
        raise ConfigError(
            f"the draft model {name} has a vocabulary of {plan.model.vocab_size} tokens, and {target_name} one of "
            f"{target.model.vocab_size}: speculative_config needs a model with the same vocabulary"
        )
    for one, named in ((plan, name), (target, target_name)):
        if one.one_page.groups.num_groups != 1 or one.pooler is not None:
            raise ConfigError(
                f"speculative_config's draft_model needs models that generate, whose layers of attention all see "
                f"equally far back; {named} is not such a model"
            )
    if plan.model.recurrent is not None:
        raise ConfigError(f"speculative_config's draft_model must keep no recurrent states, which {name} does")
