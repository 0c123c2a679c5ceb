"""Stages `kernels` (benchmarks/kernels.py with its peers) and `peers` (transformers' continuous batching)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from light.record import Record, read


def run_kernels(record: Record, *, rehearse: bool) -> None:
    """Runs every case of benchmarks/kernels.py, in its order. A row is one backend or one peer."""
    import jax
    import kernels

    from jaxserve.bench import timing
    from jaxserve.bench.kernel_shapes import cases
    from jaxserve.pallas_kernels.registry import Device
    from jaxserve.pallas_kernels.types import default_page_size

    platform = Device.of(jax.devices()[0]).platform
    ceilings = record.data["facts"].get("ceilings") or _ceilings(record) or timing.ceilings(platform)
    able, absent = kernels.contestants(list(kernels.COLORS))
    record.note(ceilings=ceilings, absent=absent)
    sizes, dtype = "small" if rehearse else "full", "float32" if platform == "cpu" else "bfloat16"
    chosen = list(cases(sizes, dtype, default_page_size(platform)))
    if rehearse:
        chosen = [case for case in chosen if case.part in ("decode", "matmul")][:4]
    for case in chosen:
        key = f"{case.part} {case.name}"
        if record.has(key):
            continue
        with record.row(key) as row:
            row["results"] = list(kernels.Comparison(case, ceilings).rows(able))
            for status in ("failed", "wrong"):
                names = [one["backend"] for one in row["results"] if one["status"] == status]
                if names:
                    row["status"] = status
                    row["reason"] = "; ".join(f"{x['backend']}: {x['reason']}" for x in row["results"] if "reason" in x)


def _ceilings(record: Record) -> dict[str, float] | None:
    for row in (read(record.path.parent / "device.json") or {}).get("rows", []):
        if "bytes_per_s" in row:
            return {name: float(row[name]) for name in ("bytes_per_s", "flops_per_s")}
    return None


def run_peers(record: Record, *, rehearse: bool) -> None:
    """Runs the load of the engine's stages on transformers, on the same device, with weights of equal shape."""
    from light.engine import LOADS, SHAPE, SMALL

    load = LOADS[rehearse]
    model: Any = None
    for batch in load.batches:
        key = f"transformers continuous, batch {batch}"
        if not record.has(key):
            with record.row(key) as row:
                model = model or _model(SMALL if rehearse else SHAPE, rehearse)
                row |= _measure(model, batch, load) | {"batch": batch}


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

    prompts = random_ids(np.random.default_rng(batch), model.config.vocab_size, batch, load.cached)
    answer: Callable[..., Any] = continuous
    answer(model, prompts[:1], 8, 1)  # warm-up
    began = time.perf_counter()
    answers = answer(model, prompts, load.tokens + 1, batch)
    ended = max(one["end"] for one in answers)
    spans = [one["arrivals"][-1] - one["arrivals"][0] for one in answers if len(one["arrivals"]) > 1]
    return {
        "output_tokens_per_s": sum(len(one["tokens"]) for one in answers) / (ended - began),
        "token_ms": 1e3 * float(np.median(spans)) / load.tokens,
        "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
    }
