"""Steps of dense families that differ from Llama, compiled ahead of time at their true sizes: how much a layer launches
on a GPU where fused kernels do not know an operation, and that no weight is copied."""

import pytest
from test_launches import SHAPES
from test_steps import make_runner

from jaxserve.devices.launches import count, describe
from jaxserve.scheduling.step_plan import Sampler

GEMMA3_27B = {
    "architectures": ["Gemma3ForCausalLM"], "hidden_size": 5376, "intermediate_size": 21504, "num_key_value_heads": 16,
    "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024, "vocab_size": 262208, "rope_theta": 1e6,
    "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip
PYTHIA_7B = {
    "architectures": ["GPTNeoXForCausalLM"], "intermediate_size": 16384, "num_key_value_heads": 32, "rotary_pct": 0.25,
    "hidden_act": "gelu", "vocab_size": 50432, "rms_norm_eps": None, "layer_norm_eps": 1e-5,
}  # fmt: skip
OLMO2_7B = {
    "architectures": ["Olmo2ForCausalLM"], "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 100352,
}  # fmt: skip
PHI3_MINI = {
    "architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "num_key_value_heads": 32, "intermediate_size": 8192,
    "vocab_size": 32064, "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.0] * 48},
}  # fmt: skip
MODELS = {"gemma3": GEMMA3_27B, "neox": PYTHIA_7B, "olmo2": OLMO2_7B, "phi3": PHI3_MINI}
SMALLEST = 16 * 2**20  # bytes of the smallest matrix of these models, and more than a step's own arrays take


def compiled(folder, name: str, target: str, layers: int):
    backend, page_size = ("mosaic_gpu", 16) if target.startswith("h200") else ("mosaic_tpu", 128)
    runner, _ = make_runner(folder, target, backend, page_size, layers, **MODELS[name])
    return runner.lower(runner.programs.choose(SHAPES["decode"], Sampler.GREEDY, 1, scores=False)).compile()


# Llama takes 9 launches a layer on one device.
@pytest.mark.parametrize(
    ("name", "target", "most"),
    [
        ("gemma3", "h200x1", 13),
        pytest.param("neox", "h200x1", 10, marks=pytest.mark.slow),
        pytest.param("olmo2", "h200x1", 16, marks=pytest.mark.slow),
        pytest.param("phi3", "h200x1", 12, marks=pytest.mark.slow),  # of which 3 pad heads of 96
        pytest.param("gemma3", "h200x8", 16, marks=pytest.mark.slow),
        pytest.param("neox", "h200x8", 14.5, marks=pytest.mark.slow),
        pytest.param("olmo2", "h200x8", 23, marks=pytest.mark.slow),
    ],
)
def test_launches_of_a_layer(name, target, most, tmp_path):
    few, more = (compiled(tmp_path, name, target, layers) for layers in (2, 4))
    found = count(few.as_text(), more.as_text(), layers=2)
    print(f"\n{name} {target}: {describe(found)}")
    assert found.per_layer <= most, describe(found)
    grown = more.memory_analysis().temp_size_in_bytes - few.memory_analysis().temp_size_in_bytes
    assert grown < SMALLEST, f"two layers more take {grown} bytes of temporaries more"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "neox", "phi3"])
def test_compiles_for_tpus(name, tmp_path):
    """A TPU's one program of a bucket can also filter and draw, which takes up to four arrays of a device's logits."""
    devices = 4
    width = 4  # bytes of a float32
    logits = SHAPES["decode"].rows * MODELS[name]["vocab_size"] * width // devices
    assert compiled(tmp_path, name, f"v6e-{devices}", 2).memory_analysis().temp_size_in_bytes < SMALLEST + 4 * logits
