"""Measures work that may block the engine's thread, with a device step that does nothing (see `benchmarks/host.py`).

  beams     18 beams continue a prompt of 128k tokens: host time per token
  forks     32 completions of such a prompt begin: host time of that step
  finish    2,048 sequences end in the same step: time of its commit
  admit     a prompt of 128k tokens arrives, cold and cached: the longest step until its first token
  blocked   such a prompt waits for pages behind 31 decoding rows: what it adds to `schedule`
  loop      one row with a mask among 31 others, without streams: tokens of a plain row per call

Times are CPU times of that thread; `loop` uses the clock.

  python benchmarks/stalls.py [case ...]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import numpy as np
from host import MODEL, null_step

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.execution import steps
from jaxserve.execution.sampling import SCORE_WORDS, Sampled
from jaxserve.execution.step_shape import StepShape
from jaxserve.limits import MAX_LOGPROBS
from jaxserve.types import Request, SamplingParams

LONG = 128 * 1024


def scored_step(params, cache, slots, packed, *, shape, **options) -> steps.StepResult:
    """A null step that obeys `num_new`, with made-up log-probabilities that are higher for earlier rows."""
    result = null_step(params, cache, slots, packed, shape=shape, **options)
    at, size = shape.fields["num_new"]
    drawn = jnp.arange(shape.max_tokens_per_call)[:, None] < packed[at : at + size]
    scores = np.zeros((shape.max_tokens_per_call, shape.rows, SCORE_WORDS), np.int32)
    scores[:, :, 2 : 2 + MAX_LOGPROBS] = np.arange(MAX_LOGPROBS) + 7
    falling = -1.0 - np.arange(shape.rows)[:, None] - 0.1 * np.arange(MAX_LOGPROBS)
    scores[:, :, 2 + MAX_LOGPROBS :] = falling.astype(np.float32).view(np.int32)
    return result._replace(drawn=Sampled(jnp.where(drawn, result.drawn.tokens, -1), jnp.asarray(scores)))


def make_engine(rows: int, context: int, pages: int, **config) -> Engine:
    model = {**MODEL, "num_hidden_layers": 1, "max_position_embeddings": context}
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(steps, "run_step", scored_step):
        (Path(folder) / "config.json").write_text(json.dumps(model))
        options = {"decode_steps": 1, "max_num_batched_tokens": max(8192, 2 * rows), "prefill_chunk": 2**20, **config}
        engine = Engine.load(
            EngineConfig(model=folder, load_format="dummy", max_num_seqs=rows, kv_pages=pages, **options),
            progress=False,
        )
        engine.shapes = [  # an accelerator's: every decode in one batch
            StepShape.of(rows, rows, 16, decode_only=True),
            StepShape.of(options["max_num_batched_tokens"], rows, 16, decode_only=False),
        ]
        engine.compile()
    return engine


def add(engine: Engine, name: str, prompt: list[int], **params) -> None:
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 100, **params}
    engine.add_request(Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**params)))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(8, 1000, length).tolist()


def timed(call) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def beams() -> dict[str, float]:
    width = 18
    tokens = 40
    engine = make_engine(width, LONG + 2048, 20 * (LONG // 16 + 8), async_scheduling=False)
    add(engine, "search", prompt(LONG), use_beam_search=True, n=width, max_tokens=tokens)
    while len(engine.scheduler.running) != width:
        first = timed(engine.step)
    seconds = [timed(engine.step) for _ in range(tokens - 10)]
    return {"first_ms": 1e3 * first, "token_ms": 1e3 * float(np.median(seconds))}


def forks() -> dict[str, float]:
    engine = make_engine(32, LONG + 2048, 34 * (LONG // 16 + 8), async_scheduling=False)
    add(engine, "many", prompt(LONG), n=32)
    while len(engine.scheduler.running) < 32:
        fork = timed(engine.step)
    return {"begin_ms": 1e3 * (fork + timed(engine.step))}


def finish() -> dict[str, float]:
    # all begin and end in the same steps
    rows = 2048
    tokens = 400
    engine = make_engine(rows, 4096, rows * 40, max_num_batched_tokens=64 * rows)
    for i in range(rows):
        add(engine, str(i), prompt(64, i), max_tokens=tokens)
    commits: list[float] = []
    commit = engine.commit

    def measured(step, drawn):
        start = time.thread_time()
        output = commit(step, drawn)
        commits.append(time.thread_time() - start)
        return output

    engine.commit = measured
    while engine.has_work:
        engine.step()
    return {"worst_commit_ms": 1e3 * max(commits), "usual_commit_ms": 1e3 * float(np.median(commits))}


def admit() -> dict[str, float]:
    engine = make_engine(4, LONG + 2048, 3 * LONG // 16, async_scheduling=False)
    tokens = prompt(LONG)
    figures = {}
    for name in ("cold", "cached"):
        seconds = [timed(partial(add, engine, name, tokens, max_tokens=1))]
        while engine.has_work:
            seconds.append(timed(engine.step))
        figures |= {f"{name}_add_ms": 1e3 * seconds[0], f"{name}_worst_step_ms": 1e3 * max(seconds[1:])}
    return figures


def blocked() -> dict[str, float]:
    figures = {}
    for name in ("free", "blocked"):
        engine = make_engine(32, LONG + 2048, LONG // 16 + 200, async_scheduling=False)
        tokens = prompt(LONG)
        add(engine, "first", tokens, max_tokens=1)
        while engine.has_work:
            engine.step()
        for i in range(31):
            add(engine, str(i), prompt(64, i), max_tokens=400)
        for _ in range(3):
            engine.step()
        if name == "blocked":  # half of it is cached
            add(engine, "head", tokens[: LONG // 2] + prompt(LONG // 2, 1))
        seconds = []
        for _ in range(100):
            start = time.thread_time()
            plan = engine.scheduler.schedule()
            seconds.append(time.thread_time() - start)
            step = engine.dispatch(plan)
            engine.commit(step, engine.wait(step))
        figures[f"{name}_schedule_us"] = 1e6 * float(np.median(seconds))
    return figures


def loop() -> dict[str, float]:
    engine = make_engine(32, 4096, 32 * 64, decode_steps=16)
    for i in range(31):
        add(engine, str(i), prompt(64, i), max_tokens=400)
    add(engine, "masked", prompt(64, 99), max_tokens=400, allowed_token_ids=tuple(range(8, 1000)))
    calls = 0
    plain = 0
    masked = 0
    start = time.perf_counter()
    while engine.has_work:
        mine = [update for update in engine.step() if update.token_ids]
        calls += 1
        masked += sum(len(update.token_ids) for update in mine if update.request_id == "masked")
        plain += sum(len(update.token_ids) for update in mine if update.request_id != "masked")
        if plain >= 31 * 390:
            break
    seconds = time.perf_counter() - start
    return {
        "plain_tokens_per_call": plain / 31 / calls,
        "plain_tok_s": plain / seconds,
        "masked_tok_s": masked / seconds,
    }


def main() -> None:
    cases = {case.__name__: case for case in (beams, forks, finish, admit, blocked, loop)}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("case", nargs="*", choices=[[], *cases], help="what to measure; all of it by default")
    for name in parser.parse_args().case or cases:
        print(f"{name:10}", "  ".join(f"{key} {value:,.2f}" for key, value in cases[name]().items()), flush=True)


if __name__ == "__main__":
    main()
