"""GGUF files of many architectures: the same configs and weights as those of the folders that they were made from."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
import tiny_models
from engines import generate, make_engine, request
from flax.traverse_util import flatten_dict
from picture_prompts import PROCESSORS
from safetensors.numpy import save_file

from jaxserve.checkpoints.gguf_architectures import ARCHITECTURES
from jaxserve.checkpoints.gguf_model import GGUFReader, open_gguf
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.mesh import make_mesh
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.models.decoder import Decoder
from jaxserve.models.families import read_model_config
from jaxserve.models.load import Checkpoint, load_params, read_hf_config
from jaxserve.pallas_kernels.types import QuantArray

gguf_families = pytest.importorskip("gguf_families", reason="needs gguf", exc_type=ImportError)
mmproj_files = pytest.importorskip("mmproj_files", reason="needs gguf", exc_type=ImportError)

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
    "deepseek_v3_groups": {"rope": {"mscale": 1.0}},
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
    "ministral3_scaled": {"rope": {"mscale": 0.8}},
    "qwen3_5_groups": {},
    "qwen3_5_moe_whole": {},
    "glm4_moe_lite_hub": {},
    "youtu_hub": {"attention_bias": False},
    "mistral4_groups": {"rope": {"mscale": 0.8, "llama_4_scaling_beta": 0.0, "truncate": True}},
    "minicpm3_longrope": {
        "attention_bias": False, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
        "rope": {"original_max_position_embeddings": 512},
    },
    "glm_half": {},
    "dots1_windows": {"layer_types": ["full_attention"] * 4},
    "exaone_moe_hub": {},
    "granite_moe_shared": {},
    "phimoe_longrope": {"router_jitter_noise": 0.01, "rope": {"short_mscale": None, "long_mscale": None}},
    "hunyuan_moe_alpha": {},
    "solar_open_hub": {"rope": {"truncate": True}},
    "afmoe_layer_types": {
        "mup_enabled": True, "layer_types": ["sliding_attention"] * 3, "global_attn_every_n_layers": 4,
    },
    "apertus_hub": {},
    "apertus_tied": {},
    "gpt_bigcode_shared": {},
    "lfm2_odd": {},
    "lfm2_moe_bias": {"routed_scaling_factor": 1.0},
    "granite_hybrid_experts": {},
    "granite_hybrid_dense": {"position_embedding_type": "nope"},
    "bamba_odd": {},
    "nemotron_h_pattern": {},
    "nemotron_h_experts": {"layers": 5, "rms_norm_eps": 1e-5},
    "qwen2_5_vl_flat": {"use_sliding_window": False},
    "qwen3_vl_tied": {},
    "qwen3_vl_moe_wide": {"decoder_sparse_step": 1},
    "gemma3_seeing": {"query_pre_attn_scalar": 32},
    "idefics3_hub": {},
    "internvl_qwen2": {"use_sliding_window": False, "sliding_window": None},
    "lfm2_vl_hub": {},
    "glm4v_half": {},
    "glm4v_moe_groups": {},
    "gemma3n_second_stream": {"altup_correct_scale": True, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma4_sharing": {},
    "gemma4_keys_are_values": {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5e5},
        },
    },
    "gemma4_unified_scalars": {},
    "gemma4_experts": {},
    "gemma4_experts_sharing": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma4_seeing": {"num_global_key_value_heads": None},
    "gemma4_clipped": {},
    "gemma4_unified_older": {},
    "mamba_hub": {},
    "mamba_tied": {"hidden_act": "silu"},
    "falcon_mamba_hub": {"mixer_rms_eps": 1e-6},
    "mamba2_hub": {},
    "mamba2_tied": {"hidden_act": "silu"},
    "jamba_experts": {},
    "jamba_dense": {"hidden_act": "silu"},
    "falcon_h1_norm_behind": {},
    "falcon_h1_plain": {"ssm_multipliers": None},
    "kimi_linear_hub": {},
    "nemotron_h_latent_types": {"rms_norm_eps": 1e-5, "norm_topk_prob": True},
    "glm_moe_dsa_hub": {
        "index_topk_freq": None, "index_skip_topk_offset": None, "indexer_types": ["full", "shared"] * 2,
    },
    "deepseek_v32_hub": {},
    "bloom_odd": {},
    "mpt_clip": {
        "layer_norm_epsilon": 1e-5, "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": 1.3},
    },
    "jais2_biases": {},
    "dbrx_hub": {},
    "internlm3_biases": {},
    "mimo_v2_flash_hub": {},
    "step3p7_hub": {"query_pre_attn_scalar": None},
    "mellum_ropes": {"norm_topk_prob": True},
    "cohere2_moe_average": {  # the first layer of three has no window
        "sliding_window_pattern": None, "layer_types": ["full_attention", *["sliding_attention"] * 2] * 2,
    },
    "laguna_heads": {
        "moe_router_logit_softcapping": 0.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "granite_plain_attention": {  # which is a MiniCPM by other names
        "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 3, "scale_depth": 0.7,
        "dim_model_base": 160, "rope_theta": 10000.0, "tie_word_embeddings": False, "embedding_multiplier": None,
        "residual_multiplier": None, "attention_multiplier": None, "logits_scaling": None, "rope_parameters": None,
    },
}  # fmt: skip


def keep_layers(folder, count):
    """Removes the tensors of the layers behind the first ones."""
    tensors = {name: tensor.read() for name, tensor in read_folder(folder).items()}
    of_layer = {name: re.search(r"\.layers\.(\d+)\.", name) for name in tensors}
    kept = {name: values for name, values in tensors.items() if not of_layer[name] or int(of_layer[name][1]) < count}
    save_file(kept, folder / "model.safetensors")


def give_all_layers_experts(folder):
    """Layers without experts, which llama.cpp's Qwen3 does not have, get those of the layer behind them."""
    tensors = {name: tensor.read() for name, tensor in read_folder(folder).items()}
    for name in [name for name in tensors if re.fullmatch(r"model\.(\w+\.)?layers\.\d+\.mlp\.\w+_proj\.weight", name)]:
        before, _, rest = name.partition("layers.")
        layer = rest.split(".")[0]
        tensors.pop(name, None)
        behind = f"{before}layers.{int(layer) + 1}.mlp."
        tensors |= {
            other.replace(behind, f"{before}layers.{layer}.mlp."): values + np.float32(0.01)
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
        text = config.get("text_config", config)
        if rope := changes.pop("rope", {}):
            own = text["rope_parameters" if "rope_parameters" in text else "rope_scaling"]
            own |= rope
            for key in [key for key, value in rope.items() if value is None]:
                del own[key]
        if (count := changes.pop("layers", None)) is not None:
            text["layers_block_type"] = text["layers_block_type"][:count]
            keep_layers(folder, count)
        text |= changes
        for key in [key for key, value in changes.items() if value is None]:
            del text[key]
        (folder / "config.json").write_text(json.dumps(config))
        if case in ("qwen3_next_groups", "qwen3_vl_moe_wide"):
            give_all_layers_experts(folder)
        return folder

    return make


def config_of(path, sees=False):
    """What is computed; names of families are for messages only."""
    hf = read_hf_config(path)
    hf.sees = sees
    config = read_model_config(hf)
    return dataclasses.replace(config, family="", eos_token_ids=(), dtype="float32")


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
    """With the encoder of one that sees."""
    folder = expressible(case)
    if sees := case in PROCESSORS and tiny_models.CASES[case].config["model_type"] in mmproj_files.PROJECTORS:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[case]))
        marks = mmproj_files.MARKS.get(case.split("_")[0], mmproj_files.QWEN)
        others = [f"<m{i}>" for i in range(7 - len(marks))]
        tiny_models.build_tokenizer(folder, 512, marks=[*marks, *others])
        mmproj_files.write_mmproj(folder, tmp_path / "mmproj.gguf")
    path = gguf_families.FamilyFile(folder, tmp_path / "model.gguf").write()
    ours = dict(leaves(config_of(path, sees)))
    config = config_of(folder, sees)
    theirs = dict(leaves(config))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), name
    assert (config.vision is not None) == sees
    read = weights_of(path, config)
    wanted = weights_of(folder, config)
    assert read.keys() == wanted.keys()
    for name, weight in wanted.items():  # norms are stored with 1 added, and rates as exponentials, which rounds
        np.testing.assert_allclose(read[name], weight, rtol=2e-7, atol=2e-7, err_msg=name)


