"""Small random checkpoints in the Hugging Face layout, for conformance tests. Nothing here needs torch.

`CASES` names them; `build` writes one to a folder. A weight depends on the case and the tensor's name alone and is
computed with integer and IEEE double arithmetic from a raw PCG64 stream, so it is the same bit for bit on every machine
and with every numpy. `tests/goldens` holds the results of Hugging Face transformers.
"""

import hashlib
import itertools
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from dense_models import (
    DENSE_CASES,
    NGRAM_BUFFERS,
    dense_manifest,
    dense_mean_and_std,
    expert_table,
    ngram_buffer,
)
from image_models import IMAGE_CASES
from moe_models import MOE_CASES
from recurrent_models import RECURRENT_CASES
from safetensors.numpy import save_file
from within_models import WITHIN_CASES

UNK, BOS, EOS, IM_START, IM_END = range(5)
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ARCHITECTURES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "mixtral": "Mixtral",
    "qwen3": "Qwen3",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """One checkpoint: its two json files, the dtype of the stored weights, and the lengths of the recorded prompts."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    dtype: str = "float32"
    prompt_lengths: tuple[int, ...] = (1, 7, 37, 130)
    options: Mapping[str, Any] = field(default_factory=dict)  # of the engine that runs it

    @property
    def text(self) -> dict[str, Any]:
        """The settings of the language model, which may be a part of a model that also sees."""
        return self.config.get("text_config", self.config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self.generation_config["eos_token_id"]
        return tuple(eos) if isinstance(eos, list) else (eos,)


def _case(
    family: str,
    *,
    modern: bool = False,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int | None = 2,
    layers: int = 2,
    intermediate: int = 160,
    vocab: int = 512,
    theta: float | None = 10000.0,
    scaling: dict[str, Any] | None = None,
    dtype: str = "float32",
    prompt_lengths: tuple[int, ...] = (1, 7, 37, 130),
    generation: dict[str, Any] | None = None,
    **extra: Any,
) -> Case:
    """`modern` writes config.json like transformers 5 (`rope_parameters`, `dtype`), otherwise like 4 (`rope_theta`,
    `rope_scaling`, `torch_dtype`). With `kv_heads` or `theta` None the key is left out of the file."""
    eos = [IM_END, EOS] if family.startswith("qwen") else EOS
    config: dict[str, Any] = {
        "architectures": [f"{ARCHITECTURES[family]}ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "eos_token_id": IM_END if family.startswith("qwen") else EOS,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 512,
        "model_type": family,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6 if family.startswith("qwen") else 1e-5,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": vocab,
    }
    if kv_heads is None:
        del config["num_key_value_heads"]
    version = "5.0.0" if modern else "4.45.2"
    if modern:
        config["dtype"] = dtype
        config["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"} | (scaling or {})
    else:
        config["torch_dtype"] = dtype
        config |= {"rope_scaling": scaling} | ({} if theta is None else {"rope_theta": theta})
    config = dict(sorted((config | {"transformers_version": version} | extra).items()))
    made = {"bos_token_id": BOS, "eos_token_id": eos, "transformers_version": version} | (generation or {})
    return Case(config, made, dtype, prompt_lengths)


# Rotary settings over a pretraining length of 64, which prompts of 130 tokens exceed.
_LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_YARN_OPTIONS = {"beta_fast": 8.0, "beta_slow": 0.5, "mscale": 0.707, "mscale_all_dim": 1.5, "truncate": False}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2

CASES: dict[str, Case] = {
    # Llama generations, in the style of their published config.json.
    "llama2_mha": _case("llama", kv_heads=4, theta=None, pretraining_tp=1),
    "llama3_gqa": _case("llama", hidden=128, heads=8, theta=500000.0, generation={"eos_token_id": [EOS, IM_END]}),
    "llama31_scaled": _case(
        "llama",
        hidden=128,
        theta=500000.0,
        scaling=_LLAMA3,
        eos_token_id=[EOS, IM_END],
        generation={"eos_token_id": [EOS, IM_END]},
    ),
    "llama32_tied": _case(
        "llama",
        modern=True,
        hidden=128,
        head_dim=32,
        theta=500000.0,
        scaling=_LLAMA3,
        tie_word_embeddings=True,
        vocab=640,
    ),
    # Rotary scaling. The dynamic one takes max_position_embeddings as the pretraining length; its prompts stay inside.
    "llama_linear": _case("llama", kv_heads=None, scaling={"type": "linear", "factor": 4.0}),
    "llama_linear_modern": _case("llama", modern=True, scaling={"rope_type": "linear", "factor": 2.5}),
    "llama_dynamic": _case(
        "llama", scaling={"type": "dynamic", "factor": 4.0}, max_position_embeddings=48, prompt_lengths=(1, 7, 37, 47)
    ),
    "llama_yarn": _case(
        "llama", modern=True, hidden=128, scaling={"rope_type": "yarn"} | _YARN, max_position_embeddings=256
    ),
    "llama_yarn_options": _case(
        "llama", hidden=128, scaling={"rope_type": "yarn"} | _YARN | _YARN_OPTIONS, max_position_embeddings=256
    ),
    "llama_yarn_factor": _case(
        "llama", modern=True, hidden=128, scaling={"rope_type": "yarn", "attention_factor": 0.8} | _YARN
    ),
    "qwen2_yarn": _case(
        "qwen2", hidden=128, theta=1000000.0, scaling={"type": "yarn"} | _YARN, max_position_embeddings=64
    ),
    # Mistral: the window, where there is one, is on every layer.
    "mistral_window": _case("mistral", layers=3, sliding_window=16),
    "mistral_plain": _case("mistral", modern=True, theta=1000000.0, sliding_window=None, head_dim=None),
    "mistral_head_dim": _case("mistral", hidden=160, head_dim=32, theta=1000000.0, sliding_window=None),
    # Qwen2: bias on q, k and v. A window counts only with use_sliding_window, and then from layer max_window_layers on,
    # unless layer_types says otherwise.
    "qwen2_tied": _case(
        "qwen2",
        theta=1000000.0,
        tie_word_embeddings=True,
        use_sliding_window=False,
        sliding_window=8,
        max_window_layers=1,
        generation={"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
    ),
    "qwen2_window": _case(
        "qwen2", layers=4, theta=1000000.0, use_sliding_window=True, sliding_window=16, max_window_layers=2
    ),
    "qwen2_layer_types": _case(
        "qwen2",
        modern=True,
        layers=4,
        theta=1000000.0,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
        layer_types=_ALTERNATING,
    ),
    "qwen2_group7": _case(
        "qwen2", hidden=224, heads=14, theta=1000000.0, tie_word_embeddings=True, use_sliding_window=False
    ),
    # Qwen3: norms on q and k, head_dim in the file.
    "qwen3_tied": _case(
        "qwen3",
        hidden=128,
        head_dim=64,
        theta=1000000.0,
        tie_word_embeddings=True,
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=2,
    ),
    "qwen3_untied": _case(
        "qwen3",
        modern=True,
        hidden=96,
        heads=6,
        head_dim=32,
        theta=1000000.0,
        attention_bias=False,
        sliding_window=None,
    ),
    "qwen3_window": _case(
        "qwen3", modern=True, layers=4, head_dim=32, use_sliding_window=True, sliding_window=16, max_window_layers=2
    ),
    # Mixtral: experts in the place of the MLP.
    "mixtral_experts": _case(
        "mixtral",
        hidden=128,
        heads=8,
        intermediate=64,
        theta=1000000.0,
        sliding_window=None,
        num_local_experts=5,
        num_experts_per_tok=2,
        output_router_logits=False,
        router_aux_loss_coef=0.02,
        router_jitter_noise=0.0,
    ),
    "mixtral_window": _case(
        "mixtral", modern=True, layers=3, sliding_window=16, num_local_experts=4, num_experts_per_tok=3, head_dim=32
    ),
    # Qwen's: a shared MLP with a gate in Qwen2-MoE, dense layers among the others.
    "qwen2_moe_shared": _case(
        "qwen2_moe",
        layers=3,
        hidden=128,
        theta=1000000.0,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
        moe_intermediate_size=48,
        norm_topk_prob=False,
        num_experts=7,
        num_experts_per_tok=3,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=96,
        sliding_window=16,
        use_sliding_window=True,
        max_window_layers=28,
    ),
    "qwen3_moe_step": _case(
        "qwen3_moe",
        modern=True,
        layers=4,
        hidden=96,
        heads=6,
        head_dim=32,
        theta=1000000.0,
        attention_bias=True,
        decoder_sparse_step=2,
        mlp_only_layers=[],
        moe_intermediate_size=40,
        norm_topk_prob=True,
        num_experts=9,
        num_experts_per_tok=4,
        sliding_window=None,
        use_sliding_window=False,
    ),
    "qwen3_moe_plain": _case(
        "qwen3_moe",
        hidden=128,
        heads=8,
        head_dim=32,
        theta=1000000.0,
        attention_bias=False,
        moe_intermediate_size=64,
        norm_topk_prob=False,
        num_experts=8,
        num_experts_per_tok=2,
        max_window_layers=1,
        sliding_window=16,
        use_sliding_window=True,
    ),
    # Shapes.
    "llama_head64": _case("llama", hidden=256, kv_heads=2),
    "llama_head80": _case("llama", hidden=240, heads=3, kv_heads=3),
    "llama_head96": _case("llama", hidden=192, heads=2, kv_heads=1),
    "llama_head128": _case("llama", hidden=256, heads=2, kv_heads=1),
    "llama_head256": _case("llama", modern=True, hidden=128, heads=2, kv_heads=1, head_dim=256),
    "llama_head_dim": _case("llama", modern=True, hidden=96, heads=4, head_dim=64),
    "llama_mqa": _case("llama", hidden=128, heads=8, kv_heads=1),
    "llama_vocab1003": _case("llama", vocab=1003, intermediate=172),
    "llama_biases": _case("llama", attention_bias=True, mlp_bias=True, rms_norm_eps=1e-2),
    # Storage.
    "llama_bfloat16": _case("llama", modern=True, hidden=128, dtype="bfloat16"),
    "qwen3_bfloat16": _case(
        "qwen3", hidden=128, head_dim=64, dtype="bfloat16", theta=1000000.0, tie_word_embeddings=True
    ),
    "llama_float16": _case("llama", hidden=128, dtype="float16", theta=None),
    # Tensor parallelism up to 8: eight query heads, every sharded dimension a multiple of 8.
    "tp_gqa": _case("llama", modern=True, hidden=128, heads=8, kv_heads=2, intermediate=256, head_dim=32),
    "tp_mha": _case("qwen2", hidden=128, heads=8, kv_heads=8, intermediate=256, theta=1000000.0),
}

OTHER_CASES = DENSE_CASES | MOE_CASES | RECURRENT_CASES | IMAGE_CASES | WITHIN_CASES
for _name, _dense in OTHER_CASES.items():
    _generation = {"bos_token_id": BOS, "eos_token_id": EOS}
    CASES[_name] = Case(_dense.config, _generation, "float32", _dense.prompt_lengths, _dense.options)


def shapes_of(case_name: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a case's checkpoint."""
    return dense_manifest(case_name) if case_name in OTHER_CASES else manifest(CASES[case_name].config)


