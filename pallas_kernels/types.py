"""What kernels read beside plain arrays: quantized weights, and the pages of the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp


class KVPages(NamedTuple):
    """One layer's KV cache.

    data: [pages, 2 (key, value), kv_heads, page_size, head_dim]; float32, bfloat16, float16, float8_e4m3fn or int8. A
      head's keys in a page are contiguous, and so are its values.
    scale: float32 [pages, 2, kv_heads, page_size], factors of the data; None: 1.
    index_keys: [pages, page_size, dim], keys that blocks are chosen by (`paged_attention.chosen_blocks`); None: no
      layer chooses any. In the data's dtype, or bfloat16 if data are codes.
    """

    data: jax.Array
    scale: jax.Array | None = None
    index_keys: jax.Array | None = None

    @property
    def page_size(self) -> int:
        return self.data.shape[3]

    @property
    def kv_heads(self) -> int:
        return self.data.shape[2]

    @property
    def head_dim(self) -> int:
        return self.data.shape[4]


class AttentionOptions(TypedDict, total=False):
    """How scores are made; see `paged_attention.reference.paged_attention`."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: jax.Array | None
    decode_only: bool


class PagedOptions(AttentionOptions, total=False):
    """`AttentionOptions`, and where the layer's pages begin."""

    first_page: jax.Array | int


class RecurrentOptions(TypedDict, total=False):
    """Options of the operations of recurrent layers; see `delta_net.reference` and `mamba2.reference`."""

    key_dim: int
    groups: int
    per_group: int
    activation: Callable[[jax.Array], jax.Array]
    decode_only: bool
    static: bool


class LatentPages(NamedTuple):
    """One layer's cache of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): a row for each token, which
    all heads share. Its first `rank` numbers are the latent, after its norm; the next `rope` are the rotated key.

    data: [pages, page_size, width]; width is at least rank + rope (`stored_latent_width`), and further numbers are 0.
      float32, bfloat16, float16, float8_e4m3fn or int8.
    scale: float32 [pages, 2, page_size], factors of a token's latent (0) and of its rotated key (1); None: 1. The two
      have separate scales, because the latent is normed and the key is not: with one scale for both, a large key would
      leave few codes to the latent. A page's scales of one kind are contiguous, as kernels read them.
    index_keys: [pages, page_size, dim], which an indexer compares with its queries (`latent_attention.sparse`); None:
      there is no indexer. In the data's dtype, or bfloat16 if data are codes.
    """

    data: jax.Array
    scale: jax.Array | None = None
    index_keys: jax.Array | None = None

    @property
    def page_size(self) -> int:
        return self.data.shape[1]

    @property
    def width(self) -> int:
        return self.data.shape[2]


class RowPages(NamedTuple):
    """Rows of tokens, or of compressed entries, of a few layers (`compressed_attention`).

    data: [pages, rows, width]; float32, bfloat16 or float16.
    """

    data: jax.Array


class DeltaState(NamedTuple):
    """The states of gated delta nets (Yang et al. 2025, arXiv:2412.06464), one for each layer and slot.

    matrix: float32 [states, key_heads, group, key_dim, value_dim], for each of the value heads that share a key head.
      Kimi delta attention has no axis of groups.
    inputs: float32 [states, key_heads, (width - 1) * channels], the last inputs of the convolution, the oldest first.
    """

    matrix: jax.Array
    inputs: jax.Array


class NgramState(NamedTuple):
    """The states of gated delta nets, some of which stand behind n-grams of tokens (`ngrams`).

    delta: those of the nets.
    tokens: int32 [states, count], the last tokens plus 1, the oldest first. 0 stands for those before the first token.
    inputs: float32 [states, (width - 1) * spacing, channels], the last inputs of the convolution over what n-grams
      give, the oldest first.
    """

    delta: DeltaState
    tokens: jax.Array
    inputs: jax.Array


class ConvState(NamedTuple):
    """The states of short convolutions, one for each layer and slot.

    inputs: float32 [states, width - 1, channels], the last inputs, the oldest first.
    """

    inputs: jax.Array


class MambaState(NamedTuple):
    """The states of Mamba-2 layers (Dao & Gu 2024, arXiv:2405.21060), one for each layer and slot.

    matrix: float32 [states, heads, head_dim, state_dim].
    inputs: float32 [states, width - 1, heads * head_dim], the convolution's last inputs x, the oldest first.
    shared: float32 [states, width - 1, 2 * groups * state_dim], the same of B and C.
    """

    matrix: jax.Array
    inputs: jax.Array
    shared: jax.Array


