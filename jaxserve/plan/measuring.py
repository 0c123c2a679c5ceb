"""Measures this machine's CPU with a small model of the same form of weights, and keeps the rates.

A probe decodes at several batches. Reading weights and multiplying add up there, so the times are linear in the batch;
two rates are fitted, which then predict other models. The planned model itself is measured beside its prediction.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.roofline import Constants, Roofline
from jaxserve.types import Request, SamplingParams

BATCHES, CONTEXT, STEPS, ROUNDS = (1, 8, 32), 32, 8, 3
PROBE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 16384,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    "torch_dtype": "float32",
}  # fmt: skip


def default_path() -> Path:
    """The file with measured rates in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jaxserve" / "plan-constants.json"


def read(path: Path, required: bool) -> dict[str, Any]:
    """Kind of device -> form of weights -> constants. Raises ConfigError for an invalid file, or a missing one."""
    if not path.exists() and not required:
        return {}
    try:
        given = json.loads(path.read_text())
        return {kind: {form: Constants(**one) for form, one in forms.items()} for kind, forms in given.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no constants that `jaxserve plan --measure` wrote: {error}") from None


def of_form(constants: Mapping[str, Any], config: EngineConfig) -> dict[str, Constants]:
    """Kind of device -> constants for this form of weights."""
    return {kind: forms[form(config)] for kind, forms in constants.items() if form(config) in forms}


def form(config: EngineConfig) -> str:
    return f"{config.quantization} {config.dtype}"


def measure(config: EngineConfig, path: Path) -> dict[str, Any]:
    """Fits the rates with a probe, keeps them in `path`, and measures the model: batch -> seconds of a decode step.
    The engines run in turns, since other processes may slow a machine down for a while."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(PROBE))
        settings: Any = {"max_num_seqs": max(BATCHES), "kv_pages": 600, "max_model_len": 512, "decode_steps": 1}
        small = replace(config, model=folder, load_format="dummy", **settings)
        large = replace(config, **settings)
        engines = [Engine.load(one, progress=False) for one in (small, large)]
        probe = Deployment.of(small, "cpu")
    found: list[dict[int, list[float]]] = [{batch: [] for batch in BATCHES} for _ in engines]
    for _ in range(ROUNDS):
        for batch in BATCHES:
            for engine, times in zip(engines, found, strict=True):
                times[batch].append(decode_seconds(engine, batch))
    of_probe, of_model = ({batch: statistics.median(one) for batch, one in times.items()} for times in found)
    fitted = fit(probe, of_probe)
    kept = {kind: {name: asdict(one) for name, one in forms.items()} for kind, forms in read(path, False).items()}
    kept.setdefault(jax.devices()[0].device_kind, {})[form(config)] = asdict(fitted)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return {"context": CONTEXT + STEPS // 2, "decode": {str(batch): seconds for batch, seconds in of_model.items()}}


def decode_seconds(engine: Engine, batch: int) -> float:
    """The median time of a step in which `batch` sequences gain a token each."""
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    rng = np.random.default_rng(0)
    for i in range(batch):
        prompt = rng.integers(8, 1000, CONTEXT).tolist()
        engine.add_request(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
    running = engine.scheduler.running
    while len(running) < batch or min(int(running.known[seq.slot]) for seq in running) <= CONTEXT + 1:
        engine.step()
        running = engine.scheduler.running
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    for i in range(batch):
        engine.abort(str(i))
    while engine.has_work:
        engine.step()
    engine.reset_prefix_cache()
    return statistics.median(times)


def fit(deployment: Deployment, seconds: Mapping[int, float]) -> Constants:
    """The rates with which the roofline comes closest to measured steps, relative to each."""
    unit = replace(Constants.of(deployment), bandwidth=1.0, matmul=1.0, source="measured")
    rows, weights = [], []
    for batch, measured in seconds.items():
        one = Roofline(deployment, unit).decode(batch, CONTEXT + STEPS // 2)
        left = max(measured - unit.call, measured / 2)
        rows.append([one.weights / left, one.products / left])
        weights.append(1.0)
    slopes, *_ = np.linalg.lstsq(np.array(rows), np.array(weights), rcond=None)
    slow = np.maximum(slopes, 1e-13)
    return replace(unit, bandwidth=float(1 / slow[0]), matmul=float(1 / slow[1]))


def lines(measured: Mapping[str, Any] | None, plan: Mapping[str, Any]) -> Iterator[str]:
    """Measured beside predicted."""
    if measured is None or not plan["fits"]:
        return
    yield "  batch   measured ms   predicted ms   (a decode step)"
    for batch, seconds in measured["decode"].items():
        near = min(
            (one for one in plan["roofline"]["decode"] if one["batch"] == int(batch)), key=lambda x: x["context"]
        )
        yield f"  {batch:>5} {1e3 * seconds:13.2f} {1e3 * near['tpot']:14.2f}   ({near['context']} tokens of context)"
