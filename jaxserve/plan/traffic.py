"""The real scheduler over a device that takes as long as the roofline says: what clients of a deployment would see."""

from __future__ import annotations

import re
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from jaxserve.config import ConfigError
from jaxserve.execution import memory
from jaxserve.execution.cost import prefill_chunk
from jaxserve.execution.step_buffer import StepBatch, split
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.roofline import PipelineRoofline, Roofline, pass_through
from jaxserve.scheduling.block_manager import BlockManager
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Rows
from jaxserve.types import Request, SamplingParams

REQUESTS = 100  # a simulation has at least so many requests
SECONDS = 10.0  # and requests of so many seconds
MOST_REQUESTS = 600


class Goal(NamedTuple):
    """What a deployment must hold: requests per second of a shape in tokens, and latencies in seconds at the 95th
    percentile."""

    rps: float
    tokens_in: int
    tokens_out: int
    ttft: float = float("inf")
    tpot: float = float("inf")

    @classmethod
    def of(cls, text: str) -> Goal:
        """From `ttft<500ms,tpot<25ms,rps=20,in=1000,out=300`. Raises ConfigError."""
        found: dict[str, float] = {}
        for part in text.replace(" ", "").split(","):
            match = re.fullmatch(r"(ttft|tpot)<(\d+(?:\.\d+)?)(ms|s)|(rps|in|out)=(\d+(?:\.\d+)?)", part)
            if match is None:
                raise ConfigError(f"--for must be like ttft<500ms,tpot<25ms,rps=20,in=1000,out=300; got {part!r}")
            if match[1]:
                found[match[1]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1)
            else:
                found[match[4]] = float(match[5])
        if missing := [name for name in ("rps", "in", "out") if not found.get(name)]:
            raise ConfigError(f"--for must say {', '.join(missing)}, larger than 0")
        sizes = int(found["in"]), int(found["out"])
        limits: Any = {name: found[name] for name in ("ttft", "tpot") if name in found}
        return cls(found["rps"], *sizes, **limits)


class Served(NamedTuple):
    """What the clients of a simulation saw: 95th percentiles in seconds, and output tokens per second."""

    ttft: float
    tpot: float
    tokens_per_second: float
    steps: int
    most_running: int
    preemptions: int

    def holds(self, goal: Goal) -> bool:
        return self.ttft < goal.ttft and self.tpot < goal.tpot


def simulate(
    deployment: Deployment,
    roofline: Roofline | PipelineRoofline,
    pages: int,
    longest: int,
    goal: Goal,
    seed: int = 0,
) -> Served:
    """Serves requests that arrive at random (Poisson), each with a prompt of its own. Raises ConfigError for requests
    that are too long."""
    if goal.tokens_in + goal.tokens_out > longest:
        raise ConfigError(f"requests of {goal.tokens_in + goal.tokens_out} tokens exceed the longest, {longest}")
    stages = roofline.num_stages
    scheduler = _scheduler(deployment, pages, longest, stages)
    rng = np.random.default_rng(seed)
    count = min(max(REQUESTS, int(goal.rps * SECONDS)), MOST_REQUESTS)
    arrivals = np.cumsum(rng.exponential(1 / goal.rps, count))
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    now = 0.0
    added = 0
    steps = 0
    most = 0
    devices = Devices(deployment, roofline)
    flight = deque[tuple[list[StepBatch], float]]()
    params = SamplingParams(temperature=0.0, max_tokens=goal.tokens_out, ignore_eos=True)
    while len(last) < count:
        if not scheduler.has_work and not flight:
            now = max(now, float(arrivals[added]))
        while added < count and arrivals[added] <= now:
            prompt = rng.integers(0, 2**30, goal.tokens_in).tolist()
            request = Request(request_id=str(added), prompt_token_ids=prompt, params=params)
            scheduler.add(Sequence(request, 0, added, goal.tokens_out, frozenset(), added))
            added += 1
        plan = scheduler.schedule()
        if plan is not None:
            flight.append(devices.run(plan.rows, now))
            steps = steps + 1
            most = max(most, len(scheduler.running))
        if plan is not None and len(flight) < stages:
            continue
        batches, now = flight.popleft()
        for batch in batches:
            drawn = np.where(batch.rows.num_new[:, None] > 0, 0, -1).astype(np.int32)
            output, details = scheduler.commit(batch.rows, drawn)
            for update in [*output, *(one.update for one in details)]:
                if update.token_ids:
                    first.setdefault(update.request_id, now)
                if update.finish_reason:
                    last[update.request_id] = now
    began = np.array([first[str(i)] for i in range(count)])
    ended = np.array([last[str(i)] for i in range(count)])
    tpot = (ended - began) / max(goal.tokens_out - 1, 1)
    ttft = np.percentile(began - arrivals, 95)
    rate = count * goal.tokens_out / now
    return Served(float(ttft), float(np.percentile(tpot, 95)), rate, steps, most, scheduler.num_preemptions)


class Devices:
    """The time that the stages of a deployment need. A stage runs its steps in order; the first one also waits until
    the tokens that a step reads have left the last one."""

    def __init__(self, deployment: Deployment, roofline: Roofline | PipelineRoofline):
        self._deployment = deployment
        self._roofline = roofline
        self._free = [0.0] * roofline.num_stages
        self._sampled = np.zeros(deployment.config.max_num_seqs)  # when the last token of each slot was there

    def run(self, rows: Rows, now: float) -> tuple[list[StepBatch], float]:
        """Runs a step that the host sends at a time. Returns its batches, and when their tokens are there."""
        cost = self._deployment.cost
        ended = now
        batches = list(split(rows, self._deployment.shapes, cost))
        for batch in batches:
            some = batch.rows
            padded = batch.shape.tokens if cost is not None else some.num_tokens
            seconds = self._roofline.stage_seconds(padded, len(some), some.start + some.count, some.count)
            ended = pass_through(self._free, max(now, self._sampled[some.slot].max()), seconds)
            self._sampled[some.slot[some.num_new > 0]] = ended
        return batches, ended


def _scheduler(deployment: Deployment, pages: int, longest: int, stages: int) -> Scheduler:
    """As `loading.make_scheduler` makes it for the same settings; prompts have nothing in common."""
    config = deployment.config
    layout = deployment.plan.one_page
    return Scheduler(
        BlockManager(pages, layout.page_size, prefix_caching=False, windows=layout.groups.windows),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=memory.max_batched_tokens(config),
        prefill_chunk=prefill_chunk(config, deployment.cost),
        prefill_bursts=deployment.cost is None,
        max_model_len=longest,
        recurrent=deployment.plan.model.recurrent is not None,
        stages=stages,
    )
