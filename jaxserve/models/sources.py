"""The tensors of a checkpoint by their roles, and the place of each in a weight of the decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxserve.checkpoints.load import Piece
from jaxserve.models.spec import LatentAttentionSpec

# Role -> name in the checkpoint; "{i}" is the layer, "{e}" the expert, "{h}" the head. Roles: embed, positions,
# project_in, project_out, norm, head, attention_norm, attention_out_norm, mlp_norm, mlp_out_norm, q, k, v, o, q_norm,
# k_norm, gate, up, down, router, shared_gate, shared_up, shared_down, shared_expert_gate, latent_in, latent_out; of
# experts expert_gate, expert_up, expert_down, or fused expert_gate_up and expert_fused_down (`expert_weights`). Weights
# add ".weight", biases ".bias". "sinks" is the role of sinks, "correction" that of the routers' correction bias
# [experts], "correction_row" of one that is [1, experts]; those of `layers.XIELU` have its names.
# Fused tensors: qkv has q, k and v one after the other, qkv_quarters has q, v and k in each quarter of its rows;
# qkv_grouped has for each key-value head its queries, its key and its value; gate_up and shared_gate_up have gate and
# up one after the other. Roles of matrices [in, out] end in ".T". A file may stack experts: the stack's name is the
# expert's without "{e}.". Latent attention has q_a, q_b, kv_a, kv_b, kv_norm and head_gate; an indexer has index_q,
# index_q_norm, index_k, index_k_norm and index_weights; with learned scales there are slope, start, index_slope,
# index_start and angle_logs. Recurrent layers have roles of their own, see `recurrent.KINDS`. With an output gate
# that is not named out_gate, q has for each head its query, then its gate. Layers with inputs of their own have the
# roles of `per_layer`; experts with norms of their own have those of `normed_experts`, and expert_scales. Where
# layers are parts of a file's blocks, or several have the same tensor, the role of a layer's tensor may begin with
# the layer's number, "3/q.weight" (`name_of`).
Names = Mapping[str, str]


def name_of(names: Names, role: str, layer: int | None) -> str:
    """The name of a role's tensor in a layer."""
    return names.get(f"{layer}/{role}") or names[role]


@dataclass(frozen=True)
class Source:
    """A role's tensor, the shape that it must have in the file, and its place in the host array of a weight (`Piece`).

    The shape and `take` are those of a matrix [out, in], even if the file holds its transpose.
    """

    role: str
    shape: tuple[int, ...]
    view: Callable[[np.ndarray], np.ndarray]
    split: tuple[int, ...] | None = None
    head: int | None = None
    take: Callable[[np.ndarray], np.ndarray] | None = None

    def piece(self, names: Names, layer: int | None) -> Piece:
        transposed = self.role not in names and f"{self.role}.T" in names
        role = f"{self.role}.T" if transposed else self.role
        name = name_of(names, role, layer).format(i=layer, h=self.head, e=self.head)
        if not transposed:
            return Piece(name, self.shape, self.view, self.split, self.take)
        take = self.take or whole
        return Piece(name, self.shape[::-1], self.view, self.split, lambda t: take(t.T))


def whole(target: np.ndarray) -> np.ndarray:
    return target