def without_biases(folder):
    """The folder of a Falcon-H1 without the biases that its GGUF files cannot have: the model's multipliers are part of
    the weights there, and not of the biases."""
    tensors = {name: tensor.read() for name, tensor in read_folder(folder).items()}
    kept = {
        name: values
        for name, values in tensors.items()
        if not name.endswith(".bias") or "conv1d" in name or "dt_proj" in name
    }
    save_file(kept, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    biases = ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias")
    config |= dict.fromkeys((*biases, "mamba_norm_before_gate"), False)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "case",
    [
        "falcon_h1_multipliers",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("gemma3n_second_stream", "gemma4_experts_sharing")),
    ],
)
def test_the_same_answers(case, expressible, model_folders, tmp_path):
    """Also where the weights are others: those of Falcon-H1's files have its multipliers in them."""
    if case in CASES:
        folder = expressible(case)
    else:
        without_biases(folder := shutil.copytree(model_folders(case), tmp_path / case))
    path = gguf_families.FamilyFile(folder, tmp_path / "model.gguf").write()
    prompt = np.random.default_rng(8).integers(5, 300, 40).tolist()
    found = []
    for model in (path, folder):
        engine = make_engine(model, dtype="float32", kv_cache_dtype="auto")
        found += generate(engine, request("0", prompt, max_tokens=8, prompt_logprobs=0))
    scores = [[entry.logprob for entry in one.prompt_logprobs[1:]] for one in found]
    np.testing.assert_allclose(*scores, atol=1e-4)
    assert found[0].token_ids == found[1].token_ids


