"""config.json as it is published, as it may be broken, and the settings that must fit it."""

import copy
import json
import math
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import CASES

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.mesh import make_mesh
from jaxserve.execution import memory
from jaxserve.execution.slots import create_slots
from jaxserve.models.config import HFConfig
from jaxserve.models.families import families, read_model_config
from jaxserve.models.load import compute_dtype, read_model
from jaxserve.models.rope import inverse_frequencies
from jaxserve.models.spec import ModelConfig, NormSpec, QKNormSpec
from jaxserve.models.splitting import sharded_kv_heads

LLAMA_2_7B = """{
  "_name_or_path": "meta-llama/Llama-2-7b-hf",
  "architectures": ["LlamaForCausalLM"],
  "bos_token_id": 1,
  "eos_token_id": 2,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 11008,
  "max_position_embeddings": 4096,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 32,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": null,
  "tie_word_embeddings": false,
  "torch_dtype": "float16",
  "transformers_version": "4.31.0.dev0",
  "use_cache": true,
  "vocab_size": 32000
}"""
LLAMA_31_8B_INSTRUCT = """{
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": false,
  "attention_dropout": 0.0,
  "bos_token_id": 128000,
  "eos_token_id": [128001, 128008, 128009],
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 14336,
  "max_position_embeddings": 131072,
  "mlp_bias": false,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3"
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": false,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.42.3",
  "use_cache": true,
  "vocab_size": 128256
}"""
LLAMA_32_1B = """{
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": false,
  "attention_dropout": 0.0,
  "bos_token_id": 128000,
  "eos_token_id": 128001,
  "head_dim": 64,
  "hidden_act": "silu",
  "hidden_size": 2048,
  "initializer_range": 0.02,
  "intermediate_size": 8192,
  "max_position_embeddings": 131072,
  "mlp_bias": false,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 16,
  "num_key_value_heads": 8,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3"
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": true,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.45.0.dev0",
  "use_cache": true,
  "vocab_size": 128256
}"""
MISTRAL_7B_V01 = """{
  "architectures": ["MistralForCausalLM"],
  "bos_token_id": 1,
  "eos_token_id": 2,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 14336,
  "max_position_embeddings": 32768,
  "model_type": "mistral",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05,
  "rope_theta": 10000.0,
  "sliding_window": 4096,
  "tie_word_embeddings": false,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.34.0.dev0",
  "use_cache": true,
  "vocab_size": 32000
}"""
MISTRAL_7B_V03 = """{
  "architectures": ["MistralForCausalLM"],
  "attention_dropout": 0.0,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 14336,
  "max_position_embeddings": 32768,
  "model_type": "mistral",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05,
  "rope_theta": 1000000.0,
  "sliding_window": null,
  "tie_word_embeddings": false,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.42.0.dev0",
  "use_cache": true,
  "vocab_size": 32768
}"""
QWEN_25_05B_INSTRUCT = """{
  "architectures": ["Qwen2ForCausalLM"],
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "hidden_act": "silu",
  "hidden_size": 896,
  "initializer_range": 0.02,
  "intermediate_size": 4864,
  "max_position_embeddings": 32768,
  "max_window_layers": 21,
  "model_type": "qwen2",
  "num_attention_heads": 14,
  "num_hidden_layers": 24,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "sliding_window": 32768,
  "tie_word_embeddings": true,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.43.1",
  "use_cache": true,
  "use_sliding_window": false,
  "vocab_size": 151936
}"""
QWEN_25_7B_INSTRUCT = """{
  "architectures": ["Qwen2ForCausalLM"],
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "hidden_act": "silu",
  "hidden_size": 3584,
  "initializer_range": 0.02,
  "intermediate_size": 18944,
  "max_position_embeddings": 32768,
  "max_window_layers": 28,
  "model_type": "qwen2",
  "num_attention_heads": 28,
  "num_hidden_layers": 28,
  "num_key_value_heads": 4,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "sliding_window": 131072,
  "tie_word_embeddings": false,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.43.1",
  "use_cache": true,
  "use_sliding_window": false,
  "vocab_size": 152064
}"""
QWEN3_06B = """{
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": false,
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 1024,
  "initializer_range": 0.02,
  "intermediate_size": 3072,
  "max_position_embeddings": 40960,
  "max_window_layers": 28,
  "model_type": "qwen3",
  "num_attention_heads": 16,
  "num_hidden_layers": 28,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06,
  "rope_scaling": null,
  "rope_theta": 1000000,
  "sliding_window": null,
  "tie_word_embeddings": true,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.51.0",
  "use_cache": true,
  "use_sliding_window": false,
  "vocab_size": 151936
}"""
QWEN3_8B = """{
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": false,
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 12288,
  "max_position_embeddings": 40960,
  "max_window_layers": 36,
  "model_type": "qwen3",
  "num_attention_heads": 32,
  "num_hidden_layers": 36,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06,
  "rope_scaling": null,
  "rope_theta": 1000000,
  "sliding_window": null,
  "tie_word_embeddings": false,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.51.0",
  "use_cache": true,
  "use_sliding_window": false,
  "vocab_size": 151936
}"""

