"""The layers of the decoder. Each weight is declared here, once: shape, dtype, logical axes, initialiser."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import NormalDist
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxserve.models.spec import MLPSpec, ModelConfig
from jaxserve.pallas_kernels.experts import ExpertStacks, ExpertWeights
from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.operands import Partials, Row, value_of
from jaxserve.pallas_kernels.ops import ACTIVATIONS, Ops, gate, rms_norm
from jaxserve.pallas_kernels.types import BlockArray, MixedArray, PanelArray, QuantArray, QuantRows

# Of the results of attention and of recurrent layers.
GATES = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus, "silu": jax.nn.silu}


class Declared(nn.Partitioned[Any]):
    """A parameter as it is declared: its value, its logical axes, and the function that initialises it."""

    init: Any = struct.field(default=None, pytree_node=False)


# One object each, so that weights of equal shapes share the program that makes random ones.
FAN_IN = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
EXPERTS_FAN_IN = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=-2, batch_axis=0)


def weight(
    module: nn.Module, name: str, init: Callable, axes: tuple[str | None, ...], shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Declares a parameter with its logical axes (`jaxserve.devices.mesh.RULES`) and returns its value.

    The parameters may hold a quantized weight in the place of a matrix, or a Row in the place of a vector. Both are
    declared as plain arrays and returned as they are. So are experts, of which a group of devices has a part.
    """
    if module.has_variable("params", name):
        given: Any = module.get_variable("params", name)
        if isinstance(given, QuantArray | BlockArray | PanelArray | MixedArray | Row) or "expert_mlp" in axes:
            return cast(jax.Array, given)

    def declared(key: jax.Array) -> Declared:
        return Declared(init(key, shape, dtype), names=axes, init=init)

    return cast(jax.Array, module.param(name, declared))


def adapters(module: nn.Module, name: str = "lora") -> Any:
    """What adapters add to a product of a module, an AdapterStack (`execution.adapter_stacks`); None: nothing."""
    return module.get_variable("params", name) if module.has_variable("params", name) else None


def reader(module: Any, ops: Ops, *path: str) -> QuantArray | None:
    """The kernel at `path` below a module, if its format says how its inputs are rounded (`QuantArray.activations`);
    else None. The norm before it rounds its result accordingly, except where adapters read the unrounded result."""
    if ops.places is not None:
        return None
    found: Any = module.variables.get("params", {})
    for name in (*path, "kernel"):
        found = found.get(name, {})
    return found if isinstance(found, QuantArray) and found.activations is not None else None


class Linear(nn.Module):
    """A dense layer from the last `len(in_shape)` axes of its input to `out_shape`.

    Like every module here it holds weights. The operations on them, `ops`, are an argument: they know how many rows of
    the batch matter and which adapters its tokens have (`Ops.counting`, `Ops.adapted_by`).
    """

    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical axes of out_shape + in_shape; only the first of each may be split
    use_bias: bool = False
    dtype: Any = jnp.float32
    out_dtype: Any = None  # of the result; None: the dtype of the input
    as_partials: bool = False  # the result is a `Partials` whose last axis joins the axes of `out_shape`
    activation: str | None = None  # the result is gated by it, `Ops.gated_product`, and `out_shape` is (size, 2)

    @nn.compact
    def __call__(self, x: jax.Array | QuantRows, ops: Ops, reader: QuantArray | None = None) -> Any:
        """`reader` of a gated result as in `Ops.gated`."""
        n_out = len(self.out_shape)
        inputs = math.prod(self.in_shape)
        # The weight is stored as a matrix. Devices lay out arrays of more axes differently and copy them at each use.
        axes = (self.axes[0], self.axes[n_out])
        shape = (math.prod(self.out_shape), inputs)
        rows = x if isinstance(x, QuantRows) else x.reshape(-1, inputs)
        kernel = weight(self, "kernel", FAN_IN, axes, shape, self.dtype)
        bias = None
        if self.use_bias:
            bias = weight(self, "bias", nn.initializers.zeros, self.axes[:n_out], self.out_shape, self.dtype)
        flat = bias if bias is None or isinstance(bias, Row) else bias.reshape(-1)
        if self.activation is not None:
            return ops.gated_product(rows, kernel, adapters(self), flat, axes, self.activation, reader)
        y = ops.adapted(rows, kernel, adapters(self), axes, self.as_partials)
        if self.as_partials:
            return Partials(y, flat)
        y = y.reshape(-1, *self.out_shape).astype(self.out_dtype or x.dtype)
        return y if bias is None else y + value_of(bias).astype(y.dtype)


