"""Tiny models of many families as GGUF files, with the settings and transformations of llama.cpp's converter.

The tensors' names are those of the package's own tables, so that a wrong name in `checkpoints` cannot agree with one
here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import gguf_newer
import numpy as np
from gguf_files import Kind, add_rope, add_tokenizer, in_pairs, llama3_divisor, write

from jaxserve.checkpoints.safetensors import read_folder

ARCHITECTURES = {
    "Gemma": "gemma", "Gemma2": "gemma2", "Gemma3": "gemma3", "Phi3": "phi3", "DeepseekV2": "deepseek2",
    "DeepseekV3": "deepseek2", "GptOss": "gpt-oss", "Granite": "granite", "GraniteMoe": "granitemoe",
    "Cohere": "command-r", "Cohere2": "cohere2", "Olmo": "olmo", "Olmo2": "olmo2", "Olmo3": "olmo2", "Glm4": "glm4",
    "Glm4Moe": "glm4moe", "SmolLM3": "smollm3", "StableLm": "stablelm", "Starcoder2": "starcoder2", "Phi": "phi2",
    "GPT2LMHeadModel": "gpt2", "GPTNeoX": "gptneox", "Falcon": "falcon", "Exaone4": "exaone4", "SeedOss": "seed_oss",
    "HunYuanDenseV1": "hunyuan-dense", "Nemotron": "nemotron", "Ernie4_5": "ernie4_5", "Ernie4_5_Moe": "ernie4_5-moe",
    "Llama4": "llama4", "Arcee": "arcee", "MiniCPM": "minicpm",
    "Ministral3": "mistral3", "Qwen3Next": "qwen3next", "Olmoe": "olmoe", "MiniMaxM2": "minimax-m2",
    "Qwen3_5": "qwen35", "Qwen3_5Moe": "qwen35moe", "Glm4MoeLite": "deepseek2", "Youtu": "deepseek2",
    "Mistral4": "mistral4", "MiniCPM3": "minicpm3", "Glm": "chatglm", "Dots1": "dots1", "ExaoneMoe": "exaone-moe",
    "GraniteMoeShared": "granitemoe", "Phimoe": "phimoe", "HunYuanMoEV1": "hunyuan-moe", "SolarOpen": "glm4moe",
    "Afmoe": "afmoe", "Apertus": "apertus", "GPTBigCode": "starcoder", "Lfm2": "lfm2", "Lfm2Moe": "lfm2moe",
    "GraniteMoeHybrid": "granitehybrid", "Bamba": "granitehybrid", "NemotronH": "nemotron_h",
    "Qwen2VL": "qwen2vl", "Qwen2_5_VL": "qwen2vl", "Llava": "llama", "Mistral3": "llama", "LightOnOcr": "qwen3",
    "Idefics3": "llama", "InternVL": "qwen2", "Lfm2Vl": "lfm2",
    "Qwen3VL": "qwen3vl", "Qwen3VLMoe": "qwen3vlmoe", "Glm4v": "glm4", "Glm4vMoe": "glm4moe",
    "Gemma3n": "gemma3n", "Gemma4": "gemma4", "Gemma4Unified": "gemma4", "Mamba": "mamba", "FalconMamba": "mamba",
    "Mamba2": "mamba2", "Jamba": "jamba", "FalconH1": "falcon-h1", "KimiLinear": "kimi-linear", "Bloom": "bloom",
    "Mpt": "mpt", "Jais2": "jais2", "InternLM3": "llama", "GlmMoeDsa": "glm-dsa", "DeepseekV32": "deepseek32",
    "MiMoV2Flash": "mimo2", "Step3p7": "step35", "Mellum": "mellum", "Laguna": "laguna",
    "Cohere2Moe": "cohere2moe", "Dbrx": "dbrx",
}  # fmt: skip
WITH_EXPERTS = {"nemotron_h": "nemotron_h_moe"}
PAIRED = (
    "granite", "granitemoe", "olmo", "smollm3", "arcee", "minicpm", "mistral3", "granitehybrid", "nemotron_h",
    "nemotron_h_moe", "llama",
)  # fmt: skip
SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe", "step35")
LATENT = ("deepseek2", "mistral4", "kimi-linear", "glm-dsa", "deepseek32")
SIGMOIDS = (
    "Glm4Moe", "Glm4vMoe", "SolarOpen", "DeepseekV3", "Glm4MoeLite", "Dots1", "ExaoneMoe", "Afmoe", "Lfm2Moe",
    "KimiLinear", "GlmMoeDsa", "DeepseekV32", "MiMoV2Flash", "Step3p7", "Laguna", "Cohere2Moe",
)  # fmt: skip
NO_POSITIONS = ("gpt2", "starcoder", "mamba", "mamba2", "jamba", "bloom", "mpt", *gguf_newer.OWN_POSITIONS)
# config.json's keys -> the writer's methods; as in llama.cpp's conversion.
SETTINGS = {
    "num_experts_per_tok": "expert_used_count", "moe_k": "expert_used_count",
    "num_local_experts": "expert_count", "num_experts": "expert_count", "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length", "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count", "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count", "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count", "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm", "interleave_moe_layer_step": "interleave_moe_layer_step",
    "moe_layer_interval": "interleave_moe_layer_step", "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale", "logit_scale": "logit_scale", "clip_qkv": "clamp_kqv",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "sliding_window": "sliding_window", "use_parallel_residual": "parallel_residual", "q_lora_rank": "q_lora_rank",
    "rope_local_base_freq": "rope_freq_base_swa", "scale_emb": "embedding_scale", "moe_topk": "expert_used_count",
    "num_shared_experts": "expert_shared_count", "num_shared_expert": "expert_shared_count",
    "num_dense_layers": "leading_dense_block_count", "route_scale": "expert_weights_scale",
    "route_norm": "expert_weights_norm", "conv_L_cache": "shortconv_l_cache",
    "num_nextn_predict_layers": "nextn_predict_layers", "moe_latent_size": "moe_latent_size",
}  # fmt: skip
OF_EXPERTS = ("num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "moe_intermediate_size")
UNUSED = {
    "smollm3": ("sliding_window",), "llama4": ("sliding_window",), "minicpm3": ("scale_emb",),
    "dots1": ("sliding_window",), "qwen2vl": ("sliding_window",), "qwen35moe": ("norm_topk_prob",),
    "hunyuan-moe": ("norm_topk_prob",), "lfm2moe": ("norm_topk_prob", "routed_scaling_factor"),
    "qwen3vlmoe": ("norm_topk_prob",), "nemotron_h": OF_EXPERTS, "mellum": ("norm_topk_prob",),
    "mimo2": ("norm_topk_prob", "routed_scaling_factor"), "falcon-h1": ("embedding_multiplier",),
}  # fmt: skip
# Sizes of Mamba-2: the writer's methods, and config.json's keys in Bamba's and in Nemotron-H's words.
MAMBA = {
    "ssm_conv_kernel": ("mamba_d_conv", "conv_kernel"), "ssm_state_size": ("mamba_d_state", "ssm_state_size"),
    "ssm_group_count": ("mamba_n_groups", "n_groups"), "ssm_time_step_rank": ("mamba_n_heads", "mamba_num_heads"),
}  # fmt: skip
ATTENTION = ("attention", "full_attention")
OF_IMAGES = ("visual.", "vision_", "embed_vision", "multi_modal_projector", "vit_large_projector", "connector.")
UNSAID_WINDOWS = ("smollm3", "afmoe", "qwen2vl", "laguna", "cohere2moe")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_groups", "kv_n_heads")
LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "model_max_length")
OWN_SHAPES = ("mamba", "jamba", "kimi-linear")  # which `gguf_newer` changes
STACKED = ("gpt-oss", "llama4", "granitemoe", "granitehybrid", "mistral4", "qwen3vlmoe")


class FamilyFile:
    """One model folder, and the file that is made of it."""

    def __init__(self, folder: Path, path: Path, kind: Kind = Kind.F32):
        self.config = json.loads((folder / "config.json").read_text())
        (given,) = self.config["architectures"]
        self.config |= self.config.get("text_config", {})
        if given == "DbrxForCausalLM":
            self.config |= self.config["attn_config"] | self.config["ffn_config"]
        self.kind = kind
        self.folder = folder
        self.path = path
        self.family = given.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
        self.arch = ARCHITECTURES[self.family]
        if "moe" in (self.config.get("layers_block_type") or ()):
            self.arch = WITH_EXPERTS[self.arch]
        self.writer = gguf.GGUFWriter(path, self.arch)
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        number = numbers[gguf_newer.STAND_INS.get(self.arch, self.arch)]
        pattern = self.config.get("hybrid_override_pattern") or self.config.get("layers_block_type")
        self.layers = len(pattern) if pattern else self.size("num_hidden_layers", "n_layer", "n_layers")
        self.names = gguf.get_tensor_name_map(number, self.layers)
        self.numbers: dict[str, list[float]] = {}  # of activations, by their names
        self.waiting: dict[str, dict[str, np.ndarray]] = {}  # tensors that become one
        self.heads = next((self.config[key] for key in HEADS if self.config.get(key) is not None), 0)
        self.hidden = self.size("hidden_size", "n_embd", "d_model")
        self.kv_heads = next((self.config[key] for key in KV_HEADS if self.config.get(key) is not None), self.heads)
        if self.config.get("multi_query") and self.arch == "starcoder":
            self.kv_heads = 1
        self.head_dim = self.config.get("head_dim") or self.hidden // max(self.heads, 1)

    def size(self, *keys: str) -> Any:
        return next(self.config[key] for key in keys if self.config.get(key) is not None)

    def write(self) -> Path:
        self.add_shape()
        self.add_positions()
        for key, setting in SETTINGS.items():
            value = self.config.get(key)
            value = value[0] if isinstance(value, list) else value
            if value is not None and key not in UNUSED.get(self.arch, ()):
                getattr(self.writer, f"add_{setting}")(value)
        if self.arch in gguf_newer.ADDED:
            gguf_newer.ADDED[self.arch](self)
        if (self.folder / "tokenizer.json").exists():
            add_tokenizer(self.writer, self.folder)
        stacks: dict[str, list[np.ndarray]] = {}
        for name, values in self.tensors():
            stacks.setdefault(name, []).append(values)
        for name, numbers in self.numbers.items():
            getattr(self.writer, f"add_xielu_{name}")(numbers)
        for name, parts in stacks.items():
            values = parts[0] if len(parts) == 1 else np.stack(parts)
            wide = values.ndim > 1 and values.shape[-1] % 32 == 0 and "norm" not in name and "inp" not in name
            wide = wide and "conv1d" not in name
            kind = self.kind if wide and not name.endswith("bias") else Kind.F32
            self.writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        return write(self.writer, self.path)

    def add_shape(self) -> None:
        writer = self.writer
        config = self.config
        writer.add_block_count(self.layers + (config.get("num_nextn_predict_layers") or 0))
        writer.add_embedding_length(self.hidden)
        writer.add_vocab_size(config["vocab_size"])
        if self.arch in gguf_newer.WITHOUT_ATTENTION:
            gguf_newer.add_mamba(self)
            return
        writer.add_context_length(self.size(*LENGTHS))
        inner = [
            config.get(key) for key in ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_hidden_size")
        ]
        if self.arch == "lfm2" and config.get("block_auto_adjust_ff_dim"):
            multiple = config["block_multiple_of"]
            size = int(config["block_ffn_dim_multiplier"] * int(2 * config["block_ff_dim"] / 3))
            inner = [-(-size // multiple) * multiple]
        inner_size = next((x for x in inner if x), 4 * self.hidden)
        if self.arch == "nemotron_h_moe":
            inner_size = config["moe_intermediate_size"]
        if self.family == "NemotronH":
            writer.add_feed_forward_length([inner_size if kind in ("mlp", "moe") else 0 for kind in self.kinds()])
        elif self.arch != "qwen35moe":
            writer.add_feed_forward_length(inner_size)
        writer.add_head_count(self.heads)
        if kinds := self.kinds():
            writer.add_head_count_kv([self.kv_heads if kind in ATTENTION else 0 for kind in kinds])
        else:
            writer.add_head_count_kv(1 if self.arch in LATENT else self.kv_heads)
        for key in ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
            if key in config:
                of_rms = writer.add_layer_norm_rms_eps
                of_layer = writer.add_layer_norm_eps
                (of_rms if key == "rms_norm_eps" or self.arch.startswith("lfm2") else of_layer)(config[key])
        if self.arch in ("olmo", "dbrx"):
            writer.add_layer_norm_eps(1e-5)
        if self.arch == "minicpm3":
            writer.add_kv_lora_rank(config["kv_lora_rank"])
            writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        elif self.arch in LATENT:
            rank = config["kv_lora_rank"]
            rope = config["qk_rope_head_dim"]
            writer.add_kv_lora_rank(rank)
            writer.add_key_length(rank + rope)
            writer.add_value_length(rank)
            writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
            writer.add_value_length_mla(config["v_head_dim"])
        elif config.get("head_dim"):
            writer.add_key_length(self.head_dim)
            writer.add_value_length(self.head_dim)
        if self.arch in ("qwen3next", "qwen35", "qwen35moe"):
            writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
            writer.add_ssm_state_size(config["linear_key_head_dim"])
            writer.add_ssm_group_count(config["linear_num_key_heads"])
            writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
            writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
            writer.add_full_attention_interval(4)
            if types := config.get("layer_types"):
                recurrent = [kind == "linear_attention" for kind in types]
                writer.add_array(f"{self.arch}.attention.recurrent_layers", recurrent)
        if shared := config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(shared)
        if self.arch == "hunyuan-moe":
            writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        if self.arch == "exaone-moe":
            shared = config["moe_intermediate_size"] * config["num_shared_experts"]
            writer.add_expert_shared_feed_forward_length(shared)
        if self.arch == "nemotron_h_moe":
            writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        if self.family == "Youtu":
            writer.add_leading_dense_block_count(self.layers)
            writer.add_expert_feed_forward_length(config["intermediate_size"])
            writer.add_expert_shared_count(0)
        if self.arch in ("granitehybrid", "nemotron_h", "nemotron_h_moe"):
            for method, keys in MAMBA.items():
                getattr(writer, f"add_{method}")(self.size(*keys))
            own = config.get("mamba_num_heads", 0) * config.get("mamba_head_dim", 0)
            writer.add_ssm_inner_size(own or config["mamba_expand"] * self.hidden)
            writer.add_rope_scaling_finetuned(self.family == "Bamba")
        if self.arch == "minicpm":
            writer.add_residual_scale(config["scale_depth"] / self.layers**0.5)
            writer.add_logit_scale(self.hidden / config["dim_model_base"])
        if self.arch in ("gpt-oss", "llama4"):
            writer.add_expert_feed_forward_length(config["intermediate_size"])
        if self.family in SIGMOIDS:
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        elif self.family == "DeepseekV2":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
        types = config.get("layer_types")
        if types and "sliding_attention" in types and self.arch not in UNSAID_WINDOWS:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in types])
        elif isinstance(period := config.get("sliding_window_pattern"), int):
            writer.add_sliding_window_pattern([(i + 1) % period != 0 for i in range(self.layers)])

    def kinds(self) -> list[str]:
        """The kind of each layer of a model with recurrent layers whose places follow from the heads."""
        config = self.config
        if pattern := config.get("hybrid_override_pattern"):
            return [{"M": "mamba", "*": "attention", "-": "mlp"}[letter] for letter in pattern]
        if period := config.get("attn_layer_period"):
            return ["attention" if i % period == config["attn_layer_offset"] else "" for i in range(self.layers)]
        if chosen := config.get("attn_layer_indices") or config.get("full_attn_idxs"):
            return ["attention" if i in chosen else "" for i in range(self.layers)]
        types = config.get("layers_block_type") or config.get("layer_types") or ()
        return types if {"mamba", "conv", "moe"} & set(types) or self.arch == "granitehybrid" else []

    def add_positions(self) -> None:
        config = self.config
        writer = self.writer
        if self.arch in NO_POSITIONS:
            return
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        local = scaling.get("sliding_attention")
        if local:
            writer.add_rope_freq_base_swa(local["rope_theta"])
        scaling = scaling.get("full_attention", scaling)
        part = config.get("partial_rotary_factor") or config.get("rotary_pct") or scaling.get("partial_rotary_factor")
        turned = config.get("qk_rope_head_dim") or int(self.head_dim * (part or 1.0))
        writer.add_rope_dimension_count(turned)
        self.turned = turned
        if sections := scaling.get("mrope_section"):
            writer.add_rope_dimension_sections([*sections, 0])
        kind = scaling.get("rope_type") or scaling.get("type")
        theta = config.get("rope_theta")
        theta = theta or config.get("rotary_emb_base") or scaling.get("rope_theta")
        if isinstance(theta, list):
            writer.add_rope_freq_base_swa(theta[-1])
            theta = theta[0]
        if alpha := scaling.get("alpha"):
            writer.add_rope_freq_base(theta * alpha ** (self.head_dim / (self.head_dim - 2)))
            return
        if kind == "llama3":
            divisors = [llama3_divisor(scaling, theta ** (-i / turned)) for i in range(0, turned, 2)]
            writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
            writer.add_rope_freq_base(theta)
            return
        add_rope(writer, config | {"rope_theta": theta, "rope_scaling": scaling}, self.head_dim)
        if original := config.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(original)
        if self.arch == "phimoe":
            stretched = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretched) / math.log(original)))
        for which in ("long", "short"):
            if factors := scaling.get(f"{which}_factor"):
                writer.add_tensor(f"rope_factors_{which}.weight", np.array(factors, np.float32))
        if kind == "yarn":
            if "beta_fast" in scaling:
                writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
                writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
            if "attention_factor" in scaling:
                writer.add_rope_scaling_yarn_attn_factor(scaling["attention_factor"])
            if "mscale_all_dim" in scaling:
                part = 1.0 if self.arch == "mistral3" else 0.1
                writer.add_rope_scaling_yarn_log_mul(part * scaling["mscale_all_dim"])
            if "llama_4_scaling_beta" in scaling:
                writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, values); the experts' tensors one after another under the name of their stack."""
        for name, tensor in sorted(read_folder(self.folder).items(), key=lambda item: _order(item[0])):
            if any(part in name for part in OF_IMAGES):
                continue
            name = name.replace("model.language_model.", "model.").removeprefix("language_model.")
            name = name.replace("model.text_model.", "model.")
            values = tensor.read().astype(np.float32)
            if self.arch in ("qwen35", "qwen35moe") and ".linear_attn." in name:
                values = self.with_turns(name, values)
            own = gguf_newer.CHANGED.get(self.arch, gguf_newer.unchanged)(self, name, values)
            for changed, made in (both for one in own for both in self.changed(*one)):
                changed = _without_expert(changed)
                found = self.names.get_name(changed, try_suffixes=(".weight", ".bias"))
                found = changed if changed.startswith("blk.") else found
                assert found, f"the package has no name for {changed}"
                yield found, np.ascontiguousarray(made)

    def changed(self, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors that the converter makes of one."""
        if self.arch in SHIFTED and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + np.float32(1)
        if name.endswith("e_score_correction_bias"):
            values = values.reshape(-1)
        if self.family == "Glm4v" and ("q_proj" in name or "k_proj" in name):
            heads = values.reshape(-1, self.head_dim, *values.shape[1:])
            turned = self.turned
            parts = heads[:, :turned:2], heads[:, 1:turned:2], heads[:, turned:]
            values = np.concatenate(parts, axis=1).reshape(values.shape)
        if self.arch not in OWN_SHAPES and ("conv1d" in name or "conv.conv.weight" in name):
            values = values.reshape(len(values), *values.shape[2:])
        if self.arch in PAIRED and ("q_proj" in name or "k_proj" in name):
            values = in_pairs(values, self.heads if "q_proj" in name else self.kv_heads)
        if self.arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            values = values.T
        if "query_key_value" in name:
            groups = self.kv_heads if self.arch == "falcon" else self.heads
            grouped = values.reshape(groups, -1, self.head_dim, *values.shape[1:])
            values = np.concatenate([x.reshape(-1, *values.shape[1:]) for x in np.split(grouped, [-2, -1], axis=1)])
        if "act_fn" in name:
            self.numbers.setdefault(name.rpartition(".")[2], []).append(float(values.reshape(())))
        elif self.arch == "chatglm" and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            kind = name.rpartition(".")[2]  # the first models have queries, keys and values in one tensor
            waiting = self.waiting.setdefault(kind, {}) | {name.split(".")[-2][0]: values}
            self.waiting[kind] = waiting
            if len(waiting) == 3:
                del self.waiting[kind]
                layer = name.split(".")[2]
                yield f"blk.{layer}.attn_qkv.{kind}", np.concatenate([waiting[part] for part in "qkv"])
        elif name.endswith("kv_b_proj.weight") and self.arch != "minicpm3":
            nope = self.config["qk_nope_head_dim"]
            heads = values.reshape(self.heads, -1, values.shape[1])
            yield name.replace("kv_b_proj", "k_b_proj"), heads[:, :nope].swapaxes(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), heads[:, nope:]
        elif name.endswith("in_proj_qkvz.weight"):
            keys = self.config["linear_num_key_heads"]
            values_of = self.config["linear_value_head_dim"]
            dim = self.config["linear_key_head_dim"]
            of_key = self.config["linear_num_value_heads"] // keys * values_of
            parts = np.split(values.reshape(keys, -1, self.hidden), np.cumsum([dim, dim, of_key]), axis=1)
            *qkv, gates = (part.reshape(-1, self.hidden) for part in parts)
            layer = name.split(".")[2]
            yield f"blk.{layer}.attn_qkv.weight", np.concatenate(qkv)
            yield f"blk.{layer}.attn_gate.weight", gates
        elif name.endswith(".A_log") and self.arch not in OWN_SHAPES:
            delta = ".linear_attn." in name
            yield name, -np.exp(values) if delta else -np.exp(values)[:, None]
        elif name.endswith((".mamba.D", ".mixer.D")) and self.arch not in OWN_SHAPES:
            yield name, values[:, None]
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            yield name, values.reshape(self.size(*MAMBA["ssm_group_count"]), -1)
        elif name.endswith(".dt_bias"):
            yield name.replace(".dt_bias", ".dt.bias" if self.arch == "nemotron_h_moe" else ".dt_proj.bias"), values
        elif self.arch in STACKED and ("experts." in name or "_linear" in name):
            yield from self.of_stacked_experts(name, values)
        else:
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
            name = name.replace(".expert_bias", ".expert_bias.bias")
            yield (name + ".weight" if name.endswith("sinks") else name), values

    def of_stacked_experts(self, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        if "shared_expert" in name:
            yield name, values
            return
        if self.arch == "mistral4":
            yield f"{name}.weight", values
            return
        if "granite" in self.arch:
            yield from self.of_granite(name, values)
            return
        kind = "bias" if name.endswith("_bias") else "weight"
        rows = values if kind == "bias" or self.arch == "qwen3vlmoe" else values.swapaxes(1, 2)
        name = name.removesuffix("_bias")
        if "gate_up_proj" not in name:
            yield f"{name}.{kind}", rows
            return
        parts = (rows[:, ::2], rows[:, 1::2]) if self.arch == "gpt-oss" else np.split(rows, 2, axis=1)
        for part, values in zip(("gate", "up"), parts, strict=True):
            yield f"{name.replace('gate_up_proj', f'{part}_proj')}.{kind}", values

    def of_granite(self, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Gate and up of experts and of the shared MLP, which is the only one where there are no experts."""
        layer = name.split(".")[2]
        end = "_exps" if "block_sparse" in name else "_shexp" if self.config.get("num_local_experts") else ""
        if "output_linear" in name:
            yield f"blk.{layer}.ffn_down{end}.weight", values
            return
        for part, rows in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
            yield f"blk.{layer}.ffn_{part}{end}.weight", rows

    def with_turns(self, name: str, values: np.ndarray) -> np.ndarray:
        """A tensor of a gated delta net with the value heads of all key heads in turns."""
        keys = self.config["linear_num_key_heads"]
        heads = self.config["linear_num_value_heads"]
        behind = 2 * keys * self.config["linear_key_head_dim"] if "qkv" in name or "conv1d" in name else 0
        if name.endswith(".norm.weight"):
            return values
        if "out_proj" in name:
            return values.reshape(len(values), keys, heads // keys, -1).swapaxes(1, 2).reshape(values.shape)
        rows = values[behind:]
        turned = rows.reshape(keys, heads // keys, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)
        return np.concatenate([values[:behind], turned])


def _order(name: str) -> list[Any]:
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in name.split(".")]


def _without_expert(name: str) -> str:
    """The name of a stack of experts, which the converter makes of one tensor per expert."""
    first, found, last = name.partition(".experts.")
    number, _, rest = last.partition(".")
    if first.endswith(".feed_forward"):  # as the converter calls LFM2's, and Nemotron's
        first = first.removeprefix("model.")
    first = first.replace("backbone.", "model.").replace(".mixer", ".mlp")
    return f"{first}.experts.{rest}" if found and number.isdigit() else name
