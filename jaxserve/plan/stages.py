"""The stages of a pipeline as deployments: each has layers, memory and compiled programs of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.loading import buckets
from jaxserve.engine.model_plan import ModelPlan, mesh_of
from jaxserve.engine.pipeline import check_devices, check_model, check_settings, choose_stages, devices_of_stage
from jaxserve.execution.cost import StepCost
from jaxserve.execution.memory import Needs
from jaxserve.models.abstract_weights import abstract_weights
from jaxserve.models.load import make_decoder
from jaxserve.models.stages import Stage
from jaxserve.plan.deployment import Deployment, make_budget, make_runner, model_plan, plan_devices


def deployments(config: EngineConfig, target: str) -> list[Deployment]:
    """The stages of a pipeline, or the one deployment of a model that is not divided. Raises ConfigError or
    CheckpointError."""
    if config.pipeline_parallel_size == 1:
        return [Deployment.of(config, target)]
    check_settings(config)
    devices = plan_devices(target)
    each = devices_of_stage(config)
    check_devices(config, devices)
    config, whole = model_plan(config, devices)
    check_model(config, whole)
    stages = choose_stages(config, whole)
    plans = [_of_stage(config, whole, one, devices[i * each : (i + 1) * each]) for i, one in enumerate(stages)]
    params = [abstract_weights(plan.decoder, plan.folder, plan.mesh, config) for plan in plans]
    together: dict[str, Any] = {path: w for some in params for path, w in some.items()}
    cost = StepCost.of(
        unflatten_dict(together, sep="/"), whole.model, devices[0], config.tensor_parallel_size, whole.dtype
    )
    shapes = buckets(config, whole, cost)
    # As `LoadedPipeline.sizing` counts what is on its way between stages.
    most = max(shape.tokens for shape in shapes)
    moving = (len(stages) + 1) * most * whole.model.hidden_size * np.dtype(whole.dtype).itemsize
    made = []
    for plan, own in zip(plans, params, strict=True):
        runner = make_runner(config, plan, own)
        budget = make_budget(config, plan, runner, len(stages), moving)
        made.append(Deployment(target, config, plan, own, runner, cost, shapes, budget))
    return made


def tightest(stages: Sequence[Deployment], needs: Sequence[Needs]) -> int:
    """The stage that allows the fewest pages, by index; all stages have as many. Raises ConfigError if a stage cannot
    hold a single request."""
    pages = []
    for number, (stage, needed) in enumerate(zip(stages, needs, strict=True)):
        try:
            pages.append(stage.pages(needed)[0])
        except ConfigError as error:
            which = f"stage {number + 1} of {len(stages)}: " if len(stages) > 1 else ""
            raise ConfigError(f"{which}{error}") from None
    return pages.index(min(pages))


def _of_stage(config: EngineConfig, whole: ModelPlan, stage: Stage, devices: list[Any]) -> ModelPlan:
    """The plan of one stage on its devices."""
    mesh = mesh_of(config, devices)
    model = replace(whole.model, layers=whole.model.layers[stage.begin : stage.end])
    one_page = replace(whole.one_page, groups=whole.one_page.groups.of_stage(stage.layers))
    decoder = make_decoder(
        whole.model,
        mesh,
        whole.dtype,
        page_size=one_page.page_size,
        kv_dtype=one_page.dtype,
        attention=config.attention_backend,
        matmul=config.matmul_backend,
    ).clone(stage=stage)
    return replace(whole, mesh=mesh, model=model, decoder=decoder, one_page=one_page)
