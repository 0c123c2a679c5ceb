"""Folders in Mistral's own format are the same models as their twins in Hugging Face's."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from engines import generate, make_engine, request
from flax.traverse_util import flatten_dict
from picture_prompts import PROMPTS, Texts, build, prompt_of
from PIL import Image
from safetensors.numpy import save_file

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.mistral_native import is_native, pixtral_processor, read_params
from jaxserve.config import ConfigError
from jaxserve.devices.mesh import make_mesh
from jaxserve.images.processing import ImageProcessor
from jaxserve.images.prompts import with_images
from jaxserve.llm import LLM
from jaxserve.models.config import HFConfig
from jaxserve.models.families import read_model_config
from jaxserve.models.load import load_params, make_decoder, read_model
from jaxserve.types import SamplingParams

TOKENIZER = Path(__file__).parents[1] / "goldens" / "tokenizers" / "bpe.model"
KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "head_dim": "head_dim",
    "sliding_window": "sliding_window",
    "max_position_embeddings": "max_seq_len",
}
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers.": "layers.",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
ENCODER_NAMES = {
    "vision_tower.": "vision_encoder.",
    "attention.q_proj": "attention.wq",
    "attention.k_proj": "attention.wk",
    "attention.v_proj": "attention.wv",
    "attention.o_proj": "attention.wo",
    "feed_forward.gate_proj": "feed_forward.w1",
    "feed_forward.down_proj": "feed_forward.w2",
    "feed_forward.up_proj": "feed_forward.w3",
    "multi_modal_projector.norm": "pre_mm_projector_norm",
    "multi_modal_projector.patch_merger": "patch_merger",
    "multi_modal_projector.linear_1": "vision_language_adapter.w_in",
    "multi_modal_projector.linear_2": "vision_language_adapter.w_out",
    "language_model.": "",
}
# Cases that see, and what their params.json says of it beside the encoder's sizes.
SEEING = {
    "llava_pixtral": {"mm_projector_id": "", "adapter_bias": True},
    "mistral3_seeing": {
        "mm_projector_id": "patch_merge", "adapter_bias": False, "add_pre_mm_projector_layer_norm": True,
        "spatial_merge_size": 2, "max_image_size": 56,
    },
}  # fmt: skip


def native(case, folder, files=1, **changes):
    """A case in Mistral's format, with rows of queries and keys moved one by one."""
    config = tiny_models.CASES[case].text
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    params = {theirs: config[ours] for ours, theirs in KEYS.items() if config.get(ours) is not None}
    (folder / "params.json").write_text(json.dumps(params | {"head_dim": dim} | changes))
    vision = tiny_models.CASES[case].config.get("vision_config")
    tensors = {}
    for name, tensor in tiny_models.tensors(case):
        made = np.asarray(tensor)
        if "q_proj" in name or "k_proj" in name:
            size = vision["head_dim"] if "vision_tower" in name else dim
            moved = made.copy()
            for row in range(len(made)):
                head, place = divmod(row, size)
                moved[head * size + (2 * place if place < size // 2 else 2 * (place - size // 2) + 1)] = made[row]
            made = moved
        for ours, theirs in ENCODER_NAMES.items() if vision else ():
            name = name.replace(ours, theirs)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = made
    for i in range(files):
        name = "consolidated.safetensors" if files == 1 else f"consolidated-{i + 1:05}-of-{files:05}.safetensors"
        save_file(dict(list(tensors.items())[i::files]), folder / name)
    return folder


def params(folder):
    mesh = make_mesh(1)
    decoder = make_decoder(read_model(folder), mesh, jnp.dtype("float32"))
    return flatten_dict(load_params(decoder, folder, mesh, progress=False), sep="/")


@pytest.mark.parametrize(("case", "files"), [("mistral_plain", 1), ("mistral_window", 2), ("mistral_head_dim", 1)])
def test_the_same_model(case, files, model_folders, tmp_path):
    folder = native(case, tmp_path, files)
    assert is_native(folder)
    ours = params(folder)
    theirs = params(model_folders(case))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    here = read_model(folder)
    there = read_model(model_folders(case))
    assert (here.layers, here.ropes, here.max_position) == (there.layers, there.ropes, there.max_position)


@pytest.mark.compiles
@pytest.mark.parametrize("case", SEEING)
def test_the_same_pictures(case, tmp_path):
    """With the processor's settings that params.json implies."""
    config = tiny_models.CASES[case].config
    vision = {key: value for key, value in config["vision_config"].items() if key not in ("hidden_act", "model_type")}
    encoder = vision | {"image_size": 56, "image_token_id": 505, "rope_theta": vision.get("rope_theta", 10000.0)}
    ours = tmp_path / "native"
    ours.mkdir()
    native(case, ours, rope_theta=10000.0, vision_encoder=encoder | SEEING[case])
    theirs = build(case, tmp_path / "hf")
    (theirs / "preprocessor_config.json").write_text(json.dumps(pixtral_processor(4, 56)))
    found, expected = ([], [])
    for folder, results in ((ours, found), (theirs, expected)):
        engine = make_engine(folder, tokens=64)
        processor = ImageProcessor.of(engine.model_folder, engine.sees)
        for slot in range(len(PROMPTS)):
            tokens, pictures = prompt_of(case, slot, 0)
            processed = [processor(Image.fromarray(picture)) for picture in pictures]
            tokens, images = with_images(tokens, processed, engine.sees, Texts(case))
            asked = request(str(slot), tokens, max_tokens=8, logprobs=0)
            asked.images = images
            (result,) = generate(engine, asked)
            results.append((result.token_ids, [entry.logprob for entry in result.logprobs]))
    assert found == expected


@pytest.mark.slow
def test_it_generates_with_the_tokenizer_beside_it(model_folders, tmp_path):
    folder = native("mistral_plain", tmp_path)
    shutil.copy(TOKENIZER, folder / "tokenizer.model.v3")
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 128, "kv_pages": 16}
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    ours = LLM(folder, **options).generate("Hello", params, progress=False)[0]
    theirs = LLM(model_folders("mistral_plain"), tokenizer=str(folder), **options)
    same = theirs.generate("Hello", params, progress=False)[0]
    assert ours.prompt_token_ids[0] == 1
    assert same.prompt_token_ids == ours.prompt_token_ids
    assert same.outputs[0].token_ids == ours.outputs[0].token_ids


def read(folder, **values):
    base = {
        "dim": 64,
        "n_layers": 2,
        "hidden_dim": 160,
        "n_heads": 4,
        "n_kv_heads": 2,
        "norm_eps": 1e-5,
        "vocab_size": 512,
    }
    (folder / "params.json").write_text(json.dumps(base | values))
    return read_model_config(HFConfig(read_params(folder), str(folder / "params.json")))


def test_what_is_not_said(tmp_path):
    assert read(tmp_path).ropes["default"].theta == 1e6
    windowed = read(tmp_path, sliding_window=4096)
    assert windowed.ropes["default"].theta == 10000.0
    assert [layer.attention.window for layer in windowed.layers] == [4096, 4096]
    yarn = {"original_max_position_embeddings": 16384, "factor": 16, "apply_scale": False, "beta": 32, "alpha": 1}
    rope = read(tmp_path, yarn=yarn).ropes["default"]
    assert (rope.scaling, rope.factor, rope.attention_factor, rope.beta_fast) == ("yarn", 16.0, 1.0, 32.0)


@pytest.mark.parametrize(
    "changes", [{"moe": {"num_experts": 8}}, {"quantization": {"qformat_weight": "fp8"}}, {"q_lora_rank": 8}]
)
def test_other_models_are_refused(changes, tmp_path):
    with pytest.raises(
        ConfigError, match=rf"params\.json has settings that jaxserve does not understand: {next(iter(changes))}"
    ):
        read(tmp_path, **changes)


@pytest.mark.parametrize("changes", [{"mm_projector_id": "other"}, {"spatial_merge_size": 2}, {"num_channels": 4}])
def test_encoders_that_are_not_read(changes, tmp_path, caplog):
    """The text is."""
    encoder = {"hidden_size": 16, "num_attention_heads": 2, "patch_size": 4, **changes}
    assert read(tmp_path, vision_encoder=encoder).vision is None
    assert f"pictures are not read: {tmp_path / 'params.json'}: vision_config" in caplog.text
    assert next(iter(changes)) in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", '{"dim": 4096, "multiple_of": 256}'])
def test_other_files_of_that_name(text, tmp_path):
    (tmp_path / "params.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"params\.json is not"):
        read_model(tmp_path)
