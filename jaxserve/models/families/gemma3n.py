"""Gemma 3n, text: Gemma 3 with several residual streams (`models.altup`), inputs of each layer's own, layers that share
the keys and values of earlier ones, and MLPs of which few inner channels are active."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.gemma2 import SANDWICH_NAMES, read_cap
from jaxserve.models.families.gemma4 import PER_LAYER_NAMES, first_sharing, with_defaults
from jaxserve.models.families.llama import IGNORED, read_attention, read_max_position, read_norm, read_shared
from jaxserve.models.families.shared import read_activation, read_ropes, read_sliding, windows_of
from jaxserve.models.spec import AltUpSpec, LayerSpec, MLPSpec, ModelConfig, PerLayerInputs, QKNormSpec

LAYER = "model.layers.{i}"
GEMMA3N_NAMES = (
    SANDWICH_NAMES
    | PER_LAYER_NAMES
    | {
        "spread.weight": "model.altup_projections.{h}.weight",
        "join.weight": "model.altup_unembed_projections.{h}.weight",
        "altup_router.weight": f"{LAYER}.altup.modality_router.weight",
        "altup_norm.weight": f"{LAYER}.altup.router_norm.weight",
        "altup_prediction.weight": f"{LAYER}.altup.prediction_coefs.weight",
        "altup_correction.weight": f"{LAYER}.altup.correction_coefs.weight",
        "altup_scale": f"{LAYER}.altup.correct_output_scale",
        "laurel_left.weight": f"{LAYER}.laurel.linear_left.weight",
        "laurel_right.weight": f"{LAYER}.laurel.linear_right.weight",
        "laurel_norm.weight": f"{LAYER}.laurel.post_laurel_norm.weight",
    }
)
# What transformers assumes for keys that a config does not have.
DEFAULTS = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "eos_token_id": 1,
    "altup_num_inputs": 4, "altup_active_idx": 0, "altup_correct_scale": True, "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}  # fmt: skip
SPARSE = 10  # the first layers, whose MLPs are sparse where the config does not say which are
SPARSITY = 0.95


def _for_each(hf: HFConfig, key: str, count: int, allows: Callable[[Any], bool], what: str) -> list[Any]:
    """A setting that is a list with an entry for each layer, or one value for all."""
    hf.ignore(key)
    given = hf.values[key]
    values = given if isinstance(given, list) else [given] * count
    if len(values) != count or not all(type(x) in (int, float) and allows(x) for x in values):
        raise ConfigError(f"{hf.source}: {key} must be {what}, or a list of such for {count} layers, got {given!r:.80}")
    return values


def _sparsity(hf: HFConfig, count: int) -> list[float]:
    if hf.take("activation_sparsity_pattern", None) is None:
        return [SPARSITY if i < SPARSE < count else 0.0 for i in range(count)]
    return _for_each(hf, "activation_sparsity_pattern", count, lambda x: 0 <= x < 1, "a number from 0 to below 1")


def read_gemma3n(hf: HFConfig) -> ModelConfig:
    with_defaults(hf, DEFAULTS)
    hf.ignore("altup_coef_clip", "altup_lr_multiplier", "hidden_act", "query_pre_attn_scalar")
    max_position = read_max_position(hf)
    norm = read_norm(hf)
    sliding = read_sliding(hf, 5)
    count = len(sliding)
    windows = windows_of(sliding, hf.take("sliding_window"))
    sharing = first_sharing(hf, sliding, hf.take("num_kv_shared_layers"))
    bias = bool(hf.take("attention_bias", False))
    activation = read_activation(hf, "gelu_pytorch_tanh", "hidden_activation")
    common = read_attention(hf, scale=1.0, qk_norm=QKNormSpec(norm=norm), qkv_bias=bias, out_bias=bias)
    sizes = _for_each(hf, "intermediate_size", count, lambda x: type(x) is int and x > 0, "a positive integer")
    sparsity = _sparsity(hf, count)
    altup = AltUpSpec(
        count=hf.take("altup_num_inputs"),
        active=hf.take("altup_active_idx", 0),
        laurel_rank=hf.take("laurel_rank"),
        scaled=bool(hf.take("altup_correct_scale", True)),
    )

    def layer(i: int) -> LayerSpec:
        attention = replace(
            common,
            window=windows[i],
            rope="sliding" if sliding[i] else "full",
            v_norm=norm if i < sharing else None,
            shares_kv=i >= sharing,
        )
        mlp = MLPSpec(size=sizes[i], activation=activation, sparsity=sparsity[i])
        return LayerSpec(attention=attention, mlp=mlp, norm=norm, residual="altup", altup=altup)

    ropes = read_ropes(hf, max_position, theta=1e6, local_theta=1e4)
    return ModelConfig(
        family="gemma3n",
        layers=tuple(map(layer, range(count))),
        per_layer=PerLayerInputs(
            size=hf.take("hidden_size_per_layer_input"),
            layers=count,
            rows=hf.take("vocab_size_per_layer_input"),
            norm=norm,
            activation=activation,
        ),
        embed_scale=hf.take("hidden_size") ** 0.5,
        logit_softcap=read_cap(hf, "final_logit_softcapping", 30.0),
        **read_shared(hf, norm=norm, max_position=max_position, ropes=ropes),
    )


FAMILY = Family("gemma3n", ("Gemma3nForCausalLM",), read_gemma3n, GEMMA3N_NAMES, IGNORED)
