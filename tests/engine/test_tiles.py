"""Pictures that are split into tiles: how Llama 4 splits them, which tokens stand around tiles, and what is made of
their features. `test_images` compares answers with those of transformers."""

import numpy as np
import pytest
from picture_prompts import Texts

from jaxserve.execution.image_packing import PADDING, Frame, pack
from jaxserve.execution.mixing_encoder import NEWLINE, mixture
from jaxserve.images.area import area_of, most_features
from jaxserve.images.layouts import tokens_of
from jaxserve.images.llama4 import canvas_for, canvases, within
from jaxserve.images.patches import Processed
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec
from jaxserve.models.vision.spec import EncoderConfig
from jaxserve.types import Area, ImageTokens

IDS = {"<|image|>": 1, "<|image_start|>": 2, "<|image_end|>": 3, "<|tile_x_separator|>": 4, "<|tile_y_separator|>": 5}
TEXTS = dict(zip(("begin", "end", "beside", "below"), [*IDS][1:], strict=True))
LLAMA4 = ImageTokens(9, 4, 2, layout="tiles", texts=TEXTS, placeholder="<|image|>")


@pytest.mark.parametrize(
    ("tiles", "expected"),
    [
        ((1, 1), [2, 1, 9, 9, 3]),
        ((2, 2), [2, 9, 9, 4, 9, 9, 5, 9, 9, 4, 9, 9, 5, 1, 9, 9, 3]),
        ((1, 3), [2, 9, 9, 4, 9, 9, 4, 9, 9, 5, 1, 9, 9, 3]),
    ],
)
def test_tokens_around_tiles(tiles, expected):
    count = tiles[0] * tiles[1]
    picture = Processed(np.zeros((0, 1)), (count + (count > 1), 2, 4), b"", tiles)
    assert tokens_of(picture, LLAMA4, Texts("llama4", IDS)) == expected


def test_canvases_have_the_order_of_shapes():
    expected = [(224, 1120), (1120, 224), (224, 896), (448, 448), (224, 224), (896, 224), (224, 672), (672, 224)]
    assert canvases(5, 224).tolist() == [list(size) for size in [*expected, (224, 448), (448, 224)]]


@pytest.mark.parametrize(
    ("size", "fills", "expected"),
    [
        ((200, 300), False, (224, 448)),  # grows the least, with the least left
        ((200, 300), True, (448, 672)),
        ((100, 100), False, (224, 224)),
        ((3000, 3000), False, (448, 448)),  # nothing is as large; it shrinks the least
        ((300, 3000), False, (224, 1344)),
    ],
)
def test_the_canvas_of_a_picture(size, fills, expected):
    assert canvas_for(size, canvases(6, 224), fills=fills) == expected


def test_a_picture_within_another_size_keeps_its_shape():
    assert within((200, 300), (450, 200)) == (133, 200)
    assert within((800, 600), (450, 1300)) == (450, 337)
    assert within((1, 900), (336, 336)) == (1, 336)


def test_areas():
    """As many tokens as transformers' own function counts for these pictures, tiles of 384 pixels and 27 features."""
    assert area_of((384, 384), (1, 1), 27, 9) == Area(1, 0, 0, 27, 27, 27, 27)
    assert area_of((300, 384), (1, 1), 27, 9) == Area(1, 3, 0, 21, 27, 21, 27)
    assert area_of((1500, 2000), (5, 6), 27, 9) == Area(6, 7, 0, 121, 162, 70, 93)
    for size in ((384, 384), (1500, 2000), (2000, 2000), (3000, 3000)):
        area = area_of(size, (6, 6), 27, 9)
        assert 27**2 + area.rows * (area.columns + 1) <= most_features(27, 9, 36)


def test_mixed_features():
    """Of two tiles of 2 x 2 features side by side, which lack the last column of all; then half as wide."""
    sources, shares = mixture(Area(2, 0, 0, 2, 3, 2, 3), 2)
    assert shares.sum(axis=1).tolist() == [1] * 4 + [1, 1, 1, 0] * 2
    places = np.where(shares.any(axis=1), sources[np.arange(len(sources)), shares.argmax(axis=1)], NEWLINE)
    assert places.tolist() == [0, 1, 2, 3, 4, 5, 8, NEWLINE, 6, 7, 10, NEWLINE]
    values = np.array([0.0] * 4 + [1, 2, 5, 6, 3, 4, 7, 8])  # of the grid [[1, 2, 3, 4], [5, 6, 7, 8]]
    sources, shares = mixture(Area(2, 0, 0, 2, 4, 1, 2), 2)
    assert (values[sources] * shares).sum(axis=1).tolist() == [0, 0, 0, 0, 3.5, 5.5, 0]


def test_the_class_token_is_behind_its_frame():
    layer = LayerSpec(attention=AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=4), mlp=MLPSpec(size=4))
    config = EncoderConfig(
        hidden_size=4, patch_shape=(3, 1, 1), layers=(layer,), table=2, class_token="last", side=2, projector=(),
        out_size=4,
    )  # fmt: skip
    frames = [Frame(np.full((4, 3), i, np.uint8), (2, 2), np.array([i], np.int32)) for i in (7, 8)]
    patches, targets = pack(config, frames, 20, 99)
    assert patches.picture.tolist() == [0] * 5 + [PADDING] * 3 + [1] * 5 + [PADDING] * 7
    assert targets.tolist() == [7, 99, 8, 99, 99]
    assert patches.values[:, 0].tolist() == [7] * 4 + [0] * 4 + [8] * 4 + [0] * 8
    assert patches.place[:6].tolist() == [[1, 1], [1, 2], [2, 1], [2, 2], [0, 0], [0, 0]]
    own = patches.corner[np.arange(20), patches.share.argmax(axis=1)]
    assert own[patches.picture >= 0].tolist() == [0, 1, 2, 3, 4] * 2
