"""Small models that embed or score, made of cases of `tiny_models`. Nothing here needs torch."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parent / "goldens" / "pooling.npz"
PROMPT_LENGTHS = (1, 7, 37, 130)
MODES = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}
DENSE = 40  # outputs of the dense module


@dataclass(frozen=True)
class PoolingCase:
    """A case of `tiny_models` with other files beside its weights.

    Attributes:
      method: how sentence-transformers' files say to pool; None: there are none.
      labels: of a classification head; 0: no such head.
      bare: the tensors' names begin without "model.", and there is no output head.
    """

    base: str
    architecture: str
    method: str | None = None
    dense: bool = False
    normalized: bool = True
    labels: int = 0
    bare: bool = False
    config: dict[str, Any] = field(default_factory=dict)


CASES = {
    "embed_last": PoolingCase("qwen3_untied", "Qwen3ForCausalLM", "last", bare=True),
    "embed_mean": PoolingCase("qwen3_window", "Qwen3Model", "mean", dense=True, normalized=False, bare=True),
    "embed_cls": PoolingCase("llama3_gqa", "LlamaModel", "cls"),
    "embed_plain": PoolingCase("mistral_window", "MistralModel", bare=True),
    "score_one": PoolingCase("qwen3_tied", "Qwen3ForSequenceClassification", labels=1),
    "score_two": PoolingCase("llama3_gqa", "LlamaForSequenceClassification", labels=2),
}


def prompts_of(name: str) -> list[np.ndarray]:
    """Ordinary tokens, int32."""
    low = len(tiny_models.SPECIAL_TOKENS)
    vocab = tiny_models.CASES[CASES[name].base].config["vocab_size"]
    raw = [tiny_models.stream(name, "prompt", i).random_raw(count) for i, count in enumerate(PROMPT_LENGTHS)]
    return [(low + words % np.uint64(vocab - low)).astype(np.int32) for words in raw]


def matrix(name: str, role: str, *shape: int) -> np.ndarray:
    words = tiny_models.stream(name, role).random_raw(int(np.prod(shape)))
    return ((words % np.uint64(2001)).astype(np.float32) / 1000 - 1).reshape(shape) * np.float32(0.2)


def build(name: str, folder: Path) -> Path:
    case = CASES[name]
    tiny_models.build(case.base, folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [case.architecture]} | case.config
    weights = load_file(folder / "model.safetensors")
    hidden = config["hidden_size"]
    if case.bare or not case.architecture.endswith("ForCausalLM"):
        weights.pop("lm_head.weight", None)
    if case.bare:
        weights = {key.removeprefix("model."): value for key, value in weights.items()}
    if case.labels:
        weights["score.weight"] = matrix(name, "score", case.labels, hidden)
        config["id2label"] = {str(i): f"LABEL_{i}" for i in range(case.labels)}
        config["pad_token_id"] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tiny_models._write_json(folder / "config.json", config)
    if case.method is not None:
        _write_modules(name, case, folder, hidden)
    tiny_models.build_tokenizer(folder, config["vocab_size"])
    return folder


def _write_modules(name: str, case: PoolingCase, folder: Path, hidden: int) -> None:
    kinds = {"": "Transformer", "1_Pooling": "Pooling"} | ({"2_Dense": "Dense"} if case.dense else {})
    kinds |= {"3_Normalize": "Normalize"} if case.normalized else {}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    tiny_models._write_json(folder / "modules.json", modules)
    modes = {f"pooling_mode_{mode}": method == case.method for method, mode in MODES.items()}
    (folder / "1_Pooling").mkdir()
    tiny_models._write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": hidden, **modes})
    if case.dense:
        (folder / "2_Dense").mkdir()
        activation = "torch.nn.modules.activation.Tanh"
        sizes = {"in_features": hidden, "out_features": DENSE, "bias": True, "activation_function": activation}
        tiny_models._write_json(folder / "2_Dense" / "config.json", sizes)
        layer = {"linear.weight": matrix(name, "dense", DENSE, hidden), "linear.bias": matrix(name, "bias", DENSE)}
        save_file(layer, folder / "2_Dense" / "model.safetensors")