# fmt: off
PUBLISHED = [  # text, what it means
    (LLAMA_2_7B, {"family": "llama", "vocab_size": 32000, "hidden_size": 4096, "num_layers": 32, "num_heads": 32,
        "num_kv_heads": 32, "head_dim": 128, "size": 11008, "norm_eps": 1e-5, "max_position": 4096,
        "eos_token_ids": (2,), "dtype": "float16"}),
    (LLAMA_31_8B_INSTRUCT, {"family": "llama", "vocab_size": 128256, "num_kv_heads": 8, "head_dim": 128,
        "max_position": 131072, "eos_token_ids": (128001, 128008, 128009), "dtype": "bfloat16", "qkv_bias": False}),
    (LLAMA_32_1B, {"num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64, "tie_embeddings": True,
        "eos_token_ids": (128001,)}),
    (MISTRAL_7B_V01, {"family": "mistral", "windows": {4096}, "num_kv_heads": 8, "head_dim": 128}),
    (MISTRAL_7B_V03, {"family": "mistral", "windows": {None}, "vocab_size": 32768}),
    (QWEN_25_05B_INSTRUCT, {"family": "qwen2", "num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "windows": {None},
        "tie_embeddings": True, "qkv_bias": True, "out_bias": False, "norm_eps": 1e-6, "eos_token_ids": (151645,)}),
    (QWEN_25_7B_INSTRUCT, {"family": "qwen2", "num_heads": 28, "num_kv_heads": 4, "head_dim": 128,
        "tie_embeddings": False, "qkv_bias": True, "qk_norm": None, "windows": {None}}),
    (QWEN3_06B, {"family": "qwen3", "hidden_size": 1024, "num_heads": 16, "head_dim": 128,
        "qk_norm": QKNormSpec(norm=NormSpec(eps=1e-6)), "tie_embeddings": True, "qkv_bias": False,
        "max_position": 40960, "windows": {None}}),
    (QWEN3_8B, {"family": "qwen3", "num_layers": 36, "head_dim": 128, "num_kv_heads": 8, "tie_embeddings": False}),
]
ROPES = [  # text, what its rotary settings mean
    (LLAMA_2_7B, {"theta": 10000.0, "scaling": "default"}),
    (LLAMA_31_8B_INSTRUCT, {"theta": 500000.0, "scaling": "llama3", "factor": 8.0, "original_max_position": 8192,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    (LLAMA_32_1B, {"scaling": "llama3", "factor": 32.0}),
    (MISTRAL_7B_V03, {"theta": 1000000.0, "scaling": "default"}),
    (QWEN3_8B, {"theta": 1000000.0, "scaling": "default"}),
]
# fmt: on
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def read(base=LLAMA_31_8B_INSTRUCT, **changes):
    """The model of a config in which some keys are changed."""
    return read_model_config(HFConfig(json.loads(base) | changes, "some/config.json"))


def is_refused(message, **changes):
    with pytest.raises(ConfigError, match=message) as caught:
        read(**changes)
    assert str(caught.value).startswith("some/config.json")


@pytest.mark.parametrize(("text", "meaning"), PUBLISHED)
def test_published_configs(tmp_path, text, meaning):
    (tmp_path / "config.json").write_text(text)
    model = read_model(tmp_path)
    parts = (model.layers[0].attention, model.layers[0].mlp, model)
    found = {name: getattr(part, name) for part in parts for name in meaning if hasattr(part, name)}
    windows = {layer.attention.window for layer in model.layers}
    assert {name: {"windows": windows, **found}[name] for name in meaning} == meaning


@pytest.mark.parametrize(("text", "meaning"), ROPES)
def test_published_rotary_settings(text, meaning):
    rope = read(text).ropes["default"]
    assert {name: getattr(rope, name) for name in meaning} == meaning


def test_both_styles_of_rotary_settings_are_the_same():
    """transformers 5 writes one object, 4 wrote a key beside another object, and called its kind "type" once."""
    old = read()
    values = json.loads(LLAMA_31_8B_INSTRUCT)
    scaling = values.pop("rope_scaling")
    theta = values.pop("rope_theta")
    new = read_model_config(HFConfig(values | {"rope_parameters": scaling | {"rope_theta": theta}}))
    assert new == old
    scaling["type"] = scaling.pop("rope_type")
    assert read(rope_scaling=scaling) == old


def test_yarn_as_qwen_recommends_it():
    rope = read(QWEN_25_7B_INSTRUCT, rope_scaling=YARN).ropes["default"]
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32768)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    inferred = read(QWEN_25_7B_INSTRUCT, max_position_embeddings=131072, rope_scaling=YARN | {"factor": None})
    assert inferred.ropes["default"].factor == 4.0


def test_windows_by_layer():
    def windows(**changes):
        return [layer.attention.window for layer in read(QWEN3_8B, **changes).layers]

    used = {"use_sliding_window": True, "sliding_window": 100}
    assert windows(**used, max_window_layers=30) == [None] * 30 + [100] * 6
    kinds = ["sliding_attention"] + ["full_attention"] * 35
    assert windows(**used, layer_types=kinds) == [100] + [None] * 35
    is_refused("layer_types has 5 entries", base=QWEN3_8B, **used, layer_types=kinds[:5])
    is_refused(r"layer_types \['linear'\] are not supported", base=QWEN3_8B, layer_types=["linear"] * 36)


# End of sequence


@pytest.mark.parametrize(
    ("own", "generation", "joined"),
    [(2, {}, (2,)), (2, {"eos_token_id": [7, 2]}, (2, 7)), (None, {"eos_token_id": 9}, (9,)), ([1, 2], None, (1, 2))],
)
def test_end_tokens_of_both_files(tmp_path, own, generation, joined):
    (tmp_path / "config.json").write_text(json.dumps(json.loads(LLAMA_2_7B) | {"eos_token_id": own}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_model(tmp_path).eos_token_ids == joined


@pytest.mark.parametrize("text", ["{", "[]", "5", '{"eos_token_id": "x"}', '{"eos_token_id": [-1]}'])
def test_broken_generation_config(tmp_path, text):
    (tmp_path / "config.json").write_text(LLAMA_2_7B)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json.*"):
        read_model(tmp_path)


# What is not understood


def test_unknown_architectures():
    is_refused(
        r"architectures=\['RwkvForCausalLM'\] is not supported; the nearest is \w+", architectures=["RwkvForCausalLM"]
    )
    is_refused(r"architectures=\[\] is not supported", architectures=None)
    is_refused("architectures must be a list of strings, got 'LlamaForCausalLM'", architectures="LlamaForCausalLM")


def test_unknown_keys_that_change_something():
    is_refused(
        "does not understand: attn_logit_softcapping=50.0, layer_scale=", attn_logit_softcapping=50.0, layer_scale=[1]
    )
    is_refused("quantization_config must be a JSON object, got 4", quantization_config=4)


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}], ids=repr)
def test_unknown_keys_at_their_default(value):
    assert read(some_future_key=value) == read()


