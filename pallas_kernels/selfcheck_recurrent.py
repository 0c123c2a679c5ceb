"""Compares the operations of recurrent layers, on the device at hand, with NumPy's recurrences in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels.operands import ConvInputs, DeltaHeads, MambaInputs
from jaxserve.pallas_kernels.registry import RecurrentProblem
from jaxserve.pallas_kernels.selfcheck import FLOAT32, REPEATS, Finding, Program
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import ConvState, DeltaState, MambaState

ALLOWED = 4 * FLOAT32  # of a token's or a matrix's largest number: errors of a state stay in it for many tokens
FIRST = 4  # states before the layer that is checked
SLOTS = 7  # of the layer; the last one is for padding
EPS = 1e-6  # as `delta_net.reference.EPS`


@dataclass(frozen=True)
class Row:
    """count: of new tokens. fresh: it begins its sequence. keeps: its state is written back."""

    count: int
    fresh: bool = False
    keeps: bool = True


# Rows that decode, begin or keep nothing; prompts of more than a chunk, of a part, and shorter than a convolution.
STEPS = {
    "decodes": (Row(1), Row(1, fresh=True), Row(1, keeps=False), Row(1), Row(0)),
    "prompts": (Row(1), Row(1, fresh=True), Row(67, fresh=True), Row(2), Row(35), Row(0)),
}


def check_recurrent(
    operation: str,
    run: Callable[..., Any],
    problem: RecurrentProblem,
    repeats: int = REPEATS,
    steps: Sequence[str] = tuple(STEPS),
) -> Iterator[Finding]:
    """Checks a function like `delta_net.reference.delta_net`, `mamba2.reference.mamba2` or
    `short_conv.reference.short_conv`. Slots that no row writes must not change."""
    cases = {name: RecurrentStep(operation, problem, rows) for name, rows in STEPS.items() if name in steps}
    programs = [Program(one.call(run), *one.arguments) for one in cases.values()]
    for (name, case), program in zip(cases.items(), programs, strict=True):
        out, known = case.exact()  # while compilers work
        found, different = program.repeated((case.out_shape, np.float32), repeats - 1)
        made, after = found
        yield _compare(f"{operation}, {name}", made[: len(out)], out, different)
        for field, own, theirs in zip(case.state._fields, after, known, strict=True):
            written = FIRST + case.target[case.kept]
            yield _compare(f"{operation}, {name}, {field}", own[written], theirs, different)
            others = np.delete(np.arange(len(own)), [*written, FIRST + SLOTS - 1])
            same = own[others].tobytes() == getattr(case.state, field)[others].tobytes()
            yield Finding(f"{operation}, {name}, {field} of others", 0.0 if same else float("inf"), 0.0)


def _compare(what: str, found: np.ndarray, exact: np.ndarray, different: int) -> Finding:
    """The largest error of an entry of the first axis, relative to the largest number of that entry."""
    found, exact = (x.reshape(len(x), -1).astype(np.float64) for x in (found, exact))
    error = np.abs(found - exact).max(1) / np.maximum(np.abs(exact).max(1), 1e-30)
    worst = float(error.max()) if np.isfinite(found).all() and not different else float("inf")
    return Finding(what, worst, ALLOWED)


class RecurrentStep:
    """A step of one operation: its arguments on the host, and the exact results."""

    def __init__(
        self, operation: str, problem: RecurrentProblem, plan: Sequence[Row], slots: int = SLOTS, seed: int = 0
    ):
        """slots: those of the layer, more than there are rows; the last one is for padding."""
        self.operation = operation
        self.problem = problem
        self.plan = plan
        self.slots = slots
        self.rng = np.random.default_rng(seed)
        counts = [row.count for row in plan]
        self.starts = np.cumsum([0, *counts]).astype(np.int32)
        self.decode_only = max(counts) == 1
        self.tokens = len(plan) if self.decode_only else -(-int(self.starts[-1]) // 8) * 8
        source = self.rng.permutation(slots - 1)[: len(plan)].astype(np.int32)
        source[np.asarray(counts) == 0] = slots - 1
        self.source = source
        self.kept = np.array([row.keeps and row.count > 0 for row in plan])
        self.target = np.where(self.kept, source, np.int32(slots - 1)).astype(np.int32)
        fresh = np.array([row.fresh or row.count == 0 for row in plan])
        of_token = np.searchsorted(self.starts, np.arange(self.tokens), side="right") - 1
        of_token = np.minimum(of_token, len(plan) - 1).astype(np.int32)
        kind: Any = StateRows  # of NumPy's arrays
        self.rows = kind(source, self.target, fresh, self.starts, np.int32(counts.count(1)), of_token)
        make = {"delta_net": self._delta_net, "mamba2": self._mamba2, "short_conv": self._short_conv}
        self.out_shape: tuple[int, ...] = ()
        self.inputs, self.state, self.options = make[operation]()
        self.layer = np.int32(FIRST)
        self.arguments = self.inputs, self.state, self.rows, self.layer

    def call(self, run: Callable[..., Any]) -> Callable[..., Any]:
        options = self.options | {"decode_only": self.decode_only, "static": True}
        return lambda inputs, state, rows, first: run(inputs, state, rows, first, **options)

    def _normal(self, *shape: int, dtype: Any = np.float32, size: float = 1.0) -> Any:
        return (size * self.rng.standard_normal(shape, np.float32)).astype(dtype)

    def _delta_net(self) -> tuple[Any, Any, dict[str, Any]]:
        p = self.problem
        of_heads = (self.tokens, p.heads, p.group)
        kind: Any = DeltaHeads  # of NumPy's arrays
        inputs = kind(
            self._normal(self.tokens, p.heads, p.channels, dtype=p.dtype),
            -np.abs(self._normal(*of_heads, size=0.5)),
            self.rng.uniform(0.1, 0.99, of_heads).astype(np.float32),
            self._normal(p.heads, p.channels, p.width, dtype=p.dtype),
        )
        matrix = self._normal(FIRST + self.slots, p.heads, p.group, p.rows, p.columns)
        state = DeltaState(matrix, self._normal(FIRST + self.slots, p.heads, (p.width - 1) * p.channels))
        self.out_shape = (*of_heads, p.columns)
        return inputs, state, {"key_dim": p.rows, "activation": jax.nn.silu}

    def _mamba2(self) -> tuple[Any, Any, dict[str, Any]]:
        p = self.problem
        group = np.arange(p.heads, dtype=np.int32) // p.group
        groups = int(group[-1]) + 1
        shared = 2 * groups * p.columns
        kind: Any = MambaInputs  # of NumPy's arrays
        inputs = kind(
            self._normal(self.tokens, p.channels, dtype=p.dtype),
            self._normal(self.tokens, shared, dtype=p.dtype),
            np.abs(self._normal(self.tokens, p.heads, size=0.5)),
            -np.abs(self._normal(p.heads)) - np.float32(0.1),
            self._normal(p.heads),
            group,
            self._normal(p.channels, p.width, dtype=p.dtype),
            self._normal(p.channels, dtype=p.dtype),
            self._normal(shared, p.width, dtype=p.dtype),
            self._normal(shared, dtype=p.dtype),
        )
        last = (self._normal(FIRST + self.slots, p.width - 1, size) for size in (p.channels, shared))
        state = MambaState(self._normal(FIRST + self.slots, p.heads, p.rows, p.columns), *last)
        self.out_shape = (self.tokens, p.heads, p.rows)
        return inputs, state, {"groups": groups, "per_group": p.group, "activation": jax.nn.silu}

    def _short_conv(self) -> tuple[Any, Any, dict[str, Any]]:
        p = self.problem
        x = self._normal(self.tokens, p.channels, dtype=p.dtype)
        inputs = ConvInputs(x, self._normal(p.channels, p.width, dtype=p.dtype), None)
        self.out_shape = x.shape
        return inputs, ConvState(self._normal(FIRST + self.slots, p.width - 1, p.channels)), {}

    def exact(self, most: int | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
        """The results of the tokens, and the states that rows leave which keep them. With `most` only the results of so
        many tokens, the first ones."""
        advance: dict[str, Callable[..., Any]] = {
            "delta_net": self._delta_rows,
            "mamba2": self._mamba_rows,
            "short_conv": self._conv_rows,
        }
        out = []
        states: list[Any] = []
        for i, row in enumerate(self.plan):
            tokens = slice(self.starts[i], self.starts[i + 1] if most is None else min(most, self.starts[i + 1]))
            if most is not None and tokens.start >= most:
                break
            before = [np.float64(not row.fresh) * x[FIRST + self.source[i]].astype(np.float64) for x in self.state]
            if row.count == 0:
                continue
            made, *after = advance[self.operation](tokens, *before)
            out.append(made)
            if self.kept[i]:
                states.append(after)
        return np.concatenate(out), [np.stack(x) for x in zip(*states, strict=True)]

    def _mixed(self, x: Any, weights: Any, bias: Any, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The convolution of x [tokens, channels], and the last inputs [width - 1, channels] behind it."""
        w = weights.astype(np.float64)
        padded = np.concatenate([last, x.astype(np.float64)])
        made = sum(padded[tap : tap + len(x)] * w[:, tap] for tap in range(w.shape[1]))
        return made if bias is None else made + bias.astype(np.float64), padded[len(x) :]

    def _conv_rows(self, tokens: slice, last: np.ndarray) -> tuple[np.ndarray, ...]:
        return self._mixed(self.inputs.x[tokens], self.inputs.conv, None, last)

    def _delta_rows(self, tokens: slice, matrix: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, ...]:
        p = self.problem
        x = self.inputs.qkv[tokens].reshape(-1, p.heads * p.channels)
        by_tap = np.moveaxis(last.reshape(p.heads, p.width - 1, p.channels), 1, 0).reshape(p.width - 1, -1)
        mixed, kept = self._mixed(x, self.inputs.conv.reshape(-1, p.width), None, by_tap)
        mixed = _silu(mixed).reshape(-1, p.heads, p.channels)
        q, k, v = np.split(mixed, [p.rows, 2 * p.rows], axis=-1)
        q, k = (one / np.sqrt((one * one).sum(-1, keepdims=True) + EPS) for one in (q, k))
        v = v.reshape(-1, p.heads, p.group, p.columns)
        out = np.empty(v.shape)
        keep, rate = np.exp(self.inputs.decay[tokens].astype(np.float64)), self.inputs.rate[tokens].astype(np.float64)
        for t in range(len(out)):
            matrix = matrix * keep[t][..., None, None]
            added = rate[t][..., None] * (v[t] - (k[t][:, None, None] @ matrix)[:, :, 0])
            matrix += k[t][:, None, :, None] * added[:, :, None]
            out[t] = (q[t][:, None, None] @ matrix)[:, :, 0] / np.sqrt(p.rows)
        kept = np.moveaxis(kept.reshape(p.width - 1, p.heads, p.channels), 0, 1)
        return out, matrix, kept.reshape(p.heads, -1)

    def _mamba_rows(self, tokens: slice, matrix: np.ndarray, *last: np.ndarray) -> tuple[np.ndarray, ...]:
        p, given = self.problem, self.inputs
        x, kept = self._mixed(given.x[tokens], given.conv, given.conv_bias, last[0])
        bc, kept_shared = self._mixed(given.bc[tokens], given.conv_bc, given.conv_bc_bias, last[1])
        x = _silu(x).reshape(-1, p.heads, p.rows)
        b, c = np.moveaxis(_silu(bc).reshape(len(x), 2, -1, p.columns)[:, :, given.group], 1, 0)
        step = given.step[tokens].astype(np.float64)
        out = np.empty(x.shape)
        for t in range(len(x)):
            matrix = matrix * np.exp(step[t] * given.a)[:, None, None]
            matrix += (step[t][:, None] * x[t])[:, :, None] * b[t][:, None]
            out[t] = (matrix @ c[t][:, :, None])[..., 0] + given.d[:, None] * x[t]
        return out, matrix, kept, kept_shared


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))
