"""Families beyond the best known: LoRA adapters of all matrices, rounded matrices, and two devices."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from engines import generate, make_engine, request
from safetensors.numpy import load_file, save_file
from test_adapters import adapted_engine, upload

pytestmark = [pytest.mark.compiles, pytest.mark.slow]

GOLDENS = Path(__file__).parent.parent / "goldens"
CASES = (
    "granite_moe_swa_older", "dbrx_hub", "longcat_hub", "hy_v4_hub", "zamba2_hub", "lara_mini_types", "axk1_hub",
    "kolibri_hub", "aria_text_hub", "persimmon_plain", "biogpt_untied", "xglm_untied", "deepseek_v4_hub",
    "minimax_m3_text", "bitnet_hub", "codegen_hub", "cohere_compass_hub", "phi4_multimodal_long", "axk2_hub",
    "jetmoe_untied", "zamba_hub", "qwen3_omni_thinker", "zaya_sliding",
)  # fmt: skip
PROMPT = range(5, 60)


def answer(engine, seed=0):
    """The tokens that follow PROMPT, and the log-probabilities of it and of these. seed: see `adapted_engine`."""
    (found,) = generate(engine, request(str(seed), PROMPT, max_tokens=12, seed=seed, prompt_logprobs=0, logprobs=0))
    return found.token_ids, np.array([entry.logprob for entry in found.prompt_logprobs[1:] + found.logprobs])


@pytest.mark.parametrize("case", CASES)
def test_two_devices(case, model_folders):
    """The recorded tokens of prompts of several lengths, in chunks."""
    with np.load(GOLDENS / f"{case}.npz") as golden:
        prompts, expected = ([golden[f"{what}_{i}"].tolist() for i in range(1, 4)] for what in ("prompt", "tokens"))
    engine = make_engine(model_folders(case), tokens=48, tensor_parallel_size=2)
    found = generate(engine, *(request(str(i), prompt, max_tokens=64) for i, prompt in enumerate(prompts)))
    assert [one.token_ids for one in found] == expected


@pytest.mark.parametrize("case", CASES)
def test_adapters_are_as_merged_weights(case, tmp_path, model_folders, monkeypatch):
    """An adapter of every matrix of the file's layers that adapters may change. Prompts are scored without one here,
    so it leaves out the output head."""
    engine = adapted_engine(model_folders(case), monkeypatch, 1)
    known = engine.runner.stacks.adapters.shapes
    rng = np.random.default_rng(2)
    weights = load_file(model_folders(case) / "model.safetensors")
    matrices, merged = {}, dict(weights)
    for name, weight in weights.items():
        if name in known and any(part.isdigit() for part in name.split(".")):
            a = (rng.standard_normal((4, weight.shape[1])) / 2).astype(np.float32)
            b = (rng.standard_normal((weight.shape[0], 4)) / 10).astype(np.float32)
            stem = f"base_model.model.{name.removesuffix('weight')}"
            matrices |= {f"{stem}lora_A.weight": a, f"{stem}lora_B.weight": b}
            merged[name] = weight + b @ a
    assert len(matrices) >= 8, sorted(known)
    modules = sorted({name.split(".")[-3] for name in matrices})
    (tmp_path / "adapter").mkdir()
    save_file(matrices, tmp_path / "adapter" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 4, "target_modules": modules}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings | {"bias": "none"}))
    shutil.copytree(model_folders(case), tmp_path / "merged")
    save_file(merged, tmp_path / "merged" / "model.safetensors")
    upload(engine, 0, tmp_path / "adapter")
    plain, changed = answer(engine, 0), answer(engine, 1)
    wanted = answer(make_engine(tmp_path / "merged"))
    assert changed[0] == wanted[0] != plain[0]
    np.testing.assert_allclose(changed[1], wanted[1], atol=5e-3)


@pytest.mark.parametrize("case", CASES)
def test_rounded_while_loading(case, model_folders):
    """8 bits move log-probabilities a little, and more than nothing."""
    plain = answer(make_engine(model_folders(case)))[1][: len(PROMPT) - 1]
    rounded = answer(make_engine(model_folders(case), quantization="int8"))[1][: len(PROMPT) - 1]
    assert 0 < np.median(np.abs(rounded - plain)) < 0.3
