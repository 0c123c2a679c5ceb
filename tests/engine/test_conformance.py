"""Logits and greedy tokens equal those of Hugging Face transformers, recorded in tests/goldens."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from engines import generate, make_engine, request
from tiny_models import CASES, fingerprint

from jaxserve.models.families import families

pytestmark = pytest.mark.compiles

GOLDENS = Path(__file__).parent.parent / "goldens"


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(case, model_folders):
    golden = np.load(GOLDENS / f"{case}.npz")
    assert str(golden["fingerprint"]) == fingerprint(case), "the weights differ from the recorded ones"
    engine = make_engine(model_folders(case), tokens=320, decode_steps=False, **CASES[case].options)
    prompts = [golden[f"prompt_{i}"] for i in range(4)]

    hidden = []
    step = engine.runner.step
    dispatch = engine.dispatch
    of_prompt = [np.zeros((0, engine.model.hidden_size), np.float32)] * 4

    def keep_hidden(shape, packed):
        sampled, states = step(shape, packed)
        hidden.append(np.asarray(states))
        return sampled, states

    def note_rows(plan):
        sent = dispatch(plan)
        for batch, states in zip(sent.batches, hidden, strict=True):
            ends = np.cumsum(batch.rows.count)
            for seq, begin, end in zip(batch.rows.seqs, ends - batch.rows.count, ends, strict=True):
                of_prompt[int(seq.request_id)] = np.concatenate([of_prompt[int(seq.request_id)], states[begin:end]])
        hidden.clear()
        return sent

    engine.runner.step = keep_hidden
    engine.dispatch = note_rows
    results = generate(engine, *(request(str(i), p, max_tokens=64, logprobs=0) for i, p in enumerate(prompts)))

    variables = {"params": engine.runner.params}
    for i, prompt in enumerate(prompts):
        expected = golden[f"logits_{i}"]
        rows = jnp.asarray(of_prompt[i][len(prompt) - len(expected) : len(prompt)])
        ops = engine.runner.model.ops
        actual = np.asarray(engine.runner.model.apply(variables, rows, ops, method="logits"))
        scale = np.abs(expected).max()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * scale, err_msg=f"prompt {i}")
        assert results[i].token_ids == golden[f"tokens_{i}"].tolist(), f"prompt {i}"
        ours = [entry.logprob for entry in results[i].logprobs]
        np.testing.assert_allclose(ours, golden[f"logprobs_{i}"], atol=2e-3, err_msg=f"prompt {i}")


def test_every_family_has_a_case():
    """An architecture's old names are read as the usual one. `test_dense_models` has MiniCPM and models with images."""
    cases = {name for case in CASES.values() for name in case.config["architectures"]}
    without = {family.name for family in families() if cases.isdisjoint(family.architectures)}
    seeing = ("aria", "gemma3n", "granite4 vision")
    assert without == {f"{name} with images" for name in seeing} | {"minicpm"}


def test_float32_is_the_default_on_cpu(model_folders):
    engine = make_engine(model_folders("llama_bfloat16"))
    assert engine.runner.layout.dtype == jnp.float32