class Embedding(nn.Module):
    """Token embeddings [vocab, hidden]. They are also the output head of models that tie the two."""

    vocab_size: int
    hidden_size: int
    dtype: Any = jnp.float32

    def setup(self) -> None:
        shape = (self.vocab_size, self.hidden_size)
        self.table = weight(self, "table", nn.initializers.normal(1.0), ("vocab", "embed"), shape, self.dtype)

    def __call__(self, token_ids: jax.Array, ops: Ops) -> jax.Array:
        x = ops.embed(self.table, token_ids).astype(self.dtype)
        return ops.embedded(x, token_ids, adapters(self))

    def logits(self, hidden: jax.Array, ops: Ops, stack: AdapterStack | None = None) -> jax.Array:
        """hidden [rows, hidden] -> float32 [rows, vocab]. `stack` is what adapters of the output head add."""
        axes = ("vocab", "embed")
        return ops.adapted(hidden, self.table, stack, axes)


class LearnedPositions(nn.Module):
    """A learned vector for each position, or one of sines and cosines (`spec.LearnedPositions`)."""

    rows: int  # 0: nothing is learned
    offset: int  # the table's row for position 0
    hidden_size: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, positions: jax.Array) -> jax.Array:
        """int32 [tokens] -> [tokens, hidden]."""
        if not self.rows:
            half = self.hidden_size // 2
            frequencies = np.exp(np.arange(half) * -(math.log(1e4) / (half - 1)))
            angles = (positions + self.offset).astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)
            return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(self.dtype)
        shape = (self.rows, self.hidden_size)
        table = weight(self, "table", nn.initializers.normal(0.1), (None, "embed"), shape, self.dtype)
        return jnp.take(table, positions + self.offset, axis=0, mode="clip")


ROUTING = "routing"  # the collection of variables in which a mixture of experts leaves what its router chose


