"""Kernels of others on our cases: cuBLAS and scaled-dot-product attention through torch, FlashInfer, XLA's own matmul,
JAX's bundled ragged paged attention for TPUs.

torch's are given our arrays where they lie. FlashInfer 0.2 or newer; it has not been run here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.kernel_cases import AttentionCase, Case, MatmulCase, WriteCase
from jaxserve.pallas_kernels.quant_matmul.reference import dequantize
from jaxserve.pallas_kernels.registry import Device, explain, load
from jaxserve.pallas_kernels.tuning.timing import CHAIN, Chain, Work, in_groups
from jaxserve.pallas_kernels.types import KVPages

WORKSPACE_BYTES = 128 << 20  # of FlashInfer


class Backend:
    """One of our backends, by its name in the registry."""

    def __init__(self, name: str) -> None:
        self.name = name

    def why_not(self, case: Case, device: Device) -> str | None:
        """The reason why it cannot run a case on the device; None if it can."""
        reason = explain(case.operation, device, case.problem)[self.name]
        if reason is None and isinstance(case, WriteCase) and self.name != "xla":
            return None if hasattr(load("attention", self.name), "write_kv") else "it leaves the write to xla"
        return reason

    def prepare(self, case: Case, sets: Sequence[tuple[Any, ...]]) -> Work:
        """Compiles it. What has many parts is slow to compile, and keeps the device busy with few calls."""
        most = 4 if isinstance(case, AttentionCase) else CHAIN
        if self.name == "xla" and not isinstance(case, WriteCase):
            most = 1
        return Chain(case.call(load(case.operation, self.name)), case.state(), sets, most)


class XlaDense:
    """XLA's matmul with weights that were never quantized."""

    name = "xla dense"

    def why_not(self, case: Case, device: Device) -> str | None:
        return _not_dense(case)

    def prepare(self, case: Case, sets: Sequence[tuple[Any, ...]]) -> Work:
        def call(x, w):
            return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

        dense = [(x, dequantize(w).astype(x.dtype)) for x, w in sets]
        return Chain(case.call(SimpleNamespace(quant_matmul=call)), (), dense)  # type: ignore[arg-type]


def _not_dense(case: Case) -> str | None:
    if not isinstance(case, MatmulCase):
        return "it is for matmuls"
    if (case.codes, case.block) != ("int8", (1, 0)):
        return "the same for every format: see int8 channel"
    return None


