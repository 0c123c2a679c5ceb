"""One load on transformers, in this process. Runs in a Python that has torch and transformers, and nothing of ours:

python torch_engine.py static|continuous LOAD.json RESULT.json

LOAD has: model (folder), threads, concurrency, output_len, warmup_len, check_len (tokens), and the prompts as lists of
token ids: warmup, prompts, check. RESULT gets: requests, a list of {start, end, arrivals} in seconds; check, a list of
the greedy tokens of each check prompt; versions.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, StoppingCriteria

Answer = dict[str, Any]  # start, end, arrivals in seconds on time.perf_counter's clock; tokens


class Clock(StoppingCriteria):
    """Stops nothing; records when each step of `generate` ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def static(model: Any, prompts: Sequence[list[int]], output_len: int, concurrency: int) -> list[Answer]:
    """Batches of `concurrency` prompts, all of one length, one batch after the other."""
    answers = []
    for first in range(0, len(prompts), concurrency):
        ids = torch.tensor(prompts[first : first + concurrency])
        clock = Clock()
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings(output_len),
                stopping_criteria=[clock],
            )
        end = time.perf_counter()
        for row in output[:, ids.shape[1] :].tolist():
            answers.append({"start": start, "end": end, "arrivals": clock.times, "tokens": row})
    return answers


def continuous(model: Any, prompts: Sequence[list[int]], output_len: int, concurrency: int) -> list[Answer]:
    """transformers' continuous batching; a request is added when one before it has ended."""
    page = 32
    pages = (max(map(len, prompts)) + output_len) // page + 2
    config = ContinuousBatchingConfig(page_size=page, num_blocks=pages * concurrency + 8, max_batch_tokens=2048)
    answers: list[Answer] = [{} for _ in prompts]
    waiting = iter(range(len(prompts)))

    def submit() -> None:
        if (i := next(waiting, None)) is not None:
            answers[i]["start"] = time.perf_counter()
            manager.add_request(prompts[i], str(i), output_len, record_timestamps=True, eos_token_id=-1)

    with model.continuous_batching_context_manager(settings(output_len), continuous_batching_config=config) as manager:
        while getattr(manager, "batch_processor", None) is None:  # its thread is still creating the cache
            time.sleep(0.01)
        for _ in range(concurrency):
            submit()
        for result in _results(manager, len(prompts)):
            submit()
            tokens = result.generated_tokens
            times = result.timestamps
            answers[int(result.request_id)] |= {"end": times[-1], "arrivals": times, "tokens": tokens}
    return answers


def _results(manager: Any, count: int) -> Any:
    """Each finished request. Raises RuntimeError when one failed, or the manager ends before."""
    while count:
        result = manager.get_result(timeout=5)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the batching thread ended")
        elif result.error is not None:
            raise RuntimeError(result.error)
        elif result.is_finished():
            count -= 1
            yield result


def settings(output_len: int) -> GenerationConfig:
    """Greedy, exactly so many tokens."""
    return GenerationConfig(do_sample=False, max_new_tokens=output_len, eos_token_id=None, pad_token_id=0)


def main() -> None:
    kind = sys.argv[1]
    load_path = Path(sys.argv[2])
    result_path = Path(sys.argv[3])
    load = json.loads(load_path.read_text())
    torch.set_num_threads(load["threads"])
    model = AutoModelForCausalLM.from_pretrained(load["model"], dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()  # nothing ends an answer early
    run = static if kind == "static" else continuous
    run(model, load["warmup"], load["warmup_len"], load["concurrency"])
    check = run(model, load["check"], load["check_len"], 1) if load["check"] else []
    clock = time.perf_counter()
    answers = run(model, load["prompts"], load["output_len"], load["concurrency"])
    requests = [
        {
            "start": answer["start"] - clock,
            "end": answer["end"] - clock,
            "arrivals": [at - clock for at in answer["arrivals"]],
        }
        for answer in answers
    ]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    result = {"requests": requests, "check": [answer["tokens"] for answer in check], "versions": versions}
    result_path.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
