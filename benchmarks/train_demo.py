"""Train the bundled demo model (`checkpoints/demo`) from scratch on a CPU.

The demo model is a small Llama that writes Python. Everything it learns from is the source of the Python standard
library of the running interpreter: whole files, and chat examples built from its functions and their docstrings. One
run trains the tokenizer, trains the weights for a fixed wall time (the learning rate follows the fraction of the time
that has passed, so a slow machine does fewer steps and still finishes), measures the held-out perplexity and writes a
folder that `transformers` and this project load alike.

    python benchmarks/train_demo.py --minutes 80           # train, or resume a run that was stopped
    python benchmarks/train_demo.py --eval                 # held-out perplexity of the exported weights
    python benchmarks/train_demo.py --sample "def fibonacci(n):"

Needs `optax` next to the project's own dependencies. Weights live in a flat dict under the names and in the [out, in]
orientation of the exported file, so that exporting is a cast.
"""

import argparse
import ast
import json
import math
import os
import textwrap
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from demo_text import EOT, by_hash, is_heldout, read_sources
from flax import serialization
from safetensors.numpy import load_file, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SYSTEM = "You are a helpful assistant that writes Python."
CHAT_TEMPLATE = Path(__file__).parents[1] / "checkpoints" / "demo" / "chat_template.jinja"
CONFIG = json.loads("""{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 4096,
  "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 5, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 2048,
  "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": true, "attention_bias": false,
  "mlp_bias": false, "bos_token_id": null, "eos_token_id": 0
}""")
# From this fraction of the time on: (sequence length, sequences per step).
STAGES = [(0.0, 512, 4), (0.06, 512, 8), (0.85, 2048, 2)]
CHAT_SHARE = 0.13

Params = dict[str, jax.Array]


def render_chat(user: str, assistant: str, system: str | None) -> str:
    """One conversation as `CHAT_TEMPLATE` renders it."""
    turns = [("system", system), ("user", user), ("assistant", assistant)]
    return "".join(f"{IM_START}{role}\n{content}{IM_END}\n" for role, content in turns if content)


def chat_examples(sources: dict[str, str], rng: np.random.Generator) -> list[str]:
    """A request made from each documented function's name and docstring; the answer is its source without it."""
    examples = []
    for text in sources.values():
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            doc = isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
            summary = doc.strip().split("\n\n")[0].replace("\n", " ") if doc else ""
            if not 12 <= len(summary) <= 240 or len(node.body) < 2:
                continue
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
            body = lines[start : node.body[0].lineno - 1] + lines[node.body[0].end_lineno : node.end_lineno]
            code = textwrap.dedent("\n".join(body)).strip()
            kind = "method" if node.args.args and node.args.args[0].arg in ("self", "cls") else "function"
            if 30 <= len(code) <= 1600:
                system = SYSTEM if rng.random() < 0.3 else None
                examples.append(render_chat(f"Write a Python {kind} `{node.name}`: {summary}", code, system))
    return examples


