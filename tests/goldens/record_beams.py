"""Record what Hugging Face transformers' beam search finds on some checkpoints of tests/tiny_models.py: beams.json.

Needs torch; see README.md beside this file. A prompt is taken only if float32 and float64 find the same.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from record import HERE, load, tiny_models
from transformers import PreTrainedModel

CASES = ("llama3_gqa", "qwen3_tied")
STOPS = tuple(range(100, 112))  # besides the model's own, so that some beams end
SETTINGS = [
    {"num_beams": 4, "max_new_tokens": 24, "length_penalty": 1.0},
    {"num_beams": 3, "max_new_tokens": 40, "length_penalty": 2.0},
    {"num_beams": 6, "max_new_tokens": 30, "length_penalty": 0.0},
    {"num_beams": 2, "max_new_tokens": 50, "length_penalty": -1.0},
    {"num_beams": 1, "max_new_tokens": 10, "length_penalty": 1.0},
]


@torch.inference_mode()
def search(model: PreTrainedModel, prompt: list[int], stops: list[int], settings: dict[str, Any]) -> list[list[int]]:
    """The outputs, the best first, each up to its stop token."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": stops, "pad_token_id": 0, "early_stopping": False}
    beams = settings["num_beams"]
    made = model.generate(ids, attention_mask=torch.ones_like(ids), num_return_sequences=beams, **options, **settings)
    outputs = []
    for row in made[:, len(prompt) :].tolist():
        end = next((i for i, token in enumerate(row) if token in stops), len(row) - 1)
        outputs.append(row[: end + 1])
    return outputs


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    content = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            model = load(tiny_models.build(case, Path(folder)))
        stops = [*tiny_models.CASES[case].eos_token_ids, *STOPS]
        results = []
        for settings in SETTINGS:
            for seed in range(20):
                raw = tiny_models.stream(case, "beams", seed).random_raw(5 + 9 * (seed % 4))
                prompt = (112 + raw % np.uint64(400)).astype(int).tolist()
                outputs = search(model.float(), prompt, stops, settings)
                if outputs == search(model.double(), prompt, stops, settings):
                    results.append({"prompt": prompt, "settings": settings, "outputs": outputs})
                if sum(one["settings"] is settings for one in results) == 4:
                    break
        ended = sum(output[-1] in stops for one in results for output in one["outputs"])
        print(f"{case}: {len(results)} searches, {ended} outputs of {sum(len(r['outputs']) for r in results)} stopped")
        content[case] = {"fingerprint": tiny_models.fingerprint(case), "stops": STOPS, "searches": results}
    (HERE / "beams.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