class Experts(nn.Module):
    """A mixture of MLPs. A router chooses a few for each token; see `jaxserve.pallas_kernels.experts`."""

    spec: MLPSpec
    hidden_size: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, ops: Ops, routed: jax.Array | None = None, tokens: jax.Array | None = None
    ) -> Partials:
        """x [tokens, hidden] -> results of the same shape. routed: what the router reads in the place of x. tokens:
        their ids, int32 [tokens], where these tell the experts."""
        experts = self.spec.experts
        hidden = self.hidden_size
        size = self.spec.stored_size or self.spec.size
        assert experts is not None
        count = experts.count
        inner = experts.latent_size or hidden
        axes = (None, "embed")
        bias = experts.router_bias
        reads = (experts.router_size or hidden,)
        router = Linear(reads, (experts.routed,), axes, bias, self.dtype, jnp.float32, name="router")

        def of_experts(name: str, axes: tuple[str | None, ...], shape: tuple[int, ...], given: bool = True) -> Any:
            init = EXPERTS_FAN_IN if len(shape) == 3 else nn.initializers.zeros
            return weight(self, name, init, axes, shape, self.dtype) if given else None

        rows = 2 * size if self.spec.gated else size
        gate_up = of_experts("experts_gate_up", ("expert", "expert_mlp", "embed"), (count, rows, inner))
        down = of_experts("experts_down", ("expert", "embed", "expert_mlp"), (count, inner, size))
        first_bias = of_experts("experts_gate_up_bias", ("expert", "expert_mlp"), (count, 2 * size), self.spec.bias)
        last_bias = of_experts("experts_down_bias", (None, "embed"), (count, hidden), self.spec.bias)
        correction = None
        if experts.router.corrected:
            correction = weight(self, "correction", nn.initializers.zeros, (None,), (experts.routed,), jnp.float32)
        scales = None
        if experts.scaled:
            scales = value_of(weight(self, "scales", nn.initializers.ones, (None,), (count,), jnp.float32))
        chosen = None
        if experts.hashed:
            assert tokens is not None
            shape = (experts.hashed, experts.router.top_k)
            chosen = weight(self, "of_token", nn.initializers.zeros, (None, None), shape, jnp.int32)[tokens]
        of_gate_up, of_down = (adapters(self, f"experts_{name}_lora") for name in ("gate_up", "down"))
        y = ops.experts(
            self._projected("latent_in", hidden, inner, x, ops),
            router(x if routed is None else routed, ops),
            ExpertWeights(gate_up, down, first_bias),
            experts.router,
            ops.gate_of(self.spec.activation, self.spec.limit, self.spec.bound, self.spec.bound_first),
            correction=None if correction is None else value_of(correction),
            scales=scales,
            chosen=chosen,
            zero_from=count if experts.zero else None,
            down_bias=last_bias,
            note=partial(self.sow, ROUTING, "chosen"),
            stacks=None if of_gate_up is None else ExpertStacks(of_gate_up, of_down),
        ).astype(x.dtype)
        y = self._projected("latent_out", inner, hidden, y, ops)
        if experts.out_bias:
            y = y + value_of(of_experts("out_bias", ("embed",), (hidden,)))
        if experts.shared_size:
            y = y + self._shared(x, ops)
        return Partials(y[None])

    def _projected(self, name: str, inputs: int, outputs: int, x: jax.Array, ops: Ops) -> jax.Array:
        """x [tokens, inputs] as a latent, or back; x itself where experts compute with tokens."""
        assert self.spec.experts is not None
        if self.spec.experts.latent_size is None:
            return x
        return Linear((inputs,), (outputs,), (None, "embed"), False, self.dtype, name=name)(x, ops)

    def _shared(self, x: jax.Array, ops: Ops) -> jax.Array:
        """The shared MLP, through which all tokens x [tokens, hidden] go; its result has the same shape."""
        experts = self.spec.experts
        assert experts is not None
        spec = replace(self.spec, size=experts.shared_size, bound=experts.shared_bound, experts=None)
        y = MLP(spec, self.hidden_size, self.dtype, name="shared")(x, ops).reduce(x.dtype)
        if experts.shared_scale != 1.0:
            y = y * jnp.asarray(experts.shared_scale, x.dtype)
        if not experts.shared_gate:
            return y
        axes = (None, "embed")
        gate = Linear((self.hidden_size,), (1,), axes, False, self.dtype, jnp.float32, name="shared_gate")
        return y * jax.nn.sigmoid(gate(x, ops)).astype(x.dtype)


class NormGate(nn.Module):
    """Multiplies x [tokens, size] by sigmoid gates that are projected from it through a latent of `rank` numbers."""

    rank: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        size = x.shape[-1]
        latent = Linear((size,), (self.rank,), (None, "embed"), False, self.dtype, name="down")(x, ops)
        gates = Linear((self.rank,), (size,), ("embed", None), False, self.dtype, jnp.float32, name="up")
        gate = jax.nn.sigmoid(gates(jax.nn.silu(latent), ops))
        return (x.astype(jnp.float32) * gate).astype(x.dtype)


def times(x: jax.Array, scale: float) -> jax.Array:
    """x times a number, rounded once."""
    return x if scale == 1.0 else (x.astype(jnp.float32) * scale).astype(x.dtype)


def weighed(
    x: jax.Array, part: Callable[[jax.Array], Partials], shares: tuple[float, float]
) -> tuple[jax.Array, Partials]:
    """x, and the results of `part` on it, each times its number."""
    return times(x, shares[0]), Partials(times(part(x).reduce(x.dtype), shares[1])[None])


def activation_of(model: ModelConfig, path: str) -> str:
    """The activation of the gated MLP whose gates and ups the weight at `path` computes; "" for other weights, and
    where something else comes before the activation, or a bound behind it."""
    match = re.fullmatch(r"layers_(\d+)/mlp/(shared/)?gate_up/kernel", path)
    layer = model.layers[int(match[1])] if match else None
    mlp = None if layer is None or layer.memory is not None else layer.mlp
    if match is None or mlp is None or mlp.bias or mlp.limit or mlp.sparsity or mlp.inner_eps or mlp.gate_scale != 1.0:
        return ""
    bound = mlp.experts.shared_bound if match[2] and mlp.experts else mlp.bound
    return mlp.activation if bound is None else ""


