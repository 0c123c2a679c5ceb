"""llama.cpp's architectures with recurrent layers; a part of the table `gguf_architectures`."""

from __future__ import annotations

from jaxserve.checkpoints.gguf_keys import Keys
from jaxserve.checkpoints.gguf_recurrent import (
    of_kimi_linear,
    of_lfm2,
    of_mamba,
    of_mamba2,
    of_qwen3_5,
    of_qwen3_next,
)
from jaxserve.checkpoints.gguf_row import LATENT_ROLES, POST_IS_MLP, Architecture
from jaxserve.checkpoints.gguf_settings import (
    BIASES,
    DEEPSEEK_EXPERTS,
    EXPERTS,
    GRANITE,
    ONE_GROUP,
    QWEN2_MOE,
    SHARED_MLP,
    SIGMOIDS,
    Config,
    Setting,
    but,
    by_layer,
    flag,
    number,
    of_experts,
    only,
    resolve,
    rows_of,
    same_as,
    sigmoids,
    size,
    somewhere,
    turned_part,
)

RATES = {"a": "a_log", "dt": "dt_bias", "conv1d": "conv", "norm": "norm", "out": "out"}
DELTA_ROLES = POST_IS_MLP | {"attn_qkv": "delta_qkv", "attn_gate": "delta_z"}
DELTA_ROLES |= {f"ssm_{part}": f"delta_{role}" for part, role in RATES.items()}
# attn_qkv and attn_gate of Qwen3-Next become ssm_in (`gguf_recurrent`), so that their roles have no use.
QWEN3_NEXT_ROLES = DELTA_ROLES | {"ssm_in": "delta_qkvz", "ssm_ba": "delta_ba"}
QWEN3_5_ROLES = DELTA_ROLES | {"ssm_beta": "delta_b", "ssm_alpha": "delta_a"}
IN_TURNS = ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha", "ssm_out")
MULTIPLIED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down", "ssm_in", "ssm_out")
MAMBA_ROLES = {f"ssm_{part}": f"mamba_{role}" for part, role in (RATES | {"d": "d", "in": "in"}).items()}
LFM2_ROLES = {"shortconv.in_proj": "conv_in", "shortconv.conv": "conv", "shortconv.out_proj": "conv_out"}
LFM2_TOP = {"token_embd_norm": "norm"}
SCAN_ROLES = MAMBA_ROLES | {"ssm_dt": "mamba_dt", "ssm_x": "mamba_x"}
SCAN_ROLES |= {f"ssm_{part}_norm": f"mamba_{part}_norm" for part in ("dt", "b", "c")}
KIMI_ROLES = LATENT_ROLES | {
    **{f"ssm_{part}": f"kimi_{RATES[part]}" for part in ("a", "dt", "norm")},
    **{f"ssm_conv1d_{part}": f"kimi_conv_{part}" for part in "qkv"},
    "ssm_beta": "kimi_rate",
    "ssm_f_a": "kimi_decay_down",
    "ssm_f_b": "kimi_decay",
    "ssm_g_a": "kimi_gate_down",
    "ssm_g_b": "kimi_gate",
}


def granite_hybrid(keys: Keys, config: Config) -> str:
    """Of the models with Mamba-2 only Bamba has rotary positions."""
    return "BambaForCausalLM" if keys.left.get("rope.scaling.finetuned") else "GraniteMoeHybridForCausalLM"


def value_width(keys: Keys, config: Config) -> int:
    """Qwen3-Next's linear_value_head_dim; the file has the width of all heads."""
    return keys.size("ssm.inner_size") // config["linear_num_value_heads"]


def in_layers(keys: Keys, config: Config, key: str) -> list[bool]:
    """Which layers have a part, by the array of its sizes."""
    return [bool(size) for size in by_layer(keys, config, key, 0)]


def kinds_by_attention(other: str, attention: str = "full_attention") -> Setting:
    """The kind of each layer: attention where there are heads of keys, else `other`."""
    return lambda keys, config: [
        attention if has_heads else other for has_heads in in_layers(keys, config, "attention.head_count_kv")
    ]


