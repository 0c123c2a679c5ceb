"""The config.json of repositories that people have: read whole, and as a small model of the same kind that computes.

`published_configs.json` holds the settings of the most used ones, as they are published; `published_dense.json` those
of families that differ from Llama.
"""

import dataclasses
import json
import math
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.commands.arguments import engine_config
from jaxserve.commands.cli import make_parser
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.mesh import make_mesh
from jaxserve.execution.memory import max_model_len
from jaxserve.models.config import HFConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.families import read_model_config
from jaxserve.models.load import make_decoder, make_params, read_model
from jaxserve.models.weights import abstract_params

CONFIGS = json.loads((Path(__file__).parent.parent / "published_configs.json").read_text())
DENSE = json.loads((Path(__file__).parent.parent / "published_dense.json").read_text())
BILLIONS = {  # of parameters, as their cards say, embeddings included once where the head is tied to them
    "google/gemma-2b": 2.51, "google/gemma-2-9b-it": 9.24, "google/gemma-3-1b-it": 1.0, "google/gemma-3-4b-it": 3.88,
    "google/gemma-3-27b-it": 27.01, "google/gemma-3n-E4B-it": 6.87, "google/gemma-4-31B-it": 30.7,
    "microsoft/Phi-3-mini-4k-instruct": 3.82, "microsoft/Phi-3.5-mini-instruct": 3.82,
    "microsoft/Phi-4-mini-instruct": 3.84, "microsoft/phi-2": 2.78, "openai-community/gpt2": 0.124,
    "EleutherAI/pythia-6.9b": 6.86, "EleutherAI/gpt-neox-20b": 20.55, "facebook/opt-350m": 0.331,
    "tiiuae/falcon-7b": 6.92, "tiiuae/falcon-40b": 41.3, "tiiuae/falcon-11B": 11.1,
    "stabilityai/stablelm-2-1_6b": 1.64, "bigcode/starcoder2-7b": 7.17, "CohereForAI/c4ai-command-r-v01": 34.98,
    "CohereForAI/c4ai-command-r7b-12-2024": 8.03, "allenai/OLMo-2-1124-7B": 7.3, "allenai/OLMo-7B-hf": 6.89,
    "ibm-granite/granite-3.3-8b-instruct": 8.17, "HuggingFaceTB/SmolLM3-3B": 3.08, "zai-org/GLM-4-9B-0414": 9.4,
    "LGAI-EXAONE/EXAONE-4.0-32B": 32.0, "ByteDance-Seed/Seed-OSS-36B-Instruct": 36.15,
    "internlm/internlm3-8b-instruct": 8.8, "openbmb/MiniCPM-2B-sft-bf16": 2.72,
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": 23.57, "tencent/Hunyuan-7B-Instruct": 7.5,
    "EleutherAI/gpt-j-6b": 6.05, "bigcode/starcoder": 15.52, "EleutherAI/gpt-neo-2.7B": 2.65,
    "nvidia/Minitron-4B-Base": 4.19, "Qwen/Qwen2.5-VL-7B-Instruct": 7.62, "Qwen/Qwen3.5-9B": 8.95,
    "Qwen/Qwen3.5-27B": 26.9,
    "LiquidAI/LFM2-1.2B": 1.17, "meta-llama/Llama-4-Scout-17B-16E-Instruct": 107.77,
}  # fmt: skip
LONG = "Qwen/Qwen2.5-7B-Instruct-1M"  # attention in chunks, from a quarter of a million tokens on
OTHERS = {
    "RWKV/rwkv-4-169m-pile": "RwkvForCausalLM",
}


def read(name, **changes):
    ignored = ("dual_chunk_attention_config",) if name == LONG else ()
    return read_model_config(HFConfig(CONFIGS[name] | changes, name, ignored))


