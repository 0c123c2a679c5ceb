"""The place of each tensor of a checkpoint in the decoder's parameter tree.

A family names its tensors by role (`Names`). This file knows the tree of `decoder.Decoder`, and how roles are fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from jaxserve.checkpoints.load import Pieces
from jaxserve.devices.mesh import sharding
from jaxserve.models.affine import affine_sources, begin_sources
from jaxserve.models.altup import altup_sources, stream_sources
from jaxserve.models.compressed import compressed_sources
from jaxserve.models.decoder import Decoder
from jaxserve.models.differential import difference_sources
from jaxserve.models.drafter import Drafter
from jaxserve.models.expert_weights import expert_pieces
from jaxserve.models.gated_streams import gated_sources, last_sources
from jaxserve.models.hyper import head_sources, hyper_sources
from jaxserve.models.layers import XIELU_SHAPES, Declared
from jaxserve.models.memory import memory_sources
from jaxserve.models.ngrams import ngram_sources
from jaxserve.models.normed_experts import normed_sources
from jaxserve.models.per_layer import gate_sources, vector_sources
from jaxserve.models.pooled_choice import pooled_sources
from jaxserve.models.quantized import quantized_abstract, random_weight
from jaxserve.models.recurrent import recurrent_sources
from jaxserve.models.rope import head_order
from jaxserve.models.routed_attention import routed_sources
from jaxserve.models.sources import Names, Source, latent_sources, rows, whole
from jaxserve.models.spec import (
    AttentionSpec,
    BlockChoiceSpec,
    CompressedAttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    PooledChoiceSpec,
    QKNormSpec,
    RecurrentSpec,
)
from jaxserve.models.value_bias import value_bias_sources
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import QuantArray


def _has(names: Names, role: str) -> bool:
    return role in names or f"{role}.T" in names


def abstract_params(model: Decoder | Drafter, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape, dtype and sharding of every parameter, as the modules declare them."""
    return {path: form.abstract for path, form in _declared(model, mesh).items()}


class Form(NamedTuple):
    """What a parameter is.

    abstract: its shape, dtype and sharding, or a QuantArray of these.
    init: makes random numbers from a key, and from shape and dtype, or the QuantArray.
    """

    abstract: Any
    init: Callable[..., Any]


def _declared(model: Decoder | Drafter, mesh: Mesh) -> dict[str, Form]:
    """The parameters by their paths. Equal layers have equal parameters, so one layer of each kind is traced."""
    layers = model.config.layers
    kinds = tuple(dict.fromkeys(layers))
    # Plain operations: the CPU's own kernels may still be compiling.
    model = model.clone(ops=Ops(), config=replace(model.config, layers=kinds))
    boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(1, jnp.int32), method="init_all")["params"])

    def form(box: Declared) -> Form:
        value: Any = box.value
        return Form(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding(mesh, *box.names)), box.init)

    tree = jax.tree.map(form, boxed, is_leaf=lambda x: isinstance(x, Declared))
    of_kind = {kind: tree.pop(f"layers_{i}") for i, kind in enumerate(kinds)}
    tree |= {f"layers_{i}": of_kind[layer] for i, layer in enumerate(layers)}
    return of_stage(model, flatten_dict(dict(sorted(tree.items())), sep="/"))


T = TypeVar("T")


def of_stage(model: Decoder | Drafter, by_path: dict[str, T]) -> dict[str, T]:
    """Those entries of a dict by path in the parameters that the model's pipeline stage holds; usually all."""
    stage = getattr(model, "stage", None)
    tied = getattr(model.config, "tie_embeddings", False)
    return by_path if stage is None else {path: x for path, x in by_path.items() if stage.holds(path, tied=tied)}


def dummy_params(model: Decoder | Drafter, mesh: Mesh, seed: int, scheme: str | None = None) -> dict[str, Any]:
    """Random weights from the modules' own initialisers, made on the devices. A `scheme` makes quantized matrices."""
    return unflatten_dict(made_up(dummy_forms(model, mesh, scheme), seed, mesh), sep="/")


