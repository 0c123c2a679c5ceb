"""What a row of the table `gguf_architectures` is, and the names of tensors in GGUF files by their roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.checkpoints.gguf_adapted import XIELU_NUMBERS
from jaxserve.checkpoints.gguf_keys import Keys
from jaxserve.checkpoints.gguf_recurrent import Tensors
from jaxserve.checkpoints.gguf_settings import Config, Setting


@dataclass(frozen=True)
class Architecture:
    """What a GGUF architecture is.

    Attributes:
      name: the architecture in config.json; a function for one that depends on the file.
      settings: config.json's key -> Setting; beside those that all architectures have.
      roles: a tensor's name within its layer -> its role in `jaxserve.models`, where it differs from ROLES.
      norm_key: config.json's key of the norms' epsilon. The norms are LayerNorms unless it is rms_norm_eps.
      paired: rows of queries and keys are stored in pairs (see GGUFTensor).
      shifted: the weights of norms are stored with 1 added.
      attends: some layers have attention.
      turns: some channels turn by the position.
      latent: attention is over latents (DeepSeek), whose sizes have keys of their own.
      mixtures: all layers have experts, and a file may lack the size of a dense MLP.
      varied: keys that may have a number for each layer, and numbers that differ. `settings` read all of them; what all
        architectures have in common reads the first.
      scaling: added to the rope scaling, if there is one.
      positions: reads the rotary settings, in the place of what all other architectures have in common.
      top: names outside of layers -> roles, beside TOP.
      same: role -> another role, which has the same tensor.
      adapt: a function of the tensors by name, the config and the file's metadata that brings tensors to the form of
        Hugging Face's checkpoints.
      changed: tensors within a layer whose rows or columns have another order than in checkpoints, or another scale;
        adapters in GGUF files cannot change them.
      within: config.json has the settings in its text_config.
      holds: config.json's architectures whose models are in such files, where they are not just `name`.
      modules: a tensor's name within its layer -> its module in Hugging Face's model, for architectures whose tensors
        get Hugging Face's names.
    """

    name: Setting
    settings: Mapping[str, Setting] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    norm_key: str = "rms_norm_eps"
    paired: bool = False
    shifted: bool = False
    attends: bool = True
    turns: bool = True
    latent: bool = False
    mixtures: bool = False
    varied: tuple[str, ...] = ()
    scaling: Mapping[str, Setting] = field(default_factory=dict)
    positions: Callable[[Keys, Config], Config] | None = None
    top: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    adapt: Callable[[Tensors, Config, Mapping[str, Any]], Tensors] = lambda tensors, config, metadata: tensors
    changed: tuple[str, ...] = ()
    within: bool = False
    holds: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)


# A tensor's name within its layer, or outside of layers -> its role. "weight" and "bias" are added to it.
TOP = {"token_embd": "embed", "position_embd": "positions", "output_norm": "norm", "output": "head"}
EXPERT_PARTS = {f"ffn_{role}_exps": f"expert_{role}" for role in ("gate", "up", "gate_up", "down")}
ROLES = {
    "attn_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
    "post_attention_norm": "attention_out_norm",
    "post_ffw_norm": "mlp_out_norm",
    **{f"attn_{role}": role for role in ("q", "k", "v", "qkv", "q_a", "q_b", "kv_b")},
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_kv_a_mqa": "kv_a",
    "attn_kv_a_norm": "kv_norm",
    "attn_sinks": "sinks",
    **{f"ffn_{role}": role for role in ("gate", "up", "down")},
    "ffn_gate_inp": "router",
    "exp_probs_b": "correction",
    "ffn_gate_inp_shexp": "shared_expert_gate",
    **{f"ffn_{role}_shexp": f"shared_{role}" for role in ("gate", "up", "down")},
    **EXPERT_PARTS,
}
SAME = {"expert_fused_down": "expert_down"}  # beside gate and up in one tensor, or in two
# Roles that name one tensor, and which.
BARE_ROLES = {"sinks": "weight", "correction": "bias"} | {
    f"{kind}_{role}": part
    for kind in ("delta", "mamba", "kimi")
    for role, part in (("a_log", "weight"), ("d", "weight"), ("dt_bias", "bias"))
}
BARE_ROLES |= dict.fromkeys((*XIELU_NUMBERS, "layer_scale", "expert_scales", "altup_scale"), "weight")
# Tensors whose names have no ".weight" in files. They get it when they are read.
BARE = ("ssm_a", "ssm_d", "ffn_gate_inp.scale", "ffn_down_exps.scale", "ffn_norm")
NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm")
GATE_UP = {"ffn_up": "gate_up"}
POST_IS_MLP = {"post_attention_norm": "mlp_norm"}
LATENT_ROLES = {"attn_q_a_norm": "q_norm"}
HF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
