"""A mixture of experts against NumPy in float64: routing, groups of any size, padding, quantized weights."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.checkpoints.quantize import Scheme, rtn
from jaxserve.checkpoints.quantized import dequantize as host_values
from jaxserve.models.quantized import FORMS
from jaxserve.pallas_kernels import cpu_panels
from jaxserve.pallas_kernels.device_ops import grouped_matmul_of, mixture_of
from jaxserve.pallas_kernels.expert_routing import Router, route
from jaxserve.pallas_kernels.experts import ExpertWeights, grouped_matmul, mixture
from jaxserve.pallas_kernels.lora.reference import add_expert_adapters
from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.quant_matmul.reference import dequantize
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.types import QuantArray

TOKENS = 13
EXPERTS = 6
INPUTS = 32
SIZE = 24
CPU = Device("cpu", "cpu")
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


def test_rows_of_no_expert_are_zero_where_xla_leaves_them_unset(monkeypatch):
    """As XLA:TPU does. A device that has some of the experts adds its rows to those of other devices."""
    product = jax.lax.ragged_dot_general

    def unset(x, w, sizes, *args, **options):
        return jnp.where(jnp.arange(len(x))[:, None] < jnp.sum(sizes), product(x, w, sizes, *args, **options), jnp.nan)

    monkeypatch.setattr(jax.lax, "ragged_dot_general", unset)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((5, INPUTS), (2, SIZE, INPUTS)))
    out = np.asarray(grouped_matmul(x, w, jnp.array([1, 2], jnp.int32)))
    np.testing.assert_allclose(out[:3], np.concatenate([x[:1] @ w[0].T, x[1:3] @ w[1].T]), rtol=1e-5)
    assert not out[3:].any()
    stack = AdapterStack(w[None, :, :4], w[None, :, :4, :SIZE], jnp.full((1, 1), 4, jnp.int32), (SIZE,))
    nobody = jnp.zeros(5, jnp.int32), jnp.full(5, 2), jnp.array([1, 2], jnp.int32)
    assert not np.asarray(add_expert_adapters(jnp.zeros((5, SIZE)), x, stack, *nobody))[3:].any()


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
    whole = np.asarray(dequantize(w), np.float64)
    at = 0
    for expert, size in enumerate(sizes):
        np.testing.assert_allclose(found[at : at + size], x[at : at + size] @ whole[expert].T, rtol=1e-4, atol=1e-4)
        at += size
    np.testing.assert_array_equal(found[at:], 0)


def exact_route(logits, router, correction):
    """Token by token in float64, as the routers' papers describe it."""
    found = []
    for row in logits.astype(np.float64):
        scores = softmax(row) if router.score == "softmax" else 1 / (1 + np.exp(-row))
        order = scores + (0 if correction is None else correction)
        grouped = np.sort(order.reshape(router.groups, -1))
        groups = grouped[:, -1] if router.group_score == "max" else grouped[:, -2:].sum(1)
        best = np.argsort(-groups)[: router.top_groups]
        allowed = np.repeat(np.isin(np.arange(router.groups), best), len(row) // router.groups)
        own = np.argsort(-np.where(allowed, order, -np.inf))[: router.top_k]
        weights = scores[own]
        if router.normalized:
            weights = weights / (max(weights.sum(), router.least_sum, 1e-20) + router.sum_offset)
        found.append((own.tolist(), weights * router.scale))
    return found


@pytest.mark.parametrize(
    "choices",
    [
        {"score": "sigmoid"},
        {"score": "sigmoid", "normalized": False, "weighs_inputs": True},
        {"score": "sigmoid", "corrected": True, "groups": 4, "top_groups": 2, "group_score": "top2", "scale": 2.5},
        {"groups": 4, "top_groups": 2, "normalized": False, "scale": 16.0},
        {"groups": 3, "top_groups": 1, "normalized": True},
        {"corrected": True, "least_sum": 0.4},
        {"least_sum": 1e-12, "scale": 0.5},
        {"sum_offset": 0.3},
    ],
)
def test_routers(choices):
    router = Router(top_k=3, **choices)
    assert router.problem(12) is None
    logits = rng.standard_normal((40, 12)).astype(np.float32) * 2
    correction = rng.standard_normal(12).astype(np.float32) if router.corrected else None
    given = None if correction is None else jnp.asarray(correction)
    chosen, weights = route(jnp.asarray(logits), router, given)
    for (own, expected), row, weight in zip(
        exact_route(logits, router, correction), np.asarray(chosen), np.asarray(weights), strict=True
    ):
        assert row.tolist() == own
        np.testing.assert_allclose(weight, expected, rtol=1e-5)


@pytest.mark.parametrize("jitter", [0.01, 0.4])
def test_sparsemixer(jitter):
    """Token by token in float64, as its paper describes it: the second choice is among the experts but the first."""
    logits = rng.standard_normal((40, 12)).astype(np.float32) * 2
    chosen, weights = route(jnp.asarray(logits), Router(top_k=2, score="sparsemixer", jitter=jitter))
    for row, own, found in zip(logits.astype(np.float64), np.asarray(chosen), np.asarray(weights), strict=True):
        assert own.tolist() == np.argsort(-row)[:2].tolist()
        left = row.copy()
        for expert, weight in zip(own, found, strict=True):
            best = row[expert]
            near = (best - row) / np.maximum(np.abs(row), best) <= 2 * jitter
            among = np.exp(np.where(near, left, -np.inf) - best)
            np.testing.assert_allclose(weight, 1 / among.sum(), rtol=1e-5)
            left[expert] = -np.inf


def test_impossible_routers():
    assert "between 1 and the 4 experts" in Router(top_k=5).problem(4)
    assert "3 equal groups" in Router(top_k=1, groups=3).problem(4)
    assert "fewer than 3" in Router(top_k=3, groups=4, top_groups=1).problem(8)
    assert "no two greatest" in Router(top_k=1, groups=4, group_score="top2").problem(4)


PANELS = ["float32", "bfloat16", "Q8_0", "Q4_K", "Q6_K", "int4", "int8", "mxfp4", "nvfp4"]


def panel_stack(kind, out, inputs, arithmetic):
    """A stack of random weights in panels, and their values [experts, out, inputs] in float64."""
    members = []
    values = []
    for expert in range(EXPERTS):
        if kind in ("float32", "bfloat16"):
            plain = (rng.standard_normal((out, inputs)) / 8).astype(ml_dtypes.bfloat16 if kind == "bfloat16" else "f4")
            members.append(cpu_panels.pack_floats(plain, arithmetic))
            values.append(plain.astype(np.float64))
            continue
        if kind in cpu_panels.GGUF_TYPES:
            gguf = pytest.importorskip("gguf", reason="gguf is not installed")
            gguf_files = pytest.importorskip("gguf_files", reason="needs gguf", exc_type=ImportError)
            data = gguf_files.random_blocks(gguf_files.Kind[kind], out, inputs, expert)
            part = cpu_panels.Rows(cpu_panels.GGUF_TYPES[kind], data)
            members.append(cpu_panels.pack([part], np.arange(out), inputs, arithmetic))
            values.append(gguf.quants.dequantize(data, gguf_files.Kind[kind]).astype(np.float64))
            continue
        dtype, group, scale = FORMS[kind]
        if kind in ("mxfp4", "nvfp4"):
            codes = rng.integers(0, 16, (out, inputs), np.uint8).view(dtype)
        else:
            codes = rng.integers(-8, 8, (out, inputs), np.int8).astype(dtype)
        scales = rng.uniform(0.01, 0.03, (out, inputs // (group or inputs))).astype(scale)
        gain = rng.uniform(0.5, 1, (out, 1)).astype(np.float32) if kind == "nvfp4" else None
        w = QuantArray(codes, scales, block=(1, group or inputs), gain=gain)
        members.append(cpu_panels.pack_quantized(w, arithmetic))
        values.append(host_values(w).astype(np.float64))
    return cpu_panels.stack(iter(members), EXPERTS), np.stack(values)


@pytest.mark.skipif(not cpu_panels.available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("kind", PANELS)
def test_panels(kind):
    """One call for a mixture with weights in panels, against plain XLA with the same values: tokens that share experts,
    some beyond the count, experts without tokens, biases, every activation."""
    size, inputs, out = (256, 256, 272) if kind.startswith("Q") else (128, 128, 40)
    gate_up, first = panel_stack(kind, 2 * size, inputs, "float32")
    down, second = panel_stack(kind, out, size, "float32")
    assert (gate_up.shape, down.shape) == (first.shape, second.shape)
    first_scale = np.abs(first).max()
    second_scale = np.abs(second).max()
    bias = rng.standard_normal((EXPERTS, 2 * size)).astype(np.float32)
    x = (rng.standard_normal((TOKENS, inputs)) / first_scale / np.sqrt(inputs)).astype(np.float32)
    chosen = np.stack([rng.permutation(EXPERTS - 1)[:3] for _ in range(TOKENS)]).astype(np.int32)
    weights = rng.uniform(0.2, 1, (TOKENS, 3)).astype(np.float32)
    chosen[2, 1] = EXPERTS  # none
    cases = [("silu", None, True), ("silu", 0.7, True), ("gelu", None, False), ("gelu_tanh", None, True)]
    for (activation, limit, biased), weighs_inputs, count in zip(
        cases, (False, True, False, False), (TOKENS, 9, 1, 0), strict=True
    ):
        gate = Ops().gate_of(activation, limit)
        w = ExpertWeights(gate_up, down, jnp.asarray(bias) if biased else None)
        options = {"gate": gate, "count": jnp.int32(count), "weighs_inputs": weighs_inputs}
        found = np.asarray(mixture_of(CPU)(*map(jnp.asarray, (x, chosen, weights)), w, **options))
        plain = ExpertWeights(*(jnp.asarray(v.astype(np.float32)) for v in (first, second)), w.gate_up_bias)
        expected = np.asarray(mixture(*map(jnp.asarray, (x, chosen, weights)), plain, **options))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5 * max(second_scale, 1) * np.sqrt(size))
        assert (found[count:] == 0).all()
    rows = jnp.asarray(rng.standard_normal((9, inputs)).astype(np.float32))
    sizes = jnp.asarray([0, 4, 0, 1, 2, 0], jnp.int32)
    found = np.asarray(grouped_matmul_of(CPU)(rows, gate_up, sizes))
    expected = np.asarray(grouped_matmul(rows, jnp.asarray(first.astype(np.float32)), sizes))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3 * first_scale)


@pytest.mark.parametrize(("dtype", "backend"), [("float16", "auto"), ("bfloat16", "xla")])
def test_stacks_of_floats_that_tpus_multiply_in_plain_xla(dtype, backend):
    """Mosaic loads no float16. Its kernel would not run here."""
    x = jnp.ones((4, 8), dtype)
    w = jnp.ones((2, 3, 8), dtype)
    sizes = jnp.array([1, 2])
    found = grouped_matmul_of(Device("tpu", "TPU v5 lite"), backend)(x, w, sizes)
    np.testing.assert_array_equal(found, np.repeat([[8.0], [8], [8], [0]], 3, axis=1))


def test_clamped_gate():
    pairs = (rng.standard_normal((4, 5, 2)) * 5).astype(np.float32)
    gate = np.minimum(pairs[..., 0], 2.0).astype(np.float64)
    up = np.clip(pairs[..., 1], -2, 2)
    found = Ops().gate_of("silu", 2.0)(jnp.asarray(pairs))
    np.testing.assert_allclose(np.asarray(found), (up + 1) * gate / (1 + np.exp(-1.702 * gate)), rtol=1e-5, atol=1e-6)


def test_bounded_gate():
    pairs = (rng.standard_normal((4, 5, 2)) * 5).astype(np.float32)
    gate, up = pairs[..., 0].astype(np.float64), pairs[..., 1].astype(np.float64)
    found = Ops().gate_of("silu", bound=1.5)(jnp.asarray(pairs))
    expected = np.minimum(gate / (1 + np.exp(-gate)), 1.5) * np.clip(up, -1.5, 1.5)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-6)


def test_softcap_of_a_router():
    logits = rng.standard_normal((TOKENS, EXPERTS)).astype(np.float32) * 5
    found = route(jnp.asarray(logits), Router(top_k=3, score="sigmoid", softcap=1.5))
    capped = 1.5 * np.tanh(logits / 1.5)
    expected = route(jnp.asarray(capped), Router(top_k=3, score="sigmoid"))
    np.testing.assert_array_equal(*(np.asarray(experts) for experts in (found[0], expected[0])))
    np.testing.assert_allclose(*(np.asarray(weights) for weights in (found[1], expected[1])), rtol=1e-5)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_quantized_stacks_on_cpu(kind):
    """Stacks that have no panels, by the C++ kernel, against plain XLA."""
    members = [rtn(rng.standard_normal((24, 64)).astype(np.float32), Scheme(kind, 32 if kind == "int4" else None))
               for _ in range(EXPERTS)]  # fmt: skip
    w = jax.tree.map(lambda *a: jnp.asarray(np.stack([np.asarray(x) for x in a])), *members)
    x = jnp.asarray(rng.standard_normal((TOKENS, 64)).astype(np.float32))
    sizes = jnp.asarray([2, 0, 9, 0, 0, 1])
    found = np.asarray(grouped_matmul_of(CPU)(x, w, sizes.astype(jnp.int32)))
    np.testing.assert_allclose(found, np.asarray(grouped_matmul(x, w, sizes.astype(jnp.int32))), rtol=1e-5, atol=1e-5)
    order = jnp.asarray(np.stack([rng.permutation(64) for _ in range(EXPERTS)]).astype(np.int32))
    ordered = np.asarray(grouped_matmul_of(CPU)(x, replace(w, order=order), sizes.astype(jnp.int32)))
    owner = np.repeat(np.arange(EXPERTS), np.asarray(sizes))
    for row, expert in enumerate(owner):
        alone = x[row][order[expert]] @ np.asarray(dequantize(w))[expert].T
        np.testing.assert_allclose(ordered[row], alone, rtol=1e-4, atol=1e-4)