def dummy_forms(model: Decoder | Drafter, mesh: Mesh, scheme: str | None = None) -> dict[str, Form]:
    """What `dummy_params` makes, by path."""
    forms = _declared(model, mesh)
    if scheme is None:
        return forms
    stored = quantized_abstract({path: form.abstract for path, form in forms.items()}, scheme)
    return {
        path: Form(stored[path], random_weight) if isinstance(stored[path], QuantArray) else form
        for path, form in forms.items()
    }


def made_up(forms: Mapping[str, Form], seed: int, mesh: Mesh) -> dict[str, Any]:
    """Random weights of these forms, by path, each made where it stays. They depend on the seed and the path, so that
    they are the same in every stage of a pipeline.

    One program makes all weights of a form, so that the number of programs does not grow with the layers. On
    accelerators random bits come from XLA's own generator. It compiles and runs much faster than JAX's usual one, but
    gives other numbers where a weight is split differently.
    """
    kind = "threefry2x32" if mesh.devices.flat[0].platform == "cpu" else "rbg"
    programs: dict[Any, Callable[[np.uint32], Any]] = {}
    made = {}
    for path, form in forms.items():
        leaves, structure = jax.tree.flatten(form.abstract)
        key = form.init, structure, tuple(leaves)
        if key not in programs:
            programs[key] = _maker(form, seed, kind)
        made[path] = programs[key](np.uint32(crc32(path.encode())))
    return made


def _maker(form: Form, seed: int, kind: str) -> Callable[[np.uint32], Any]:
    """A jitted function of a number that stands for the weight."""

    def make(number: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(seed, impl=kind), number)
        like = form.abstract
        return form.init(key, like) if isinstance(like, QuantArray) else form.init(key, like.shape, like.dtype)

    return jax.jit(make, out_shardings=jax.tree.map(lambda a: a.sharding, form.abstract))


def weight_pieces(model: Decoder, names: Names, has: Callable[[str], bool] = lambda name: True) -> dict[str, Pieces]:
    """Path in the decoder's parameters -> the tensors of the checkpoint that make it up.

    `has` tells whether the checkpoint has a weight of a given name. It decides for families whose files store experts
    in several ways.
    """
    config = model.config
    pieces: dict[str, Pieces] = {}

    def add(sources: dict[str, list[Source]], prefix: str = "", layer: int | None = None) -> None:
        pieces.update({prefix + path: [s.piece(names, layer) for s in some] for path, some in sources.items()})

    hidden = config.hidden_size
    vocab = config.vocab_size
    size = config.embed_size or config.hidden_size
    add({"embed/table": [Source("embed.weight", (vocab, size), whole)]})  # rows beyond the vocabulary stay zero
    if config.norm is not None:
        add(norm_sources("norm", config.norm, hidden))
    if config.embed_norm is not None:
        add(norm_sources("embed_norm", config.embed_norm, hidden))
    if not config.tie_embeddings:
        add({"head/kernel": [Source("head.weight", (vocab, size), whole)]})
    if config.head_bias:
        add({"head/bias": [Source("head.bias", (vocab,), whole)]})
    if config.embed_size is not None:
        add({"project_in/kernel": [Source("project_in.weight", (hidden, size), whole)]})
        add({"project_out/kernel": [Source("project_out.weight", (size, hidden), whole)]})
    if (learned := config.learned_positions) is not None and learned.rows:
        add({"positions/table": [Source("positions.weight", (learned.rows, hidden), whole)]})
    ends = head_sources(config) | begin_sources(config) | last_sources(config)
    add(vector_sources(config) | stream_sources(config) | ends)
    for i, layer in enumerate(config.layers):
        add(layer_sources(model, layer, names), f"layers_{i}/", i)
        if layer.mlp is not None and layer.mlp.experts:
            made = expert_pieces(layer.mlp, hidden, names, i, has)
            pieces |= {f"layers_{i}/{path}": some for path, some in made.items()}
        if layer.ngrams is not None and layer.gated is not None:
            add(ngram_sources(layer.ngrams, (layer.gated.count, hidden), layer.norm, names, i, has), f"layers_{i}/", i)
    return pieces