class ScanState(NamedTuple):
    """The states of Mamba layers (Gu & Dao 2023, arXiv:2312.00752), one for each layer and slot.

    vectors: float32 [states, channels, state_dim].
    inputs: float32 [states, width - 1, channels], the convolution's last inputs, the oldest first.
    """

    vectors: jax.Array
    inputs: jax.Array


class LightningState(NamedTuple):
    """The states of lightning attention (Qin et al. 2024, arXiv:2405.17381), one for each layer and slot.

    matrix: float32 [states, heads, value_dim, key_dim].
    """

    matrix: jax.Array


# Of recurrent layers: each array has one entry per layer and slot on its first axis.
State = DeltaState | NgramState | ConvState | MambaState | ScanState | LightningState


def has_scale(dtype: Any) -> bool:
    """Whether keys and values of this dtype are codes, which need a scale."""
    return dtype in (jnp.int8, jnp.float8_e4m3fn)


def stored_head_dim(head_dim: int, platform: str) -> int:
    """A head's width in the cache. TPUs hold rows of 128 numbers in any case; XLA lays narrower ones out in another
    order, which kernels cannot read without a copy of the whole cache."""
    return -(-head_dim // 128) * 128 if platform == "tpu" else head_dim


def stored_latent_width(width: int, platform: str) -> int:
    """A row's width in the cache, for the reason that `stored_head_dim` gives: 640 instead of 576 on a TPU."""
    return stored_head_dim(width, platform)


@dataclass(frozen=True)
class Activations:
    """How products with a quantized weight round their inputs x first: x = codes * scale, symmetric.

    dtype: dtype of the codes, "int8" or "float8_e4m3fn".
    group: number of neighbouring inputs of a token that share a scale; None: all inputs share one.
    static: the scale is `QuantArray.input_scale`, the same for all tokens. Otherwise the scale maps the largest
      magnitude of its inputs to the largest code.
    ceiling: for the scale, larger magnitudes count as this one; they saturate (FBGEMM's activation_scale_ub). None:
      there is no ceiling.
    """

    dtype: str
    group: int | None = None
    static: bool = False
    ceiling: float | None = None

    def __str__(self) -> str:
        per = "per tensor" if self.static else "per token" if self.group is None else f"per {self.group} of a token"
        return f"{'int8' if self.dtype == 'int8' else 'fp8'} {per}"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "zero", "bias", "order", "gain", "input_scale"],
    meta_fields=["block", "shuffled", "activations"],
)
@dataclass(frozen=True)
class QuantArray:
    """A quantized weight [out, in]: value = ((codes - zero) * scale + bias) * gain, in float32.

    Kernels ignore `order`: their caller brings the inputs into this order first.

    codes: int4, int8, float8_e4m3fn or float4_e2m1fn [out, in]; XLA keeps two 4-bit codes in a byte.
    block: rows and inputs that share a scale: (1, in) per channel, (1, 128) groups of 128, (out, in) per tensor, (128,
      128) blocks. Sizes need not be multiples; the last block is then smaller.
    scale: float32, bfloat16 or float16 [ceil(out / rows), ceil(in / inputs)]. With float4_e2m1fn codes it may also be
      float8_e8m0fnu (powers of two: MXFP4) or float8_e4m3fn (NVFP4).
    zero: int8, in the shape of scale, in the units of the codes; None: 0. For formats with codes from 0 to 15 and zero
      points, 8 is subtracted from both.
    bias: in the shape of scale; None: 0.
    order: int32 [in], the input that each column belongs to (act-order formats sort columns by group); None: in order.
    gain: float32 [out, 1], the scale of a row's scales (NVFP4); None: 1.
    input_scale: float32 [1, 1], the scale of static activations.
    shuffled: codes are in the order of `quant_matmul.fragments`, for Hopper's kernel; plain XLA reads them too.
    activations: how products round their inputs (`quant_matmul.w8a8`); None: they do not.
    """

    # Arrays of JAX or NumPy, or their shapes or shardings in a pytree of the same form.
    codes: Any
    scale: Any
    zero: Any = None
    bias: Any = None
    block: tuple[int, int] = (1, 128)
    order: Any = None
    gain: Any = None
    input_scale: Any = None
    shuffled: bool = False
    activations: Activations | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["dtype"])
@dataclass(frozen=True)
class QuantRows:
    """Inputs of a product, rounded as the weight's `activations` say: x [tokens, in] = codes * scale.

    codes: int8 or float8_e4m3fn [tokens, in].
    scale: float32 [tokens, ceil(in / group)], or [1, 1] for all.
    dtype: dtype of x before rounding, to which the product is rounded.
    """

    codes: Any
    scale: Any
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


