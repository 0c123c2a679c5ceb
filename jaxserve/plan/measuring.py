"""`plan --measure`: rates of the device that is here, by a probe, and the planned model's steps beside predictions."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.plan import constants, probe
from jaxserve.plan.decode_steps import STEPS, Clock, DecodeSteps, Point, Timed, in_turns, pages_for
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.roofline import Constants, PipelineRoofline, Roofline

BATCHES = (1, 8, 32)
CONTEXTS = (32, 1024)
ROUNDS = 7
MODEL = "model"
BUSY = 1.5  # a median of this many times the shortest time tells that other programs took the processor

log = logging.getLogger(__name__)


class Measured:
    """What was measured: the constants that the probe told, and the planned model's steps."""

    def __init__(self, fitted: Constants, steps: Mapping[Point, Timed], path: Path):
        self.fitted = fitted
        self.steps = steps
        self.path = path

    def beside(self, roofline: Roofline | PipelineRoofline) -> dict[str, Any]:
        """Measured times beside those of a roofline, as JSON."""
        rows = []
        for point, timed in self.steps.items():
            predicted = roofline.decode(*point).total
            rows.append({**point._asdict(), "tpot": timed.best, "median": timed.median, "predicted": predicted,
                         "error": predicted / timed.best - 1})  # fmt: skip
        return {"rounds": ROUNDS, "file": str(self.path), "decode": rows}


def measure(config: EngineConfig, target: str, path: Path, clock: Clock = time.perf_counter) -> Measured:
    """Measures this device with a probe and with the model itself, in turns; keeps the probe's rates in `path`.

    Raises ConfigError for a target that is not here, and for settings that the probe cannot have.
    """
    if config.pipeline_parallel_size > 1:
        raise ConfigError("--measure does not run pipelines; leave out --pipeline-parallel-size")
    deployment = Deployment.of(config, target)
    _refuse(deployment)
    with tempfile.TemporaryDirectory() as folder:
        given = probe.settings(config, deployment, Path(folder))
        probes = {name: Deployment.of(one, target) for name, one in given.items()}
        probe.check_form(deployment, probes[probe.WIDE])
        start = Constants.of(probes[probe.WIDE])
        rooflines = {name: Roofline(one, start) for name, one in probes.items()}
        points = {name: probe.points(name) for name in probes} | {MODEL: _points(deployment)}
        steps = {name: _engine_steps(one, points[name], clock) for name, one in (probes | {MODEL: deployment}).items()}
    times = in_turns(steps, points, ROUNDS)
    fitted = probe.fit(start, rooflines, times)
    constants.keep(path, probes[probe.WIDE], fitted)
    return Measured(fitted, times[MODEL], path)


def _refuse(deployment: Deployment) -> None:
    here = jax.devices()[0]
    device = deployment.device
    if (here.platform, here.device_kind) != (device.platform, device.device_kind):
        raise ConfigError(
            f"--measure needs the target's devices: {deployment.target} has {device.device_kind}, and here is "
            f"{here.device_kind}"
        )
    if device.platform == "cpu" and deployment.devices > 1:
        raise ConfigError("--measure is for one device of a CPU, since several share its cores: use --target cpu")
    if deployment.groups > 1:
        raise ConfigError("--measure does not run groups of devices; leave out --data-parallel-size")
    if deployment.devices > len(jax.devices()):
        raise ConfigError(f"--measure needs {deployment.devices} devices, and here are {len(jax.devices())}")


def _points(deployment: Deployment) -> list[Point]:
    """The steps of the planned model that are timed: those of BATCHES and CONTEXTS whose sequences fit."""
    pages, longest = deployment.pages(deployment.estimated_needs())
    layout = deployment.plan.one_page
    most = deployment.config.max_num_seqs
    contexts = sorted({min(context, longest - STEPS) for context in CONTEXTS})
    some = [Point(batch, context) for batch in BATCHES for context in contexts if batch <= most and context > 0]
    found = [one for one in some if pages_for([one], layout.page_size, layout.groups.num_groups) <= pages]
    if not found:
        raise ConfigError(f"--measure needs requests of more than {STEPS} tokens; the longest has {longest}")
    return found


def _engine_steps(deployment: Deployment, points: list[Point], clock: Clock) -> DecodeSteps:
    """Loads the engine of a deployment with no more cache than these steps need."""
    layout = deployment.plan.one_page
    config = deployment.config
    pages = pages_for(points, layout.page_size, layout.groups.num_groups)
    longest = max(point.context for point in points) + STEPS
    own = replace(
        config,
        kv_pages=pages,
        max_model_len=longest,
        max_num_seqs=max(point.batch for point in points),
        prefix_caching=False,
        kv_offload_gib=0.0,
        kv_offload_dir=None,
        role="both",
    )
    if jax.default_backend() == "cpu":  # `--target cpu` asks for it
        own = replace(own, platform="cpu")
    log.info("loading %s", config.model)
    return DecodeSteps(Engine.load(own, progress=False), points, clock)


def lines(measured: Mapping[str, Any]) -> Iterator[str]:
    """Measured steps beside predicted ones, as text."""
    yield f"measured here, the shortest of {measured['rounds']} rounds; rates kept in {measured['file']}"
    yield f"  {'batch':>6} {'context':>8} {'measured ms':>12} {'predicted ms':>13} {'error':>6}"
    for one in measured["decode"]:
        times = f"{1e3 * one['tpot']:12.2f} {1e3 * one['predicted']:13.2f} {100 * one['error']:+5.0f}%"
        yield f"  {one['batch']:6} {one['context']:8} {times}"
    slowed = max(one["median"] / one["tpot"] for one in measured["decode"])
    if slowed > BUSY:
        yield f"  other programs were running: medians are up to {slowed:.1f} times the shortest times"