def test_keys_without_a_meaning_for_the_maths():
    assert (
        read(_name_or_path="x", use_cache=False, initializer_range=0.1, transformers_version="9", pad_token_id=3)
        == read()
    )


# What is wrong

SIZES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
]


@pytest.mark.parametrize("value", ["4096", -1, 0, 1.5, True, 2**31, 10**30, [4096], {}], ids=repr)
@pytest.mark.parametrize("key", SIZES)
def test_sizes_that_are_none(key, value):
    is_refused(f"{key} must be an integer from 1", **{key: value})


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_sizes_that_are_missing(key):
    is_refused(f"has no '{key}'", **{key: None})


def scaled(kind, **options):
    return {"rope_scaling": {"rope_type": kind, **options}}


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("num_attention_heads=32 is no multiple of num_key_value_heads=5", {"num_key_value_heads": 5}),
        ("head_dim must be even", {"head_dim": 127}),
        ("head_dim must be even and positive.* got 0", {"hidden_size": 16}),
        ("hidden_act='relu' is not supported", {"hidden_act": "relu"}),
        ("rms_norm_eps must be a positive number, got '1e-5'", {"rms_norm_eps": "1e-5"}),
        ("rms_norm_eps must be a positive number", {"rms_norm_eps": math.nan}),
        ("tie_word_embeddings must be true or false, got 'no'", {"tie_word_embeddings": "no"}),
        ("torch_dtype must be a string", {"torch_dtype": 16}),
        ("eos_token_id must be a token id", {"eos_token_id": "</s>"}),
        ("eos_token_id must be a token id", {"eos_token_id": [1, 10**12]}),
        ("rope_theta must be a positive number, got -1", {"rope_theta": -1.0}),
        ("rope_theta must be above 1", {"rope_theta": 0.5}),
        ("rope_scaling must be a JSON object, got 'linear'", {"rope_scaling": "linear"}),
        ("rope scaling 'spiral' is not supported", scaled("spiral", factor=2.0)),
        ("rope_type must be a string", scaled(["yarn"], factor=2.0)),
        ("rope scaling 'yarn' needs a factor", scaled("yarn")),
        ("rope scaling 'linear' needs a factor >= 1, got None", scaled("linear")),
        ("rope scaling 'linear' needs a factor >= 1, got 0.5", scaled("linear", factor=0.5)),
        ("factor must be a positive number, got '2'", scaled("linear", factor="2")),
        ("factor must be a positive number", scaled("linear", factor=math.inf)),
        ("original_max_position_embeddings must be an int", scaled("yarn", original_max_position_embeddings="8k")),
        ("low_freq_factor=5.0 must not be above high_freq_factor=4.0", scaled("llama3", factor=8, low_freq_factor=5.0)),
        ("settings that are not understood: {'twist': 3}", scaled("linear", factor=2.0, twist=3)),
        ("partial_rotary_factor=0.5 is not supported", {"partial_rotary_factor": 0.5}),
        ("partial_rotary_factor=0.25 is not supported", scaled("default", partial_rotary_factor=0.25)),
    ],
)
def test_values_that_cannot_work(message, changes):
    is_refused(message, **changes)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"], ids=len
)
def test_files_that_are_no_config(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json (is not valid JSON|must hold a JSON object)"):
        read_model(tmp_path)


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json: not a model folder"):
        read_model(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_model(tmp_path)


GOOD = [json.loads(text) for text, _ in PUBLISHED]
GOOD += [GOOD[6] | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "truncate": True}}]
GOOD += [GOOD[8] | {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 36}]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.integers(),
    st.floats(),
    st.sampled_from(["", "yarn", "linear", "dynamic", "llama3", "default", "silu", "bfloat16", "full_attention"]),
    st.lists(st.integers(-2, 5) | st.text(max_size=3) | st.lists(st.none(), max_size=1), max_size=3),
    st.dictionaries(st.sampled_from(["type", "factor", "rope_theta", "x"]), st.integers(-1, 5) | st.none(), max_size=2),
)


