"""DeepSeek models whose matrices are all quantized, kv_b among them, of which the absorbed halves are made."""

import numpy as np
import pytest
import quantized_forms
from engines import generate, make_engine, request

SIZES = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 300, "hidden_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64,
    "qk_nope_head_dim": 40, "qk_rope_head_dim": 16, "v_head_dim": 24, "intermediate_size": 192,
    "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.7,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu", "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "tie_word_embeddings": False, "attention_bias": False,
    "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
PROMPTS = [np.random.default_rng(5).integers(3, 300, n).tolist() for n in (3, 90, 41)]


def tensors():
    """Random weights under the hub's names; blocks of 128 x 128 end within heads of kv_b and within matrices."""
    rng = np.random.default_rng(17)
    c = SIZES
    hidden = c["hidden_size"]
    heads = c["num_attention_heads"]
    rank = c["kv_lora_rank"]
    nope = c["qk_nope_head_dim"]
    rope = c["qk_rope_head_dim"]
    value = c["v_head_dim"]

    def matrix(*shape):
        return (rng.standard_normal(shape) * 1.4 / shape[-1] ** 0.5).astype(np.float32)

    def norm(size):
        return rng.uniform(0.6, 1.4, size).astype(np.float32)

    def mlp(prefix, size):
        shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
        return [(f"{prefix}.{name}_proj.weight", matrix(*shape)) for name, shape in shapes.items()]

    made = [("model.embed_tokens.weight", matrix(300, hidden) * 10), ("lm_head.weight", matrix(300, hidden))]
    made += [("model.norm.weight", norm(hidden))]
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes = {
            "q_a_proj": (c["q_lora_rank"], hidden), "q_b_proj": (heads * (nope + rope), c["q_lora_rank"]),
            "kv_a_proj_with_mqa": (rank + rope, hidden), "kv_b_proj": (heads * (nope + value), rank),
            "o_proj": (hidden, heads * value),
        }  # fmt: skip
        made += [(f"{layer}.self_attn.{name}.weight", matrix(*shape)) for name, shape in shapes.items()]
        made += [(f"{layer}.self_attn.q_a_layernorm.weight", norm(c["q_lora_rank"]))]
        made += [(f"{layer}.self_attn.kv_a_layernorm.weight", norm(rank))]
        made += [(f"{layer}.{which}_layernorm.weight", norm(hidden)) for which in ("input", "post_attention")]
        if i < c["first_k_dense_replace"]:
            made += mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        made += [(f"{layer}.mlp.gate.weight", matrix(8, hidden))]
        made += [(f"{layer}.mlp.gate.e_score_correction_bias", 0.1 * norm(8))]
        for e in ("shared_experts", *(f"experts.{e}" for e in range(8))):
            made += mlp(f"{layer}.mlp.{e}", c["moe_intermediate_size"])
    return made


def results(folder, **options):
    """Tokens and log-probabilities of three prompts, in steps of at most 64 tokens."""
    engine = make_engine(folder, kv_cache_dtype="auto", **options)
    return generate(engine, *(request(str(i), p, max_tokens=8, prompt_logprobs=0) for i, p in enumerate(PROMPTS)))


def scores(result):
    return [entry.logprob for entry in result.prompt_logprobs if entry is not None]


@pytest.fixture(scope="module", params=["fp8-blocks", "gptq", "awq", "nvfp4-modelopt"])
def folders(request, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param)
    quantized_forms.write(request.param, SIZES, tensors(), place / "quantized", place / "plain")
    return place / "quantized", place / "plain"


@pytest.mark.slow
def test_tokens_of_the_dequantized_weights(folders):
    """One device and two: the same tokens as from files of floats, and log-probabilities that differ by rounding."""
    quantized, plain = folders
    expected = results(plain)
    for devices in (1, 2):
        options = {"matmul_backend": "cpu" if devices == 1 else "auto", "activation_quantization": "none"}
        found = results(quantized, tensor_parallel_size=devices, **options)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(scores(one), scores(other), atol=2e-3)
            assert one.token_ids == other.token_ids
