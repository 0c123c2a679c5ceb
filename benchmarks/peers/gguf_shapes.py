"""Published shapes of hybrid models and of Gemma 4 as GGUF files of random weights, in llama.cpp's own names.

python gguf_shapes.py NAME FILE

Matrices are float16, and the rest float32, for llama-quantize. Runs in any Python that has gguf.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

if __package__:
    from peers.model import token_texts
else:
    from model import token_texts

Tensor = tuple[str, tuple[int, ...], float | str]  # name, shape, and the numbers: equal ones, or how they are drawn
BLOCK = 1 << 24  # numbers that are drawn; larger tensors repeat them


@dataclass(frozen=True)
class Shape:
    """keys: without the architecture's prefix. tensors: [out, in], as NumPy has them."""

    architecture: str
    vocab_size: int
    keys: dict[str, Any]
    tensors: Callable[[], Iterator[Tensor]]


def norms(layer: str, size: int, *names: str) -> Iterator[Tensor]:
    for name in names:
        yield f"{layer}.{name}.weight", (size,), 1.0


def matrices(layer: str, **shapes: tuple[int, ...]) -> Iterator[Tensor]:
    for name, shape in shapes.items():
        yield f"{layer}.{name}.weight", shape, "normal"


def mlp(layer: str, hidden: int, inner: int, suffix: str = "", stack: tuple[int, ...] = ()) -> Iterator[Tensor]:
    for part in ("gate", "up"):
        yield f"{layer}.ffn_{part}{suffix}.weight", (*stack, inner, hidden), "normal"
    yield f"{layer}.ffn_down{suffix}.weight", (*stack, hidden, inner), "normal"


def ends(vocab: int, hidden: int, norm: str = "output_norm") -> Iterator[Tensor]:
    yield "token_embd.weight", (vocab, hidden), "embedding"
    yield f"{norm}.weight", (hidden,), 1.0


def qwen3_5() -> Iterator[Tensor]:
    yield from ends(248320, 1024)
    for i in range(24):
        layer = f"blk.{i}"
        yield from norms(layer, 1024, "attn_norm", "post_attention_norm")
        if (i + 1) % 4:
            yield from matrices(layer, attn_qkv=(6144, 1024), attn_gate=(2048, 1024), ssm_out=(1024, 2048))
            yield from matrices(layer, ssm_beta=(16, 1024), ssm_alpha=(16, 1024))
            yield f"{layer}.ssm_conv1d.weight", (6144, 4), "taps"
            yield f"{layer}.ssm_dt.bias", (16,), "steps"
            yield f"{layer}.ssm_a", (16,), "decays"
            yield from norms(layer, 128, "ssm_norm")
        else:
            yield from matrices(layer, attn_q=(4096, 1024), attn_k=(512, 1024), attn_v=(512, 1024))
            yield from matrices(layer, attn_output=(1024, 2048))
            yield from norms(layer, 256, "attn_q_norm", "attn_k_norm")
        yield from mlp(layer, 1024, 3584)


