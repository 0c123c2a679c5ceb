"""From a prompt's pooled hidden states to an embedding or a score.

The devices pool hidden states (`steps.pool_rows`). The rest is small, and the host computes it in float32: the dense
layers and the norm of sentence-transformers' modules, or the head that scores a pair of texts. `pooling_files` reads
their weights. This file needs NumPy only, because the server's API server process uses it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxserve.text.score_prompt import ScorePrompt

Method = Literal["last", "mean", "cls"]
Task = Literal["generate", "embed", "score"]

ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


@dataclass(frozen=True)
class Dense:
    """A dense layer. weight: float32 [out, in]; bias: float32 [out]."""

    weight: np.ndarray
    bias: np.ndarray
    activation: str

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return ACTIVATIONS[self.activation](self.weight @ x + self.bias)


@dataclass(frozen=True)
class Pooler:
    """How the hidden states of a prompt become an embedding or a score.

    Attributes:
      method: which hidden states are used: the last token's, the mean of all tokens', or the first token's.
      head: None for embeddings. For scores, a layer with one output: the log-odds that the two texts belong together.
      prompt: how a query and a document become one prompt.
    """

    task: Task
    method: Method
    hidden_size: int
    dense: tuple[Dense, ...] = ()
    normalized: bool = False
    head: Dense | None = None
    prompt: ScorePrompt = "plain"

    @property
    def size(self) -> int:
        """The number of elements of a result."""
        if self.head is not None:
            return 1
        return len(self.dense[-1].bias) if self.dense else self.hidden_size

    def __call__(self, pooled: np.ndarray) -> np.ndarray:
        """Pooled hidden states, float32 [hidden] -> the embedding or the score, float32 [size]."""
        for layer in self.dense:
            pooled = layer(pooled)
        if self.head is not None:
            return self.head(pooled).astype(np.float32)
        return unit(pooled) if self.normalized else pooled.astype(np.float32)


def unit(vector: np.ndarray) -> np.ndarray:
    """The vector scaled to length 1, float32. A vector of zeros stays as it is."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / max(length, 1e-12)).astype(np.float32)


def probability(odds: float) -> float:
    """The probability with these log-odds."""
    return float(np.exp(-np.logaddexp(0.0, -odds)))
