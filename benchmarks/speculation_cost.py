"""From which model size on does an EAGLE-3 draft pay on this machine? A cost model, checked against measured steps.

Models of several sizes with random weights, and random drafts of their width, take part. For each it measures what the
engine measures at its start (`speculation.step_times`): seconds of a token without proposals, of a check of 1 + k
tokens, and of proposing k tokens; and the host's time between two steps. From these and from the chance that a proposal
is kept, the cost model predicts the speed with and without proposals. Then both run: proposals are replaced by the
tokens of the answer, so many of them wrong that the chance is the given one, while the draft's work stays.

    python benchmarks/speculation_cost.py --chance 0.75 --proposals 3
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.step_plan import StepPlan
from jaxserve.speculation import speculator
from jaxserve.speculation.draft_head import DraftHead
from jaxserve.types import Request, SamplingParams

SIZES = {  # hidden size, layers, width of the MLP, vocabulary
    "5M": (256, 5, 704, 4096),
    "28M": (512, 8, 1408, 8192),
    "93M": (768, 12, 2048, 16384),
    "270M": (1024, 20, 2816, 32768),
}
PROMPT = 32
ANSWER = 128
RUNS = 6  # the engines run in turns


class Known(DraftHead):
    """A draft head whose tokens are replaced by those of a known answer, wrong ones among them."""

    answer: np.ndarray
    chance = 1.0

    def prepare(self, plan: StepPlan, running: RunningTable) -> None:
        super().prepare(plan, running)
        rows = plan.rows.take(np.flatnonzero(plan.rows.checks))
        for slot, count in zip(rows.slot, rows.num_new - 1, strict=True):
            known = running.known[slot]
            right = self._rng.random(count) < self.chance
            running.tokens[slot, known : known + count] = np.where(right, self.answer[known : known + count], 1)

    _rng = np.random.default_rng(0)


def write(folder: Path, size: str) -> tuple[Path, Path]:
    """The configs of a model and of its draft, whose tensors have shapes and no contents."""
    hidden, layers, width, vocabulary = SIZES[size]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers, "intermediate_size": width, "vocab_size": vocabulary,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(hidden // 256, 1), "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip
    model = folder / "model"
    draft = folder / "draft"
    model.mkdir()
    draft.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    own = {"num_hidden_layers": 1, "draft_vocab_size": vocabulary // 2, "tie_word_embeddings": False}
    (draft / "config.json").write_text(json.dumps(config | own))
    header = {}
    at = 0
    for name, shape in {"fc.weight": (1,), "midlayer.hidden_norm.weight": (1,), "d2t": (vocabulary // 2,)}.items():
        kind, each = ("I64", 8) if name == "d2t" else ("F32", 4)
        end = at + math.prod(shape) * each
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    (draft / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(at))
    return model, draft


def speed(engine: Engine, prompt: list[int]) -> tuple[float, list[int]]:
    """Tokens per second of one request, and its answer."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    engine.add_request(Request(request_id="r", prompt_token_ids=prompt, params=params))
    answer = []
    first = 0
    start = 0.0
    while engine.has_work:
        for update in engine.step():
            answer += update.token_ids
            if not start:  # from the first token on
                start = time.perf_counter()
                first = len(answer)
    return (len(answer) - first) / (time.perf_counter() - start), answer


def compare(size: str, chance: float, proposals: int) -> dict[str, float]:
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        model, draft = write(Path(folder), size)
        common = {"model": str(model), "load_format": "dummy", "max_num_seqs": 4, "max_model_len": 512, "kv_pages": 200}
        prompt = rng.integers(5, 4000, PROMPT).tolist()
        plain = Engine.load(EngineConfig(**common), progress=False)
        plain.compile()
        _, answer = speed(plain, prompt)
        given = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": proposals}
        quick = Engine.load(EngineConfig(**common, speculative_config=given), progress=False)
        quick.compile()
    spec = quick.speculator
    assert spec is not None
    assert spec.times is not None
    method = spec._method
    times = spec.times
    method.__class__ = Known
    method.answer = np.array(prompt + answer, np.int32)
    method.chance = chance
    spec.set_times(None)  # propose always
    with_drafts = without = 0.0
    for _ in range(RUNS):
        without = max(without, speed(plain, prompt)[0])
        now, same = speed(quick, prompt)
        with_drafts = max(with_drafts, now)
        assert same == answer
    host = quick.pace.host_seconds
    tokens = sum(chance**i for i in range(proposals + 1))
    seconds = {
        "token": float(times.decode(1)),
        "check": float(times.check(1, 1 + proposals)),
        "draft": float(method.seconds(1, np.array([proposals]))[0]),
        "host": host,
    }
    predicted = tokens * seconds["token"] / (seconds["check"] + seconds["draft"] + host)
    return seconds | {"predicted": predicted, "measured": with_drafts / without}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=list(SIZES), metavar="SIZE", help=", ".join(SIZES))
    parser.add_argument("--chance", type=float, default=0.75, help="that a proposal is kept if those before it were")
    parser.add_argument("--proposals", type=int, default=3)
    args = parser.parse_args()
    for name in ("MIN_ACCEPTANCE", "RETRY_TOKENS", "COOLDOWN", "MAX_COOLDOWN"):
        setattr(speculator, name, 0)
    print(
        "| model | a token | a check | its draft | host | speed, predicted | measured |\n|---|---|---|---|---|---|---|"
    )
    for size in args.sizes:
        found = compare(size, args.chance, args.proposals)
        times = " | ".join(f"{1e3 * found[name]:.2f} ms" for name in ("token", "check", "draft", "host"))
        print(f"| {size} | {times} | {found['predicted']:.2f} x | {found['measured']:.2f} x |", flush=True)


if __name__ == "__main__":
    main()