@settings(max_examples=600, deadline=None)
@given(base=st.sampled_from(GOOD), data=st.data())
def test_any_change_gives_a_model_or_a_config_error(base, data):
    values = copy.deepcopy(base)
    for _ in range(data.draw(st.integers(1, 3))):
        place = values
        scaling = values.get("rope_scaling")
        if isinstance(scaling, dict) and scaling and data.draw(st.booleans()):
            place = scaling
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(VALUES)
    try:
        model = read_model_config(HFConfig(values, "some/config.json"))
    except ConfigError as error:
        refusal = str(error)
    else:
        assert isinstance(model, ModelConfig)
        with np.errstate(over="ignore"):  # in a branch that is not taken
            assert np.isfinite(inverse_frequencies(model.ropes["default"], model.head_dim)).all()
        assert sharded_kv_heads(model, 1) == model.num_kv_heads
        return
    assert refusal.startswith("some/config.json")


@settings(max_examples=50)
@given(text=st.text())
@example(text="null")
def test_any_text_is_a_model_or_a_config_error(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_bytes(text.encode(errors="replace"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model(folder)


# The operator's settings


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("max_model_len must be between 1 and", {"max_model_len": 0}),
        ("max_num_seqs must be between 1 and", {"max_num_seqs": 0}),
        ("max_num_batched_tokens must be between", {"max_num_batched_tokens": -5}),
        ("kv_pages must be between 2 and", {"kv_pages": 1}),
        ("page_size must be 8, 16, .* got 17", {"page_size": 17}),
        (r"memory_utilization must be in \[0.05, 1.0\], got 90", {"memory_utilization": 90}),
        ("memory_utilization must be in", {"memory_utilization": math.nan}),
        ("tensor_parallel_size must be between 1", {"tensor_parallel_size": 0}),
        ("dtype must be one of auto, .* got 'int4'", {"dtype": "int4"}),
        ("load_format must be one of auto, dummy", {"load_format": "pickle"}),
    ],
)
def test_settings_out_of_range(message, settings):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="x", **settings)


