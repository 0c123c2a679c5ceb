"""Layers that share keys and values of earlier layers, and layers whose heads differ: what their cache takes, where
layers lie in its pages, and what is refused."""

import jax.numpy as jnp
import pytest
from engines import make_engine

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.pipeline import LoadedPipeline
from jaxserve.execution.kv_cache import CacheLayout
from jaxserve.execution.layer_groups import LayerGroups
from jaxserve.models.config import HFConfig
from jaxserve.models.families import read_model_config
from jaxserve.scheduling.block_manager import most_pages

SHARING = "gemma4_sharing"


def gemma4(**changes):
    """A Gemma 4 of some size in bfloat16: 35 layers, of which every fifth is global."""
    types = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    values = {
        "architectures": ["Gemma4ForCausalLM"], "hidden_size": 1536, "num_hidden_layers": 35, "layer_types": types,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
        "num_kv_shared_layers": 20, "intermediate_size": 6144, "dtype": "bfloat16",
    }  # fmt: skip
    return read_model_config(HFConfig(values | changes))


def test_sharing_layers_have_no_pages():
    model = gemma4()
    assert model.kv_sources[:15] == list(range(15))
    assert model.kv_sources[15:20] == [13, 13, 13, 13, 14]
    layout = CacheLayout.of(model, 1, 2, 16, jnp.bfloat16)
    places = layout.places(model.layers)
    assert len(set(places)) == 15
    assert places[34] == places[14] != places[9]
    pages = sum(most_pages(131072, 16, layout.groups.windows, 2048))
    token = 2 * 2  # a key and a value in bfloat16
    least = 3 * 512 * token * 131072 + 12 * 256 * token * (512 + 2048)
    assert least <= pages * layout.page_bytes <= 1.05 * least


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_layers_of_two_shapes_fill_the_same_bytes(platform):
    """16 heads of 256 numbers in local layers, and 4 of 512 in global ones, which are half as large. On a TPU all are
    in parts of 128."""
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 10
    heads = {"num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True}
    model = gemma4(num_hidden_layers=60, layer_types=types, num_kv_shared_layers=0, num_attention_heads=32, **heads)
    layout = CacheLayout.of(model, model.num_kv_heads, 7, 16, jnp.bfloat16, platform)
    assert layout.array.data.shape[1:] == ((2, 16, 16, 256) if platform == "gpu" else (2, 32, 16, 128))
    assert set(zip(layout.groups.windows, layout.groups.fits, strict=True)) == {(512, 1), (None, 2)}
    size = layout.array.data.size // layout.array.data.shape[0]  # of a part of a page
    taken = set()
    for place, layer in zip(layout.places(model.layers), model.layers, strict=True):
        fit = layout.groups.fits[place.group]
        own = 2 * layer.attention.num_kv_heads * layer.attention.head_dim * 16
        assert own * fit == size
        for page in range(7):  # no two layers of a group have the same place of a page
            begin = (place.first + page * fit) * own
            assert begin + own <= layout.array.data.size
            part = (place.array, place.group, begin)
            assert part not in taken
            taken.add(part)


@pytest.mark.parametrize("stage", [range(3), range(3, 8), range(8)])
def test_groups_of_a_stage(stage):
    fits = [1, 2, 2, 1, 2, 1, 1, 2]
    groups = LayerGroups.of([None if fit == 2 else 64 for fit in fits], 4096, fits)
    own = groups.of_stage(stage)
    assert own.windows == groups.windows
    assert own.fits == groups.fits
    assert len(set(own.places)) == len(stage)
    for layer, (group, index) in zip(stage, own.places, strict=True):
        assert own.fits[group] == fits[layer]
        assert index < own.depth * own.fits[group]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be auto or bf16 .* differ in their heads .*, got int8"),
        ({"cpu_offload_gib": 1.0}, "cpu_offload_gib must be 0 for models whose layers share keys and values"),
        ({"deterministic": True}, "norms of values add in plain XLA"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode_context_parallel_size must be 1 .* share keys and values, got 2",
        ),
    ],
)
def test_what_is_refused(options, message, model_folders):
    with pytest.raises(ConfigError, match=message):
        make_engine(model_folders(SHARING), **options)


def test_pipelines_are_refused(model_folders):
    config = EngineConfig(model=str(model_folders(SHARING)), pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="pipeline_parallel_size must be 1 for models whose layers share keys"):
        LoadedPipeline.load(config, None, progress=False, static=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers=31 leaves no layer of each kind"),
        ({"num_kv_shared_layers": 36}, "num_kv_shared_layers=36 leaves no layer of each kind"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
        ({"per_layer_config": {"4": {"num_attention_heads": 4}}}, r"layer 4 has \['num_attention_heads'\]; supported"),
        ({"per_layer_config": {"35": {"head_dim": 64}}}, "per_layer_config has '35', which is no layer"),
        ({"per_layer_config": {"4": {"head_dim": 64}}}, "a rotary embedding is for heads of one size, got"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        gemma4(**changes)
