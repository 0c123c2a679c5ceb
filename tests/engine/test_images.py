"""Answers to prompts with pictures equal those of Hugging Face transformers, recorded in tests/goldens/images."""

from pathlib import Path

import numpy as np
import pytest
from picture_prompts import PROCESSORS, PROMPTS, build, prompt_of
from tiny_models import fingerprint

from jaxserve import LLM, SamplingParams

pytestmark = pytest.mark.compiles

GOLDENS = Path(__file__).parent.parent / "goldens" / "images"
PARAMS = SamplingParams(temperature=0.0, max_tokens=32, logprobs=0, ignore_eos=True)


@pytest.mark.parametrize("case", PROCESSORS)
def test_tokens_and_logprobs(case, tmp_path):
    golden = np.load(GOLDENS / f"{case}.npz")
    assert str(golden["fingerprint"]) == fingerprint(case), "the weights differ from the recorded ones"
    llm = LLM(build(case, tmp_path), max_num_seqs=4, max_model_len=512, prefill_chunk=24, kv_pages=96)
    prompts = []
    for slot in range(len(PROMPTS)):
        tokens, pictures = prompt_of(case, slot, int(golden[f"seed_{slot}"]))
        prompts.append({"prompt_token_ids": tokens, "images": pictures})
    for turn in ("first", "cached"):
        results = llm.generate(prompts, PARAMS, progress=False)
        for slot, result in enumerate(results):
            answer = result.outputs[0]
            assert answer.token_ids == golden[f"tokens_{slot}"].tolist(), (turn, slot)
            ours = [entry.logprob for entry in answer.logprobs]
            np.testing.assert_allclose(ours, golden[f"logprobs_{slot}"], atol=2e-3, err_msg=f"{turn} {slot}")
