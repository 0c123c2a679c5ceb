"""The image encoder of Qwen3-VL-2B compiled for an H200 and a TPU v6e: what it launches, and its temporaries. Nothing
runs here."""

import json

import jax
import pytest
from devices import devices_of

from jaxserve.config import EngineConfig
from jaxserve.devices.launches import launches
from jaxserve.engine.encoder_loading import abstract_encoder
from jaxserve.plan.deployment import model_plan

VISION = {
    "model_type": "qwen3_vl", "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
    "deepstack_visual_indexes": [1],
}  # fmt: skip
CONFIG = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": 151655,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "rope_theta": 5e6, "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    },
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}  # fmt: skip
PATCHES = 4096  # of one megapixel


def compiled(folder, target, depth):
    """The program for PATCHES patches of an encoder with `depth` layers, one of which has further features."""
    config = CONFIG | {"vision_config": VISION | {"depth": depth}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    settings = EngineConfig(model=str(folder), load_format="dummy", max_model_len=8192)
    plan = model_plan(settings, devices_of(target))[1]
    runner = abstract_encoder(plan)
    assert PATCHES in runner.sizes
    return runner.lower(PATCHES).compile()


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


@pytest.mark.slow
def test_on_an_h200(tmp_path):
    few, more = (compiled(tmp_path, "h200x1", depth) for depth in (2, 4))
    made = launches(more.as_text())
    layer = (len(made) - len(launches(few.as_text()))) / 2
    print(f"{layer} launches a layer", *made, sep="\n")
    assert layer <= 12
    assert few.memory_analysis().temp_size_in_bytes < 200 * 2**20  # no scores of all patches


@pytest.mark.slow
def test_on_a_v6e(tmp_path):
    program = compiled(tmp_path, "v6e-1", 2)
    assert 'custom_call_target="tpu_custom_call"' in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 400 * 2**20
