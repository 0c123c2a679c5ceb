"""Routers of mixtures of experts: they choose a token's experts and the weights of these, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

Score = Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"]
GroupScore = Literal["max", "top2"]
SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}


@dataclass(frozen=True, kw_only=True)
class Router:
    """How experts are chosen and weighted.

    Every expert has a score: the softmax over all experts' logits; or of its own logit the sigmoid, or the root of the
    softplus. The `top_k` experts with the greatest scores are chosen, and their scores are their weights.

    Sparsemixer (Liu et al. 2024, arXiv:2409.12136) chooses one expert after the other by the greatest logit. A chosen
    expert's weight is its softmax among the experts that were not chosen before it and whose logits are near its own:
    (own - other) / max(|other|, own) is at most 2 * jitter. The fields after `jitter` have no effect on it.

    Attributes:
      softcap: the router's logits become softcap * tanh(logit / softcap) first; None: they stay as they are.
      normalized: the weights are divided by their sum, which is at least `least_sum`, plus `sum_offset`.
      scale: multiplies the final weights.
      corrected: a learned bias per expert is added to the scores for the choice (Wang et al. 2024, arXiv:2408.15664).
        The weights are scores without it.
      by_logits: the bias is added to logits in the place of scores, and their sums are compared.
      groups: how many groups of equal size neighbouring experts form. Only experts of the `top_groups` best groups can
        be chosen (DeepSeek-V2, arXiv:2405.04434). A group's score is its greatest one ("max"), or the sum of its two
        greatest ("top2", DeepSeek-V3, arXiv:2412.19437).
      weighs_inputs: the weights multiply the experts' inputs instead of their results (Llama 4).
    """

    top_k: int
    score: Score = "softmax"
    softcap: float | None = None
    jitter: float = 0.0
    normalized: bool = True
    least_sum: float = 0.0
    sum_offset: float = 0.0
    scale: float = 1.0
    corrected: bool = False
    by_logits: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    weighs_inputs: bool = False

    def problem(self, experts: int) -> str | None:
        """Returns why the router cannot choose among this number of experts, or None where it can."""
        if not 0 < self.top_k <= experts:
            return f"num_experts_per_tok={self.top_k} must be between 1 and the {experts} experts"
        if experts % self.groups or not 0 < self.top_groups <= self.groups:
            return f"{experts} experts cannot form {self.groups} equal groups, of which {self.top_groups} are chosen"
        if self.top_k > experts // self.groups * self.top_groups:
            return f"{self.top_groups} groups of {experts // self.groups} experts have fewer than {self.top_k}"
        if self.group_score == "top2" and self.groups > 1 and experts // self.groups < 2:
            return f"groups of one expert have no two greatest scores ({self.groups} groups)"
        return None


def route(
    logits: jax.Array, router: Router, correction: jax.Array | None = None, chosen: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Chooses the experts of each token.

    Args:
      logits: the router's logits, float32 [tokens, experts].
      correction: float32 [experts], if the router is `corrected`.
      chosen: int32 [tokens, top_k], the experts where they are known already; None: the router chooses them.

    Returns:
      the chosen experts int32 [tokens, top_k], the best first, and their weights, float32 [tokens, top_k].
    """
    assert (correction is not None) == router.corrected
    logits = logits.astype(jnp.float32)
    if router.softcap is not None:
        logits = router.softcap * jnp.tanh(logits / router.softcap)
    if router.score == "sparsemixer":
        return _sparsemixer(logits, router)
    plain_sum = not router.least_sum and not router.sum_offset
    if router.score == "softmax" and router.groups == 1 and correction is None and plain_sum and chosen is None:
        # Logits have the order of their softmax, even where the softmax is too small for float32.
        best, experts = jax.lax.top_k(logits, router.top_k)
        total = jax.nn.logsumexp(best if router.normalized else logits, axis=-1, keepdims=True)
        return experts.astype(jnp.int32), jnp.exp(best - total) * router.scale
    scores = SCORES[router.score](logits)
    order = logits if router.by_logits else scores
    order = order if correction is None else order + correction.astype(jnp.float32)
    if router.groups > 1:
        order = jnp.where(_in_best_groups(order, router), order, -jnp.inf)
    experts = jax.lax.top_k(order, router.top_k)[1].astype(jnp.int32) if chosen is None else chosen
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if router.normalized:
        total = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), max(router.least_sum, 1e-20))
        weights = weights / (total + router.sum_offset)
    return experts, weights * router.scale


def _sparsemixer(logits: jax.Array, router: Router) -> tuple[jax.Array, jax.Array]:
    """As `route`."""
    left = logits
    experts = []
    weights = []
    for _ in range(router.top_k):
        best = jnp.max(left, axis=-1, keepdims=True)
        is_far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * router.jitter
        near = jnp.where(is_far, -jnp.inf, left)
        weights.append(jnp.exp(best - jax.nn.logsumexp(near, axis=-1, keepdims=True)))
        experts.append(jnp.argmax(left, axis=-1, keepdims=True))
        left = jnp.where(jnp.arange(logits.shape[-1]) == experts[-1], -jnp.inf, left)
    return jnp.concatenate(experts, axis=-1).astype(jnp.int32), jnp.concatenate(weights, axis=-1)


def load(chosen: jax.Array, experts: int, count: jax.Array) -> jax.Array:
    """How a pass's tokens spread over experts: int32 [3].

    Args:
      chosen: int32 [layers, tokens, top_k], the experts of each token in each layer.
      experts: experts of each layer.
      count: int32 scalar, how many leading tokens matter.

    Returns:
      added up over the layers: the tokens of all experts, those of the layer's busiest expert, and the experts that
      have tokens.
    """
    matters = jnp.arange(chosen.shape[1])[:, None] < count
    chosen = jnp.where(matters, chosen, experts)
    # A CPU adds one by one; others compare all in one kernel.
    tokens = jax.lax.platform_dependent(
        chosen, cpu=partial(_added, experts=experts), default=partial(_compared, experts=experts)
    )
    return jnp.stack([jnp.sum(tokens), jnp.sum(jnp.max(tokens, axis=1)), jnp.sum(tokens > 0, dtype=jnp.int32)])


def _added(chosen: jax.Array, experts: int) -> jax.Array:
    """Tokens of each expert, int32 [layers, experts], of chosen [layers, tokens, top_k]; numbers beyond are dropped."""
    layer = jnp.arange(len(chosen))[:, None, None]
    return jnp.zeros((len(chosen), experts), jnp.int32).at[layer, chosen].add(1, mode="drop")


def _compared(chosen: jax.Array, experts: int) -> jax.Array:
    return jnp.sum(chosen[..., None] == jnp.arange(experts), axis=(1, 2), dtype=jnp.int32)


def _in_best_groups(order: jax.Array, router: Router) -> jax.Array:
    """Whether each expert's group is one of the best, bool [tokens, experts]."""
    tokens, experts = order.shape
    grouped = order.reshape(tokens, router.groups, -1)
    if router.group_score == "max":
        score = grouped.max(-1)
    else:
        score = jax.lax.top_k(grouped, 2)[0].sum(-1)
    best = jax.lax.top_k(score, router.top_groups)[1]
    chosen = (best[:, :, None] == jnp.arange(router.groups)).any(1)
    return jnp.repeat(chosen, experts // router.groups, axis=1, total_repeat_length=experts)