def attention_layers(keys: Keys, config: Config) -> list[int]:
    return [i for i, has_heads in enumerate(in_layers(keys, config, "attention.head_count_kv")) if has_heads]


def nemotron_kinds(keys: Keys, config: Config) -> list[str]:
    """Each layer of Nemotron-H is an MLP or a mixture where its size is given, attention where there are heads of keys,
    or Mamba-2."""

    def kind(i: int, attention: bool, mlp: bool) -> str:
        if mlp:
            return "moe" if keys.has(f"blk.{i}.ffn_gate_inp.weight") else "mlp"
        return "full_attention" if attention else "linear_attention"

    parts = (in_layers(keys, config, key) for key in ("attention.head_count_kv", "feed_forward_length"))
    return [kind(i, attention, mlp) for i, (attention, mlp) in enumerate(zip(*parts, strict=True))]


def of_heads(key: str) -> Setting:
    """Channels of a head of Mamba-2, by the number of heads; the file has those of all heads."""

    def read(keys: Keys, config: Config) -> int:
        heads = config[key]
        inner = keys.size("ssm.inner_size")
        if inner % heads:
            raise keys.refuse(f"{keys.architecture}.ssm.inner_size={inner} are no {heads} equal heads")
        return inner // heads

    return read


def times_hidden(width: Setting) -> Setting:
    """How many times as wide as the model something is."""

    def read(keys: Keys, config: Config) -> int:
        times, rest = divmod(resolve(width, keys, config), config["hidden_size"])
        if rest:
            raise keys.refuse(f"{keys.architecture}.ssm.inner_size is no multiple of embedding_length")
        return times

    return read


def in_all_heads(heads: str, dim: str) -> Setting:
    return lambda keys, config: config[heads] * config[dim]


def delta_layers(keys: Keys, config: Config) -> list[str]:
    """Which layers are gated delta nets: by an array, else all but every `full_attention_interval`-th."""
    given = keys.left.pop("attention.recurrent_layers", None)
    interval = keys.size("full_attention_interval", 4)
    count = config["num_hidden_layers"]
    recurrent = [(i + 1) % interval != 0 for i in range(count)] if given is None else [bool(x) for x in given[:count]]
    return ["linear_attention" if one else "full_attention" for one in recurrent]


def mamba(keys: Keys, config: Config) -> str:
    return "FalconMambaForCausalLM" if keys.flag("ssm.dt_b_c_rms", False) else "MambaForCausalLM"


def by_turns(part: str, which: int) -> Setting:
    """The period (`which` = 0) or the offset (1) of the layers that have a part: one of every period, beginning with
    the layer of that offset. Where no layer has it, both are beyond the last one."""

    def read(keys: Keys, config: Config) -> int:
        count = config["num_hidden_layers"]
        has = [keys.has(f"blk.{i}.{part}.weight") for i in range(count)]
        first = has.index(True) if True in has else count
        periods = (n for n in range(first + 1, count + 2) if has == [i % n == first for i in range(count)])
        period = next(periods, None)
        if period is None:
            raise keys.refuse(f"the layers with {part} are not one of every few layers")
        return (period, first)[which]

    return read


