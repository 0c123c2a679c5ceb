"""Steps of DeepSeek-V3's shape, compiled ahead of time by the real compilers for devices that are not here. With two of
the layers, one dense and one with experts. No kernel runs here."""

import math
import re

import pytest
from test_host_free_steps import host_waits
from test_steps import PAGES, cache_copies, make_runner

from jaxserve.execution.step_shape import StepShape

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "rms_norm_eps": 1e-6,
}
LAYERS = 2
# Bytes of a row in bfloat16: 576 numbers, on a TPU 640, because its tiles have 128 lanes.
CASES = [
    pytest.param("h200x8", "mosaic_gpu", 16, "bf16", 1152, id="h200x8 bf16"),
    pytest.param("h200x8", "triton", 16, "int8", 1152, id="h200x8 triton int8", marks=pytest.mark.slow),
    pytest.param("v6e-8", "mosaic_tpu", 128, "int8", 1280, id="v6e-8 int8", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("target", "backend", "page_size", "scheme", "row"), CASES)
@pytest.mark.parametrize("decode", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_latents(target, backend, page_size, scheme, row, decode, tmp_path):
    """The cache has a row per token and layer, is updated in place, and lies on every device. Only heads are split."""
    static = target.startswith("h200") or None
    runner, _ = make_runner(tmp_path, target, backend, page_size, LAYERS, scheme, static=static, **DEEPSEEK_V3)
    layout = runner.layout
    assert layout.token_bytes == LAYERS * row
    assert layout.device_page_bytes(runner.mesh) == layout.page_bytes
    shape = StepShape.of(*((64, 64) if decode else (512, 64)), page_size, decode_only=decode)
    compiled = runner.lower(shape).compile()
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    cache = PAGES * layout.page_bytes
    assert memory.alias_size_in_bytes >= cache
    assert cache_copies(text, cache // LAYERS // 2) == []
    assert memory.temp_size_in_bytes < 2**30
    assert backend == "mosaic_tpu" or host_waits(text) == []
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) <= 2 * LAYERS + 8
    up_projection = 128 * 128 * 512 // runner.mesh.size  # of a device's heads, the smallest weight that is split
    gathered = re.findall(r"= (?:\()?(?:bf16|s8)\[([\d,]+)\]\S* all-gather", text)
    assert all(math.prod(map(int, dims.split(","))) < up_projection for dims in gathered), "a weight is gathered"


@pytest.mark.slow
@pytest.mark.parametrize(("target", "page_size"), [("h200x8", 16), ("v6e-8", 128)])
def test_expanded_prompts(target, page_size, tmp_path):
    """A step of two long prompts in plain XLA with a context of 131,072 tokens. Keys and values of a block of cached
    tokens are expanded at a time, so temporaries do not grow with the context."""
    sizes = []
    for context in (8192, 131072):
        runner, _ = make_runner(tmp_path, target, "xla", page_size, LAYERS, context=context, **DEEPSEEK_V3)
        lowered = runner.lower(StepShape.of(512, 2, page_size, decode_only=False))
        assert "expanded_attention" in lowered.as_text()
        compiled = lowered.compile()
        cache = PAGES * runner.layout.page_bytes
        assert compiled.memory_analysis().alias_size_in_bytes >= cache
        assert cache_copies(compiled.as_text(), cache // LAYERS // 2) == []
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[1] < sizes[0] + 2**24
    assert sizes[1] < 2**30