class Corpus:
    """Token ids of the training and held-out documents, each document ended by `EOT`."""

    def __init__(self, tokenizer: Tokenizer):
        sources = read_sources()
        self.heldout_texts = {name: text for name, text in sources.items() if is_heldout(name)}
        self.train_texts = {name: text for name, text in sources.items() if not is_heldout(name)}
        self.files = encode_documents(tokenizer, self.train_texts.values())
        self.chats = encode_documents(tokenizer, chat_examples(self.train_texts, np.random.default_rng(0)))
        self.heldout = encode_documents(tokenizer, self.heldout_texts.values())
        self.heldout_bytes = sum(len(text.encode()) for text in self.heldout_texts.values())
        self.file_tokens, self.chat_tokens = (sum(map(len, documents)) for documents in (self.files, self.chats))

    def epoch(self, seed: int) -> np.ndarray:
        """All files and a fresh draw of chat examples, in a new order, as one stream of ids."""
        rng = np.random.default_rng(seed)
        share = CHAT_SHARE / (1 - CHAT_SHARE) * self.file_tokens / self.chat_tokens
        drawn = rng.choice(len(self.chats), int(min(share, 1.0) * len(self.chats)), replace=False)
        documents = self.files + [self.chats[i] for i in drawn]
        return np.concatenate([documents[i] for i in rng.permutation(len(documents))])

    def batches(self, length: int, rows: int, seed: int) -> Iterator[np.ndarray]:
        """Endless [rows, length + 1] windows: each epoch is cut at a new offset and its windows are shuffled."""
        while True:
            stream = self.epoch(seed)
            rng = np.random.default_rng(seed)
            starts = rng.permutation(np.arange(rng.integers(length), len(stream) - length - 1, length))
            for i in range(0, len(starts) - rows + 1, rows):
                yield np.stack([stream[s : s + length + 1] for s in starts[i : i + rows]])
            seed += 1


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> list[np.ndarray]:
    """Each text's ids, ended by `EOT`."""
    eot = tokenizer.token_to_id(EOT)
    return [np.array([*encoding.ids, eot], np.int32) for encoding in tokenizer.encode_batch(list(texts))]


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` entries; ids 0, 1, 2 are the special tokens, digits stand alone."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=CONFIG["vocab_size"], initial_alphabet=byte_level.alphabet())
    trainer.special_tokens = [EOT, IM_START, IM_END]
    trainer.show_progress = False
    texts = [text for name, text in read_sources().items() if not is_heldout(name)]
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    return tokenizer


def init_params(key: jax.Array) -> Params:
    """Fresh weights; the projections that write to the residual stream start at zero."""
    c = CONFIG
    d = c["hidden_size"]
    q = c["num_attention_heads"] * c["head_dim"]
    kv = c["num_key_value_heads"] * c["head_dim"]
    ff = c["intermediate_size"]
    shapes = {"self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d)}
    shapes |= {"self_attn.o_proj": (d, q), "mlp.gate_proj": (ff, d), "mlp.up_proj": (ff, d), "mlp.down_proj": (d, ff)}
    keys = iter(jax.random.split(key, 1 + len(shapes) * c["num_hidden_layers"]))
    params = {"model.embed_tokens.weight": 0.02 * jax.random.normal(next(keys), (c["vocab_size"], d))}
    for i in range(c["num_hidden_layers"]):
        for name, shape in shapes.items():
            scale = 0.0 if name.endswith(("o_proj", "down_proj")) else shape[1] ** -0.5
            params[f"model.layers.{i}.{name}.weight"] = scale * jax.random.normal(next(keys), shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            params[f"model.layers.{i}.{name}.weight"] = jnp.ones(d)
    return params | {"model.norm.weight": jnp.ones(d)}


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Root-mean-square norm over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def rope(x: jax.Array) -> jax.Array:
    """Rotary positions 0..T-1 on [B, T, heads, head_dim], in halves as Llama has them."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * CONFIG["rope_theta"] ** (-jnp.arange(half) / half)
    cos = jnp.cos(angles)[:, None]
    sin = jnp.sin(angles)[:, None]
    a = x[..., :half]
    b = x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of q [B, T, H, D] over k, v [B, T, K, D] in blocks of queries; returns [B, T, H * D]."""
    (B, T, H, D), K = q.shape, k.shape[2]
    G = H // K
    block = max(128, T // 8)  # scores of a block stay in the cache; keys after a block are never touched
    q = (q * D**-0.5).reshape(B, T, K, G, D).transpose(0, 2, 3, 1, 4)
    k = k.transpose(0, 2, 3, 1)
    v = v.transpose(0, 2, 1, 3)
    outputs = []
    for start in range(0, T, block):
        end = min(start + block, T)
        n = end - start
        scores = (q[:, :, :, start:end].reshape(B, K, G * n, D) @ k[..., :end]).reshape(B, K, G, n, end)
        visible = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None, :]
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e9), -1).reshape(B, K, G * n, end)
        outputs.append((weights @ v[:, :, :end]).reshape(B, K, G, n, D))
    return jnp.concatenate(outputs, 3).transpose(0, 3, 1, 2, 4).reshape(B, T, H * D)


def forward(params: Params, tokens: jax.Array) -> jax.Array:
    """Final hidden states [B, T, hidden] of token ids [B, T]."""
    heads = (*tokens.shape, -1, CONFIG["head_dim"])
    x = params["model.embed_tokens.weight"][tokens]
    for i in range(CONFIG["num_hidden_layers"]):
        w = {name.split(f"layers.{i}.")[1]: value for name, value in params.items() if f"layers.{i}." in name}
        h = rms_norm(x, w["input_layernorm.weight"])
        q, k, v = ((h @ w[f"self_attn.{n}_proj.weight"].T).reshape(heads) for n in "qkv")
        x = x + attention(rope(q), rope(k), v) @ w["self_attn.o_proj.weight"].T
        h = rms_norm(x, w["post_attention_layernorm.weight"])
        h = jax.nn.silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)
        x = x + h @ w["mlp.down_proj.weight"].T
    return rms_norm(x, params["model.norm.weight"])


@jax.jit
def token_losses(params: Params, batch: jax.Array) -> jax.Array:
    """Next-token cross entropy [B, T] of [B, T + 1] ids, in nats."""
    logits = forward(params, batch[:, :-1]) @ params["model.embed_tokens.weight"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """Muon for the layers' matrices, AdamW for the rest, at their peak rates; `lr_scale` scales every step."""
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    return optax.contrib.muon(
        learning_rate=args.muon_lr,
        weight_decay=args.weight_decay,
        adam_learning_rate=args.adam_lr,
        adam_b2=0.95,
        muon_weight_dimension_numbers=lambda params: {name: matrix if "proj" in name else None for name in params},
    )


def lr_scale(fraction: float) -> float:
    """Trapezoid over the fraction of the time: a short warmup, a plateau, a linear descent to zero."""
    return min(fraction / 0.01 + 0.02, 1.0, max(0.0, 1 - fraction) / 0.6)


@partial(jax.jit, static_argnames="optimizer", donate_argnums=(1, 2))
def train_step(optimizer, params, state, batch, scale):
    """One update; returns the new params, optimizer state and the loss before it."""
    loss, grads = jax.value_and_grad(lambda params: token_losses(params, batch).mean())(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, jax.tree.map(lambda u: u * scale, updates)), state, loss


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace a file's content in one step: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data.encode() if isinstance(data, str) else data)
    os.replace(temporary, path)


def train(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Train until `--minutes` of training have passed, resuming from `--work` if it holds a checkpoint."""
    corpus = Corpus(tokenizer)
    write_text(args.out / "heldout.txt", corpus.heldout_texts)  # for measuring quantization
    write_text(args.out / "calibration.txt", corpus.train_texts)  # for quantizing
    print(f"{len(corpus.files)} files, {corpus.file_tokens} tokens; held out: {len(corpus.heldout)} files", flush=True)
    print(f"{len(corpus.chats)} chat examples, {corpus.chat_tokens} tokens", flush=True)
    optimizer = make_optimizer(args)
    params = init_params(jax.random.key(0))
    run = {"params": params, "state": optimizer.init(params), "step": 0, "tokens": 0, "elapsed": 0.0}
    checkpoint = args.work / "checkpoint.msgpack"
    if checkpoint.exists():
        run = serialization.from_bytes(run, checkpoint.read_bytes())
        print(f"resumed at step {run['step']}", flush=True)
    else:
        export_weights(args.out, run["params"])
    probe = np.concatenate(corpus.heldout)[: 32 * 513].reshape(32, 513)

    def save_all(reason: str) -> None:
        write_atomic(checkpoint, serialization.to_bytes(run))
        export_weights(args.out, run["params"])
        print(f"saved ({reason}); held-out loss {token_losses(run['params'], probe).mean():.4f}", flush=True)

    stage = None
    saved = time.monotonic()
    losses = []
    while run["elapsed"] < args.minutes * 60:
        started = time.monotonic()
        fraction = run["elapsed"] / (args.minutes * 60)
        wanted = max(s for s in STAGES if s[0] <= fraction)
        if wanted != stage:
            stage = wanted
            batches = corpus.batches(stage[1], stage[2], seed=1 + run["step"] * 1000)
        batch = next(batches)
        scale = lr_scale(fraction)
        run["params"], run["state"], loss = train_step(optimizer, run["params"], run["state"], batch, scale)
        losses.append(float(loss))
        run["step"] += 1
        run["tokens"] += batch[:, 1:].size
        if run["step"] % 20 == 0:
            rate = batch[:, 1:].size / (time.monotonic() - started)
            progress = f"step {run['step']} {fraction:.1%} tokens {run['tokens']}"
            print(f"{progress} loss {np.mean(losses[-20:]):.4f} {rate:.0f} tok/s", flush=True)
        if time.monotonic() - saved > args.save_minutes * 60:
            save_all("in passing")
            saved = time.monotonic()
        run["elapsed"] += time.monotonic() - started
    save_all("finished")


def export_tokenizer(out: Path, tokenizer: Tokenizer) -> None:
    """The tokenizer and the configuration files that do not change during training."""
    files = {"config.json": CONFIG}
    files["tokenizer_config.json"] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOT,
        "pad_token": EOT,
        "additional_special_tokens": [IM_START, IM_END],
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    ends = [tokenizer.token_to_id(token) for token in (EOT, IM_END)]
    files["generation_config.json"] = {"eos_token_id": ends, "pad_token_id": ends[0], "do_sample": False}
    write_atomic(out / "tokenizer.json", tokenizer.to_str())
    write_atomic(out / CHAT_TEMPLATE.name, CHAT_TEMPLATE.read_text())
    for name, content in files.items():
        write_atomic(out / name, json.dumps(content, indent=2) + "\n")


def export_weights(out: Path, params: Params) -> None:
    """The weights in bfloat16 under Hugging Face's names; the tied output matrix is not stored twice."""
    arrays = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in params.items()}
    write_atomic(out / "model.safetensors", save(arrays, metadata={"format": "pt"}))


def load_weights(out: Path) -> Params:
    """The exported weights, in float32."""
    return {name: jnp.asarray(value, jnp.float32) for name, value in load_file(out / "model.safetensors").items()}


def write_text(path: Path, texts: dict[str, str], size: int = 100_000) -> None:
    """About `size` bytes of whole files, separated by `EOT`."""
    chosen: list[str] = []
    for _, text in by_hash(texts):
        if sum(len(t.encode()) for t in [*chosen, text]) <= size:
            chosen.append(text)
    write_atomic(path, EOT.join(chosen))


def evaluate(params: Params, corpus: Corpus, window: int) -> dict[str, float]:
    """Perplexity and bits per byte of all held-out files, in windows that do not see each other."""
    stream = np.concatenate([corpus.heldout[-1][-1:], *corpus.heldout])  # begins after a document's end
    total = 0.0
    count = len(stream) - 1
    for start in range(0, count, window):
        piece = stream[start : start + window + 1]
        padded = np.pad(piece, (0, window + 1 - len(piece)))
        total += float(token_losses(params, padded[None])[0, : len(piece) - 1].sum())
    return {"perplexity": math.exp(total / count), "bits_per_byte": total / math.log(2) / corpus.heldout_bytes}


def sample(params: Params, tokenizer: Tokenizer, prompt: str, max_tokens: int = 160) -> str:
    """Greedy continuation of a prompt, without a cache: every step runs the whole padded window."""
    prompt_ids = tokenizer.encode(prompt).ids
    ids = np.array(prompt_ids + [0] * max_tokens, np.int32)
    logits = jax.jit(lambda p, ids, last: forward(p, ids[None])[0, last] @ p["model.embed_tokens.weight"].T)
    for end in range(len(prompt_ids), len(ids)):
        ids[end] = logits(params, ids, end - 1).argmax()
        if tokenizer.id_to_token(int(ids[end])) in (EOT, IM_END):
            ids = ids[:end]
            break
    return tokenizer.decode(ids[len(prompt_ids) :])


def main() -> None:
    """Train, evaluate or sample, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("checkpoints/demo"), help="folder to export to")
    parser.add_argument("--work", type=Path, default=Path("build/demo_train"), help="folder of resumable checkpoints")
    parser.add_argument("--minutes", type=float, default=80, help="training time; the schedule spans it")
    parser.add_argument("--save-minutes", type=float, default=4, help="time between checkpoints")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="peak learning rate of the matrices")
    parser.add_argument("--adam-lr", type=float, default=0.004, help="peak learning rate of embedding and norms")
    parser.add_argument("--weight-decay", type=float, default=0.05, help="decay of the matrices")
    parser.add_argument("--sample", metavar="PROMPT", help="print a greedy continuation and exit")
    parser.add_argument("--chat", action="store_true", help="treat the --sample prompt as a user's message")
    parser.add_argument("--eval", action="store_true", help="print held-out perplexity and bits per byte and exit")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.out / "tokenizer.json").exists():
        export_tokenizer(args.out, train_tokenizer())
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    if args.sample is not None:
        prompt = f"{IM_START}user\n{args.sample}{IM_END}\n{IM_START}assistant\n" if args.chat else args.sample
        print(sample(load_weights(args.out), tokenizer, prompt))
    elif args.eval:
        for window in (512, 2048):
            print(window, evaluate(load_weights(args.out), Corpus(tokenizer), window))
    else:
        train(args, tokenizer)


if __name__ == "__main__":
    main()