def _thinned(x: jax.Array, sparsity: float) -> jax.Array:
    """What numbers x [tokens, size] exceed the quantile `sparsity` of a normal distribution by, which has the mean and
    the deviation of the token's numbers; 0 for those below it."""
    quantile = NormalDist().inv_cdf(sparsity)
    wide = x.astype(jnp.float32)
    limit = jnp.mean(wide, axis=-1, keepdims=True) + jnp.std(wide, axis=-1, keepdims=True) * quantile
    return jax.nn.relu(wide - limit).astype(x.dtype)


class XIELU(nn.Module):
    """The activation xIELU (Huang & Schlag 2024, arXiv:2411.13010). It has learned numbers in each layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.constant(0.5)
        alpha_p, alpha_n, beta, eps = (
            value_of(weight(self, name, init, (None,), (1,), jnp.float32)) for name in XIELU_SHAPES
        )
        wide = x.astype(jnp.float32)
        positive = jax.nn.softplus(alpha_p) * wide * wide
        negative = (jnp.expm1(jnp.minimum(wide, eps)) - wide) * (beta + jax.nn.softplus(alpha_n))
        return (jnp.where(wide > 0, positive, negative) + beta * wide).astype(x.dtype)


# The numbers of xIELU, and their shapes in files.
XIELU_SHAPES: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


class MLP(nn.Module):
    """An MLP: gated, down(activation(gate(x)) * up(x)), with gate and up in one matmul; or down(activation(up(x)))."""

    spec: MLPSpec
    hidden_size: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array | QuantRows, ops: Ops) -> Partials:
        size = self.spec.size
        activation = self.spec.activation

        def linear(name: str, in_shape: tuple[int, ...], out_shape: tuple[int, ...], axes: tuple, **how: Any) -> Linear:
            options: dict[str, Any] = {"as_partials": True} | how
            return Linear(in_shape, out_shape, axes, self.spec.bias, self.dtype, None, name=name, **options)

        inner = (self.hidden_size,), (size, 2), ("mlp", None, "embed")
        if self.spec.limit is not None or self.spec.bound is not None:
            both = linear("gate_up", *inner)(x, ops).reduce(x.dtype).reshape(-1, size, 2)
            hidden = ops.gate_of(activation, self.spec.limit, self.spec.bound, self.spec.bound_first)(both)
        elif self.spec.inner_eps is not None:
            both = linear("gate_up", *inner)(x, ops).reduce(x.dtype).reshape(-1, size, 2)
            scale = weight(self, "inner_norm", nn.initializers.ones, ("mlp",), (size,), self.dtype)
            hidden = rms_norm(gate(both, activation), value_of(scale), self.spec.inner_eps)
        elif self.spec.gated and (self.spec.sparsity or self.spec.gate_scale != 1.0):
            gates, ups = jnp.moveaxis(linear("gate_up", *inner)(x, ops).reduce(x.dtype).reshape(-1, size, 2), 2, 0)
            gates = times(gates, self.spec.gate_scale)
            gates = _thinned(gates, self.spec.sparsity) if self.spec.sparsity else gates
            hidden = ACTIVATIONS[activation](gates) * ups
        elif self.spec.gated:
            hidden = linear("gate_up", *inner, activation=activation)(x, ops, reader(self, ops, "down"))
        else:
            up = linear("up", (self.hidden_size,), (size,), ("mlp", "embed"))(x, ops)
            hidden = (
                XIELU(name="xielu")(up.reduce(x.dtype))
                if activation == "xielu"
                else (ops.activated(up, activation, x.dtype))
            )
        down = linear("down", (size,), (self.hidden_size,), ("embed", "mlp"))(hidden, ops)
        return down if self.spec.out_scale == 1.0 else Partials(times(down.reduce(x.dtype), self.spec.out_scale)[None])
