"""Calibration: statistics of the inputs of linear layers. The decoder runs over texts one layer at a time.

The activations between two layers are kept in a file, float32 [samples, length, hidden], from which the next layer
continues, possibly in another process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxserve.checkpoints.export import complete_file
from jaxserve.checkpoints.load import Piece, Pieces, Stack
from jaxserve.config import ConfigError
from jaxserve.convert.products import Product
from jaxserve.devices.mesh import make_mesh
from jaxserve.execution.cache_kinds import cache_kind
from jaxserve.models.decoder import Decoder, added, angles
from jaxserve.models.spec import LayerSpec
from jaxserve.pallas_kernels.experts import ExpertWeights, MixtureOptions, mixture
from jaxserve.pallas_kernels.ops import Gate, Ops, matmul
from jaxserve.text.tokenizer import Tokenizer

PAGE = 16  # tokens in a page of the cache that attention is computed through
FEWEST = 256  # tokens that an expert is measured on, if the text has so many


class Statistics(NamedTuple):
    """Sums over the inputs x [tokens, in] of a linear layer: xᵀx [in, in] and |x| [in]."""

    hessian: jax.Array
    magnitude: jax.Array


@dataclass
class Measured:
    """What the matrices of a layer see: statistics by the path of their kernel; of experts the tokens.

    Attributes:
      tokens: inputs of the experts, float32 [tokens, hidden].
      chosen: the experts of each of these tokens, int32 [tokens, top_k].
      gate_up: the experts' first matrices, [experts, 2 * size, hidden], rows of gate and up in turns.
      gate: [rows, size, 2] -> [rows, size], the activation of the experts' MLPs.
    """

    statistics: dict[str, Statistics]
    tokens: np.ndarray
    chosen: np.ndarray
    gate_up: jax.Array | None
    gate: Gate
    _last: tuple[Product, Statistics] | None = None  # gate and up of an expert are asked for one after the other

    def of(self, product: Product) -> Statistics:
        if product.expert is None:
            return self.statistics[product.path]
        if self._last is None or self._last[0] != product:
            self._last = product, self._of_expert(product.path, product.expert)
        return self._last[1]

    def _of_expert(self, path: str, expert: int) -> Statistics:
        """Statistics of the tokens that were routed to an expert. If they are fewer than FEWEST, other tokens evenly
        spread over the text are added: an expert that saw none is measured on what the other experts see."""
        assert self.gate_up is not None
        own = (self.chosen == expert).any(1)
        number = int(own.sum())
        taken = np.flatnonzero(own)
        others = np.flatnonzero(~own)
        if number < FEWEST and len(others):
            spread = np.linspace(0, len(others) - 1, min(FEWEST - number, len(others))).round().astype(int)
            taken = np.concatenate([taken, others[spread]])
        padded = 1 << (len(taken) - 1).bit_length()  # rows of zeros change no sum, and few shapes are compiled
        x = np.zeros((padded, self.tokens.shape[1]), np.float32)
        x[: len(taken)] = self.tokens[taken]
        return _of_rows(jnp.asarray(x), self.gate_up[expert] if path.endswith("down") else None, self.gate)


@partial(jax.jit, static_argnames="gate")
def _of_rows(x: jax.Array, gate_up: jax.Array | None, gate: Gate) -> Statistics:
    """Statistics of x [tokens, in], or of the gated results of `gate_up`, if given."""
    return _statistics(x if gate_up is None else gate(matmul(x, gate_up).reshape(len(x), -1, 2)))


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
        if isinstance(parts, Stack):
            for number, member in enumerate(parts.members):
                _fill(host[number], member, tensors)
        else:
            _fill(host, parts, tensors)
        params[path] = jnp.asarray(host)
    return params


def _fill(host: np.ndarray, pieces: list[Piece], tensors: Mapping[str, np.ndarray]) -> None:
    for piece in pieces:
        value = tensors[piece.name]
        value = value.T if piece.is_transposed(value.shape) else value
        value = value if piece.take is None else piece.take(value)
        piece.view(host)[...] = value if piece.split is None else value.reshape(piece.split)


def begin(decoder: Decoder, params: Mapping[str, jax.Array], windows: np.ndarray, path: Path) -> None:
    """Writes the first layer's inputs. `params` are those outside of the layers."""
    tree = unflatten_dict(dict(params), sep="/")
    positions = jnp.arange(windows.shape[1])
    inputs = jax.jit(lambda ids: decoder.apply({"params": tree}, ids, positions, decoder.ops, method="begin")[0])
    _write(path, (*windows.shape, decoder.config.hidden_size), (inputs(ids) for ids in windows))