def test_more_devices_than_there_are():
    with pytest.raises(ConfigError, match=r"needs 9 devices, but JAX sees 8 cpu.*device_count=9"):
        make_mesh(9)
    with pytest.raises(ConfigError, match="JAX sees 1 cpu"):
        make_mesh(2, jax.devices()[:1])


@pytest.mark.parametrize(
    ("text", "size", "kv_heads"),
    [
        (LLAMA_31_8B_INSTRUCT, 1, 8),
        (LLAMA_31_8B_INSTRUCT, 8, 8),
        (LLAMA_31_8B_INSTRUCT, 32, 32),
        (QWEN_25_05B_INSTRUCT, 2, 2),
    ],
)
def test_tensor_parallelism_that_fits(text, size, kv_heads):
    assert sharded_kv_heads(read(text), size) == kv_heads


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        (
            LLAMA_31_8B_INSTRUCT,
            3,
            r"does not divide 8 key-value heads and an MLP width of 14336.*\[1, 2, 4, 8, 16, 32\]",
        ),
        (LLAMA_31_8B_INSTRUCT, 64, "does not divide 32 query heads over 8 key-value heads"),
        (QWEN_25_05B_INSTRUCT, 4, r"14 query heads over 2 key-value heads; this model allows \[1, 2\]"),
    ],
)
def test_tensor_parallelism_that_does_not(text, size, message):
    with pytest.raises(ConfigError, match=message):
        sharded_kv_heads(read(text), size)


def plan(model, **options):
    config = EngineConfig(model="x", **options)
    page_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 16 * 4
    longest = memory.max_model_len(config, model)
    pages, length = memory.plan_pages(config, longest, 16, page_bytes, BUDGET, memory.Needs())
    return length, pages


BUDGET = memory.Budget(total=2**40, utilization=0.9, weights=0, slots=0, reserve=0, most_cache=None)


