"""Record what draft heads propose, computed with the modules of transformers, into draft_heads.json. Needs torch.

For each case the target generates greedily. After each of its tokens the head proposes, without any cache: the whole
sequence of entries is computed anew for every proposal. This is the head's definition in its papers, and independent of
pages, features that steps keep, and positions in this project.

    python tests/goldens/record_drafts.py
"""

import copy
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import draft_heads  # noqa: E402
import tiny_models  # noqa: E402

PROMPT = [7, 30, 11, 52, 8, 19, 40, 23, 9, 33, 61, 5, 17, 28, 44, 12, 6, 50, 21]
NEW = 20
PROPOSALS = 4
EAGLES = {
    "llama3_gqa": {},
    "qwen3_untied": {"own_embed": True, "norm_before_residual": True, "speculators": True},
}
LAYERS = {"deepseek_v3_groups": DeepseekV3DecoderLayer, "glm4_moe_groups": Glm4MoeDecoderLayer}
# The kinds of a head's layers, in order: transformers' module, and which layer of the model it is like.
NORMED = {
    "qwen3_next_groups": [(Qwen3NextDecoderLayer, "full_attention")],
    "qwen3_next_odd": [(Qwen3NextDecoderLayer, "full_attention")],
    "qwen3_5_groups": [(Qwen3_5DecoderLayer, "full_attention")],
    "qwen3_5_moe_odd": [(Qwen3_5MoeDecoderLayer, "full_attention")],
    "nemotron_h_experts": [(NemotronHBlock, "full_attention"), (NemotronHBlock, "moe")],
}


