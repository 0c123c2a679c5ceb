"""Small models whose decode steps tell the rates of a device, with weights in the form of those of a planned model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.layouts import device_bytes
from jaxserve.plan.constants import RATE_SETTINGS
from jaxserve.plan.decode_steps import Point, Timed
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.roofline import Constants, Roofline

# The wide model's weights exceed a processor's cache in every form. The others have hardly any weights: their steps
# take what a call costs, and what each layer costs beside its work.
WIDE = "wide"
SHALLOW = "shallow"
DEEP = "deep"
CPU_SHAPES = {
    WIDE: {"hidden": 1024, "layers": 6, "head_dim": 64, "vocabulary": 16384},
    SHALLOW: {"hidden": 64, "layers": 2, "head_dim": 16, "vocabulary": 512},
    DEEP: {"hidden": 64, "layers": 12, "head_dim": 16, "vocabulary": 512},
}
LARGE_SHAPES = {  # on accelerators
    WIDE: {"hidden": 4096, "layers": 4, "head_dim": 128, "vocabulary": 65536},
    SHALLOW: {"hidden": 512, "layers": 2, "head_dim": 128, "vocabulary": 512},
    DEEP: {"hidden": 512, "layers": 12, "head_dim": 128, "vocabulary": 512},
}
ROWS = (1, 4, 12, 24)
SHORT = 32
LONG = 768
LIKE = 0.1  # bytes per number of a checkpoint's weights may differ by this share from those of the probe
NOISE = 1e-3  # a part of a step that seems to take less than this share of it is taken to be as long as that


def points(name: str) -> list[Point]:
    """The steps of a model of the probe that are timed."""
    if name != WIDE:
        return [Point(1, SHORT)]
    return [*(Point(rows, SHORT) for rows in ROWS), Point(ROWS[-1], LONG)]


def settings(config: EngineConfig, deployment: Deployment, folder: Path) -> dict[str, EngineConfig]:
    """Name -> settings of the probe's engines: those of `config` on which rates depend. Writes their files."""
    dtype = str(np.dtype(deployment.plan.model.dtype))
    on_cpu = deployment.device.platform == "cpu"
    shapes = CPU_SHAPES if on_cpu else LARGE_SHAPES
    kept: Any = {name: getattr(config, name) for name in RATE_SETTINGS}
    made = {}
    for name, shape in shapes.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(_llama(dtype, **shape)))
        made[name] = EngineConfig(
            model=str(folder / name), load_format="dummy", max_num_seqs=ROWS[-1], prefix_caching=False, **kept
        )
    return made


def _llama(dtype: str, hidden: int, layers: int, head_dim: int, vocabulary: int) -> dict[str, Any]:
    heads = hidden // head_dim
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "head_dim": head_dim,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 4,
        "intermediate_size": 11 * hidden // 4, "vocab_size": vocabulary, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": dtype,
    }  # fmt: skip


def check_form(model: Deployment, wide: Deployment) -> None:
    """Raises ConfigError if the weights of the planned model are in no form that the probe's can have."""
    given = _bytes_per_number(model)
    own = _bytes_per_number(wide)
    if abs(given / own - 1) > LIKE:
        raise ConfigError(
            f"--measure has no probe for weights like the checkpoint's, of {given:.2f} bytes a number (the probe's "
            f"have {own:.2f}): plan a checkpoint in floats, with --quantization int8, int4 or fp8 if they shall be "
            "quantized, or leave out --measure"
        )


def _bytes_per_number(deployment: Deployment) -> float:
    """Bytes of the layers' matrices on a device by their numbers."""
    params = deployment.params
    matrices = [w for path, w in params.items() if path.startswith("layers_") and len(w.shape) > 1]
    stored = sum(device_bytes(x) for x in jax.tree.leaves(matrices))
    return stored / sum(math.prod(w.shape) for w in matrices)


def fit(start: Constants, probes: Mapping[str, Roofline], times: Mapping[str, Mapping[Point, Timed]]) -> Constants:
    """The rates with which the probe's steps take the times that were measured.

    Args:
      start: rates that the probe does not tell: links between devices, and products where they overlap with reading.
      probes: count the work of the probe's models, by name.
      times: name -> point -> time of a step.
    """
    wide, (call, layer) = probes[WIDE], _beside(probes, times)
    work = {point: wide.work(point.batch, point.batch, np.full(point.batch, point.context)) for point in points(WIDE)}
    left = {point: max(times[WIDE][point].best - call - layer * wide.layers, 1e-9) for point in work}
    short = [Point(rows, SHORT) for rows in ROWS]
    longer = Point(ROWS[-1], LONG)
    added = max(left[longer] - left[short[-1]], NOISE * left[longer])
    cache = (work[longer].cached - work[short[-1]].cached) / added
    taken = np.array([left[point] - work[point].cached / cache for point in short]).clip(1e-9)
    # Relative least squares. The few sequences of these steps wait for weights only, where that overlaps with products.
    parts = [[work[point].weights, 0 if start.overlaps else work[point].products] for point in short]
    each, *_ = np.linalg.lstsq(np.array(parts) / taken[:, None], np.ones(len(short)), rcond=None)
    bandwidth, matmul = (
        1 / max(one, NOISE * taken[0] / max(part, 1)) for one, part in zip(each, parts[0], strict=True)
    )
    return replace(
        start,
        launch=0.0,
        source="measured",
        when=date.today().isoformat(),
        bandwidth=float(bandwidth),
        cache=float(cache),
        call=call,
        layer=layer,
        matmul=start.matmul if start.overlaps else float(matmul),
    )


def _beside(probes: Mapping[str, Roofline], times: Mapping[str, Mapping[Point, Timed]]) -> tuple[float, float]:
    """Seconds of a call, and of each layer, beside the work."""
    shallow, deep = (times[name][Point(1, SHORT)].best for name in (SHALLOW, DEEP))
    layer = max(deep - shallow, 0.0) / (probes[DEEP].layers - probes[SHALLOW].layers)
    return max(shallow - probes[SHALLOW].layers * layer, 0.0), layer
