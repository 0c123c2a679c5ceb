"""Record what Hugging Face transformers answers to the prompts of tests/picture_prompts.py with a video.

Needs torch and torchvision; see README.md beside this file.
"""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import SEEDS, SMALLEST_MARGIN, load
from record_images import TOKENS, main, picture_prompts, tiny_models
from transformers import Glm4vProcessor, Glm46VProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.glm46v.video_processing_glm46v import Glm46VVideoProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

KINDS: dict[str, tuple[Any, Any]] = {
    "Qwen2VLVideoProcessor": (Qwen2VLVideoProcessor, Qwen2_5_VLProcessor),
    "Qwen3VLVideoProcessor": (Qwen3VLVideoProcessor, Qwen3VLProcessor),
    "Glm4vVideoProcessor": (Glm4vVideoProcessor, Glm4vProcessor),
    "Glm46VVideoProcessor": (Glm46VVideoProcessor, Glm46VProcessor),
}


def written(inputs: dict[str, Any], processor: Any, kind: Any) -> str:
    """The text of a video, by transformers' own processor of text and videos."""
    own = kind.__new__(kind)
    own.video_processor = processor
    own.image_token, own.video_token = "<|image|>", "<|video_pad|>"
    own.vision_start_token, own.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    return str(own.replace_video_token(inputs, 0))


def placed(prompt: list[int], text: str) -> list[int]:
    """The prompt with a video's text. Qwen3-VL was trained with marks around each frame, in the place of those around
    the video; transformers 5.24 leaves these where they are."""
    at = prompt.index(506)
    tokens = picture_prompts.Letters().encode(text)
    around = 1 if "seconds" in text and prompt[at - 1] == 507 else 0
    return [*prompt[: at - around], *tokens, *prompt[at + 1 + around :]]


@torch.inference_mode()
def greedy(model: Any, ids: torch.Tensor, types: torch.Tensor, inputs: dict[str, Any]) -> tuple[Any, Any, float]:
    model.model.rope_deltas = None
    kept = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    out = model(ids, **inputs, mm_token_type_ids=types, use_cache=True)
    tokens, logprobs, margins = [], [], []
    while True:
        last = out.logits[0, -1]
        best = torch.topk(last, 2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        logprobs.append(float(torch.log_softmax(last, -1)[tokens[-1]]))
        if len(tokens) == TOKENS:
            return np.array(tokens, np.int32), np.array(logprobs, np.float32), min(margins)
        out = model(torch.tensor([[tokens[-1]]]), **{kept: getattr(out, kept)}, use_cache=True)


def record(name: str, folder: Path) -> dict[str, np.ndarray]:
    picture_prompts.build_for_videos(name, folder)
    model = load(folder)
    settings = picture_prompts.VIDEOS[name]
    made, writer = KINDS[settings["video_processor_type"]]
    processor = made(**settings)
    count, _, rate = picture_prompts.CLIP
    video = torch.from_numpy(picture_prompts.video_of(name)).permute(0, 3, 1, 2)
    metadata = VideoMetadata(total_num_frames=count, fps=rate)
    inputs = dict(processor([video], video_metadata=[metadata], return_metadata=True, return_tensors="pt"))
    text = written(inputs, processor, writer)
    metadata = inputs.pop("video_metadata")[0]
    chosen = range(count) if metadata.frames_indices is None else metadata.frames_indices
    if writer is Qwen2_5_VLProcessor and "qwen2_5" in name:
        inputs["second_per_grid_ts"] = torch.tensor([2 / metadata.sampled_fps])
    mean, std = (torch.tensor(settings[f"image_{which}"]).repeat_interleave(2 * 16) for which in ("mean", "std"))
    numbers = ((inputs["pixel_values_videos"] * std + mean) * 255).round().to(torch.uint8).numpy()
    for seed in range(SEEDS):
        ids = torch.tensor(placed(picture_prompts.prompt_with_video(name, seed), text))[None]
        shown = 505 if name.startswith("glm") else 506
        answer, logprobs, margin = greedy(model, ids, 2 * (ids == shown).int(), inputs)
        if margin > SMALLEST_MARGIN and not {*answer.tolist()} & {*tiny_models.CASES[name].eos_token_ids, 505, 506}:
            break
    else:
        raise RuntimeError(f"{name}: no prompt among {SEEDS} is unambiguous")
    print(name, "seed", seed, "margin", margin, "grid", inputs["video_grid_thw"].tolist(), "tokens", ids.shape[1])
    return {
        "fingerprint": np.array(tiny_models.fingerprint(name)), "seed": np.array(seed), "tokens": answer,
        "logprobs": logprobs, "grid": inputs["video_grid_thw"][0].numpy(), "patches": numbers,
        "prompt": ids[0].numpy().astype(np.int32), "frames": np.array([int(i) for i in chosen]),
    }  # fmt: skip


if __name__ == "__main__":
    main(record, picture_prompts.VIDEOS, "video_{}.npz")
