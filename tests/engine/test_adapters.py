"""LoRA adapters through the engine's steps, against what transformers computes with PEFT's merged weights."""

import json
from pathlib import Path

import numpy as np
import pytest
from engines import generate, make_engine, request

import jaxserve.engine.engine as engine_module
from jaxserve.adapters.adapter import load_adapter
from jaxserve.execution.slots import encode_slot

GOLDENS = Path(__file__).parent.parent / "goldens" / "adapters"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
LOGITS_ATOL = 1e-4
RANK = 8


def model_of(name: str) -> str:
    return json.loads((GOLDENS / name / "adapter_config.json").read_text())["base_model_name_or_path"]


MODELS = sorted({model_of(name) for name in NAMES})


def adapted_engine(folder, monkeypatch, places: int, **options):
    """An engine whose requests say by their seed at which place their adapter is; seed 0: they have none."""

    def encode(slot, params, seed, *rest):
        return encode_slot(slot, params, seed, *rest, adapter=(params.seed or 0) - 1)

    monkeypatch.setattr(engine_module, "encode_slot", encode)
    options = {"max_loras": places, "max_lora_rank": RANK, "prefix_caching": False, **options}
    return make_engine(folder, enable_lora=True, **options)


def upload(engine, place: int, path: Path) -> None:
    adapter = load_adapter(path, path.name, engine.runner.stacks.adapters, RANK)
    for write in engine.runner.adapter_uploads(place, adapter):
        write()


@pytest.mark.parametrize("model", MODELS)
def test_merged_weights(model, model_folders, monkeypatch):
    """All adapters of a checkpoint, and none, in one batch: logits and tokens of the merged weights."""
    names = [name for name in NAMES if model_of(name) == model]
    goldens = {name: np.load(GOLDENS / name / "golden.npz") for name in names}
    engine = adapted_engine(model_folders(model), monkeypatch, len(names), rows=2 * len(names) + 2)
    for place, name in enumerate(names):
        upload(engine, place, GOLDENS / name)
    asked = {
        f"{name} {k}": request(f"{name} {k}", golden[f"prompt_{k}"], max_tokens=16, seed=place + 1, logprobs=20)
        for place, (name, golden) in enumerate(goldens.items())
        for k in range(2)
    }
    prompts = [goldens[names[0]][f"prompt_{k}"] for k in range(2)]
    plain = [request(f"plain {k}", prompt, max_tokens=16, seed=0) for k, prompt in enumerate(prompts)]
    *made, first, second = generate(engine, *asked.values(), *plain)
    for (which, one), completion in zip(asked.items(), made, strict=True):
        name, k = which.split()
        assert completion.token_ids == goldens[name][f"tokens_{k}"].tolist(), which
        logits = goldens[name][f"logits_{k}"][-1].astype(np.float64)
        wanted = logits - np.log(np.exp(logits).sum())
        found = {token: logprob for token, logprob in completion.logprobs[0].top}
        assert len(found) == 20
        for token, logprob in found.items():
            assert abs(logprob - wanted[token]) <= LOGITS_ATOL * max(1, np.abs(logits).max()), (which, one)
    alone = make_engine(model_folders(model), rows=2, prefix_caching=False)
    unchanged = generate(alone, *[request(str(k), prompt, max_tokens=16) for k, prompt in enumerate(prompts)])
    assert [first.token_ids, second.token_ids] == [completion.token_ids for completion in unchanged]
