"""Heads that propose from the target's hidden states: EAGLE-3 drafts and heads for multi-token prediction."""

import json
from pathlib import Path

import draft_heads
import numpy as np
import pytest
import tiny_models
from engines import make_engine, request, run_all
from test_speculation import outcome, requests

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.config import ConfigError
from jaxserve.speculation import speculator

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "draft_heads.json").read_text())
OPTIONS = {"llama3_gqa": {}, "qwen3_untied": {"own_embed": True, "norm_before_residual": True, "speculators": True}}
MTP = ("deepseek_v3_groups", "glm4_moe_groups")
SETTINGS = {"rows": 4, "tokens": 32, "max_model_len": 96}


@pytest.fixture
def eager(monkeypatch):
    """As many proposals as can be."""
    for name in ("LEAST_CHANCE", "LOOK_AGAIN", "REST", "LONGEST_REST"):
        monkeypatch.setattr(speculator, name, 0)


def with_head(case, model_folders, tmp_path, count=4, **options):
    """An engine whose case has a random head."""
    folder = model_folders(case)
    if case in MTP:
        folder = draft_heads.add_mtp(folder, tmp_path / "target")
        speculation = {"method": "mtp"}
    else:
        config = tiny_models.CASES[case].config
        draft = draft_heads.write_eagle(tmp_path / "draft", config, **OPTIONS.get(case, {}))
        speculation = {"method": "eagle3", "model": str(draft)}
    speculation["num_speculative_tokens"] = count
    engine = make_engine(folder, **{**SETTINGS, **options}, speculative_config=speculation)
    engine.speculator._method._shapes = engine.shapes  # few programs
    return engine


def proposals(engine, monkeypatch):
    """What the engine proposes, by the number of known tokens."""
    found, prepare = {}, engine.speculator._method.prepare

    def listening(plan, running):
        prepare(plan, running)
        for slot, count in zip(plan.rows.slot, plan.rows.num_new - 1, strict=True):
            if running.proposes and count:
                known = running.known[slot]
                found[int(known)] = running.tokens[slot, known : known + count].tolist()

    monkeypatch.setattr(engine.speculator._method, "prepare", listening)
    return found


@pytest.mark.parametrize("case", GOLDENS)
@pytest.mark.parametrize("tokens", [32, 8])
def test_proposals_are_those_of_transformers(case, tokens, model_folders, tmp_path, monkeypatch, eager):
    """In one chunk and in several, of a prompt that is new and of one in the prefix cache."""
    golden = GOLDENS[case]
    options = {"tokens": tokens, "page_size": 16, "decode_steps": False, "async_scheduling": False}
    engine = with_head(case, model_folders, tmp_path, **options)
    prompt, answer = golden["tokens"][:19], golden["tokens"][19:]
    for i in range(2):
        found = proposals(engine, monkeypatch)
        (one,) = run_all(engine, request(f"r{i}", prompt, max_tokens=len(answer))).values()
        assert one.token_ids == answer
        assert one.num_cached == 16 * i
        assert len(found) >= 15
        for known, ours in found.items():
            assert ours == golden["proposals"][known - 20][: len(ours)], known


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("llama3_gqa", {}),
        ("llama3_gqa", {"static_steps": True}),
        ("qwen3_untied", {"kv_pages": 20}),
        pytest.param("llama3_gqa", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_untied", {"tensor_parallel_size": 2, "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("gpt_oss_sinks", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3_groups", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3_groups", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("glm4_moe_groups", {"kv_pages": 20}, marks=pytest.mark.slow),
    ],
)
def test_the_same_tokens(case, options, model_folders, tmp_path, eager):
    plain = make_engine(model_folders(case), **SETTINGS, **options)
    quick = with_head(case, model_folders, tmp_path, **options)
    expected = run_all(plain, *requests(2, 16))
    found = run_all(quick, *requests(2, 16))
    assert outcome(found) == outcome(expected)
    for key, one in expected.items():
        ours = [entry.logprob for entry in found[key].logprobs]
        np.testing.assert_allclose(ours, [entry.logprob for entry in one.logprobs], atol=1e-3)
    assert quick.counters.spec_proposed > 100