def measure(decoder: Decoder, layer: int, params: Mapping[str, jax.Array], inputs: Path) -> Measured:
    """What the matrices of a decoder layer see."""
    spec = decoder.config.layers[layer]
    total: Any = None
    tokens = []
    chosen = []
    for x in np.load(inputs, mmap_mode="r"):
        _, seen, routed = _forward(decoder, spec, dict(params), x)
        total = seen if total is None else jax.tree.map(jnp.add, total, seen)
        tokens += [np.asarray(given) for given, _ in routed]
        chosen += [np.asarray(numbers) for _, numbers in routed]
    assert spec.mlp is not None, "see `products.check_calibration`"
    mlp = spec.mlp
    gate = Ops().gate_of(mlp.activation, mlp.limit, mlp.bound, mlp.bound_first)
    empty = [np.zeros((0, 0), np.float32)]
    return Measured(
        total, np.concatenate(tokens or empty), np.concatenate(chosen or empty), params.get("mlp/experts_gate_up"), gate
    )


def measure_rows(inputs: Path, transform: Any) -> Statistics:
    """Statistics of a linear layer whose inputs are `transform` of the activations."""
    total = (_statistics(transform(x)) for x in np.load(inputs, mmap_mode="r"))
    return reduce(partial(jax.tree.map, jnp.add), total)


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
) -> tuple[jax.Array, dict[str, Statistics], list[tuple[jax.Array, jax.Array]]]:
    """x [tokens, hidden], a text from its beginning -> the layer's output, statistics of its linear layers, and of its
    experts the inputs and the choice of the router."""
    paths = {id(value): path for path, value in params.items()}
    seen: dict[str, Statistics] = {}
    routed: list[tuple[jax.Array, jax.Array]] = []

    def recording(x: jax.Array, w: jax.Array, count: jax.Array | None = None) -> jax.Array:
        seen[paths[id(w)]] = _statistics(x)
        return matmul(x, w)

    def mixing(
        x: jax.Array, chosen: jax.Array, weights: jax.Array, w: ExpertWeights, **options: Unpack[MixtureOptions]
    ) -> jax.Array:
        routed.append((x, chosen))
        return mixture(x, chosen, weights, w, **options)

    def attend(heads: Any) -> jax.Array:
        kind = cache_kind(decoder.config, decoder.kv_heads, x.dtype, "cpu")
        tokens = len(x)
        pages = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), kind.pages(-(-tokens // PAGE), PAGE))
        table = jnp.arange(-(-tokens // PAGE), dtype=jnp.int32)[None]
        ends = jnp.array([tokens], jnp.int32)
        where = (jnp.arange(tokens), table, jnp.array([0, tokens], jnp.int32), ends, jnp.int32(0), jnp.int32(0))
        return kind.attend(layer, ops, heads, pages, where, make_mesh(), x.dtype, False)[0]

    ropes = angles(decoder.config, jnp.arange(len(x)))
    ops = Ops(matmul=recording, mixture=mixing)
    layer = decoder.layer(spec)
    output: Any = layer.apply({"params": unflatten_dict(params, sep="/")}, x, None, ropes, attend, ops)
    return added(*output), seen, routed


@partial(jax.jit, static_argnames=("decoder", "spec"))
def _output(decoder: Decoder, spec: LayerSpec, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return _forward(decoder, spec, params, x)[0]
