"""Cases for comparing kernels: inputs of many shapes, made on the device, the least bytes and operations that they
need, and exact results in float64.

An operation is a function (state, *arguments) -> (state, output). Only `write_kv` has a state, the pages, which is
donated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve.pallas_kernels import kv_write
from jaxserve.pallas_kernels.registry import AttentionProblem, MatmulProblem
from jaxserve.pallas_kernels.tuning.timing import Work
from jaxserve.pallas_kernels.types import KVPages, QuantArray

DTYPES = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn), "int4": np.dtype(ml_dtypes.int4)}
CHECKED = 16  # (token, head) or (row, output) pairs that are compared with float64
EPSILONS = 4  # tolerated error, in epsilons of the activations' dtype

Compared = tuple[np.ndarray, np.ndarray]  # values of a result, and their exact values, float64


def dtype_of(name: str) -> np.dtype:
    return DTYPES.get(name) or jnp.dtype(name)


@dataclass(frozen=True)
class Case(ABC):
    """A problem for the registry, with inputs and exact results.

    operation: its name in the registry. part: the part of it that results and tables of block sizes name.
    """

    operation: ClassVar[str]
    checked: ClassVar[int] = 0  # index of the result of the first round that is checked
    name: str
    dtype: str

    @property
    def part(self) -> str:
        return self.operation

    @property
    def tolerance(self) -> float:
        """The tolerated error, relative to the largest value or norm."""
        return max(EPSILONS * float(jnp.finfo(self.dtype).eps), 1e-4)

    @property
    @abstractmethod
    def problem(self) -> Any:
        """The problem as the registry takes it."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """The least bytes that must be read and written."""

    @property
    @abstractmethod
    def flops(self) -> int: ...

    def state(self) -> Any:
        return ()

    @abstractmethod
    def arguments(self, seed: int) -> tuple[Any, ...]: ...

    @abstractmethod
    def call(self, module: ModuleType) -> Callable[..., tuple[Any, Any]]:
        """A backend's function for this operation."""

    def result(self, state: Any, output: Any) -> jax.Array:
        """The array that is compared with the exact result."""
        return output

    @abstractmethod
    def exact(self, result: jax.Array, *arguments: Any) -> Compared:
        """Some values of a result, and their exact values."""


