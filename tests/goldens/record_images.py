"""Record what Hugging Face transformers answers to the prompts of tests/picture_prompts.py, with pictures.

Needs torch; see README.md beside this file.
"""

import argparse
import inspect
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from record import NEW_TOKENS, SEEDS, SMALLEST_MARGIN, load
from transformers import AutoImageProcessor, Idefics3Processor, Lfm2VlProcessor, SmolVLMProcessor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import picture_prompts  # noqa: E402
import tiny_models  # noqa: E402

TOKENS = NEW_TOKENS // 2


def expanded(tokens: list[int], image_token: int, runs: list[list[int]]) -> torch.Tensor:
    """The prompt with the tokens of each picture in the place of one."""
    left = iter(runs)
    out = [one for token in tokens for one in (next(left) if token == image_token else [token])]
    return torch.tensor(out)[None]


# model_type -> the class that writes the texts of pictures.
WRITERS = {"idefics3": Idefics3Processor, "smolvlm": SmolVLMProcessor, "lfm2_vl": Lfm2VlProcessor}
FOR_TORCH = ("lfm2_vl", "kimi_k25")  # whose processors of pictures need torchvision


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers' own processor of text and pictures adds to the settings."""
    if config["model_type"] in WRITERS:
        return {"return_row_col_info": True}
    if "spatial_merge_size" not in config:
        return {}
    square = config["spatial_merge_size"] * config["vision_config"]["patch_size"]
    return {"patch_size": {"height": square, "width": square}}


def runs_of(inputs: dict[str, Any], processor: Any, config: dict[str, Any]) -> list[list[int]]:
    """The tokens of each picture: of Qwen as many as there are features; of Pixtral there is one more behind each row,
    and another one at the end."""
    token = config["image_token_id"]
    if config["model_type"] in WRITERS:
        return written(inputs, processor, config)
    if "image_grid_thw" in inputs:
        return [[token] * n for n in (inputs["image_grid_thw"].prod(-1) // processor.merge_size**2).tolist()]
    square = config["spatial_merge_size"] * config["vision_config"]["patch_size"]
    sizes = (torch.as_tensor(inputs["image_sizes"]) // square).tolist()
    return [(([token] * columns + [token + 1]) * rows)[:-1] + [token + 2] for rows, columns in sizes]


def written(inputs: dict[str, Any], processor: Any, config: dict[str, Any]) -> list[list[int]]:
    """The tokens of the texts that transformers' own processor of text and pictures writes. Takes from the inputs what
    the model does not read."""
    kind = WRITERS[config["model_type"]]
    own = kind.__new__(kind)
    own.image_processor = processor
    own.image_token = "<image>"
    own.fake_image_token = "<fake_token_around_image>"
    own.global_image_tag = own.global_image_token = "<global-img>"
    own.image_start_token, own.image_end_token, own.image_thumbnail_token = (
        f"<|{name}|>" for name in ("image_start", "image_end", "img_thumbnail")
    )
    if "scale_factor" in config:
        side = inputs["pixel_values"].shape[-1] // config["vision_config"]["patch_size"] // config["scale_factor"]
        own.image_seq_len = side**2
    names = [key for key in ("rows", "cols", "image_rows", "image_cols", "image_sizes") if key in inputs]
    taken = {key: inputs.pop(key) for key in names}
    count = len(np.ravel(taken[names[0]]))
    texts = [own.replace_image_token(taken, i, use_image_special_tokens=True) for i in range(count)]
    return [picture_prompts.Texts().encode(text) for text in texts]


@torch.inference_mode()
def greedy(model: Any, ids: torch.Tensor, inputs: dict[str, Any], image_token: int) -> tuple[Any, Any, Any, float]:
    """Logits of the prompt's last position, tokens, their log-probabilities, and the smallest margin."""
    types = (ids == image_token).int()
    kept = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    out = model(ids, **inputs, mm_token_type_ids=types, use_cache=True)
    logits = out.logits[0, -1].numpy().copy()
    tokens, logprobs, margins = [], [], []
    while True:
        last = out.logits[0, -1]
        best = torch.topk(last, 2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        logprobs.append(float(torch.log_softmax(last, -1)[tokens[-1]]))
        if len(tokens) == TOKENS:
            return logits, np.array(tokens, np.int32), np.array(logprobs, np.float32), min(margins)
        out = model(torch.tensor([[tokens[-1]]]), **{kept: getattr(out, kept)}, use_cache=True)


def record(name: str, folder: Path) -> dict[str, np.ndarray]:
    case = tiny_models.CASES[name]
    picture_prompts.build(name, folder)
    model = load(folder)
    backend = "torchvision" if case.config["model_type"] in FOR_TORCH else "pil"
    processor = AutoImageProcessor.from_pretrained(folder, backend=backend)
    image_token = case.config["image_token_id"]
    content: dict[str, np.ndarray] = {"fingerprint": np.array(tiny_models.fingerprint(name))}
    for slot in range(len(picture_prompts.PROMPTS)):
        for seed in range(SEEDS):
            tokens, pictures = picture_prompts.prompt_of(name, slot, seed)
            opened = [Image.fromarray(one) for one in pictures]
            inputs = dict(processor(opened, return_tensors="pt", **options_of(case.config)))
            runs = runs_of(inputs, processor, case.config)
            counts = [run.count(image_token) for run in runs]
            ids = expanded(tokens, image_token, runs)
            model.model.rope_deltas = None
            logits, answer, logprobs, margin = greedy(model, ids, inputs, image_token)
            if margin > SMALLEST_MARGIN and not {*answer.tolist()} & {*case.eos_token_ids, image_token}:
                break
        else:
            raise RuntimeError(f"{name}: no prompt {slot} among {SEEDS} is unambiguous")
        content |= {f"seed_{slot}": np.array(seed), f"logits_{slot}": logits, f"tokens_{slot}": answer}
        content |= {f"logprobs_{slot}": logprobs, f"counts_{slot}": np.array(counts, np.int32)}
        print(name, slot, "seed", seed, "margin", margin, "features", counts, "tokens", len(set(answer.tolist())))
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="all, if none is named")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in parser.parse_args().cases or picture_prompts.PROCESSORS:
        with tempfile.TemporaryDirectory() as folder:
            np.savez_compressed(HERE / "images" / f"{name}.npz", **record(name, Path(folder)))


if __name__ == "__main__":
    main()