@pytest.mark.parametrize("name", CONFIGS)
def test_is_read(name):
    config = read(name)
    given = CONFIGS[name]
    assert config.num_layers == given["num_hidden_layers"]
    assert config.head_dim == given.get("head_dim", given["hidden_size"] // given["num_attention_heads"])
    assert config.tie_embeddings == given.get("tie_word_embeddings", False)
    assert config.ropes["default"].theta == given.get("rope_theta", 10000.0)
    assert config.max_position == given.get("max_position_embeddings", given.get("max_sequence_length"))
    assert config.has_windows == (config.family == "mistral" and given["sliding_window"] is not None)


@pytest.mark.parametrize("name", DENSE)
def test_dense_families_are_read_whole(name):
    """No setting is left over, and the model has as many parameters as it should."""
    config = read_model_config(HFConfig(dict(DENSE[name]), name))
    shapes = abstract_params(Decoder(config, config.num_kv_heads, config.vocab_size), make_mesh(1)).values()
    assert sum(math.prod(a.shape) for a in shapes) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    stretched = "internlm3" in name  # by dynamic scaling beyond the length that its config gives
    assert (max_model_len(EngineConfig(model="x"), config) > config.max_position) == stretched


def small(given):
    """The same settings, with few and narrow layers and as many query heads for each of keys and values."""
    kv = given.get("num_key_value_heads", given["num_attention_heads"])
    group = given["num_attention_heads"] // kv
    sizes = {"hidden_size": 16 * group, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": group, "num_key_value_heads": 1, "head_dim": 16}
    return given | sizes | heads | ({"max_window_layers": 2} if "max_window_layers" in given else {})


@cache
def logits(config):
    mesh = make_mesh(1)
    decoder = make_decoder(config, mesh, jnp.float32)
    params = make_params(decoder, Path(), mesh, EngineConfig(model="x", load_format="dummy"), progress=False)
    tokens = jnp.array([1, 2, 3], jnp.int32)
    return np.asarray(jax.jit(lambda p: decoder.apply({"params": p}, tokens, method="init_all"))(params))


@pytest.mark.parametrize("name", CONFIGS)
def test_computes_with_random_weights(name):
    config = read(name, **small(CONFIGS[name]))
    # What does not change the shapes or the maths of three tokens is the same for all, so that few are compiled.
    config = dataclasses.replace(config, eos_token_ids=(), dtype="float32", max_position=2048)
    made = logits(config)
    assert made.shape == (3, 64)
    assert np.isfinite(made).all()
    assert made.std() > 0


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_named(name):
    architecture = OTHERS[name]
    with pytest.raises(ConfigError, match=rf"architectures=\['{architecture}'\] is not supported.*models list"):
        read_model_config(HFConfig({"architectures": [architecture], "model_type": "x"}, name))


def test_the_nearest_architecture_is_named_with_what_differs():
    given = CONFIGS["Qwen/Qwen3-8B"]
    with pytest.raises(ConfigError, match=r"the nearest is Qwen3ForCausalLM \(its config.json reads like"):
        read_model_config(HFConfig(given | {"architectures": ["Qwen3XForCausalLM"]}))
    more = given | {"architectures": ["Qwen3XForCausalLM"], "surprise": 3}
    with pytest.raises(ConfigError, match=r"the nearest is Qwen3ForCausalLM \(beyond that: .*surprise=3"):
        read_model_config(HFConfig(more))
    with pytest.raises(ConfigError, match=r"is not supported\. `jaxserve models list` lists what is$"):
        read_model_config(HFConfig(given | {"architectures": ["Zzz"]}))


@pytest.mark.parametrize(
    ("name", "changes", "keys"),
    [
        ("meta-llama/Llama-2-7b-hf", {"residual_multiplier": 0.22}, "residual_multiplier"),
        ("meta-llama/Llama-2-7b-hf", {"scale_emb": 12, "rope_interleaved": True}, "rope_interleaved,scale_emb"),
        ("Qwen/Qwen3-8B", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "attn_factor": 2.0}}, "attn_factor"),
    ],
)
def test_settings_that_are_not_understood(name, changes, keys, tmp_path):
    with pytest.raises(ConfigError, match=f"--ignore-config-keys {keys}$"):
        read(name, **changes)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    args = make_parser().parse_args(["generate", str(tmp_path), "hi", "--ignore-config-keys", keys])
    assert read_model(tmp_path, engine_config(args).ignore_config_keys).family == read(name).family


@pytest.mark.parametrize("given", ["residual_multiplier", ["a", 5], [""]])
def test_keys_to_ignore_are_a_list(given):
    with pytest.raises(ConfigError, match="ignore_config_keys must be a list of keys"):
        EngineConfig(model="x", ignore_config_keys=given)


def test_another_length_of_the_first_llamas():
    with pytest.raises(ConfigError, match="max_sequence_length=4096 is not supported"):
        read("huggyllama/llama-7b", max_sequence_length=4096)


def test_the_factor_of_yarn_s_own_code_multiplies():
    rope = read("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B").ropes["default"]
    assert rope.attention_factor == pytest.approx(0.8782488562869419 * (0.1 * math.log(4) + 1))
    assert rope.attention_factor == pytest.approx(1.0)
    plain = read("NousResearch/Yarn-Llama-2-7b-128k").ropes["default"]
    assert plain.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
