"""Families beyond the best known: LoRA adapters of all matrices, rounded matrices, two devices, and plans."""

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from dense_models import NGRAM_BUFFERS
from engines import generate, make_engine, request
from safetensors.numpy import load_file, save_file
from test_adapters import adapted_engine, upload

from jaxserve.checkpoints.quantized import dequantize
from jaxserve.commands.cli import main
from jaxserve.config import EngineConfig
from jaxserve.execution import memory
from jaxserve.models import load
from jaxserve.models.families.deepseek_v4 import PUBLISHED
from jaxserve.plan.report import make_plan

pytestmark = [pytest.mark.compiles, pytest.mark.slow]

GOLDENS = Path(__file__).parent.parent / "goldens"
CASES = (
    "granite_moe_swa_older", "dbrx_hub", "longcat_hub", "hy_v4_hub", "zamba2_hub", "lara_mini_types", "axk1_hub",
    "kolibri_hub", "aria_text_hub", "persimmon_plain", "biogpt_untied", "xglm_untied", "deepseek_v4_hub",
    "minimax_m3_text", "bitnet_hub", "codegen_hub", "cohere_compass_hub", "phi4_multimodal_long", "axk2_hub",
    "jetmoe_untied", "zamba_hub", "qwen3_omni_thinker", "zaya_sliding",
    "doge_saved", "diffllama_hub", "qwen4_exp_whole",
)  # fmt: skip
PROMPT = range(5, 60)
OF_NO_TEXT = r"(^|\.)(visual|audio_tower|embed_tokens_extend)\."  # tensors of encoders, which are not read
_NGRAMS = "model.language_model.layers.ple.ple_embedding"
NO_EFFECT = {
    # Without positions in queries and keys, a bias of keys changes all scores of a token alike.
    "biogpt_untied": ("biogpt.layers.self_attn.k_proj.bias",),
    "xglm_untied": ("model.layers.self_attn.k_proj.bias",),
    # The settings determine these.
    "qwen4_exp_whole": tuple(f"{_NGRAMS}.{name}" for name in NGRAM_BUFFERS),
}


def answer(engine, seed=0):
    """The tokens that follow PROMPT, and the log-probabilities of it and of these. seed: see `adapted_engine`."""
    (found,) = generate(engine, request(str(seed), PROMPT, max_tokens=12, seed=seed, prompt_logprobs=0, logprobs=0))
    return found.token_ids, np.array([entry.logprob for entry in found.prompt_logprobs[1:] + found.logprobs])


def names_in_file(case, modules):
    """Name of a matrix as adapters have it -> its name in the case's file. DeepSeek publishes others."""
    published = PUBLISHED if case.startswith("deepseek_v4") else {}
    places = [{"i": i, "e": e} for i in range(4) for e in range(8)]
    renamed = {ours.format(**place): theirs.format(**place) for ours, theirs in published.items() for place in places}
    return {name: renamed.get(name, name) for name in modules}


@pytest.mark.parametrize("case", CASES)
def test_two_devices(case, model_folders):
    """The recorded tokens of prompts of several lengths, in chunks."""
    with np.load(GOLDENS / f"{case}.npz") as golden:
        prompts, expected = ([golden[f"{what}_{i}"].tolist() for i in range(1, 4)] for what in ("prompt", "tokens"))
    engine = make_engine(model_folders(case), tokens=48, tensor_parallel_size=2)
    found = generate(engine, *(request(str(i), prompt, max_tokens=64) for i, prompt in enumerate(prompts)))
    assert [one.token_ids for one in found] == expected


