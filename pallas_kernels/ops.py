"""Dense operations in plain XLA, and `Ops`, the set of operations that a model runs with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels import experts
from jaxserve.pallas_kernels.delta_net import reference as delta
from jaxserve.pallas_kernels.delta_net.kimi import kimi_delta
from jaxserve.pallas_kernels.expert_routing import Router, route
from jaxserve.pallas_kernels.experts import ExpertStacks, ExpertWeights, MixtureOptions
from jaxserve.pallas_kernels.kv_write import write_kv
from jaxserve.pallas_kernels.latent_attention import reference as latent
from jaxserve.pallas_kernels.latent_attention import sparse
from jaxserve.pallas_kernels.latent_attention.expanded import (
    LatentSizes,
    absorb,
    attention_of_heads,
    expands_prompts,
    project_values,
)
from jaxserve.pallas_kernels.lightning import lightning
from jaxserve.pallas_kernels.lora.reference import add_to_embeddings
from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.mamba2.reference import mamba2
from jaxserve.pallas_kernels.operands import ChoiceInputs, Heads, LatentHeads, Partials, PooledInputs, Row, value_of
from jaxserve.pallas_kernels.paged_attention import chosen_blocks, pooled_blocks, reference
from jaxserve.pallas_kernels.quant_matmul import reference as quantized
from jaxserve.pallas_kernels.segment_attention.reference import segment_attention
from jaxserve.pallas_kernels.selective_scan import selective_scan
from jaxserve.pallas_kernels.short_conv.reference import short_conv
from jaxserve.pallas_kernels.types import (
    AttentionOptions,
    BlockArray,
    ConvState,
    DeltaState,
    KVPages,
    LatentPages,
    LightningState,
    MambaState,
    MixedArray,
    PagedOptions,
    PanelArray,
    QuantArray,
    QuantRows,
    ScanState,
)


def matmul(x: jax.Array, w: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """x [tokens, in] times the transposed w [out, in] -> float32 [tokens, out].

    `count`, an int32 scalar, is the number of leading rows that matter. Other rows of the result are unspecified.
    """
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, count: jax.Array | None = None) -> jax.Array:
    """x [tokens, ..., size] over the root of its mean square, times scale [size]; computed in float32.

    Zhang & Sennrich 2019, arXiv:1910.07467. `count` as in `matmul`.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    if scale.dtype != x.dtype:  # a float32 scale multiplies before the result is rounded
        return (scale.astype(jnp.float32) * wide).astype(x.dtype)
    return scale * wide.astype(x.dtype)


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """Rotates x [tokens, ..., head_dim], in float32. Channel i is paired with i + head_dim / 2; cos and sin of the
    angles are [tokens, head_dim / 2].

    Su et al. 2021, arXiv:2104.09864. `count` as in `matmul`.
    """
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (x.shape[-1] // 2,)
    cos = cos.reshape(shape)
    sin = sin.reshape(shape)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(jnp.asarray(1.702, x.dtype) * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
FUSED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")  # activations that fused kernels have for gates


def gate(gate_up: jax.Array, activation: str, count: jax.Array | None = None) -> jax.Array:
    """The activation of a gated MLP: gate_up [tokens, size, 2] -> activation(gate) * up [tokens, size].

    Shazeer 2020, arXiv:2002.05202. `count` as in `matmul`.
    """
    return ACTIVATIONS[activation](gate_up[..., 0]) * gate_up[..., 1]


CLAMPED_ALPHA = 1.702


def clamped_gate(gate_up: jax.Array, limit: float, count: jax.Array | None = None) -> jax.Array:
    """gate_up [tokens, size, 2] -> (up + 1) * gate * sigmoid(1.702 * gate) [tokens, size], with the gate at most
    `limit` and up within +-limit; `count` as in `matmul`. gpt-oss (arXiv:2508.10925)."""
    wide = gate_up.astype(jnp.float32)
    gate = jnp.minimum(wide[..., 0], limit)
    up = jnp.clip(wide[..., 1], -limit, limit)
    return ((up + 1) * gate * jax.nn.sigmoid(CLAMPED_ALPHA * gate)).astype(gate_up.dtype)


def bounded_gate(gate_up: jax.Array, activation: str, bound: float, first: bool = False) -> jax.Array:
    """`gate` with activation(gate) at most `bound` (Step 3.7), or `first` the gate itself (DeepSeek-V4), and up within
    +-bound."""
    gates = jnp.minimum(gate_up[..., 0], bound) if first else gate_up[..., 0]
    gates = ACTIVATIONS[activation](gates)
    return (gates if first else jnp.minimum(gates, bound)) * jnp.clip(gate_up[..., 1], -bound, bound)


@dataclass(frozen=True)
class Gate:
    """The activation of a gated MLP, called with gate_up [tokens, size, 2] and `count`, and its description.

    With `limit` it is `clamped_gate`, with `bound` `bounded_gate`; otherwise `compute` with `activation`. An MLP
    without a gate calls it with [tokens, size], to which `activation` is applied.
    """

    activation: str
    limit: float | None
    compute: Callable[..., jax.Array]
    bound: float | None = None
    bound_first: bool = False

    def __call__(self, gate_up: jax.Array, count: jax.Array | None = None) -> jax.Array:
        if gate_up.ndim == 2:
            return ACTIVATIONS[self.activation](gate_up)
        if self.limit is not None:
            return clamped_gate(gate_up, self.limit)
        if self.bound is not None:
            return bounded_gate(gate_up, self.activation, self.bound, self.bound_first)
        return self.compute(gate_up, self.activation, count=count)


def quant_matmul(
    x: jax.Array | QuantRows,
    w: QuantArray | BlockArray,
    axes: tuple[str | None, str | None] = (None, None),
    count: jax.Array | None = None,
    *,
    multiply: Callable[..., jax.Array] = quantized.quant_matmul,
    **options: bool,
) -> jax.Array:
    """x [tokens, in] times a transposed quantized weight [out, in] -> float32 [tokens, out]; `count` as in `matmul`.

    x may be rounded already, as the weight says (QuantRows). `axes` names the weight's axes, for an implementation that
    splits it over devices. `multiply` gets the options; it need not know about reordered inputs (`QuantArray.order`).
    """
    if isinstance(w, QuantArray) and w.order is not None:
        assert not isinstance(x, QuantRows), "rounded before its columns were brought into order"
        x = jnp.take(x, w.order, axis=1)
        w = replace(w, order=None)
    return multiply(x, w, count=count, **options)


def panel_matmul(x: jax.Array, w: PanelArray, count: jax.Array | None = None) -> jax.Array:
    """x float32 [tokens, in] times a transposed weight in panels [out, in] -> float32 [tokens, out]; `count` as in
    `matmul`. Only on CPU."""
    from jaxserve.pallas_kernels import cpu_panels  # imports this module

    return cpu_panels.matmul(x, w, count)


def rows_in_turn(w: MixedArray, products: Sequence[jax.Array]) -> jax.Array:
    """Products with the parts of w, [tokens, out of the part] each -> the product with w, [tokens, out]."""
    tokens = len(products[0])
    periods = [y.reshape(tokens, -1, width) for y, width in zip(products, w.widths, strict=True)]
    return jnp.concatenate(periods, axis=2).reshape(tokens, -1)


def embed(table: jax.Array | QuantArray | BlockArray | PanelArray, ids: jax.Array) -> jax.Array:
    """Rows ids int32 [tokens] of table [vocab, hidden]; float32 for a quantized table, with blocks of one row."""
    if isinstance(table, PanelArray):
        from jaxserve.pallas_kernels import cpu_panels

        return cpu_panels.rows(table, ids)
    rows = jax.tree.map(lambda x: jnp.take(x, ids, axis=0, mode="clip"), table)
    return quantized.dequantize(rows) if isinstance(rows, QuantArray | BlockArray) else rows


Weight = jax.Array | QuantArray | BlockArray | PanelArray | MixedArray


@dataclass(frozen=True)
class Ops:
    """One implementation of each operation, with the signatures of the plain ones.

    `draw`: tokens from logits in one launch, as `draw_triton.draw`, or None.
    `fused`: a module like `fused_triton`, whose kernels do several operations in one launch each, or None.
    `gated_matmul`: as `gated_product` for x, the weight, its axes, `count` and the keyword `activation`, in one launch
      where the device has a kernel for it; or None. It is used only with `fused`.
    `mixture`: as `experts.mixture`.
    `write_and_attend`: if given, replaces `write_kv` and `paged_attention`.
    `add_adapters`: as `lora.reference.add_adapters`, for models that are served with LoRA adapters; else None.
    `places`: where there are adapters, the place of each token's in the pool, int32 [tokens], or -1; see `adapted_by`.
    `split_matmul`: if given, replaces `matmul` for weights that are split over devices. It also gets their axes.
    """

    matmul: Callable[..., jax.Array] = matmul
    split_matmul: Callable[..., jax.Array] | None = None
    quant_matmul: Callable[..., jax.Array] = quant_matmul
    panel_matmul: Callable[..., jax.Array] = panel_matmul
    rms_norm: Callable[..., jax.Array] = rms_norm
    rope: Callable[..., jax.Array] = rope
    gate: Callable[..., jax.Array] = gate
    embed: Callable[..., jax.Array] = embed
    mixture: Callable[..., jax.Array] = experts.mixture
    paged_attention: Callable[..., jax.Array] = reference.paged_attention
    write_kv: Callable[..., KVPages] = write_kv
    write_and_attend: Callable[..., tuple[jax.Array, KVPages]] | None = None
    latent_attention: Callable[..., jax.Array] = latent.latent_attention
    write_latent: Callable[..., LatentPages] = latent.write_latent
    delta_net: Callable[..., tuple[jax.Array, DeltaState]] = delta.delta_net
    kimi_delta: Callable[..., tuple[jax.Array, DeltaState]] = kimi_delta
    short_conv: Callable[..., tuple[jax.Array, ConvState]] = short_conv
    mamba2: Callable[..., tuple[jax.Array, MambaState]] = mamba2
    selective_scan: Callable[..., tuple[jax.Array, ScanState]] = selective_scan
    lightning: Callable[..., tuple[jax.Array, LightningState]] = lightning
    segment_attention: Callable[..., jax.Array] = segment_attention
    draw: Callable[..., jax.Array] | None = None
    fused: Any = None
    gated_matmul: Callable[..., jax.Array] | None = None
    add_adapters: Callable[..., jax.Array] | None = None
    places: jax.Array | None = None
    count: jax.Array | None = None  # leading rows that matter, see `counting`
    trials: Any = None  # checks of these kernels that have not been looked at, see `checked_ops`

    @property
    def arg_max(self) -> Callable[[jax.Array], jax.Array] | None:
        """Finds the largest number in each row of float32 [rows, size], for rows that matter; None without a kernel."""
        return None

    @property
    def filter_logits(self) -> Callable[..., jax.Array] | None:
        """Drops tokens of each row of logits, as `cpu.filter_logits`; None without a kernel."""
        return None

    @property
    def log_softmax(self) -> Callable[[jax.Array], jax.Array]:
        """The log-probabilities of float32 logits [rows, vocab], for rows that matter."""
        return jax.nn.log_softmax

    def linear(self, x: Any, w: Weight, axes: tuple[str | None, str | None]) -> jax.Array:
        """x [tokens, in] times a weight of any kind. See `matmul`, `quant_matmul` and `panel_matmul`. The result is
        float32, or has x's dtype where it was summed over devices."""
        if isinstance(w, MixedArray):
            return rows_in_turn(w, [self.linear(x, part, axes) for part in w.parts])
        if isinstance(w, PanelArray):
            return self.panel_matmul(x, w)
        if isinstance(w, QuantArray | BlockArray):
            return self.quant_matmul(x, w, axes)
        return self.matmul(x, w) if self.split_matmul is None else self.split_matmul(x, w, axes)

    def product(self, x: jax.Array | QuantRows, w: Weight, axes: tuple[str | None, str | None]) -> jax.Array:
        """The product as `Partials.sums` [splits, tokens, out]. The reader adds and rounds them to x's dtype."""
        if self.fused is None:
            return self.linear(x, w, axes).astype(x.dtype)[None]
        if isinstance(w, MixedArray):  # kernels may have split the inputs of each part differently
            products = [Partials(self.product(x, part, axes)).reduce(x.dtype) for part in w.parts]
            return rows_in_turn(w, products)[None]
        if not isinstance(w, QuantArray | BlockArray):
            return self.fused.product(x, w, axes)
        if isinstance(w, QuantArray) and w.activations is not None and not isinstance(x, QuantRows):
            x = self.fused.quantize(x, w, axes)
        return self.quant_matmul(x, w, axes, partials=True)

    def adapted(
        self,
        x: jax.Array | QuantRows,
        w: Weight,
        stack: AdapterStack | None,
        axes: tuple[str | None, str | None],
        as_partials: bool = False,
    ) -> jax.Array:
        """The product of x [tokens, in] with a weight, plus what the tokens' adapters add to it; as `linear`, or with
        `as_partials` as `product`."""
        y = self.product(x, w, axes) if as_partials else self.linear(x, w, axes)
        if stack is None or self.places is None:
            return y
        assert self.add_adapters is not None
        assert not isinstance(x, QuantRows), "adapters read unrounded inputs, see `models.layers.reader`"
        rows = y.reshape(-1, y.shape[-1])  # of several splits the first one gets what adapters add
        return self.add_adapters(rows, x, stack, self.places, self.count, axes=axes).reshape(y.shape)

    def embedded(self, x: jax.Array, ids: jax.Array, stack: AdapterStack | None) -> jax.Array:
        """Embeddings x [tokens, hidden] of the tokens ids, plus what the tokens' adapters add to them."""
        return x if stack is None or self.places is None else add_to_embeddings(x, ids, stack, self.places)

    def add_norm(
        self, x: jax.Array, y: Partials | None, scale: jax.Array | Row, eps: float, reader: QuantArray | None = None
    ) -> tuple[jax.Array, jax.Array | QuantRows]:
        """Returns x [tokens, size], plus y if given, and `rms_norm` of that. The norm is the input of a product with
        `reader`: fused kernels round it as that weight says."""
        if self.fused is not None:
            return self.fused.add_norm(x, y, scale, eps, reader)
        total = x if y is None else x + y.reduce(x.dtype)
        return total, self.rms_norm(total, value_of(scale), eps)

    def gated(
        self, y: Partials, activation: str, dtype: Any, reader: QuantArray | None = None
    ) -> jax.Array | QuantRows:
        """`gate` of y, whose sums are [splits, tokens, 2 * size] with gates and ups alternating -> [tokens, size].
        `reader` as in `add_norm`."""
        if self.fused is not None and activation in FUSED_ACTIVATIONS:
            return self.fused.gate(y, activation, dtype, reader)
        whole = y.reduce(dtype)
        return self.gate(whole.reshape(len(whole), -1, 2), activation)

    def gated_product(
        self, x: jax.Array | QuantRows, w: Weight, stack: AdapterStack | None, bias: jax.Array | Row | None,
        axes: tuple[str | None, str | None], activation: str, reader: QuantArray | None,
    ) -> jax.Array | QuantRows:  # fmt: skip
        """`gated` of the product of x [tokens, in] with a weight [2 * size, in], plus a bias [2 * size] and what the
        tokens' adapters add -> [tokens, size]."""
        adapts = stack is not None and self.places is not None
        rounds = reader is not None or getattr(w, "activations", None) is not None
        known = self.fused is not None and activation in FUSED_ACTIVATIONS and not isinstance(w, MixedArray)
        if self.gated_matmul is not None and known and bias is None and not adapts and not rounds:
            return self.gated_matmul(x, w, axes, activation=activation)
        sums = self.adapted(x, w, stack, axes, as_partials=True)
        return self.gated(Partials(sums, bias), activation, x.dtype, reader)

    def activated(self, y: Partials, activation: str, dtype: Any) -> jax.Array:
        """The activation of an MLP without a gate. The sums of y are [splits, tokens, size]; returns [tokens, size]."""
        return ACTIVATIONS[activation](y.reduce(dtype))

    def experts(
        self,
        x: jax.Array,
        logits: jax.Array,
        w: ExpertWeights,
        router: Router,
        gate: Gate,
        *,
        correction: jax.Array | None = None,
        scales: jax.Array | None = None,
        chosen: jax.Array | None = None,
        zero_from: int | None = None,
        down_bias: jax.Array | None = None,
        note: Callable[[jax.Array], Any] | None = None,
        stacks: ExpertStacks | None = None,
    ) -> jax.Array:
        """Computes `mixture` of the experts that a router chooses by its logits, float32 [tokens, experts]; see
        `route`.

        scales: float32 [experts], multiply the experts' weights; None: they stay as they are.
        chosen: int32 [tokens, top_k], the experts, of which the router tells the weights only; None: it chooses them.
        zero_from: experts from this number on have no weights. They return their input.
        down_bias: [experts, out], added to each expert's result; None: no bias.
        note: called with the chosen experts, int32 [tokens, top_k].
        stacks: what adapters add to the experts' products.
        """
        chosen, weights = route(logits, router, correction, chosen)
        if scales is not None:
            weights = weights * scales[chosen]
        if note is not None:
            note(chosen)
        options: MixtureOptions = {"gate": gate, "count": self.count, "weighs_inputs": router.weighs_inputs}
        if stacks is not None and self.places is not None:
            options["stacks"] = stacks
            options["places"] = self.places
        y = self.mixture(x, chosen, weights, w, **options)
        if zero_from is not None:
            own = jnp.sum(jnp.where(chosen < zero_from, 0.0, weights), axis=1, keepdims=True)
            y = y.astype(jnp.float32) + x.astype(jnp.float32) * own
        if down_bias is None:
            return y
        shares = jnp.ones_like(weights) if router.weighs_inputs else weights
        return y.astype(jnp.float32) + experts.chosen_biases(chosen, shares, down_bias)

    def gate_of(
        self, activation: str, limit: float | None = None, bound: float | None = None, bound_first: bool = False
    ) -> Gate:
        """`gate` with an activation; `clamped_gate` if there is a limit, `bounded_gate` if there is a bound."""
        return Gate(activation, limit, self.gate, bound, bound_first)

    def rotate(self, heads: Heads, eps: float, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns q [tokens, kv_heads, group, head_dim] and k, v [tokens, kv_heads, head_dim] for attention."""
        qkv = heads.qkv.reduce(dtype)
        q = qkv[:, :, :-2]
        k = qkv[:, :, -2]
        v = qkv[:, :, -1]
        if heads.q_norm is not None and heads.k_norm is not None:
            q = self.rms_norm(q, value_of(heads.q_norm), eps)
            k = self.rms_norm(k, value_of(heads.k_norm), eps)
        return self.rope(q, heads.cos, heads.sin), self.rope(k, heads.cos, heads.sin), v

    def rotate_and_write(
        self, heads: Heads, eps: float, dtype: Any, pages: KVPages, slots: jax.Array, first_page: jax.Array | int
    ) -> tuple[jax.Array, KVPages]:
        """`rotate`, then `write_kv`. Returns the queries and the updated pages."""
        if self.fused is not None:
            return self.fused.rotate_and_write(heads, eps, dtype, pages, slots, first_page)
        q, k, v = self.rotate(heads, eps, dtype)
        return q, self.write_kv(pages, k, v, slots, first_page)

    def attend(
        self, heads: Heads, pages: KVPages, slots: jax.Array, rows: tuple[jax.Array, ...], first_page: jax.Array | int,
        *, eps: float, dtype: Any, **options: Unpack[AttentionOptions],
    ) -> tuple[jax.Array, KVPages]:  # fmt: skip
        """Writes a layer's new keys and values to the pages, then computes attention. `rows` and the options are
        arguments of `paged_attention`."""
        if heads.sinks is not None:
            options["sinks"] = value_of(heads.sinks).astype(jnp.float32)
        if self.write_and_attend is not None:
            q, k, v = self.rotate(heads, eps, dtype)
            return self.write_and_attend(q, k, v, pages, slots, *rows, first_page=first_page, **options)
        q, pages = self.rotate_and_write(heads, eps, dtype, pages, slots, first_page)
        return self.paged_attention(q, pages, *rows, first_page=first_page, **options), pages

    def attend_shared(
        self, heads: Heads, pages: KVPages, slots: jax.Array, rows: tuple[jax.Array, ...], first_page: jax.Array | int,
        *, eps: float, dtype: Any, **options: Unpack[AttentionOptions],
    ) -> tuple[jax.Array, KVPages]:  # fmt: skip
        """`attend` for a layer that has queries only: the keys and values are in the pages already."""
        q = heads.qkv.reduce(dtype)
        if heads.q_norm is not None:
            q = self.rms_norm(q, value_of(heads.q_norm), eps)
        q = self.rope(q, heads.cos, heads.sin)
        return self.paged_attention(q, pages, *rows, first_page=first_page, **options), pages

    def attend_blocks(
        self, heads: Heads, pages: KVPages, slots: jax.Array, rows: tuple[jax.Array, ...], first_page: jax.Array | int,
        *, size: int, most: int, local: int, eps: float, dtype: Any, **options: Unpack[AttentionOptions],
    ) -> tuple[jax.Array, KVPages]:  # fmt: skip
        """`attend` over the `most` blocks of `size` tokens that are chosen, or all where no row has more."""
        keys = pages.index_keys
        assert keys is not None
        assert isinstance(heads.choice, ChoiceInputs)
        keys = sparse.write_keys(keys, heads.choice.key, slots, first_page)
        q, pages = self.rotate_and_write(heads, eps, dtype, pages, slots, first_page)
        how: Any = {"size": size, "most": most, "local": local, "decode_only": options["decode_only"]}
        choose = partial(chosen_blocks.choose, heads.choice, keys, *rows, first_page=first_page, **how)
        pages = pages._replace(index_keys=keys)
        return self._over_blocks(q, pages, rows, first_page, choose, size, size * most, options), pages

    def attend_pooled(
        self, heads: Heads, pages: KVPages, slots: jax.Array, rows: tuple[jax.Array, ...], first_page: jax.Array | int,
        *, size: int, most: int, key_eps: float, eps: float, dtype: Any, **options: Unpack[AttentionOptions],
    ) -> tuple[jax.Array, KVPages]:  # fmt: skip
        """`attend_blocks` where blocks are chosen by the means of their keys (`pooled_blocks`)."""
        keys = pages.index_keys
        assert keys is not None
        assert isinstance(heads.choice, PooledInputs)
        how: Any = {"size": size, "first_page": first_page, "decode_only": options["decode_only"]}
        keys = pooled_blocks.write_keys(heads.choice, keys, slots, *rows[:3], eps=key_eps, **how)
        q, pages = self.rotate_and_write(heads, eps, dtype, pages, slots, first_page)
        pages = pages._replace(index_keys=keys)

        def choose() -> jax.Array:
            which = pooled_blocks.choose(heads.choice, keys, *rows, most=most, **how)
            return jnp.broadcast_to(which[:, None], (len(which), q.shape[1], which.shape[1]))

        return self._over_blocks(q, pages, rows, first_page, choose, size, size * (most + 1) - 1, options), pages

    def _over_blocks(
        self, q: jax.Array, pages: KVPages, rows: tuple[jax.Array, ...], first_page: jax.Array | int,
        choose: Callable[[], jax.Array], size: int, all_seen: int, options: AttentionOptions,
    ) -> jax.Array:  # fmt: skip
        """Attention over the blocks of `size` tokens that `choose` returns, or over all tokens where no row has more
        than `all_seen`."""

        def some_tokens() -> jax.Array:
            how: Any = {"scale": options["scale"], "size": size, "first_page": first_page}
            return chosen_blocks.attention_over(q, pages, choose(), *rows[:3], **how)

        def all_tokens() -> jax.Array:
            plain = KVPages(pages.data, pages.scale)
            return self.paged_attention(q, plain, *rows, first_page=first_page, **options)

        return jax.lax.cond(jnp.max(rows[2]) <= all_seen, all_tokens, some_tokens)

    def attend_latent(
        self, heads: LatentHeads, pages: LatentPages, slots: jax.Array, rows: tuple[jax.Array, ...],
        first_page: jax.Array | int, *, scale: float, decode_only: bool,
    ) -> tuple[jax.Array, LatentPages]:  # fmt: skip
        """Writes a layer's new latents to the pages, then computes attention [tokens, heads, v_dim]. `rows` and the
        options are arguments of `latent_attention`."""
        pages = self.write_latent(pages, heads.row, slots, first_page, rank=heads.k_up.shape[-1])
        out = self._over_latents(heads, pages, rows, first_page=first_page, scale=scale, decode_only=decode_only)
        return out, pages

    def attend_chosen(
        self, heads: LatentHeads, pages: LatentPages, slots: jax.Array, rows: tuple[jax.Array, ...],
        first_page: jax.Array | int, seen: jax.Array, *, scale: float, decode_only: bool,
    ) -> tuple[jax.Array, LatentPages, jax.Array]:  # fmt: skip
        """`attend_latent` over the tokens that an indexer chooses, or all where no row has more than it may choose.
        seen: int32 [tokens, top_k], what a layer before has chosen, as `sparse.choose` returns it. Also returns this,
        or what the layer's own indexer has chosen. It has no meaning where every token sees all."""
        keys = pages.index_keys
        assert keys is not None
        rank = heads.k_up.shape[-1]
        top_k = seen.shape[1]
        if heads.indexer is not None:
            keys = sparse.write_keys(keys, heads.indexer.key, slots, first_page)
        pages = self.write_latent(pages, heads.row, slots, first_page, rank=rank)._replace(index_keys=keys)

        def all_tokens() -> tuple[jax.Array, jax.Array]:
            out = self._over_latents(heads, pages, rows, first_page=first_page, scale=scale, decode_only=decode_only)
            return out, seen

        def chosen_tokens() -> tuple[jax.Array, jax.Array]:
            which = seen
            if heads.indexer is not None:
                which = sparse.choose(
                    heads.indexer, keys, *rows, top_k=top_k, first_page=first_page, decode_only=decode_only
                )
            q = absorb(heads.q, heads.k_up)
            out = sparse.attention_over(
                q,
                pages,
                which,
                *rows[:2],
                scale=scale,
                rank=rank,
                first_page=first_page,
                sinks=_sinks_of(heads),
            )
            return project_values(out, heads.v_up), which

        out, which = jax.lax.cond(jnp.max(rows[2]) <= top_k, all_tokens, chosen_tokens)
        return out, pages, which

    def _over_latents(
        self,
        heads: LatentHeads,
        pages: LatentPages,
        rows: tuple[jax.Array, ...],
        *,
        first_page: jax.Array | int,
        scale: float,
        decode_only: bool,
    ) -> jax.Array:
        """The heads' results over all latents that a row has in the pages."""
        (_, nope, rank), v_dim = heads.k_up.shape, heads.v_up.shape[1]
        if heads.sinks is not None:  # which the kernels do not know
            q = absorb(heads.q, heads.k_up)
            out = latent.latent_attention(
                q,
                pages,
                *rows,
                scale=scale,
                rank=rank,
                first_page=first_page,
                decode_only=decode_only,
                sinks=_sinks_of(heads),
            )
            return project_values(out, heads.v_up)
        sizes = LatentSizes(rank, heads.row.shape[-1] - rank, nope, v_dim)
        plain = self.latent_attention is latent.latent_attention
        return attention_of_heads(
            self.latent_attention,
            heads.q,
            pages,
            heads.k_up,
            heads.v_up,
            *rows,
            scale=scale,
            first_page=first_page,
            decode_only=decode_only,
            expand=expands_prompts(len(heads.q), len(rows[0]), sizes, plain=plain),
        )

    def adapted_by(self, places: jax.Array) -> Ops:
        """Returns operations that add what adapters at these places of the pool, int32 [tokens], change of the tokens'
        products; -1: a token has none. Operations without `add_adapters` are returned as they are."""
        return self if self.add_adapters is None else replace(self, places=places)

    def seeing(self, limits: jax.Array) -> Ops:
        """Returns operations whose attention lets tokens see up to the positions `limits`, int32 [tokens], where these
        are behind their own; 0: there is none. If there are any, plain XLA computes the attention."""

        def paged_attention(
            q: jax.Array, pages: KVPages, *rows: jax.Array, **options: Unpack[PagedOptions]
        ) -> jax.Array:
            usual = partial(self.paged_attention, q, pages, *rows, **options)
            joint = partial(reference.paged_attention, q, pages, *rows, limits=limits, **options)
            return jax.lax.cond(jnp.any(limits > 0), joint, usual)

        return replace(self, paged_attention=paged_attention, write_and_attend=None)

    def counting(self, count: jax.Array) -> Ops:
        """Returns operations that compute only the `count` (int32 scalar) leading rows of their inputs."""
        counted = ("matmul", "quant_matmul", "panel_matmul", "rms_norm", "rope", "gate")
        found: dict[str, Any] = {name: partial(getattr(self, name), count=count) for name in counted}
        if self.gated_matmul is not None:
            found["gated_matmul"] = partial(self.gated_matmul, count=count)
        return replace(self, count=count, **found)


def _sinks_of(heads: LatentHeads) -> jax.Array | None:
    return None if heads.sinks is None else value_of(heads.sinks).astype(jnp.float32)
