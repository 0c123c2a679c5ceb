"""A mixture of experts against NumPy in float64: routing, groups of any size, padding, quantized weights."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.pallas_kernels.experts import ExpertWeights, grouped_matmul, mixture
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.quant_matmul.reference import dequantize
from jaxserve.pallas_kernels.routing import Router, route
from jaxserve.pallas_kernels.types import QuantArray

TOKENS, EXPERTS, INPUTS, SIZE = 13, 6, 32, 24
rng = np.random.default_rng(3)


def softmax(x):
    shifted = np.exp(x - x.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


@pytest.mark.parametrize("normalized", [True, False])
def test_route(normalized):
    logits = rng.standard_normal((TOKENS, EXPERTS)).astype(np.float32) * 3
    chosen, weights = route(jnp.asarray(logits), Router(top_k=2, normalized=normalized))
    exact = softmax(logits.astype(np.float64))
    for row, own, weight in zip(exact, np.asarray(chosen), np.asarray(weights), strict=True):
        assert own.tolist() == np.argsort(-row)[:2].tolist()
        expected = row[own] / (row[own].sum() if normalized else 1.0)
        np.testing.assert_allclose(weight, expected, rtol=1e-5)


def exact_mixture(x, chosen, weights, gate_up, down):
    """Token by token, in float64."""
    out = np.zeros((len(x), down.shape[1]))
    for i, (token, own, weight) in enumerate(zip(x.astype(np.float64), chosen, weights, strict=True)):
        for expert, share in zip(own, weight, strict=True):
            gate, up = (gate_up[expert].astype(np.float64) @ token).reshape(-1, 2).T
            out[i] += share * (down[expert].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
@pytest.mark.parametrize("count", [None, 0, 1, 7, TOKENS])
def test_mixture(top_k, count):
    """With experts that have no token, and with rows of padding, which may hold anything and give 0."""
    x = rng.standard_normal((TOKENS, INPUTS)).astype(np.float32)
    gate_up = rng.standard_normal((EXPERTS, 2 * SIZE, INPUTS)).astype(np.float32) / 5
    down = rng.standard_normal((EXPERTS, INPUTS, SIZE)).astype(np.float32) / 5
    logits = rng.standard_normal((TOKENS, EXPERTS)).astype(np.float32)
    logits[:, 1] = -50  # nobody's, unless all are chosen
    chosen, weights = (np.asarray(a) for a in route(jnp.asarray(logits), Router(top_k=top_k)))
    real = TOKENS if count is None else count
    expected = exact_mixture(x[:real], chosen[:real], weights[:real], gate_up, down)
    x[real:] = np.nan
    ops = Ops() if count is None else Ops().counting(jnp.int32(count))
    x, logits, *matrices = map(jnp.asarray, (x, logits, gate_up, down))
    found = np.asarray(ops.experts(x, logits, ExpertWeights(*matrices), Router(top_k=top_k), ops.gate_of("silu")))
    np.testing.assert_allclose(found[:real], expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(found[real:], 0)


def test_rows_do_not_depend_on_their_neighbours():
    """A token's result is the same to the bit, alone and among others."""
    x = jnp.asarray(rng.standard_normal((TOKENS, INPUTS)).astype(np.float32))
    gate_up = jnp.asarray(rng.standard_normal((EXPERTS, 2 * SIZE, INPUTS)).astype(np.float32))
    down = jnp.asarray(rng.standard_normal((EXPERTS, INPUTS, SIZE)).astype(np.float32))
    chosen = jnp.asarray(rng.integers(0, EXPERTS, (TOKENS, 2)), jnp.int32)
    weights = jnp.full((TOKENS, 2), 0.5, jnp.float32)
    whole = mixture(x, chosen, weights, ExpertWeights(gate_up, down), gate=Ops().gate_of("silu"))
    order = jnp.asarray(rng.permutation(TOKENS))
    again = mixture(x[order], chosen[order], weights[order], ExpertWeights(gate_up, down), gate=Ops().gate_of("silu"))
    np.testing.assert_array_equal(np.asarray(whole)[np.asarray(order)], np.asarray(again))


def test_quantized_experts():
    codes = rng.integers(-7, 8, (EXPERTS, SIZE, INPUTS)).astype(ml_dtypes.int4)
    scale = rng.uniform(0.5, 1.5, (EXPERTS, SIZE, INPUTS // 16)).astype(np.float32)
    w = QuantArray(jnp.asarray(codes), jnp.asarray(scale), block=(1, 16))
    x = rng.standard_normal((TOKENS, INPUTS)).astype(np.float32)
    sizes = np.array([3, 0, 5, 1, 0, 2], np.int32)
    found = np.asarray(grouped_matmul(jnp.asarray(x), w, jnp.asarray(sizes)))
    whole, at = np.asarray(dequantize(w), np.float64), 0
    for expert, size in enumerate(sizes):
        np.testing.assert_allclose(found[at : at + size], x[at : at + size] @ whole[expert].T, rtol=1e-4, atol=1e-4)
        at += size
    np.testing.assert_array_equal(found[at:], 0)