_NORMS = {
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("attention_out_norm", "mlp_out_norm"),
    "sandwich": ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
    "scaled_sandwich": ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
    "altup": ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
    "hyper": ("attention_norm", "mlp_norm"),
    "shortcut": ("attention_norm", "mlp_norm"),
    "memory": ("attention_norm", "mlp_norm"),
    "affine": ("attention_norm", "mlp_norm"),
    "gated_streams": (),
    "weighed_skip": ("attention_norm", "mlp_norm"),
    "parallel": ("attention_norm",),
    "parallel_two_norms": ("attention_norm", "mlp_norm"),
    "post_ln": ("attention_norm", "mlp_norm"),
    "normed": ("attention_norm", "mlp_norm"),
    "layer_scale": ("attention_norm", "mlp_norm"),
    "normed_mlp": ("attention_norm", "mlp_norm", "mlp_out_norm"),
}


def layer_sources(
    model: Decoder | Drafter, spec: LayerSpec, names: Names, inputs: int | None = None
) -> dict[str, list[Source]]:
    """Path within a layer without experts, or in the layer beside its experts -> the sources of the weight. `inputs` is
    the size of the attention's input; None: the hidden size."""
    hidden = model.config.hidden_size
    attention = spec.attention
    block = spec.memory is not None and isinstance(attention, AttentionSpec)
    inputs = 2 * hidden if block else inputs
    layer: dict[str, list[Source]] = {}
    has = {"attention": attention is not None, "mlp": spec.mlp is not None}
    for name in _NORMS[spec.residual]:
        wide = 2 * hidden if block and name == "attention_norm" else hidden
        layer |= norm_sources(name, spec.norm, wide) if has[name.partition("_")[0]] else {}
    for name in spec.gated_norms:
        sizes = {"down": (spec.gate_rank, hidden), "up": (hidden, spec.gate_rank)}
        gates = {way: [Source(f"{name}_gate_{way}.weight", shape, whole)] for way, shape in sizes.items()}
        layer |= {f"{name}_gate/{way}/kernel": some for way, some in gates.items()}
    if isinstance(attention, RecurrentSpec):
        layer |= recurrent_sources(attention, hidden, names)
    elif isinstance(attention, CompressedAttentionSpec):
        layer |= compressed_sources(attention, hidden)
    elif attention is not None:
        order = head_order(model.config.ropes[attention.rope], attention.rotated_dim)
        if isinstance(attention, LatentAttentionSpec):
            layer |= latent_sources(attention, order, hidden)
        else:
            kv_heads = max(model.kv_heads, attention.num_kv_heads)
            if attention.experts:
                layer |= routed_sources(attention, order, hidden)
            elif spec.affine is not None:
                layer |= affine_sources(spec, order, hidden)
            else:
                layer |= _attention(attention, kv_heads, order, names, hidden, inputs or hidden)
    if spec.beside is not None and spec.affine is None:
        layer |= recurrent_sources(spec.beside.recurrent, hidden, names, "beside")
    if spec.residual == "scaled_sandwich":
        layer |= gate_sources(model.config) | {"scale": [Source("layer_scale", (1,), whole)]}
    if spec.residual == "layer_scale":
        layer |= {name: [Source(name, (hidden,), whole)] for name in ("attention_scale", "mlp_scale")}
    if spec.residual == "weighed_skip":
        layer |= {name: [Source(name, (hidden,), whole)] for name in ("attention_skip", "mlp_skip")}
    if spec.residual == "altup":
        layer |= altup_sources(model.config)
    if block:
        layer |= memory_sources(spec, hidden)
    if spec.residual == "hyper":
        layer |= hyper_sources(model.config)
    if spec.gated is not None:
        layer |= gated_sources(model.config)
    if spec.experts is not None and spec.experts.own_norms:
        layer |= normed_sources(hidden)
    return layer if spec.mlp is None or spec.mlp.experts else layer | _mlp(spec.mlp, hidden, names)


