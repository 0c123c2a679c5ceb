"""Record what transformers computes on the models of tests/pooling_models.py, to pooling.npz.

Pooling, dense layer and norm are written out here as sentence-transformers defines them. Needs torch; see README.md.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import pooling_models  # noqa: E402

OPTIONS = {"dtype": torch.float32, "attn_implementation": "eager"}
PAIR = (7, 300)  # tokens whose odds a generating model's score is


def embedding(name: str, folder: Path, hidden: torch.Tensor) -> torch.Tensor:
    """hidden: [tokens, hidden]."""
    case = pooling_models.CASES[name]
    method = case.method or "last"
    pooled = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[method]
    if case.dense:
        layer = load_file(folder / "2_Dense" / "model.safetensors")
        pooled = torch.tanh(torch.nn.functional.linear(pooled, layer["linear.weight"], layer["linear.bias"]))
    return torch.nn.functional.normalize(pooled, dim=0) if case.normalized else pooled


@torch.inference_mode()
def main() -> None:
    results: dict[str, np.ndarray] = {}
    for name, case in pooling_models.CASES.items():
        with tempfile.TemporaryDirectory() as made:
            folder = pooling_models.build(name, Path(made))
            kind = AutoModelForSequenceClassification if case.labels else AutoModel
            model, info = kind.from_pretrained(folder, output_loading_info=True, **OPTIONS)
            if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
                raise RuntimeError(f"{name}: {info}")
            model.eval()
            for i, prompt in enumerate(pooling_models.prompts_of(name)):
                out = model(torch.from_numpy(prompt.astype(np.int64))[None])
                if case.labels:
                    logits = out.logits[0]
                    results[f"{name}_{i}"] = (logits if case.labels == 1 else logits[1:] - logits[:1]).numpy()
                else:
                    results[f"{name}_{i}"] = embedding(name, folder, out.last_hidden_state[0]).numpy()
    with tempfile.TemporaryDirectory() as made:
        folder = pooling_models.tiny_models.build("qwen3_tied", made)
        model = AutoModelForCausalLM.from_pretrained(folder, **OPTIONS).eval()
        for i, prompt in enumerate(pooling_models.prompts_of("score_one")):
            logits = model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1]
            results[f"tokens_{i}"] = torch.log_softmax(logits[list(PAIR)], 0).numpy()
    np.savez_compressed(HERE / "pooling.npz", **results)


if __name__ == "__main__":
    main()
