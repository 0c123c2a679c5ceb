"""Steps of Gemma 3, whose tokens of a picture see each other, compiled for an H200 and a TPU v6e: their temporaries,
and where they branch. Nothing runs here."""

import json

import jax
import pytest
from devices import devices_of

from jaxserve.config import EngineConfig
from jaxserve.engine.loading import buckets
from jaxserve.execution.programs import StepProgram
from jaxserve.models.weights import abstract_params
from jaxserve.plan.deployment import make_runner, model_plan

CONFIG = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": 262144,
    "boi_token_index": 255999, "eoi_token_index": 256000, "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
        "sliding_window": 1024, "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 1,
        "num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessorFast", "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "size": {"height": 896, "width": 896},
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200x1", "v6e-1"])
def test_steps_with_pictures(target, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    given = EngineConfig(model=str(tmp_path), load_format="dummy", max_num_seqs=16, max_model_len=8192)
    config, plan = model_plan(given, devices_of(target))
    assert plan.model.vision is not None
    runner = make_runner(config, plan, abstract_params(plan.decoder, plan.mesh))
    names = [name for name in runner.names(buckets(config, plan, None)) if isinstance(name, StepProgram)]
    largest = max(names, key=lambda name: name.shape.tokens)
    for name in (largest, min(names, key=lambda name: name.shape.tokens)):
        program = runner.lower(name).compile()
        temporaries = program.memory_analysis().temp_size_in_bytes
        conditionals = program.as_text().count(" conditional(")
        print(target, name, name.shape, f"{temporaries / 2**20:.0f} MiB, {conditionals} conditionals")
        assert temporaries < 2**30
        assert not (name.shape.decode_only and conditionals)
