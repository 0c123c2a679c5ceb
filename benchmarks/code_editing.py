"""Prompt lookup on code that is edited: a file of 300 tokens is repeated with one change.

The bundled demo model cannot copy a file. Here its weights learn to: from windows of the files that it was trained on,
in each of which one name is to be replaced by another. Then files that were held out are edited with speculation by
prompt lookup and without, in turns.

    python benchmarks/code_editing.py train --minutes 15           # writes build/copying, needs optax
    python benchmarks/code_editing.py measure [--temperature 1]
"""

from __future__ import annotations

import argparse
import keyword
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_demo
from demo_text import by_hash, is_heldout, read_sources
from tokenizers import Tokenizer
from train_demo import IM_END, IM_START

from jaxserve.llm import LLM
from jaxserve.types import Request, SamplingParams

ROOT = Path(__file__).parents[1]
NAMES = re.compile(r"(?<![\w.])[a-z_]{3,20}(?!\w)")
STAGES = [(0.0, 256, 8), (0.4, 512, 4), (0.7, 768, 3)]  # from this fraction of the time on: length, sequences


class Edits:
    """Tasks made of texts: `draw` gives ids of a prompt and of its answer."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], seed: int):
        self._encode = lambda text: tokenizer.encode(text).ids
        self._texts = texts
        self._rng = np.random.default_rng(seed)
        names = {name for text in texts for name in NAMES.findall(text)}
        self._names = sorted(name for name in names if not keyword.iskeyword(name))

    def draw(self, least: int, most: int) -> tuple[list[int], list[int]]:
        """A window of whole lines with `least` to `most` tokens, in which a name that occurs once becomes another."""
        while True:
            lines = self._texts[self._rng.integers(len(self._texts))].splitlines(keepends=True)
            start = int(self._rng.integers(len(lines)))
            wanted = int(self._rng.integers(least, most + 1))
            text = ""
            for line in lines[start : start + 80]:
                if len(text) > 5 * wanted or len(self._encode(text + line)) > wanted:
                    break
                text += line
            names = NAMES.findall(text)
            found = [name for name in names if names.count(name) == 1 and not keyword.iskeyword(name)]
            if not found or len(self._encode(text)) < least:
                continue
            old = found[self._rng.integers(len(found))]
            new = self._names[self._rng.integers(len(self._names))]
            changed = re.sub(rf"(?<![\w.]){old}(?!\w)", new, text)
            ask = f"{IM_START}user\nRename `{old}` to `{new}`:\n{text}{IM_END}\n{IM_START}assistant\n"
            return self._encode(ask), self._encode(changed + IM_END)

    def batches(self, length: int, rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Endless ids [rows, length + 1] and which of ids[:, 1:] are of answers, bool [rows, length]."""
        while True:
            ids = np.zeros((rows, length + 1), np.int32)
            answers = np.zeros((rows, length), bool)
            for row in range(rows):
                prompt = answer = [0] * length
                while len(prompt) + len(answer) > length + 1:
                    prompt, answer = self.draw(length // 6, length // 2 - 24)
                ids[row, : len(prompt) + len(answer)] = prompt + answer
                answers[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
            yield ids, answers


def loss_of(params: train_demo.Params, ids: jax.Array, answers: jax.Array) -> jax.Array:
    return jnp.sum(train_demo.token_losses(params, ids) * answers) / jnp.sum(answers)


@partial(jax.jit, static_argnames="optimizer", donate_argnums=(1, 2))
def train_step(optimizer, params, state, ids, answers, scale):
    loss, grads = jax.value_and_grad(loss_of)(params, ids, answers)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, jax.tree.map(lambda u: u * scale, updates)), state, loss


@jax.jit
def accuracy(params: train_demo.Params, ids: jax.Array, answers: jax.Array) -> jax.Array:
    """Share of the answers' tokens that are the likeliest ones."""
    logits = train_demo.forward(params, ids[:, :-1]) @ params["model.embed_tokens.weight"].T
    return jnp.sum((logits.argmax(-1) == ids[:, 1:]) & answers) / jnp.sum(answers)


def texts(*, heldout: bool) -> list[str]:
    return [text for _, text in by_hash({n: t for n, t in read_sources().items() if is_heldout(n) == heldout})]


def train(out: Path, minutes: float, start: Path) -> None:
    tokenizer = Tokenizer.from_file(str(ROOT / "checkpoints" / "demo" / "tokenizer.json"))
    tasks = Edits(tokenizer, texts(heldout=False), 0)
    unseen = Edits(tokenizer, texts(heldout=True), 1)
    out.mkdir(parents=True, exist_ok=True)
    train_demo.export_tokenizer(out, tokenizer)
    rates = argparse.Namespace(muon_lr=0.01, adam_lr=0.002, weight_decay=0.05)
    params = train_demo.load_weights(start)
    optimizer = train_demo.make_optimizer(rates)
    state = optimizer.init(params)
    stage = None
    step = 0
    losses = []
    began = time.monotonic()
    while (passed := (time.monotonic() - began) / (60 * minutes)) < 1:
        if (wanted := max(s for s in STAGES if s[0] <= passed)) != stage:
            stage = wanted
            batches = tasks.batches(*stage[1:])
            probe = next(unseen.batches(stage[1], 16))
        params, state, loss = train_step(optimizer, params, state, *next(batches), train_demo.lr_scale(passed))
        losses.append(float(loss))
        step += 1
        if step % 50 == 0:
            share = float(accuracy(params, *probe))
            print(f"step {step} {passed:.0%} loss {np.mean(losses[-50:]):.3f}, held out {share:.4f} right", flush=True)
            train_demo.export_weights(out, params)
    train_demo.export_weights(out, params)


def measure(folder: Path, args: argparse.Namespace) -> None:
    """Edits files alone, with and without speculation in turns, and prints tokens per second."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    edits = Edits(tokenizer, texts(heldout=True), 2)
    tasks = [edits.draw(280, 320) for _ in range(args.edits)]
    given = {"method": "ngram", "num_speculative_tokens": args.proposals}
    engines = []
    for config in (None, given):
        llm = LLM(str(folder), speculative_config=config, max_model_len=1024, prefix_caching=False)
        llm.engine.compile()
        engines.append(llm)
    tokens = np.zeros(2)
    seconds = np.zeros((2, len(tasks)))
    equal = 0
    right = 0
    for i, (prompt, answer) in enumerate(tasks):
        params = SamplingParams(temperature=args.temperature, seed=i, max_tokens=400)
        found = [[], []]
        for which in (0, 1) if i % 2 else (1, 0):
            seconds[which, i], found[which] = edit(engines[which], prompt, params, f"{i}")
            tokens[which] += len(found[which]) - 1
        equal += found[0] == found[1]
        right += found[0] == answer
    stats = engines[1].engine.stats()
    speeds = tokens / seconds.sum(axis=1)
    ratios = seconds[0] / seconds[1]
    print(f"{len(tasks)} files of 280 to 320 tokens; {equal} answers are the same with proposals; {right} as was asked")
    spread = np.quantile(ratios, (0, 0.5, 1)).round(2)
    print(f"tokens/s {speeds[0]:.0f} and {speeds[1]:.0f}: {speeds[1] / speeds[0]:.2f} x; by file {spread}")
    print(
        f"{1 + stats.spec_accepted / max(stats.spec_drafts, 1):.1f} tokens a check, "
        f"{stats.spec_accepted / max(stats.spec_proposed, 1):.0%} of proposals kept, {stats.spec_drafts} checks, "
        f"host {1e3 * engines[1].engine.pace.host_seconds:.2f} ms"
    )
    times = engines[1].engine.speculator.times
    print(
        "decode of one row, and checks of 8, 16, 32 tokens, in ms:",
        1e3 * times.decode(1),
        1e3 * times.check(1, np.array([8, 16, 32])),
    )


def edit(llm: LLM, prompt: list[int], params: SamplingParams, name: str) -> tuple[float, list[int]]:
    """Seconds from the first token of an answer to its end, and the answer."""
    llm.engine.add_request(Request(request_id=name, prompt_token_ids=prompt, params=params))
    answer: list[int] = []
    start = 0.0
    while llm.engine.has_work:
        for update in llm.engine.step():
            answer += update.token_ids
            start = start or time.perf_counter()
    return time.perf_counter() - start, answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "measure"])
    parser.add_argument("--folder", type=Path, default=Path("build/copying"), help="of the trained model")
    parser.add_argument(
        "--start", type=Path, default=ROOT / "checkpoints" / "demo", help="weights that training begins with"
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--edits", type=int, default=24)
    parser.add_argument("--proposals", type=int, default=31)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    if args.what == "train":
        train(args.folder, args.minutes, args.start)
    else:
        measure(args.folder, args)


if __name__ == "__main__":
    main()
