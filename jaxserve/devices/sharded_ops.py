"""Operations of `jaxserve.pallas_kernels` for weights that are split over the devices of a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve.devices.mesh import (
    GROUPS,
    MODEL_AXES,
    RULES,
    MeshAxes,
    num_groups,
    num_parts,
    on_each_device,
    spec,
    within_group,
)
from jaxserve.pallas_kernels.experts import ExpertStacks, ExpertWeights
from jaxserve.pallas_kernels.operands import Heads, Partials, Row, value_of
from jaxserve.pallas_kernels.ops import embed, matmul
from jaxserve.pallas_kernels.types import BlockArray, KVPages, QuantArray, QuantRows


def quant_specs(w: QuantArray | BlockArray, axes: PartitionSpec, mesh: Mesh) -> QuantArray | BlockArray:
    """PartitionSpecs of the arrays of a quantized weight [..., out, in]; `axes` are the mesh axes of its own axes, or
    None.

    Inputs that an act-order format has permuted would need a gather; the outputs are split instead, if divisible.
    """
    rank = len(w.shape)
    *lead, out, inputs = (*axes, *(None,) * rank)[:rank]
    if isinstance(w, BlockArray):
        return jax.tree.map(lambda _: PartitionSpec(*lead, out, inputs), w)
    if w.order is not None and inputs is not None:
        out = None if w.shape[-2] % num_parts(mesh, inputs) else inputs
        inputs = None

    def of_blocks(values: jax.Array | None) -> PartitionSpec | None:
        if values is None:
            return None
        own = zip(values.shape[-2:], (out, inputs), strict=True)
        return PartitionSpec(*lead, *(None if size == 1 else on for size, on in own))

    scale, zero, bias = map(of_blocks, (w.scale, w.zero, w.bias))
    order, input_scale = (None if x is None else PartitionSpec(*lead) for x in (w.order, w.input_scale))
    gain = None if w.gain is None else PartitionSpec(*lead, out)
    codes = PartitionSpec(*lead, out, inputs)
    return replace(w, codes=codes, scale=scale, zero=zero, bias=bias, order=order, gain=gain, input_scale=input_scale)


def quant_block(w: QuantArray, axes: PartitionSpec, mesh: Mesh) -> tuple[int, int]:
    """The largest block sizes, at most the weight's own, with which no block is split between devices."""
    specs = quant_specs(w, axes, mesh)
    assert isinstance(specs, QuantArray)
    split = specs.codes[-2:]
    sizes = []
    for size, block, on, count in zip(w.shape[-2:], w.block, split, w.scale.shape[-2:], strict=True):
        sizes.append(block if on is None or count == 1 else math.gcd(size // num_parts(mesh, on), block))
    return sizes[0], sizes[1]


def quant_matmul_sharded(
    mesh: Mesh,
    multiply: Callable[..., jax.Array],
    x: jax.Array | QuantRows,
    w: QuantArray | BlockArray,
    axes: tuple[str | None, str | None],
    count: jax.Array | None = None,
    partials: bool = False,
) -> jax.Array:
    """`jaxserve.pallas_kernels.ops.quant_matmul` on each device for its part of the weight, which has logical `axes`.
    With `partials` the result has the form of `Partials.sums`, with one split if the inputs are split.

    If the inputs are split, each device accumulates in float32, and the partial sums are added in the dtype of x. If
    the weight wants its inputs rounded to 8 bits, each device rounds its part with scales of its own. This is a finer
    grid than on one device, and no maximum needs to be exchanged. Static scales are the same on all devices.
    """
    specs = quant_specs(w, spec(*axes), mesh)
    out, inputs = specs.codes if isinstance(specs, QuantArray) else specs.low

    def local(x: jax.Array | QuantRows, w: QuantArray | BlockArray, *count: jax.Array) -> jax.Array:
        y = multiply(x, w, (None, None), *count, **({"partials": True} if partials else {}))
        if inputs is None:
            return y
        y = jax.lax.psum(Partials(y).reduce(x.dtype) if partials else y.astype(x.dtype), inputs)
        return y[None] if partials else y

    counts = () if count is None else (count,)
    of_x = rows_spec(w, inputs, x.dtype) if isinstance(x, QuantRows) else PartitionSpec(None, inputs)
    in_specs = (of_x, specs, *(PartitionSpec(),) * len(counts))
    return on_each_device(local, mesh, in_specs, PartitionSpec(*(None,) * partials, None, out))(x, w, *counts)


def gated_matmul_sharded(
    mesh: Mesh,
    multiply: Callable[..., jax.Array],
    x: jax.Array,
    w: jax.Array | QuantArray | BlockArray,
    axes: tuple[str | None, str | None],
    count: jax.Array | None = None,
    *,
    activation: str,
) -> jax.Array:
    """`Ops.gated_matmul`, which is `multiply`, on each device for its part of the outputs. The inputs are not split."""
    specs = quant_specs(w, spec(*axes), mesh) if isinstance(w, QuantArray | BlockArray) else spec(*axes)
    out, inputs = spec(*axes)
    assert inputs is None, "the inputs of a gated product are split"

    def local(x: jax.Array, w: jax.Array | QuantArray | BlockArray, *count: jax.Array) -> jax.Array:
        return multiply(x, w, (None, None), *count, activation=activation)

    counts = () if count is None else (count,)
    in_specs = (PartitionSpec(), specs, *(PartitionSpec(),) * len(counts))
    return on_each_device(local, mesh, in_specs, PartitionSpec(None, out))(x, w, *counts)


def rows_spec(w: QuantArray | BlockArray, inputs: MeshAxes, dtype: Any) -> QuantRows:
    """PartitionSpecs of the rounded inputs of a product with `w`, when the inputs are split over these axes of the
    mesh. Each device has scales of its own for its part, unless the scales are static."""
    assert isinstance(w, QuantArray)
    assert w.activations is not None
    split = PartitionSpec(None, inputs)
    return QuantRows(split, PartitionSpec() if w.activations.static else split, dtype)


def matmul_sharded(mesh: Mesh, x: jax.Array, w: jax.Array, axes: tuple[str | None, str | None]) -> jax.Array:
    """`jaxserve.pallas_kernels.ops.matmul` for a weight with logical `axes` that is split over the devices.

    XLA handles split outputs. If the inputs are split, each device accumulates in float32, and the partial sums are
    added in the dtype of x. XLA:GPU would send float32, which is twice the traffic.
    """
    split = spec(*axes)
    inputs = split[1]
    if inputs is None:
        return matmul(x, w)

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.psum(matmul(x, w).astype(x.dtype), inputs)

    in_specs = (PartitionSpec(None, inputs), split)
    return on_each_device(local, mesh, in_specs, PartitionSpec())(x, w)


def experts_sharded(
    mesh: Mesh,
    mixture: Callable[..., jax.Array],
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    w: ExpertWeights,
    *,
    gate: Callable[..., jax.Array],
    count: jax.Array | None = None,
    weighs_inputs: bool = False,
    stacks: ExpertStacks | None = None,
    places: jax.Array | None = None,
) -> jax.Array:
    """`jaxserve.pallas_kernels.experts.mixture` when each device has some of the experts, and a part of the width of
    each of these. The devices' partial results are added in the dtype of x. Groups of devices with different tokens
    give all their tokens to all devices, and get the results of their own."""
    everywhere = PartitionSpec()
    groups = num_groups(mesh)
    absent = w.gate_up.shape[0] * num_parts(mesh, GROUPS)

    def local(x, chosen, weights, w, count, stacks, places) -> jax.Array:
        if groups > 1:
            assert stacks is None, "groups of devices have no adapters"
            if count is not None:  # the padding of each group is in the middle of all tokens
                chosen = jnp.where(jnp.arange(len(chosen))[:, None] < count, chosen, absent)
                count = None
            x, chosen, weights = (jax.lax.all_gather(one, GROUPS, tiled=True) for one in (x, chosen, weights))
        if num_parts(mesh, RULES["expert"]) > 1:
            own = w.gate_up.shape[0]
            chosen = chosen - jax.lax.axis_index(RULES["expert"]) * own
            chosen = jnp.where((chosen >= 0) & (chosen < own), chosen, own)
        adapted = {} if stacks is None else {"stacks": stacks, "places": places}
        y = mixture(x, chosen, weights, w, gate=gate, count=count, weighs_inputs=weighs_inputs, **adapted)
        y = y.astype(x.dtype)
        if groups > 1:
            y = jax.lax.psum_scatter(y, GROUPS, tiled=True)
        return jax.lax.psum(y, MODEL_AXES)

    def specs(weight: Any, *logical: str) -> Any:
        of_plain = spec(*logical)
        return quant_specs(weight, of_plain, mesh) if isinstance(weight, QuantArray | BlockArray) else of_plain

    bias = None if w.gate_up_bias is None else spec("expert", "expert_mlp")
    gate_up = ("expert", "expert_mlp", "embed")
    down = ("expert", "embed", "expert_mlp")
    split = ExpertWeights(specs(w.gate_up, *gate_up), specs(w.down, *down), bias)
    in_specs = (everywhere, everywhere, everywhere, split, everywhere, stack_specs(stacks), everywhere)
    if groups > 1:
        in_specs = jax.tree.map(within_group, in_specs)
    return on_each_device(local, mesh, in_specs, everywhere)(x, chosen, weights, w, count, stacks, places)


def stack_specs(stacks: ExpertStacks | None) -> Any:
    """How the stacks of experts' adapters are split: by expert, and A of the last product and B of the first one by
    the experts' width. The devices' partial results of the last product then add up like those of the experts."""
    if stacks is None:
        return None
    everywhere = PartitionSpec()
    by_expert = spec(None, "expert")
    by_width = spec(None, "expert", None, "expert_mlp")
    specs: Any = replace  # with specifications in the places of arrays
    return ExpertStacks(
        specs(stacks.gate_up, a=by_expert, b=by_width, ranks=everywhere),
        specs(stacks.down, a=by_width, b=by_expert, ranks=everywhere),
    )


@dataclass(frozen=True)
class FusedSharded:
    """The functions of `kernels`, a module like `jaxserve.pallas_kernels.fused_triton`. Each device runs them for its
    part of the heads and of the MLP's width. All devices compute the norms, because each needs the whole result."""

    mesh: Mesh
    kernels: Any

    def add_norm(
        self, x: jax.Array, y: Partials | None, scale: jax.Array | Row, eps: float, reader: QuantArray | None = None
    ) -> tuple[jax.Array, jax.Array | QuantRows]:
        """As `Ops.add_norm`. If there is a reader, its outputs are split."""

        def local(x: jax.Array, y: Partials | None, scale: jax.Array | Row, reader: QuantArray | None) -> Any:
            return self.kernels.add_norm(x, y, scale, eps, reader)

        everywhere = PartitionSpec()
        specs = (everywhere, everywhere, everywhere, self._specs(reader, ("mlp", "embed")))
        return self._run(local, specs, everywhere, x, y, scale, reader)

    def gate(self, y: Partials, activation: str, dtype: Any, reader: QuantArray | None = None) -> jax.Array | QuantRows:
        """As `Ops.gated`. The outputs of y are split, and the inputs of a reader are split in the same way."""

        def local(sums: jax.Array, bias: jax.Array | None, reader: QuantArray | None) -> Any:
            return self.kernels.gate(Partials(sums, bias), activation, dtype, reader)

        bias = None if y.bias is None else value_of(y.bias)
        mlp = spec("mlp")[0]
        reader = self.kernels.rounding_reader(reader)
        out: Any = PartitionSpec(None, mlp)  # also the spec of codes and their scales, unless scales are static
        if reader is not None and reader.activations is not None and reader.activations.static:
            out = rows_spec(reader, mlp, jnp.dtype(dtype))
        specs = (PartitionSpec(None, None, mlp), PartitionSpec(mlp), self._specs(reader, ("embed", "mlp")))
        return self._run(local, specs, out, y.sums, bias, reader)

    def rotate_and_write(
        self, heads: Heads, eps: float, dtype: Any, pages: KVPages, slots: jax.Array, first_page: jax.Array | int
    ) -> tuple[jax.Array, KVPages]:
        """As `Ops.rotate_and_write`, called by each device for its own heads."""
        return self.kernels.rotate_and_write(heads, eps, dtype, pages, slots, first_page)

    def quantize(self, x: jax.Array, w: QuantArray, axes: tuple[str | None, str | None]) -> QuantRows:
        """As `quant_matmul.w8a8.quantize`. If the inputs are split, each device has scales of its own for its part."""
        inputs = spec(*axes)[1]
        specs = (PartitionSpec(None, inputs), self._specs(w, axes))
        return self._run(self.kernels.quantize, specs, rows_spec(w, inputs, x.dtype), x, w)

    def product(self, x: jax.Array, w: jax.Array, axes: tuple[str | None, str | None]) -> jax.Array:
        """As `Ops.product`. If the inputs are split, the result has one part, which is the sum over the devices."""
        out, inputs = spec(*axes)
        if inputs is not None:
            return matmul_sharded(self.mesh, x, w, axes)[None]
        specs = (PartitionSpec(), PartitionSpec(out, None))
        return self._run(self.kernels.product, specs, PartitionSpec(None, None, out), x, w)

    def _specs(self, w: QuantArray | None, axes: tuple[str | None, str | None]) -> Any:
        return None if w is None else quant_specs(w, spec(*axes), self.mesh)

    def _run(self, local: Callable[..., Any], in_specs: tuple, out_specs: Any, *args: Any) -> Any:
        return on_each_device(local, self.mesh, in_specs, out_specs)(*args)


def segments_sharded(
    mesh: Mesh, attend: Callable, q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, scale: float
) -> jax.Array:
    """`segment_attention` by `attend`, each device for its own heads."""
    axes = spec(None, "kv_heads", None)
    local = partial(attend, scale=scale)
    return on_each_device(local, mesh, (axes, axes, axes, PartitionSpec()), axes)(q, k, v, segment)


def embed_sharded(mesh: Mesh, dtype: Any, table: jax.Array | QuantArray | BlockArray, ids: jax.Array) -> jax.Array:
    """The rows `ids`, int32 [tokens], of table [vocab, hidden], in `dtype`. The table's rows are split over the
    devices; each looks up its own rows, and the results are added. XLA would gather the whole table."""

    def local(table: jax.Array | QuantArray | BlockArray, ids: jax.Array) -> jax.Array:
        own = ids - jax.lax.axis_index(axis) * table.shape[0]
        mine = (own >= 0) & (own < table.shape[0])
        return jax.lax.psum(jnp.where(mine[:, None], embed(table, own).astype(dtype), 0), axis)

    axis = RULES["vocab"]
    axes = spec("vocab", "embed")
    specs = quant_specs(table, axes, mesh) if isinstance(table, QuantArray | BlockArray) else axes
    return on_each_device(local, mesh, (specs, PartitionSpec()), PartitionSpec())(table, ids)
