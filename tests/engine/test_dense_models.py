"""Dense families: their recorded answers also come in chunks, from the prefix cache, after preemption, on several
devices, and from files that are written otherwise. One family stands for each choice; the others run with -m slow."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from dense_models import DENSE_CASES, FEW
from engines import generate, make_engine, request
from hypothesis import given, settings
from hypothesis import strategies as st
from image_models import IMAGE_CASES
from moe_models import MOE_CASES
from recurrent_models import RECURRENT_CASES
from safetensors.numpy import load_file, save_file
from tiny_models import CASES

from jaxserve.checkpoints.export import compress, quantization_config
from jaxserve.checkpoints.quantize import Scheme, rtn
from jaxserve.checkpoints.quantized import dequantize
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine import model_plan
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.execution.kv_cache import fitting_page_size
from jaxserve.models.config import HFConfig
from jaxserve.models.families import read_model_config
from jaxserve.models.load import read_model
from jaxserve.models.rope import inverse_frequencies

pytestmark = pytest.mark.compiles

GOLDENS = Path(__file__).parent.parent / "goldens"
# Norms that are split over devices, norms that need all of them, several kinds of layers, and latents.
ON_DEVICES = ("cohere_qk_norm", "olmo2_post", "gemma3_older", "deepseek_v3_groups")
ON_EIGHT = ("cohere_qk_norm", "olmo2_post", "falcon_40b")  # with eight query heads
# Heads that two devices cannot share.
ODD = (
    *("neox_parallel", "gpt2_scaled", "falcon_7b", "gpt_bigcode_shared", "gptj_older", "gpt_neo_windows"),
    *("persimmon_hub", "biogpt_hub", "xglm_hub", "doge_hub", "diffllama_saved"),
)
IN_PARTS = ("gemma3_older", "opt_350m", "deepseek_v3_groups")
CHUNKED = "llama4_chunks"
BIASED = "gpt_oss_sinks"  # biases of experts, which are added behind the sum over devices
# Bounds in bfloat16 for mixtures whose random weights amplify rounding: transformers itself is 0.32, 0.29, 0.19 and
# 0.09 off when it computes in bfloat16.
SENSITIVE = {"axk2_hub": 0.5, "hy_v4_hub": 0.5, "kolibri_hub": 0.3, "granite_moe_swa_older": 0.2}


def cases(usual):
    return [pytest.param(case, marks=[] if case in usual else [pytest.mark.slow]) for case in DENSE_CASES]


def answers(engine, case, tag=""):
    """Completions of the recorded prompts; checks that their tokens are the recorded ones."""
    with np.load(GOLDENS / f"{case}.npz") as golden:
        prompts, expected = ([golden[f"{what}_{i}"].tolist() for i in range(4)] for what in ("prompt", "tokens"))
    found = generate(engine, *(request(f"{tag}{i}", p, max_tokens=64) for i, p in enumerate(prompts)))
    assert [one.token_ids for one in found] == expected
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*(case for case in cases(ON_DEVICES) if case.values[0] not in ODD), CHUNKED, *IMAGE_CASES]
)
def test_on_two_devices(case, model_folders):
    engine = make_engine(model_folders(case), tokens=320, tensor_parallel_size=2, **CASES[case].options)
    answers(engine, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_EIGHT)
def test_on_eight_devices(case, model_folders):
    """Each head of keys and values stands on four of them."""
    answers(make_engine(model_folders(case), tokens=320, tensor_parallel_size=8), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.slow) for case in DENSE_CASES if case not in ODD),
        *(pytest.param(case, marks=pytest.mark.slow) for case in MOE_CASES if case != BIASED and "next" not in case),
        BIASED,
    ],
)
def test_in_bfloat16(case, model_folders):
    """On several devices, where activations and weights are as narrow as this: no type is mixed up."""
    with np.load(GOLDENS / f"{case}.npz") as golden:
        prompt = golden["prompt_3"]
        tokens = golden["tokens_3"]
        expected = golden["logprobs_3"]
    options = {"tensor_parallel_size": 2, "dtype": "bfloat16"} | CASES[case].options
    engine = make_engine(model_folders(case), tokens=320, **options)
    asked = request("0", [*prompt.tolist(), *tokens.tolist()], max_tokens=1, prompt_logprobs=0)
    found = [entry.logprob for entry in generate(engine, asked)[0].prompt_logprobs[len(prompt) :]]
    experts = case in MOE_CASES or case.startswith("deepseek")
    typical = np.median if experts else np.mean  # rounding may change the choice of experts
    assert typical(np.abs(np.array(found) - expected)) < SENSITIVE.get(case, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*cases(IN_PARTS), CHUNKED, *IMAGE_CASES, *(case for case in MOE_CASES if "next" not in case)]
)
def test_in_parts(case, model_folders):
    """In chunks and with too few pages for all, then once more from the cache."""
    options = {"max_model_len": 256} | CASES[case].options
    sights = read_model(model_folders(case)).attentions
    windows = {getattr(sight, "chunk", None) or sight.window for sight in sights}
    pages = 40 if case == CHUNKED else 30 if len(windows) > 1 else 22  # groups of layers have pages of their own
    engine = make_engine(model_folders(case), tokens=16, kv_pages=pages, page_size=16, **options)
    answers(engine, case)
    assert engine.stats().preemptions > 0 or None not in windows
    engine = make_engine(model_folders(case), tokens=48, **options)
    answers(engine, case)
    assert sum(one.num_cached for one in answers(engine, case, "again-")) >= 128


def test_pages_are_parts_of_attention_chunks(model_folders, monkeypatch):
    """The model's chunks have 48 tokens, and the pages of a TPU usually 128."""
    monkeypatch.setattr(model_plan, "default_page_size", lambda platform: 128)
    plan = ModelPlan.of(EngineConfig(model=str(model_folders(CHUNKED))), checks=False)
    assert plan.one_page.page_size == 16


