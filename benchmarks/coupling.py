"""How often does a draft that sees the target's random numbers propose the token that the target draws?

The chance is computed exactly, not sampled, at positions of held-out text, for the demo model and its draft:

  rejection  rejection sampling (Leviathan et al. 2023, arXiv:2211.17192): sum of min(p, q), the most that a draft whose
             tokens follow q can reach (but the answers then depend on the draft)
  inverse    both take the token at which the running sum of their probabilities, by token id, passes one random number
  gumbel     both take the largest log-probability plus Gumbel noise, which is shared by token id
             (Daliri, Musco and Suresh 2024, arXiv:2408.07978): what the engine does
  greedy     the draft proposes its likeliest token

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
LENGTH = 256  # tokens of a window
SKIPPED = 64  # those at its beginning, where both know little, do not count


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


def inverse(p: jax.Array, q: jax.Array) -> jax.Array:
    """How much of [0, 1] two running sums of probabilities [rows, n] give to the same place of both."""
    ends_p = jnp.cumsum(p, axis=1)
    ends_q = jnp.cumsum(q, axis=1)
    return jnp.maximum(jnp.minimum(ends_p, ends_q) - jnp.maximum(ends_p - p, ends_q - q), 0).sum(axis=1)


def gumbel(p: jax.Array, q: jax.Array) -> jax.Array:
    """Sum over tokens i of 1 / sum over j of max(p_j / p_i, q_j / q_i). The inner sum takes q_j where q_j / p_j exceeds
    q_i / p_i, and p_j elsewhere; with tokens in the order of q / p these are the ones behind and up to i."""
    order = jnp.argsort(jnp.log(q) - jnp.log(p), axis=1)
    p = jnp.take_along_axis(p, order, axis=1)
    q = jnp.take_along_axis(q, order, axis=1)
    up_to = jnp.cumsum(p, axis=1)
    behind = jnp.cumsum(q[:, ::-1], axis=1)[:, ::-1] - q
    return (1 / (up_to / p + behind / q)).sum(axis=1)


def greedy(p: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.take_along_axis(p, q.argmax(axis=1)[:, None], axis=1)[:, 0]


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
    target = logits_of("demo", windows)
    draft = logits_of(args.draft, windows, args.noise)
    target, draft = (x[:, SKIPPED:].reshape(-1, x.shape[-1]) for x in (target, draft))
    couplings = {f.__name__: jax.jit(f) for f in (rejection, inverse, gumbel, greedy)}
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
