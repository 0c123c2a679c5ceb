"""Record, or with --check compare, what Hugging Face transformers computes on the checkpoints of tests/tiny_models.py.

Needs torch; see README.md beside this file.
"""

import argparse
import inspect
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import dense_models  # noqa: E402
import tiny_models  # noqa: E402

NEW_TOKENS = 64
LAST_POSITIONS = 3
SMALLEST_MARGIN = 2e-3
SEEDS = 200
LOGITS_ATOL = 1e-4
# Llama 4 with images of transformers 5.24 reads this from what its language model returns, which does not have it.
MoeCausalLMOutputWithPast.image_outputs = None


@dataclass(frozen=True)
class Greedy:
    logits: np.ndarray  # [<=3, vocab], the prompt's last positions
    tokens: np.ndarray  # [64]
    logprobs: np.ndarray  # [64], of each token when it was chosen
    margin: float  # the smallest distance between the best two logits


def class_of(folder: Path) -> Any:
    """The class that config.json names. transformers has no automatic class for some of its models."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name, AutoModelForCausalLM)


def load(folder: Path) -> PreTrainedModel:
    model, info = class_of(folder).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {kind: names for kind, names in info.items() if names}
    if problems:
        raise RuntimeError(f"the checkpoint in {folder} does not fit the model: {problems}")
    return model.eval()


def written_shapes(model: PreTrainedModel, case: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors which save_pretrained writes, in the names of the case's file."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            names = list(file.keys())
            return {dense_models.as_in_file(case, name): tuple(file.get_slice(name).get_shape()) for name in names}


def note_shapes(name: str, folder: Path) -> None:
    """Finds out what a dense case's tensors are called, from a model of its config."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_models.CASES[name].config))
    config = AutoConfig.from_pretrained(folder)
    kind = class_of(folder)
    model = AutoModelForCausalLM.from_config(config) if kind is AutoModelForCausalLM else kind(config)
    dense_models.recorded[name] = written_shapes(model, name)


def check_manifest(model: PreTrainedModel, name: str) -> None:
    """Our names and shapes are those which save_pretrained writes."""
    difference = written_shapes(model, name).items() ^ tiny_models.shapes_of(name).items()
    if difference:
        raise RuntimeError(f"manifest and save_pretrained differ: {sorted(difference)}")


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: np.ndarray) -> Greedy:
    """Plain greedy decoding with the KV cache, whatever token comes."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    # Bamba takes every token that comes alone for the first, unless it is given the position.
    parameters = inspect.signature(model.forward).parameters
    takes_positions = "position_ids" in parameters
    kept = "cache" if "cache" in parameters else "past_key_values"
    out = model(ids, use_cache=True)
    logits = out.logits[0, -LAST_POSITIONS:].numpy().copy()
    tokens = []
    logprobs = []
    margins = []
    while True:
        last = out.logits[0, -1]
        best = torch.topk(last, 2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        logprobs.append(float(torch.log_softmax(last, -1)[tokens[-1]]))
        if len(tokens) == NEW_TOKENS:
            return Greedy(logits, np.array(tokens, np.int32), np.array(logprobs, np.float32), min(margins))
        positions = {"position_ids": torch.tensor([[len(prompt) + len(tokens) - 1]])} if takes_positions else {}
        before = {kept: getattr(out, kept)}
        out = model(torch.tensor([[tokens[-1]]]), **before, use_cache=True, **positions)


@torch.inference_mode()
def check_generate(model: PreTrainedModel, prompt: np.ndarray, tokens: np.ndarray, eos: tuple[int, ...]) -> None:
    """generate() with the end-of-sequence tokens suppressed gives the same tokens."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    settings = GenerationConfig(
        do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, eos_token_id=list(eos), pad_token_id=0
    )
    made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    if made[0, len(prompt) :].tolist() != tokens.tolist():
        raise RuntimeError("model.generate and the plain greedy loop disagree")


def make_prompt(name: str, slot: int, seed: int) -> np.ndarray:
    """Random ordinary tokens (no special ones)."""
    case = tiny_models.CASES[name]
    low = len(tiny_models.SPECIAL_TOKENS)
    raw = tiny_models.stream(name, "prompt", slot, seed).random_raw(case.prompt_lengths[slot])
    return (low + raw % np.uint64(case.text["vocab_size"] - low)).astype(np.int32)


@torch.inference_mode()
def ended(model: PreTrainedModel, prompt: np.ndarray, end: int) -> np.ndarray:
    """Log-probabilities of a prompt's tokens behind the first, with tokens that end a text among them, which n-grams do
    not reach across. They are the same with a cache as without one."""
    ids = torch.from_numpy(prompt.astype(np.int64))
    ids[dense_models.ENDED] = end
    found = torch.log_softmax(model(ids[None], use_cache=False).logits[0], -1)[:-1].gather(1, ids[1:, None])[:, 0]
    cache, cached = {}, []
    for at, token in enumerate(ids):
        out = model(token.view(1, 1), use_cache=True, position_ids=torch.tensor([[at]]), **cache)
        cache = {"cache": out.cache}
        cached.append(out.logits[0, 0])
    again = torch.log_softmax(torch.stack(cached[:-1]), -1).gather(1, ids[1:, None])[:, 0]
    if not torch.allclose(found, again, atol=LOGITS_ATOL):
        raise RuntimeError("log-probabilities with and without a cache differ")
    return found.numpy()


