"""Mistral Large 4: Mistral 4's layers without a latent of queries, with indexers that project queries from the layer's
input. Queries grow by a learned line of the position's logarithm, the rotary embedding has learned factors of its
angles, and some layers do without it."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families.deepseek import ATTENTION as DEEPSEEK_ATTENTION
from jaxserve.models.families.deepseek import INDEXER, read_dense, read_latent_attention, with_indexers
from jaxserve.models.families.glm4_moe import read_deepseek_experts, with_mixture
from jaxserve.models.families.llama import read_max_position, read_mlp, read_norm, read_shared
from jaxserve.models.families.within import Text, by_whole, family_within
from jaxserve.models.rope import read_rope, rope_settings
from jaxserve.models.spec import LayerSpec, ModelConfig, NormSpec

LAYER = "layers.{i}"
ATTENTION = "layers.{i}.attention"
MLP = {"gate": "w1", "up": "w3", "down": "w2"}
NAMES = {  # in files, which are Mistral's own
    "embed.weight": "tok_embeddings.weight",
    "norm.weight": "norm.weight",
    "head.weight": "output.weight",
    "attention_norm.weight": f"{LAYER}.attention_norm.weight",
    "mlp_norm.weight": f"{LAYER}.ffn_norm.weight",
    "q.weight": f"{ATTENTION}.wq.weight",
    "kv_norm.weight": f"{ATTENTION}.kv_a_norm.weight",
    "kv_b.weight": f"{ATTENTION}.wkv_b.weight",
    **{f"kv_a.{kind}": f"{ATTENTION}.wkv_a_with_mqa.{kind}" for kind in ("weight", "bias")},
    **{f"o.{kind}": f"{ATTENTION}.wo.{kind}" for kind in ("weight", "bias")},
    "angle_logs": "lerope.alpha",
    "slope": f"{ATTENTION}.ssmax_scaling.s",
    "start": f"{ATTENTION}.ssmax_scaling.b",
    "index_slope": f"{ATTENTION}.indexer.ssmax_scaling.s",
    "index_start": f"{ATTENTION}.indexer.ssmax_scaling.b",
    **{f"index_q_norm.{kind}": f"{ATTENTION}.indexer.q_input_norm.{kind}" for kind in ("weight", "bias")},
    **{role: name.replace(DEEPSEEK_ATTENTION, ATTENTION) for role, name in INDEXER.items()},
    "router.weight": f"{LAYER}.gate.weight",
    **{f"{role}.weight": f"{LAYER}.feed_forward.{name}.weight" for role, name in MLP.items()},
    **{f"expert_{role}.weight": f"{LAYER}.experts.{{e}}.{name}.weight" for role, name in MLP.items()},
    **{f"shared_{role}.weight": f"{LAYER}.shared_experts.{name}.weight" for role, name in MLP.items()},
}
SIZES = {
    "q_lora_rank": 0, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
ROPE = {  # assumed if the config has no rope_parameters
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2048.0, "original_max_position_embeddings": 512,
    "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0,
}  # fmt: skip


def _read_rotating(hf: HFConfig, count: int) -> list[bool]:
    """For each layer, whether its queries and keys turn with the position."""
    every = hf.take("no_rope_layer_interval", 4)
    rotating = hf.take("no_rope_layers", None) or [int((i + 1) % every != 0) for i in range(count)]
    if len(rotating) < count:
        raise ConfigError(f"no_rope_layers has {len(rotating)} entries for {count} layers")
    return [bool(one) for one in rotating[:count]]


def _read(hf: HFConfig) -> ModelConfig:
    hf.values.setdefault("n_shared_experts", 1)
    hf.values.pop("norm_topk_prob", None)  # weights always are normalized
    hf.ignore("q_lora_rank", "mlp_bias", "layer_types")
    count = hf.take("num_hidden_layers")
    hf.expect("kv_source_layers", list(range(count)))
    if not rope_settings(hf):
        hf.values["rope_parameters"] = dict(ROPE)
    norm = read_norm(hf, 1e-5)
    attention = replace(read_latent_attention(hf, SIZES), q_rank=None, norm=norm, learned_scale=True)
    dense = read_mlp(hf)
    mixture = read_deepseek_experts(hf, dense.activation, score="softmax", corrected=False, top_k=4)
    layers = [
        LayerSpec(attention=replace(attention, rotates=rotates), mlp=dense, norm=norm)
        for rotates in _read_rotating(hf, count)
    ]
    max_position = read_max_position(hf, 1048576)
    rope = read_rope(hf, max_position, interleaved=True, learned=True)
    config = ModelConfig(
        family="mistral_large4 with images",
        layers=with_mixture(tuple(layers), mixture, read_dense(hf, 1)),
        logit_softcap=hf.take("final_logit_softcapping", 30.0),
        **read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope}),
    )
    input_norm = NormSpec(kind="layer", eps=1e-6, bias=True)
    return with_indexers(hf, config, heads=32, interleaved=True, input_norm=input_norm)


FAMILY = family_within(
    "mistral_large4",
    "MistralLarge4ForConditionalGeneration",
    {"mistral_large4_text": Text(_read)},
    NAMES,
    by_whole,
)
