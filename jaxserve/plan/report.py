"""A deployment's plan as JSON."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, TypedDict

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.execution import memory
from jaxserve.execution.memory import Needs
from jaxserve.plan.constants import Known, find
from jaxserve.plan.deployment import Compiled, Deployment, StepFigures
from jaxserve.plan.measuring import Measured
from jaxserve.plan.roofline import Constants, PipelineRoofline, Roofline, prompt_seconds
from jaxserve.plan.stages import deployments, tightest
from jaxserve.plan.traffic import Goal, simulate

SCHEMA = 1  # grows when a key changes its meaning or goes
BATCHES = (1, 8, 32, 128)
CONTEXTS = (1024, 8192, 32768)
PARTS = ("weights", "products", "attention", "communication", "overhead", "waiting")


class PlanOptions(TypedDict, total=False):
    """Options of `make_plan`."""

    shape: tuple[int, int]
    estimate: bool
    all_layers: bool
    price: float | None
    goal: Goal | None
    constants: Known | None
    measured: Measured | None


def make_plan(
    config: EngineConfig,
    target: str,
    *,
    shape: tuple[int, int] = (1000, 300),
    estimate: bool = False,
    all_layers: bool = False,
    compiled: list[Compiled] | None = None,
    price: float | None = None,
    goal: Goal | None = None,
    constants: Known | None = None,
    measured: Measured | None = None,
) -> dict[str, Any]:
    """The plan as JSON. A model that does not fit has `fits` False and `reason`, and no capacity.

    Args:
      shape: tokens of a request's prompt and output, for the number of requests at once.
      estimate: compile nothing.
      compiled: what the compiler said of each stage before (`Deployment.compile`); None: it is asked, unless there is
        only an `estimate`.
      price: dollars per device and hour.
      constants: measured ones by kind of device and form of weights.
      measured: steps that were timed here.
    """
    if goal is not None and config.data_parallel_size > 1:
        raise ConfigError("--for simulates one group of devices; leave out --data-parallel-size")
    stages = deployments(config, target)
    if compiled is None and not estimate:
        tightest(stages, [stage.guessed_needs() for stage in stages])  # what cannot fit is not compiled
        compiled = [stage.compile(all_layers) for stage in stages]
    needs = [stage.estimated_needs() for stage in stages] if compiled is None else [one.needs for one in compiled]
    found = _about(stages, compiled)
    try:
        tight = tightest(stages, needs)
    except ConfigError as error:
        return found | {"memory": _memory(stages[0], needs[0]), "fits": False, "reason": str(error)}
    deployment = stages[tight]
    pages, longest = deployment.pages(needs[tight])
    known = find(constants or {}, deployment) or Constants.of(deployment)
    roofline = _rooflines(stages, known, compiled)
    found |= {"memory": _memory(deployment, needs[tight]), "fits": True}
    found |= {"capacity": _capacity(deployment, pages, longest, shape)}
    found |= {"roofline": _roofline(deployment, roofline, longest), "constants": asdict(known)}
    found["sources"]["roofline"] = known.source
    if measured is not None:
        found["measured"] = measured.beside(roofline)
    batch = min(found["capacity"]["requests_of_shape"], config.max_num_seqs * deployment.groups)
    if price is not None:  # no token is sold where not even one request fits
        tokens = batch / roofline.decode(batch, sum(shape)).total if batch else 0.0
        dollars = price * found["devices"]
        found["price"] = {"dollars_per_hour": dollars, "batch": batch, "tokens_per_second": tokens,
                          "output_tokens_per_dollar": 3600 * tokens / dollars}  # fmt: skip
    if goal is not None:
        served = simulate(deployment, roofline, pages, longest, goal)
        found["served"] = served._asdict() | {"holds": served.holds(goal)}
    return found


def _rooflines(
    stages: list[Deployment], constants: Constants, compiled: list[Compiled] | None
) -> Roofline | PipelineRoofline:
    launches: list[int | None] = [None] * len(stages)
    if compiled is not None:
        launches = [max(step.launches for step in one.steps if step.program.startswith("decode")) for one in compiled]
    made = [Roofline(stage, constants, count) for stage, count in zip(stages, launches, strict=True)]
    return made[0] if len(made) == 1 else PipelineRoofline(made)


def _about(stages: list[Deployment], compiled: list[Compiled] | None) -> dict[str, Any]:
    config = stages[0].config
    deployment = stages[0]
    layers = [stage.plan.model.num_layers for stage in stages]
    fields = type(config).__dataclass_fields__
    parallel = {name: getattr(config, name) for name in fields if "parallel" in name}
    how = "estimated"
    steps = []
    if compiled is not None:
        some = compiled[0].layers
        how = "compiled" if some == layers[0] else f"extrapolated from {some} layers and twice these"
        steps = [_of_step(i, step) for i, one in enumerate(compiled) for step in one.steps]
    return {
        "schema": SCHEMA, "model": config.model, "target": deployment.target,
        "devices": sum(stage.devices for stage in stages), "device_kind": deployment.device.device_kind,
        "parallel": parallel, "quantization": config.quantization, "dtype": str(deployment.plan.dtype),
        "layers": sum(layers), "steps": steps,
        "stages": [
            {"layers": count, "weights": stage.budget.weights} for count, stage in zip(layers, stages, strict=True)
        ],
        "sources": {
            "weights": "arithmetic on the exact shapes", "temporaries": how, "results": how, "code": how,
            "launches": how if steps else "assumed", "collectives": how if steps else "not counted",
            "roofline": "estimated",
        },
    }  # fmt: skip


def _of_step(stage: int, step: StepFigures) -> dict[str, Any]:
    sent = {kind: one._asdict() for kind, one in step.exchanges.items()}
    return {"stage": stage} | step._asdict() | {"exchanges": sent}


def _memory(deployment: Deployment, needs: Needs) -> dict[str, Any]:
    budget = deployment.budget
    params = deployment.params
    encoder = deployment.runner.encoder
    seen = {} if encoder is None else {
        "encoder": encoder.weight_bytes, "features": encoder.rows_bytes, "most_patches": encoder.sizes[-1],
    }  # fmt: skip
    return seen | {
        "total": budget.total, "utilization": budget.utilization, "weights": budget.weights,
        "weights_by_dtype": memory.bytes_by_dtype(params), "slots": budget.slots, "states": budget.states,
        "temporaries": needs.temporaries, "results": needs.results, "code": needs.code, "reserve": budget.reserve,
    }  # fmt: skip


def _capacity(deployment: Deployment, pages: int, longest: int, shape: tuple[int, int]) -> dict[str, Any]:
    config = deployment.config
    layout = deployment.plan.one_page
    groups = deployment.groups
    each = memory.pages_of_longest(config, min(sum(shape), longest), layout.page_size, layout.groups.windows)
    tokens = memory.fitting_tokens(config, replace(layout, num_pages=pages), longest)
    return {
        "groups": groups, "pages": pages, "page_size": layout.page_size,
        "cache_bytes": pages * layout.device_page_bytes(deployment.plan.mesh), "tokens": groups * tokens,
        "longest_request": longest, "shape": list(shape),
        "requests_of_shape": groups * ((pages - 1) // each) if sum(shape) <= longest else 0,
    }  # fmt: skip


def _roofline(deployment: Deployment, roofline: Roofline | PipelineRoofline, longest: int) -> dict[str, Any]:
    contexts = [c for c in CONTEXTS if c <= longest] or [longest]
    decodes = [
        {"batch": batch, "context": context, "tpot": (one := roofline.decode(batch, context)).total,
         "bytes": one.bytes, "flops": one.flops, "shares": {part: getattr(one, part) / one.total for part in PARTS}}
        for batch in BATCHES for context in contexts
    ]  # fmt: skip
    most = memory.max_batched_tokens(deployment.config)
    return {"decode": decodes, "prompt": [{"tokens": n, "ttft": prompt_seconds(roofline, n, most)} for n in contexts]}