DELTA = {
    "partial_rotary_factor": turned_part,
    "linear_conv_kernel_dim": size("ssm.conv_kernel"),
    "linear_key_head_dim": size("ssm.state_size"),
    "linear_num_key_heads": size("ssm.group_count"),
    "linear_num_value_heads": size("ssm.time_step_rank"),
    "linear_value_head_dim": value_width,
    "layer_types": delta_layers,
}
QWEN3_NEXT = DELTA | QWEN2_MOE | {"norm_topk_prob": flag("expert_weights_norm", True)}
MAMBA2_SIZES = {
    "mamba_n_heads": size("ssm.time_step_rank"),
    "mamba_d_head": of_heads("mamba_n_heads"),
    "mamba_n_groups": size("ssm.group_count"),
    "mamba_d_state": size("ssm.state_size"),
    "mamba_d_conv": size("ssm.conv_kernel"),
    "mamba_conv_bias": somewhere("ssm_conv1d.bias"),
    "mamba_proj_bias": somewhere("ssm_in.bias"),
}
BAMBA = MAMBA2_SIZES | {"mamba_expand": times_hidden(in_all_heads("mamba_n_heads", "mamba_d_head"))}
NEMOTRON_H = {
    "mamba_num_heads": size("ssm.time_step_rank"),
    "mamba_head_dim": of_heads("mamba_num_heads"),
    "n_groups": size("ssm.group_count"),
    "ssm_state_size": size("ssm.state_size"),
    "conv_kernel": size("ssm.conv_kernel"),
    "use_conv_bias": somewhere("ssm_conv1d.bias"),
    "use_bias": somewhere("ssm_in.bias"),
    "mlp_bias": somewhere("ffn_up.bias"),
    "layers_block_type": nemotron_kinds,
    "mlp_hidden_act": "relu2",
    "hidden_act": None,
    "layer_norm_epsilon": lambda keys, config: keys.real("attention.layer_norm_epsilon", config["rms_norm_eps"]),
}
LFM2 = {
    "norm_eps": same_as("rms_norm_eps"),
    "rms_norm_eps": None,
    "hidden_act": None,
    "conv_L_cache": size("shortconv.l_cache"),
    "conv_bias": somewhere("shortconv.conv.bias"),
    "layer_types": kinds_by_attention("conv"),
}
# Nothing in these models limits a text. Files have 2 ** 20.
WITHOUT_ATTENTION = {
    "max_position_embeddings": None,
    "layer_norm_epsilon": same_as("rms_norm_eps"),
    "rms_norm_eps": None,
    "state_size": size("ssm.state_size"),
    "conv_kernel": size("ssm.conv_kernel"),
    "use_conv_bias": somewhere("ssm_conv1d.bias"),
    "use_bias": somewhere("ssm_in.bias"),
}
JAMBA = {
    "attn_layer_period": by_turns("attn_q", 0),
    "attn_layer_offset": by_turns("attn_q", 1),
    "expert_layer_period": by_turns("ffn_gate_inp", 0),
    "expert_layer_offset": by_turns("ffn_gate_inp", 1),
    "num_experts": size("expert_count", 1),
    "num_experts_per_tok": size("expert_used_count", 1),
    "mamba_expand": times_hidden(size("ssm.inner_size")),
    "mamba_d_state": size("ssm.state_size"),
    "mamba_dt_rank": size("ssm.time_step_rank"),
    "mamba_d_conv": size("ssm.conv_kernel"),
    "mamba_conv_bias": somewhere("ssm_conv1d.bias"),
    "mamba_proj_bias": somewhere("ssm_in.bias"),
}

