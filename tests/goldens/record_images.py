"""Record what Hugging Face transformers answers to the prompts of tests/picture_prompts.py, with pictures.

Needs torch; see README.md beside this file.
"""

import argparse
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from record import NEW_TOKENS, SEEDS, SMALLEST_MARGIN, load
from transformers import (
    AutoImageProcessor,
    Gemma4ImageProcessorPil,
    Idefics3Processor,
    Lfm2VlProcessor,
    Llama4Processor,
    LlavaOnevisionProcessor,
    SmolVLMProcessor,
)

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import picture_prompts  # noqa: E402
import tiny_models  # noqa: E402

TOKENS = NEW_TOKENS // 2


def expanded(tokens: list[int], place: int, runs: list[list[int]]) -> torch.Tensor:
    """The prompt with the tokens of each picture in the place of one."""
    left = iter(runs)
    out = [one for token in tokens for one in (next(left) if token == place else [token])]
    return torch.tensor(out)[None]


# model_type -> the class that writes the texts of pictures.
WRITERS = {"idefics3": Idefics3Processor, "smolvlm": SmolVLMProcessor, "lfm2_vl": Lfm2VlProcessor}
FOR_TORCH = ("lfm2_vl", "kimi_k25")  # whose processors of pictures need torchvision


def side_of(config: dict[str, Any]) -> int:
    """Side in pixels of the squares that Pixtral's features stand for."""
    return config.get("spatial_merge_size", 1) * config["vision_config"]["patch_size"]


