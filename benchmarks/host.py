"""Host work per step: schedule, pack, dispatch, commit, with a device step that does nothing.

The step has the number of arguments of a real model (32 layers), so that its dispatch costs what a real one does;
only its arithmetic is left out. Prints the median and the 99th percentile of each part over the steady decode of N
sequences.

  python benchmarks/host.py                  256, 512, 1024 and 2048 running sequences
  python benchmarks/host.py --running 256 --json host.json
  python benchmarks/host.py --running --prompts 32768 131072    what long prompts cost instead
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.execution import steps
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.block_manager import HASH_BYTES, BlockManager, hash_pages, root_hash
from jaxserve.scheduling.sequence import Sequence
from jaxserve.server.ipc.messages import LENGTH_BYTES, Submit, decode_api_server_message, to_frame
from jaxserve.types import Request, SamplingParams

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}
PROMPT = 64
WARMUP = 20
STEPS = 400


def null_step(params, cache, slots, packed, *, context, **fixed) -> steps.StepResult:
    """Has the arguments and results of a step on CPU, without scores. The token depends on the batch, so that nothing
    is optimized away; it is -1 for rows that sample none, in the middle of their prompt."""
    del fixed  # other static arguments of the program: sampler and the like
    shape = context.shape
    at, rows = shape.fields["num_new"]
    drawn = jnp.where(packed[at : at + rows] > 0, packed[:rows] % 1000 + 7, -1)
    tokens = jnp.tile(drawn, (shape.max_tokens_per_call, 1))
    nothing = jnp.zeros(())
    return steps.StepResult(Sampled(tokens, nothing), None if shape.decode_only else nothing, cache, slots)


def make_engine(running: int) -> Engine:
    steps.run_step = null_step
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            max_num_seqs=running,
            max_num_batched_tokens=2 * running,
            kv_pages=running * (PROMPT + STEPS + 100) // 16,
            prefix_caching=True,
            decode_steps=1,
            prefill_chunk=2**20,
        )
        engine = Engine.load(config, progress=False)
    engine.shapes = [  # as on an accelerator: all decodes in one batch
        StepShape.of(running, running, 16, decode_only=True),
        StepShape.of(2 * running, running, 16, decode_only=False),
    ]
    engine.compile()
    return engine


def measure(running: int) -> dict[str, list[float]]:
    """Seconds of each part of each step in the steady state."""
    engine = make_engine(running)
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=WARMUP + STEPS + 60, ignore_eos=True)
    for i in range(running):
        prompt = rng.integers(8, 1000, PROMPT).tolist()
        engine.add_request(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
    while len(engine.scheduler.running) < running or engine.scheduler.running.known.min() < PROMPT + WARMUP:
        engine.step()
    clock = time.perf_counter
    parts: dict[str, list[float]] = {"schedule": [], "dispatch": [], "commit": [], "step": []}
    for _ in range(STEPS):
        start = clock()
        plan = engine.scheduler.schedule()
        scheduled = clock()
        engine.in_flight.append(engine.dispatch(plan))
        dispatched = clock()
        # Wait for the device's part, which is nothing.
        jax.block_until_ready([batch.sampled for batch in engine.in_flight[0].batches])
        ready = clock()
        step = engine.in_flight.popleft()
        updates = engine.commit(step, engine.wait(step))
        committed = clock()
        assert len(updates) == running
        parts["schedule"].append(scheduled - start)
        parts["dispatch"].append(dispatched - scheduled)
        parts["commit"].append(committed - ready)
        parts["step"].append(committed - start - (ready - dispatched))
    return parts


def measure_prompt(tokens: int, page_size: int = 16) -> dict[str, float]:
    """Milliseconds of processor time, the least of several, that a prompt of this length costs the engine."""
    prompt = np.random.default_rng(0).integers(8, 1000, tokens).astype(np.int32)
    hashes = hash_pages(prompt, None, page_size)
    keys = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
    request = Request(request_id="r", prompt_token_ids=prompt.tolist(), params=SamplingParams(), page_hashes=hashes)
    frame = to_frame(Submit.of([request]))
    windows = {"": (None,), " with windows": (None, 128)}
    results = {"message": _least(lambda: decode_api_server_message(frame[LENGTH_BYTES:]).requests("0/"))}
    (arrived,) = decode_api_server_message(frame[LENGTH_BYTES:]).requests("0/")
    results["sequence"] = _least(lambda: Sequence(arrived, 0, 0, 1, frozenset(), 1))
    for name, sizes in windows.items():
        count = len(sizes)
        blocks = BlockManager(count * len(keys) + 1, page_size, windows=sizes)
        pages = blocks.allocate(count * len(keys))
        for i, key in enumerate(keys):
            blocks.register(pages[i * count : (i + 1) * count], key)
        results["lookup" + name] = _least(lambda blocks=blocks: blocks.match(root_hash(None), keys))
        blocks.reset_prefix_cache()
        blocks.register_lazily(pages, root_hash(None), prompt)
        results["hashing a tail" + name] = _least(lambda blocks=blocks: blocks.match(root_hash(None), keys), 1)
    return results


def _least(call: Callable[[], object], times: int = 7) -> float:
    best = np.inf
    for _ in range(times):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return 1e3 * best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--running", type=int, nargs="*", default=[256, 512, 1024, 2048], help="sequences that decode")
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="lengths of prompts")
    parser.add_argument("--json", type=Path, help="write the figures, in microseconds, to this file")
    args = parser.parse_args()
    results = {}
    if args.running:
        print(f"{'running':>8} {'part':>10} {'p50 us':>8} {'p99 us':>8}")
    for running in args.running:
        parts = measure(running)
        results[running] = {
            name: {"p50_us": 1e6 * np.percentile(seconds, 50), "p99_us": 1e6 * np.percentile(seconds, 99)}
            for name, seconds in parts.items()
        }
        for name, figures in results[running].items():
            print(f"{running:8} {name:>10} {figures['p50_us']:8.0f} {figures['p99_us']:8.0f}", flush=True)
    for tokens in args.prompts:
        for name, milliseconds in measure_prompt(tokens).items():
            print(f"{tokens:8} tokens: {name} {milliseconds:.2f} ms", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
