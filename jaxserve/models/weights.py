"""Where each tensor of a checkpoint goes in the decoder's parameter tree.

A family names its tensors by role (`Names`); this file knows the tree of `decoder.Decoder` and how roles are fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from jaxserve.checkpoints.load import Piece, Pieces
from jaxserve.devices.mesh import sharding
from jaxserve.models.decoder import Decoder
from jaxserve.models.expert_weights import expert_pieces
from jaxserve.models.quantized import quantized_abstract, random_weight
from jaxserve.models.spec import AttentionSpec, LayerSpec
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import QuantArray

# Role -> name in the checkpoint; "{i}" is the layer, "{e}" the expert. Roles: embed, norm, head, attention_norm,
# mlp_norm, q, k, v, o, q_norm, k_norm, gate, up, down, router, shared_gate, shared_up, shared_down, shared_expert_gate;
# of experts expert_gate, expert_up, expert_down, or fused expert_gate_up and expert_fused_down (`expert_weights`);
# biases add ".bias", weights have ".weight"; "correction" is the routers' correction bias. A file may stack experts:
# the stack's name is the expert's without "{e}.".
Names = Mapping[str, str]


@dataclass(frozen=True)
class _Source:
    """A role's tensor, the shape it must have in the file, and its place in the host array of our weight."""

    role: str
    shape: tuple[int, ...]
    view: Callable[[np.ndarray], np.ndarray]
    split: tuple[int, ...] | None = None


def _whole(target: np.ndarray) -> np.ndarray:
    return target