@dataclass(frozen=True)
class AttentionCase(Case):
    """rows: (new tokens, cached tokens including the new ones) of each; decodes, with one new token, come first."""

    operation: ClassVar[str] = "attention"
    rows: tuple[tuple[int, int], ...]
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    page_size: int = 16
    kv_dtype: str | None = None  # None: the queries' dtype

    @property
    def decodes(self) -> int:
        return next((i for i, (new, _) in enumerate(self.rows) if new > 1), len(self.rows))

    @property
    def part(self) -> str:
        return {len(self.rows): "decode", 0: "prompts"}.get(self.decodes, "mixed")

    @property
    def tokens(self) -> int:
        return sum(new for new, _ in self.rows)

    @property
    def problem(self) -> AttentionProblem:
        q = jnp.dtype(self.dtype)
        kv = dtype_of(self.kv_dtype or self.dtype)
        sizes = (self.kv_heads, self.group, self.head_dim, self.page_size)
        return AttentionProblem(q, kv, *sizes, has_scale=self.kv_dtype is not None)

    @property
    def bytes(self) -> int:
        problem = self.problem
        token = problem.head_dim * problem.kv_dtype.itemsize + (4 if problem.has_scale else 0)
        queries = 2 * self.tokens * self.group * self.head_dim * problem.q_dtype.itemsize  # queries and results
        return self.kv_heads * (2 * sum(cached for _, cached in self.rows) * token + queries)

    @property
    def flops(self) -> int:
        """Operations for the pairs that the causal mask leaves."""
        pairs = sum(new * cached - new * (new - 1) // 2 for new, cached in self.rows)
        return 4 * pairs * self.kv_heads * self.group * self.head_dim

    def arguments(self, seed: int) -> tuple[Any, ...]:
        """The arguments of `paged_attention`; pages are in random order, without the null page 0."""
        needed = [-(-cached // self.page_size) for _, cached in self.rows]
        owned = 1 + np.random.default_rng(seed).permutation(sum(needed)).astype(np.int32)
        tables = np.zeros((len(needed), max(needed)), np.int32)
        for table, start, count in zip(tables, np.cumsum([0, *needed[:-1]]), needed, strict=True):
            table[:count] = owned[start : start + count]
        q_start = np.cumsum([0, *(new for new, _ in self.rows)]).astype(np.int32)
        kv_len = np.array([cached for _, cached in self.rows], np.int32)
        q = normal(seed, (self.tokens, self.kv_heads, self.group, self.head_dim), self.dtype)
        pages = make_pages(-1 - seed, sum(needed) + 1, self.problem)
        return q, pages, *(jnp.asarray(x) for x in (tables, q_start, kv_len)), jnp.int32(self.decodes)

    def call(self, module: ModuleType) -> Callable[..., tuple[Any, Any]]:
        options = {"scale": self.head_dim**-0.5, "decode_only": self.part == "decode"}
        return lambda state, *arguments: (state, module.paged_attention(*arguments, **options))

    def exact(self, result: jax.Array, q: jax.Array, pages: KVPages, tables: jax.Array, *_: Any) -> Compared:
        """Some values of the output, and their exact values in float64."""
        rng = np.random.default_rng(0)
        pairs = [(token, head) for token in range(self.tokens) for head in range(self.kv_heads)]
        if len(pairs) > CHECKED:
            pairs = [pairs[i] for i in sorted(rng.choice(len(pairs), CHECKED, replace=False))]
        ends = np.cumsum([new for new, _ in self.rows])
        found = []
        expected = []
        for token, head in pairs:
            row = int(np.searchsorted(ends, token, side="right"))
            seen = self.rows[row][1] - int(ends[row]) + token + 1
            k, v = (_wide(pages, np.asarray(tables)[row], which, head)[:seen] for which in range(2))
            scores = pick(q, token, head) @ k.T * self.head_dim**-0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            expected.append(weights / weights.sum(-1, keepdims=True) @ v)
            found.append(pick(result, token, head))
        return np.stack(found), np.stack(expected)


def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal values, made on the device: for large arrays NumPy takes long."""
    if jax.default_backend() == "cpu":
        return jnp.asarray(np.random.default_rng(abs(seed)).standard_normal(shape, np.float32).astype(dtype))
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def integers(seed: int, least: int, end: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if jax.default_backend() == "cpu":
        return jnp.asarray(np.random.default_rng(seed).integers(least, end, shape, np.int8).astype(dtype))
    return jax.random.randint(jax.random.key(seed), shape, least, end, jnp.int8).astype(dtype)


def pick(array: jax.Array, *index: Any) -> np.ndarray:
    """array[index] in float64."""
    there = np.asarray(array) if jax.default_backend() == "cpu" else array
    return np.asarray(there[index]).astype(np.float64)


def make_pages(seed: int, count: int, problem: AttentionProblem) -> KVPages:
    """`count` pages of normal values."""
    values = normal(seed, (count, 2, problem.kv_heads, problem.page_size, problem.head_dim), problem.q_dtype)
    if not problem.has_scale:
        return KVPages(values)
    return KVPages(*jax.jit(kv_write.quantize, static_argnums=1)(values, problem.kv_dtype))


def _wide(pages: KVPages, chosen: np.ndarray, which: int, head: int) -> np.ndarray:
    """Keys or values of one head in some pages, float64 [tokens, head_dim]."""
    data = pick(pages.data, chosen, which, head)
    if pages.scale is not None:
        data *= pick(pages.scale, chosen, which, head)[..., None]
    return data.reshape(-1, data.shape[-1])


@dataclass(frozen=True)
class WriteCase(Case):
    """Writes keys and values of new tokens to random slots."""

    operation: ClassVar[str] = "attention"
    checked: ClassVar[int] = -1  # the last call's values remain
    tokens: int
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    kv_dtype: str | None = None
    part: ClassVar[str] = "write_kv"  # type: ignore[misc]

    @cached_property
    def like(self) -> AttentionCase:
        """An attention case whose pages have four times the slots needed."""
        return AttentionCase(
            self.name, self.dtype, ((1, 4 * self.tokens),), self.kv_heads, 1, self.head_dim, self.page_size,
            self.kv_dtype,
        )  # fmt: skip

    @property
    def problem(self) -> AttentionProblem:
        return self.like.problem

    @property
    def bytes(self) -> int:
        problem = self.problem
        number = problem.q_dtype.itemsize + problem.kv_dtype.itemsize
        return 2 * self.tokens * self.kv_heads * (self.head_dim * number + (4 if problem.has_scale else 0))

    flops = 0

    def state(self) -> KVPages:
        return make_pages(0, -(-4 * self.tokens // self.page_size) + 1, self.problem)

    def arguments(self, seed: int) -> tuple[Any, ...]:
        free = np.random.default_rng(seed).permutation(4 * self.tokens)[: self.tokens]
        shape = (2, self.tokens, self.kv_heads, self.head_dim)
        k, v = normal(seed, shape, self.dtype)
        return k, v, jnp.asarray(self.page_size + free, jnp.int32)

    def call(self, module: ModuleType) -> Callable[..., tuple[Any, Any]]:
        write = getattr(module, "write_kv", kv_write.write_kv)

        return lambda pages, *arguments: (write(pages, *arguments), ())

    def result(self, state: KVPages, output: Any) -> jax.Array:
        data = state.data.astype(jnp.float32)
        return data if state.scale is None else data * state.scale[..., None]

    def exact(self, result: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> Compared:
        """The stored values of some tokens, and the given ones."""
        chosen = np.asarray(slots)[:CHECKED]
        stored = pick(result, chosen // self.page_size, slice(None), slice(None), chosen % self.page_size)
        return stored, np.stack([pick(x, slice(CHECKED)) for x in (k, v)], 1)

    @property
    def tolerance(self) -> float:
        """Half a step of a quantized dtype, relative to the largest value."""
        return {"int8": 0.5 / 127, "fp8": 2.0**-4}.get(self.kv_dtype or "", 0.0) + 1e-6


@dataclass(frozen=True)
class MatmulCase(Case):
    """Multiplies by a quantized weight. block: as QuantArray's; 0 is the whole axis."""

    operation: ClassVar[str] = "matmul"
    codes: str
    block: tuple[int, int]
    out: int
    inputs: int
    tokens: int
    has_zero: bool = False

    @property
    def whole_block(self) -> tuple[int, int]:
        return self.block[0] or self.out, self.block[1] or self.inputs

    @property
    def problem(self) -> MatmulProblem:
        x = jnp.dtype(self.dtype)
        codes = dtype_of(self.codes)
        return MatmulProblem(x, codes, self.out, self.inputs, self.whole_block, has_zero=self.has_zero)

    @property
    def bytes(self) -> int:
        bits = 4 if self.codes == "int4" else 8
        item = jnp.dtype(self.dtype).itemsize
        scale = -(-self.out // self.whole_block[0]) * -(-self.inputs // self.whole_block[1])
        weight = self.out * self.inputs * bits // 8 + scale * (item + self.has_zero)
        return weight + self.tokens * (self.inputs * item + self.out * 4)

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.inputs * self.out

    def arguments(self, seed: int) -> tuple[Any, ...]:
        shape = (self.out, self.inputs)
        block = self.whole_block
        most = 8 if self.codes == "int4" else 128
        codes = integers(seed, -most, most, shape, dtype_of(self.codes))  # float8 codes are rounded
        blocks = (-(-self.out // block[0]), -(-self.inputs // block[1]))
        scale = jnp.abs(normal(seed, blocks, self.dtype)) + jnp.ones((), self.dtype)
        zero = integers(seed, -8, 8, blocks, jnp.int8) if self.has_zero else None
        return normal(-1 - seed, (self.tokens, self.inputs), self.dtype), QuantArray(codes, scale, zero, block=block)

    def call(self, module: ModuleType) -> Callable[..., tuple[Any, Any]]:
        return lambda state, x, w: (state, module.quant_matmul(x, w))

    def exact(self, result: jax.Array, x: jax.Array, w: QuantArray) -> Compared:
        """Some rows and columns of the output, and their exact values in float64."""
        rng = np.random.default_rng(0)
        rows, columns = (np.sort(rng.permutation(size)[:CHECKED]) for size in result.shape)

        def spread(values):
            return np.repeat(pick(values, columns // w.block[0]), w.block[1], 1)[:, : w.shape[1]]

        weight = pick(w.codes, columns)
        if w.zero is not None:
            weight -= spread(w.zero)
        return pick(result, rows)[:, columns], pick(x, rows) @ (weight * spread(w.scale)).T


def first_result(case: Case, work: Work, sets: Sequence[tuple[Any, ...]]) -> tuple[jax.Array, tuple[Any, ...]]:
    """Runs the first round of `work` on `sets`; returns the result that is checked, and its arguments."""
    work.enqueue(1)
    work.wait()
    return case.result(work.state, work.outputs[case.checked]), sets[: work.calls][case.checked]


def largest_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest error relative to the largest value; infinite if a value is not finite."""
    error = np.abs(found - expected).max() / np.abs(expected).max()
    return float(error) if np.isfinite(error) else float("inf")


@jax.jit
def norm_error(found: jax.Array, expected: jax.Array) -> jax.Array:
    """‖found - expected‖ / ‖expected‖."""
    found, expected = (x.astype(jnp.float32) for x in (found, expected))
    return jnp.linalg.norm((found - expected).ravel()) / jnp.linalg.norm(expected.ravel())
