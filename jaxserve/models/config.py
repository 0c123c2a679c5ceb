"""Reads a Hugging Face config.json. Every setting must be understood; others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from jaxserve.checkpoints.files import read_json
from jaxserve.config import ConfigError


def _count(most: int, least: int = 1) -> tuple[str, Callable[[Any], bool]]:
    return f"an integer from {least} to {most}", lambda value: type(value) is int and least <= value <= most


# Key -> (allowed values in words, predicate), for every key that is read, also inside rope_scaling and rope_parameters.
_SIZE = _count(2**24)
_SIZE_OR_AUTO = "a positive integer or 'auto'", lambda value: value == "auto" or _SIZE[1](value)
_HEADS = _count(2**12)
_LAYERS = _count(2**12)
_LENGTH = _count(2**30)
_POSITIVE = "a positive number", lambda value: type(value) in (int, float) and 0 < value < 1e30
_NUMBER = "a number of at least 0", lambda value: type(value) in (int, float) and 0 <= value < 1e30
_FLAG = "true or false", lambda value: type(value) is bool
_TEXT = "a string", lambda value: type(value) is str
_TEXTS = "a list of strings", lambda value: type(value) is list and all(type(x) is str for x in value)
_FACTORS = (
    "a list of positive numbers",
    lambda value: type(value) is list and all(type(x) in (int, float) and 0 < x < 1e30 for x in value),
)
_SWITCHES = "a list of 0 and 1", lambda value: type(value) is list and all(x in (0, 1) for x in value)
_PATTERN = (
    "a positive integer, or a string of L and G",
    lambda value: (
        (type(value) is int and 0 < value < 2**12)
        or (type(value) is str and len(value) > 0 and set(value) <= {"L", "G"})
    ),
)
_OBJECT = "a JSON object", lambda value: type(value) is dict
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "architectures": _TEXTS,
    **dict.fromkeys(("layer_types", "mlp_layer_types", "indexer_types"), _TEXTS),
    **dict.fromkeys(("index_topk", "index_head_dim", "index_block_size", "index_topk_blocks"), _SIZE),
    **dict.fromkeys(("dense_intermediate_size", "sparse_index_dim", "sparse_block_size", "sparse_topk_blocks"), _SIZE),
    **dict.fromkeys(("index_local_blocks", "sparse_local_block"), _count(2**12, least=0)),
    "sparse_attention_freq": _SWITCHES,
    "moe_layer_freq": ("an integer, or a list of 0 and 1", lambda value: type(value) is int or _SWITCHES[1](value)),
    "sparse_attention_config": _OBJECT,
    "index_n_heads": _HEADS,
    "compress_ratios": ("a list of integers", lambda value: type(value) is list and all(type(x) is int for x in value)),
    **dict.fromkeys(("compress_rates", "main", "compress"), _OBJECT),
    **dict.fromkeys(("compress_rate_csa", "compress_rate_hca", "hc_mult", "o_lora_rank"), _SIZE),
    **dict.fromkeys(("compress_rope_theta", "hc_eps"), _POSITIVE),
    **dict.fromkeys(("num_hash_layers", "hc_sinkhorn_iters"), _count(2**12, least=0)),
    "o_groups": _HEADS,
    **dict.fromkeys(("index_topk_freq", "index_skip_topk_offset"), _count(2**12, least=0)),
    "index_topk_pattern": ("a string, or a list of strings", lambda value: type(value) is str or _TEXTS[1](value)),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "head_dim", "word_embed_proj_dim"), _SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_ln_in_parallel_attn"), _HEADS),
    "num_hidden_layers": _LAYERS,
    "max_window_layers": _count(2**12, least=0),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings", "sliding_window"), _LENGTH),
    **dict.fromkeys(("max_sequence_length", "model_max_length"), _LENGTH),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"), _POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "attn_factor", "partial_rotary_factor"), _POSITIVE),
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "clip_qkv"), _POSITIVE),
    **dict.fromkeys(("query_pre_attn_scalar", "rope_local_base_freq", "alpha", "dim_model_base"), _POSITIVE),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling"), _POSITIVE),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), _POSITIVE),
    **dict.fromkeys(("scale_emb", "scale_depth"), _POSITIVE),
    **dict.fromkeys(("short_factor", "long_factor"), _FACTORS),
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), _NUMBER),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "truncate"), _FLAG),
    "finetuned": _FLAG,
    **dict.fromkeys(("use_parallel_residual", "use_qk_norm", "qk_layernorm", "use_qkv_bias", "use_bias"), _FLAG),
    **dict.fromkeys(("attention_out_bias", "enable_bias", "do_layer_norm_before", "parallel_attn", "bias"), _FLAG),
    **dict.fromkeys(("layer_norm_elementwise_affine", "new_decoder_architecture", "multi_query", "alibi"), _FLAG),
    **dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "_remove_final_layer_norm"), _FLAG),
    **dict.fromkeys(("num_experts_per_tok", "num_experts"), _count(2**12)),
    "num_local_experts": _count(2**12, least=0),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _SIZE),
    **dict.fromkeys(("norm_topk_prob", "qkv_bias"), _FLAG),
    "decoder_sparse_step": _count(2**12),
    **dict.fromkeys(("global_head_dim", "vocab_size_per_layer_input"), _SIZE),
    **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), _count(2**24, least=0)),
    **dict.fromkeys(("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"), _FLAG),
    "num_global_key_value_heads": _HEADS,
    **dict.fromkeys(("altup_num_inputs", "laurel_rank"), _SIZE),
    "altup_active_idx": _count(2**12, least=0),
    "altup_correct_scale": _FLAG,
    "top_k_experts": _count(2**12),
    "per_layer_config": _OBJECT,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), _HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), _SIZE),
    **dict.fromkeys(("hc_count", "hc_lowrank", "ple_embed_dim", "indexer_head_dim", "indexer_budget"), _SIZE),
    **dict.fromkeys(("ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "indexer_compress_ratio"), _count(2**10)),
    **dict.fromkeys(("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by"), _count(2**30)),
    "indexer_n_heads": _HEADS,
    "seed": _count(2**63, least=0),
    "output_gate_type": _TEXT,
    **dict.fromkeys(("linear_conv_kernel_dim", "full_attention_interval"), _count(2**10)),
    **dict.fromkeys(("mamba_n_heads", "mamba_n_groups", "mamba_num_heads", "n_groups"), _HEADS),
    **dict.fromkeys(("mamba_d_state", "mamba_d_conv", "mamba_expand", "shared_intermediate_size"), _SIZE),
    **dict.fromkeys(("mamba_head_dim", "ssm_state_size", "conv_kernel", "moe_shared_expert_intermediate_size"), _SIZE),
    "moe_latent_size": _SIZE,
    "time_step_min": _NUMBER,
    **dict.fromkeys(("lm_head_multiplier", "key_multiplier", "attention_in_multiplier"), _POSITIVE),
    **dict.fromkeys(("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), _POSITIVE),
    **dict.fromkeys(("mlp_multipliers", "ssm_multipliers"), _FACTORS),
    **dict.fromkeys(("mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias"), _FLAG),
    **dict.fromkeys(("mamba_d_ssm", "state_size", "expand"), _SIZE),
    **dict.fromkeys(("linear_num_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("linear_head_dim", "short_conv_kernel_size", "layer_group_size"), _SIZE),
    **dict.fromkeys(("kda_safe_gate", "mla_use_nope"), _FLAG),
    "kda_lower_bound": ("a number below 0", lambda value: type(value) in (int, float) and -1e30 < value < 0),
    "use_conv_bias": _FLAG,
    "layers_block_type": _TEXTS,
    **dict.fromkeys(("hybrid_override_pattern", "mlp_hidden_act", "mamba_hidden_act"), _TEXT),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), _LAYERS),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), _count(2**12, least=0)),
    "mixer_rms_eps": _POSITIVE,
    **dict.fromkeys(("full_attn_alpha_factor", "linear_attn_alpha_factor", "mlp_alpha_factor"), _POSITIVE),
    **dict.fromkeys(("full_attn_beta_factor", "linear_attn_beta_factor", "mlp_beta_factor"), _POSITIVE),
    **dict.fromkeys(("mamba_d_head", "mamba_dt_rank", "time_step_rank"), _SIZE_OR_AUTO),
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias"), _FLAG),
    "position_embedding_type": _TEXT,
    **dict.fromkeys(("conv_L_cache", "block_multiple_of"), _count(2**10)),
    "num_dense_layers": _count(2**12, least=0),
    **dict.fromkeys(("conv_bias", "use_expert_bias", "block_auto_adjust_ff_dim"), _FLAG),
    "block_ffn_dim_multiplier": _POSITIVE,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _SIZE),
    **dict.fromkeys(("topk_method", "scoring_func"), _TEXT),
    **dict.fromkeys(("rope_interleave", "indexer_rope_interleave"), _FLAG),
    **dict.fromkeys(("n_routed_experts", "moe_num_experts", "moe_k", "experts_per_token"), _count(2**12)),
    **dict.fromkeys(("n_group", "topk_group", "interleave_moe_layer_step", "no_rope_layer_interval"), _count(2**12)),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "first_k_dense_replace"), _count(2**12, least=0)),
    **dict.fromkeys(("num_shared_experts", "rotary_dim", "num_dense_layers"), _count(2**12, least=0)),
    "shared_intermediate_size": _count(2**24, least=0),
    **dict.fromkeys(("prefix_dense_intermediate_size", "prefix_dense_sliding_window_pattern"), _SIZE),
    **dict.fromkeys(
        ("router_scaling_factor", "route_scale", "router_jitter_noise", "short_mscale", "long_mscale"), _NUMBER
    ),
    **dict.fromkeys(("moe_topk", "num_shared_expert"), _count(2**12)),
    **dict.fromkeys(("moe_layer_start_index", "moe_layer_end_index"), _count(2**12, least=-1)),
    "moe_layer_interval": _count(2**12),
    **dict.fromkeys(("routed_scaling_factor", "moe_norm_min", "swiglu_limit", "attn_scale", "floor_scale"), _NUMBER),
    **dict.fromkeys(("use_qk_norm", "attn_temperature_tuning"), _FLAG),
    **dict.fromkeys(("intermediate_size_mlp", "attention_chunk_size"), _SIZE),
    **dict.fromkeys(
        (
            "mlp_only_layers",
            "moe_layers",
            "no_rope_layers",
            "full_attn_idxs",
            "attn_layer_indices",
            "full_attn_layers",
            "kda_layers",
            "fullatt_block_indexes",
            "deepstack_visual_indexes",
            "ple_layer_ids",
        ),
        ("a list of integers", lambda value: type(value) is list and all(type(x) is int for x in value)),
    ),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "activation"), _TEXT),
    **dict.fromkeys(("torch_dtype", "dtype", "rope_type", "type"), _TEXT),
    **dict.fromkeys(("full_attention", "sliding_attention"), _OBJECT),
    **dict.fromkeys(("text_config", "linear_attn_config", "attn_config"), _OBJECT),
    "no_rope_layers": _SWITCHES,
    "layer_rope_theta": (
        "a list of numbers of at least 0, or null",
        lambda value: type(value) is list and all(x is None or _NUMBER[1](x) for x in value),
    ),
    "window_size": _LENGTH,
    **dict.fromkeys(("depth", "patch_size", "spatial_merge_size", "out_hidden_size", "num_position_embeddings"), _SIZE),
    **dict.fromkeys(("image_token_id", "image_token_index", "boi_token_id"), _count(2**24, least=0)),
    **dict.fromkeys(("boi_token_index", "eoi_token_id", "eoi_token_index"), _count(2**24, least=0)),
    "mm_tokens_per_image": _count(2**16),
    **dict.fromkeys(("image_size", "pooling_kernel_size", "position_embedding_size"), _SIZE),
    **dict.fromkeys(("mm_embed_dim", "mm_posemb_size"), _SIZE),
    **dict.fromkeys(("use_clipped_linears", "standardize"), _FLAG),
    "multimodal_projector_bias": _FLAG,
    **dict.fromkeys(("scale_factor", "downsample_factor", "projector_hidden_size", "num_patches"), _SIZE),
    **dict.fromkeys(("pos_emb_height", "pos_emb_width"), _SIZE),
    **dict.fromkeys(("projector_ln_eps", "projection_layer_norm_eps"), _POSITIVE),
    **dict.fromkeys(("projector_bias", "projector_use_layernorm"), _FLAG),
    "media_placeholder_token_id": _count(2**24, least=0),
    "merge_kernel_size": (
        "a list of two positive integers",
        lambda value: type(value) in (list, tuple) and len(value) == 2 and all(_SIZE[1](x) for x in value),
    ),
    "attention_layers": _TEXTS,
    "no_rope_layer_interval": _LAYERS,
    "sliding_window_pattern": _PATTERN,
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), _OBJECT),
}

# Keys of a Hugging Face config that do not change what a decoder computes at inference.
HARMLESS = frozenset([
    "_name_or_path", "_commit_hash", "architectures", "auto_map", "model_type", "torch_dtype", "dtype",
    "transformers_version", "transformers.js_config", "unsloth_fixed", "unsloth_version", "is_llama_config",
    "is_encoder_decoder", "is_decoder", "is_composition", "use_cache", "cache_implementation", "use_bfloat16",
    "torchscript", "chunk_size_feed_forward", "gradient_checkpointing", "pretraining_tp", "_attn_implementation",
    "_attn_implementation_autoset", "_attn_implementation_internal", "_flash_attn_2_enabled", "attn_implementation",
    "use_flash_attention", "use_flash_attn", "rope_interleaved_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "sep_token_id", "unk_token_id", "mask_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "tokenizer_class", "model_max_length", "initializer_range", "initializer_factor",
    "attention_dropout", "activation_dropout", "hidden_dropout", "embd_pdrop", "emb_pdrop", "resid_pdrop", "attn_pdrop",
    "residual_dropout", "dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout",
    "neftune_noise_alpha",
    "max_length", "min_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "typical_p",
    "num_beams", "num_beam_groups", "num_return_sequences", "repetition_penalty", "length_penalty", "diversity_penalty",
    "router_aux_loss_coef", "router_jitter_noise", "input_jitter_noise", "output_router_logits",  # for training only
    "early_stopping", "no_repeat_ngram_size", "output_attentions", "output_hidden_states", "output_scores",
    "return_dict", "return_dict_in_generate", "use_return_dict", "id2label", "label2id", "problem_type",
    "task_specific_params", "finetuning_task", "prefix", "layerdrop", "init_std", "embedding_dropout",
    "embedding_initializer_range", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout", "reorder_and_upcast_attn", "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32", "sentence_transformers", "num_labels",
])  # fmt: skip


class HFConfig:
    """The settings of a config.json. It remembers which keys were taken, and `finish` refuses the rest."""

    def __init__(self, values: dict[str, Any], source: str = "config.json", ignored: Collection[str] = ()):
        """`source` names the file in messages. Keys in `ignored` count as absent, also inside objects."""
        self.values = _without(values, frozenset(ignored))
        self.source = source
        self.sees = True  # False: what it says of pictures is not read
        self._taken: set[str] = set()
        self._own_names: dict[str, str] = {}  # name under which a setting is taken -> its name in the file

    @classmethod
    def read(cls, folder: Path, ignored: Collection[str] = ()) -> HFConfig:
        path = folder / "config.json"
        try:
            values = read_json(path)
        except FileNotFoundError:
            raise ConfigError(f"{folder} holds no config.json: not a model folder in Hugging Face format") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a JSON object, got {type(values).__name__}")
        return cls(values, str(path), ignored)

    def rename(self, **names: str) -> None:
        """Lets settings that older configs have under an old name be taken under the new one (old=new). Some versions
        of transformers wrote both names. Raises ConfigError if their values differ."""
        for old, new in names.items():
            if (value := self.values.pop(old, None)) is None:
                continue
            if (given := self.values.get(new)) not in (None, value):
                raise ConfigError(f"{self.source}: {old}={value!r} contradicts {new}={given!r}, which means the same")
            self.values[new] = value
            self._own_names[new] = old

    _REQUIRED = object()

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of `key`; null counts as absent, as in transformers. Raises ConfigError for what KINDS forbids."""
        self._taken.add(key)
        value = self.values.get(key)
        if value is not None:
            self._check(key, value)
            return value
        if default is self._REQUIRED:
            own = self._own_names.get(key, key)
            raise ConfigError(f"{self.source} has no {own!r}, which this architecture needs")
        return default

    def _check(self, key: str, value: Any) -> None:
        if key in KINDS:
            what, allows = KINDS[key]
            if not allows(value):
                own = self._own_names.get(key, key)
                raise ConfigError(f"{self.source}: {own} must be {what}, got {value!r:.80}")
        if isinstance(value, dict) and key != "text_config":  # which is read as a config of its own
            for inner, setting in value.items():
                if setting is not None:
                    self._check(inner, setting)

    def ignore(self, *keys: str) -> None:
        """Accepts any value of `keys`, which have no effect beside the config's other settings."""
        self._taken.update(keys)

    def expect(self, key: str, *allowed: Any) -> None:
        """Raises ConfigError unless the key is absent, null or one of `allowed`, the values that are supported."""
        value = self.take(key, None)
        if value is not None and value not in allowed:
            own = self._own_names.get(key, key)
            only = ", ".join(map(repr, allowed)) or "absent"
            raise ConfigError(f"{self.source}: {own}={value!r} is not supported (only {only})")

    def finish(self) -> None:
        """Raises ConfigError if a key is left that was not taken, may matter, and is not empty, zero, null or false."""
        left = {
            key: value
            for key, value in self.values.items()
            if key not in self._taken and key not in HARMLESS and value not in (None, False, 0, "", [], {})
        }
        if left:
            listed = ", ".join(f"{key}={json.dumps(value)[:80]}" for key, value in sorted(left.items()))
            raise ConfigError(
                f"{self.source} has settings that jaxserve does not understand: {listed}. Where you know that they do "
                f"not change what the model computes: --ignore-config-keys {','.join(sorted(left))}"
            )


def _without(values: dict[str, Any], ignored: frozenset[str]) -> dict[str, Any]:
    """`values` and the objects in it, without the keys that are `ignored`."""
    return {
        key: _without(value, ignored) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in ignored
    }


def take_token_ids(value: Any) -> tuple[int, ...]:
    """End-of-sequence ids from a config's value: null, one id, or a list. Raises ConfigError for anything else."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list) else (value,)
    if any(type(i) is not int or not 0 <= i < 2**31 for i in ids):
        raise ConfigError(f"eos_token_id must be a token id or a list of them, got {value!r:.80}")
    return ids
