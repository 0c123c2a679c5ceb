"""GPT-Neo: GPT-2 with windows on every other layer, and with products of queries and keys that are not scaled."""

from __future__ import annotations

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import read_attention, read_layer_norm, read_mlp, read_shared, uniform_layers
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.rope import UNTURNED
from jaxserve.models.spec import LearnedPositions, ModelConfig

LAYER = "transformer.h.{i}"
NAMES = {
    "embed.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "head.weight": "lm_head.weight",
} | named(
    attention_norm=f"{LAYER}.ln_1",
    mlp_norm=f"{LAYER}.ln_2",
    **{role: f"{LAYER}.attn.attention.{role}_proj" for role in "qkv"},
    o=f"{LAYER}.attn.attention.out_proj",
    up=f"{LAYER}.mlp.c_fc",
    down=f"{LAYER}.mlp.c_proj",
    norm="transformer.ln_f",
)


def _read_windows(hf: HFConfig) -> list[int | None]:
    """The window of each layer, by `attention_layers`. Without this key `attention_types` has pairs of a list of kinds
    and how often it is repeated."""
    kinds = hf.take("attention_layers", None)
    hf.ignore("attention_types")
    if kinds is None:
        types = hf.take("attention_types", None) or [[["global", "local"], 12]]
        try:
            kinds = [kind for names, count in types for _ in range(min(count, 4096)) for kind in names]
        except (TypeError, ValueError):
            raise ConfigError(
                f"{hf.source}: attention_types must be pairs of kinds and a number, got {types}"
            ) from None
    windows = {"global": None, "local": hf.take("window_size", 256)}
    count = hf.take("num_hidden_layers")
    if len(kinds) != count or any(kind not in ("global", "local") for kind in kinds):
        raise ConfigError(f"{hf.source}: attention_layers must be {count} times 'global' or 'local', got {kinds!r:.80}")
    return [windows[kind] for kind in kinds]


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(num_layers="num_hidden_layers", num_heads="num_attention_heads", activation_function="hidden_act")
    max_position = hf.take("max_position_embeddings", 2048)
    size = hf.take("intermediate_size", None) or 4 * hf.take("hidden_size")
    mlp = read_mlp(hf, size=size, gated=False, bias=True, activation=read_activation(hf, "gelu_new"))
    norm = read_layer_norm(hf, "layer_norm_epsilon")
    attention = read_attention(hf, scale=1.0, out_bias=True)
    return ModelConfig(
        family="gpt_neo",
        layers=uniform_layers(hf, attention, mlp, _read_windows(hf), norm=norm),
        learned_positions=LearnedPositions(rows=max_position),
        **read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes={"default": UNTURNED}),
    )


FAMILY = Family("gpt_neo", ("GPTNeoForCausalLM",), _read, NAMES, (".attention.bias", ".attention.masked_bias"))