def _experts(config: dict[str, Any], layer: int) -> dict[str, tuple[int, int, bool]]:
    """The linears of a layer's mixture of experts (out, in, has a bias), or nothing if the layer has none."""
    hidden = config["hidden_size"]
    family = config["model_type"]
    count = config.get("num_experts") or config.get("num_local_experts")
    sparse = (layer + 1) % config.get("decoder_sparse_step", 1) == 0 and layer not in config.get("mlp_only_layers", [])
    if not count or not sparse:
        return {}
    wide = config.get("moe_intermediate_size", config["intermediate_size"])
    names = ("mlp", "gate_proj", "up_proj", "down_proj")
    prefix, gate, up, down = ("block_sparse_moe", "w1", "w3", "w2") if family == "mixtral" else names
    made = {f"{prefix}.gate": (count, hidden, False)}
    for expert in range(count):
        for name, shape in ((gate, (wide, hidden)), (up, (wide, hidden)), (down, (hidden, wide))):
            made[f"{prefix}.experts.{expert}.{name}"] = (*shape, False)
    if shared := config.get("shared_expert_intermediate_size"):
        made |= {f"mlp.shared_expert.{name}": (shared, hidden, False) for name in (gate, up)}
        made |= {"mlp.shared_expert.down_proj": (hidden, shared, False), "mlp.shared_expert_gate": (1, hidden, False)}
    return made


