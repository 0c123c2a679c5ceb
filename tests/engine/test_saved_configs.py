"""config.json as transformers 5 writes it. Each architecture is made with transformers' own config class, and the
source of transformers' model says which of its settings it reads.

Each test goes through all architectures, since `make test` runs only some cases of a test."""

import itertools
import json
import re
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import transformers
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from jaxserve.config import ConfigError
from jaxserve.models.config import HARMLESS, HFConfig
from jaxserve.models.families import families, read_model_config

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.partition(".")[0]) < 5, reason="needs the config classes of transformers 5"
)
ROOT = Path(transformers.__file__).parent
PUBLISHED = {
    name: values
    for file in ("published_configs", "published_dense", "published_experts")
    for name, values in json.loads((Path(__file__).parent.parent / f"{file}.json").read_text()).items()
}
OWN_CODE = {
    "InternLM3ForCausalLM",
    "MiniCPMForCausalLM",
}  # repositories bring the code; transformers has none
LAYERS = 6
_TYPES = ["full_attention", "sliding_attention", "full_attention"] * 2
_CONVOLUTIONS = ["conv", "conv", "full_attention"] + ["conv"] * 3
# Settings beside the class's defaults, which are no model by themselves.
_MAMBA = ["linear_attention", "full_attention"] + ["linear_attention"] * 4
_ROPES = {"full_attention": {"rope_theta": 7.0, "rope_type": "default"}}
_INDEXER = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}  # fmt: skip
NEEDED = {
    "BailingHybridForCausalLM": {"linear_head_dim": 128},  # without it, its class takes head_dim, which it has changed
    "BambaForCausalLM": {"attn_layer_indices": [2]},
    "Zamba2ForCausalLM": {"layers_block_type": ["linear_attention", "hybrid"] * 3},
    "GraniteMoeHybridForCausalLM": {"layer_types": _MAMBA},
    "CohereCompassForCausalLM": {"rope_parameters": _ROPES},
    "CohereCompassForConditionalGeneration": {"text_config": {"rope_parameters": _ROPES}},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Glm4MoeForCausalLM": {"head_dim": 64},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"head_dim": 64}},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 3]]},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 1},
    "HunYuanMoEV1ForCausalLM": {"num_experts": 8},
    "Qwen3OmniMoeThinkerForConditionalGeneration": {"text_config": {"head_dim": 64}},
    "Qwen3OmniMoeForConditionalGeneration": {"thinker_config": {"text_config": {"head_dim": 64}}},
    "Qwen4ExpForCausalLM": _INDEXER,
    "Qwen4ExpForConditionalGeneration": {"text_config": _INDEXER},
}
# Settings beside which others have an effect that they do not have beside the defaults.
EFFECTIVE = {
    "Cohere2MoeForCausalLM": {
        "expert_selection_fn": "sigmoid", "layer_types": _TYPES, "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        "num_shared_experts": 1,
    },
    "Dots1ForCausalLM": {"first_k_dense_replace": 1, "sliding_window": 8, "layer_types": _TYPES},
    "Mistral4ForCausalLM": {"first_k_dense_replace": 1},
    "DeepseekV2ForCausalLM": {
        "first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 4,
    },
    "Ernie4_5_MoeForCausalLM": {"moe_layer_end_index": 3},
    "FalconH1ForCausalLM": {"mamba_d_ssm": None, "mamba_rms_norm": True},
    "FalconForCausalLM": {"new_decoder_architecture": True, "num_kv_heads": 71, "num_ln_in_parallel_attn": 1},
    "GlmMoeDsaForCausalLM": {"indexer_types": ["full", "full", "shared"] * 2},
    "Gemma3nForCausalLM": {"activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0, 0.0]},
    "Gemma4ForCausalLM": {
        "layer_types": _TYPES, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "enable_moe_block": True,
        "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64,
    },
    "Gemma4UnifiedForCausalLM": {"layer_types": _TYPES, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "GptOssForCausalLM": {"swiglu_limit": 6.0},
    "Lfm2ForCausalLM": {"layer_types": _CONVOLUTIONS, "block_multiple_of": 250},
    "Lfm2MoeForCausalLM": {"layer_types": _CONVOLUTIONS},
    "LagunaForCausalLM": {"sliding_window": 8, "layer_types": _TYPES},
    "Llama4ForCausalLM": {"interleave_moe_layer_step": 2},
    "CohereCompassForCausalLM": {
        "layer_types": _TYPES, "rope_parameters": _ROPES | {"sliding_attention": {"rope_theta": 8.0}},
    },
    "MiniMaxM3VLForCausalLM": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 3, "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    },
    "MellumForCausalLM": {
        "sliding_window": 8, "layer_types": _TYPES, "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    },
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 8, "layer_types": _TYPES},
    "Qwen2MoeForCausalLM": {
        "use_sliding_window": True, "sliding_window": 8, "layer_types": _TYPES, "mlp_only_layers": [1],
    },
    "Qwen3ForCausalLM": {"use_sliding_window": True, "sliding_window": 8, "layer_types": _TYPES},
    "Qwen3MoeForCausalLM": {"use_sliding_window": True, "sliding_window": 8, "mlp_only_layers": [1]},
    "Qwen3NextForCausalLM": {"mlp_only_layers": [1]},
    "Qwen4ExpForCausalLM": {"ple_layer_ids": [1, 3], "eos_token_id": 2},
    "SmolLM3ForCausalLM": {"use_sliding_window": True, "sliding_window": 8, "layer_types": _TYPES},
    "ZayaForCausalLM": {"sliding_window": 8, "layer_types": ["hybrid", "hybrid_sliding"] * 3},
}  # fmt: skip
_OF_MAMBA = (  # of random weights, or a matter of rounding
    "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_max", "time_step_min",
)  # fmt: skip
_OF_SCAN = ("time_step_init_scheme", "time_step_scale", "use_associative_scan", "use_mambapy")
# Settings that a model's source reads, and that change nothing here.
WITHOUT_EFFECT = {
    "JetMoeForCausalLM": {"aux_loss_coef"},  # for training
    "ZambaForCausalLM": {  # of random weights, or have no effect in transformers
        "num_logits_to_keep",
        "time_step_floor",
        "time_step_max",
        "time_step_min",
        "use_associative_scan",
        "use_mamba_kernels",
    },
    "BailingHybridForCausalLM": {"num_key_value_heads", "head_dim", "num_nextn_predict_layers"},
    "AXK1ForCausalLM": {"num_key_value_heads", "head_dim"},
    "AXK2ForCausalLM": {"num_key_value_heads", "head_dim"},
    "CohereCompassForCausalLM": {"pooling"},  # of embeddings
    "MiniMaxM3VLForCausalLM": {"hidden_act"},  # the activation is fixed
    "HYV4ForCausalLM": {"num_key_value_heads", "head_dim", "learnable_sink_init"},
    "LongcatFlashForCausalLM": {"num_key_value_heads", "head_dim", "qk_head_dim"},
    "BambaForCausalLM": {"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"},
    "BloomForCausalLM": {"slow_but_exact"},  # a matter of rounding
    "DeepseekV2ForCausalLM": {"num_key_value_heads", "head_dim"},  # follow from others
    "DeepseekV3ForCausalLM": {"num_key_value_heads", "head_dim"},
    "Gemma3nForCausalLM": {"altup_coef_clip"},  # for training
    "Glm4MoeLiteForCausalLM": {"num_key_value_heads"},
    "GlmMoeDsaForCausalLM": {"num_key_value_heads", "head_dim"},
    "DiffLlamaForCausalLM": {"lambda_std_dev"},  # of random weights
    "DogeForCausalLM": {"norm_topk_prob", "num_experts", "num_experts_per_tok"},  # of is_moe, which is refused
    "FalconH1ForCausalLM": {"mamba_chunk_size", "num_logits_to_keep"},
    "FalconMambaForCausalLM": {*_OF_MAMBA, *_OF_SCAN},
    "JambaForCausalLM": {"use_mamba_kernels", "use_associative_scan", "use_mambapy"},
    "KimiLinearForCausalLM": {"num_key_value_heads"},
    "Mamba2ForCausalLM": {"chunk_size", "time_step_rank", *_OF_MAMBA},
    "MambaForCausalLM": {*_OF_MAMBA, *_OF_SCAN},
    "MiniMaxForCausalLM": {"block_size"},
    "MiniCPM3ForCausalLM": {"num_key_value_heads", "head_dim"},
    "LagunaForCausalLM": {"num_attention_heads"},
    "Mistral4ForCausalLM": {"num_key_value_heads", "head_dim"},
    "YoutuForCausalLM": {"num_key_value_heads", "head_dim"},
    "Zamba2ForCausalLM": {  # of random weights, follow from others, or have no effect in transformers
        "attention_head_dim",
        "attention_hidden_size",
        "chunk_size",
        "hybrid_layer_ids",
        "mamba_headdim",
        "num_logits_to_keep",
        "time_step_floor",
        "time_step_max",
        "use_conv_bias",
        "use_mamba_kernels",
    },
    "DeepseekV32ForCausalLM": {"num_key_value_heads", "head_dim"},
    "Exaone4ForCausalLM": {"sliding_window_pattern"},  # layer_types says the same
    "OlmoHybridForCausalLM": {  # of random weights
        "linear_a_log_min",
        "linear_a_log_max",
        "linear_dt_min",
        "linear_dt_max",
        "linear_dt_init_floor",
    },
    "ExaoneMoeForCausalLM": {"sliding_window_pattern"},
    "HYV3ForCausalLM": {"enable_moe_fp32_combine"},  # a matter of rounding
    "GraniteMoeHybridForCausalLM": {"mamba_chunk_size"},
    "NemotronHForCausalLM": {
        "chunk_size",
        "num_logits_to_keep",
        "rescale_prenorm_residual",
        "time_step_floor",
        "time_step_max",
        "use_mamba_kernels",
    },
}
# Settings that transformers reads outside of a model's source, or that are part of every config.
GENERAL = {"architectures", "model_type", "transformers_version", "dtype", "eos_token_id", "tie_word_embeddings"}
# Read by config classes, which then write another window, another rope_parameters, or have a property that the model
# reads. The class of Cohere2Moe has rope_scaling without a use; it is refused.
BY_CLASS = {
    *("use_sliding_window", "rope_theta", "rope_scaling", "dim_model_base", "attn_layer_indices"),
    *("moe_apply_router_weight_on_input", "num_kv_shared_layers"),
    *("attn_layer_offset", "attn_layer_period", "expert_layer_offset", "expert_layer_period"),
    "model_max_length",  # Kimi Linear's name of max_position_embeddings
}
ANY = (None, True, 0, 7777, 0.37, "other", [1], {"a": 1})


@cache
def reads(path):
    """The settings that a source file of transformers reads."""
    source = path.read_text()
    return set(re.findall(r"config\.(\w+)", source)) | set(re.findall(r"""attr\(\s*[\w.]*config, ["'](\w+)""", source))


SHARED = set().union(*(reads(ROOT / f"{name}.py") for name in ("modeling_rope_utils", "masking_utils", "cache_utils")))


def source_of(config_class):
    folder = Path(sys.modules[config_class.__module__].__file__).parent
    return folder / f"modeling_{folder.name}.py"


def classes():
    """Architecture -> the config class of the model that transformers has for it. Names from before transformers had a
    model get the class of their family."""
    named = {}
    unlisted = {"mistral4": "Mistral4ForCausalLM"}
    tables = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, unlisted
    for kind, names in [pair for table in tables for pair in table.items()]:
        for name in (names,) if isinstance(names, str) else names:
            named.setdefault(name, []).append(kind)
    found = {}
    for family in families():
        for architecture in family.architectures:
            kinds = [CONFIG_MAPPING[kind] for kind in named.get(architecture, ()) if kind in CONFIG_MAPPING]
            own = [one for one in kinds if source_of(one).exists()]
            own = [one for one in own if f"class {architecture}(" in source_of(one).read_text()]
            # Where a model also is a part of another one with images, its own config is that of text.
            own.sort(key=lambda one: "text" not in one.model_type)
            if own:
                found[architecture] = own[0]
        for architecture in family.architectures:
            if architecture not in found and family.architectures[0] in found:
                found[architecture] = found[family.architectures[0]]
    return found


CLASSES = classes()
OF_TEXT = [
    name
    for name, one in CLASSES.items()
    if name.endswith(("CausalLM", "LMHeadModel")) and f"class {name}(" in source_of(one).read_text()
]


def plain(config):
    return json.loads(json.dumps(config))


def read(values, name):
    return read_model_config(HFConfig(values, name))


@cache
def made(architecture, effective=True):
    """The config of an architecture, and all its settings as an object."""
    few = {"num_hidden_layers": LAYERS} if architecture in OF_TEXT else {}
    more = EFFECTIVE.get(architecture, {}) if effective else {}
    config = CLASSES[architecture](architectures=[architecture], **few | NEEDED.get(architecture, {}) | plain(more))
    return config, plain(config.to_dict())


def saved(config):
    """What transformers writes to config.json, and what it writes after it has read that."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        config.save_pretrained(first)
        AutoConfig.from_pretrained(first).save_pretrained(second)
        return [json.loads(Path(folder, "config.json").read_text()) for folder in (first, second)]


def test_every_architecture_has_a_class():
    names = {name for family in families() for name in family.architectures}
    assert names - CLASSES.keys() == OWN_CODE


def test_every_form_of_a_config_means_the_same():
    cases = [(name, False) for name in CLASSES] + [(name, True) for name in EFFECTIVE]
    for architecture, effective in cases:
        config, everything = made(architecture, effective)
        model = read(everything, architecture)
        again = [json.loads(config.to_json_string(use_diff=diff)) for diff in (False, True)]
        for form in (*again, *saved(config)):
            assert read(form, architecture) == model, architecture


def test_exaone_without_windows_saved_again():
    full = ["full_attention"] * LAYERS
    config = CLASSES["Exaone4ForCausalLM"](
        architectures=["Exaone4ForCausalLM"], num_hidden_layers=LAYERS, sliding_window=None, layer_types=full
    )
    for form in saved(config):
        assert form["sliding_window_pattern"] == 0
        assert not read(form, "").has_windows


def test_settings_without_a_reader_may_have_any_value():
    """Those of transformers' class that neither the model nor the code that all models share reads. Of a model that
    sees, only the settings of its text count here."""
    refused = []
    for architecture in CLASSES:
        _, values = made(architecture)
        model = replace(read(values, architecture), vision=None)
        is_text = "text_config" not in values
        read_ones = read_by(CLASSES[architecture]) | SHARED | BY_CLASS if is_text else {"text_config"}
        unread = values.keys() - read_ones - GENERAL
        assert {"id2label", "chunk_size_feed_forward"} <= unread
        # What every architecture may have is not read anywhere, so one value will do.
        changes = [{key: value} for key in unread - HARMLESS for value in ANY] + [dict.fromkeys(unread & HARMLESS, 7)]
        for change in changes:
            try:
                assert replace(read(values | change, architecture), vision=None) == model, (architecture, change)
            except ConfigError as error:
                refused.append(str(error))
    assert refused == []


def read_by(config_class):
    names = reads(source_of(config_class))
    aliases = config_class.attribute_map
    return names | {aliases[name] for name in names if name in aliases}


def test_settings_with_a_reader_change_the_model_or_are_refused():
    """Beside the defaults, or beside settings that let them have an effect."""
    silent = {}
    for architecture in OF_TEXT:
        own = read_by(CLASSES[architecture]) - GENERAL - HARMLESS
        cases = [made(architecture, effective)[1] for effective in (False, True)]
        silent[architecture] = {
            key for key in own & cases[0].keys() if all(has_no_effect(values, key) for values in cases)
        }
    assert {architecture: keys for architecture, keys in silent.items() if keys} == WITHOUT_EFFECT


def has_no_effect(values, key):
    """Whether another value of `key` is accepted and changes nothing. What is refused must be named."""
    model = read(values, "")
    for value in others(values[key]):
        try:
            if read(values | {key: value}, "") == model:
                return True
        except ConfigError as error:
            if not re.search(rf"\b{key}\b|heads?\b|head_dim|layers|layer_types|groups", str(error)):
                raise
    return False


def others(value):
    """Other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [2 * value or 2]
    if isinstance(value, str):
        return ["tanh"]
    if isinstance(value, list):
        return [value[1:]] if value and isinstance(value[0], int) else [value[::-1]] if value != value[::-1] else []
    return [] if isinstance(value, dict) else [True, 3, 0.5]


def test_settings_that_are_left_out():
    """They mean what the class of transformers fills in, or the message names them."""
    missed = []
    for architecture in OF_TEXT:
        _, values = made(architecture)
        model = read(values, architecture)
        chosen = EFFECTIVE.get(architecture, {}).keys() | NEEDED.get(architecture, {}).keys()
        # A DeepSeek without shared experts has no such key; the class then assumes some.
        for key in values.keys() - chosen - GENERAL - {"n_shared_experts"}:
            rest = {name: value for name, value in values.items() if name != key}
            try:
                assert read(rest, architecture) == model, (architecture, key)
            except ConfigError as error:
                missed.append(str(error))
    assert [message for message in missed if "has no '" not in message] == []


OLDER_ROPES = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
)  # fmt: skip


def test_rotary_settings_of_transformers_4_saved_again():
    for architecture, scaling in itertools.product(OF_TEXT, OLDER_ROPES):
        values = dict(made(architecture)[1])
        others = ("Phi3", "Phimoe", "Mistral4", "GPTNeoX", "Cohere2Moe")
        others += ("MiMoV2Flash", "Laguna", "Lfm3", "Mellum", "Gemma4", "CohereCompass", "Phi4Multimodal", "Zaya")
        if values.pop("rope_parameters", None) is None or architecture.startswith(others):
            # Phi-3 knows longrope only, Mistral 4 needs its scale; GPT-NeoX calls the base rotary_emb_base. The last
            # ones are as young as transformers 5.
            continue
        older = values | {"rope_theta": 500000.0, "rope_scaling": scaling}
        config = CLASSES[architecture](**plain(older))
        assert read(plain(config.to_dict()), architecture) == read(older, architecture), architecture


# Settings of training and of tools, as published configs have them.
FOR_TRAINING = {
    "_name_or_path": "some/model", "auto_map": {"AutoConfig": "configuration_x.XConfig"}, "torch_dtype": "float32",
    "use_cache": False, "initializer_range": 0.006, "attention_dropout": 0.1, "pretraining_tp": 2,
    "output_router_logits": True, "router_aux_loss_coef": 0.01, "router_jitter_noise": 0.1, "pad_token_id": 7,
    "transformers_version": "4.57.1", "unsloth_fixed": True, "gradient_checkpointing": True,
}  # fmt: skip
AS_PUBLISHED = {  # further ones of single families
    "Ernie4_5_MoeForCausalLM": {
        "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True, "num_nextn_predict_layers": 1,
    },
    "GPTNeoXForCausalLM": {  # transformers 4 wrote both names
        "rotary_emb_base": 10000, "rope_theta": 10000, "rotary_pct": 0.25, "partial_rotary_factor": 0.25,
        "rope_parameters": None,
    },
    "DeepseekV3ForCausalLM": {"ep_size": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "num_nextn_predict_layers": 1},
    "Glm4MoeForCausalLM": {"num_nextn_predict_layers": 1},
    "PhimoeForCausalLM": {"router_jitter_noise": 0.01},  # which its router reads
}  # fmt: skip


def test_settings_of_training():
    for architecture in OF_TEXT:
        values = made(architecture)[1] | {"dtype": "float32"}
        published = values | FOR_TRAINING | AS_PUBLISHED.get(architecture, {})
        assert read(published, architecture) == read(values, architecture), architecture


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Ernie4_5_MoeForCausalLM", {"moe_gate_act": "sigmoid"}, "moe_gate_act='sigmoid' is not supported"),
        ("DeepseekV2ForCausalLM", {"mlp_bias": True}, "does not understand: mlp_bias=true"),
        ("DeepseekV32ForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be 6 times 'dense' or"),
        ("DeepseekV32ForCausalLM", {"layer_types": ["sliding_attention"]}, r"layer_types \['sliding_attention'\] are"),
        ("GlmMoeDsaForCausalLM", {"indexer_types": ["shared"] * 6}, "must be 6 times 'full' or 'shared', 'full' first"),
        ("GPTNeoXForCausalLM", {"rotary_emb_base": 5, "rope_theta": 6}, "rotary_emb_base=5 contradicts rope_theta=6"),
        (
            "MistralLarge4ForConditionalGeneration",
            {"text_config": {"num_hidden_layers": 2, "kv_source_layers": [0, 0]}},
            r"kv_source_layers=\[0, 0\] is not supported \(only \[0, 1\]\)",
        ),
        ("OPTForCausalLM", {"activation_function": "tanh"}, "activation_function='tanh' is not supported"),
        ("LagunaForCausalLM", {"gating": False}, "gating=False is not supported"),
        ("MiMoV2FlashForCausalLM", {"swa_num_key_value_heads": 4}, "swa_num_key_value_heads=4 is not supported"),
        # transformers does not read this setting.
        ("MptForCausalLM", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max=16 is not supported"),
    ],
)
def test_what_changes_the_model_is_refused(architecture, changes, message):
    _, values = made(architecture)
    with pytest.raises(ConfigError, match=message):
        read(values | changes, architecture)


def test_published_configs_saved_again(tmp_path):
    for name, values in PUBLISHED.items():
        if (architecture := values["architectures"][0]) in CLASSES:
            given = {key: value for key, value in values.items() if key != "dual_chunk_attention_config"}
            # Not all files here are whole, and classes have default tokens.
            given = {"model_type": CLASSES[architecture].model_type, "eos_token_id": 2} | given
            (tmp_path / "config.json").write_text(json.dumps(given))
            AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
            again = json.loads((tmp_path / "again" / "config.json").read_text())
            assert read(again, name) == read(given, name), name
