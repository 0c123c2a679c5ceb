"""How often does a draft that sees the target's random number propose the token that the target draws?

The chance is computed exactly, not sampled, at positions of held-out text, for the demo model and its draft:

  rejection  rejection sampling (Leviathan et al. 2023, arXiv:2211.17192): sum of min(p, q), the most that a draft whose
             tokens follow q can reach (but the answers then depend on the draft)
  inverse    both take the token at which the running sum of their probabilities, by token id, passes one random number
  likeliest  the same with tokens in the order of their own probability
  gumbel     both take the largest log-probability plus Gumbel noise, which is shared by token id
             (Daliri, Musco and Suresh 2024, arXiv:2408.07978)
  greedy     the draft proposes its likeliest token
  near       the target draws as in `inverse`. The draft proposes the token with the most probability within a distance
             from the random number in the running sum: a proposal need not follow any distribution

    python benchmarks/coupling.py --windows 48
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import train_demo
from demo_text import is_heldout, read_sources
from tokenizers import Tokenizer

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
LENGTH, SKIPPED = 256, 64  # tokens of a window; those at its beginning, where both know little, do not count
DISTANCES = (0.01, 0.02, 0.05, 0.1, 0.2)
UNIFORMS = 64  # random numbers for each position, evenly spaced, where the chance has no simple form


def logits_of(name: str, ids: np.ndarray, noise: float = 0.0) -> np.ndarray:
    """float32 [windows, LENGTH, vocab]. noise: by which part of each weight it is changed at random."""
    folder = CHECKPOINTS / name
    train_demo.CONFIG.clear()
    train_demo.CONFIG.update(json.loads((folder / "config.json").read_text()))
    params = train_demo.load_weights(folder)
    rng = np.random.default_rng(0)
    params = {key: value * (1 + noise * rng.standard_normal(value.shape)) for key, value in params.items()}
    params = {key: value.astype(jnp.float32) for key, value in params.items()}
    run = jax.jit(lambda ids: train_demo.forward(params, ids) @ params["model.embed_tokens.weight"].T)
    return np.concatenate([np.asarray(run(ids[at : at + 4])) for at in range(0, len(ids), 4)])


def overlap(p: jax.Array, q: jax.Array) -> jax.Array:
    """How much of [0, 1] two running sums of probabilities [rows, n] give to the same place of both."""
    ends_p, ends_q = jnp.cumsum(p, axis=1), jnp.cumsum(q, axis=1)
    return jnp.maximum(jnp.minimum(ends_p, ends_q) - jnp.maximum(ends_p - p, ends_q - q), 0).sum(axis=1)


def inverse(p: jax.Array, q: jax.Array) -> jax.Array:
    return overlap(p, q)


def likeliest(p: jax.Array, q: jax.Array) -> jax.Array:
    """The overlap of each token's interval, each in the order of its own distribution."""

    def intervals(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        order = jnp.argsort(-x, axis=1)
        back = jnp.argsort(order, axis=1)
        end = jnp.take_along_axis(jnp.cumsum(jnp.take_along_axis(x, order, axis=1), axis=1), back, axis=1)
        return end - x, end

    (start_p, end_p), (start_q, end_q) = intervals(p), intervals(q)
    return jnp.maximum(jnp.minimum(end_p, end_q) - jnp.maximum(start_p, start_q), 0).sum(axis=1)


def gumbel(p: jax.Array, q: jax.Array) -> jax.Array:
    """Sum over tokens i of 1 / sum over j of max(p_j / p_i, q_j / q_i). The inner sum takes q_j where q_j / p_j exceeds
    q_i / p_i, and p_j elsewhere; with tokens in the order of q / p these are the ones behind and up to i."""
    return gumbel_each(p, q).sum(axis=1)


def gumbel_each(p: jax.Array, q: jax.Array) -> jax.Array:
    """The chance that both take each token. p and q may be sums or parts of probabilities."""
    order = jnp.argsort(jnp.log(q) - jnp.log(p), axis=1)
    p, q = jnp.take_along_axis(p, order, axis=1), jnp.take_along_axis(q, order, axis=1)
    up_to, behind = jnp.cumsum(p, axis=1), jnp.cumsum(q[:, ::-1], axis=1)[:, ::-1] - q
    each = 1 / (up_to / p + behind / q)
    return jnp.take_along_axis(each, jnp.argsort(order, axis=1), axis=1)


def blocks(p: jax.Array, q: jax.Array) -> jax.Array:
    """`gumbel` among blocks of 128 tokens, then among the tokens of the block."""
    p, q = (x.reshape(len(x), -1, 128) for x in (p, q))
    of_block = gumbel_each(p.sum(axis=2), q.sum(axis=2))
    within = gumbel_each(p.reshape(-1, 128), q.reshape(-1, 128)).sum(axis=1)
    return (of_block * within.reshape(of_block.shape)).sum(axis=1)


def tree(p: jax.Array, q: jax.Array) -> jax.Array:
    """At each node of a binary tree over token ids both go left if the same random number is below the left's share."""
    same = jnp.ones((len(p), 1))
    levels = [(p, q)]
    while levels[-1][0].shape[1] > 1:
        levels.append(tuple(x.reshape(len(x), -1, 2).sum(axis=2) for x in levels[-1]))
    for above, below in zip(levels[:0:-1], levels[-2::-1], strict=True):
        shares = [x.reshape(len(x), -1, 2) / y[:, :, None] for x, y in zip(below, above, strict=True)]
        same = (same[:, :, None] * jnp.minimum(*shares)).reshape(len(p), -1)
    return same.sum(axis=1)


def greedy(p: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.take_along_axis(p, q.argmax(axis=1)[:, None], axis=1)[:, 0]


def near(p: jax.Array, q: jax.Array, distance: float) -> jax.Array:
    ends_p, ends_q = jnp.cumsum(p, axis=1), jnp.cumsum(q, axis=1)

    def hit(u: jax.Array) -> jax.Array:
        mass = jnp.clip(ends_q, u - distance, u + distance) - jnp.clip(ends_q - q, u - distance, u + distance)
        return mass.argmax(axis=1) == (ends_p > u).argmax(axis=1)

    uniforms = (jnp.arange(UNIFORMS) + 0.5) / UNIFORMS
    return jax.lax.map(hit, uniforms).mean(axis=0)


def rejection(p: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.minimum(p, q).sum(axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=48)
    parser.add_argument("--draft", default="demo-draft")
    parser.add_argument("--noise", type=float, default=0.0, help="changes the draft's weights by this part at random")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 1.0])
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "demo" / "tokenizer.json"))
    ids = np.concatenate([tokenizer.encode(text).ids for name, text in read_sources().items() if is_heldout(name)])
    starts = np.linspace(0, len(ids) - LENGTH, args.windows).astype(int)
    windows = np.stack([ids[at : at + LENGTH] for at in starts])
    target, draft = logits_of("demo", windows), logits_of(args.draft, windows, args.noise)
    target, draft = (x[:, SKIPPED:].reshape(-1, x.shape[-1]) for x in (target, draft))
    couplings = {f.__name__: jax.jit(f) for f in (rejection, inverse, likeliest, gumbel, blocks, tree, greedy)}
    for distance in DISTANCES:
        couplings[f"near {distance}"] = jax.jit(lambda p, q, distance=distance: near(p, q, distance))
    print(f"{len(target)} positions of held-out text, demo and {args.draft}")
    for temperature in args.temperatures:
        chances: dict[str, list[float]] = {name: [] for name in couplings}
        for at in range(0, len(target), 256):
            # Probabilities below 1e-30 would be 0 in float32, and quotients of them no numbers.
            p, q = (
                jnp.maximum(jax.nn.softmax(x[at : at + 256] / temperature), 1e-30) for x in (target, draft)
            )  # fmt: skip
            for name, chance in couplings.items():
                chances[name] += np.asarray(chance(p, q)).tolist()
        print(f"temperature {temperature}: " + ", ".join(f"{name} {np.mean(c):.3f}" for name, c in chances.items()))


if __name__ == "__main__":
    main()
