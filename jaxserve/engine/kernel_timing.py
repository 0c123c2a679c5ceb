"""A start on a device for which no table says how to multiply by the model's weights times the ways itself.

It times products of few rows, as decodes have, on one device while the weights are loaded, for at most SECONDS. What it
finds is kept in the user's cache folder, so that the next start reads it. `jaxserve tune` is more thorough.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import is_split
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.execution import memory
from jaxserve.models.abstract_weights import abstract_weights
from jaxserve.models.layers import activation_of
from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.experts import as_codes
from jaxserve.pallas_kernels.quant_matmul import ways
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.tuning import Table, products
from jaxserve.pallas_kernels.types import MixedArray, QuantArray

log = logging.getLogger(__name__)

SECONDS = 10.0
ROOM = 8 << 30  # bytes; more than the arrays that are timed take


def problems_of(weights: Mapping[str, Any], plan: ModelPlan) -> dict[MatmulProblem, int]:
    """The products for which there may be several ways, on one device, with a model's weights, given by path as shapes
    with shardings; and how many weights have this form. Codes count as in order. Of weights that are not quantized,
    these are the gated ones."""

    def local(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)

    found: dict[MatmulProblem, int] = {}
    x = jax.ShapeDtypeStruct((1, 1), plan.dtype)
    parts = [(path, part) for path, w in weights.items() for part in (w.parts if isinstance(w, MixedArray) else [w])]
    for path, w in parts:
        activation = activation_of(plan.decoder.config, path)
        if isinstance(w, QuantArray) and len(w.shape) == 2:
            one = MatmulProblem.of(x, replace(jax.tree.map(local, w), shuffled=False), is_split(plan.mesh))
        elif isinstance(w, jax.ShapeDtypeStruct) and activation:
            form = jax.eval_shape(as_codes, local(w))
            one = replace(MatmulProblem.of(x, form, is_split(plan.mesh)), activation=activation)
        else:
            continue
        found[one] = found.get(one, 0) + 1
    return found


def weights_of(config: EngineConfig, plan: ModelPlan) -> dict[str, Any]:
    """The forms of a model's weights, by path. Reads only one quantized weight of each kind."""
    return abstract_weights(plan.decoder, plan.folder, plan.mesh, config)


def problems_that_fit(config: EngineConfig, plan: ModelPlan) -> Iterable[MatmulProblem]:
    """The products of a model; none where its weights leave no room to time them meanwhile."""
    weights = weights_of(config, plan)
    limit = (plan.mesh.devices.flat[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None and sum(memory.bytes_by_dtype(list(weights.values())).values()) + ROOM > limit:
        log.info("the weights leave no room to measure which kernels are the fastest")
        return ()
    return problems_of(weights, plan)


def name_of(problem: MatmulProblem) -> str:
    """For example "4096 x 14336 int4 in groups of 128"."""
    if problem.activation:
        return f"{problem.rows} x {problem.inputs} {problem.codes_dtype} and {problem.activation}"
    rows, inputs = problem.block
    groups = "" if inputs >= problem.inputs else f" in groups of {inputs}" if rows == 1 else f" in {rows} x {inputs}"
    return f"{problem.rows} x {problem.inputs} {problem.codes_dtype}{groups}"


class KernelTiming:
    """The timing of a start, in a thread of its own."""

    def __init__(
        self,
        device: Device,
        find: Callable[[], Iterable[MatmulProblem]],
        measure: products.Measure = products.measure_briefly,
        clock: Callable[[], float] = time.monotonic,
    ):
        """find: returns the model's products; the thread calls it."""
        self._device = device
        self._find = find
        self._measure = measure
        self._clock = clock
        self._found = dict(tuning.kept(device.kind))
        self._until = clock() + SECONDS
        self._thread = threading.Thread(target=self._run, name="kernel timing", daemon=True)
        self._thread.start()

    @classmethod
    def begin(cls, config: EngineConfig, plan: ModelPlan) -> KernelTiming | None:
        """Begins the timing that a start with these settings needs. None: nothing is timed, and nothing that was kept
        counts."""
        device = Device.of(plan.mesh.devices.flat[0])
        tuning.use(device.kind, Table())
        if not config.times_kernels or device.platform == "cpu" or tuning.user_folder() is None:
            return None
        return cls(device, lambda: problems_that_fit(config, plan))

    def finish(self) -> None:
        """Waits for the end of the timing. From now on, products are computed in the ways that were measured, or kept
        by an earlier start."""
        self._thread.join()
        tables = tuning.tables(self._device.kind).products
        tuning.use(self._device.kind, Table(products={k: one for k, one in self._found.items() if k not in tables}))

    def _is_missing(self, problem: MatmulProblem) -> bool:
        """Whether the fastest way is unknown, and there are several."""
        key = ways.key(problem)
        known = key is None or key in self._found or key in tuning.tables(self._device.kind).products
        return not known and len(ways.candidates(self._device, problem)) > 1

    def _run(self) -> None:
        try:
            missing = {one: name_of(one) for one in self._find() if self._is_missing(one)}
            races = products.run(
                self._device,
                missing,
                products.DECODE_ROWS,
                until=self._until,
                measure=self._measure,
                clock=self._clock,
            )
            for race in races:
                if (chosen := race.choice()) is None:
                    log.warning("no time was left to measure products with weights %s", race.name)
                    continue
                self._found[str(ways.key(race.problem))] = chosen
                said = ", ".join(f"{way} for {rows} rows" for rows, way in chosen.ways)
                log.info("products with weights %s: %s%s", race.name, said, " (shuffled)" if chosen.shuffled else "")
            if missing:
                tuning.keep(self._device.kind, self._found)
        except Exception as error:  # the start can do without
            log.warning("the fastest kernels could not be measured: %s", error)