class RaggedPagedAttention:
    """The attention that JAX bundles for TPUs (its second version; the third is not part of JAX). Its pages hold each
    token's heads together, keys and values in turn: [pages, page_size, 2 * kv_heads, head_dim]."""

    name = "jax ragged"

    def __init__(self) -> None:
        package = importlib.import_module("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
        self.function = package.ragged_paged_attention

    def why_not(self, case: Case, device: Device) -> str | None:
        if (reason := _not_plain(case)) is not None:
            return reason
        return None if device.platform == "tpu" else f"it is for TPUs, not platform {device.platform!r}"

    def attend(self, q, pages, tables, q_start, kv_len, num_decodes, *, scale: float, decode_only: bool) -> jax.Array:
        """As `paged_attention`, but with pages in its own form; every row must have tokens."""
        flat = q.reshape(q.shape[0], -1, q.shape[-1])
        rows = jnp.array([kv_len.shape[0]], jnp.int32)
        return self.function(flat, pages, kv_len, tables, q_start, rows, sm_scale=scale).reshape(q.shape)

    @staticmethod
    def arrange(pages: KVPages) -> jax.Array:
        data = pages.data.transpose(0, 3, 2, 1, 4)
        return data.reshape(*data.shape[:2], -1, data.shape[-1])

    def prepare(self, case: Case, sets: Sequence[tuple[Any, ...]]) -> Work:
        own = [(q, jax.jit(self.arrange)(pages), *rest) for q, pages, *rest in sets]
        return Chain(case.call(SimpleNamespace(paged_attention=self.attend)), (), own, 4)  # type: ignore[arg-type]


class TorchWork:
    """Calls of functions without arguments, in groups as a `Chain` has them; on a GPU each group is a CUDA graph where
    it can be captured."""

    state = ()

    def __init__(self, torch: Any, functions: Sequence[Callable[[], Any]], give: Callable[[Any], Any]) -> None:
        self.torch = torch
        self.give = give
        self.turn = 0
        self.asynchronous = torch.cuda.is_available()
        self.groups = [_Group(torch, group) for group in in_groups(functions)]
        self.calls = len(self.groups[0].functions)

    @property
    def outputs(self) -> list[jax.Array]:
        """The first one of the last round."""
        return [jax.dlpack.from_dlpack(self.give(self.results[0]).contiguous())]

    def enqueue(self, rounds: int) -> None:
        for _ in range(rounds):
            self.results = self.groups[self.turn % len(self.groups)].run()
            self.turn += 1

    def wait(self) -> None:
        if self.asynchronous:
            self.torch.cuda.synchronize()


class _Group:
    def __init__(self, torch: Any, functions: Sequence[Callable[[], Any]]) -> None:
        self.functions = functions
        self.graph = None
        self.call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    self.captured = self.call()
                self.graph = graph
            except RuntimeError:  # something that cannot be captured
                torch.cuda.synchronize()

    def call(self) -> list[Any]:
        return [function() for function in self.functions]

    def run(self) -> list[Any]:
        if self.graph is None:
            return self.call()
        self.graph.replay()
        return self.captured


class Torch:
    """A peer that runs in torch. Raises ImportError where it is not installed."""

    name: str
    packages: tuple[str, ...] = ("torch",)

    def __init__(self) -> None:
        self.torch, *self.rest = (importlib.import_module(package) for package in self.packages)
        if jax.default_backend() == "gpu" and not self.torch.cuda.is_available():
            raise ImportError("this torch has no CUDA")

    def why_not(self, case: Case, device: Device) -> str | None:
        raise NotImplementedError

    def prepare(self, case: Case, sets: Sequence[tuple[Any, ...]]) -> Work:
        raise NotImplementedError

    def take(self, array: jax.Array) -> Any:
        """The array as a tensor of the same memory."""
        return self.torch.from_dlpack(array.block_until_ready())


class TorchMatmul(Torch):
    """torch's matmul with weights that were never quantized: cuBLAS on NVIDIA GPUs."""

    name = "torch dense"

    def why_not(self, case: Case, device: Device) -> str | None:
        return _not_dense(case)

    def prepare(self, case: Case, sets: Sequence[tuple[Any, ...]]) -> Work:
        pairs = [(self.take(x), self.take(dequantize(w).astype(x.dtype))) for x, w in sets]
        linear = self.torch.nn.functional.linear
        return TorchWork(self.torch, [lambda x=x, w=w: linear(x, w) for x, w in pairs], lambda y: y)


def _not_plain(case: Case) -> str | None:
    if not isinstance(case, AttentionCase):
        return "it is for attention"
    return "it is compared on caches of the queries' type" if case.kv_dtype else None


class TorchAttention(Torch):
    """torch's scaled_dot_product_attention, for which keys and values lie in one piece, not in pages."""

    name = "torch sdpa"

    def why_not(self, case: Case, device: Device) -> str | None:
        if (reason := _not_plain(case)) is not None:
            return reason
        assert isinstance(case, AttentionCase)
        new, cached = case.rows[0]
        if len(set(case.rows)) > 1 or new not in (1, cached):
            return "rows must be equally long, and new or of one token"
        return None

    def prepare(self, case: AttentionCase, sets: Sequence[tuple[Any, ...]]) -> Work:  # type: ignore[override]
        rows, (new, cached) = len(case.rows), case.rows[0]
        attend = self.torch.nn.functional.scaled_dot_product_attention

        def function(q: jax.Array, pages: Any, tables: jax.Array, *_: Any) -> Callable[[], Any]:
            kv = jnp.moveaxis(pages.data[tables], 3, 2)  # [rows, pages, kv_heads, 2, page_size, head_dim]
            kv = kv.transpose(3, 0, 2, 1, 4, 5).reshape(2, rows, case.kv_heads, -1, case.head_dim)[..., :cached, :]
            k, v = (self.take(jnp.array(x)) for x in kv)
            query = self.take(q).reshape(rows, new, case.kv_heads * case.group, case.head_dim).transpose(1, 2)
            return lambda: attend(query, k, v, is_causal=new > 1, enable_gqa=True)

        shape = (rows * new, case.kv_heads, case.group, case.head_dim)
        functions = [function(*arguments) for arguments in sets]
        return TorchWork(self.torch, functions, lambda y: y.transpose(1, 2).reshape(shape))


class FlashInfer(Torch):
    """FlashInfer's paged decode and prefill, whose pages may be laid out as ours."""

    name = "flashinfer"
    packages = ("torch", "flashinfer")

    def why_not(self, case: Case, device: Device) -> str | None:
        return "it needs an NVIDIA GPU" if device.platform != "gpu" else _not_plain(case)

    def prepare(self, case: AttentionCase, sets: Sequence[tuple[Any, ...]]) -> Work:  # type: ignore[override]
        library: ModuleType = self.rest[0]
        heads = case.kv_heads * case.group
        needed = np.array([-(-cached // case.page_size) for _, cached in case.rows])

        def number(values: Any) -> Any:
            return self.torch.as_tensor(np.asarray(values, np.int32), device="cuda")

        def function(q: jax.Array, pages: Any, tables: jax.Array, q_start: jax.Array, kv_len: jax.Array, *_: Any):
            chosen = np.concatenate([row[:count] for row, count in zip(np.asarray(tables), needed, strict=True)])
            query = self.take(q).reshape(-1, heads, case.head_dim)
            cache = self.take(pages.data)
            lists = [number(np.cumsum([0, *needed])), number(chosen), number((kv_len - 1) % case.page_size + 1)]
            sizes = (heads, case.kv_heads, case.head_dim, case.page_size)
            types = {"q_data_type": query.dtype, "kv_data_type": cache.dtype}
            workspace = self.torch.zeros(WORKSPACE_BYTES, dtype=self.torch.uint8, device="cuda")
            if case.part == "decode":
                wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=case.group > 1)
                wrapper.plan(*lists, *sizes, **types)
            else:
                wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
                wrapper.plan(number(q_start), *lists, *sizes, causal=True, **types)
            return lambda: wrapper.run(query, cache)

        shape = (case.tokens, case.kv_heads, case.group, case.head_dim)
        return TorchWork(self.torch, [function(*arguments) for arguments in sets], lambda y: y.reshape(shape))


PEERS = (XlaDense, RaggedPagedAttention, TorchMatmul, TorchAttention, FlashInfer)
