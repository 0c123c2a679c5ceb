"""The CPU's kernels give a row the same bits, whatever rows are beside it, in which order, and how many there are."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_cpu_panels import BLOCK_TYPES, FLOAT4, float4, gguf

from jaxserve.execution.filters import EXCLUDED
from jaxserve.models.rope import rope_angles
from jaxserve.models.rope_spec import RopeConfig
from jaxserve.pallas_kernels import cpu, cpu_panels
from jaxserve.pallas_kernels.expert_routing import Router, route
from jaxserve.pallas_kernels.experts import ExpertWeights
from jaxserve.pallas_kernels.operands import Partials
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.paged_attention import cpu as attention
from jaxserve.pallas_kernels.types import DrawSettings, KVPages, QuantArray

pytestmark = pytest.mark.skipif(not cpu_panels.available() or not cpu.available(), reason="no C++ compiler")

ROWS = 41
RNG = np.random.default_rng(3)
ORDER = RNG.permutation(ROWS)


def bits(x) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)


def check_rows(function, *rows: np.ndarray) -> None:
    """Compares `function` of arrays [ROWS, …] with its results for other numbers of rows, and in another order."""
    run = jax.jit(function)
    whole = jax.tree.map(np.asarray, run(*rows))
    for chosen in (slice(5, 6), slice(0, 2), slice(7, 10), slice(3, 11), slice(1, 34), ORDER):
        some = run(*(x[chosen] for x in rows))
        for was, now in zip(jax.tree.leaves(whole), jax.tree.leaves(some), strict=True):
            np.testing.assert_array_equal(bits(was[chosen]), bits(np.asarray(now)), err_msg=f"rows {chosen}")


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_float_panels(dtype, arithmetic):
    w = jax.tree.map(jnp.asarray, cpu_panels.pack_floats(normal(150, 5001).astype(dtype), arithmetic))
    check_rows(lambda x: cpu_panels.matmul(x, w), normal(ROWS, 5001))


@pytest.mark.parametrize("arithmetic", ["float32", "int8"])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_gguf_panels(name, arithmetic):
    w, _ = gguf(name, 100, 1536, arithmetic)
    check_rows(lambda x: cpu_panels.matmul(x, w), normal(ROWS, 1536))


@pytest.mark.parametrize("arithmetic", ["float32", "int8"])
@pytest.mark.parametrize("kind", FLOAT4, ids=lambda kind: kind.name)
def test_4_bit_float_panels(kind, arithmetic):
    w, _ = float4(kind, 100, 1536, arithmetic)
    check_rows(lambda x: cpu_panels.matmul(x, w), normal(ROWS, 1536))


@pytest.mark.parametrize("codes", [np.int8, ml_dtypes.int4], ids=["int8", "int4"])
def test_grouped_panels(codes):
    scale = RNG.uniform(0.01, 1, (100, 12)).astype(np.float32)
    w = cpu_panels.pack_quantized(
        QuantArray(RNG.integers(-8, 8, (100, 1536)).astype(codes), scale, None, None, (1, 128)), "int8"
    )
    w = jax.tree.map(jnp.asarray, w)
    check_rows(lambda x: cpu_panels.matmul(x, w), normal(ROWS, 1536))


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
def test_mixture_of_experts(arithmetic):
    pack = partial(cpu_panels.pack_floats, arithmetic=arithmetic)
    stacks = []
    for out, inputs in ((96, 200), (200, 48)):
        members = normal(6, out, inputs).astype(ml_dtypes.bfloat16)
        stacks.append(jax.tree.map(jnp.asarray, cpu_panels.stack(map(pack, members), 6)))
    gate = Ops().gate_of("silu")
    chosen = np.stack([RNG.permutation(6)[:3] for _ in range(ROWS)]).astype(np.int32)
    weights = RNG.uniform(0.1, 1, (ROWS, 3)).astype(np.float32)
    run = lambda x, chosen, weights: cpu_panels.mixture(x, chosen, weights, ExpertWeights(*stacks), gate=gate)  # noqa: E731
    check_rows(run, normal(ROWS, 200), chosen, weights)


@pytest.mark.parametrize("experts", [8, 128, 256])
def test_routers(experts):
    """In plain XLA, whose sums of short rows are in order here."""
    check_rows(lambda x: route(x, Router(top_k=4, normalized=True)), normal(ROWS, experts))


@pytest.mark.parametrize("size", [100, 4096])
def test_between_products(size):
    ops = cpu.CpuOps(rms_norm=cpu.rms_norm)
    scale = jnp.asarray(normal(size))
    bias = jnp.asarray(normal(size))
    check_rows(lambda x: cpu.rms_norm(x, scale, 1e-5), normal(ROWS, size))
    check_rows(
        lambda x, y: ops.add_norm(x, Partials(y[None], bias), scale, 1e-5), normal(ROWS, size), normal(ROWS, size)
    )
    for activation in ("silu", "gelu", "gelu_tanh"):
        check_rows(lambda x: cpu.gate(x, activation), normal(ROWS, size, 2))  # noqa: B023


def test_rotary_positions():
    """The angles are plain XLA, number by number."""
    positions = RNG.integers(0, 100_000, ROWS).astype(np.int32)
    angles = partial(rope_angles, RopeConfig(theta=500000.0), 100)
    check_rows(lambda p, x: cpu.rope(x, angles(p).cos, angles(p).sin), positions, normal(ROWS, 3, 100))


@pytest.mark.parametrize("vocab", [50, 151_936])
def test_rows_of_logits(vocab):
    logits = 3 * normal(ROWS, vocab)
    top_k = (RNG.integers(0, 100, ROWS) * RNG.integers(0, 2, ROWS)).astype(np.int32)
    top_p = RNG.uniform(0.5, 1, ROWS).astype(np.float32)
    min_p = RNG.uniform(0, 0.01, ROWS).astype(np.float32)
    keys = np.zeros((ROWS, 2), np.uint32)

    def filtered(x, *settings):
        return cpu.filter_logits(x, DrawSettings(jnp.ones(len(x)), *settings), EXCLUDED)

    check_rows(filtered, logits, top_k, top_p, min_p, keys)
    check_rows(cpu.log_softmax, logits)
    check_rows(cpu.arg_max, logits)
    wide = logits[:3].astype(np.float64)
    exact = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(cpu.log_softmax(jnp.asarray(logits[:3])), exact, rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    ("dtype", "group", "dim", "window"),
    [(np.float32, 4, 64, None), (np.float32, 3, 80, 50), (ml_dtypes.bfloat16, 1, 64, 50), (np.int8, 2, 128, None),
     (np.float32, 12, 128, None)],
)  # fmt: skip
def test_attention(dtype, group, dim, window):
    """A prompt of 150 tokens in chunks of any size, decodes included, and beside another row."""
    tokens = 150
    heads = 2
    page = 16
    pages = 2 * 10 + 1
    q = normal(tokens, heads, group, dim)
    data = 30 * normal(pages, 2, heads, page, dim) if dtype == np.int8 else normal(pages, 2, heads, page, dim)
    scale = RNG.uniform(0.01, 0.1, data.shape[:-1]).astype(np.float32) if dtype == np.int8 else None
    kv = KVPages(jnp.asarray(data.astype(dtype)), None if scale is None else jnp.asarray(scale))
    table = jnp.asarray(1 + RNG.permutation(20).reshape(2, 10), jnp.int32)
    options = {"scale": dim**-0.5, "window": window, "softcap": 20.0 if group == 3 else None}

    @partial(jax.jit, static_argnames="one_order")
    def run(q, q_start, kv_len, one_order=True):
        return attention.paged_attention(q, kv, table, q_start, kv_len, jnp.int32(0), one_order=one_order, **options)

    whole = np.asarray(run(q, jnp.array([0, tokens, tokens]), jnp.array([tokens, 0])))
    differs = False
    for first, size in ((0, 1), (149, 1), (63, 2), (64, 7), (100, 30), (120, 17), (17, 64)):
        some = q[first : first + size]
        other = normal(3, heads, group, dim)
        where = jnp.array([0, size, size + 3]), jnp.array([first + size, 40])
        out = np.asarray(run(np.concatenate([some, other]), *where))[:size]
        np.testing.assert_array_equal(bits(out), bits(whole[first : first + size]), err_msg=f"{size} from {first}")
        usual = np.asarray(run(np.concatenate([some, other]), *where, one_order=False))[:size]
        np.testing.assert_allclose(out, usual, rtol=2e-4, atol=2e-5)
        differs |= not np.array_equal(bits(usual), bits(out))
    assert differs == (group < 10), "only few queries are usually summed in another order"
