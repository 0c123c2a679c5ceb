"""Checkpoints of mixtures and of models with recurrent layers in the quantized forms in which they are published: the
modules that stay floats are named as the hub names them, and the weights are those of the dequantized copy."""

import re

import jax
import numpy as np
import pytest
import quantized_forms
from engines import generate, make_engine, request
from flax.traverse_util import flatten_dict
from tiny_models import CASES, tensors

from jaxserve.devices.mesh import make_mesh
from jaxserve.models.config import HFConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.families import read_model_config
from jaxserve.models.load import load_params
from jaxserve.pallas_kernels.types import QuantArray

# Projections that no published form quantizes: routers, gates of shared experts, and convolutions.
NEVER = (
    r"visual|embed|wte|wpe|lm_head|norm|conv1d|conv\.conv|mlp\.gate\.|gate\.wg|shared_expert_gate|feed_forward\.gate\."
)
# (form, case, the modules beside NEVER that stay floats, the key of config.json's list of them)
PUBLISHED = [
    # Qwen3.5 and GLM-4.7-Flash in fp8, MiniMax M2, Hunyuan 3
    ("fp8-blocks", "qwen3_5_groups", r"linear_attn\.in_proj_[ab]\.", "modules_to_not_convert"),
    ("fp8-blocks", "qwen3_5_moe_odd", r"linear_attn\.in_proj_[ab]\.", "modules_to_not_convert"),
    ("fp8-blocks", "glm4_moe_lite_hub", "", "modules_to_not_convert"),
    ("fp8-blocks", "minimax_m2_hub", r"block_sparse_moe\.gate\.", "modules_to_not_convert"),
    ("fp8-blocks", "hy_v3_hub", "", "modules_to_not_convert"),
    ("fp8-blocks", "nemotron_h_experts", r"mixer\.(in|out)_proj|mixer\.gate\.", "modules_to_not_convert"),
    # Qwen3.6 and Nemotron-H by ModelOpt
    ("nvfp4-modelopt", "qwen3_5_moe_whole", r"linear_attn|self_attn", "ignore"),
    ("nvfp4-modelopt", "nemotron_h_types", r"mixer\.(q|k|v|o)_proj", "ignore"),
    # Kimi K2 and K2.5: the experts only
    ("int4-compressed", "deepseek_v3_groups", r"self_attn|shared_experts|mlp\.(gate|up|down)_proj", "ignore"),
    ("int4-compressed", "lfm2_moe_bias", r"conv\.|self_attn|feed_forward\.w[123]", "ignore"),
    ("mxfp4", "youtu_untied", "", "ignore"),
    ("gptq-small", "bamba_groups", "", ""),
    ("gptq-small", "olmoe_plain", r"self_attn", ""),
    ("gptq", "lfm2_tied", "", ""),
    ("awq-small", "qwen3_5_groups", r"linear_attn", "modules_to_not_convert"),
    ("awq-small", "qwen3_5_moe_whole", r"linear_attn\.in_proj_[ab]\.", "modules_to_not_convert"),
    ("awq-small", "glm4_moe_groups", "", "modules_to_not_convert"),
    ("awq", "apertus_tied", "", "modules_to_not_convert"),
]  # fmt: skip


@pytest.fixture(params=PUBLISHED, ids=lambda some: f"{some[0]}-{some[1]}")
def folders(request, tmp_path):
    """The case in the form, and its values as floats."""
    form, case, kept, key = request.param
    floats = re.compile(f"{NEVER}|{kept}" if kept else NEVER)
    made = list(tensors(case))
    matrices = {name for name, values in made if values.ndim == 2 and name.endswith(".weight")}
    chosen = {name for name in matrices if not floats.search(name)}
    settings = {key: sorted(name.removesuffix(".weight") for name in matrices - chosen)} if key else {}
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    quantized_forms.write(form, CASES[case].config, made, quantized, plain, chosen.__contains__, **settings)
    return quantized, plain, chosen


def test_the_weights_are_those_of_the_floats(folders):
    quantized, plain, chosen = folders
    config = read_model_config(HFConfig.read(plain))
    decoder = Decoder(config, config.num_kv_heads, config.vocab_size, np.dtype(np.float32))
    mesh = make_mesh(1, jax.devices("cpu"))
    wanted = flatten_dict(load_params(decoder, plain, mesh), sep="/")
    read = flatten_dict(load_params(decoder, quantized, mesh, dequantize=True), sep="/")
    assert read.keys() == wanted.keys()
    for name, weight in wanted.items():
        np.testing.assert_allclose(read[name], weight, rtol=2e-6, atol=1e-7, err_msg=name)
    stored = load_params(decoder, quantized, mesh)
    kinds = [type(x) for x in jax.tree.leaves(stored, is_leaf=lambda x: isinstance(x, QuantArray))]
    assert chosen
    assert QuantArray in kinds


@pytest.mark.slow
def test_tokens_of_the_floats(folders):
    quantized, plain, _ = folders
    prompt = np.random.default_rng(8).integers(5, 500, 70).tolist()
    found = []
    for folder in (quantized, plain):
        engine = make_engine(folder, kv_cache_dtype="auto", activation_quantization="none")
        found += generate(engine, request("0", prompt, max_tokens=8, prompt_logprobs=0))
    scores = [[entry.logprob for entry in one.prompt_logprobs[1:]] for one in found]
    np.testing.assert_allclose(*scores, atol=5e-3)
    assert found[0].token_ids == found[1].token_ids