@pytest.mark.slow
def test_answers_with_pages_that_are_parts_of_attention_chunks(model_folders, monkeypatch):
    monkeypatch.setattr(model_plan, "default_page_size", lambda platform: 32)
    answers(make_engine(model_folders(CHUNKED), tokens=48), CHUNKED)


@pytest.mark.parametrize(
    ("chunk", "asked", "found"),
    [(8192, None, 128), (48, None, 16), (40, None, 8), (40, 8, 8), (8192, 256, 256), (50, 32, 32), (600, 16, 16)],
)
def test_page_sizes_that_divide_chunks(chunk, asked, found, model_folders):
    model = with_chunks(model_folders, chunk)
    longest = 16384 if chunk > 600 else 500 if chunk != 50 else 50
    assert fitting_page_size(model, longest, asked, 128) == found


@pytest.mark.parametrize(
    ("chunk", "asked", "message"),
    [
        (48, 32, "page_size 32 does not divide the model's attention chunks of 48 tokens; choose 8 or 16, or set max_"),
        (50, None, "page_size 128 does not divide .* of 50 tokens; no page size does, or set max_model_len to 50 or"),
    ],
)
def test_page_sizes_that_do_not(chunk, asked, message, model_folders):
    with pytest.raises(ConfigError, match=message):
        fitting_page_size(with_chunks(model_folders, chunk), 500, asked, 128)


def with_chunks(model_folders, chunk):
    values = json.loads((model_folders(CHUNKED) / "config.json").read_text())
    return read_model_config(HFConfig(values | {"attention_chunk_size": chunk}))


