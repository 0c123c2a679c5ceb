"""What it costs to have layers' weights in host memory, on random weights; ratios within one run of engines in turns.

python benchmarks/host_weights.py [--shape 100M] [--shares 0.5 1.0] [--rounds 5]

The engines have none, and each of these shares of the layers' weights in host memory. Prints for each share the bytes
that a step copies, and as medians of the rounds: output tokens per second of eight requests that decode, prompt tokens
per second of long prompts, both also relative to the engine with all weights on the device, and the bytes per second
that the longer step would need if it did nothing but copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from peers.model import SHAPES

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.types import Request, SamplingParams

ROWS = 8
PROMPT = 512
OUTPUTS = 32
GIB = 2**30


def load(folder: str, gib: float) -> Engine:
    settings = {"load_format": "dummy", "max_num_seqs": ROWS, "max_num_batched_tokens": PROMPT, "decode_steps": 1}
    config = EngineConfig(
        model=folder, kv_pages=512, max_model_len=1024, prefix_caching=False, cpu_offload_gib=gib, **settings
    )
    engine = Engine.load(config, progress=False)
    engine.compile()
    return engine


def seconds(engine: Engine, prompts: int, length: int, outputs: int) -> float:
    """The time that these requests take together."""
    params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    for i in range(prompts):
        engine.add_request(Request(request_id=str(i), prompt_token_ids=[5 + i] * length, params=params))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def measure(engine: Engine) -> tuple[float, float]:
    """(seconds of a step that decodes ROWS sequences, seconds of a step with PROMPT tokens of a prompt)."""
    short, long = (seconds(engine, ROWS, 8, outputs) for outputs in (1, 1 + OUTPUTS))
    return (long - short) / OUTPUTS, seconds(engine, 2, PROMPT, 1) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="100M")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[given.shape]))
        usual = load(folder, 0)
        layers = usual.runner.weight_bytes  # an upper bound: the shares are rounded up to whole layers
        engines = [usual, *(load(folder, share * layers / GIB) for share in given.shares)]
        found: list[list[tuple[float, float]]] = [[] for _ in engines]
        for _ in range(given.rounds):
            for engine, results in zip(engines, found, strict=True):
                results.append(measure(engine))
    for engine, results in zip(engines, found, strict=True):
        copied = engine.runner.streamed_bytes
        decode, prompt = (statistics.median(column) for column in zip(*results, strict=True))
        pairs = [(a / c, b / d) for (a, b), (c, d) in zip(found[0], results, strict=True)]
        relative = [statistics.median(column) for column in zip(*pairs, strict=True)]
        more = statistics.median(one[0] - other[0] for one, other in zip(results, found[0], strict=True))
        rate = f"; {copied / more / 1e9:.1f} GB/s" if copied else ""
        print(
            f"{copied / 2**20:.0f} MiB copied in a step: decodes {ROWS / decode:.1f} tokens/s ({relative[0]:.2f}), "
            f"prompts {PROMPT / prompt:.0f} tokens/s ({relative[1]:.2f}){rate}"
        )


if __name__ == "__main__":
    main()