def test_the_cache_on_cpu_takes_half_of_what_is_free(monkeypatch):
    """Enough for many requests of a common model's whole context, where the memory is there."""
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 20 * 2**30)
    budget = memory.budget(EngineConfig(model="x"), jax.devices("cpu")[0], 1, weights=2**30, slots=2**20)
    page_bytes = 16 * 28 * 2 * 8 * 128 * 4  # of Qwen3-0.6B in float32
    pages, length = memory.plan_pages(EngineConfig(model="x"), 4096, 16, page_bytes, budget, memory.Needs())
    assert 8.75 * 2**30 <= pages * page_bytes <= 10 * 2**30  # the number of pages is a round one
    assert (pages - 1) * 16 // length >= 10
    # No more than all sequences at their longest can use.
    config = EngineConfig(model="x", max_num_seqs=4, max_model_len=1024)
    assert memory.plan_pages(config, 1024, 16, page_bytes, budget, memory.Needs()) == (4 * 64 + 1, 1024)


def test_token_counts_of_penalties_are_bounded():
    model = read(LLAMA_2_7B)
    assert memory.penalty_rows(EngineConfig(model="x"), replace(model, vocab_size=32_000)) == 256
    many = EngineConfig(model="x", max_num_seqs=2048)
    rows = memory.penalty_rows(many, replace(model, vocab_size=262_144))
    slots = jax.eval_shape(lambda: create_slots(2048, 1, 262_144, penalty_rows=rows))
    assert 200 <= rows < 2048
    assert slots.counts.size * 4 + slots.in_prompt.size <= 258 * 2**20
    asked = EngineConfig(model="x", max_num_seqs=2048, max_penalty_seqs=3)
    assert memory.penalty_rows(asked, model) == 3


def test_the_cache_on_cpu_is_bounded():
    budget = memory.Budget(total=2**40, utilization=0.9, weights=0, slots=0, reserve=0, most_cache=100)
    assert memory.plan_pages(EngineConfig(model="x"), 32, 16, 10, budget, memory.Needs()) == (10, 32)


def test_length_beyond_the_model_s_own():
    with pytest.raises(ConfigError, match="max_model_len 4097 is beyond the model's own limit of 4096 tokens"):
        plan(read(LLAMA_2_7B), max_model_len=4097)
    stretched = read(QWEN_25_7B_INSTRUCT, rope_scaling=YARN)
    assert plan(stretched, max_model_len=131072, kv_pages=9000)[0] == 131072
    with pytest.raises(ConfigError, match="own limit of 131072"):
        plan(stretched, max_model_len=131073)


def test_cache_too_small_for_one_request():
    model = read(LLAMA_2_7B)
    with pytest.raises(
        ConfigError, match="needs 7 KV pages of 16, but only 6 fit; lower --max-model-len to 96 or less"
    ):
        plan(model, max_model_len=100, kv_pages=7)
    assert plan(model, max_model_len=100, kv_pages=8) == (100, 8)
    with pytest.raises(ConfigError, match="but only 1 fit"):
        plan(model, kv_pages=2)


def test_length_is_lowered_to_what_fits_where_none_was_asked_for(caplog):
    assert plan(read(LLAMA_2_7B), kv_pages=11) == (160, 11)
    assert "max_model_len lowered from the model's 4096 to 160 tokens" in caplog.text


def test_cache_is_no_larger_than_useful():
    assert plan(read(LLAMA_32_1B), max_model_len=100, max_num_seqs=3) == (100, 3 * 7 + 1)


def test_dtypes():
    model = read()
    chosen = {p: compute_dtype(EngineConfig(model="x"), model, p).name for p in ("cpu", "gpu", "tpu")}
    assert chosen == {"cpu": "float32", "gpu": "bfloat16", "tpu": "bfloat16"}
    assert compute_dtype(EngineConfig(model="x"), read(torch_dtype="float16"), "gpu").name == "float16"
    assert compute_dtype(EngineConfig(model="x"), read(torch_dtype="float32"), "gpu").name == "bfloat16"
    assert compute_dtype(EngineConfig(model="x", dtype="float32"), model, "gpu").name == "float32"


def test_every_family_is_found_by_its_architecture():
    assert {"llama", "mistral", "qwen2", "qwen3"} <= {family.name for family in families()}
    names = [name for family in families() for name in family.architectures]
    assert len(names) == len(set(names))


