"""Records the perplexity that transformers computes of the trained models' values in each form, in float32.

/path/to/venv-with-torch/bin/python record_trained.py      # writes trained/perplexity.json
"""

import json
import math
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import trained_models


@torch.inference_mode()
def perplexity(folder: Path) -> float:
    """Over windows that overlap by one token, as benchmarks/perplexity.py has them."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if problems := {kind: names for kind, names in info.items() if names}:
        raise RuntimeError(f"the checkpoint does not fit the model: {problems}")
    tokenizer = Tokenizer.from_file(str(trained_models.DEMO / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    ids = [end, *tokenizer.encode(trained_models.text(), add_special_tokens=False).ids, end]
    nats = 0.0
    size = trained_models.WINDOW
    for first in range(0, len(ids) - 1, size):
        piece = torch.tensor(ids[first : first + size + 1])
        scores = torch.log_softmax(model(piece[None]).logits[0, :-1].double(), -1)
        nats -= float(scores.gather(1, piece[1:, None]).sum())
    return math.exp(nats / (len(ids) - 1))


def main() -> None:
    found: dict[str, dict[str, float]] = {}
    for model in trained_models.MODELS:
        for form in trained_models.FORMS:
            with tempfile.TemporaryDirectory() as folder:
                _, plain = trained_models.write(model, form, Path(folder))
                found.setdefault(model, {})[form] = round(perplexity(plain), 5)
            print(model, form, found[model][form], flush=True)
    path = trained_models.TRAINED / "perplexity.json"
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
