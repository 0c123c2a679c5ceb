"""Scores a model twice with EleutherAI's lm-eval, through a server of ours and by transformers, and compares.

  pip install 'lm-eval[api,hf]'
  python benchmarks/peers/lm_eval_agrees.py --server-python .venv/bin/python

Runs with a Python that has lm-eval and torch; the server runs with another, which has jaxserve. Both compute in
float32. Four tasks are made of a text: the next line out of four, the next word, whole documents, and greedy text.
lm-eval's `hf` answers their requests once, its `local-completions` in each of the ways in which it can ask a server. Of
every request the log-likelihood, the flag is_greedy and the text are compared. Exits with 1 where a log-likelihood is
more than 1e-3 apart, or a flag or a text differs. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)  # and not this folder, whose modules have the names of others' packages
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import lm_eval  # noqa: E402

from jaxserve import entry  # noqa: E402
from jaxserve.bench import startup  # noqa: E402
from jaxserve.bench.report import table  # noqa: E402

EOT = "<|endoftext|>"
TOLERANCE = 1e-3  # nats, of a request's log-likelihood
START_SECONDS = 300
BEFORE = 12  # lines before the one that is asked for
# As ids the tokens are the same by construction; as text the server finds them.
WAYS: dict[str, dict[str, Any]] = {
    "ids, one by one": {"tokenizer_backend": "huggingface"},
    "ids, 16 a request, 4 at once": {"tokenizer_backend": "huggingface", "batch_size": 16, "num_concurrent": 4},
    "ids of the server's tokenizer": {"tokenizer_backend": "remote", "batch_size": 16, "num_concurrent": 4},
    "text, 8 a request": {"tokenizer_backend": "huggingface", "tokenized_requests": False, "batch_size": 8},
}
TASKS: dict[str, dict[str, Any]] = {
    "next line": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": 0},
    "next word": {"output_type": "loglikelihood", "doc_to_target": "target"},
    "documents": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"},
    "greedy": {
        "output_type": "generate_until",
        "doc_to_target": "text",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 32, "do_sample": False},
        "metric_list": [{"metric": "bypass"}],
    },
}


def questions(text: str) -> dict[str, list[dict[str, Any]]]:
    """Each task's documents."""
    rng = random.Random(0)
    documents = [document for document in text.split(EOT) if document.strip()]
    places = [(d.splitlines(), i) for d in documents for i in range(BEFORE, len(d.splitlines()), 60)]
    pieces = [("\n".join(lines[i - BEFORE : i]), "\n" + lines[i]) for lines, i in places if lines[i].strip()]
    lines = sorted({line for _, line in pieces})
    # the last word of a line, and of a document, some of which are longer than the context
    words = [text.rpartition(" ") for text in [*(a + b for a, b in pieces), *map(str.rstrip, documents)]]
    return {
        "next line": [
            {"text": before, "choices": [line, *rng.sample([x for x in lines if x != line], 3)]}
            for before, line in pieces
        ],
        "next word": [{"text": before, "target": space + word} for before, space, word in words]
        + [{"text": "", "target": line} for line in lines[:10]],
        "documents": [{"text": document} for document in documents],
        "greedy": [{"text": before + "\n"} for before, _ in pieces[::2]],
    }


def make_tasks(documents: dict[str, list[dict[str, Any]]], folder: Path) -> list[dict[str, Any]]:
    """lm-eval's configuration of each task, whose documents are written into `folder`."""
    tasks = []
    for name, task in TASKS.items():
        path = folder / f"{name}.json"
        path.write_text("\n".join(map(json.dumps, documents[name])), encoding="utf-8")
        where = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}}
        tasks.append(where | {"test_split": "test", "doc_to_text": "text", "target_delimiter": ""} | task)
    return tasks


def answers(model: str, arguments: dict[str, Any], tasks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """By task, and in the order of its requests: (log-likelihood, is_greedy), a log-likelihood, or a text."""
    samples = lm_eval.simple_evaluate(model=model, model_args=arguments, tasks=tasks, bootstrap_iters=0)["samples"]
    return {
        task: [
            answer
            for sample in sorted(samples[task], key=lambda sample: sample["doc_id"])
            for response in sample["resps"]
            for answer in response
        ]
        for task in TASKS
    }


def compare(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[float, int]:
    """The largest difference of log-likelihoods, in nats, and how many flags or texts differ."""
    largest = 0.0
    unlike = 0
    for mine, its in zip(ours, theirs, strict=True):
        if isinstance(mine, str):
            unlike += mine != its
        elif isinstance(mine, float):
            largest = max(largest, abs(mine - its))
        else:
            largest = max(largest, abs(mine[0] - its[0]))
            unlike = unlike + (mine[1] != its[1])
    return largest, unlike


@contextlib.contextmanager
def server(python: str, model: str) -> Iterator[tuple[str, int]]:
    """A server's URL, and the longest context in tokens."""
    port = startup.free_port()
    command = entry.command("jaxserve", "serve", model, "--port", str(port), "--dtype", "float32", python=python)
    with startup.server_process(command, dict(os.environ)) as (process, log):
        deadline = time.monotonic() + START_SECONDS
        while startup.status(port, "/ready") != 200:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                sys.exit(f"the server did not become ready:\n{log.text(last=10)}")
            time.sleep(0.1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as response:
            yield f"http://127.0.0.1:{port}", json.load(response)["data"][0]["max_model_len"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--server-python", default=sys.executable, help="the Python that has jaxserve")
    parser.add_argument("--model", default=str(ROOT / "checkpoints/demo"), help="a folder in Hugging Face format")
    parser.add_argument("--text", type=Path, default=ROOT / "checkpoints/demo/heldout.txt")
    args = parser.parse_args()
    print(", ".join(f"{name} {version(name)}" for name in ("lm-eval", "transformers", "torch")))
    rows: list[tuple[str, str, int, float, int]] = []
    with tempfile.TemporaryDirectory() as folder, server(args.server_python, args.model) as (url, context):
        tasks = make_tasks(questions(args.text.read_text(encoding="utf-8")), Path(folder))
        # Windows of the same length: local-completions keeps a token for the answer, and counts a window's first.
        # transformers computes in float32 as we do, but lm-eval is to sum its log-probabilities as exactly as ours, and
        # not to look them up in a cache, from which it takes the wrong ones where requests overlap.
        local = {"model": args.model, "base_url": f"{url}/v1/completions", "max_length": context}
        hf = {"pretrained": args.model, "dtype": "float32", "device": "cpu", "max_length": context - 2}
        hf |= {"softmax_dtype": "float64", "logits_cache": False}
        theirs = answers("hf", hf, tasks)
        for way, how in WAYS.items():
            ours = answers("local-completions", local | how, tasks)
            # Documents longer than the context are cut into windows, whose text is not always of the same tokens.
            asked = [task for task in TASKS if task != "documents" or how.get("tokenized_requests", True)]
            rows += [(way, task, len(ours[task]), *compare(ours[task], theirs[task])) for task in asked]
    head = ("asked as", "task", "requests", "largest difference", "flags or texts unlike")
    print(table([head, *((*row[:3], f"{row[3]:.1e}", row[4]) for row in rows)]))
    worst = max(row[3] for row in rows)
    unlike = sum(row[4] for row in rows)
    print(
        f"{sum(row[2] for row in rows)} requests, largest difference {worst:.1e} nats, {unlike} flags or texts unlike"
    )
    return int(worst > TOLERANCE or unlike > 0)


if __name__ == "__main__":
    sys.exit(main())
