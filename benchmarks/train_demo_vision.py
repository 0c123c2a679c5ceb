"""Train the bundled model that sees (`checkpoints/demo-vision`) from scratch on a CPU.

It is a small Qwen3-VL that says which colour and shape pictures show, and which of several is first. Pictures and
conversations are drawn at random (`demo_pictures`). One run trains the tokenizer and the weights, and writes a folder
that `transformers` and this project load alike.

    python benchmarks/train_demo_vision.py --out build/demo-vision
    python benchmarks/train_demo_vision.py --eval 500          # answers of the exported weights about held-out pictures

Needs `optax` next to the project's own dependencies. Weights live in a flat dict under the names and in the [out, in]
orientation of the exported file, as those of `train_demo`, so that exporting is a cast.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import train_demo
from demo_pictures import Talk, draw_talk, texts_for_tokenizer
from demo_text import EOT
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from train_demo import IM_END, IM_START, attention, lr_scale, rms_norm, write_atomic

from jaxserve import LLM, SamplingParams
from jaxserve.execution.image_packing import layout_of
from jaxserve.images.processing import ImageProcessor
from jaxserve.images.prompts import with_images
from jaxserve.models.vision.spec import EncoderConfig
from jaxserve.scheduling.image_prompts import positions_of
from jaxserve.text.tokenizer import Tokenizer as ChatTokenizer
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import ImageTokens

FOLDER = Path(__file__).parents[1] / "checkpoints" / "demo-vision"
SPECIAL = [EOT, IM_START, IM_END, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CONFIG = json.loads("""{
  "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": true,
  "vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6,
  "text_config": {
    "model_type": "qwen3_vl_text", "dtype": "bfloat16", "vocab_size": 480, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "attention_bias": false, "tie_word_embeddings": true, "bos_token_id": null, "eos_token_id": 0,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": true, "mrope_section": [12, 10, 10]}
  },
  "vision_config": {
    "model_type": "qwen3_vl", "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4,
    "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "patch_size": 8, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "num_position_embeddings": 100, "out_hidden_size": 128, "deepstack_visual_indexes": [0]
  }
}""")
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "size": {"shortest_edge": 4096, "longest_edge": 6400},
}  # fmt: skip
# Limits are of all frames together.
VIDEO_PROCESSOR = {key: value for key, value in PROCESSOR.items() if key != "image_processor_type"} | {
    "video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": 4096, "longest_edge": 409600},
    "fps": 2, "min_frames": 4, "max_frames": 32,
}  # fmt: skip
MOST_PATCHES = 100  # of a picture with so many pixels
TEXT = CONFIG["text_config"]
VISION = CONFIG["vision_config"]
TOKENS = ImageTokens(CONFIG["image_token_id"], VISION["patch_size"], VISION["spatial_merge_size"], True)
# Conversations of one turn, and longer ones: tokens of the longest, how many a step takes, how many of their pictures.
SHAPES = {True: (96, 32, 48), False: (224, 12, 36)}

Params = dict[str, jax.Array]


class Batch(NamedTuple):
    """Conversations. An index of -1 means that there is none.

    tokens: int32 [rows, tokens + 1].
    answers: bool [rows, tokens], which of tokens[:, 1:] are to be learnt.
    positions: int32 [rows, 3, tokens].
    features: int32 [rows, tokens], which feature of all pictures stands in a token's place.
    patches: uint8 [pictures, patches, numbers of a patch].
    place: int32 [pictures, patches, 2], row and column.
    corner, share: [pictures, patches, 4], rows of the table of positions and their shares.
    counts: int32 [pictures], patches.
    """

    tokens: Any
    answers: Any
    positions: Any
    features: Any
    patches: Any
    place: Any
    corner: Any
    share: Any
    counts: Any


class Conversations:
    """Draws batches."""

    def __init__(self, folder: Path):
        self.tokenizer: ChatTokenizer = load_tokenizer(folder)
        processor = ImageProcessor.of(folder, TOKENS)
        assert processor is not None
        self._processor = processor
        self._start, self._end = (self.tokenizer.token_of(text) for text in (IM_START, IM_END))
        self._head = self.tokenizer.encode("assistant\n", add_special_tokens=False)
        self._call = self.tokenizer.encode("<tool_call>", add_special_tokens=False)[0]
        names = "hidden_size", "patch_shape", "layers", "side", "projector", "out_size", "table"
        given = VISION["hidden_size"], (3, 2, 8, 8), (), TOKENS.side, (), VISION["out_hidden_size"], 10
        self._encoder = EncoderConfig(**dict(zip(names, given, strict=True)))

    def batch(self, seed: int, *, short: bool) -> Batch:
        length, rows, pictures = SHAPES[short]
        rng = np.random.default_rng(seed)
        side = VISION["patch_size"]
        made = Batch(
            np.zeros((rows, length + 1), np.int32), np.zeros((rows, length), bool),
            np.zeros((rows, 3, length), np.int32), np.full((rows, length), -1, np.int32),
            np.zeros((pictures, MOST_PATCHES, 6 * side**2), np.uint8), np.zeros((pictures, MOST_PATCHES, 2), np.int32),
            np.zeros((pictures, MOST_PATCHES, 4), np.int32), np.zeros((pictures, MOST_PATCHES, 4), np.float32),
            np.zeros(pictures, np.int32),
        )  # fmt: skip
        row = 0
        picture = 0
        while row < rows:
            talk = draw_talk(rng, short=short)
            if picture + len(talk.pictures) > pictures:
                break
            processed = [self._processor(one) for one in talk.pictures]
            text = self.tokenizer.render_chat(talk.messages, talk.tools, add_generation_prompt=False)
            ids, images = with_images(self.tokenizer.encode(text, False), processed, TOKENS, self.tokenizer.token_of)
            if len(ids) > length + 1:
                continue
            made.tokens[row, : len(ids)] = ids
            made.answers[row, : len(ids) - 1] = self._answers(ids)[1:]
            grids = [(one.first, (1, one.grid[1] // TOKENS.side, one.grid[2] // TOKENS.side)) for one in images]
            made.positions[row] = positions_of(length + 1, grids)[0][:, :length]
            for one in images:
                index = picture * (MOST_PATCHES // TOKENS.side**2) + np.arange(one.count)
                made.features[row, one.first : one.first + one.count] = index
                layout = layout_of(self._encoder, *one.grid[1:])
                count = made.counts[picture] = one.num_patches
                made.patches[picture, :count] = np.frombuffer(one.patches, np.uint8).reshape(count, -1)
                made.place[picture, :count] = layout.place
                made.corner[picture, :count] = layout.corner
                made.share[picture, :count] = layout.share
                picture += 1
            row += 1
        return made

    def _answers(self, ids: list[int]) -> np.ndarray:
        """Which tokens are the model's own, and no calls of tools, bool [tokens]."""
        own = np.zeros(len(ids), bool)
        begin = len(self._head) + 1
        for i, token in enumerate(ids):
            if token == self._start and ids[i + 1 : i + begin] == self._head and ids[i + begin] != self._call:
                own[i + begin : ids.index(self._end, i) + 1] = True
        return own


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` entries, of which the first are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=TEXT["vocab_size"], initial_alphabet=byte_level.alphabet())
    trainer.special_tokens = SPECIAL
    trainer.show_progress = False
    tokenizer.train_from_iterator(texts_for_tokenizer(), trainer)
    assert tokenizer.get_vocab_size() == TEXT["vocab_size"]
    return tokenizer


def init_params(key: jax.Array) -> Params:
    """Fresh weights; the projections that write to the residual stream start at zero."""
    hidden, wide, heads, dim = (
        TEXT["hidden_size"],
        TEXT["intermediate_size"],
        TEXT["num_attention_heads"],
        TEXT["head_dim"],
    )
    kv = TEXT["num_key_value_heads"] * dim
    seen = VISION["hidden_size"]
    merged = seen * TOKENS.side**2
    inner = VISION["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.language_model.embed_tokens.weight": (TEXT["vocab_size"], hidden),
        "model.language_model.norm.weight": (hidden,),
        "model.visual.patch_embed.proj.weight": (seen, 6 * VISION["patch_size"] ** 2),
        "model.visual.pos_embed.weight": (VISION["num_position_embeddings"], seen),
    }
    for i in range(TEXT["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (heads * dim, hidden), "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, heads * dim), "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"model.language_model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    for i in range(VISION["depth"]):
        layer = {
            "norm1": (seen,), "norm2": (seen,), "attn.qkv": (3 * seen, seen), "attn.proj": (seen, seen),
            "mlp.linear_fc1": (inner, seen), "mlp.linear_fc2": (seen, inner),
        }  # fmt: skip
        shapes |= {f"model.visual.blocks.{i}.{name}.weight": shape for name, shape in layer.items()}
    for name, normed in (("merger", seen), ("deepstack_merger_list.0", merged)):
        layer = {"norm": (normed,), "linear_fc1": (merged, merged), "linear_fc2": (hidden, merged)}
        shapes |= {f"model.visual.{name}.{part}.weight": shape for part, shape in layer.items()}
    params = {}
    for name, shape in shapes.items():
        key, own = jax.random.split(key)
        if len(shape) == 1:
            params[name] = jnp.ones(shape)
        elif "embed" in name and "patch" not in name:
            params[name] = 0.02 * jax.random.normal(own, shape)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight")):
            params[name] = jnp.zeros(shape)
        else:
            params[name] = shape[1] ** -0.5 * jax.random.normal(own, shape)
        if "visual" in name and "pos_embed" not in name:
            params[name.replace("weight", "bias")] = jnp.zeros(shape[0])
    return params


def part_of(params: Params, prefix: str) -> Params:
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    x = x @ params[f"{name}.weight"].T
    return x + params[f"{name}.bias"] if f"{name}.bias" in params else x


def layer_norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * params[f"{name}.weight"] + params[f"{name}.bias"]


def turned(x: jax.Array, angles: jax.Array) -> jax.Array:
    """x [..., tokens, heads, dim] with the pairs of its halves turned by angles [..., tokens, dim / 2]."""
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def encode(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The features of all pictures, and those for behind the first layer of the decoder, each [features, hidden]."""
    heads = VISION["num_heads"]
    dim = VISION["hidden_size"] // heads
    seen = params["pos_embed.weight"][batch.corner] * batch.share[..., None]
    x = linear(params, "patch_embed.proj", batch.patches.astype(jnp.float32) / 127.5 - 1) + seen.sum(2)
    angles = batch.place[..., None] * TEXT["rope_theta"] ** (-jnp.arange(dim // 4) * 4 / dim)
    angles = angles.reshape(*angles.shape[:2], -1)
    padding = jnp.arange(MOST_PATCHES) >= batch.counts[:, None]
    deep = x
    for i in range(VISION["depth"]):
        w = part_of(params, f"blocks.{i}.")
        q, k, v = jnp.moveaxis(
            linear(w, "attn.qkv", layer_norm(w, "norm1", x)).reshape(*x.shape[:2], 3, heads, dim), 2, 0
        )
        scores = jnp.einsum("pqhd,pkhd->phqk", turned(q, angles), turned(k, angles)) * dim**-0.5
        shares = jax.nn.softmax(jnp.where(padding[:, None, None], -1e9, scores), -1)
        x = x + linear(w, "attn.proj", jnp.einsum("phqk,pkhd->pqhd", shares, v).reshape(x.shape))
        x = x + linear(w, "mlp.linear_fc2", jax.nn.gelu(linear(w, "mlp.linear_fc1", layer_norm(w, "norm2", x))))
        deep = x if i in VISION["deepstack_visual_indexes"] else deep
    wide = -1, VISION["hidden_size"] * TOKENS.side**2
    own, tap = part_of(params, "merger."), part_of(params, "deepstack_merger_list.0.")
    joined = layer_norm(own, "norm", x).reshape(wide), layer_norm(tap, "norm", deep.reshape(wide))
    first, second = (
        linear(w, "linear_fc2", jax.nn.gelu(linear(w, "linear_fc1", x), approximate=False))
        for w, x in zip((own, tap), joined, strict=True)
    )
    return first, second


def loss_of(params: Params, batch: Batch) -> jax.Array:
    """Mean cross entropy of the answers' tokens, in nats."""
    features, deep = encode(part_of(params, "model.visual."), batch)
    text = part_of(params, "model.language_model.")
    table = text["embed_tokens.weight"]
    shown = batch.features[..., None] >= 0
    x = jnp.where(shown, features[batch.features], table[batch.tokens[:, :-1]])
    pair = np.arange(TEXT["head_dim"] // 2)
    sections = TEXT["rope_scaling"]["mrope_section"]
    axis = np.where(pair < 3 * np.take(sections, pair % 3), pair % 3, 0)
    angles = batch.positions[:, axis].swapaxes(1, 2) * TEXT["rope_theta"] ** (-pair / len(pair))
    heads = (*x.shape[:2], -1, TEXT["head_dim"])
    for i in range(TEXT["num_hidden_layers"]):
        w = part_of(text, f"layers.{i}.")
        h = rms_norm(x, w["input_layernorm.weight"])
        q, k, v = (linear(w, f"self_attn.{name}_proj", h).reshape(heads) for name in "qkv")
        q, k = (turned(rms_norm(y, w[f"self_attn.{name}_norm.weight"]), angles) for name, y in (("q", q), ("k", k)))
        x = x + linear(w, "self_attn.o_proj", attention(q, k, v))
        h = rms_norm(x, w["post_attention_layernorm.weight"])
        x = x + linear(w, "mlp.down_proj", jax.nn.silu(linear(w, "mlp.gate_proj", h)) * linear(w, "mlp.up_proj", h))
        x = x + jnp.where(shown, deep[batch.features], 0) if i == 0 else x
    logits = rms_norm(x, text["norm.weight"]) @ table.T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens[:, 1:])
    return jnp.sum(losses * batch.answers) / jnp.sum(batch.answers)


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """Muon for the layers' matrices, AdamW for the rest, as `train_demo` has them."""
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    return optax.contrib.muon(
        learning_rate=args.muon_lr,
        weight_decay=0.05,
        adam_learning_rate=args.adam_lr,
        adam_b2=0.95,
        muon_weight_dimension_numbers=lambda params: {
            name: matrix if name.endswith("weight") and "norm" not in name and "embed" not in name else None
            for name in params
        },
    )


@partial(jax.jit, static_argnames="optimizer", donate_argnums=(1, 2))
def train_step(optimizer, params, state, batch, scale):
    """One update; returns the new params, optimizer state and the loss before it."""
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, jax.tree.map(lambda u: u * scale, updates)), state, loss


def batches(talks: Conversations, args: argparse.Namespace) -> Iterator[Batch]:
    """One for each step; the next is drawn while a step runs. Short conversations come first, and later by turns."""
    first = args.steps // 4
    with ThreadPoolExecutor(1) as pool:
        draw = partial(pool.submit, talks.batch)
        coming = draw(args.seed, short=True)
        for step in range(1, args.steps + 1):
            batch = coming.result()
            coming = draw(args.seed + step, short=step < first or step % 2 == 0)
            yield batch


def train(args: argparse.Namespace) -> None:
    export_settings(args.out)
    talks = Conversations(args.out)
    optimizer = make_optimizer(args)
    params = init_params(jax.random.key(args.seed)) if args.start is None else load_weights(args.start)
    print(f"{sum(x.size for x in params.values())} parameters", flush=True)
    state = optimizer.init(params)
    start = time.monotonic()
    losses = []
    for step, batch in enumerate(batches(talks, args)):
        params, state, loss = train_step(optimizer, params, state, batch, lr_scale(step / args.steps))
        losses.append(float(loss))
        if step % 25 == 24:
            print(f"step {step + 1} loss {np.mean(losses[-25:]):.4f} {time.monotonic() - start:.0f} s", flush=True)
        if step % 250 == 249:
            export_weights(args.out, params)
    export_weights(args.out, params)


def export_settings(out: Path) -> None:
    """The tokenizer and the configuration files."""
    out.mkdir(parents=True, exist_ok=True)
    files = {"config.json": CONFIG, "preprocessor_config.json": PROCESSOR}
    files["video_preprocessor_config.json"] = VIDEO_PROCESSOR
    files["tokenizer_config.json"] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOT,
        "pad_token": EOT,
        "additional_special_tokens": SPECIAL[1:],
        "model_max_length": TEXT["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    files["generation_config.json"] = {"eos_token_id": [0, 2], "pad_token_id": 0, "do_sample": False}
    write_atomic(out / "tokenizer.json", train_tokenizer().to_str())
    write_atomic(out / "chat_template.jinja", (FOLDER / "chat_template.jinja").read_text())
    for name, content in files.items():
        write_atomic(out / name, json.dumps(content, indent=2) + "\n")


def export_weights(out: Path, params: Params) -> None:
    """The weights in bfloat16 under Hugging Face's names; the tied output matrix is not stored twice."""
    arrays = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in params.items()}
    patch = "model.visual.patch_embed.proj.weight"
    side = VISION["patch_size"]
    arrays[patch] = arrays[patch].reshape(-1, 3, 2, side, side)
    write_atomic(out / "model.safetensors", save(arrays, metadata={"format": "pt"}))


def load_weights(folder: Path) -> Params:
    """Exported weights, in float32."""
    params = train_demo.load_weights(folder)
    patch = "model.visual.patch_embed.proj.weight"
    return params | {patch: params[patch].reshape(len(params[patch]), -1)}


def asked(talk: Talk) -> list[dict[str, Any]]:
    """The conversation without its last answer, with its pictures in their places."""
    left = iter(talk.pictures)

    def shown(content: Any) -> Any:
        if isinstance(content, str):
            return content
        return [part if part["type"] == "text" else part | {"image": next(left)} for part in content]

    return [message | {"content": shown(message["content"])} for message in talk.messages[:-1]]


def evaluate(folder: Path, count: int) -> None:
    """Prints how many of so many answers about held-out pictures are right, word for word."""
    rng = np.random.default_rng(2**40)
    llm = LLM(str(folder), max_model_len=1024)
    right: Counter[str] = Counter()
    for kind, short in (("one turn", True), ("several turns", False)):
        talks = [draw_talk(rng, short=short) for _ in range(count)]
        params = SamplingParams(temperature=0.0, max_tokens=32)
        prompts = [llm.chat(asked(talk), params, progress=False, tools=talk.tools)[0] for talk in talks]
        for talk, result in zip(talks, prompts, strict=True):
            answer = result.outputs[0].text
            right[kind] += answer == talk.messages[-1]["content"]
            if answer != talk.messages[-1]["content"]:
                print(f"{answer!r}, not {talk.messages[-1]['content']!r}, to {talk.messages[-2]['content']!r}")
        print(f"{kind}: {right[kind]} of {count} are right", flush=True)


def main() -> None:
    """Train or evaluate, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to export to")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="weights that training begins with; None: fresh")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--muon-lr", type=float, default=0.02, help="peak learning rate of the matrices")
    parser.add_argument("--adam-lr", type=float, default=0.004, help="peak learning rate of the rest")
    parser.add_argument(
        "--eval", type=int, metavar="N", help="ask about N held-out conversations of each kind and exit"
    )
    args = parser.parse_args()
    assert train_demo.CONFIG["rms_norm_eps"] == TEXT["rms_norm_eps"]  # of the shared norm
    if args.eval:
        evaluate(args.out, args.eval)
    else:
        train(args)


if __name__ == "__main__":
    main()