HYBRIDS: dict[str, Architecture] = {
    "qwen3next": Architecture("Qwen3NextForCausalLM", QWEN3_NEXT, QWEN3_NEXT_ROLES, shifted=True, adapt=of_qwen3_next),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        DELTA,
        QWEN3_5_ROLES,
        shifted=True,
        adapt=of_qwen3_5,
        changed=IN_TURNS,
        holds=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        DELTA | QWEN2_MOE,
        QWEN3_5_ROLES,
        shifted=True,
        mixtures=True,
        adapt=of_qwen3_5,
        changed=IN_TURNS,
        holds=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    ),
    "granitehybrid": Architecture(
        granite_hybrid,
        BIASES
        | BAMBA
        | but(
            "BambaForCausalLM",
            GRANITE
            | SHARED_MLP
            | {
                "num_local_experts": number("expert_count"),
                "num_experts_per_tok": number("expert_used_count"),
                "layer_types": kinds_by_attention("mamba", "attention"),
            },
        )
        | {
            "attention_bias": somewhere("attn_q.bias"),
            "attn_layer_indices": only("BambaForCausalLM", attention_layers),
            "partial_rotary_factor": only("BambaForCausalLM", turned_part),
        },
        MAMBA_ROLES,
        paired=True,
        adapt=of_mamba2,
        holds=("GraniteMoeHybridForCausalLM", "BambaForCausalLM"),
    ),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        Architecture(
            "NemotronHForCausalLM",
            NEMOTRON_H
            | {
                key: of_experts(setting)
                for key, setting in (
                    DEEPSEEK_EXPERTS
                    | ONE_GROUP
                    | {
                        "first_k_dense_replace": None,
                        "moe_shared_expert_intermediate_size": size("expert_shared_feed_forward_length"),
                        "moe_latent_size": lambda keys, config: keys.count("moe_latent_size") or None,
                    }
                ).items()
            },
            MAMBA_ROLES | {"ffn_latent_down": "latent_in", "ffn_latent_up": "latent_out"},
            paired=True,
            turns=False,
            same={"mlp_norm": "attention_norm"},
            adapt=of_mamba2,
        ),
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM", LFM2 | {"block_auto_adjust_ff_dim": False}, LFM2_ROLES, top=LFM2_TOP, adapt=of_lfm2
    ),
    # llama.cpp's code divides the weights of the chosen experts by their sum, and does not scale them.
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        LFM2
        | EXPERTS
        | {
            "num_experts": size("expert_count"),
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "num_dense_layers": number("leading_dense_block_count"),
            "scoring_func": sigmoids,
            "use_expert_bias": somewhere("exp_probs_b.bias"),
            "norm_topk_prob": True,
        },
        LFM2_ROLES,
        top=LFM2_TOP,
        adapt=of_lfm2,
    ),
    "mamba": Architecture(
        mamba,
        WITHOUT_ATTENTION | {"intermediate_size": size("ssm.inner_size"), "time_step_rank": size("ssm.time_step_rank")},
        SCAN_ROLES,
        attends=False,
        turns=False,
        adapt=of_mamba,
        holds=("MambaForCausalLM", "FalconMambaForCausalLM"),
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        WITHOUT_ATTENTION
        | {
            "num_heads": size("ssm.time_step_rank"),
            "head_dim": of_heads("num_heads"),
            "expand": times_hidden(in_all_heads("num_heads", "head_dim")),
            "n_groups": size("ssm.group_count"),
        },
        MAMBA_ROLES,
        attends=False,
        turns=False,
        adapt=of_mamba2,
    ),
    "jamba": Architecture("JambaForCausalLM", JAMBA, SCAN_ROLES, turns=False, adapt=of_mamba),
    # The model's multipliers are in the file's weights, and those are in no setting. llama.cpp's code norms behind the
    # gate.
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM",
        BIASES
        | MAMBA2_SIZES
        | {
            "mamba_d_ssm": in_all_heads("mamba_n_heads", "mamba_d_head"),
            "projectors_bias": somewhere("ssm_out.bias"),
            "mamba_rms_norm": somewhere("ssm_norm.weight"),
            "mamba_norm_before_gate": False,
        },
        MAMBA_ROLES,
        adapt=of_mamba2,
        changed=MULTIPLIED,
    ),
    # llama.cpp's code divides the weights of the chosen experts by their sum.
    "kimi-linear": Architecture(
        "KimiLinearForCausalLM",
        DEEPSEEK_EXPERTS
        | ONE_GROUP
        | SIGMOIDS
        | {
            "norm_topk_prob": flag("expert_weights_norm", True),
            "layer_types": kinds_by_attention("linear_attention"),
            "linear_num_heads": rows_of("ssm_beta"),
            "linear_head_dim": size("kda.head_dim"),
            "linear_conv_kernel_dim": size("ssm.conv_kernel"),
        },
        KIMI_ROLES,
        turns=False,
        latent=True,
        same={"kimi_out": "o"} | {f"kimi_qkv_{part}": part for part in "qkv"},
        adapt=of_kimi_linear,
    ),
}
