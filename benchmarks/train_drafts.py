"""Trains the drafts of the bundled demo model on the files that it was trained on (`demo_text`): an EAGLE-3 draft
(`checkpoints/demo-eagle3`), and a Llama of half a million parameters (`checkpoints/demo-draft`).

    python benchmarks/train_drafts.py eagle3 --minutes 10
    python benchmarks/train_drafts.py draft --minutes 5
    python benchmarks/train_drafts.py --measure            # tokens per check on held-out text, in the engine

Needs `optax`, as `train_demo` does.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
from pathlib import Path

import numpy as np
import train_demo
from demo_text import EOT, by_hash, is_heldout, read_sources
from tokenizers import Tokenizer

from jaxserve.convert.train_eagle import TrainConfig, train_eagle
from jaxserve.llm import LLM
from jaxserve.types import SamplingParams

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
SMALL = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 16}
METHODS = {"eagle3": "demo-eagle3", "draft_model": "demo-draft"}
PROMPT = 128  # tokens of a measured prompt
ANSWER = 128  # its answer
PROMPTS = 64  # prompts


def train_head(minutes: float) -> None:
    texts = {name: text for name, text in read_sources().items() if not is_heldout(name)}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.txt"
        data.write_text(EOT.join(text for _, text in by_hash(texts)))
        config = TrainConfig(vocabulary=2048, minutes=minutes, generate=2560)
        train_eagle("demo", data, CHECKPOINTS / "demo-eagle3", config)


def train_draft(minutes: float) -> None:
    train_demo.CONFIG |= SMALL
    out = CHECKPOINTS / "demo-draft"
    work = Path("build/draft_train")
    out.mkdir(exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "demo" / "tokenizer.json"))
    rates = argparse.Namespace(muon_lr=0.02, adam_lr=0.01, weight_decay=0.05, save_minutes=60.0)
    with tempfile.TemporaryDirectory() as folder:
        own = argparse.Namespace(**vars(rates), minutes=minutes, out=Path(folder), work=work)
        train_demo.export_tokenizer(own.out, tokenizer)
        train_demo.train(own, tokenizer)
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(own.out / name, out / name)


def measure(proposals: int) -> None:
    """Prints how many tokens a check yields when every row gets so many proposals, on windows of held-out text."""
    from jaxserve.speculation import speculator

    for name in ("MIN_ACCEPTANCE", "RETRY_TOKENS", "COOLDOWN", "MAX_COOLDOWN"):
        setattr(speculator, name, 0)
    tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "demo" / "tokenizer.json"))
    texts = [text for name, text in read_sources().items() if is_heldout(name)]
    ids = np.concatenate([tokenizer.encode(text).ids for text in texts])
    starts = np.linspace(0, len(ids) - PROMPT, PROMPTS).astype(int)
    prompts = [ids[at : at + PROMPT].tolist() for at in starts]
    for method, model in METHODS.items():
        given = {"method": method, "model": str(CHECKPOINTS / model), "num_speculative_tokens": proposals}
        llm = LLM("demo", speculative_config=given, max_model_len=512, prefix_caching=False)
        llm.engine.compile()
        llm.engine.speculator.set_times(None)  # propose always
        for temperature in (0.0, 0.7, 1.0):
            before = llm.engine.stats()
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=ANSWER, ignore_eos=True)
            for at in range(0, PROMPTS, 4):
                llm.generate(prompts[at : at + 4], params, progress=False)
            after = llm.engine.stats()
            drafts = after.spec_drafts - before.spec_drafts
            kept = after.spec_accepted - before.spec_accepted
            print(f"{model} at temperature {temperature}: {1 + kept / drafts:.2f} tokens a check, {drafts} checks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["eagle3", "draft", []], help="what to train")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--proposals", type=int, default=3)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for what in args.what:
        {"eagle3": train_head, "draft": train_draft}[what](args.minutes)
    if args.measure:
        measure(args.proposals)


if __name__ == "__main__":
    main()
