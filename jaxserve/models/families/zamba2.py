"""Zamba 2: Mamba-2, and before some of its layers a block of attention and MLP, of which the model has one or two that
take turns (`models.memory`).

A layer of a file with such a block is two layers here. As Nemotron-H's, steps of Mamba-2 are at least `time_step_min`
for all tokens; transformers has this limit in prompts only.
"""

from __future__ import annotations

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.bamba import mamba_names
from jaxserve.models.families.llama import IGNORED, read_max_position, read_norm, read_shared
from jaxserve.models.families.shared import read_activation
from jaxserve.models.rope import UNTURNED, read_rope
from jaxserve.models.sources import Names
from jaxserve.models.spec import (
    AttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MemorySpec,
    MLPSpec,
    ModelConfig,
    NormSpec,
    RecurrentSpec,
)

LAYER = "model.layers.{i}"
BLOCK = f"{LAYER}.shared_transformer"
OF_MODEL = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.final_layernorm.weight",
    "head.weight": "lm_head.weight",
}
OF_BLOCK = {
    "attention_norm.weight": f"{BLOCK}.input_layernorm.weight",
    "mlp_norm.weight": f"{BLOCK}.pre_ff_layernorm.weight",
    **{f"{role}.weight": f"{BLOCK}.self_attn.{role}_proj.weight" for role in "qkvo"},
    "gate_up.weight": f"{BLOCK}.feed_forward.gate_up_proj.weight",
    "down.weight": f"{BLOCK}.feed_forward.down_proj.weight",
}
# The matrices of a place; {n} is its number.
OF_PLACE = {
    f"adapter_{role}_{end}.weight": f"{BLOCK}.self_attn.linear_{role}_adapter_list.{{n}}.{which}.weight"
    for role in "qkv"
    for which, end in enumerate(("in", "out"))
} | {
    f"adapter_{end}.weight": f"{BLOCK}.feed_forward.gate_up_proj_adapter_list.{{n}}.{which}.weight"
    for which, end in enumerate(("in", "out"))
}
MAMBA = {"attention_norm.weight": f"{LAYER}.input_layernorm.weight"} | mamba_names(f"{LAYER}.mamba")
ZAMBA_NAMES = OF_MODEL | MAMBA | {role: name for role, name in OF_BLOCK.items() if role not in MAMBA}
KINDS = {"mamba": "linear_attention", "linear_attention": "linear_attention", "hybrid": "hybrid"}


def _usual(count: int) -> list[str]:
    """The kinds of layers of a config that does not have them."""
    hybrid = {6, 12, 18, 24, 30, 36, 42, 47, 51}
    return ["hybrid" if i in hybrid else "linear_attention" for i in range(count)]


def _names(config: ModelConfig) -> Names:
    """The names of each layer's tensors. Blocks are in the layers of the file that first have them. As in transformers,
    nothing is shared in models whose output head is not the embedding."""
    found: dict[str, str] = {}
    firsts: list[int] = []  # of the blocks, layers of the file
    place = -1
    before: int | None = None  # the layer of the file, while it also has Mamba-2
    i = -1
    for layer, spec in enumerate(config.layers):
        i += before is None
        if isinstance(spec.attention, RecurrentSpec):
            of_layer = {role: name.format(i=i) for role, name in MAMBA.items()}
            if before is not None:
                of_layer = {role: name.replace(f".{i}.", f".{i}.mamba_decoder.", 1) for role, name in of_layer.items()}
            before = None
        else:
            assert spec.memory is not None
            place += 1
            if len(firsts) < spec.memory.blocks:
                firsts.append(i)
            first = firsts[place % spec.memory.blocks] if config.tie_embeddings else i
            of_layer = {role: name.format(i=first, n=place) for role, name in (OF_BLOCK | OF_PLACE).items()}
            of_layer["linear.weight"] = f"model.layers.{i}.linear.weight"
            before = i
        found |= {f"{layer}/{role}": name for role, name in of_layer.items()}
    return found


