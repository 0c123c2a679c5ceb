"""Answers to prompts with pictures equal those of Hugging Face transformers, recorded in tests/goldens/images."""

from pathlib import Path

import numpy as np
import pytest
from engines import generate, make_engine, request
from picture_prompts import PROCESSORS, PROMPTS, build, prompt_of
from PIL import Image
from tiny_models import fingerprint

from jaxserve.vision.processing import ImageProcessor
from jaxserve.vision.prompts import with_images

pytestmark = pytest.mark.compiles

GOLDENS = Path(__file__).parent.parent / "goldens" / "images"


def asked(engine, case, golden, slot):
    """The request with the prompt of a slot and its pictures."""
    processor = ImageProcessor.of(engine.model_folder, engine.sees.side)
    tokens, pictures = prompt_of(case, slot, int(golden[f"seed_{slot}"]))
    processed = [processor(Image.fromarray(picture)) for picture in pictures]
    tokens, images = with_images(tokens, processed, engine.sees)
    made = request(str(slot), tokens, max_tokens=len(golden[f"tokens_{slot}"]), logprobs=0)
    made.images = images
    return made


@pytest.mark.parametrize("case", PROCESSORS)
def test_tokens_and_logprobs(case, tmp_path):
    golden = np.load(GOLDENS / f"{case}.npz")
    assert str(golden["fingerprint"]) == fingerprint(case), "the weights differ from the recorded ones"
    engine = make_engine(build(case, tmp_path / "model"), tokens=24)
    for turn in ("first", "cached"):
        results = generate(engine, *(asked(engine, case, golden, slot) for slot in range(len(PROMPTS))))
        for slot, result in enumerate(results):
            assert result.token_ids == golden[f"tokens_{slot}"].tolist(), (turn, slot)
            ours = [entry.logprob for entry in result.logprobs]
            np.testing.assert_allclose(ours, golden[f"logprobs_{slot}"], atol=2e-3, err_msg=f"{turn} {slot}")
