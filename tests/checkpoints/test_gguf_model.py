"""GGUF files as models: the same shapes, weights and answers as the Hugging Face folders they were made from."""

import dataclasses

import gguf
import gguf_files
import numpy as np
import pytest
from gguf_files import Kind
from tiny_models import CASES, IM_END, OTHER_CASES

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.gguf import end_ids
from jaxserve.checkpoints.gguf_model import open_gguf
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.models.config import HFConfig
from jaxserve.models.families import find_family, read_model_config
from jaxserve.pallas_kernels.types import QuantArray

# What GGUF cannot say, or our reader of it: dynamic scaling, YaRN's fine points, windows on some layers, experts, the
# families of `dense_models`.
UNSAID = (
    "llama_dynamic",
    "mixtral_experts",
    "mixtral_window",
    "llama_yarn_options",
    "llama_yarn_factor",
    "qwen2_window",
    "qwen2_layer_types",
    "qwen3_window",
    "qwen2_moe_shared",
    "qwen3_moe_step",
    "qwen3_moe_plain",
)


@pytest.mark.parametrize("case", [case for case in CASES if case not in (*UNSAID, *OTHER_CASES)])
def test_the_same_model(case, model_folders, tmp_path):
    folder = model_folders(case)
    model = open_gguf(gguf_files.write_gguf(folder, tmp_path / "model.gguf"))
    hf = HFConfig(model.config, "model.gguf")
    ours = read_model_config(hf)
    theirs = read_model_config(HFConfig.read(folder))
    assert ours.eos_token_ids[0] == IM_END  # the tokenizer's
    same = {"eos_token_ids": (), "dtype": "", "family": theirs.family if theirs.family != "mistral" else "llama"}
    if ours.has_windows:
        same["family"] = "mistral"
    assert dataclasses.replace(ours, **same) == dataclasses.replace(theirs, **same)
    weights = read_folder(folder)
    assert model.tensors.keys() == weights.keys()
    assert set(find_family(hf).names.values()) >= {name for name in weights if ".layers." not in name}
    for name, tensor in weights.items():
        np.testing.assert_array_equal(model.tensors[name].read(), tensor.read().astype(np.float32), err_msg=name)
        assert model.reader.parts(name) == ()


@pytest.mark.parametrize("case", ["llama_head128", "qwen3_untied"])
def test_quantized_weights(case, model_folders, tmp_path):
    kinds = {"q_proj": Kind.Q4_1, "k_proj": Kind.Q5_0, "up_proj": Kind.Q8_0, "embed_tokens": Kind.F16}

    def kind(name):
        return next((found for part, found in kinds.items() if part in name), Kind.F32)

    folder = model_folders(case)
    model = open_gguf(gguf_files.write_gguf(folder, tmp_path / "model.gguf", kind))
    config = CASES[case].config
    for name, tensor in read_folder(folder).items():
        values = tensor.read()
        stored = kind(name)
        if values.ndim < 2 or stored in (Kind.F32, Kind.F16):
            assert model.reader.parts(name) == ()
            assert isinstance(model.reader.read(name, tensor.shape), np.ndarray)
            continue
        heads = 0
        if case.startswith("llama") and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        raw = gguf.quants.quantize(gguf_files.in_pairs(values, heads) if heads else values, stored)
        want = gguf.quants.dequantize(raw, stored)
        read = model.reader.read(name, tensor.shape)
        assert isinstance(read, QuantArray)
        assert model.reader.parts(name) == (name,)
        np.testing.assert_array_equal(dequantize(read), gguf_files.from_pairs(want, heads) if heads else want)
        np.testing.assert_array_equal(model.tensors[name].read(), dequantize(read))
    assert model.reader.description == "GGUF F16, F32, Q4_1, Q5_0, Q8_0"
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' has shape .*, but the model asks for \[1, 2\]"):
        model.reader.read("lm_head.weight", (1, 2))
    with pytest.raises(CheckpointError, match="'nothing' is missing"):
        model.reader.read("nothing", (1, 2))


def test_types_of_the_package_are_announced(model_folders, tmp_path, caplog, monkeypatch):
    path = gguf_files.write_gguf(
        model_folders("llama_head128"), tmp_path / "model.gguf", lambda n: Kind.IQ2_XS if "o_proj" in n else Kind.F32
    )
    model = open_gguf(path)
    assert "weights of type IQ2_XS are dequantized to floats" in caplog.text
    name = "model.layers.0.self_attn.o_proj.weight"
    assert model.reader.read(name, model.tensors[name].shape).dtype == np.float32
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install jaxserve\[gguf\]"):
        open_gguf(path)


# Metadata