def _kinds(hf: HFConfig) -> list[str]:
    """The kind of each layer of the file."""
    hf.rename(layer_types="layers_block_type")
    count = hf.take("num_hidden_layers")
    kinds = hf.take("layers_block_type", None) or _usual(count)
    if unknown := set(kinds) - set(KINDS):
        raise ConfigError(f"{hf.source}: layers_block_type {sorted(unknown)} are not supported (only {sorted(KINDS)})")
    if len(kinds) != count:
        raise ConfigError(f"{hf.source}: layers_block_type has {len(kinds)} entries, num_hidden_layers is {count}")
    return [KINDS[kind] for kind in kinds]


def _read_mamba(hf: HFConfig) -> Mamba2Spec:
    hf.expect("mamba_hidden_act", "silu")
    hf.ignore("use_conv_bias", "chunk_size", "use_mem_eff_path", "use_mamba_kernels", "mamba_headdim",
              "time_step_floor", "time_step_max", "time_step_limit")  # fmt: skip
    heads = hf.take("n_mamba_heads", 8)
    width = hf.take("mamba_expand", 2) * hf.take("hidden_size")
    if width % heads:
        raise ConfigError(
            f"{hf.source}: mamba_expand times hidden_size, {width}, is no multiple of n_mamba_heads={heads}"
        )
    return Mamba2Spec(
        heads=heads,
        head_dim=width // heads,
        groups=hf.take("mamba_ngroups", 1),
        state_dim=hf.take("mamba_d_state", 64),
        conv_width=hf.take("mamba_d_conv", 4),
        norm=NormSpec(eps=1e-5),
        least_step=float(hf.take("time_step_min", 0.001)),
    )


def _read(hf: HFConfig) -> ModelConfig:
    for key in ("add_bias_linear", "use_long_context"):
        hf.expect(key, False)
    hf.expect("use_shared_mlp_adapter", True)
    # Sizes that follow from others, and those of transformers' own generate.
    hf.ignore("attention_hidden_size", "attention_head_dim", "head_dim", "kv_channels", "num_query_groups",
              "hybrid_layer_ids", "num_logits_to_keep", "ffn_hidden_size")  # fmt: skip
    hidden = hf.take("hidden_size")
    heads = hf.take("num_attention_heads", 32)
    if hf.take("num_key_value_heads", heads) != heads:
        raise ConfigError(f"{hf.source}: num_key_value_heads must be num_attention_heads={heads}")
    norm = read_norm(hf, 1e-5)
    turns = hf.take("use_mem_rope", False)
    rank = hf.take("adapter_rank", 128)
    head_dim = 2 * hidden // heads
    attention = AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=head_dim, scale=(head_dim / 2) ** -0.5)
    memory = MemorySpec(
        blocks=hf.take("num_mem_blocks", 1),
        attention_rank=rank if hf.take("use_shared_attention_adapter", False) else 0,
        mlp_rank=rank,
    )
    block = LayerSpec(
        attention=attention,
        mlp=MLPSpec(size=hf.take("intermediate_size", 4 * hidden), activation=read_activation(hf, "gelu")),
        norm=norm,
        residual="memory",
        memory=memory,
    )
    mamba = LayerSpec(attention=_read_mamba(hf), mlp=None, norm=norm, residual="memory", memory=memory)
    layers = tuple(layer for kind in _kinds(hf) for layer in ((block, mamba) if kind == "hybrid" else (mamba,)))
    max_position = read_max_position(hf, 4096)
    rope = read_rope(hf, max_position, head_dim=head_dim)
    ropes = {"default": rope if turns else UNTURNED}
    shared = read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes=ropes)
    return ModelConfig(family="zamba2", layers=layers, **shared)


FAMILY = Family("zamba2", ("Zamba2ForCausalLM",), _read, ZAMBA_NAMES, IGNORED, variant=_names)