def test_no_adapters_for_weights_with_multipliers(expressible, tmp_path):
    """Those of a Falcon-H1 file are not the ones that an adapter was trained for."""
    path = gguf_families.FamilyFile(expressible("falcon_h1_plain"), tmp_path / "model.gguf").write()
    with pytest.raises(ConfigError, match="enable_lora must be False for GGUF files of Falcon-H1"):
        ModelPlan.of(EngineConfig(model=str(path), enable_lora=True))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_columns_in_another_order(kind, expressible, tmp_path):
    """A column of the file is the column of the tensor that `columns` names, in floats and in quantized form."""
    folder = expressible("glm4_sandwich")
    path = gguf_families.FamilyFile(folder, tmp_path / "model.gguf", gguf_families.Kind[kind]).write()
    plain = open_gguf(path).tensors["blk.0.ffn_down.weight"]
    assert plain.type.name == kind
    columns = np.random.default_rng(3).permutation(plain.shape[1]).astype(np.int32)
    turned = dataclasses.replace(plain, columns=columns)
    values = turned.read()
    np.testing.assert_array_equal(values[:, columns], plain.read())
    blocks = turned.read_blocks()
    np.testing.assert_array_equal(dequantize(blocks) if isinstance(blocks, QuantArray) else blocks, values)
    assert GGUFReader({"w": turned}, "").type_of("w") is None


def test_every_architecture_has_a_case():
    written = {*gguf_families.ARCHITECTURES.values(), *gguf_families.WITH_EXPERTS.values()}
    assert written | {"qwen2", "qwen3", "qwen2moe", "qwen3moe"} == ARCHITECTURES.keys()


@pytest.mark.parametrize(
    "case",
    [
        "glm4_sandwich",
        "gpt_oss_sinks",
        "deepseek_v3_groups",
        "gemma3_older",
        "neox_parallel",
        "qwen3_5_groups",
        "granite_hybrid_dense",
        "mistral4_groups",
        "gemma3n_second_stream",
        "gemma4_experts_sharing",
        "jamba_experts",
        "kimi_linear_hub",
        "step3p7_hub",
    ],
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