def _attention(
    attention: AttentionSpec, kv_heads: int, order: np.ndarray | None, names: Names, hidden: int, inputs: int
) -> dict[str, list[Source]]:
    if attention.difference is not None:
        return difference_sources(attention, hidden)
    width = attention.num_heads * attention.value_dim
    layer: dict[str, list[Source]] = {}
    layer["attention/qkv/kernel"] = _qkv(attention, kv_heads, order, names, "weight", (inputs,))
    layer["attention/out/kernel"] = [Source("o.weight", (hidden, width), whole)]
    if attention.qkv_bias:
        layer["attention/qkv/bias"] = _qkv(attention, kv_heads, order, names, "bias", ())
    if attention.out_bias:
        layer["attention/out/bias"] = [Source("o.bias", (hidden,), whole)]
    if attention.out_norm is not None:
        split = (kv_heads, attention.num_heads // kv_heads, attention.value_dim)
        layer["attention/out_norm/scale"] = [Source("out_norm.weight", (width,), whole, split)]
    if attention.out_gate is not None:
        layer |= _out_gate(attention, kv_heads, names, hidden)
    if attention.qk_norm is not None:
        layer |= _qk_norm(attention, attention.qk_norm, kv_heads, order, names)
    if isinstance(blocks := attention.blocks, PooledChoiceSpec):
        chooser = {path: [source] for path, source in pooled_sources(blocks, hidden).items()} | _chooser_norms(blocks)
        layer |= {f"attention/chooser/{path}": some for path, some in chooser.items()}
    elif isinstance(blocks, BlockChoiceSpec):
        own = attention.num_kv_heads
        repeated = Source(
            "index_q.weight", (own * blocks.dim, hidden), lambda t: t.reshape(own, kv_heads // own, blocks.dim, -1),
            (own, 1, blocks.dim, -1),
        )  # fmt: skip
        layer["attention/chooser/q/kernel"] = [repeated]
        layer["attention/chooser/k/kernel"] = [Source("index_k.weight", (blocks.dim, hidden), whole)]
        layer |= {f"attention/chooser/{path}": some for path, some in _chooser_norms(blocks).items()}
    if attention.value_bias:
        biases = value_bias_sources(attention.num_kv_heads, attention.head_dim, attention.qkv_bias)
        layer |= {f"attention/{path}": some for path, some in biases.items()}
    if attention.sinks:
        by_group = (kv_heads, attention.num_heads // kv_heads)
        layer["attention/sinks"] = [Source("sinks", (attention.num_heads,), whole, by_group)]
    return layer


def _chooser_norms(spec: BlockChoiceSpec | PooledChoiceSpec) -> dict[str, list[Source]]:
    """The norms of queries and keys of what chooses blocks."""
    names = {role: norm_sources(f"{role}_norm", spec.norm, spec.dim, f"index_{role}_norm") for role in "qk"}
    return names["q"] | names["k"]


def _out_gate(attention: AttentionSpec, kv_heads: int, names: Names, hidden: int) -> dict[str, list[Source]]:
    """The gates of the heads' results. Without a tensor of their own, each head's gate follows its query in the tensor
    of queries."""
    width = attention.num_heads * attention.gate_channels
    dim = attention.head_dim
    if _has(names, "out_gate.weight"):
        assert not attention.gate_bias
        return {"attention/gate/kernel": [Source("out_gate.weight", (width, hidden), whole)]}
    gates = _of_pairs(dim, 1)
    found = {"attention/gate/kernel": [Source("q.weight", (2 * width, hidden), whole, take=gates)]}
    if attention.gate_bias:
        split = (kv_heads, attention.num_heads // kv_heads, dim)
        found["attention/gate/bias"] = [Source("q.bias", (2 * width,), whole, split, take=gates)]
    return found


def _of_pairs(dim: int, which: int) -> Callable[[np.ndarray], np.ndarray]:
    """Takes the rows of queries (`which` = 0) or of gates (1) from a tensor that has for each head its query, then its
    gate."""
    return lambda t: t.reshape(-1, 2, dim, *t.shape[1:])[:, which].reshape(-1, *t.shape[1:])


def norm_sources(name: str, spec: NormSpec, size: int, role: str | None = None) -> dict[str, list[Source]]:
    """Path within the layer -> the sources of the norm `name`, whose role has the same name unless it is given."""
    role = role or name
    offset = (lambda t: t.astype(np.float32) + spec.offset) if spec.offset else None
    found = {"scale": Source(f"{role}.weight", (size,), whole, take=offset)} if spec.scale else {}
    found |= {"bias": Source(f"{role}.bias", (size,), whole)} if spec.bias else {}
    return {f"{name}/{part}": [source] for part, source in found.items()}


def _mlp(spec: MLPSpec, hidden: int, names: Names) -> dict[str, list[Source]]:
    width = spec.size
    both: dict[str, list[Source]] = {}
    for kind, inputs in (("weight", (hidden,)), ("bias", ())) if spec.bias else (("weight", (hidden,)),):
        shape = (width, *inputs)
        place = "kernel" if kind == "weight" else "bias"
        if not spec.gated:
            both[f"mlp/up/{place}"] = [Source(f"up.{kind}", shape, whole)]
        elif _has(names, f"gate_up.{kind}"):
            fused = f"gate_up.{kind}", (2 * width, *inputs)
            both[f"mlp/gate_up/{place}"] = [
                Source(*fused, _of_two(width, which), take=rows(which * width, width)) for which in (0, 1)
            ]
        else:
            both[f"mlp/gate_up/{place}"] = [
                Source(f"{role}.{kind}", shape, _of_two(width, which)) for which, role in enumerate(("gate", "up"))
            ]
        down = (hidden, width) if kind == "weight" else (hidden,)
        both[f"mlp/down/{place}"] = [Source(f"down.{kind}", down, whole)]
    if spec.inner_eps is not None:
        both["mlp/inner_norm"] = [Source("inner_norm.weight", (width,), whole)]
    if spec.activation == "xielu":
        for name, shape in XIELU_SHAPES.items():
            both[f"mlp/xielu/{name}"] = [Source(name, shape, whole, take=lambda t: t.reshape(1))]
    return both


def _of_two(width: int, which: int) -> Callable[[np.ndarray], np.ndarray]:
    """The view of the gates (`which` = 0) or the ups (1) in a fused weight, whose rows alternate. A bias is [width, 2]
    already."""
    return lambda t: t[:, which] if t.shape == (width, 2) else t.reshape(width, 2, -1)[:, which]


def _qkv(
    spec: AttentionSpec, kv_heads: int, order: np.ndarray | None, names: Names, kind: str, inputs: tuple[int, ...]
) -> list[Source]:
    """The sources of the fused projection [kv_heads, group + 2, head_dim, *inputs], whose first three axes may be one.

    Each key-value head has its queries, its key and its value, behind which zeros follow if it is smaller. Keys and
    values are repeated when `kv_heads` exceeds the layer's own number. The channels of queries and keys are brought
    into `order`. A layer without keys and values of its own has [kv_heads, group, head_dim, *inputs].
    """
    roles = "q" if spec.shares_kv else "qkv"
    group = spec.num_heads // kv_heads
    heads = spec.num_heads
    dim = spec.head_dim
    own = spec.num_kv_heads
    columns = (-1,) * len(inputs)  # a weight has an axis of inputs, its scales one of groups of inputs

    def by_head(target: np.ndarray) -> np.ndarray:
        return target.reshape(kv_heads, group + len(roles) - 1, dim, *columns)

    def query(target: np.ndarray) -> np.ndarray:
        return by_head(target)[:, :group]

    def shared(which: int, size: int) -> Callable[[np.ndarray], np.ndarray]:
        def view(target: np.ndarray) -> np.ndarray:
            heads = by_head(target)[:, which, :size]
            return heads.reshape(own, kv_heads // own, *heads.shape[1:])

        return view

    def ordered(rows: np.ndarray) -> np.ndarray:
        return _in_order(rows, order, dim)

    q_split = (kv_heads, group, dim, *columns)
    v_dim = spec.value_dim
    splits = {"q": q_split, "k": (own, 1, dim, *columns), "v": (own, 1, v_dim, *columns)}
    views = {"q": query, "k": shared(group, dim), "v": shared(group + 1, v_dim)}
    sizes = {"q": heads * dim, "k": own * dim, "v": own * v_dim}
    takes: dict[str, Callable[[np.ndarray], np.ndarray] | None] = dict.fromkeys("qkv")
    if order is not None:
        takes |= {"q": ordered, "k": ordered}
    if spec.out_gate is not None and not _has(names, "out_gate.weight"):
        sizes["q"] *= 2
        of_queries = _of_pairs(dim, 0)
        takes["q"] = of_queries if order is None else lambda t: ordered(of_queries(t))
    fused = [which for which in ("qkv", "qkv_grouped", "qkv_quarters") if _has(names, f"{which}.{kind}")]
    if not fused:
        tensors = {"q": "q", "k": "k", "v": "k" if spec.v_is_k else "v"}
        return [
            Source(f"{tensors[role]}.{kind}", (sizes[role], *inputs), views[role], splits[role], take=takes[role])
            for role in roles
        ]
    shape = (sum(sizes.values()), *inputs)
    which = f"{fused[0]}.{kind}"
    if fused[0] == "qkv":
        parts = {
            "q": rows(0, sizes["q"]),
            "k": rows(sizes["q"], sizes["k"]),
            "v": rows(sizes["q"] + sizes["k"], sizes["v"]),
        }
    elif fused[0] == "qkv_quarters":
        parts = {role: _of_quarters(place) for place, role in enumerate("qvk")}
    else:
        each = heads // own
        parts = {role: _of_groups(own, each, dim, role) for role in "qkv"}

    def chosen(role: str) -> Callable[[np.ndarray], np.ndarray]:
        part = parts[role]
        then = takes[role]
        return part if then is None else lambda t: then(part(t))

    return [Source(which, shape, views[role], splits[role], take=chosen(role)) for role in "qkv"]


def _of_quarters(place: int) -> Callable[[np.ndarray], np.ndarray]:
    """Takes every third part, from number `place` on, of a tensor that has in each quarter of its rows three parts."""
    return lambda t: t.reshape(4, 3, -1, *t.shape[1:])[:, place].reshape(-1, *t.shape[1:])


def _of_groups(groups: int, each: int, dim: int, role: str) -> Callable[[np.ndarray], np.ndarray]:
    """Takes the rows of queries, keys or values from a tensor that has per group `each` queries, a key and a value."""
    chosen = {"q": slice(each), "k": slice(each, each + 1), "v": slice(each + 1, each + 2)}[role]

    def take(t: np.ndarray) -> np.ndarray:
        rest = t.shape[1:]
        return t.reshape(groups, each + 2, dim, *rest)[:, chosen].reshape(-1, *rest)

    return take


def _in_order(rows: np.ndarray, order: np.ndarray | None, dim: int) -> np.ndarray:
    """Rows [heads * dim, …] with the channels of each head in `order`."""
    return rows if order is None else rows.reshape(-1, dim, *rows.shape[1:])[:, order].reshape(rows.shape)


def _qk_norm(
    spec: AttentionSpec, chosen: QKNormSpec, kv_heads: int, order: np.ndarray | None, names: Names
) -> dict[str, list[Source]]:
    """The sources of the norms of queries and keys. One scale for all heads is [head_dim]. Otherwise the scale of
    queries is [kv_heads, group, head_dim], and that of keys [kv_heads, 1, head_dim], repeated like the keys."""
    dim = spec.head_dim
    own = spec.num_kv_heads
    offset = chosen.norm.offset

    def take(t: np.ndarray) -> np.ndarray:
        if offset:
            t = t.astype(np.float32) + offset
        return _in_order(t.reshape(-1), order, dim)

    def sources(role: str, kind: str) -> list[Source]:
        name = f"{role}_norm.{kind}"
        count = spec.num_heads if role == "q" else own
        if chosen.over == "head":
            return [Source(name, (dim,), whole, take=take if offset or order is not None else None)]
        split = (kv_heads, spec.num_heads // kv_heads, dim) if role == "q" else (own, 1, dim)
        view = whole if role == "q" else lambda t: t.reshape(own, kv_heads // own, dim)
        if "{h}" not in names[name]:
            shape = (count * dim,) if chosen.over == "width" else (count, dim)
            return [Source(name, shape, view, split, take=take)]
        return [Source(name, (dim,), _one_head(view, h), head=h, take=take) for h in range(count)]

    def _one_head(view: Callable[[np.ndarray], np.ndarray], head: int) -> Callable[[np.ndarray], np.ndarray]:
        repeats = kv_heads // own
        if view is whole:
            return lambda t: t.reshape(-1, dim)[head]
        return lambda t: view(t)[head, :repeats]

    kinds = (("weight", "scale"),) * chosen.norm.scale + (("bias", "bias"),) * chosen.norm.bias
    roles = "q" if spec.shares_kv else "qk"
    return {f"attention/{role}_norm/{place}": sources(role, kind) for role in roles for kind, place in kinds}