def rewritten(source, target, config, rename=lambda name: name, extra=None):
    """A copy of a model's folder with another config and other names."""
    shutil.copytree(source, target)
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(target / "model.safetensors")
    save_file({rename(name): x for name, x in tensors.items()} | (extra or {}), target / "model.safetensors")
    return target


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "architecture", "begin"),
    [
        ("gemma3_layer_types", "Gemma3ForConditionalGeneration", "language_model.model."),
        ("gemma3n_older", "Gemma3nForConditionalGeneration", "model.language_model."),
        ("gemma4_unified_scalars", "Gemma4UnifiedForConditionalGeneration", "model.language_model."),
        ("ministral3_scaled", "Mistral3ForConditionalGeneration", "model.language_model."),
        ("llama4_chunks", "Llama4ForConditionalGeneration", "language_model.model."),
        ("mistral4_groups", "Mistral3ForConditionalGeneration", "model.language_model."),
        ("deepseek_v3_groups", "KimiK25ForConditionalGeneration", "language_model.model."),
        ("aria_text_hub", "AriaForConditionalGeneration", "language_model.model."),
        ("granite_plain_attention", "Granite4VisionForConditionalGeneration", "model.language_model."),
    ],
)
def test_beside_an_encoder_of_images(case, architecture, begin, model_folders, tmp_path):
    """The text of models that see images, in the layouts of transformers before 5 and of 5."""
    text = {key: value for key, value in CASES[case].config.items() if key not in ("architectures", "dtype")}
    tied = text.get("tie_word_embeddings", False)
    whole = {
        "architectures": [architecture],
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "dtype": "float32",
    }
    head = "language_model.lm_head." if begin == "language_model.model." else "lm_head."

    def rename(name):
        return name.replace("lm_head.", head) if name.startswith("lm_head.") else begin + name.removeprefix("model.")

    vision = {"vision_tower.patch_conv.weight": np.ones((8, 3), np.float32)}
    config = whole | {"tie_word_embeddings": tied, "eos_token_id": [2, 3], "image_token_index": 10}
    folder = rewritten(model_folders(case), tmp_path / "model", config, rename, vision)
    engine = make_engine(folder, tokens=320)
    answers(engine, case)


@pytest.mark.slow
def test_the_text_of_a_model_that_speaks(model_folders, tmp_path):
    """As published: the whole has other parts beside the one that thinks."""
    case = "qwen2_5_omni_thinker"
    thinker = {key: value for key, value in CASES[case].config.items() if key not in ("architectures", "dtype")}
    whole = {"architectures": ["Qwen2_5OmniModel"], "dtype": "float32", "thinker_config": thinker}
    whole |= {"talker_config": {"hidden_size": 8}, "token2wav_config": {"a": 1}, "enable_audio_output": True}
    others = {f"{part}.a.weight": np.ones((8, 3), np.float32) for part in ("talker", "token2wav")}
    folder = rewritten(model_folders(case), tmp_path / "model", whole, lambda name: f"thinker.{name}", others)
    answers(make_engine(folder, tokens=320), case)


@pytest.mark.parametrize("devices", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_few_tokens_are_kept(devices, model_folders, tmp_path):
    """Doge's attention keeps the tokens with the largest biases, where there are more than a setting says. Tokens of
    equal biases, as a token that comes twice has in the first layer, are kept in their order; transformers takes any of
    them, and other ones with a cache than without one. So here all tokens differ."""
    folder = shutil.copytree(model_folders("doge_hub"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"keep_window_size": FEW}))
    with np.load(GOLDENS / "doge_hub.npz") as golden:
        prompt, expected = golden["few_prompt"].tolist(), golden["few"]
    engine = make_engine(folder, tokens=24, tensor_parallel_size=devices)
    found = generate(engine, *(request(str(i), prompt, max_tokens=3, prompt_logprobs=0) for i in range(2)))
    for one in found:
        np.testing.assert_allclose([entry.logprob for entry in one.prompt_logprobs[1:]], expected, atol=2e-3)


def test_minicpm_is_granite_by_other_names(model_folders, tmp_path):
    given = DENSE_CASES["granite_plain_attention"].config
    named = {"scale_emb": 3, "scale_depth": 0.4 * 2**0.5, "dim_model_base": 160, "rope_theta": 10000.0}
    dropped = (
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
        "rope_parameters",
    )
    config = {key: value for key, value in given.items() if key not in dropped}
    config |= named | {"architectures": ["MiniCPMForCausalLM"], "tie_word_embeddings": False}
    folder = rewritten(model_folders("granite_plain_attention"), tmp_path / "model", config)
    answers(make_engine(folder, tokens=320), "granite_plain_attention")


