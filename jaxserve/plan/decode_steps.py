"""The time of decode steps of an engine on the devices that are here, without prompts that fill its cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.engine import Engine
from jaxserve.execution.slots import encode_slot
from jaxserve.scheduling.step_plan import Sampler
from jaxserve.types import SamplingParams

STEPS = 4  # steps that are queued before the clock is read: the host works while the devices do

Clock = Callable[[], float]


class Point(NamedTuple):
    """A decode step of `batch` sequences of `context` tokens each."""

    batch: int
    context: int


class Timed(NamedTuple):
    """Seconds of a step: the shortest of all rounds, from which other programs took least, and the median."""

    best: float
    median: float


class DecodeSteps:
    """Runs decode steps of an engine. Sequences have pages of their own, and every cached number is 1.

    The programs are those that serve requests. Nothing else may use the engine, whose cache is overwritten.

    Args:
      points: the steps that will be run; `pages_for` tells the pages of the cache that they need.
    """

    def __init__(self, engine: Engine, points: Sequence[Point], clock: Clock):
        self._runner = engine.runner
        self._shapes = engine.shapes
        self._clock = clock
        runner = self._runner
        layout = self._runner.layout
        # Zeros may be memory that nothing has written yet. All of it is then the same few kilobytes in the CPU's cache.
        runner.cache = jax.tree.map(lambda x: jnp.ones_like(x, device=x.sharding), runner.cache)
        groups = layout.groups.num_groups
        entries = []
        page = 1
        for slot, longest in enumerate(_longest(points)):
            count = _blocks(longest, layout.page_size) * groups
            entries.append(np.stack([np.full(count, slot), np.arange(count), np.arange(page, page + count)]))
            page += count
        runner.update_tables([], np.concatenate(entries, axis=1).astype(np.int32))

    def seconds(self, point: Point) -> float:
        """Seconds of a step in which each sequence gains a token, the mean of STEPS."""
        runner = self._runner
        batch = point.batch
        shape = next(shape for shape in self._shapes if shape.decode_only and shape.rows >= batch)
        program = runner.programs.choose(shape, Sampler.GREEDY, 1, False)
        packed = shape.empty(runner.num_slots)
        field = {name: packed[at : at + size] for name, (at, size) in shape.fields.items()}
        field["slot"][:batch] = np.arange(batch)
        field["num_new"][:batch] = 1
        field["tokens"][:batch] = 0
        field["q_start"][: batch + 1] = np.arange(batch + 1)
        field["q_start"][batch + 1 :] = batch
        field["tokens_per_call"][0] = 1
        field["num_decodes"][0] = batch
        params = SamplingParams(temperature=0.0)
        runner.set_slots([encode_slot(slot, params, 0, (), 1, length=point.context) for slot in range(batch)])
        jax.block_until_ready(runner.slots)
        start = self._clock()
        for _ in range(STEPS):
            drawn, _ = runner.step(program, packed)
        jax.block_until_ready(drawn.tokens)
        return (self._clock() - start) / STEPS


def pages_for(points: Sequence[Point], page_size: int, groups: int) -> int:
    """Pages of a cache in which these steps can run, with the null page."""
    return 1 + groups * sum(_blocks(longest, page_size) for longest in _longest(points))


def in_turns(
    several: Mapping[str, DecodeSteps], points: Mapping[str, Sequence[Point]], rounds: int
) -> dict[str, dict[Point, Timed]]:
    """Name -> point -> time. All engines take part in each round, since other programs may slow a machine down for a
    while. A first round, which compiles, is not counted."""
    wanted = [(name, point) for name in several for point in points[name]]
    found: dict[tuple[str, Point], list[float]] = {one: [] for one in wanted}
    for _ in range(1 + rounds):
        for name, point in wanted:
            found[name, point].append(several[name].seconds(point))
    timed = {one: Timed(min(times[1:]), statistics.median(times[1:])) for one, times in found.items()}
    return {name: {point: timed[name, point] for point in points[name]} for name in several}


def _longest(points: Sequence[Point]) -> list[int]:
    """The most tokens of each slot."""
    most = max(point.batch for point in points)
    return [max(point.context for point in points if point.batch > slot) + STEPS for slot in range(most)]


def _blocks(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
