"""Steps of Gemma 3, whose tokens of a picture see each other, compiled for an H200 and a TPU v6e: their temporaries,
and where they branch. Nothing runs here."""

import json
import re
from dataclasses import replace

import command_buffers
import jax
import pytest
from devices import devices_of
from test_steps import PAGES, cache_copies

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
BRANCH = r' conditional\(.*op_name="[^"]*/attention/cond"'


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)


def runner_of(folder, target, config):
    """A runner, and the names of the largest step with prompts, and of the smallest of decodes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    given = EngineConfig(model=str(folder), load_format="dummy", max_num_seqs=16, max_model_len=8192)
    config, plan = model_plan(given, devices_of(target))
    runner = make_runner(config, plan, abstract_params(plan.decoder, plan.mesh))
    page = plan.one_page
    runner.set_cache_size(replace(page, num_pages=PAGES), -(-plan.longest // page.page_size))
    names = [name for name in runner.names(buckets(config, plan, None)) if isinstance(name, StepProgram)]
    chosen = max(names, key=lambda name: name.shape.tokens), min(names, key=lambda name: name.shape.tokens)
    assert [name.shape.decode_only for name in chosen] == [False, True]
    return runner, chosen


def compiled(folder, target, config):
    """Numbers of a layer's pages, and the programs."""
    runner, names = runner_of(folder, target, config)
    elements = PAGES * runner.layout.page_bytes // 4
    return elements, [runner.lower(name).compile() for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200x1", "v6e-1"])
def test_steps_with_pictures(target, tmp_path):
    """Steps with prompts branch once a layer, to plain XLA for pictures, and copy no pages for that. Decodes do not."""
    text = CONFIG["text_config"] | {"architectures": ["Gemma3ForCausalLM"]}
    (elements, seeing), (_, blind) = (
        compiled(tmp_path / name, target, one) for name, one in (("seeing", CONFIG), ("blind", text))
    )
    found = [[len(re.findall(BRANCH, program.as_text())) for program in programs] for programs in (seeing, blind)]
    assert found == [[2, 0], [0, 0]]  # of two layers
    assert [cache_copies(program.as_text(), elements) for program in seeing] == [[], []]
    of_both = zip(seeing, blind, strict=True)
    more = [one.memory_analysis().temp_size_in_bytes - two.memory_analysis().temp_size_in_bytes for one, two in of_both]
    print(target, [f"{size / 2**20:.1f} MiB of temporaries more" for size in more])
    assert more[0] < 2**24
    assert more[1] < 2**17


@pytest.mark.slow
def test_the_branches_are_in_the_command_buffer(tmp_path):
    """The host waits for no predicate."""
    runner, (prompts, _) = runner_of(tmp_path / "model", "h200x1", CONFIG)
    text, thunks = command_buffers.compiled(runner, prompts, tmp_path)
    assert len(re.findall(BRANCH, text)) == 2
    assert thunks == ["kCommandBuffer"]
