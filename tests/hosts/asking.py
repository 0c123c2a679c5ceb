"""Requests of every kind to an `LLM`, in a process that is one of several hosts, or alone: `asking.py SETTINGS HOST_ID`
prints the first host's answers, how often it told the others each command, and how many tokens were proposed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from jaxserve.llm import LLM
from jaxserve.speculation import speculator
from jaxserve.types import Grammar, SamplingParams

SHARED = list(range(40, 80))  # the first tokens of several prompts
# So few pages that sequences are preempted, and prompts in several pieces.
SIZES = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 104, "kv_pages": 16, "page_size": 8}


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts, and the options of `SamplingParams` for each."""
    asked: list[tuple[list[int], dict[str, Any]]] = [
        (SHARED + [3], {"max_tokens": 12}),
        (list(range(2, 90)), {"max_tokens": 9}),
        (SHARED + [4, 5], {"max_tokens": 8, "n": 2, "temperature": 1.0, "seed": 5}),
        ([9, 8, 7] * 5, {"max_tokens": 14, "presence_penalty": 1.5, "repetition_penalty": 1.3}),
        (SHARED, {"max_tokens": 6, "logprobs": 2, "prompt_logprobs": 1}),
        ([5, 6, 7, 8], {"max_tokens": 10, "temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 77}),
        (SHARED[:9], {"max_tokens": 12, "temperature": 1.5, "seed": 1, "grammar": Grammar("regex", "[a-f]{4,9}")}),
        ([7, 8, 9] * 10, {"max_tokens": 30, "temperature": 1.2, "seed": 3, "stop_token_ids": list(range(0, 48, 3))}),
    ]
    asked += [([20 + i, 3, 4], {"max_tokens": 60}) for i in range(5)]
    return asked + [(SHARED + [100 + i], {"max_tokens": 5 + i}) for i in range(3)]


def answers(llm: LLM) -> list[Any]:
    """For each request the tokens of its completions, and the log-probabilities of tokens where it asks for them."""
    params = [SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | options) for _, options in requests()]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests()], params, progress=False)
    found = []
    for output in outputs:
        scores = _scores(output.outputs[0].logprobs), _scores(output.prompt_logprobs)
        found.append([[list(one.token_ids) for one in output.outputs], *scores])
    return found


def _scores(given: list[Any] | None) -> list[float]:
    return [one.logprob for one in given or [] if one is not None]


if __name__ == "__main__":
    folder, settings = json.loads(sys.argv[1])
    llm = LLM(folder, **settings, host_id=int(sys.argv[2]))
    told = Counter[str]()
    runner: Any = llm.engine.runner
    tell = runner.listener

    def counting(command: Any) -> None:
        told[type(command).__name__] += 1
        tell(command)

    runner.listener = counting
    if llm.engine.speculator is not None:
        llm.engine.speculator.set_times(None)  # as many proposals as can be, whatever pays
        for name in ("MIN_ACCEPTANCE", "RETRY_TOKENS", "COOLDOWN", "MAX_COOLDOWN"):
            setattr(speculator, name, 0)
    found = answers(llm)
    told["proposals"] = llm.engine.stats().spec_proposed
    print("answers", json.dumps([found, told]), flush=True)