@torch.inference_mode()
def few_kept(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Log-probabilities of a Doge's prompt behind its first token, of which attention keeps FEW tokens. All tokens
    differ: where a token comes twice, both have the same bias in the first layer, and torch.topk takes any of them.
    transformers then computes something else with a cache than without one."""
    prompt = np.random.default_rng(0).permutation(np.arange(5, 512))[:130].astype(np.int32)
    for layer in model.model.layers:
        layer.self_attn.keep_window_size = dense_models.FEW
    ids = torch.from_numpy(prompt.astype(np.int64))
    found = torch.log_softmax(model(ids[None], use_cache=False).logits[0], -1)[:-1].gather(1, ids[1:, None])[:, 0]
    return {"few_prompt": prompt, "few": found.numpy()}


def record(name: str, folder: Path) -> dict[str, np.ndarray]:
    """The content of the case's file. Of each prompt the first seed is taken whose greedy path is unambiguous for any
    float32 implementation and free of end-of-sequence tokens, and of tokens for pictures, which some models embed
    like others."""
    case = tiny_models.CASES[name]
    if name in tiny_models.OTHER_CASES:
        note_shapes(name, folder)
    model = load(tiny_models.build(name, folder))
    check_manifest(model, name)
    content: dict[str, np.ndarray] = {"fingerprint": np.array(tiny_models.fingerprint(name))}
    if name in dense_models.recorded:
        content["manifest"] = np.array(json.dumps(dense_models.recorded[name]))
    seeds = []
    margins = []
    for slot in range(len(case.prompt_lengths)):
        for seed in range(SEEDS):
            prompt = make_prompt(name, slot, seed)
            result = greedy(model, prompt)
            unwanted = set(result.tokens.tolist()) & set(case.eos_token_ids)
            unwanted |= {*prompt.tolist(), *result.tokens.tolist()} & {case.config.get("image_token_id")}
            if result.margin > SMALLEST_MARGIN and not unwanted:
                break
        else:
            raise RuntimeError(f"{name}: no prompt of {case.prompt_lengths[slot]} tokens among {SEEDS} is unambiguous")
        check_generate(model, prompt, result.tokens, case.eos_token_ids)
        content |= {f"prompt_{slot}": prompt, f"logits_{slot}": result.logits}
        content |= {f"tokens_{slot}": result.tokens, f"logprobs_{slot}": result.logprobs}
        seeds.append(seed)
        margins.append(result.margin)
    if "ple_layer_ids" in case.text:
        content["ended"] = ended(model, content["prompt_3"], case.eos_token_ids[0])
    if name == "doge_hub":
        content |= few_kept(model)
    return content | {"seed": np.array(seeds, np.int32), "margin": np.array(margins, np.float32)}


def check(name: str, folder: Path) -> list[str]:
    """How a fresh run differs from the case's file; empty if it does not."""
    path = HERE / f"{name}.npz"
    if not path.exists():
        return ["no recorded file"]
    golden = np.load(path)
    if str(golden["fingerprint"]) != tiny_models.fingerprint(name):
        return ["the config or the weights are not those that were recorded"]
    model = load(tiny_models.build(name, folder))
    problems = []
    for slot in range(len(tiny_models.CASES[name].prompt_lengths)):
        prompt = golden[f"prompt_{slot}"]
        if not np.array_equal(prompt, make_prompt(name, slot, int(golden["seed"][slot]))):
            problems.append(f"prompt {slot} is not the one its seed makes")
        result = greedy(model, prompt)
        if not np.array_equal(result.tokens, golden[f"tokens_{slot}"]):
            problems.append(f"prompt {slot}: tokens differ")
        for key, fresh in ((f"logits_{slot}", result.logits), (f"logprobs_{slot}", result.logprobs)):
            distance = float(np.abs(fresh - golden[key]).max())
            if not distance <= LOGITS_ATOL:
                problems.append(f"{key} differ by {distance:.2e}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="all, if none is named")
    parser.add_argument(
        "--check", action="store_true", help="compare a fresh run with the recorded files; write nothing"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    failed = False
    for name in arguments.cases or tiny_models.CASES:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.check:
                problems = check(name, Path(folder))
                failed |= bool(problems)
                print(f"{name}: {'; '.join(problems) or 'ok'}", flush=True)
            else:
                content = record(name, Path(folder))
                np.savez_compressed(HERE / f"{name}.npz", **content)
                distinct = [len(set(content[f"tokens_{i}"].tolist())) for i in range(len(content["seed"]))]
                print(f"{name}: seeds {content['seed']}, margins {content['margin']}, distinct {distinct}", flush=True)
    unknown = {path.stem for path in HERE.glob("*.npz")} - set(tiny_models.CASES)
    if unknown:
        print(f"files of no case: {sorted(unknown)}")
    if not arguments.check:
        versions = {"numpy": np.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        (HERE / "VERSIONS.json").write_text(json.dumps(versions, indent=2) + "\n")
    return int(failed or (arguments.check and bool(unknown)))


if __name__ == "__main__":
    raise SystemExit(main())