def rows(first: int, count: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda t: t[first : first + count]


# The place of each tensor of multi-head latent attention in a layer's parameters.


def latent_sources(spec: LatentAttentionSpec, order: np.ndarray | None, hidden: int) -> dict[str, list[Source]]:
    """Path within the attention -> the tensors that make it up.

    The roles are q, or q_a, q_norm and q_b; kv_a, kv_norm and kv_b; and o. `order` is the order of the rotated
    channels, see `rope.head_order`.
    """
    heads = spec.num_heads
    rank = spec.rank
    nope = spec.projected_dim
    rope = spec.turned_dim
    dim = spec.head_dim
    of_queries = spec.q_rank or 0
    place = np.arange(rope) if order is None or not rope else order

    def queries(t: np.ndarray) -> np.ndarray:
        return t.reshape(heads, dim, -1)[:, np.concatenate([np.arange(nope), nope + place])].reshape(t.shape)

    def latents(t: np.ndarray) -> np.ndarray:
        return np.concatenate([t[:rank], t[rank:][place]])

    def up(first: int, size: int) -> Callable[[np.ndarray], np.ndarray]:
        """Takes `size` rows of each head of kv_b, from the head's row `first` on. A head has rows for its key, then
        rows for its value."""
        return lambda t: t.reshape(heads, nope + spec.v_dim, -1)[:, first : first + size].reshape(heads * size, -1)

    kv_b = ("kv_b.weight", (heads * (nope + spec.v_dim), rank))
    found = {
        "q_norm/scale": [Source("q_norm.weight", (of_queries,), whole)],
        "kv_norm/scale": [Source("kv_norm.weight", (rank,), whole)],
        "k_up": [Source(*kv_b, lambda t: t.reshape(heads * nope, -1), take=up(0, nope))],
        "v_up": [Source(*kv_b, lambda t: t.reshape(heads * spec.v_dim, -1), take=up(nope, spec.v_dim))],
        "out/kernel": [Source("o.weight", (hidden, heads * spec.v_dim), whole)],
    }
    for kind, inputs in (("weight", (hidden,)), ("bias", ())) if spec.bias else (("weight", (hidden,)),):
        down = [Source(f"q_a.{kind}", (of_queries, *inputs), rows(0, of_queries))] if of_queries else []
        down.append(Source(f"kv_a.{kind}", (rank + rope, *inputs), rows(of_queries, rank + rope), take=latents))
        found[f"down/{'kernel' if kind == 'weight' else 'bias'}"] = down
    if spec.bias:
        found["out/bias"] = [Source("o.bias", (hidden,), whole)]
    if spec.learned_scale:
        found |= _line_sources("", "", heads)
        if spec.rotates:
            found["angle_logs"] = [Source("angle_logs", (spec.rope_dim // 2,), whole)]
    if spec.chooses:
        found |= _indexer_sources(spec, hidden)
    if spec.latent_twice:
        return {f"attention/{path}": some for path, some in (found | _twice_sources(spec, nope, place)).items()}
    if spec.head_gate:
        found["gate/kernel"] = [Source("head_gate.weight", (heads * spec.gates, hidden), whole)]
    if spec.sinks:
        found["sinks"] = [Source("sinks", (heads,), whole)]
    if spec.q_rank is None:
        del found["q_norm/scale"]
        found["q/kernel"] = [Source("q.weight", (heads * dim, hidden), whole, take=queries)]
    else:
        found["q_up/kernel"] = [Source("q_b.weight", (heads * dim, spec.q_rank), whole, take=queries)]
    return {f"attention/{path}": some for path, some in found.items()}


def _twice_sources(spec: LatentAttentionSpec, nope: int, place: np.ndarray) -> dict[str, list[Source]]:
    """The same of queries and gates that are projected from a latent and its norm: a head's query, then its gates."""
    heads, dim, gates, inputs = spec.num_heads, spec.head_dim, spec.v_dim, 2 * (spec.q_rank or 0)
    whole_head = dim + gates

    def taken(rows: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        return lambda t: t.reshape(heads, whole_head, -1)[:, rows].reshape(heads * len(rows), -1)

    shape = "q_b.weight", (heads * whole_head, inputs)
    queries = np.concatenate([np.arange(nope), nope + place])
    return {
        "q_up/kernel": [Source(*shape, whole, take=taken(queries))],
        "gate/kernel": [Source(*shape, whole, take=taken(np.arange(dim, whole_head)))],
    }


def _indexer_sources(spec: LatentAttentionSpec, hidden: int) -> dict[str, list[Source]]:
    """The same of an indexer. Rotated channels are brought into the order of `rope.head_order`."""
    indexer = spec.indexer
    assert indexer is not None
    heads = indexer.heads
    dim = indexer.dim
    place = np.arange(dim)
    if indexer.turned_last and spec.rotates:
        place = np.roll(place, spec.rope_dim)
    if indexer.interleaved and spec.rotates:
        place[: spec.rope_dim] = np.concatenate([place[: spec.rope_dim : 2], place[1 : spec.rope_dim : 2]])

    def queries(t: np.ndarray) -> np.ndarray:
        return t.reshape(heads, dim, -1)[:, place].reshape(t.shape)

    def keys(t: np.ndarray) -> np.ndarray:
        return t[place]

    inputs = hidden if indexer.input_norm is not None or spec.q_rank is None else spec.q_rank
    found = {
        "q/kernel": Source("index_q.weight", (heads * dim, inputs), whole, take=queries),
        "k/kernel": Source("index_k.weight", (dim, hidden), whole, take=keys),
        "k_norm/scale": Source("index_k_norm.weight", (dim,), whole, take=keys),
        "k_norm/bias": Source("index_k_norm.bias", (dim,), whole, take=keys),
        "head_weights/kernel": Source("index_weights.weight", (heads, hidden), whole),
    }
    if indexer.input_norm is not None:
        found["input_norm/scale"] = Source("index_q_norm.weight", (hidden,), whole)
        found["input_norm/bias"] = Source("index_q_norm.bias", (hidden,), whole)
    lines = _line_sources("indexer/", "index_", heads) if spec.learned_scale else {}
    return {f"indexer/{path}": [source] for path, source in found.items()} | lines


def _line_sources(path: str, role: str, heads: int) -> dict[str, list[Source]]:
    """The same of a `LogScale`."""
    return {f"{path}log_scale/{name}": [Source(f"{role}{name}", (heads,), whole)] for name in ("slope", "start")}
