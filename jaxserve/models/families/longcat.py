"""LongCat-Flash: each block has two latent attentions and two dense MLPs. Beside them its experts read what the first
MLP reads, and their sum is added at the block's end (`models.shortcut`). Some experts return their input.

A block of a file is three layers here: the first attention and the experts, the first MLP, and the rest.
"""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import DEEPSEEK_NAMES, SIZES, read_latent_attention
from jaxserve.models.families.llama import IGNORED, NAMES, read_max_position, read_norm, read_shared
from jaxserve.models.families.shared import read_activation
from jaxserve.models.rope import read_rope
from jaxserve.models.sources import Names
from jaxserve.models.spec import ExpertsSpec, LayerSpec, MLPSpec, ModelConfig
from jaxserve.pallas_kernels.expert_routing import Router

BLOCK = "model.layers.{i}"
LONGCAT_NAMES = DEEPSEEK_NAMES | {
    "router.weight": f"{BLOCK}.mlp.router.classifier.weight",
    "correction": f"{BLOCK}.mlp.router.e_score_correction_bias",
}
PARTS = {"self_attn": "self_attn.{k}", "input_layernorm": "input_layernorm.{k}",
         "post_attention_layernorm": "post_attention_layernorm.{k}"}  # fmt: skip
LAYERS = ("begins", "between", "ends")  # of a block


def _names(config: ModelConfig) -> Names:
    """The names of the tensors of each layer, which is a part of a block."""
    found = {}
    for layer in range(config.num_layers):
        block, part = divmod(layer, len(LAYERS))
        which = str(part // 2)
        for role, name in LONGCAT_NAMES.items():
            beginning, found_block, rest = name.partition(f"{BLOCK}.")
            module, _, tensor = rest.partition(".")
            if not found_block:
                continue
            module = PARTS.get(module, module).replace("{k}", which)
            if part and role in NAMES and module == "mlp":
                module = f"mlps.{which}"
            found[f"{layer}/{role}"] = f"{beginning}model.layers.{block}.{module}.{tensor}"
    return found


def _read_mixture(hf: HFConfig, mlp: MLPSpec) -> MLPSpec:
    hf.expect("zero_expert_type", "identity")
    hf.expect("norm_topk_prob", False)
    hf.ignore("router_bias")  # logits do not have it, whatever the config says
    router = Router(
        top_k=hf.take("num_experts_per_tok", 12),
        corrected=True,
        normalized=False,
        scale=float(hf.take("routed_scaling_factor", 6.0)),
    )
    zero = hf.take("zero_expert_num", 0 if "zero_expert_num" in hf.values else 256)
    experts = ExpertsSpec(count=hf.take("n_routed_experts", 512), router=router, zero=zero)
    return replace(mlp, size=hf.take("moe_intermediate_size", 2048), experts=experts)


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(
        ffn_hidden_size="intermediate_size", expert_ffn_hidden_size="moe_intermediate_size",
        moe_topk="num_experts_per_tok", num_local_experts="n_routed_experts",
    )  # fmt: skip
    hf.ignore("num_hidden_layers", "attention_method", "num_nextn_predict_layers")
    for kind in ("q", "kv"):
        hf.expect(f"mla_scale_{kind}_lora", True)
    hidden = hf.take("hidden_size")
    norm = read_norm(hf, 1e-5)
    attention = read_latent_attention(hf, SIZES)
    attention = replace(
        attention,
        scale=attention.softmax_scale * (hidden / (attention.q_rank or hidden)) ** 0.5,
        latent_scale=(hidden / attention.rank) ** 0.5,
    )
    mlp = MLPSpec(size=hf.take("intermediate_size", 12288), activation=read_activation(hf, "silu"))
    begins = LayerSpec(
        attention=attention, mlp=_read_mixture(hf, mlp), norm=norm, residual="shortcut", shortcut="begins"
    )
    block = (
        begins,
        replace(begins, attention=None, mlp=mlp, shortcut="between"),
        replace(begins, mlp=mlp, shortcut="ends"),
    )
    max_position = read_max_position(hf, 131072)
    ropes = {"default": read_rope(hf, max_position, theta=1e7, interleaved=True)}
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes=ropes)
    return ModelConfig(family="longcat", layers=block * hf.take("num_layers"), **shared)


# The layers under "model.mtp." predict further tokens; they are not read.
FAMILY = Family(
    "longcat", ("LongcatFlashForCausalLM",), _read, LONGCAT_NAMES, IGNORED, variant=_names, unread=("model.mtp.",)
)