def test_kimi_k25_under_the_names_of_its_own_file():
    """Its vision_config has other names, and settings of the text beside its own."""
    saved = copy.deepcopy(CASES["kimi_k25_hub"].config)
    published = copy.deepcopy(saved)
    own = published["vision_config"]
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"):
        own[f"vt_{name}"] = own.pop(name)
    for name in ("height", "width", "time"):
        own[f"init_pos_emb_{name}"] = own.pop(f"pos_emb_{name}")
    own |= {"merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "mm_hidden_size": 16, "text_hidden_size": 64}
    own |= {"pos_emb_type": "divided_fixed", "video_attn_type": "spatial_temporal", "projector_hidden_act": "gelu"}
    own |= {"projector_ln_eps": published.pop("projection_layer_norm_eps")}
    published["media_placeholder_token_id"] = published.pop("image_token_id")
    expected = read_model_config(HFConfig(saved))
    assert expected.vision is not None
    assert read_model_config(HFConfig(published)) == expected


@pytest.mark.quick
@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen4_exp_types", {"ple_layer_ids": [0, 1, 2]}, r"ple_layer_ids \[0, 1\] are no layers of linear attention"),
        ("qwen4_exp_types", {"ple_layer_ids": [9]}, r"ple_layer_ids \[9\] are no layers"),
        ("qwen4_exp_types", {"eos_token_id": None}, "ple_layer_ids need an eos_token_id"),
        ("qwen4_exp_types", {"eos_token_id": 512}, "eos_token_id=512 is no token of the vocabulary of 512"),
        (
            "qwen4_exp_types",
            {"ple_embed_dim": 61},
            r"ple_embed_dim=61 is no multiple of \(ngram_size - 1\) \* heads_per_ngram = 6",
        ),
        ("qwen4_exp_types", {"ngram_size": 1}, "ngram_size=1 and ple_conv_kernel_size=3 must both be at least 2"),
        ("qwen4_exp_types", {"ngram_vocab_size_base": 2**30}, "ngram_vocab_size_base=1073741824 must be"),
        ("qwen4_exp_types", {"hc_count": 1}, "hc_count must be above 1, got 1"),
        ("qwen4_exp_types", {"indexer_kv_heads": 2}, "indexer_kv_heads=2 is not supported"),
        ("qwen4_exp_types", {"indexer_budget": 13}, "indexer_budget=13 is no multiple of indexer_compress_ratio=3"),
        ("qwen4_exp_types", {"indexer_head_dim": 8}, "indexer_head_dim=8 is below the 10 channels that turn"),
        ("qwen4_exp_types", {"indexer_n_heads": None}, "has no 'indexer_n_heads'"),
        ("qwen4_exp_types", {"output_gate_type": "tanh"}, "output_gate_type='tanh' is not supported"),
        ("qwen4_exp_types", {"hidden_act": "gelu", "output_gate_type": None}, "needs an output_gate_type"),
        ("qwen4_exp_types", {"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ("qwen4_exp_types", {"layer_types": ["sliding_attention"] * 5}, "layer_types .* are not supported"),
        ("doge_hub", {"is_moe": True}, "is_moe is not supported: a token's experts would depend on the tokens behind"),
        ("doge_hub", {"sliding_window": 2049}, "sliding_window=2049 is not supported beside keep_window"),
        ("diffllama_hub", {"num_key_value_heads": 1}, "num_key_value_heads=1 must be even"),
    ],
)
def test_settings_of_one_family(case, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_model_config(HFConfig(CASES[case].config | changes))


@pytest.mark.parametrize(
    ("case", "setting", "message"),
    [
        ("kimi_k25_hub", {"merge_kernel_size": [2, 1]}, r"merge_kernel_size=\[2, 1\] is no square"),
        ("kimi_k25_hub", {"pos_emb_width": 9}, "pos_emb_width"),
        ("lfm2_vl_hub", {"num_patches": 15}, "num_patches=15 is no square"),
        ("smolvlm_tied", {"num_channels": 1}, "num_channels"),
    ],
)
def test_an_encoder_that_is_not_understood_leaves_the_text(case, setting, message, caplog):
    config = copy.deepcopy(CASES[case].config)
    config["vision_config"] |= setting
    assert read_model_config(HFConfig(config)).vision is None
    assert re.search(message, caplog.text)