def manifest(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the checkpoint, in the order of the network. A tied head is not stored."""
    family = config["model_type"]
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    attention_bias = family in ("llama", "qwen3", "qwen3_moe") and config.get("attention_bias", False)
    qkv_bias = attention_bias or family in ("qwen2", "qwen2_moe")
    mlp_bias = family == "llama" and config.get("mlp_bias", False)
    wide = config["intermediate_size"]
    linears = {  # name: (out, in, has a bias)
        "self_attn.q_proj": (heads * head_dim, hidden, qkv_bias),
        "self_attn.k_proj": (kv_heads * head_dim, hidden, qkv_bias),
        "self_attn.v_proj": (kv_heads * head_dim, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, heads * head_dim, attention_bias),
    }
    dense = {
        "mlp.gate_proj": (wide, hidden, mlp_bias),
        "mlp.up_proj": (wide, hidden, mlp_bias),
        "mlp.down_proj": (hidden, wide, mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if family in ("qwen3", "qwen3_moe"):
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in (linears | (_experts(config, layer) or dense)).items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def stream(*key: object) -> np.random.PCG64:
    """A raw random stream named by `key`."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return np.random.PCG64(int.from_bytes(digest, "little"))


def normal(source: np.random.PCG64, shape: tuple[int, ...]) -> np.ndarray:
    """Nearly normal, mean 0, variance 1: sums of the four 16-bit parts of words, so exact on every machine."""
    words = source.random_raw(int(np.prod(shape))).astype("<u8")
    total = words.view("<u2").reshape(*shape, 4).sum(-1, dtype=np.int64)
    return (total - 2 * 65535) / np.sqrt((65536.0**2 - 1) / 3)


def _mean_and_std(name: str, shape: tuple[int, ...], tied: bool) -> tuple[float, float]:
    """Mean and deviation of a tensor, with which positions matter to attention and logits spread over several units."""
    if name.endswith("bias"):
        return 0.0, 0.1
    if "q_norm" in name or "k_norm" in name:
        return 1.5, 0.1
    if "norm" in name:
        return 1.0, 0.1
    fan_in = shape[1]
    if "embed_tokens" in name:  # a large tied embedding would make every token predict itself
        return 0.0, fan_in**-0.5 if tied else 1.0
    gain = 2.0 if "o_proj" in name or "lm_head" in name else 1.5 if "q_proj" in name or "k_proj" in name else 1.0
    return 0.0, gain * fan_in**-0.5


def tensors(case_name: str) -> Iterator[tuple[str, np.ndarray]]:
    """The checkpoint's tensors in the dtype they are stored in, in the order of `manifest`."""
    case = CASES[case_name]
    for name, shape in shapes_of(case_name).items():
        if name.endswith("tid2eid"):
            size = shape[0] * case.config["n_routed_experts"]
            words = stream(case_name, name).random_raw(size).reshape(shape[0], -1)
            yield name, expert_table(case.config, words)
            continue
        if name.endswith(NGRAM_BUFFERS):
            yield name, ngram_buffer(case.text, name)
            continue
        if dense := OTHER_CASES.get(case_name):
            mean, std = dense_mean_and_std(dense, name, shape, case.config["model_type"] == "gpt2")
        else:
            mean, std = _mean_and_std(name, shape, case.config["tie_word_embeddings"])
        values = np.asarray(mean + std * normal(stream(case_name, name), shape))
        yield name, values.astype(np.float32).astype(DTYPES[case.dtype])


def fingerprint(case_name: str) -> str:
    """sha256 of config.json's content and all weights, to which the recorded results belong."""
    digest = hashlib.sha256(json.dumps(CASES[case_name].config, sort_keys=True).encode())
    for name, values in tensors(case_name):
        digest.update(f"{name}{values.shape}{values.dtype}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_config(case_name: str, folder: Path) -> Path:
    """Writes config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", CASES[case_name].config)
    _write_json(folder / "generation_config.json", CASES[case_name].generation_config)
    return folder


def build(case_name: str, folder: str | Path, *, shards: int = 1) -> Path:
    """Write config.json, generation_config.json and the weights (an index and `shards` files if more than one)."""
    folder = write_config(case_name, Path(folder))
    weights = dict(tensors(case_name))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(weights)
    weight_map = {}
    if not 1 < shards <= len(names):
        raise ValueError(f"{case_name} has {len(names)} tensors and cannot be split into {shards} shards")
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    values = weights.values()
    metadata = {"total_parameters": sum(v.size for v in values), "total_size": sum(v.nbytes for v in values)}
    _write_json(folder / "model.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})
    return folder


def _merges(count: int) -> list[tuple[str, str]]:
    """The first `count` merges: a space before a letter, then pairs of letters and of digits, common ones first."""
    lower = "etaoinshrdlcumwfgypbvkjxqz"
    pairs = itertools.chain(
        (("Ġ", letter) for letter in lower),
        itertools.product(lower, lower),
        itertools.product(string.digits, string.digits),
        itertools.product(lower.upper(), lower),
    )
    return list(itertools.islice(pairs, count))


def build_tokenizer(
    folder: str | Path, vocab_size: int, *, marks: Sequence[str] = (), chat_template: str = CHAT_TEMPLATE
) -> Path:
    """Write a byte-level BPE tokenizer of exactly `vocab_size` tokens, with a chat template. The last tokens are the
    `marks`, which are no special tokens, though they are never split."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocab = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = _merges(max(vocab_size - len(vocab) - len(marks), 0))
    if len(vocab) + len(merges) + len(marks) != vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}; this tokenizer can have {len(vocab)} to 1739 tokens")
    ids = {token: i for i, token in enumerate(vocab + [a + b for a, b in merges])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": SPECIAL_TOKENS[BOS], "eos_token": SPECIAL_TOKENS[IM_END], "unk_token": SPECIAL_TOKENS[UNK]}
    _write_json(folder / "special_tokens_map.json", special)
    settings = {
        "add_bos_token": False,
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", special | settings)
    return folder
