"""Loads the draft model of speculative decoding: a second model with a runner of its own on the same devices."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import jax

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.engine.sizing import Sized
from jaxserve.execution.runner import ModelRunner
from jaxserve.models.load import make_params, trust_matmul

log = logging.getLogger(__name__)


def load_draft(
    config: EngineConfig, target: ModelPlan, devices: list[jax.Device] | None, **options: Any
) -> Sized | None:
    """The draft model that the settings name, if they do. `options` are those of `ModelRunner`.

    Raises ConfigError for a model that does not go with the target.
    """
    given = config.speculative_config
    if given is None or given.model is None:
        return None
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
    plan = ModelPlan.of(settings, devices)
    _check(plan, target, given.model, config.model)
    params = make_params(plan.decoder, plan.folder, plan.mesh, settings, progress=False)
    decoder, params = trust_matmul(plan.decoder, params, plan.mesh, config.matmul_backend)
    runner = ModelRunner(decoder, params, plan.mesh, config.max_num_seqs, 1, **options)
    runner.set_cache_size(plan.one_page, -(-target.longest // plan.one_page.page_size))
    log.info("loaded the draft model %s in %.1f s", given.model, time.perf_counter() - start)
    return Sized(runner, plan.one_page)


def _check(plan: ModelPlan, target: ModelPlan, name: str, target_name: str) -> None:
    if plan.model.vocab_size != target.model.vocab_size:
        raise ConfigError(
            f"the draft model {name} has a vocabulary of {plan.model.vocab_size} tokens, and {target_name} one of "
            f"{target.model.vocab_size}: speculative_config needs a model with the same vocabulary"
        )
    for one, named in ((plan, name), (target, target_name)):
        if one.one_page.groups.num_groups != 1 or one.model.recurrent is not None or one.pooler is not None:
            raise ConfigError(
                f"speculative_config's draft_model needs models that generate, whose layers all see equally far back "
                f"and keep no recurrent states; {named} is not such a model"
            )
