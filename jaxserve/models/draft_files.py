"""Draft heads in files: published EAGLE-3 drafts, and the heads for multi-token prediction in a target's own files.

EAGLE-3 drafts are published by several projects, whose files differ a little. SafeAILab and SpecForge name the layer
"midlayer", vLLM's speculators name it "layers.0" and put the layer's settings into `transformer_layer_config`. The head
has a small vocabulary: draft token i is token i + d2t[i] of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.load import Pieces
from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.config import ConfigError
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.config import HFConfig
from jaxserve.models.drafter import Drafter, DraftSpec
from jaxserve.models.expert_weights import expert_pieces
from jaxserve.models.families.llama import FAMILY as LLAMA
from jaxserve.models.families.llama import NAMES
from jaxserve.models.sources import Names, Source, whole
from jaxserve.models.spec import ModelConfig
from jaxserve.models.weights import layer_sources, norm_sources

EAGLE_NAMES = {role: name.replace("model.layers.{i}.", "midlayer.") for role, name in NAMES.items()} | {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "midlayer.hidden_norm.weight",
    "embed_norm.weight": "midlayer.input_layernorm.weight",
    "embed.weight": "embed_tokens.weight",
    "norm.weight": "norm.weight",
}
UNREAD = ("d2t", "t2d", "embed_tokens.weight")  # maps between the vocabularies; embeddings equal to the target's
LAYER = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "attention_bias",
    "mlp_bias", "num_hidden_layers", "vocab_size", "torch_dtype", "dtype",
)  # fmt: skip
OF_TRAINING = (
    "speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_config", "eagle_config",
    "max_window_layers", "use_sliding_window", "sliding_window", "layer_types", "tie_word_embeddings",
    "has_no_defaults_at_init", "target_layer_count", "target_model_type", "embed_requires_grad", "num_local_experts",
    "experts_per_token",
)  # fmt: skip


@dataclass(frozen=True)
class DraftFiles(Checkpoint):
    """The files that hold a draft head.

    Attributes:
      names: role -> name of a tensor, where "{i}" is the number of `layer`.
      ids: int32 [the head's vocabulary], the target's token for each of its own; None: the vocabularies are equal.
    """

    names: Names
    layer: int
    shared_file: bool  # the files also hold the target
    ids: np.ndarray | None = None

    def pieces(self, decoder: Any) -> dict[str, Pieces]:
        return draft_pieces(decoder, self.names, self.layer, self._has)

    def ignored(self, decoder: Any) -> Callable[[str], bool]:
        return lambda name: self.shared_file or name.endswith((*UNREAD, *self.family.ignored))


def draft_pieces(drafter: Drafter, names: Names, layer: int, has: Callable[[str], bool]) -> dict[str, Pieces]:
    """Path in a head's parameters -> the tensors that make it up. `has` tells whether the files have a named weight."""
    config = drafter.config
    spec = drafter.spec
    hidden = config.hidden_size
    kind = config.layers[0]
    norm = config.norm
    assert norm is not None
    eagle = bool(spec.layers)
    inputs = len(spec.layers) * spec.target_hidden if eagle else 2 * hidden
    of_layer = layer_sources(drafter, kind, names, 2 * hidden if eagle else None)
    norms = norm_sources("hidden_norm", kind.norm, hidden) | norm_sources("embed_norm", kind.norm, hidden)
    if eagle:
        del of_layer["attention_norm/scale"]
        of_layer = of_layer | norms
        norms = {}
    sources = {"fc/kernel": [Source("fc.weight", (hidden, inputs), whole)]} | norms | norm_sources("norm", norm, hidden)
    sources |= {f"layers_0/{path}": some for path, some in of_layer.items()}
    if spec.own_embed:
        rows = drafter.target_vocab
        sources["embed/table"] = [Source("embed.weight", (rows, hidden), whole)]
    if spec.own_head:
        sources["head/kernel"] = [Source("head.weight", (config.vocab_size, hidden), whole)]
    found: dict[str, Pieces] = {path: [one.piece(names, layer) for one in some] for path, some in sources.items()}
    if kind.mlp is not None and kind.mlp.experts:
        of_experts = expert_pieces(kind.mlp, hidden, names, layer, has)
        found |= {f"layers_0/{path}": some for path, some in of_experts.items()}
    return found


def open_eagle(
    folder: Path, target: ModelConfig, ignored: Collection[str] = ()
) -> tuple[ModelConfig, DraftSpec, DraftFiles]:
    """A published EAGLE-3 draft for a target: its layer and vocabulary, its kind, and its files.

    Raises ConfigError or CheckpointError for a folder that holds no such draft, or one for another target.
    """
    hf = HFConfig.read(folder, ignored)
    tensors = {_plain(name): tensor for name, tensor in read_folder(folder).items()}
    if "fc.weight" not in tensors or "midlayer.hidden_norm.weight" not in tensors:
        raise CheckpointError(
            f"{folder} is no EAGLE-3 draft: it lacks the tensors fc.weight and midlayer.* (layers.0.*)"
        )
    settings = hf.values | (hf.take("transformer_layer_config", None) or {})
    layer = HFConfig({key: settings[key] for key in LAYER if key in settings}, hf.source)
    layer.expect("num_hidden_layers", 1)
    config = LLAMA.read_config(layer)
    own_vocab = hf.take("draft_vocab_size", config.vocab_size)
    hidden = hf.take("target_hidden_size", None) or config.hidden_size
    layers = _layers_read(hf, target)
    for key in LAYER + OF_TRAINING:
        hf.take(key, None)
    hf.finish()
    problems = {
        f"hidden states of {hidden} numbers": hidden == target.hidden_size,
        f"a vocabulary of {config.vocab_size} tokens": config.vocab_size == target.vocab_size,
        f"the inputs of layers {list(layers)}": all(0 <= i <= target.num_layers for i in layers),
    }
    own_embed = "embed_tokens.weight" in tensors
    if not own_embed:
        problems[f"embeddings of {config.hidden_size} numbers"] = config.hidden_size == (
            target.embed_size or target.hidden_size
        )
    if wrong := [text for text, fits in problems.items() if not fits]:
        raise ConfigError(
            f"the EAGLE-3 draft {folder} is for another model: it wants {' and '.join(wrong)}; the target has "
            f"{target.num_layers} layers, hidden states of {target.hidden_size} and {target.vocab_size} tokens"
        )
    ids = None
    if "d2t" in tensors:
        shift = tensors["d2t"].read().astype(np.int64)
        ids = (np.arange(len(shift)) + shift).astype(np.int32)
        if len(ids) != own_vocab or ids.min() < 0 or ids.max() >= target.vocab_size:
            raise CheckpointError(f"{folder}: d2t does not map {own_vocab} tokens to {target.vocab_size}")
    elif own_vocab != target.vocab_size:
        raise CheckpointError(
            f"{folder} has {own_vocab} tokens of its own, but no d2t, which maps them to the target's"
        )
    spec = DraftSpec(
        layers, hidden, own_embed, own_head=True, norms_residual=bool(hf.take("norm_before_residual", False))
    )
    files = DraftFiles(hf, LLAMA, tensors, None, EAGLE_NAMES, 0, shared_file=False, ids=ids)
    return replace(config, vocab_size=own_vocab, tie_embeddings=False), spec, files


def _plain(name: str) -> str:
    """A tensor's name as SafeAILab writes it."""
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _layers_read(hf: HFConfig, target: ModelConfig) -> tuple[int, ...]:
    """The layers whose inputs the draft reads. At the top of a config they are such layers; in `eagle_config` they are
    layers whose outputs it reads (SpecForge). By default an early, a middle and a late one."""
    hf.take("norm_before_residual", False)
    given = hf.take("eagle_aux_hidden_state_layer_ids", None)
    nested = hf.take("eagle_config", None) or {}
    if nested.get("use_aux_hidden_state") is False:
        raise ConfigError(f"{hf.source}: drafts that read only the last hidden state (EAGLE-1) are not supported")
    outputs = nested.get("eagle_aux_hidden_state_layer_ids")
    count = target.num_layers
    chosen = given or [i + 1 for i in outputs or []] or [2, count // 2, count - 3]
    if not isinstance(chosen, list) or len(chosen) != 3 or any(type(i) is not int for i in chosen):
        raise ConfigError(f"{hf.source}: eagle_aux_hidden_state_layer_ids must be three layers, got {chosen!r:.80}")
    return tuple(chosen)


def open_mtp(
    path: Path, target: ModelConfig, ignored: Collection[str] = ()
) -> tuple[ModelConfig, DraftSpec, DraftFiles]:
    """The head for multi-token prediction in a target's own files. Raises ConfigError for a model that has none."""
    source = Checkpoint.open(path, ignored=ignored)
    family = source.family
    layer = target.num_layers
    if not family.mtp or not source._has(name := family.mtp["fc.weight"].format(i=layer)):
        lacks = f": {name} is not among its tensors" if family.mtp else ""
        raise ConfigError(
            f"speculative_config's mtp needs a model with a head for multi-token prediction; {path} has none that "
            f"jaxserve reads{lacks}"
        )
    # Proposals are only guesses, so the head's attention sees all tokens, also where an indexer would choose some.
    config = replace(target, layers=(family.mtp_layer(target, source.hf).without_indexer(),))
    files = vars(source) | {"names": {**family.roles(target), **family.mtp}, "layer": layer}
    spec = DraftSpec((), target.hidden_size, normed=family.mtp_normed)
    return config, spec, DraftFiles(**files, shared_file=True)