def gemma4() -> Iterator[Tensor]:
    hidden = 1536
    yield from ends(262144, hidden)
    yield "per_layer_token_embd.weight", (262144, 35 * 256), "embedding"
    yield "per_layer_model_proj.weight", (35 * 256, hidden), "normal"
    yield "per_layer_proj_norm.weight", (256,), 1.0
    yield "rope_freqs.weight", (256,), "a quarter"
    for i in range(35):
        layer = f"blk.{i}"
        head = 512 if i % 5 == 4 else 256
        yield from matrices(layer, attn_q=(8 * head, hidden), attn_output=(hidden, 8 * head))
        yield from norms(layer, head, "attn_q_norm")
        if i < 15:
            yield from matrices(layer, attn_k=(head, hidden), attn_v=(head, hidden))
            yield from norms(layer, head, "attn_k_norm")
        yield from norms(layer, hidden, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
        yield from mlp(layer, hidden, 6144 if i < 15 else 12288)
        yield from matrices(layer, inp_gate=(256, hidden), proj=(hidden, 256))
        yield f"{layer}.layer_output_scale.weight", (1,), 1.0


def lfm2() -> Iterator[Tensor]:
    hidden = 2048
    yield from ends(65536, hidden, "token_embd_norm")
    for i in range(16):
        layer = f"blk.{i}"
        yield from norms(layer, hidden, "attn_norm", "ffn_norm")
        if i in LFM2_ATTENTION:
            yield from matrices(layer, attn_q=(hidden, hidden), attn_k=(512, hidden), attn_v=(512, hidden))
            yield from matrices(layer, attn_output=(hidden, hidden))
            yield from norms(layer, 64, "attn_q_norm", "attn_k_norm")
        else:
            yield f"{layer}.shortconv.in_proj.weight", (3 * hidden, hidden), "normal"
            yield f"{layer}.shortconv.conv.weight", (hidden, 3), "taps"
            yield f"{layer}.shortconv.out_proj.weight", (hidden, hidden), "normal"
        yield from mlp(layer, hidden, 8192)


def granite_hybrid() -> Iterator[Tensor]:
    hidden = 1536
    yield from ends(25088, hidden)
    for i in range(10):
        layer = f"blk.{i}"
        yield from norms(layer, hidden, "attn_norm", "ffn_norm")
        if i == 5:
            yield from matrices(layer, attn_q=(1536, hidden), attn_k=(512, hidden), attn_v=(512, hidden))
            yield from matrices(layer, attn_output=(hidden, 1536))
        else:
            yield from matrices(layer, ssm_in=(2 * 3072 + 2 * 128 + 48, hidden), ssm_out=(hidden, 3072))
            yield f"{layer}.ssm_conv1d.weight", (3072 + 256, 4), "taps"
            yield f"{layer}.ssm_conv1d.bias", (3072 + 256,), 0.0
            yield f"{layer}.ssm_dt.bias", (48,), "steps"
            yield f"{layer}.ssm_a", (48, 1), "decays"
            yield f"{layer}.ssm_d", (48, 1), 1.0
            yield f"{layer}.ssm_norm.weight", (1, 3072), 1.0
        yield f"{layer}.ffn_gate_inp.weight", (64, hidden), "router"
        yield from mlp(layer, hidden, 512, "_exps", (64,))
        yield from mlp(layer, hidden, 1024, "_shexp")


LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)

SHAPES = {
    "Qwen3.5-0.8B": Shape("qwen35", 248320, {
        "context_length": 262144, "embedding_length": 1024, "block_count": 24, "feed_forward_length": 3584,
        "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 256,
        "attention.value_length": 256, "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0],
        "rope.freq_base": 1e7, "attention.layer_norm_rms_epsilon": 1e-6, "ssm.conv_kernel": 4, "ssm.state_size": 128,
        "ssm.group_count": 16, "ssm.time_step_rank": 16, "ssm.inner_size": 2048, "full_attention_interval": 4,
    }, qwen3_5),
    "Gemma-4-E2B": Shape("gemma4", 262144, {
        "context_length": 131072, "embedding_length": 1536, "block_count": 35,
        "feed_forward_length": [6144] * 15 + [12288] * 20, "attention.head_count": 8, "attention.head_count_kv": 1,
        "attention.key_length": 512, "attention.value_length": 512, "attention.key_length_swa": 256,
        "attention.value_length_swa": 256, "rope.dimension_count": 512, "rope.dimension_count_swa": 256,
        "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "attention.sliding_window": 512,
        "attention.sliding_window_pattern": [i % 5 != 4 for i in range(35)], "attention.shared_kv_layers": 20,
        "embedding_length_per_layer_input": 256, "final_logit_softcapping": 30.0,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }, gemma4),
    "LFM2-1.2B": Shape("lfm2", 65536, {
        "context_length": 128000, "embedding_length": 2048, "block_count": 16, "feed_forward_length": 8192,
        "attention.head_count": 32, "attention.head_count_kv": [8 if i in LFM2_ATTENTION else 0 for i in range(16)],
        "rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-5, "shortconv.l_cache": 3,
    }, lfm2),
    # Granite 4.0 H Tiny with 10 of its 40 layers, and a vocabulary in the same proportion.
    "Granite-4.0-H-Tiny-10L": Shape("granitehybrid", 25088, {
        "context_length": 131072, "embedding_length": 1536, "block_count": 10, "feed_forward_length": 512,
        "attention.head_count": 12, "attention.head_count_kv": [4 if i == 5 else 0 for i in range(10)],
        "rope.dimension_count": 128, "rope.freq_base": 1e4, "rope.scaling.finetuned": False,
        "attention.layer_norm_rms_epsilon": 1e-5, "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 1,
        "ssm.time_step_rank": 48, "ssm.inner_size": 3072, "expert_count": 64, "expert_used_count": 6,
        "expert_shared_feed_forward_length": 1024, "embedding_scale": 12.0, "residual_scale": 0.22,
        "attention.scale": 0.0078125, "logit_scale": 6.0,
    }, granite_hybrid),
}  # fmt: skip


