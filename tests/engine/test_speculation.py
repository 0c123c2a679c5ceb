"""Speculative decoding changes no token: the same requests with and without it."""

import numpy as np
import pytest
from engines import make_engine, request, run_all

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "max_rows": 8}


def requests(seed, count):
    """Prompts that repeat themselves, with parameters of every kind."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        prompt = np.tile(rng.integers(5, 60, int(rng.integers(3, 12))), 6)[: int(rng.integers(4, 40))].tolist()
        params = {"max_tokens": int(rng.integers(1, 40)), "seed": i, "ignore_eos": bool(rng.integers(2))}
        params["temperature"] = float(rng.choice([0.0, 0.3, 1.0]))
        if rng.random() < 0.3:
            params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
        if rng.random() < 0.3:
            params |= {"top_k": 5, "top_p": 0.9, "min_p": 0.05}
        if rng.random() < 0.3:
            params |= {"logprobs": 3}
        if rng.random() < 0.2:
            params |= {"min_tokens": 5, "logit_bias": {7: 2.0, 9: -3.0}}
        if rng.random() < 0.2:
            params |= {"n": 3}
        if rng.random() < 0.1:
            params |= {"prompt_logprobs": 1}
        made.append(request(f"r{i}", prompt, **params))
    return made


def outcome(results):
    return {key: (one.token_ids, one.finish_reason) for key, one in results.items()}


class Oracle:
    """Proposes the answers that are known, with errors here and there."""

    def __init__(self, answers, errors):
        self._answers, self._errors, self._rng = answers, errors, np.random.default_rng(3)

    def propose(self, tokens, count):
        known = tokens.tolist()
        fitting = [answer for answer in self._answers if answer[: len(known)] == known]
        if not fitting:
            return tokens[:0]
        answer = np.asarray(fitting[self._rng.integers(len(fitting))][len(known) :][:count], np.int32)
        return np.where(self._rng.random(len(answer)) < self._errors, 77, answer)


@pytest.mark.parametrize("errors", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"static_steps": True}, {"kv_pages": 20}])
@pytest.mark.parametrize("case", ["llama3_gqa", "mistral_window"])
def test_the_same_tokens(case, options, errors, model_folders):
    settings = {"rows": 4, "tokens": 32, "max_model_len": 96, **options}
    plain = make_engine(model_folders(case), **settings)
    quick = make_engine(model_folders(case), speculative_config=NGRAM, **settings)
    asked = requests(1, 16)
    expected = run_all(plain, *asked)
    prompts = {one.request_id: one.prompt_token_ids for one in asked}
    answers = [prompts[name] + one.token_ids for (name, _), one in expected.items()]
    quick.speculator._method = Oracle(answers, errors)
    found = run_all(quick, *requests(1, 16))
    assert outcome(found) == outcome(expected)
    for key, one in expected.items():
        ours = [entry.logprob for entry in found[key].logprobs]
        np.testing.assert_allclose(ours, [entry.logprob for entry in one.logprobs], atol=1e-4)
    speculator = quick.speculator
    assert speculator.num_proposed > 50
    least, most = {0.0: (0.9, 1.0), 0.2: (0.3, 0.9), 1.0: (0.0, 0.0)}[errors]
    assert least <= speculator.num_accepted / speculator.num_proposed <= most
    assert quick.counters.steps < plain.counters.steps or "decode_steps" not in settings
