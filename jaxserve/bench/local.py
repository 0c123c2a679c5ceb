"""Measures the engine in this process: tokens per second, and the latency of one batch."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.bench.stats import Checks, RequestRecord, distribution, latencies
from jaxserve.config import EngineConfig
from jaxserve.types import Request, SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.llm import LLM


def load(config: EngineConfig, input_len: int, output_len: int) -> LLM:
    """Loads a model and compiles its programs. Raises ValueError if the lengths, in tokens, exceed its limit."""
    from jaxserve.llm import LLM

    if input_len < 1 or output_len < 1:
        raise ValueError(f"the lengths must be at least 1 token, got {input_len} and {output_len}")
    llm = LLM(**config.__dict__)
    if input_len + output_len > (limit := llm.engine.max_model_len):
        raise ValueError(
            f"{input_len} input and {output_len} output tokens exceed the context of {limit}; ask for fewer, or raise "
            f"--max-model-len where the model allows it"
        )
    llm.engine.compile()
    return llm


def traced(folder: str | None) -> contextlib.AbstractContextManager[None]:
    """A context with JAX's profiler, which writes to the folder; None: without it."""
    import jax

    return contextlib.nullcontext() if folder is None else jax.profiler.trace(folder)


def random_ids(random: np.random.Generator, vocab_size: int, count: int, length: int) -> list[list[int]]:
    """`count` prompts of random tokens, without common prefixes."""
    return random.integers(vocab_size, size=(count, length)).tolist()


def fixed_length(output_len: int) -> SamplingParams:
    """Parameters for greedy outputs of exactly this many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)


def run_offline(config: EngineConfig, num_prompts: int, input_len: int, output_len: int) -> dict[str, Any]:
    """Throughput of `LLM.generate` with prompts of one length, after a warm-up with one prompt."""
    if num_prompts < 1:
        raise ValueError(f"there must be at least 1 prompt, got {num_prompts}")
    llm = load(config, input_len, output_len)
    warmup, *prompts = random_ids(np.random.default_rng(config.seed), llm.engine.vocab_size, num_prompts + 1, input_len)
    params = fixed_length(output_len)
    llm.generate([warmup], params, progress=False)
    before = Checks.of_stats(llm.engine.counters)
    start = time.perf_counter()
    with traced(config.profile_dir):
        outputs = llm.generate(prompts, params, progress=False)
    duration = time.perf_counter() - start
    generated = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "duration_s": duration,
        "input_tokens": num_prompts * input_len,
        "output_tokens": generated,
        "requests_per_s": num_prompts / duration,
        "output_tokens_per_s": generated / duration,
        "total_tokens_per_s": (num_prompts * input_len + generated) / duration,
    } | Checks.of_stats(llm.engine.counters).summary(before)


def run_latency(
    config: EngineConfig, batch_size: int, input_len: int, output_len: int, iterations: int
) -> dict[str, Any]:
    """Latencies of a batch whose prompts start together. Each iteration has new prompts; a first one is the warm-up."""
    if not 1 <= batch_size <= config.max_num_seqs or iterations < 1:
        raise ValueError(
            f"the batch must have 1 to {config.max_num_seqs} (--max-num-seqs) sequences and there must be at least 1 "
            f"iteration, got {batch_size} and {iterations}"
        )
    engine = load(config, input_len, output_len).engine
    random = np.random.default_rng(config.seed)
    prompts = [random_ids(random, engine.vocab_size, batch_size, input_len) for _ in range(iterations + 1)]
    run_batch(engine, prompts.pop(), fixed_length(output_len), 0)
    before = Checks.of_stats(engine.counters)
    with traced(config.profile_dir):
        batches = [run_batch(engine, some, fixed_length(output_len), i) for i, some in enumerate(prompts, start=1)]
    durations = [max(record.end for record in batch) for batch in batches]
    values = latencies([record for batch in batches for record in batch])
    summary: dict[str, Any] = {f"{name}_ms": distribution(values[name]) for name in ("ttft", "tpot", "itl")}
    return summary | {
        "batch_ms": distribution(durations),
        "output_tokens_per_s": batch_size * output_len / float(np.median(durations)),
        **Checks.of_stats(engine.counters).summary(before),
    }


def run_batch(engine: Engine, prompts: list[list[int]], params: SamplingParams, number: int) -> list[RequestRecord]:
    """Runs prompts together; times count from their start. `number` makes request ids differ from other batches'."""
    records = {f"batch-{number}-{i}": RequestRecord(0.0, input_tokens=len(ids)) for i, ids in enumerate(prompts)}
    clock = time.perf_counter()
    for name, ids in zip(records, prompts, strict=True):
        engine.add_request(Request(request_id=name, prompt_token_ids=ids, params=params))
    while engine.has_work:
        updates = engine.step()
        now = time.perf_counter() - clock
        for update in updates:
            record = records[update.request_id]
            if update.token_ids:
                record.arrivals.append(now)
                record.output_tokens += len(update.token_ids)
            if update.finish_reason is not None:
                record.end = record.last = now
    return list(records.values())