def write(name: str, path: Path) -> None:
    """Writes the file of a shape."""
    shape = SHAPES[name]
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for key, value in shape.keys.items():
        key = f"{shape.architecture}.{key}"
        kinds = {bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        kinds[type(value)](key, value)
    writer.add_vocab_size(shape.vocab_size)
    add_tokenizer(writer, shape.vocab_size)
    random = np.random.default_rng(0)
    drawn = random.standard_normal(BLOCK, np.float32).astype(np.float16)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        for number, (tensor, sizes, kind) in enumerate(shape.tensors()):
            values = (
                np.memmap(Path(folder, str(number)), np.float16, "w+", shape=sizes) if np.prod(sizes) > BLOCK else None
            )
            writer.add_tensor(tensor, numbers(kind, sizes, random, drawn, values))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def numbers(
    kind: float | str, shape: tuple[int, ...], random: np.random.Generator, drawn: np.ndarray, into: np.ndarray | None
) -> np.ndarray:
    """Layers are twice as strong as when training starts, so that they are heard; steps and decays are as they begin in
    Mamba-2. The first row of an embedding is zero. A matrix is a part of the `drawn` numbers that begins anywhere;
    one that has more repeats them."""
    match kind:
        case "normal" | "embedding":
            scale = np.float16(0.02 if kind == "embedding" else 2 / np.sqrt(shape[-1]))
            values = np.empty(shape, np.float16) if into is None else into
            flat = values.reshape(-1)
            for begin in range(0, len(flat), BLOCK // 2):
                some = flat[begin : begin + BLOCK // 2]
                first = int(random.integers(0, BLOCK // 2))
                np.multiply(drawn[first : first + len(some)], scale, out=some)
            if kind == "embedding":
                values[0] = 0
            return values
        case "router":
            return random.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
        case "taps":
            return random.standard_normal(shape, np.float32) * np.float32(0.5)
        case "steps":
            return np.log(np.expm1(np.exp(random.uniform(np.log(1e-3), np.log(1e-1), shape)))).astype(np.float32)
        case "decays":
            return -random.uniform(1, 16, shape).astype(np.float32)
        case "a quarter":
            return np.where(np.arange(*shape) < shape[0] // 4, 1, 1e30).astype(np.float32)
        case _:
            return np.full(shape, kind, np.float32)


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """The tokens of `model.write_tokenizer`."""
    texts = token_texts(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(texts) - 1))
    writer.add_token_merges(["Ġ 0"])  # an empty list cannot be written; this one makes no token
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
