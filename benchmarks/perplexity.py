"""Perplexity of models on a text they have not seen, scored by the engine as it serves them.

  python benchmarks/perplexity.py                                  the demo model: 16.1 and 15.2 (on CPython 3.11)
  python benchmarks/perplexity.py demo demo,dtype=bfloat16 OUT     several models; after a comma, fields of EngineConfig
  python benchmarks/perplexity.py MODEL --text FILE --json FILE

The text is cut into windows that do not see each other; they overlap by one token, which is context in the second. By
default it is what the demo model was not trained on: files of the running interpreter's standard library, 17 of CPython
3.11's. In a file, documents are separated by the text <|endoftext|>.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from demo_text import EOT, is_heldout, read_sources

from jaxserve.llm import LLM
from jaxserve.types import SamplingParams

SCORE = SamplingParams(max_tokens=0, prompt_logprobs=0)


def read_text(path: Path | None) -> str:
    if path is not None:
        return path.read_text(encoding="utf-8")
    return EOT.join(text for name, text in read_sources().items() if is_heldout(name))


def windows(ids: Sequence[int], tokens: int) -> list[list[int]]:
    """Pieces of so many tokens, of which the first is the one before's last; together they score all but ids[0]."""
    return [list(ids[first : first + tokens]) for first in range(0, len(ids) - 1, tokens - 1)]


def tokenize(llm: LLM, text: str) -> list[int]:
    """The documents' tokens, each document after one that begins or ends a sequence, where the model has any."""
    tokenizer = llm.tokenizer
    mark = tokenizer.bos_token_id
    if mark is None and llm.engine.eos_token_ids:
        mark = llm.engine.eos_token_ids[0]
    marks = [] if mark is None else [mark]
    pieces = (marks + tokenizer.encode(document, add_special_tokens=False) for document in text.split(EOT))
    return [token for piece in pieces for token in piece] + marks


def score(llm: LLM, text: str, window: int) -> dict[str, Any]:
    """Perplexity per token and bits per byte, over windows of which `window` tokens are scored, or as many as fit."""
    tokens = min(window + 1, llm.engine.max_model_len - 1)
    prompts = windows(tokenize(llm, text), tokens)
    outputs = llm.generate(prompts, SCORE)
    logprobs = [entry.logprob for output in outputs for entry in output.prompt_logprobs or () if entry is not None]
    nats = -float(np.sum(logprobs, dtype=np.float64))
    size = len(text.replace(EOT, "").encode())
    return {
        "window": window,
        "perplexity": math.exp(nats / len(logprobs)),
        "bits_per_byte": nats / math.log(2) / size,
        "tokens": len(logprobs),
    }


def load(spec: str) -> LLM:
    """A model and, after commas, `field=value` of EngineConfig; values are JSON, or else text."""
    model, *settings = spec.split(",")
    given: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
    return LLM(model, **given)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="*", default=["demo"], metavar="MODEL[,FIELD=VALUE...]")
    parser.add_argument("--text", type=Path, help="what to score; None: the demo model's held-out files")
    parser.add_argument("--window", type=int, nargs="+", default=[512, 2048], metavar="TOKENS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    text = read_text(args.text)
    rows = []
    for spec in args.models:
        llm = load(spec)
        rows += [{"model": spec} | score(llm, text, window) for window in args.window]
        del llm
    width = max(len(row["model"]) for row in rows)
    print(f"{'model':{width}}  window  perplexity  bits per byte  tokens")
    for row in rows:
        print(
            f"{row['model']:{width}}  {row['window']:6}  {row['perplexity']:10.3f}  {row['bits_per_byte']:13.4f}"
            f"  {row['tokens']:6}"
        )
    if args.json:
        digest = hashlib.sha256(text.encode()).hexdigest()
        args.json.write_text(json.dumps({"text_sha256": digest, "rows": rows}, indent=2) + "\n")
    return rows


if __name__ == "__main__":
    main()