@pytest.mark.slow
def test_gpt2_as_it_was_first_published(model_folders, tmp_path):
    """Without the beginning of the names, and with the mask that was saved."""
    config = DENSE_CASES["gpt2_inner"].config
    mask = {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)}
    source = model_folders("gpt2_inner")
    folder = rewritten(source, tmp_path / "model", config, lambda name: name.removeprefix("transformer."), mask)
    answers(make_engine(folder, tokens=320), "gpt2_inner")


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.integers(),
    st.floats(),
    st.sampled_from(["", "yarn", "longrope", "gelu", "silu", "full_attention", "sliding_attention", "LG"]),
    st.lists(st.integers(-2, 5) | st.text(max_size=3), max_size=3),
    st.dictionaries(
        st.sampled_from(["type", "factor", "rope_theta", "full_attention"]), st.integers(-1, 5), max_size=2
    ),
)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(case=st.sampled_from(sorted(DENSE_CASES | RECURRENT_CASES)), data=st.data())
def test_any_change_of_a_config_gives_a_model_or_a_config_error(case, data):
    values = copy.deepcopy(CASES[case].config)
    for _ in range(data.draw(st.integers(1, 3))):
        place = values
        for key in ("rope_scaling", "rope_parameters", "full_attention"):
            if isinstance(place.get(key), dict) and place[key] and data.draw(st.booleans()):
                place = place[key]
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(VALUES)
    try:
        model = read_model_config(HFConfig(values, "some/config.json"))
    except ConfigError as error:
        refusal = str(error)
    else:
        with np.errstate(over="ignore"):
            for name, rope in model.ropes.items():
                assert np.isfinite(inverse_frequencies(rope, model.rotated_dim(name))).all()
        return
    assert refusal.startswith("some/config.json")


def test_longrope_needs_an_original_length():
    """Its attention is divided by the logarithm of this length."""
    values = DENSE_CASES["phi3_longrope_short"].config | {"original_max_position_embeddings": 1}
    with pytest.raises(ConfigError, match="original_max_position_embeddings must be at least 2, got 1"):
        read_model_config(HFConfig(values, "some/config.json"))


def quantized(source, target, config):
    """Copies of a model's folder: with the layers' matrices in 8 bits in groups of 8 with zero points, and with the
    floats that these stand for."""
    weights = {}
    plain = {}
    for name, x in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if x.ndim == 2 and any(part.isdigit() for part in name.split(".")) and "norm" not in name:
            weights[module] = rtn(x, Scheme("int8", group_size=8, symmetric=False))
        else:
            plain[name] = x
    whole = {f"{module}.weight": np.asarray(dequantize(w), np.float32) for module, w in weights.items()}
    coded = {name: x for module, w in weights.items() for name, x in compress(module, w).items()}
    settings = {"quantization_config": quantization_config(weights, ["lm_head"])}
    folders = []
    for kind, tensors, extra in (("floats", whole, {}), ("codes", coded, settings)):
        shutil.copytree(source, target / kind)
        (target / kind / "config.json").write_text(json.dumps(config | extra))
        save_file({**plain, **tensors}, target / kind / "model.safetensors")
        folders.append(target / kind)
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", ["phi3_longrope", "falcon_40b", "glm4_sandwich"])
def test_parts_of_quantized_tensors(case, devices, model_folders, tmp_path):
    """Fused projections, and heads whose channels are reordered: codes, scales and zero points go where floats go."""
    likelihoods = []
    for folder in quantized(model_folders(case), tmp_path, DENSE_CASES[case].config):
        engine = make_engine(folder, tokens=64, tensor_parallel_size=devices, matmul_backend="auto")
        asked = request("0", range(5, 55), max_tokens=1, prompt_logprobs=0)
        likelihoods.append([entry.logprob for entry in generate(engine, asked)[0].prompt_logprobs[1:]])
    floats, codes = np.array(likelihoods)
    assert np.abs(floats - codes).max() < 0.02
