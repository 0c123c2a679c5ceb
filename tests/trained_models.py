"""The small trained models of tests/goldens/trained (`benchmarks/train_small.py`), quantized in many ways.

For each model and form there is a folder in that form, and its values in float32, of which transformers computes the
perplexity (`goldens/record_trained.py`).
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import quantized_forms
from safetensors import safe_open

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "checkpoints" / "demo"
TRAINED = ROOT / "tests" / "goldens" / "trained"
MODELS = ("moe", "mla")
SCHEMES = ("int8", "int4", "fp8")  # of --quantization
FORMS = ("float32", *SCHEMES, *quantized_forms.WRITERS)
WINDOW = 256  # tokens that are scored of each piece of the text


def text() -> str:
    """The beginning of the held-out files; no end of a document is in it."""
    return (DEMO / "heldout.txt").read_text()[:6000].split("<|endoftext|>")[0]


def read(model: str) -> tuple[dict[str, Any], list[tuple[str, np.ndarray]]]:
    """A model's config and tensors, in float32."""
    with safe_open(TRAINED / f"{model}.safetensors", "np") as file:
        found = [(name, file.get_tensor(name)) for name in sorted(file.keys())]
    assert {tensor.dtype for _, tensor in found} <= {np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)}
    config = json.loads((TRAINED / f"{model}.json").read_text())
    return config, [(name, tensor.astype(np.float32)) for name, tensor in found]


def write(model: str, form: str, folder: Path) -> tuple[Path, Path]:
    """New folders with the model in a form, and with its values in float32. Schemes of --quantization apply while
    loading, so the first folder then holds the model as it is."""
    (config, tensors), (stored, plain) = read(model), (folder / "stored", folder / "plain")
    if form in quantized_forms.WRITERS:
        quantized_forms.write(form, config, tensors, stored, plain)
    else:
        values = {
            name: quantized_forms.rounded(tensor, form).astype(np.float32)
            if form in SCHEMES and quantized_forms.is_matrix(name) and "kv_b_proj" not in name
            else tensor
            for name, tensor in tensors
        }
        quantized_forms.write_folder(plain, config, values)
        quantized_forms.write_folder(stored, config, dict(tensors))
    for file in DEMO.glob("tokenizer*.json"):
        (stored / file.name).write_bytes(file.read_bytes())
    return stored, plain
