"""GGUF files of many architectures: the same configs and weights as those of the folders that they were made from."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from jaxserve.checkpoints.gguf_architectures import ARCHITECTURES
from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.devices.mesh import make_mesh
from jaxserve.models.decoder import Decoder
from jaxserve.models.families import read_model_config
from jaxserve.models.load import Checkpoint, load_params, read_hf_config

gguf_families = pytest.importorskip("gguf_families", reason="needs gguf", exc_type=ImportError)

# Case -> settings that GGUF can express, in the place of those that it cannot: constants of llama.cpp's code. None:
# without the setting.
CASES = {
    "gemma_mqa": {},
    "gemma2_caps": {"query_pre_attn_scalar": 32},
    "gemma3_older": {"query_pre_attn_scalar": 32},
    "gemma3_layer_types": {"query_pre_attn_scalar": 16},
    "phi3_window": {},
    "phi3_longrope": {},
    "deepseek_v2_lite": {},
    "deepseek_v2_groups": {"attention_bias": False},
    "deepseek_v3_groups": {"mscale": 1.0},
    "gpt_oss_sinks": {"swiglu_limit": 7.0},
    "granite_multipliers": {},
    "granite_moe_stacked": {},
    "cohere_interleaved": {},
    "cohere_qk_norm": {},
    "cohere2_windows": {},
    "olmo_clip": {},
    "olmo2_post": {},
    "olmo3_yarn": {},
    "glm4_sandwich": {},
    "glm4_moe_groups": {},
    "glm4_moe_plain": {},
    "smollm3_positions": {"no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4},
    "stablelm_2": {},
    "starcoder2_window": {},
    "phi_parallel": {},
    "gpt2_inner": {},
    "neox_parallel": {},
    "neox_sequential": {"hidden_act": "gelu"},
    "falcon_40b": {},
    "falcon_11b": {},
    "exaone4_windows": {},
    "exaone4_full": {},
    "seed_oss_biases": {},
    "hunyuan_alpha": {},
    "nemotron_squares": {},
    "ernie_biases": {},
    "ernie4_5_moe_mixed": {"moe_norm_min": 1e-12},
    "llama4_chunks": {
        "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layers": [1, 1, 1, 0, 1],
    },
    "arcee_squares": {},
    "olmoe_clip": {"norm_topk_prob": False},
    "minimax_m2_saved": {},
    "qwen3_next_groups": {"norm_topk_prob": True, "decoder_sparse_step": 1},
    "ministral3_scaled": {"mscale": 0.8},
    "granite_plain_attention": {  # which is a MiniCPM by other names
        "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 3, "scale_depth": 0.7,
        "dim_model_base": 160, "rope_theta": 10000.0, "tie_word_embeddings": False, "embedding_multiplier": None,
        "residual_multiplier": None, "attention_multiplier": None, "logits_scaling": None, "rope_parameters": None,
    },
}  # fmt: skip


def give_all_layers_experts(folder):
    """Layers without experts, which llama.cpp's Qwen3-Next does not have, get those of the layer behind them."""
    tensors = {name: tensor.read() for name, tensor in read_folder(folder).items()}
    for name in [name for name in tensors if re.fullmatch(r"model\.layers\.\d+\.mlp\.\w+_proj\.weight", name)]:
        layer = name.split(".")[2]
        tensors.pop(name, None)
        behind = f"model.layers.{int(layer) + 1}.mlp."
        tensors |= {
            other.replace(behind, f"model.layers.{layer}.mlp."): values + np.float32(0.01)
            for other, values in list(tensors.items())
            if other.startswith(behind)
        }
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def expressible(model_folders, tmp_path):
    """A function that makes the folder of a case with settings that GGUF can express."""

    def make(case):
        folder = shutil.copytree(model_folders(case), tmp_path / case)
        config = json.loads((folder / "config.json").read_text())
        changes = dict(CASES[case])
        if mscale := changes.pop("mscale", None):
            config["rope_parameters"]["mscale"] = mscale
        config = {key: value for key, value in (config | changes).items() if changes.get(key, "") is not None}
        (folder / "config.json").write_text(json.dumps(config))
        if case == "qwen3_next_groups":
            give_all_layers_experts(folder)
        return folder

    return make


def config_of(path):
    return dataclasses.replace(read_model_config(read_hf_config(path)), eos_token_ids=(), dtype="float32")


def leaves(value, name=""):
    """(name, number or text) of everything in a config."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, tuple | list):
        value = dict(enumerate(value))
    if hasattr(value, "items"):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}")
    else:
        yield name, value


def weights_of(path, config):
    decoder = Decoder(config, config.num_kv_heads, config.vocab_size, np.dtype(np.float32))
    params = load_params(decoder, path, make_mesh(1, jax.devices("cpu")))
    return {name: np.asarray(value) for name, value in flatten_dict(params, sep="/").items()}


@pytest.mark.parametrize("case", CASES)
def test_the_same_model(case, expressible, tmp_path):
    folder = expressible(case)
    path = gguf_families.FamilyFile(folder, tmp_path / "model.gguf").write()
    ours = dict(leaves(config_of(path)))
    theirs = dict(leaves(config_of(folder)))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), name
    config = config_of(folder)
    read = weights_of(path, config)
    wanted = weights_of(folder, config)
    assert read.keys() == wanted.keys()
    for name, weight in wanted.items():  # norms are stored with 1 added, which rounds
        np.testing.assert_allclose(read[name], weight, rtol=0, atol=2e-7, err_msg=name)


def test_every_architecture_has_a_case():
    written = {gguf_families.ARCHITECTURES[name] for name in gguf_families.ARCHITECTURES}
    assert written == ARCHITECTURES.keys() - {"llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe"}


@pytest.mark.parametrize(
    "case", ["glm4_sandwich", "gpt_oss_sinks", "deepseek_v3_groups", "gemma3_older", "neox_parallel"]
)
def test_quantized_files_load(case, expressible, tmp_path):
    """Every weight of a Q8_0 file is near the one in the folder, and the decoder's parameters can be made of them."""
    folder = expressible(case)
    plain = gguf_families.FamilyFile(folder, tmp_path / "plain.gguf").write()
    path = gguf_families.FamilyFile(folder, tmp_path / "model.gguf", gguf_families.Kind.Q8_0).write()
    read = Checkpoint.open(path)
    wanted = Checkpoint.open(plain).tensors
    assert read.tensors.keys() == wanted.keys()
    assert any(read.reader.parts(name) for name in read.tensors)
    for name, tensor in wanted.items():
        values = tensor.read()
        np.testing.assert_allclose(
            read.tensors[name].read(), values, rtol=0, atol=abs(values).max() / 127, err_msg=name
        )
    config = config_of(folder)
    decoder = Decoder(config, config.num_kv_heads, config.vocab_size, np.dtype(np.float32))
    assert load_params(decoder, path, make_mesh(1, jax.devices("cpu")))
