"""Stages `decode-*`: an 8B shape with dummy weights in the engine: decoding beside the floor, and where a step's time
goes.

Programs are compiled when a first run needs them, and kernels are not checked (the stage `correctness` does that). Then
the same load runs again, alone on the machine, and its times are taken by the host's clock. The host schedules and
dispatches a step while the devices still run the step before it. `ahead` is the time from the return of a step's
dispatch to the arrival of the previous step's tokens. If it is positive, the step was waiting for the devices, and the
host's work cost no time. If it is negative the devices were idle, unless the tokens had arrived before the host asked
(`late`: asking took less than 50 µs).

The floor of a decode step is the number of bytes that it must read (`floor_bytes`) over the bandwidth of a copy on this
device. These bytes are the weights (except the embedding's table, of which only rows are read) and the cached keys and
values.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.bench.local import fixed_length, random_ids
from jaxserve.config import EngineConfig, default_page_size
from jaxserve.engine.engine import Engine
from jaxserve.engine.in_flight import InFlightStep
from jaxserve.execution.memory import stored_bytes
from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.alone import alone
from jaxserve.pallas_kernels.registry import Device
from jaxserve.scheduling.step_plan import StepPlan
from jaxserve.types import Request
from light import profile, recorded
from light.record import RESTART, Record

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SMALL = SHAPE | {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 256, "torch_dtype": "float32",
}  # fmt: skip
FORMS = ("bf16", "int4", "fp8", "fp8-dynamic")  # of weights
LATE = 50e-6  # seconds; tokens that arrive within this time were there before the host asked
REPEATS = 2
MARGIN = 16  # tokens of the cache for each sequence beyond its own


@dataclass(frozen=True)
class Load:
    """batches: numbers of sequences that decode together. cached: tokens of each prompt. tokens: output after one."""

    batches: tuple[int, ...]
    cached: int
    tokens: int
    slots: int = 256  # most sequences of the engine

    @property
    def longest(self) -> int:
        return self.cached + self.tokens + MARGIN


LOADS = {False: Load((32, 1), 1024, 128), True: Load((3, 1), 40, 70, slots=4)}
LARGE = 256  # sequences that decode together in one more run of the first form
PROFILED = 10  # steps of a profile
KERNELS = "kernels_per_step"  # a profile's figure
FEW_KERNELS = 8  # so many do not show what is in command buffers

Measure = Callable[[Engine, "Watch", int, "Load"], dict[str, Any]]


def load_of(form: str, rehearse: bool) -> Load:
    load = LOADS[rehearse]
    return replace(load, batches=(*load.batches, LARGE)) if form == FORMS[0] and not rehearse else load


@dataclass
class Watch:
    """Times of the calls of one engine, by time.perf_counter(). Replaces its `dispatch` and `wait`.

    dispatched: begin and return of each dispatch. arrived: for each step, when the host asked for its tokens, when it
    had them, and how many tokens a row may have sampled.
    """

    engine: Engine
    dispatched: list[tuple[float, float]] = field(default_factory=list)
    arrived: list[tuple[float, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        dispatch = self.engine.dispatch
        wait = self.engine.wait

        def timed_dispatch(plan: StepPlan) -> InFlightStep:
            began = time.perf_counter()
            step = dispatch(plan)
            self.dispatched.append((began, time.perf_counter()))
            return step

        def timed_wait(step: InFlightStep) -> list[np.ndarray]:
            asked = time.perf_counter()
            tokens = wait(step)
            self.arrived.append((asked, time.perf_counter(), step.tokens_per_call))
            return tokens

        self.engine.dispatch, self.engine.wait = timed_dispatch, timed_wait  # type: ignore[method-assign]

    def clear(self) -> None:
        self.dispatched.clear()
        self.arrived.clear()


def folder_of(config: dict[str, Any], where: Path) -> Path:
    """Makes a model folder with only a config, for dummy weights and no tokenizer."""
    where.mkdir(parents=True, exist_ok=True)
    (where / "config.json").write_text(json.dumps(config))
    return where


def settings(form: str, load: Load, folder: Path, platform: str, *, rehearse: bool) -> EngineConfig:
    """The engine's settings, with a cache of what the load needs."""
    page = 8 if rehearse else default_page_size(platform)
    return EngineConfig(
        model=str(folder_of(SMALL if rehearse else SHAPE, folder / "model")),
        load_format="dummy",
        quantization="auto" if form == FORMS[0] else form,
        max_num_seqs=load.slots,
        max_model_len=load.longest,
        prefix_caching=False,
        page_size=page,
        kv_pages=max(load.batches) * -(-load.longest // page) + 1,
        profile_dir=str(folder / "profile"),
    )


def run(record: Record, form: str, where: Path, *, rehearse: bool) -> None:
    """Ends the process with RESTART where a profile does not show the kernels in command buffers; the next process
    takes profiles without these."""
    load = load_of(form, rehearse)
    work = _work(record, form, load)
    if all(record.has(key) for key in work):
        return
    config = settings(form, load, where, Device.of(jax.devices()[0]).platform, rehearse=rehearse)
    engine = _load(record, form, config)
    if engine is None:
        return
    watch = Watch(engine)
    hidden = False
    for key, (rows, measure) in work.items():
        if record.take(key):
            with record.row(key) as row:
                row |= {"weights": form, "rows": rows} | measure(engine, watch, rows, load)
            hidden |= row.get(KERNELS, math.inf) <= FEW_KERNELS
    if record.take(key := f"{form}, programs"):
        with record.row(key) as row:
            row |= {"programs": recorded.programs(), "kernels": tuning.choices(jax.devices()[0].device_kind)}
    if hidden and recorded.in_profiles():
        sys.exit(RESTART)


def _work(record: Record, form: str, load: Load) -> dict[str, tuple[int, Measure]]:
    """Keys of rows, the numbers of sequences, and what is measured. A process that comes after one in whose profiles
    command buffers ran takes them again, without these, where that one failed or saw few kernels."""
    found: dict[str, tuple[int, Measure]] = {}
    seen = {row["key"] for row in record.data["rows"] if row.get(KERNELS, 0) > FEW_KERNELS}
    for rows in load.batches:
        key = f"{form}, {rows} rows"
        found[key] = rows, _measure
        if recorded.in_profiles():
            found[f"{key}, profile"] = rows, _profile
        elif f"{key}, profile" not in seen:
            found[f"{key}, profile, launched one by one"] = rows, _profile
    return found


def _load(record: Record, form: str, config: EngineConfig) -> Engine | None:
    """The engine; None if it cannot be loaded."""
    engine = None
    key = f"{form}, start"
    if not record.take(key):
        return Engine.load(config, checks=False, progress=False)
    with record.row(key) as row:
        engine = Engine.load(config, checks=False, progress=False)
        ops = engine.runner.model.ops
        row |= {"weight_bytes": engine.runner.weight_bytes, "cache_bytes": engine.runner.cache_bytes}
        row |= {"attention": ops.paged_attention.__module__, "write_kv": ops.write_kv.__module__}
    return engine


def _measure(engine: Engine, watch: Watch, rows: int, load: Load) -> dict[str, Any]:
    """Compiles what the load needs, and measures it alone; the faster one of equal runs counts. What is logged of
    command buffers is of the last one's decodes."""
    began = time.perf_counter()
    before = engine.runner.num_executables
    generate(engine, watch, rows, load, seed=3 * rows)
    row: dict[str, Any] = {"first_run_s": time.perf_counter() - began}
    compiled = engine.runner.num_executables
    with recorded.captured() as said, alone():
        seeds = range(3 * rows + 1, 3 * rows + 1 + (REPEATS if rows < LARGE else 1))
        runs = [generate(engine, watch, rows, load, seed, decoding=said.mark) for seed in seeds]
    row |= {"compiled": compiled - before, "compiled_late": engine.runner.num_executables - compiled}
    row |= {"floor_bytes": step_bytes(engine, rows, load), "token_ms_of_runs": [run["token_ms"] for run in runs]}
    row["command_buffers"] = recorded.updates(said.text, len(watch.arrived) - runs[-1]["prompt_steps"])
    return row | min(runs, key=lambda run: run["token_ms"])


def _profile(engine: Engine, watch: Watch, rows: int, load: Load) -> dict[str, Any]:
    """The kernels of a decode step."""
    few = replace(load, tokens=min(3 * PROFILED, load.tokens))
    usual, engine.pace.tokens_per_call = engine.pace.tokens_per_call, _one  # type: ignore[method-assign]
    try:
        if rows < LARGE:  # whose steps of one token may be programs that have not run
            generate(engine, watch, rows, few, seed=3 * rows)
        with alone():
            generate(engine, watch, rows, few, seed=3 * rows + 1, decoding=lambda: engine.profile(PROFILED))
    finally:
        engine.pace.tokens_per_call = usual  # type: ignore[method-assign]
    return profile.step(Path(engine.config.profile_dir or ""), PROFILED)


def _one(lengths: Sequence[int], **_: bool) -> int:
    """Replaces `Pace.tokens_per_call`: one token per call."""
    return lengths[0]


def step_bytes(engine: Engine, batch: int, load: Load) -> float:
    """The minimum of bytes that a decode step reads, half way through the output."""
    config = engine.model
    layout = engine.runner.layout
    table = engine.runner.params["embed"]["table"]
    unread = 0 if config.tie_embeddings else sum(stored_bytes(x) for x in jax.tree.leaves(table))
    length = load.cached + load.tokens / 2
    return engine.runner.weight_bytes - unread + batch * length * layout.page_bytes / layout.page_size


def generate(
    engine: Engine,
    watch: Watch,
    batch: int,
    load: Load,
    seed: int,
    decoding: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Runs prompts together. Returns the times of the steps after the last prompt's first token, before which it calls
    `decoding`."""
    prompts = random_ids(np.random.default_rng(seed), engine.vocab_size, batch, load.cached)
    params = fixed_length(load.tokens + 1)
    waiting = {f"{seed}-{i}" for i in range(batch)}  # for their first tokens
    for i, ids in enumerate(prompts):
        engine.add_request(Request(request_id=f"{seed}-{i}", prompt_token_ids=ids, params=params))
    watch.clear()
    began = time.perf_counter()
    first = 0
    drawn = 0
    early = 0
    while engine.has_work:
        for update in engine.step():
            drawn += len(update.token_ids)
            if update.token_ids:
                waiting.discard(update.request_id)
        if not waiting and not first:
            # from the next step on all sequences decode
            first = len(watch.arrived)
            early = drawn
            decoding()
    ended = time.perf_counter()
    if drawn != batch * (load.tokens + 1):
        raise RuntimeError(f"{drawn} tokens came back, not {batch * (load.tokens + 1)}")
    prompt_s = watch.arrived[first - 1][1] - began
    return {
        "prompt_s": prompt_s,
        "prompt_tokens_per_s": batch * load.cached / prompt_s,
        "prompt_steps": first,
        "decoded_beside_prompts": early - batch,
        "output_tokens_per_s": batch * (load.tokens + 1) / (ended - began),
        **steady(watch.dispatched, watch.arrived, first),
    }


def steady(
    dispatched: Sequence[tuple[float, float]], arrived: Sequence[tuple[float, float, int]], first: int
) -> dict[str, Any]:
    """Figures of the steps from `first` on, except the last one. Steps arrive in the order of their dispatch.

    token_ms: time per token. step_ms: time between arrivals. steps_per_call: tokens that a row samples per call.
    dispatch_ms and ahead_ms (see the module): medians. ahead_least_ms: the minimum. late: share of steps whose tokens
    were there before the host asked.
    """
    whole = range(max(first, 1), max(len(arrived) - 1, 2))
    if len(arrived) < 3 or not len(whole):
        raise RuntimeError("there are too few steps to be measured")
    spans = [(arrived[i][1] - arrived[i - 1][1], arrived[i][2]) for i in whole]
    ahead = [arrived[i - 1][1] - dispatched[i][1] for i in whole]
    seconds = sum(s for s, _ in spans)
    tokens = sum(n for _, n in spans)
    return {
        "token_ms": 1e3 * seconds / tokens,
        "tokens_per_s_each": tokens / seconds,
        "step_ms": 1e3 * float(np.median([s for s, _ in spans])),
        "steps": len(spans),
        "steps_per_call": tokens / len(spans),
        "dispatch_ms": 1e3 * float(np.median([end - begin for begin, end in (dispatched[i] for i in whole)])),
        "ahead_ms": 1e3 * float(np.median(ahead)),
        "ahead_least_ms": 1e3 * min(ahead),
        "late": float(np.mean([arrived[i][1] - arrived[i][0] < LATE for i in whole])),
    }
