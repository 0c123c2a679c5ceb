"""Calibration: statistics of the inputs of linear layers. The decoder runs over texts one layer at a time.

The activations between two layers are kept in a file, float32 [samples, length, hidden], from which the next layer
continues, possibly in another process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxserve.checkpoints.export import complete_file
from jaxserve.checkpoints.load import Pieces
from jaxserve.config import ConfigError
from jaxserve.models.decoder import Decoder, added, angles
from jaxserve.models.spec import AttentionSpec, LayerSpec
from jaxserve.pallas_kernels.ops import Ops, matmul
from jaxserve.pallas_kernels.parts import Heads
from jaxserve.text.tokenizer import Tokenizer


class Statistics(NamedTuple):
    """Sums over the inputs x [tokens, in] of a linear layer: xᵀx [in, in] and |x| [in]."""

    hessian: jax.Array
    magnitude: jax.Array


def read_windows(path: Path, tokenizer: Tokenizer, samples: int, length: int) -> np.ndarray:
    """Token ids [at most samples, length] of pieces spread evenly over a text file, or over the "text" of JSON lines.

    Raises ConfigError when the text is shorter than one piece.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            text = "\n\n".join(json.loads(line)["text"] for line in text.splitlines() if line.strip())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{path} is no calibration text, nor JSON lines with a "text" each: {error!r}') from None
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    windows = ids[: len(ids) // length * length].reshape(-1, length)
    if not len(windows):
        raise ConfigError(f"{path} has {len(ids)} tokens; one calibration sample is {length} (see --length)")
    chosen = np.linspace(0, len(windows) - 1, min(samples, len(windows))).round().astype(int)
    return windows[chosen]


def fuse(pieces: Mapping[str, Pieces], shapes: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict:
    """Parameters by path, float32 on the device, assembled from the checkpoint's tensors by name."""
    params = {}
    for path, parts in pieces.items():
        host = np.zeros(shapes[path].shape, np.float32)
        for piece in parts:
            value = tensors[piece.name] if piece.take is None else piece.take(tensors[piece.name])
            piece.view(host)[...] = value if piece.split is None else value.reshape(piece.split)
        params[path] = jnp.asarray(host)
    return params


def embed(table: np.ndarray, windows: np.ndarray, path: Path) -> None:
    """Writes the first layer's inputs."""
    _write(path, (*windows.shape, table.shape[1]), (table[ids] for ids in windows))


def measure(decoder: Decoder, layer: int, params: Mapping[str, jax.Array], inputs: Path) -> dict[str, Statistics]:
    """Statistics of the inputs of a decoder layer's linear layers, by the path of their kernel."""
    spec = decoder.config.layers[layer]
    return _total(_forward(decoder, spec, dict(params), x)[1] for x in np.load(inputs, mmap_mode="r"))


def measure_rows(inputs: Path, transform: Any) -> Statistics:
    """Statistics of a linear layer whose inputs are `transform` of the activations."""
    return _total(_statistics(transform(x)) for x in np.load(inputs, mmap_mode="r"))


def _total(statistics: Iterable[Any]) -> Any:
    return reduce(partial(jax.tree.map, jnp.add), statistics)


def advance(decoder: Decoder, layer: int, params: Mapping[str, jax.Array], inputs: Path, outputs: Path) -> None:
    """Runs a decoder layer over `inputs` and writes its outputs."""
    given = np.load(inputs, mmap_mode="r")
    spec = decoder.config.layers[layer]
    _write(outputs, given.shape, (_output(decoder, spec, dict(params), x) for x in given))


def _write(path: Path, shape: tuple[int, ...], samples: Any) -> None:
    with complete_file(path) as partial_path:
        file = np.lib.format.open_memmap(partial_path, "w+", np.float32, shape)
        for i, sample in enumerate(samples):
            file[i] = sample
        file.flush()


def _statistics(x: jax.Array) -> Statistics:
    return Statistics(x.T @ x, jnp.abs(x).sum(0))


@partial(jax.jit, static_argnames=("decoder", "spec"))
def _forward(
    decoder: Decoder, spec: LayerSpec, params: dict[str, jax.Array], x: jax.Array
) -> tuple[jax.Array, dict[str, Statistics]]:
    """x [tokens, hidden], a text from its beginning -> the layer's output, and statistics of its linear layers."""
    paths = {id(value): path for path, value in params.items()}
    seen: dict[str, Statistics] = {}

    def recording(x: jax.Array, w: jax.Array, count: jax.Array | None = None) -> jax.Array:
        seen[paths[id(w)]] = _statistics(x)
        return matmul(x, w)

    def attend(heads: Heads) -> jax.Array:
        assert isinstance(spec.attention, AttentionSpec)
        q, k, v = layer.ops.rotate(heads, layer.norm_eps, x.dtype)
        scores = jnp.einsum("tkgd,skd->kgts", q, k) * spec.attention.softmax_scale
        back = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
        visible = (back >= 0) & (back < (spec.attention.window or len(q)))
        return jnp.einsum("kgts,skd->tkgd", jax.nn.softmax(jnp.where(visible, scores, -1e30)), v)

    config = decoder.config
    ropes = angles(config, jnp.arange(len(x)))
    layer = decoder.clone(ops=Ops(matmul=recording)).layer(spec, parent=None)
    output: Any = layer.apply({"params": unflatten_dict(params, sep="/")}, x, None, ropes, attend)
    return added(*output), seen


@partial(jax.jit, static_argnames=("decoder", "spec"))
def _output(decoder: Decoder, spec: LayerSpec, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return _forward(decoder, spec, params, x)[0]
