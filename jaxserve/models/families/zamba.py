"""Zamba: Mamba whose channels form heads, and before some of its layers one block of attention and MLP, which all these
places share (`models.memory`). A layer of a file with that block is two layers here."""

from __future__ import annotations

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, read_max_position, read_norm, read_shared
from jaxserve.models.families.mamba import rank_of
from jaxserve.models.families.shared import read_activation
from jaxserve.models.families.zamba2 import KINDS, LAYER, OF_MODEL
from jaxserve.models.rope import UNTURNED
from jaxserve.models.sources import Names
from jaxserve.models.spec import AttentionSpec, LayerSpec, MambaSpec, MemorySpec, MLPSpec, ModelConfig

BLOCK = f"{LAYER}.shared_transf"
MIXER = f"{LAYER}.mamba"
OF_BLOCK = {
    "attention_norm.weight": f"{BLOCK}.input_layernorm.weight",
    "mlp_norm.weight": f"{BLOCK}.pre_ff_layernorm.weight",
    **{f"{role}.weight": f"{BLOCK}.self_attn.{role}_proj.weight" for role in "qkvo"},
    **{f"{role}.weight": f"{BLOCK}.feed_forward.{role}_proj.weight" for role in ("gate", "up", "down")},
}
OF_MAMBA = {
    "attention_norm.weight": f"{LAYER}.input_layernorm.weight",
    **{f"mamba_{role}.{kind}": f"{MIXER}.{name}.{kind}" for role, name in (("in", "in_proj"), ("out", "out_proj"))
       for kind in ("weight", "bias")},
    **{f"mamba_conv.{kind}": f"{MIXER}.conv1d.{kind}" for kind in ("weight", "bias")},
    "mamba_x": f"{MIXER}.x_proj_weight",
    "mamba_dt": f"{MIXER}.dt_proj_weight",
    "mamba_dt_bias": f"{MIXER}.dt_proj_bias",
    "mamba_a_log": f"{MIXER}.A_log",
    "mamba_d": f"{MIXER}.D",
}  # fmt: skip
NAMES = OF_MODEL | OF_BLOCK | {"linear.weight": f"{LAYER}.linear.weight"} | OF_MAMBA


def _names(config: ModelConfig) -> Names:
    """The names of each layer's tensors. The block is in the first layer of the file that has it. As in transformers,
    nothing is shared in models whose output head is not the embedding."""
    found: dict[str, str] = {}
    first: int | None = None
    hybrid = False  # the layer of the file has the block
    i = 0
    for layer, spec in enumerate(config.layers):
        if isinstance(spec.attention, AttentionSpec):
            first = i if first is None or not config.tie_embeddings else first
            of_layer = {role: name.format(i=first) for role, name in OF_BLOCK.items()}
            of_layer["linear.weight"] = f"model.layers.{i}.linear.weight"
            hybrid = True
        else:
            place = f"{i}.mamba_decoder" if hybrid else str(i)
            of_layer = {role: name.format(i=place) for role, name in OF_MAMBA.items()}
            hybrid = False
            i += 1
        found |= {f"{layer}/{role}": name for role, name in of_layer.items()}
    return found


def _kinds(hf: HFConfig) -> list[str]:
    """The kind of each layer of the file."""
    hf.rename(layer_types="layers_block_type")
    count = hf.take("num_hidden_layers")
    period, offset = hf.take("attn_layer_period", 6), hf.take("attn_layer_offset", 4)
    usual = ["mamba", "mamba", "hybrid"] + ["hybrid" if i % period == offset else "mamba" for i in range(count - 3)]
    kinds = hf.take("layers_block_type", None) or usual
    if unknown := set(kinds) - set(KINDS):
        raise ConfigError(f"{hf.source}: layers_block_type {sorted(unknown)} are not supported (only {sorted(KINDS)})")
    if len(kinds) != count:
        raise ConfigError(f"{hf.source}: layers_block_type has {len(kinds)} entries, num_hidden_layers is {count}")
    return [KINDS[kind] for kind in kinds]


def _read(hf: HFConfig) -> ModelConfig:
    hf.ignore("use_mamba_kernels", "use_associative_scan", "num_logits_to_keep", "time_step_min", "time_step_max",
              "time_step_floor")  # fmt: skip
    hidden, heads = hf.take("hidden_size"), hf.take("num_attention_heads", 16)
    if (width := hf.take("attention_hidden_size", 2 * hidden)) != 2 * hidden:
        raise ConfigError(f"{hf.source}: attention_hidden_size={width} must be twice hidden_size={hidden}")
    hf.rename(head_dim="attention_head_dim")
    if hf.take("num_key_value_heads", heads) != heads:
        raise ConfigError(f"{hf.source}: num_key_value_heads must be num_attention_heads={heads}")
    norm = read_norm(hf, 1e-5)
    head_dim = hf.take("attention_head_dim", None) or 2 * hidden // heads
    attention = AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=head_dim, scale=(head_dim / 2) ** -0.5)
    scan = MambaSpec(
        channels=hf.take("mamba_expand", 2) * hidden,
        state_dim=hf.take("mamba_d_state", 16),
        rank=rank_of(hf, "mamba_dt_rank"),
        conv_width=hf.take("mamba_d_conv", 4),
        conv_bias=bool(hf.take("mamba_conv_bias", True)),
        bias=bool(hf.take("mamba_proj_bias", False)),
        activation=read_activation(hf, "silu", "hidden_mamba_act"),
        heads=hf.take("n_mamba_heads", 2),
    )
    memory = MemorySpec(blocks=1, attention_rank=0, mlp_rank=0)
    mlp = MLPSpec(size=hf.take("intermediate_size", 4 * hidden), activation=read_activation(hf, "gelu"))
    block = LayerSpec(attention=attention, mlp=mlp, norm=norm, residual="memory", memory=memory)
    mamba = LayerSpec(attention=scan, mlp=None, norm=norm, residual="memory", memory=memory)
    layers = tuple(layer for kind in _kinds(hf) for layer in ((block, mamba) if kind == "hybrid" else (mamba,)))
    ropes = {"default": UNTURNED}
    shared = read_shared(hf, tied=True, norm=norm, max_position=read_max_position(hf, 4096), ropes=ropes)
    return ModelConfig(family="zamba", layers=layers, **shared)


FAMILY = Family("zamba", ("ZambaForCausalLM",), _read, NAMES, IGNORED, variant=_names)
