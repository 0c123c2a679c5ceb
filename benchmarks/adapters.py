"""What LoRA adapters cost: the time of decode steps without adapters, with one for all rows, and with one for each row.

python benchmarks/adapters.py [--shape 100M] [--rows 32] [--rank 16] [--modules all|qv] [--dtype bfloat16]
    [--adapter-dtype bfloat16]

Prints, as JSON, the median seconds of a step and the share that adapters add. Steps of all kinds are run in turns, so
that other work on the machine slows all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from peers.model import SHAPES

from jaxserve.adapters.adapter import Adapter
from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.execution.slots import NO_ADAPTER, encode_slot
from jaxserve.models.adapter_targets import Matrices, Target
from jaxserve.scheduling.step_plan import Sampler
from jaxserve.types import SamplingParams

CONTEXT = 128  # tokens before those that are timed
TOKENS = 8  # tokens that a call samples for each row
QUERIES_AND_VALUES = (0, 2)


def random_matrices(target: Target, rank: int, parts: tuple[int, ...], rng: np.random.Generator) -> Matrices:
    """Matrices for these parts of a product."""
    out, inputs = target.shape
    ranks = np.array([rank if part in parts else 0 for part in range(len(target.widths))], np.int32)
    a = rng.normal(size=(len(ranks), rank, inputs)).astype(np.float32) / np.sqrt(inputs)
    return Matrices(a, rng.normal(size=(rank, out)).astype(np.float32) / 100, ranks)


def random_adapter(engine: Engine, number: int, rank: int, modules: str) -> Adapter:
    rng = np.random.default_rng(number)
    stacks = engine.runner.stacks
    made = {}
    assert stacks is not None
    for target in stacks.targets:
        if target.path.endswith("qkv/lora") and modules == "qv":
            made[target.path] = random_matrices(target, rank, QUERIES_AND_VALUES, rng)
        elif target.path.startswith("layers_") and modules == "all":
            made[target.path] = random_matrices(target, rank, tuple(range(len(target.widths))), rng)
    return Adapter(str(number), bytes([number]), rank, made)


class Steps:
    """Decode steps of an engine whose rows have given adapters."""

    def __init__(self, engine: Engine, rows: int, places: list[int]):
        self.runner = engine.runner
        self.rows = rows
        self.places = places
        shape = next(shape for shape in engine.shapes if shape.decode_only and shape.rows >= rows)
        self.program = self.runner.programs.choose(shape, Sampler.GREEDY, TOKENS, False)
        self.packed = shape.empty(self.runner.num_slots)
        field = {name: self.packed[at : at + size] for name, (at, size) in shape.fields.items()}
        field["tokens"][:rows] = 0
        field["slot"][:rows] = np.arange(rows)
        field["num_new"][:rows] = TOKENS
        field["q_start"][: rows + 1] = np.arange(rows + 1)
        field["q_start"][rows + 1 :] = rows
        field["tokens_per_call"][0] = TOKENS
        field["num_decodes"][0] = rows

    def seconds(self) -> float:
        """Seconds of a step of one token per row."""
        params = SamplingParams(temperature=0.0)
        slots = [encode_slot(i, params, 0, (), 1, 0, CONTEXT, self.places[i]) for i in range(self.rows)]
        self.runner.set_slots(slots)
        jax.block_until_ready(self.runner.slots)
        start = time.perf_counter()
        jax.block_until_ready(self.runner.step(self.program, self.packed)[0].tokens)
        return (time.perf_counter() - start) / TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="100M")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--modules", choices=("all", "qv"), default="all")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--adapter-dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--repeats", type=int, default=12)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[given.shape]))
        made = []
        for enabled in (False, True):
            pool = {"enable_lora": True, "max_loras": given.rows, "max_lora_rank": given.rank} if enabled else {}
            pool |= {"lora_dtype": given.adapter_dtype}
            settings = {"load_format": "dummy", "max_num_seqs": given.rows, "kv_pages": 64 + given.rows, **pool}
            made.append(Engine.load(EngineConfig(model=folder, dtype=given.dtype, **settings), progress=False))
    without, engine = made
    for place in range(given.rows):
        for write in engine.runner.adapter_uploads(place, random_adapter(engine, place, given.rank, given.modules)):
            write()
    nobody = [NO_ADAPTER] * given.rows
    kinds = {
        "without a pool": Steps(without, given.rows, nobody),
        "no adapter": Steps(engine, given.rows, nobody),
        "one adapter": Steps(engine, given.rows, [0] * given.rows),
        "an adapter each": Steps(engine, given.rows, list(range(given.rows))),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(1 + given.repeats):
        for name, steps in kinds.items():
            times[name].append(steps.seconds())
    seconds = {name: statistics.median(some[1:]) for name, some in times.items()}
    base = seconds["without a pool"]
    cost = {name: round(1 - base / value, 4) for name, value in seconds.items()}  # of tokens per second
    print(json.dumps({**vars(given), "seconds": seconds, "tokens per second lost": cost}, indent=1))


if __name__ == "__main__":
    main()
