"""Held-out perplexity of two small trained models, in each quantization, against that of transformers.

The recorded figures are those of the dequantized values in float32 (`goldens/record_trained.py`).
"""

import json
import sys
from pathlib import Path

import pytest
import trained_models

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import perplexity

from jaxserve.llm import LLM

pytestmark = pytest.mark.compiles

# The others run with -m slow.
QUICK = {("moe", "float32"), ("moe", "fp8-blocks"), ("mla", "fp8-blocks"), ("mla", "int8")}
GOLDEN = json.loads((trained_models.TRAINED / "perplexity.json").read_text())


@pytest.mark.parametrize(
    ("model", "form"),
    [
        pytest.param(model, form, marks=() if (model, form) in QUICK else pytest.mark.slow)
        for model in trained_models.MODELS
        for form in trained_models.FORMS
    ],
)
def test_perplexity(model, form, tmp_path):
    """Weights are rounded, inputs of products are not."""
    stored, _ = trained_models.write(model, form, tmp_path)
    options = {"matmul_backend": "cpu", "activation_quantization": "none"}
    if form in trained_models.SCHEMES:
        options["quantization"] = form
    llm = LLM(str(stored), dtype="float32", kv_cache_dtype="auto", max_model_len=512, kv_pages=64, **options)
    found = perplexity.score(llm, trained_models.text(), trained_models.WINDOW)
    print(f"{model} {form}: {found['perplexity']:.4f}, transformers {GOLDEN[model][form]:.4f}")
    assert found["perplexity"] == pytest.approx(GOLDEN[model][form], rel=2e-5)