def add(writer, **settings):
    """Adds or replaces keys of the architecture; None removes one. `__` in a name stands for a dot."""
    for key, value in settings.items():
        name = f"{writer.arch}.{key.replace('__', '.')}"
        writer.kv_data[0].pop(name, None)
        if value is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value), None)


@pytest.fixture
def altered(model_folders, tmp_path, monkeypatch):
    """A function that writes a small model with other metadata."""

    def write(case="llama_head128", tensors=None, architecture=None, **settings):
        original = gguf_files.add_rope

        def patched(writer, config, head_dim):
            original(writer, config, head_dim)
            add(writer, **settings)
            for name, values in (tensors or {}).items():
                writer.add_tensor(name, values)
            if architecture:
                kind = gguf.GGUFValueType.get_type(architecture)
                writer.kv_data[0]["general.architecture"] = gguf.gguf_writer.GGUFValue(architecture, kind)

        monkeypatch.setattr(gguf_files, "add_rope", patched)
        return gguf_files.write_gguf(model_folders(case), tmp_path / "model.gguf")

    return write


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"architecture": "rwkv7"},
            r"general.architecture 'rwkv7' is not supported \(only llama, qwen2, qwen2vl, qwen3, qwen3vl, qwen2moe",
        ),
        ({"architecture": [1, 2]}, "general.architecture .* is not supported"),
        ({"block_count": None}, "llama.block_count=None is not supported"),
        ({"block_count": "two"}, "llama.block_count='two' is not supported"),
        ({"block_count": -1}, "llama.block_count=-1 is not supported"),
        ({"embedding_length": 0}, "llama.embedding_length=0 is not supported"),
        ({"attention__head_count_kv": [2, 1]}, r"head_count_kv=array\(\[2, 1\]"),
        ({"attention__value_length": 16}, "llama.attention.value_length=16 is not supported"),
        ({"rope__dimension_count": 16}, "llama.rope.dimension_count=16 is not supported"),
        ({"rope__freq_base": float("nan")}, "llama.rope.freq_base=nan"),
        ({"rope__scaling__type": "longrope"}, "llama.rope.scaling.type='longrope' is not supported"),
        ({"rope__scaling__type": "linear", "rope__scaling__yarn_attn_factor": 1.5}, "yarn_attn_factor=1.5"),
        ({"attention__causal": False}, "llama.attention.causal=False is not supported"),
        ({"expert_count": 8}, "llama.expert_used_count=None is not supported"),
        ({"logit_scale": 0.5}, "settings that are not understood: llama.logit_scale=0.5"),
        (
            {"tensors": {"blk.0.ssm_in.weight": np.ones((2, 2), np.float32)}},
            "'blk.0.ssm_in.weight' is of a",
        ),
        (
            {"rope__scaling__factor": 2.0, "tensors": {"rope_freqs.weight": np.ones(64, np.float32)}},
            "rope_freqs.weight beside rope.scaling.type 'linear' by 2.0",
        ),
        ({"tensors": {"rope_freqs.weight": np.ones(3, np.float32)}}, r"is F32 \[3\], not F32 \[64\]"),
        ({"tensors": {"rope_freqs.weight": np.full(64, np.inf, np.float32)}}, "no scaling of Llama 3.1's kind"),
        ({"tensors": {"rope_freqs.weight": np.arange(64, dtype=np.float32)}}, "no scaling of Llama 3.1's kind"),
        ({"tensors": {"rope_freqs.weight": np.arange(1, 65, dtype=np.float32)}}, "no scaling of Llama 3.1's kind"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refuses_what_it_does_not_understand(altered, settings, message):
    path = altered(**settings)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)


def test_settings_that_change_nothing(altered):
    path = altered(
        expert_count=0,
        attention__head_count_kv=[1, 1],
        feed_forward_length=[160, 160],
        rope__scaling__finetuned=True,
        tensors={"rope_freqs.weight": np.ones(64, np.float32)},
    )
    config = open_gguf(path).config
    assert config["num_key_value_heads"] == 1
    assert "rope_scaling" not in config
    assert config["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", None),
        ("linear", {"rope_type": "linear", "factor": 4.0}),
        (None, {"rope_type": "linear", "factor": 4.0}),
    ],
)
def test_kinds_of_scaling(altered, kind, expected):
    config = open_gguf(altered(rope__scaling__type=kind, rope__scaling__factor=4.0)).config
    assert config.get("rope_scaling") == expected


def test_tokens_that_end_a_turn():
    metadata = {
        "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|eot_id|>", "</s>", "<|eom_id|>"],
        "tokenizer.ggml.token_type": np.array([1, 3, 1, 3, 3]),  # the third stands for its letters alone
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 1,
    }
    assert end_ids(metadata) == [3, 1, 4]
    assert end_ids(metadata | {"tokenizer.ggml.tokens": 5}) == [3, 1]
    assert end_ids({}) == []
