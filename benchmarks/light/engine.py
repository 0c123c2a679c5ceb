"""Stages `engine-*`: an 8B shape with dummy weights in the engine: its start, and decoding relative to the floor.

Times are by the host's clock. The host schedules and dispatches a step while the devices still run the step before it.
`ahead` is the time from the return of a step's dispatch to the arrival of the previous step's tokens. If it is
positive, the step was waiting for the devices, and the host's work cost no time. If it is negative the devices were
idle, unless the tokens had arrived before the host asked (`late`: asking took less than 50 µs).

The floor of a decode step is the number of bytes that it must read over the bandwidth of a copy on this device. These
bytes are the weights (except the embedding's table, of which only rows are read) and the cached keys and values.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.bench import timing
from jaxserve.bench.local import fixed_length, random_ids
from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.in_flight import InFlightStep
from jaxserve.execution.memory import stored_bytes
from jaxserve.pallas_kernels.registry import Device
from jaxserve.scheduling.step_plan import StepPlan
from jaxserve.types import Request
from light.record import Record, read

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
LATE = 50e-6  # seconds; tokens that arrive within this time were there before the host asked


@dataclass(frozen=True)
class Load:
    """batches: numbers of sequences that decode together. cached: tokens of each prompt. tokens: output after one."""

    batches: tuple[int, ...]
    cached: int
    tokens: int


LOADS = {False: Load((1, 32, 256), 1024, 128), True: Load((1, 3), 40, 70)}


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
        dispatch, wait = self.engine.dispatch, self.engine.wait

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


def run(record: Record, *, rehearse: bool, quantization: str, where: Path) -> None:
    load = LOADS[rehearse]
    if record.has(f"batch {load.batches[-1]}, one token a call"):
        return
    config = EngineConfig(
        model=str(folder_of(SMALL if rehearse else SHAPE, where / "model")),
        load_format="dummy",
        quantization=quantization,
        max_num_seqs=max(load.batches),
        max_model_len=load.cached + load.tokens + 16,
        prefix_caching=False,
        **({"kv_pages": 64, "page_size": 8} if rehearse else {}),  # type: ignore[arg-type]
    )
    began = time.perf_counter()
    with record.row("start" if not record.has("start") else f"start {len(record.data['rows'])}") as row:
        engine = Engine.load(config)
        loaded = time.perf_counter()
        row |= {"load_s": loaded - began, "weight_bytes": engine.runner.weight_bytes}
        row |= {"kv_pages": engine.runner.layout.num_pages, "page_bytes": engine.runner.layout.page_bytes}
        engine.compile()
        row |= {"compile_s": time.perf_counter() - loaded, "executables": engine.runner.num_executables}
        row |= {"compilations": engine.programs.compilations, "cache_hits": engine.programs.cache_hits}
        row["cache_bytes"] = engine.runner.cache_bytes
        ops = engine.runner.model.ops
        row |= {"attention": ops.paged_attention.__module__, "write_kv": ops.write_kv.__module__}
    if record.data["rows"][-1]["status"] != "ok":
        return
    bandwidth = bytes_per_second(record.path.parent)
    record.note(bytes_per_s=bandwidth, quantization=quantization)
    watch = Watch(engine)
    generate(engine, watch, 1, load, seed=0)  # warm-up
    usual = engine.pace.tokens_per_call
    for batch, single in product(load.batches, (False, True)):
        key = f"batch {batch}, one token a call" if single else f"batch {batch}"
        if not record.has(key):
            engine.pace.tokens_per_call = _one if single else usual  # type: ignore[method-assign]
            with record.row(key) as row:
                row |= generate(engine, watch, batch, load, seed=2 * batch + single) | {"batch": batch}
                row["floor_ms"] = 1e3 * step_bytes(engine, batch, load) / bandwidth
                row["of_floor"] = row["floor_ms"] / row["token_ms"]


def _one(lengths: Sequence[int], **_: bool) -> int:
    """Replaces `Pace.tokens_per_call`: one token per call."""
    return lengths[0]


def bytes_per_second(folder: Path) -> float:
    """The rate of a copy, as the stage `device` measured it. Measures it here if there is no figure."""
    for row in (read(folder / "device.json") or {}).get("rows", []):
        if "bytes_per_s" in row:
            return float(row["bytes_per_s"])
    return timing.ceilings(Device.of(jax.devices()[0]).platform)["bytes_per_s"]


def step_bytes(engine: Engine, batch: int, load: Load) -> float:
    """The minimum of bytes that a decode step reads, half way through the output."""
    config, layout = engine.model, engine.runner.layout
    table = 0 if config.tie_embeddings else table_bytes(engine)
    length = load.cached + load.tokens / 2
    return engine.runner.weight_bytes - table + batch * length * layout.page_bytes / layout.page_size


def table_bytes(engine: Engine) -> int:
    """Bytes of the embedding's table in its form on the device."""
    params = engine.runner._unbundle(engine.runner._arrays)
    return sum(stored_bytes(x) for x in jax.tree.leaves(params["embed"]["table"]))


def generate(engine: Engine, watch: Watch, batch: int, load: Load, seed: int) -> dict[str, Any]:
    """Runs prompts together. Returns the times of the steps after the last prompt's first token."""
    prompts = random_ids(np.random.default_rng(seed), engine.vocab_size, batch, load.cached)
    params = fixed_length(load.tokens + 1)
    for i, ids in enumerate(prompts):
        engine.add_request(Request(request_id=f"{seed}-{i}", prompt_token_ids=ids, params=params))
    watch.clear()
    began, first, drawn = time.perf_counter(), 0, 0
    while engine.has_work:
        output = engine.step()
        count = sum(map(len, output.tokens)) + sum(len(update.token_ids) for update in output.updates)
        drawn += count
        if drawn >= batch and not first:
            first = len(watch.arrived)  # from the next step on all sequences decode
    ended = time.perf_counter()
    if drawn != batch * (load.tokens + 1):
        raise RuntimeError(f"{drawn} tokens came back, not {batch * (load.tokens + 1)}")
    prompt_s = watch.arrived[first - 1][1] - began
    return {
        "prompt_s": prompt_s,
        "prompt_tokens_per_s": batch * load.cached / prompt_s,
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
    seconds, tokens = sum(s for s, _ in spans), sum(n for _, n in spans)
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