@pytest.mark.parametrize("case", [*CASES[:-1], "qwen4_exp_types"])  # adapters have the names of the text alone
def test_adapters_are_as_merged_weights(case, tmp_path, model_folders, monkeypatch):
    """An adapter of every matrix of the file's layers that adapters may change. Prompts are scored without one here,
    so it leaves out the output head."""
    engine = adapted_engine(model_folders(case), monkeypatch, 1)
    known = engine.runner.stacks.adapters.shapes
    rng = np.random.default_rng(2)
    weights = load_file(model_folders(case) / "model.safetensors")
    matrices, merged = {}, dict(weights)
    for name, in_file in names_in_file(case, known).items():
        if in_file in weights and any(part.isdigit() for part in name.split(".")):
            weight = weights[in_file]
            a = (rng.standard_normal((4, weight.shape[1])) / 2).astype(np.float32)
            b = (rng.standard_normal((weight.shape[0], 4)) / 10).astype(np.float32)
            stem = f"base_model.model.{name.removesuffix('weight')}"
            matrices |= {f"{stem}lora_A.weight": a, f"{stem}lora_B.weight": b}
            merged[in_file] = weight + b @ a
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
def test_rounded_while_loading(case, model_folders, monkeypatch):
    """As if the files had the values that 8 bits hold. Where products round their inputs too, the answers differ from
    these about as much as the rounded weights' from the files'."""
    folder = model_folders(case)
    rounded = [answer(make_engine(folder, quantization="int8", matmul_backend=name))[1] for name in ("cpu", "auto")]
    plain = answer(make_engine(folder))[1]

    def in_floats(path, host, scheme, really=load.rounded):
        made = really(path, host, scheme)
        return made if made is host else dequantize(made).astype(np.float32)

    monkeypatch.setattr(load, "rounded", in_floats)
    wanted = answer(make_engine(folder, quantization="int8"))[1]
    exact, coarse, plain, wanted = (one[: len(PROMPT) - 1] for one in (*rounded, plain, wanted))
    np.testing.assert_allclose(exact, wanted, atol=5e-4)
    change = np.median(np.abs(wanted - plain))
    assert 0 < np.median(np.abs(coarse - wanted)) < 3 * change


@pytest.mark.parametrize("case", CASES)
def test_memory_is_as_planned(case, model_folders, capsys):
    """`jaxserve plan` and `jaxserve models inspect` know what the engine then takes, on one device and on two."""
    folder = str(model_folders(case))
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_pages": 200}
    rounded = [{"quantization": name} for name in ("int8", "int8-dynamic")]
    for settings in ({}, *rounded, {"quantization": "int4", "tensor_parallel_size": 2}):
        target = f"cpu:{settings.get('tensor_parallel_size', 1)}"
        plan = make_plan(EngineConfig(model=folder, **sizes, **settings), target, estimate=bool(settings))
        runner = make_engine(folder, **settings).runner
        assert plan["memory"]["weights"] == runner.weight_bytes
        assert plan["memory"]["slots"] == runner.slot_bytes
        assert plan["capacity"]["cache_bytes"] + plan["memory"]["states"] == runner.cache_bytes
        assert plan["roofline"]
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        assert main(["models", "inspect", folder, "--kv-pages=200", *flags]) == 0
        lines = capsys.readouterr().out
        assert memory.describe_weights(runner.params) in lines
        assert f"KV cache per token: {runner.layout.token_bytes:,} bytes in" in lines


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_counts(case, model_folders):
    """Zeros in the place of a tensor, in all layers and experts that have one of its name, change the answer. A learned
    vector that is not read, or whose loss the recorded answers would not show, is found thereby."""
    engine = make_engine(model_folders(case))
    weights = load_file(model_folders(case) / "model.safetensors")
    alike = defaultdict(dict)
    for name, tensor in weights.items():
        alike[re.sub(r"\.\d+(?=\.|$)", "", name)][name] = np.zeros_like(tensor)
    _, plain = answer(engine)
    silent = []
    for name, zeros in alike.items():
        if re.search(OF_NO_TEXT, name) or name in NO_EFFECT.get(case, ()):
            continue
        engine.weights.update(weights | zeros)
        _, changed = answer(engine)
        if len(changed) == len(plain) and np.allclose(changed, plain, atol=1e-5):
            silent.append(name)
    assert silent == []