class BlockKind(NamedTuple):
    """A type of GGUF's blocks.

    block, group: inputs in a block, and inputs that share a scale.
    low, high: bytes per block for the codes' low bits and high bits.
    words: int32 words of integer scales per block. factors: float16 numbers per block.
    offset: subtracted from codes. shifts: whether a number is added to each group's values.
    """

    block: int
    group: int
    low: int
    high: int
    words: int
    factors: int
    offset: int
    shifts: bool

    @property
    def bits(self) -> float:
        """Bits per weight in memory."""
        return 8 * (self.low + self.high + 4 * self.words + 2 * self.factors) / self.block


BLOCK_KINDS = {
    "Q4_1": BlockKind(32, 16, 16, 0, 0, 2, 0, True),
    "Q5_0": BlockKind(32, 16, 16, 4, 0, 1, 16, False),
    "Q5_1": BlockKind(32, 16, 16, 4, 0, 2, 0, True),
    "Q2_K": BlockKind(256, 16, 64, 0, 4, 2, 0, True),
    "Q3_K": BlockKind(256, 16, 64, 32, 3, 1, 4, False),
    "Q4_K": BlockKind(256, 32, 128, 0, 4, 2, 0, True),
    "Q5_K": BlockKind(256, 32, 128, 32, 4, 2, 0, True),
    "Q6_K": BlockKind(256, 16, 128, 64, 4, 1, 32, False),
}


@partial(jax.tree_util.register_dataclass, data_fields=["low", "high", "scales", "factors"], meta_fields=["kind"])
@dataclass(frozen=True)
class BlockArray:
    """A quantized weight [out, in] in one of BLOCK_KINDS. Each field of a GGUF file's blocks is an array, in which the
    fields of a row's blocks are contiguous. `quant_matmul.blocks` describes the fields.

    low: uint8 [out, blocks * low].
    high: uint8 [out, blocks * high], or int32 [out, blocks] for blocks of 32; or None.
    scales: int32 [out, blocks * words], with four bytes in each, or None. The bytes are those of the file, except for
      Q4_K and Q5_K: there each 6-bit scale takes a byte, and the minima, which follow, do too.
    factors: float16 [out, blocks * factors].
    """

    low: Any
    high: Any
    scales: Any
    factors: Any
    kind: str

    @property
    def shape(self) -> tuple[int, ...]:
        kind = BLOCK_KINDS[self.kind]
        return (*self.low.shape[:-1], self.low.shape[-1] // kind.low * kind.block)

    @property
    def block(self) -> tuple[int, int]:
        return 1, BLOCK_KINDS[self.kind].block


@partial(jax.tree_util.register_dataclass, data_fields=["data", "table"], meta_fields=["shape", "arithmetic"])
@dataclass(frozen=True)
class PanelArray:
    """A weight [out, in] in the form that the CPU's kernels read (`cpu_panels.h`): panels of 16 rows. Each panel has a
    type of its own. In a stack [experts, out, in] the experts' panels follow each other.

    data: uint8 [bytes / 64, 64], the panels.
    table: int32 [panels, 3]: the beginning of each panel in data, its type, and the number of blocks in a record.
    arithmetic: the arithmetic of products with quantized or bfloat16 panels, one of `cpu_panels.ARITHMETIC`.
    """

    data: Any
    table: Any
    shape: tuple[int, ...]
    arithmetic: str = "float32"


@partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["widths"])
@dataclass(frozen=True)
class MixedArray:
    """A weight [out, in] whose rows have several forms. Its rows are widths[0] rows of parts[0], then widths[1] rows of
    parts[1] and so on. This pattern repeats until the end.

    parts: weights of any other kind, [out * widths[i] / sum(widths), in].
    """

    parts: tuple[Any, ...]
    widths: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


class DrawSettings(NamedTuple):
    """How the token of each row of a batch is drawn, as arrays [rows].

    temperature: divides the logits. Below 1e-5 the most likely token is taken, the first one of equals, because smaller
      divisors could overflow.
    top_k, top_p, min_p: which tokens may be drawn. First the tokens with the k largest logits (0: all), ties included.
      Of these, the fewest whose probabilities reach top_p, ties included. Of these, the ones with at least min_p times
      the probability of the most likely one.
    keys: uint32 [rows, 2]. The drawn token is the one that may be drawn with the largest sum of its logit, divided by
      the temperature, and the noise of keys and token (`draw_noise`); the first one of equals.
    ids: int32 [vocab], the tokens of the columns of the logits. None: they are in order.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    keys: jax.Array
    ids: jax.Array | None = None
