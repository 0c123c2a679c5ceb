"""Steps of models with experts, compiled ahead of time by the real compilers for devices that are not here: no weight
of experts is dequantized, copied or gathered. With two of the layers. No kernel runs here."""

import re

import jax
import jax.numpy as jnp
import pytest
from test_host_free_steps import host_waits
from test_steps import copied_parameters, dequantized_copies, make_runner

from jaxserve.execution.step_shape import StepShape
from jaxserve.pallas_kernels.types import BlockArray, QuantArray

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "sliding_window": None,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
}
CASES = [  # those whose forms others cover run in the slow group
    pytest.param("h200x1", "mosaic_gpu", 16, "bf16", QWEN3_30B, id="h200 qwen3 bf16", marks=pytest.mark.slow),
    pytest.param("h200x1", "mosaic_gpu", 16, "int4", QWEN3_30B, id="h200 qwen3 int4"),
    pytest.param("h200x1", "mosaic_gpu", 16, "fp8", QWEN3_30B, id="h200 qwen3 fp8", marks=pytest.mark.slow),
    pytest.param("h200x1", "triton", 16, "mxfp4", GPT_OSS, id="h200 gpt-oss mxfp4"),
    pytest.param("h200x1", "mosaic_gpu", 16, "Q4_K_M", QWEN3_30B, id="h200 qwen3 Q4_K_M", marks=pytest.mark.slow),
    pytest.param("h200x8", "mosaic_gpu", 16, "int8", QWEN3_30B, id="h200x8 qwen3 int8"),
    pytest.param("v6e-4", "mosaic_tpu", 128, "bf16", MIXTRAL, id="v6e mixtral bf16", marks=pytest.mark.slow),
    pytest.param("v6e-4", "mosaic_tpu", 128, "int8", QWEN3_30B, id="v6e qwen3 int8"),  # 192 inputs on each device
    *(
        pytest.param("v6e-4", "mosaic_tpu", 128, scheme, QWEN3_30B, id=f"v6e qwen3 {scheme}", marks=pytest.mark.slow)
        for scheme in ("bf16", "int4", "fp8", "mxfp4", "nvfp4")
    ),
    pytest.param("v5e-4", "mosaic_tpu", 128, "fp8", QWEN3_30B, id="v5e qwen3 fp8", marks=pytest.mark.slow),
    *(  # 2,880 inputs
        pytest.param("v6e-4", "mosaic_tpu", 128, scheme, GPT_OSS, id=f"v6e gpt-oss {scheme}", marks=pytest.mark.slow)
        for scheme in ("bf16", "mxfp4")
    ),
    pytest.param("v5e-4", "mosaic_tpu", 128, "int8", MIXTRAL, id="v5e mixtral int8", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("target", "backend", "page_size", "scheme", "model"), CASES)
@pytest.mark.parametrize("decode", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_experts(target, backend, page_size, scheme, model, decode, tmp_path):
    runner, params = make_runner(
        tmp_path, target, backend, page_size, 2, scheme, static=target.startswith("h200") or None, **model
    )
    tokens, rows = (16, 16) if decode else (512, 32)
    shape = StepShape.of(tokens, rows, page_size, decode_only=decode)
    compiled = runner.lower(shape).compile()
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    stacks = {path: w for path, w in params.items() if "experts_" in path and len(w.shape) == 3}
    quantized = {path: w for path, w in stacks.items() if isinstance(w, QuantArray | BlockArray)}
    assert len(quantized) == (0 if scheme == "bf16" else len(stacks))
    assert dequantized_copies(text, quantized) == []
    assert copied_stacks(text, stacks) == []
    assert copied_parameters(text) == []
    assert memory.temp_size_in_bytes < 2**30
    if runner.mesh.devices.flat[0].platform in ("gpu", "cuda"):
        assert host_waits(text) == []
    if runner.mesh.size > 1:
        own = min(local(w)[1] * local(w)[2] for w in stacks.values())
        gathered = re.findall(r"= (?:\()?\w+\[([\d,]+)\]\S* all-gather", text)
        sizes = [[int(dim) for dim in dims.split(",")] for dims in gathered]
        assert all(int(jnp.prod(jnp.asarray(dims))) < 4 * own for dims in sizes), "a stack is gathered"


def local(w) -> tuple[int, ...]:
    """The shape that a device has of a stack."""
    if isinstance(w, BlockArray):  # only its outputs or experts are split
        return (*w.low.sharding.shard_shape(w.low.shape)[:-1], w.shape[-1])
    plain = w.codes if isinstance(w, QuantArray) else w
    assert isinstance(plain, jax.ShapeDtypeStruct)
    return plain.sharding.shard_shape(plain.shape)


def copied_stacks(text: str, stacks: dict) -> list[str]:
    """Instructions that make an array as large as a stack of experts, other than its place in the parameters."""
    shapes = {tuple(sorted(local(w))) for w in stacks.values()}
    found = []
    for line in text.splitlines():
        match = re.search(r"= \(?\w+\[([\d,]+)\](\S*) ([\w-]+)\(", line)
        if not match or match[3] in ("parameter", "bitcast", "get-tuple-element") or "S(1)" in match[2]:
            continue
        if tuple(sorted(map(int, match[1].split(",")))) in shapes:
            found.append(line.strip()[:200])
    return found
