"""Cases of recurrent layers for comparing kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.kernel_cases import Case, Compared, pick
from jaxserve.pallas_kernels.registry import RecurrentProblem
from jaxserve.pallas_kernels.selfcheck_recurrent import RecurrentStep, Row

PROVEN = 64  # tokens of a step that are compared with float64: the first ones, which depend on no others

# By operation: the problem's sizes, small ones and those of a layer of Qwen3.5-27B, Granite 4 tiny and LFM2-1.2B.
SHAPES = {
    "delta_net": ((2, 2, 128, 128, 512, 4), (16, 3, 128, 128, 640, 4)),
    "mamba2": ((4, 2, 64, 128, 256, 4), (48, 48, 64, 128, 3072, 4)),
    "short_conv": ((1, 0, 0, 0, 256, 3), (1, 0, 0, 0, 2048, 3)),
}


@dataclass(frozen=True)
class RecurrentCase(Case):
    """kind: the operation. counts: new tokens of each row, which all continue their sequences."""

    kind: str
    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def operation(self) -> str:  # type: ignore[override]
        return self.kind

    @property
    def part(self) -> str:
        return "recurrent"

    @property
    def problem(self) -> RecurrentProblem:
        sizes: Any = self.sizes
        return RecurrentProblem(np.dtype(jnp.dtype(self.dtype)), *sizes)

    def step(self, seed: int, counts: tuple[int, ...] | None = None) -> RecurrentStep:
        rows = [Row(count) for count in counts or self.counts]
        return RecurrentStep(self.kind, self.problem, rows, len(self.counts) + 1, seed)

    @cached_property
    def first(self) -> RecurrentStep:
        return self.step(0)

    @property
    def bytes(self) -> int:
        """The rows' states are read and written, new tokens' inputs are read, and results written."""
        states = sum(x[0].nbytes for x in self.first.state) * len(self.counts)
        inputs = sum(x.nbytes for x in self.first.inputs if x is not None)
        return 2 * states + inputs + 4 * int(np.prod(self.first.out_shape))

    @property
    def flops(self) -> int:
        """Of a token's read and update of its matrices: three products of a vector and a matrix, two in Mamba-2."""
        problem = self.problem
        matrices = problem.heads * (problem.group if self.kind == "delta_net" else 1)
        numbers = matrices * problem.rows * problem.columns
        return sum(self.counts) * (6 if self.kind == "delta_net" else 4) * numbers

    def state(self) -> Any:
        return jax.device_put(self.first.state)

    def arguments(self, seed: int) -> tuple[Any, ...]:
        step = self.step(seed)
        return jax.device_put((step.inputs, step.rows))

    def call(self, module: ModuleType) -> Callable[..., tuple[Any, Any]]:
        run = self.first.call(getattr(module, self.kind))

        def one(state: Any, inputs: Any, rows: Any) -> tuple[Any, Any]:
            out, after = run(inputs, state, rows, self.first.layer)
            return after, out

        return one

    def exact(self, result: jax.Array, inputs: Any, rows: Any) -> Compared:
        """The first tokens' results."""
        step = self.step(0)
        step.inputs = jax.tree.map(np.asarray, inputs)
        step.source = np.asarray(rows.source)
        known, _ = step.exact(PROVEN)
        return pick(result, slice(len(known))), known