def abstract_params(model: Decoder, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape, dtype and sharding of every parameter, as the modules declare them.

    Equal layers have equal parameters, so of each kind one is traced.
    """
    layers = model.config.layers
    kinds = tuple(dict.fromkeys(layers))
    # The CPU's own operations may still be being built.
    model = model.clone(ops=Ops(), config=replace(model.config, layers=kinds))
    boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(1, jnp.int32), method="init_all")["params"])

    def leaf(box: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(box.value.shape, box.value.dtype, sharding=sharding(mesh, *box.names))

    tree = jax.tree.map(leaf, boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    of_kind = {kind: tree.pop(f"layers_{i}") for i, kind in enumerate(kinds)}
    tree |= {f"layers_{i}": of_kind[layer] for i, layer in enumerate(layers)}
    return flatten_dict(dict(sorted(tree.items())), sep="/")


def dummy_params(model: Decoder, mesh: Mesh, seed: int, scheme: str | None = None) -> dict[str, Any]:
    """Random weights by the modules' own initialisers, made on the devices; with a `scheme`, quantized ones."""
    abstract: dict[str, Any] = dict(abstract_params(model, mesh))
    if scheme:
        abstract = quantized_abstract(abstract, scheme)
    model = model.clone(ops=Ops())

    def init() -> dict[str, Any]:
        key = jax.random.key(seed)
        boxed = model.init(key, jnp.zeros(1, jnp.int32), method="init_all")["params"]
        plain = flatten_dict(nn.meta.unbox(boxed), sep="/")  # the compiler leaves out what is replaced here
        for i, (path, target) in enumerate(abstract.items()):
            if isinstance(target, QuantArray):
                plain[path] = random_weight(jax.random.fold_in(key, i), target)
        return {path: plain[path] for path in abstract}

    flat = jax.jit(init, out_shardings=jax.tree.map(lambda a: a.sharding, abstract))()
    return unflatten_dict(flat, sep="/")


def weight_pieces(model: Decoder, names: Names, has: Callable[[str], bool] = lambda name: True) -> dict[str, Pieces]:
    """Path -> the tensors of the checkpoint that make it up. `has`: whether it has a weight of this name, where a
    family's files store experts in several ways."""
    config = model.config
    pieces: dict[str, Pieces] = {}

    def add(path: str, sources: list[_Source], layer: int | None = None) -> None:
        pieces[path] = [Piece(names[s.role].format(i=layer), s.shape, s.view, s.split) for s in sources]

    hidden, vocab = config.hidden_size, config.vocab_size
    add("embed/table", [_Source("embed.weight", (vocab, hidden), _whole)])  # rows beyond the vocabulary stay zero
    add("norm/scale", [_Source("norm.weight", (hidden,), _whole)])
    if not config.tie_embeddings:
        add("head/kernel", [_Source("head.weight", (vocab, hidden), _whole)])
    for i, layer in enumerate(config.layers):
        for path, sources in _layer(model, layer).items():
            add(f"layers_{i}/{path}", sources, i)
        if layer.mlp.experts:
            made = expert_pieces(layer.mlp, hidden, names, i, has)
            pieces |= {f"layers_{i}/{path}": some for path, some in made.items()}
    return pieces


def _layer(model: Decoder, spec: LayerSpec) -> dict[str, list[_Source]]:
    config, attention = model.config, spec.attention
    hidden, width, dim = config.hidden_size, spec.mlp.size, attention.head_dim
    layer = {
        "attention_norm/scale": [_Source("attention_norm.weight", (hidden,), _whole)],
        "mlp_norm/scale": [_Source("mlp_norm.weight", (hidden,), _whole)],
        "attention/qkv/kernel": _qkv(attention, model.kv_heads, "weight", (hidden,)),
        "attention/out/kernel": [_Source("o.weight", (hidden, attention.num_heads * dim), _whole)],
    }
    if not spec.mlp.experts:
        layer["mlp/gate_up/kernel"] = [
            _Source("gate.weight", (width, hidden), lambda t: t.reshape(width, 2, -1)[:, 0]),
            _Source("up.weight", (width, hidden), lambda t: t.reshape(width, 2, -1)[:, 1]),
        ]
        layer["mlp/down/kernel"] = [_Source("down.weight", (hidden, width), _whole)]
    if attention.qkv_bias:
        layer["attention/qkv/bias"] = _qkv(attention, model.kv_heads, "bias", ())
    if attention.out_bias:
        layer["attention/out/bias"] = [_Source("o.bias", (hidden,), _whole)]
    if spec.mlp.bias and not spec.mlp.experts:
        layer["mlp/gate_up/bias"] = [
            _Source("gate.bias", (width,), lambda t: t[:, 0]),
            _Source("up.bias", (width,), lambda t: t[:, 1]),
        ]
        layer["mlp/down/bias"] = [_Source("down.bias", (hidden,), _whole)]
    if attention.qk_norm:
        layer["attention/q_norm/scale"] = [_Source("q_norm.weight", (dim,), _whole)]
        layer["attention/k_norm/scale"] = [_Source("k_norm.weight", (dim,), _whole)]
    return layer


def _qkv(spec: AttentionSpec, kv_heads: int, kind: str, inputs: tuple[int, ...]) -> list[_Source]:
    """[kv_heads, group + 2, head_dim, *inputs], or the same with the first three as one, from query, key and value;
    keys and values repeat over kv_heads."""
    group, dim, own = spec.num_heads // kv_heads, spec.head_dim, spec.num_kv_heads
    columns = (-1,) * len(inputs)  # inputs of a weight, groups of inputs of its scales

    def by_head(target: np.ndarray) -> np.ndarray:
        return target.reshape(kv_heads, group + 2, dim, *columns)

    def query(target: np.ndarray) -> np.ndarray:
        return by_head(target)[:, :group]

    def shared(which: int) -> Callable[[np.ndarray], np.ndarray]:
        def view(target: np.ndarray) -> np.ndarray:
            heads = by_head(target)[:, which]
            return heads.reshape(own, kv_heads // own, *heads.shape[1:])

        return view

    kv_shape, kv_split = (own * dim, *inputs), (own, 1, dim, *columns)
    return [
        _Source(f"q.{kind}", (spec.num_heads * dim, *inputs), query, (kv_heads, group, dim, *columns)),
        _Source(f"k.{kind}", kv_shape, shared(group), kv_split),
        _Source(f"v.{kind}", kv_shape, shared(group + 1), kv_split),
    ]
