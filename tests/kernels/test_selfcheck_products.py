"""The checks of products with quantized weights: right ones pass, and each kind of error is seen."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from test_selfcheck import findings, is_right, now_and_then

from jaxserve.devices.mesh import make_mesh
from jaxserve.models import load
from jaxserve.models.load import read_model
from jaxserve.models.quantized import quantized_abstract
from jaxserve.models.weights import abstract_params
from jaxserve.pallas_kernels import checked_ops as operations
from jaxserve.pallas_kernels import device_ops, tuning
from jaxserve.pallas_kernels.checked_ops import Trials, passing
from jaxserve.pallas_kernels.experts import as_codes
from jaxserve.pallas_kernels.ops import Ops, gate
from jaxserve.pallas_kernels.quant_matmul import reference as quantized
from jaxserve.pallas_kernels.quant_matmul import ways
from jaxserve.pallas_kernels.registry import BackendError, Device, MatmulProblem
from jaxserve.pallas_kernels.selfcheck import (
    GROUPED_ROWS,
    MATMUL_ROWS,
    REPEATS,
    check_grouped,
    check_matmul,
    tolerance,
)
from jaxserve.pallas_kernels.selfcheck_cases import make_weight
from jaxserve.pallas_kernels.tuning import Product, Table


def checked_matmul(*args):
    return operations.checked_matmul(Trials(), *args)


F32, BF16, F16 = (np.dtype(name) for name in (np.float32, ml_dtypes.bfloat16, np.float16))
INT8, INT4, FP8 = (np.dtype(name) for name in (np.int8, ml_dtypes.int4, ml_dtypes.float8_e4m3fn))
FP4 = np.dtype(ml_dtypes.float4_e2m1fn)

MATMULS = {
    "int8 channel": MatmulProblem(BF16, INT8, 320, 256, (1, 256)),
    "int4 g128": MatmulProblem(BF16, INT4, 320, 512, (1, 128), has_zero=True),
    "int4 g32": MatmulProblem(F32, INT4, 96, 256, (1, 32), has_zero=True, has_bias=True),
    "fp8 blocks": MatmulProblem(F16, FP8, 320, 256, (128, 128)),
    "fp8 tensor": MatmulProblem(BF16, FP8, 328, 256, (328, 256)),
    "MXFP4": MatmulProblem(BF16, FP4, 320, 288, (1, 32), scale_dtype=np.dtype(ml_dtypes.float8_e8m0fnu)),
    "NVFP4": MatmulProblem(BF16, FP4, 320, 256, (1, 16), scale_dtype=FP8),
    "blocks": MatmulProblem(BF16, np.dtype(np.uint8), 320, 512, (1, 256), kind="Q4_K"),
    "bf16": MatmulProblem(BF16, BF16, 320, 256, (320, 256)),
    "f16": MatmulProblem(F16, F16, 96, 256, (96, 256)),
    "f32": MatmulProblem(F32, F32, 96, 256, (96, 256)),
}
WIDE = MatmulProblem(BF16, INT4, 72, 8192, (1, 32), has_zero=True)


def rounded_weight(x, w, **_):
    """Products with a weight in the type of x, and results in that type."""
    weight = quantized.dequantize(w).astype(x.dtype)
    return jnp.dot(x, weight.T, precision="highest", preferred_element_type=jnp.float32).astype(x.dtype)


@pytest.mark.parametrize("name", MATMULS)
def test_right_products_pass(name):
    problem = MATMULS[name]
    is_right(check_matmul, quantized.quant_matmul, problem, repeats=1)
    worst = is_right(check_matmul, rounded_weight, problem, repeats=0)
    assert worst < 0.7 * tolerance(problem.x_dtype, 0.75)
    is_right(check_grouped, quantized.grouped_quant_matmul, problem, repeats=1)


def test_a_large_weight_is_tried_with_fewer_outputs():
    assert make_weight(replace(WIDE, rows=300), 0).shape == (300, 8192)
    large = replace(MATMULS["int4 g128"], rows=128_256, inputs=4096, block=(1, 4096))
    rows, inputs = make_weight(large).shape
    assert inputs == 4096
    assert rows % 1024 == 128_256 % 1024
    assert 12_000 < rows < 17_000


def multiply_with(change, x, w, **_):
    return quantized.quant_matmul(x, change(w))


PRODUCTS = {
    "rows swapped": (MATMULS["int8 channel"], lambda x, w, **_: jnp.roll(quantized.quant_matmul(x, w), 1, axis=0)),
    "columns swapped": (MATMULS["int8 channel"], lambda x, w, **_: jnp.roll(quantized.quant_matmul(x, w), 1, axis=1)),
    "one column": (MATMULS["fp8 blocks"], lambda x, w, **_: quantized.quant_matmul(x, w).at[:, 77].multiply(1.05)),
    "one row": (MATMULS["int8 channel"], lambda x, w, **_: quantized.quant_matmul(x, w).at[0].multiply(1.01)),
    "one zero point": (
        MATMULS["int4 g128"],
        partial(multiply_with, lambda w: replace(w, zero=w.zero.at[5, 1].add(1))),
    ),
    "one zero point of many": (WIDE, partial(multiply_with, lambda w: replace(w, zero=w.zero.at[5, 100].add(1)))),
    "one scale": (
        MATMULS["fp8 blocks"],
        partial(multiply_with, lambda w: replace(w, scale=w.scale.at[1, 1].multiply(1.05))),
    ),
    "no bias": (MATMULS["int4 g32"], partial(multiply_with, lambda w: replace(w, bias=None))),
    "NaN": (MATMULS["fp8 tensor"], lambda x, w, **_: quantized.quant_matmul(x, w).at[-1, -1].set(jnp.nan)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_wrong_products_are_seen(name):
    problem, wrong = PRODUCTS[name]
    assert findings(check_matmul, wrong, problem, repeats=0)[1]


def test_errors_of_one_plan_and_races_are_seen():
    def only(rows):
        return lambda x, w, **_: quantized.quant_matmul(x, w) * (1.02 if len(x) == rows else 1.0)

    for count in MATMUL_ROWS:
        _, wrong = findings(check_matmul, only(count), MATMULS["int8 channel"], repeats=0)
        assert [f.what for f in wrong] == [f"{count} rows"]
    flicker = now_and_then(REPEATS)
    _, wrong = findings(
        check_matmul, lambda x, w, **_: flicker(quantized.quant_matmul(x, w)), MATMULS["int8 channel"], rows=(17,)
    )
    assert "equal calls" in wrong[0].where


def nothing_of(x, **axes):
    """0 in float32, or NaN if there is NaN in x."""
    return 0 * x.astype(jnp.float32).sum(**axes)


def test_rows_of_nan_and_counts_are_seen():
    """Rows of padding may hold anything. A kernel that lets them reach other rows is right as long as they are numbers,
    and one that ends early is right as long as all rows matter."""

    def leaking(x, w, **_):
        return quantized.quant_matmul(x, w) + nothing_of(x)

    def ending_early(x, w, count):
        return jnp.where(
            jnp.arange(len(x))[:, None] < jnp.where(count < len(x), count - 1, count), quantized.quant_matmul(x, w), 0
        )

    for wrong in (leaking, ending_early):
        right, seen = findings(check_matmul, wrong, MATMULS["int8 channel"], repeats=0)
        assert [f.what for f in right] == ["1 rows"]
        assert {f.where.split(" row ")[0] for f in seen} == {"NaN in other rows changes"}


def test_errors_of_one_plan_of_experts_are_seen():
    def only(rows):
        return lambda x, w, sizes: quantized.grouped_quant_matmul(x, w, sizes) * (1.02 if len(x) == rows else 1.0)

    for count in GROUPED_ROWS:
        for name in ("int4 g128", "bf16"):
            _, wrong = findings(check_grouped, only(count), MATMULS[name], repeats=0)
            assert [f.what for f in wrong] == [f"experts of {count} rows"]


def test_experts_that_spread_nan_are_seen():
    def to_all(x, w, sizes):
        return quantized.grouped_quant_matmul(x, w, sizes) + nothing_of(x)

    def to_rows_of_none(x, w, sizes):
        mine = jnp.arange(len(x))[:, None] < sizes.sum()
        return quantized.grouped_quant_matmul(x, w, sizes) + jnp.where(mine, 0, nothing_of(x, axis=1, keepdims=True))

    for wrong, says in (
        (to_all, "NaN in other rows changes row 0"),
        (to_rows_of_none, "a row of no expert is not zero"),
    ):
        right, seen = findings(check_grouped, wrong, MATMULS["bf16"], repeats=0)
        assert not right
        assert {f.where for f in seen} == {says}


def test_wrong_experts_are_seen():
    def shifted(x, w, sizes):
        return quantized.grouped_quant_matmul(x, w, jnp.roll(sizes, 1))

    def beyond(x, w, sizes):
        return quantized.grouped_quant_matmul(x, w, sizes.at[-1].add(1))

    for wrong in (shifted, beyond):
        for name in ("int4 g128", "blocks"):
            assert findings(check_grouped, wrong, MATMULS[name], repeats=0)[1]


def test_a_wrong_product_is_not_used(monkeypatch, caplog):
    class Wrong:
        quant_matmul = staticmethod(PRODUCTS["one column"][1])

    problems = [MATMULS["int8 channel"], MATMULS["int4 g128"]]
    device = Device("gpu", "some GPU", (9, 0))
    monkeypatch.setattr(operations, "choose", lambda operation, device, problem, backend: "triton")
    monkeypatch.setattr(operations, "load", lambda operation, backend: Wrong)
    assert checked_matmul(device, problems, "auto") == "xla"
    assert "the matmul kernel is wrong on this device: 17 rows: off by" in caplog.text
    with pytest.raises(BackendError, match="the matmul backend triton is wrong on this device"):
        checked_matmul(device, problems, "triton")
    monkeypatch.setattr(operations, "load", lambda operation, backend: quantized)
    assert checked_matmul(device, problems, "triton") == "triton"


def test_products_in_parts_are_tried(monkeypatch, caplog):
    """As steps use them: parts that are lost or added up twice are seen, although whole products are right."""

    class Partials:
        quant_matmul = staticmethod(quantized.quant_matmul)
        lost = False

        @classmethod
        def quant_matmul_parts(cls, x, w, **_):
            y = quantized.quant_matmul(x, w)
            return y[None].astype(x.dtype) if len(x) > 64 else jnp.stack([0.75 * y, 0.25 * y])[: 1 if cls.lost else 2]

    device = Device("gpu", "some GPU", (9, 0))
    monkeypatch.setattr(operations, "choose", lambda operation, device, problem, backend: "triton")
    monkeypatch.setattr(operations, "load", lambda operation, backend: Partials)
    assert checked_matmul(device, [MATMULS["int4 g128"]], "auto") == "auto"
    Partials.lost = True
    assert checked_matmul(device, [MATMULS["int4 g128"]], "auto") == "xla"
    assert "is wrong on this device: parts of 1 rows: off by" in caplog.text


def test_a_wrong_gate_is_not_used(monkeypatch, caplog):
    """Only the gate in the product's launch: the product itself has checks of its own."""

    class Gated:
        wrong = False

        @staticmethod
        def why_not_gated(problem):
            return "zero points" if problem.has_zero else None

        @classmethod
        def gated_matmul(cls, x, w, activation):
            y = quantized.quant_matmul(x, w).astype(x.dtype).reshape(len(x), -1, 2)
            return gate(y[..., ::-1] if cls.wrong else y, activation)

    device = Device("gpu", "some GPU", (9, 0))
    problem = replace(MATMULS["int8 channel"], activation="silu")
    monkeypatch.setattr(operations, "choose", lambda operation, device, problem, backend: "triton")
    monkeypatch.setattr(operations, "load", lambda operation, backend: Gated)

    def begun(*problems, backend="auto"):
        trials = Trials()
        for one in problems:
            trials.begin_gates(device, one, backend)
        return Ops(gated_matmul=Gated.gated_matmul, trials=trials)

    assert passing(begun(problem, problem)).gated_matmul is not None
    Gated.wrong = True
    assert passing(begun(problem)).gated_matmul is None
    assert "the gated matmul kernel is wrong on this device: gate of 1 rows: off by" in caplog.text
    with pytest.raises(BackendError, match="the gated matmul backend triton is wrong on this device"):
        passing(begun(problem, backend="triton"))
    assert begun(replace(problem, has_zero=True)).trials.all == [], "no kernel gates it"
    floats = replace(MATMULS["bf16"], activation="silu")
    assert begun(floats).trials.all == [], "where nothing was measured, XLA computes the product"
    tuning.use(device.kind, Table(products={ways.key(floats): Product(False, ((1, "mosaic_gpu"),))}))
    try:
        monkeypatch.setattr(ways, "why_not", lambda *_: None)
        assert passing(begun(floats)).gated_matmul is None, "its kernel is used, and wrong"
    finally:
        tuning.clear()


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(("platform", "kind"), [("gpu", "NVIDIA H200"), ("tpu", "TPU v6e")])
def test_wrong_experts_in_floats_are_not_used(monkeypatch, dtype, platform, kind):
    """Their kernel is the one of quantized experts."""

    def wrong(x, w, group_sizes):
        return quantized.grouped_quant_matmul(x, w, group_sizes).at[0].set(0.0)

    device = Device(platform, kind, (9, 0) if platform == "gpu" else None)
    problem = MatmulProblem.of(jnp.zeros((1, 256), dtype), as_codes(jnp.zeros((6, 96, 256), dtype)))
    kernels = SimpleNamespace(why_not=lambda *_: None, grouped_quant_matmul=wrong)
    monkeypatch.setattr(device_ops, "load", lambda operation, backend: kernels)
    has_kernel = (platform, dtype) != ("tpu", F16)
    assert checked_matmul(device, [], "auto", [problem]) == ("xla" if has_kernel else "auto")
    assert checked_matmul(device, [], "xla", [problem]) == "xla"
    kernels.grouped_quant_matmul = quantized.grouped_quant_matmul
    assert checked_matmul(device, [], "auto", [problem]) == "auto"


