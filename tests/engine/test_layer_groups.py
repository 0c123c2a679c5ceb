"""Which layers share a block table, and what the cache of a model with windows takes."""

import jax.numpy as jnp
import pytest

from jaxserve.execution.cache_kinds import KeysAndValues
from jaxserve.execution.kv_cache import CacheLayout
from jaxserve.execution.layer_groups import LayerGroups
from jaxserve.scheduling.block_manager import most_pages


def alternating(windowed: int, window: int, layers: int) -> list[int | None]:
    """So many layers with a window, then one without, and so on."""
    return [None if (i + 1) % (windowed + 1) == 0 else window for i in range(layers)]


@pytest.mark.parametrize(
    ("windows", "longest", "of_groups", "depth"),
    [
        ([None] * 32, 4096, (None,), 32),
        ([4096] * 32, 32768, (4096,), 32),
        ([4096] * 32, 4096, (None,), 32),  # nothing is behind the window
        (alternating(1, 128, 24), 131072, (128, None), 12),  # gpt-oss 20B
        (alternating(1, 4096, 42), 8192, (4096, None), 21),  # Gemma 2 9B
        (alternating(5, 1024, 62), 131072, (1024,) * 6 + (None,), 10),  # Gemma 3 27B
        (alternating(5, 512, 26), 32768, (512,) * 6 + (None,), 4),  # Gemma 3 1B
        (alternating(3, 8192, 48), 2**20, (8192,) * 3 + (None,), 12),  # Llama 4 Scout
        ([None] + [64] * 60, 131072, (None,) + (64,) * 15, 4),  # no more than 16 groups
    ],
)
def test_groups(windows, longest, of_groups, depth):
    groups = LayerGroups.of(windows, longest)
    assert sorted(groups.windows, key=str) == sorted(of_groups, key=str)
    assert groups.depth == depth
    assert len(set(groups.places)) == len(groups.places) == len(windows)
    for window, (group, index) in zip(windows, groups.places, strict=True):
        assert groups.windows[group] == (window if window is not None and window < longest else None)
        assert 0 <= index < depth


def test_gemma_3_27b_at_its_longest():
    """62 layers of 16 heads of 128 numbers, of which 52 see 1,024 tokens: at 131,072 tokens in bfloat16 they need less
    than a fifth of what they would without windows, and no more than 1.03 times what arithmetic allows."""
    longest = 131_072
    step = 2048
    page_size = 16
    layer_token = 2 * 16 * 128 * 2  # bytes
    groups = LayerGroups.of(alternating(5, 1024, 62), longest)
    layout = CacheLayout(groups, 1, page_size, KeysAndValues(16, 128, jnp.dtype("bfloat16")))
    pages = sum(most_pages(longest, page_size, layout.groups.windows, step))
    least = layer_token * (10 * longest + 52 * (1024 + step))
    assert least <= pages * layout.page_bytes <= 1.03 * least
    assert pages * layout.page_bytes < 62 * layer_token * longest / 5
