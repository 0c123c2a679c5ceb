"""The place of each tensor of multi-head latent attention in a layer's parameters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxserve.models.sources import Source, rows, whole
from jaxserve.models.spec import LatentAttentionSpec


def latent_sources(spec: LatentAttentionSpec, order: np.ndarray | None, hidden: int) -> dict[str, list[Source]]:
    """Path within the attention -> the tensors that make it up.

    The roles are q, or q_a, q_norm and q_b; kv_a, kv_norm and kv_b; and o. `order` is the order of the rotated
    channels, see `rope.head_order`.
    """
    heads = spec.num_heads
    rank = spec.rank
    nope = spec.nope_dim
    rope = spec.rope_dim
    dim = spec.head_dim
    of_queries = spec.q_rank or 0
    place = np.arange(rope) if order is None else order

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
    if spec.q_rank is None:
        del found["q_norm/scale"]
        found["q/kernel"] = [Source("q.weight", (heads * dim, hidden), whole, take=queries)]
    else:
        found["q_up/kernel"] = [Source("q_b.weight", (heads * dim, spec.q_rank), whole, take=queries)]
    return {f"attention/{path}": some for path, some in found.items()}