def options_of(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers' own processor of text and pictures adds to the settings."""
    if config["model_type"] == "internvl":
        return {"crop_to_patches": True}
    if config["model_type"] in WRITERS:
        return {"return_row_col_info": True}
    if "spatial_merge_size" not in config:
        return {}
    square = side_of(config)
    return {"patch_size": {"height": square, "width": square}}


def runs_of(inputs: dict[str, Any], processor: Any, config: dict[str, Any]) -> list[list[int]]:
    """The tokens of each picture: of Qwen and LightOnOCR as many as there are features; of Pixtral there is one more
    behind each row, and another one at the end; of InternVL and Gemma there is one before and one behind the features,
    and in Gemma 3 newlines around these; of Llama 4 there are several around each tile; of LLaVA-OneVision as many as
    there are features; others have texts around tiles."""
    if config["model_type"] in WRITERS:
        return written(inputs, processor, config)
    if config["model_type"] == "llama4":
        return [tiles_of(*shape, config) for shape in torch.as_tensor(inputs.pop("aspect_ratios")).tolist()]
    token = picture_prompts.image_token_of(config)
    if config["model_type"] == "gemma3":
        lines = picture_prompts.TEXTS["gemma3"]["\n\n"]
        begin, end = config["boi_token_index"], config["eoi_token_index"]
        return [[lines, begin, *[token] * config["mm_tokens_per_image"], end, lines]] * len(inputs["num_crops"])
    if config["model_type"].startswith("gemma4"):
        begin, end = config["boi_token_id"], config["eoi_token_id"]
        return [[begin, *[token] * count, end] for count in inputs["num_soft_tokens_per_image"].tolist()]
    if config["model_type"] == "llava_onevision":
        sizes = torch.as_tensor(inputs["image_sizes"]).tolist()
        return [[token] * features_of(height, width, processor, config) for height, width in sizes]
    if config["model_type"] == "internvl":
        tiles = torch.as_tensor(inputs.pop("num_patches")).tolist()
        return [[token + 1] + [token] * (config["image_seq_length"] * n) + [token + 2] for n in tiles]
    if "image_grid_thw" in inputs:
        return [[token] * n for n in (inputs["image_grid_thw"].prod(-1) // processor.merge_size**2).tolist()]
    sizes = (torch.as_tensor(inputs["image_sizes"]) // side_of(config)).tolist()
    if config["model_type"] == "lighton_ocr":
        return [[token] * (rows * columns) for rows, columns in sizes]
    return [(([token] * columns + [token + 1]) * rows)[:-1] + [token + 2] for rows, columns in sizes]


def joined(inputs: dict[str, Any], side: int) -> dict[str, torch.Tensor]:
    """Squares of `side` patches as one patch: what Gemma 4 Unified's image processor, which needs torchvision, adds to
    Gemma 4's."""
    patches, places = [], []
    for values, positions in zip(inputs["pixel_values"], inputs["image_position_ids"], strict=True):
        columns, rows = (positions.max(dim=0).values + 1).tolist()
        across, down = columns // side, rows // side
        patch = int((values.shape[1] // 3) ** 0.5)
        split = values[: rows * columns].reshape(down, side, across, side, patch, patch, 3)
        patches.append(split.permute(0, 2, 1, 4, 3, 5, 6).reshape(down * across, -1))
        places.append(torch.stack([torch.arange(across).repeat(down), torch.arange(down).repeat_interleave(across)], 1))
    padded = [torch.nn.utils.rnn.pad_sequence(some, batch_first=True, padding_value=-1) for some in (patches, places)]
    return dict(zip(("pixel_values", "image_position_ids"), padded, strict=True))


def features_of(height: int, width: int, processor: Any, config: dict[str, Any]) -> int:
    """The features of a picture of LLaVA-OneVision, by transformers' own function."""
    counter = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    counter.image_processor = processor
    counter.num_image_tokens = (config["vision_config"]["image_size"] // config["vision_config"]["patch_size"]) ** 2
    counter.vision_aspect_ratio = config["vision_aspect_ratio"]
    return counter._get_number_of_features(height, width, processor.size["height"], processor.size["width"])


def resized(pictures: torch.Tensor, size: Any, resample: Any) -> torch.Tensor:
    """Pictures [pictures, colours, height, width] of another size, by Pillow. transformers resizes those of Llama 4
    with torchvision, whose results differ in some numbers by a step or two of 255."""
    shape = size.width, size.height
    made = [Image.fromarray(one.permute(1, 2, 0).numpy()).resize(shape, resample) for one in pictures]
    return torch.from_numpy(np.stack([np.asarray(one) for one in made])).permute(0, 3, 1, 2)


def tiles_of(rows: int, columns: int, config: dict[str, Any]) -> list[int]:
    """The tokens of a picture of Llama 4, by transformers' own function."""
    vision = config["vision_config"]
    features = round((vision["image_size"] // vision["patch_size"] * vision.get("pixel_shuffle_ratio", 0.5)) ** 2)
    text = Llama4Processor._prompt_split_image(None, (rows, columns), features)
    ids = picture_prompts.TEXTS["llama4"] | {"<|patch|>": config["image_token_index"]}
    return [ids[one] for one in re.findall(r"<\|\w+\|>", text)]


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
    return [picture_prompts.Texts(config["model_type"]).encode(text) for text in texts]


@torch.inference_mode()
def greedy(model: Any, ids: torch.Tensor, inputs: dict[str, Any], image_token: int) -> tuple[Any, Any, Any, float]:
    """Logits of the prompt's last position, tokens, their log-probabilities, and the smallest margin."""
    parameters = inspect.signature(model.forward).parameters
    types = {name: (ids == image_token).int() for name in ("token_type_ids", "mm_token_type_ids") if name in parameters}
    kept = "cache" if "cache" in parameters else "past_key_values"
    masks = {}
    if model.config.model_type == "gemma4_unified":  # whose `generate` makes other masks than `forward`
        embedded = model.get_input_embeddings()(ids)
        given = model.config, embedded, None, None, None
        masks = {
            "attention_mask": model.create_masks_for_generate(*given, mm_token_type_ids=types["mm_token_type_ids"])
        }
    out = model(ids, **inputs, **types, **masks, use_cache=True)
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
    if case.config["model_type"] == "gemma4_unified":  # see `joined`
        processor = Gemma4ImageProcessorPil(**picture_prompts.PROCESSORS[name])
    else:
        processor = AutoImageProcessor.from_pretrained(folder, backend=backend)
    if case.config["model_type"] == "llama4":
        processor.resize = resized
    image_token = picture_prompts.image_token_of(case.config)
    content: dict[str, np.ndarray] = {"fingerprint": np.array(tiny_models.fingerprint(name))}
    for slot in range(len(picture_prompts.PROMPTS)):
        for seed in range(SEEDS):
            tokens, pictures = picture_prompts.prompt_of(name, slot, seed)
            opened = [Image.fromarray(one) for one in pictures]
            inputs = dict(processor(opened, return_tensors="pt", **options_of(case.config)))
            inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
            runs = runs_of(inputs, processor, case.config)
            counts = [run.count(image_token) for run in runs]
            ids = expanded(tokens, picture_prompts.place_of(case.config), runs)
            if hasattr(model, "model"):
                model.model.rope_deltas = None
            if case.config["model_type"] == "gemma4_unified":
                inputs |= joined(inputs, processor.pooling_kernel_size)
            for unread in ("num_crops", "num_soft_tokens_per_image"):
                inputs.pop(unread, None)
            logits, answer, logprobs, margin = greedy(model, ids, inputs, image_token)
            if margin > SMALLEST_MARGIN and not {*answer.tolist()} & {*case.eos_token_ids, image_token}:
                break
        else:
            raise RuntimeError(f"{name}: no prompt {slot} among {SEEDS} is unambiguous")
        content |= {f"seed_{slot}": np.array(seed), f"logits_{slot}": logits, f"tokens_{slot}": answer}
        content |= {f"logprobs_{slot}": logprobs, f"counts_{slot}": np.array(counts, np.int32)}
        print(name, slot, "seed", seed, "margin", margin, "features", counts, "tokens", len(set(answer.tolist())))
    return content


def main(
    record: Callable[[str, Path], dict[str, np.ndarray]] = record,
    names: Iterable[str] = picture_prompts.PROCESSORS,
    file: str = "{}.npz",
) -> None:
    """Records the named cases of the command line, or all. file: the form of their files' names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="all, if none is named")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in parser.parse_args().cases or names:
        with tempfile.TemporaryDirectory() as folder:
            np.savez_compressed(HERE / "images" / file.format(name), **record(name, Path(folder)))


if __name__ == "__main__":
    main()