class Eagle(torch.nn.Module):
    """The head of EAGLE-3 (arXiv:2503.01840): `forward` takes features and embeddings of all entries."""

    def __init__(self, folder: Path):
        super().__init__()
        settings = json.loads((folder / "config.json").read_text())
        config = LlamaConfig(**settings | settings.get("transformer_layer_config", {}), attn_implementation="eager")
        tensors = {
            name.replace("layers.0.", "midlayer."): x for name, x in load_file(folder / "model.safetensors").items()
        }
        self.weights = tensors
        self.config = config
        self.norms_residual = settings.get("norm_before_residual", False)

        def fill(module: torch.nn.Module, prefix: str) -> torch.nn.Module:
            own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
            module.load_state_dict(own)
            return module

        def norm(name: str) -> torch.nn.Module:
            return fill(LlamaRMSNorm(config.hidden_size, config.rms_norm_eps), f"{name}.")

        attention = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(attention, name)
            setattr(attention, name, torch.nn.Linear(2 * config.hidden_size, old.out_features, bias=False))
        self.attention = fill(attention, "midlayer.self_attn.")
        self.mlp = fill(LlamaMLP(config), "midlayer.mlp.")
        self.hidden_norm, self.embed_norm = norm("midlayer.hidden_norm"), norm("midlayer.input_layernorm")
        self.mlp_norm, self.norm = norm("midlayer.post_attention_layernorm"), norm("norm")
        self.rotary = LlamaRotaryEmbedding(config)
        ids = torch.arange(len(tensors["d2t"]))
        self.ids = ids + tensors["d2t"]

    def features(self, inputs: list[torch.Tensor], final: torch.Tensor) -> torch.Tensor:
        """inputs: of layers 0 and 1, and the output of layer 1."""
        return torch.cat(inputs, -1) @ self.weights["fc.weight"].T

    def embed(self, model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
        own = self.weights.get("embed_tokens.weight")
        return (model.get_input_embeddings().weight if own is None else own)[tokens]

    def forward(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        count = len(x)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        normed = self.hidden_norm(x)
        both = torch.cat([self.embed_norm(embedded), normed], -1)[None]
        ropes = self.rotary(both, torch.arange(count)[None])
        x = (normed if self.norms_residual else x) + self.attention(both, ropes, mask)[0][0]
        return x + self.mlp(self.mlp_norm(x))

    def token(self, x: torch.Tensor) -> int:
        return int(self.ids[(self.norm(x) @ self.weights["lm_head.weight"].T).argmax()])


class MultiToken(torch.nn.Module):
    """A head for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""

    def __init__(self, model: torch.nn.Module, folder: Path, layer: type):
        super().__init__()
        config = model.config
        prefix = f"model.layers.{config.num_hidden_layers}."
        tensors = load_file(folder / "model.safetensors")
        own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        self.weights = own
        self.rotary = model.model.rotary_emb
        self.model = model
        self.layer = layer(config, config.num_hidden_layers - 1)  # of the kind of the last layer
        stacked = self._stacked(own, config.n_routed_experts)
        missing, _ = self.layer.load_state_dict(stacked, strict=False)
        assert not missing, missing

        def norm(name: str) -> torch.nn.Module:
            made = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            made.weight.data = own[f"{name}.weight"]
            return made

        self.enorm, self.hnorm, self.norm = norm("enorm"), norm("hnorm"), norm("shared_head.norm")

    def _stacked(self, own: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
        """The experts as transformers 5 keeps them: one tensor for all."""
        found = dict(own)
        each = [
            {role: own[f"mlp.experts.{e}.{role}_proj.weight"] for role in ("gate", "up", "down")}
            for e in range(experts)
        ]
        found["mlp.experts.gate_up_proj"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in each])
        found["mlp.experts.down_proj"] = torch.stack([one["down"] for one in each])
        return found

    def features(self, inputs: list[torch.Tensor], final: torch.Tensor) -> torch.Tensor:
        return final

    def embed(self, model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
        return self.weights["embed_tokens.weight"][tokens]

    def forward(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        count = len(x)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        x = torch.cat([self.enorm(embedded), self.hnorm(x)], -1) @ self.weights["eh_proj.weight"].T
        ropes = self.rotary(x[None], torch.arange(count)[None])
        made = self.layer(x[None], attention_mask=mask, position_embeddings=ropes)
        return (made[0] if isinstance(made, tuple) else made)[0]

    def token(self, x: torch.Tensor) -> int:
        return int((self.norm(x) @ self.weights["shared_head.head.weight"].T).argmax())


class Normed(torch.nn.Module):
    """A head of Qwen or Nemotron, which transformers does not read, of its modules for the model's own layers.

    As Qwen's and NVIDIA's files are used: norms of the embedding and of the target's normed hidden state, in this
    order, then a projection, the layers, and a norm. Its result is the token's feature, and the output head reads it.
    """

    def __init__(self, model: torch.nn.Module, folder: Path, kinds: list[tuple[type, str]]):
        super().__init__()
        config = model.config
        tensors = load_file(folder / "model.safetensors")
        own = {name.removeprefix("mtp."): x for name, x in tensors.items() if name.startswith("mtp.")}
        self.weights = own
        self.model = model
        qwen = "fc.weight" in own
        self.projection = own["fc.weight" if qwen else "layers.0.eh_proj.weight"]
        types = getattr(config, "layer_types", None) or config.layers_block_type
        self.layers = []
        for i, (kind, like) in enumerate(kinds):
            layer = kind(config, max(j for j, name in enumerate(types) if name == like))
            mine = {name.removeprefix(f"layers.{i}."): x for name, x in own.items() if name.startswith(f"layers.{i}.")}
            missing, _ = layer.load_state_dict(_stacked(mine, layer.state_dict()), strict=False)
            assert not missing, missing
            self.layers.append(layer.eval())
        last = model.model.norm if qwen else model.model.norm_f
        names = (
            ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"]
            if qwen
            else ["layers.0.enorm", "layers.0.hnorm", f"layers.{len(kinds) - 1}.final_layernorm"]
        )
        self.norms = [copy.deepcopy(last) for _ in names]
        for norm, name in zip(self.norms, names, strict=True):
            norm.weight.data = own[f"{name}.weight"]

    def features(self, inputs: list[torch.Tensor], final: torch.Tensor) -> torch.Tensor:
        return final

    def embed(self, model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
        return model.get_input_embeddings().weight[tokens]

    def forward(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        count = len(x)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        x = torch.cat([self.norms[0](embedded), self.norms[1](x)], -1) @ self.projection.T
        given = {"attention_mask": mask}
        if (rotary := getattr(self.model.model, "rotary_emb", None)) is not None:
            given["position_embeddings"] = rotary(x[None], torch.arange(count)[None])
        x = x[None]
        for layer in self.layers:
            made = layer(x, **given)
            x = made[0] if isinstance(made, tuple) else made
        return self.norms[2](x)[0]

    def token(self, x: torch.Tensor) -> int:
        return int((x @ self.model.get_output_embeddings().weight.T).argmax())


def _stacked(own: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer's tensors with the experts' as transformers 5 keeps them: one tensor for all."""
    found = dict(own)
    for name in wanted.keys() - own.keys():
        before, _, role = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if role == "gate_up_proj" else (role,)
        each = [
            [own[f"{before}.{e}.{part}.weight"] for part in parts]
            for e in range(wanted[name].shape[0])
            if f"{before}.{e}.{parts[0]}.weight" in own
        ]
        if each:
            found[name] = torch.stack([torch.cat(some) for some in each])
    return found


@torch.no_grad()
def record(model: torch.nn.Module, head: torch.nn.Module) -> dict:
    """The target's greedy tokens, and the head's proposals after each of them."""
    seen: dict[int, torch.Tensor] = {}
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _, args, kwargs, i=i: seen.update({i: args[0][0]}), with_kwargs=True)
    layers[-1].register_forward_hook(
        lambda _, args, out: seen.update({len(layers): (out[0] if isinstance(out, tuple) else out)[0]})
    )
    tokens = list(PROMPT)
    proposals = []
    for _ in range(NEW):
        out = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        tokens.append(int(out.logits[0, -1].argmax()))
        features = head.features([seen[i] for i in (0, 1, 2)], out.hidden_states[-1][0])
        drafted = list(tokens)
        for _ in range(PROPOSALS):
            x = head(features, head.embed(model, drafted[1:]))
            drafted.append(head.token(x[-1]))
            features = torch.cat([features, x[-1:]])
        proposals.append(drafted[len(tokens) :])
    return {"tokens": tokens, "proposals": proposals}


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for case in (*EAGLES, *LAYERS, *NORMED):
            folder = tiny_models.build(case, Path(scratch) / case)
            if case in EAGLES:
                config = tiny_models.CASES[case].config
                draft = draft_heads.write_eagle(Path(scratch) / f"{case}_draft", config, **EAGLES[case])
            else:
                folder = draft_heads.add_mtp(folder, Path(scratch) / f"{case}_mtp")
            settings = AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(
                folder, config=settings, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            if case in EAGLES:
                head: torch.nn.Module = Eagle(draft)
            else:
                head = (
                    MultiToken(model, folder, LAYERS[case]) if case in LAYERS else Normed(model, folder, NORMED[case])
                )
            found[case] = record(model, head.eval())
            print(case, found[case]["proposals"][:3])
    (HERE / "draft_heads.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
