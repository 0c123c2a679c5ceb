"""How pictures are cut into tiles, and which tokens stand around these, against transformers' own text."""

import json

import numpy as np
import pytest
from picture_prompts import IDEFICS3, KIMI, LFM2, SMOLVLM, Texts
from PIL import Image
from transformers import Idefics3Processor, Lfm2VlProcessor, SmolVLMProcessor

from jaxserve.config import ConfigError
from jaxserve.images.layouts import LAYOUTS
from jaxserve.images.patches import Processed
from jaxserve.images.processing import ImageProcessor
from jaxserve.types import ImageTokens

NUMBERED = ImageTokens(505, 4, 2, layout="numbered_tiles")
MARKED = ImageTokens(505, 4, 2, layout="marked_tiles")
PLAIN = ImageTokens(505, 4, 2)
KINDS = {
    "idefics3": (IDEFICS3, NUMBERED),
    "smolvlm": (SMOLVLM, ImageTokens(505, 4, 3, layout="numbered_tiles")),
    "idefics3, one size": (IDEFICS3 | {"size": {"height": 30, "width": 70}}, NUMBERED),
    "smolvlm, odd": (SMOLVLM | {"size": {"longest_edge": 75}, "max_image_size": {"longest_edge": 25}}, NUMBERED),
    "lfm2": (LFM2, MARKED),
    "lfm2, whole": (LFM2 | {"do_image_splitting": False, "max_image_tokens": 30}, MARKED),
    "kimi": (KIMI, PLAIN),
    "kimi, narrow": (KIMI | {"max_patches": 300, "size": {"max_height": 18, "max_width": 18}}, PLAIN),
}


def processor_of(folder, settings, kind):
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    made = ImageProcessor.of(folder, kind)
    assert made is not None
    return made


def picture(width, height):
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8))


def tokens_of(processed, kind):
    return LAYOUTS[kind.layout](processed, kind, Texts("smolvlm" if kind.layout == "numbered_tiles" else "lfm2_vl"))


def made(tiles, frames, thumbnail=None):
    patches = np.zeros((frames * 16, 48), np.uint8)
    behind = None if thumbnail is None else Processed.of(np.zeros((np.prod(thumbnail), 48), np.uint8), (1, *thumbnail))
    return Processed.of(patches, (frames, 4, 4), tiles, behind)


@pytest.mark.parametrize("kind", [Idefics3Processor, SmolVLMProcessor])
@pytest.mark.parametrize("tiles", [(1, 1), (1, 2), (3, 1), (2, 3)])
def test_numbered_tiles(kind, tiles):
    rows, columns = tiles
    own = kind.__new__(kind)
    own.image_token, own.fake_image_token, own.image_seq_len = "<image>", "<fake_token_around_image>", 4
    own.global_image_tag = own.global_image_token = "<global-img>"
    cut = rows * columns > 1
    text = own.replace_image_token({"rows": [[rows * cut]], "cols": [[columns * cut]]}, 0)
    frames = rows * columns + cut
    assert tokens_of(made(tiles, frames), NUMBERED) == Texts("smolvlm").encode(text)


@pytest.mark.parametrize("thumbnail", [None, (2, 6)])
@pytest.mark.parametrize("tiles", [(1, 1), (1, 2), (2, 3)])
def test_marked_tiles(tiles, thumbnail):
    rows, columns = tiles
    own = Lfm2VlProcessor.__new__(Lfm2VlProcessor)
    own.image_token, own.image_thumbnail_token = "<image>", "<|img_thumbnail|>"
    own.image_start_token, own.image_end_token = "<|image_start|>", "<|image_end|>"
    whole = 4 if rows * columns == 1 else 3
    text = own._build_image_tokens(rows, columns, 4, whole, thumbnail is not None, True)
    behind = thumbnail if rows * columns > 1 else None
    assert tokens_of(made(tiles, rows * columns, behind), MARKED) == Texts("lfm2_vl").encode(text)


@pytest.mark.parametrize("name", KINDS)
def test_no_part_of_a_picture_is_larger_than_the_settings_say(name, tmp_path):
    settings, kind = KINDS[name]
    processor = processor_of(tmp_path, settings, kind)
    most = processor.most_pixels // kind.patch**2
    rng = np.random.default_rng(0)
    found = 0
    for width, height in [(1, 1), (1, 200), (200, 2), (75, 75), *rng.integers(1, 300, (60, 2)).tolist()]:
        processed = processor(picture(width, height))
        for part in processed.parts:
            assert len(part.patches) == np.prod(part.grid) <= most
            found = max(found, len(part.patches))
        count = sum(part.features(kind) for part in processed.parts)
        assert tokens_of(processed, kind).count(kind.token) == count
        low = list(processor(picture(width, height), most_pixels=256).parts)
        assert len(low) == 1
        assert low[0].grid[0] == 1
    assert found > most / 4


def test_tiles_that_the_model_cannot_read_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="max_image_size=12 "):
        assert processor_of(tmp_path, IDEFICS3 | {"max_image_size": {"longest_edge": 12}}, NUMBERED).most_pixels
    with pytest.raises(ConfigError, match="do_resize=false"):
        assert processor_of(tmp_path, IDEFICS3 | {"do_resize": False}, NUMBERED).most_pixels
    with pytest.raises(ConfigError, match="tile_size=20 "):
        assert processor_of(tmp_path, LFM2 | {"tile_size": 20}, MARKED).most_pixels


def test_published_settings_of_kimi(tmp_path):
    """They are another object with other names."""
    published = {
        "media_proc_cfg": {
            "in_patch_limit": 94, "patch_size": 4, "image_mean": [0.4, 0.5, 0.45], "image_std": [0.3, 0.25, 0.2],
            "merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 20,
        }
    }  # fmt: skip
    saved = processor_of(tmp_path, KIMI, PLAIN)
    expected = saved(picture(90, 70))
    processor = processor_of(tmp_path, published, PLAIN)
    assert processor.scaling() == saved.scaling()
    assert processor.most_pixels == saved.most_pixels
    assert processor(picture(90, 70)).digest == expected.digest
