"""Stages `kernels` (benchmarks/kernels.py with its peers) and `peers` (transformers' continuous batching)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxserve.bench.kernel_cases import Case
from light.record import Record, read
from light.table import best


def run_kernels(record: Record, *, rehearse: bool) -> None:
    """Runs the cases of benchmarks/kernels.py. A row is one case, with a result for each backend and peer."""
    import jax
    import kernels

    from jaxserve.pallas_kernels.registry import Device
    from jaxserve.pallas_kernels.tuning import timing

    platform = Device.of(jax.devices()[0]).platform
    ceilings = best(read(record.path.parent / "run.json")) or timing.ceilings(platform)
    able, absent = kernels.contestants(list(kernels.COLORS))
    record.note(ceilings=ceilings, absent=absent)
    for case in kernel_cases(platform, rehearse):
        if not record.take(key := f"{case.part} {case.name}"):
            continue
        with record.row(key) as row:
            row["results"] = list(kernels.Comparison(case, ceilings).rows(able))
            for status in ("failed", "wrong"):
                names = [one["backend"] for one in row["results"] if one["status"] == status]
                if names:
                    row["status"] = status
                    row["reason"] = "; ".join(f"{x['backend']}: {x['reason']}" for x in row["results"] if "reason" in x)


def kernel_cases(platform: str, rehearse: bool) -> list[Case]:
    """The cases in turn from each operation, so that each has some when the time is over."""
    from jaxserve.bench.kernel_shapes import OPERATIONS, cases
    from jaxserve.config import default_page_size

    sizes = "small" if rehearse else "full"
    dtype = "float32" if platform == "cpu" else "bfloat16"
    found = list(cases(sizes, dtype, default_page_size(platform)))
    parts = ("decode", "matmul") if rehearse else OPERATIONS
    queues = {part: iter([case for case in found if case.part == part]) for part in parts}
    in_turn = list(_in_turn(queues))
    return in_turn[:4] if rehearse else in_turn


def _in_turn(queues: dict[str, Iterator[Case]]) -> Iterator[Case]:
    while queues:
        for part, queue in list(queues.items()):
            if (case := next(queue, None)) is None:
                del queues[part]
            else:
                yield case


def run_peers(record: Record, *, rehearse: bool) -> None:
    """Runs the load of the engine's stages on transformers, on the same device, with weights of equal shape."""
    from light.decode import FORMS, SHAPE, SMALL, load_of

    load = load_of(FORMS[0], rehearse)
    model: Any = None
    for batch in load.batches:
        if record.take(key := f"transformers continuous, {batch} rows"):
            with record.row(key) as row:
                model = model or _model(SMALL if rehearse else SHAPE, rehearse)
                row |= _measure(model, batch, load) | {"weights": "transformers, bf16", "rows": batch}


def _model(shape: dict[str, Any], rehearse: bool) -> Any:
    import torch
    import transformers

    if not (rehearse or torch.cuda.is_available()):
        raise RuntimeError("this torch sees no GPU")
    config = transformers.LlamaConfig(**{key: x for key, x in shape.items() if key not in ("architectures",)})
    dtype = torch.float32 if rehearse else torch.bfloat16
    with torch.device("cpu" if rehearse else "cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model = model.eval()
    model.generation_config = transformers.GenerationConfig()  # so that nothing ends an answer early
    return model


def _measure(model: Any, batch: int, load: Any) -> dict[str, Any]:
    import numpy as np
    import torch
    import transformers
    from peers.torch_engine import continuous

    from jaxserve.bench.local import random_ids
    from jaxserve.pallas_kernels.alone import alone

    prompts = random_ids(np.random.default_rng(batch), model.config.vocab_size, batch, load.cached)
    answer: Callable[..., Any] = continuous
    answer(model, prompts[:1], 8, 1)  # warm-up
    with alone():
        began = time.perf_counter()
        answers = answer(model, prompts, load.tokens + 1, batch)
    ended = max(one["end"] for one in answers)
    spans = [one["arrivals"][-1] - one["arrivals"][0] for one in answers if len(one["arrivals"]) > 1]
    return {
        "output_tokens_per_s": sum(len(one["tokens"]) for one in answers) / (ended - began),
        "token_ms": 1e3 * float(np.median(spans)) / load.tokens,
        "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
    }
