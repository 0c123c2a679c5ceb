"""The patches of pictures equal those of transformers' own processors."""

import json

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor

from jaxserve.images.processing import ImageProcessor
from jaxserve.types import ImageTokens

SHARED = {"temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PROCESSORS = {
    "Qwen2-VL": {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056},
    "Qwen3-VL": {
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    },
    "three patches": {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 3, "resample": 2},
    "GLM-4V": {
        "image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 12544, "longest_edge": 9633792},
    },
}  # fmt: skip
SIZES = [(1, 1), (28, 28), (29, 41), (5, 700), (333, 77), (640, 480), (1224, 817), (2000, 1500)]  # width, height
LOW = 512 * 512


@pytest.mark.parametrize("name", PROCESSORS)
def test_patches_of_every_size(name, tmp_path):
    given = {"patch_size": 14, "merge_size": 2} | SHARED | PROCESSORS[name]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    theirs = AutoImageProcessor.from_pretrained(str(tmp_path), backend="pil")
    ours = ImageProcessor.of(tmp_path, ImageTokens(0, given["patch_size"], given["merge_size"]))
    rng = np.random.default_rng(0)
    digests = set()
    for width, height in SIZES:
        picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        expected = theirs(picture, do_rescale=False, do_normalize=False, return_tensors="np")
        found = ours(picture)
        assert found.patches.dtype == np.uint8
        np.testing.assert_array_equal(found.patches, expected["pixel_values"])
        assert found.grid == tuple(expected["image_grid_thw"][0])
        assert len(ours(picture, LOW).patches) * given["patch_size"] ** 2 <= LOW
        digests.add(found.digest)
    assert len(digests) == len(SIZES)