def test_experts_in_floats_are_tried(model_folders, monkeypatch):
    """The stacks of a model without quantized weights, one of each shape and dtype."""
    tried = []
    monkeypatch.setattr(
        load, "checked_matmul", lambda trials, device, problems, backend, grouped: tried.extend(grouped)
    )
    model = read_model(model_folders("qwen3_moe_plain"))
    mesh = make_mesh()
    for dtype in (F32, BF16):
        decoder = load.make_decoder(model, mesh, dtype)
        abstract = abstract_params(decoder, mesh)
        params = {path: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for path, x in abstract.items()}
        load.checked_matmul_backend(decoder, unflatten_dict(params, sep="/"), mesh, "auto")
    assert {(p.x_dtype, p.codes_dtype) for p in tried} == {(F32, F32), (BF16, BF16)}
    assert len(tried) == 4


def test_gates_of_all_weights_are_tried(model_folders):
    """The products of gates and ups, by their paths: in floats and with codes."""
    mesh = make_mesh()
    decoder = load.make_decoder(read_model(model_folders("llama3_gqa")), mesh, BF16)
    params = abstract_params(decoder, mesh)
    path = "layers_0/mlp/gate_up/kernel"
    out, inputs = params[path].shape
    ((floats,), (codes,)) = (
        load._products(decoder, flat, mesh, "auto").gated for flat in (params, quantized_abstract(params, "int8"))
    )
    assert (floats.codes_dtype, codes.codes_dtype) == (BF16, INT8)
    assert {(one.rows, one.inputs, one.activation) for one in (floats, codes)} == {(out, inputs, "silu")}


def test_a_wrong_grouped_product_is_not_used(monkeypatch):
    class Wrong:
        quant_matmul = staticmethod(quantized.quant_matmul)

        @staticmethod
        def grouped_quant_matmul(x, w, group_sizes):
            return quantized.grouped_quant_matmul(x, w, group_sizes).at[0].set(0.0)

    device = Device("gpu", "some GPU", (9, 0))
    monkeypatch.setattr(operations, "choose", lambda operation, device, problem, backend: "triton")
    for module, expected in ((Wrong, "xla"), (quantized, "auto")):
        monkeypatch.setattr(operations, "load", lambda operation, backend, module=module: module)
        for name in ("int4 g128", "blocks"):
            assert checked_matmul(device, [], "auto", [MATMULS[name]]) == expected
