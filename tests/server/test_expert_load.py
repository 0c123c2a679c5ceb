"""The counters of how tokens spread over experts, of a real server whose models route every token as is known."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file
from serving import DEMO, running_server, wait_until

EXPERTS = 8
LAYERS = 2
HIDDEN = 64
HEAD = 16
SIZE = 32
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "kv_pages": 60, "forbid_compile": True}


def model(folder, top_k, router):
    """A Qwen3-MoE whose layers add nothing to the embeddings: token t is the unit vector t % HIDDEN in every layer.
    router: [EXPERTS, HIDDEN], of every layer."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    vocab = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD,
        "intermediate_size": SIZE, "moe_intermediate_size": SIZE, "num_experts": EXPERTS, "num_experts_per_tok": top_k,
        "norm_topk_prob": True, "vocab_size": vocab, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "float32",
        "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    ones = np.ones(HIDDEN, np.float32)
    shapes = {"q": (2 * HEAD, HIDDEN), "k": (HEAD, HIDDEN), "v": (HEAD, HIDDEN)}
    tensors = {"model.embed_tokens.weight": np.eye(HIDDEN, dtype=np.float32)[np.arange(vocab) % HIDDEN]}
    tensors["model.norm.weight"] = ones
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        tensors |= {f"{at}.{name}.weight": ones for name in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {f"{at}.self_attn.{name}_norm.weight": np.ones(HEAD, np.float32) for name in "qk"}
        tensors |= {f"{at}.self_attn.{x}_proj.weight": np.ones(shape, np.float32) for x, shape in shapes.items()}
        tensors[f"{at}.self_attn.o_proj.weight"] = np.zeros((HIDDEN, 2 * HEAD), np.float32)
        tensors[f"{at}.mlp.gate.weight"] = router.astype(np.float32)
        for e in range(EXPERTS):
            for name in ("gate", "up"):
                tensors[f"{at}.mlp.experts.{e}.{name}_proj.weight"] = np.ones((SIZE, HIDDEN), np.float32)
            tensors[f"{at}.mlp.experts.{e}.down_proj.weight"] = np.zeros((HIDDEN, SIZE), np.float32)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def counted(server):
    names = "routed_tokens", "mean_expert_tokens", "busiest_expert_tokens", "active_experts"
    return np.array([server.metric(f"moe_{name}_total") for name in names])


# For each layer, of a prompt of 32 successive tokens and of one answered token: tokens of all experts, of the busiest
# one, and experts that have tokens.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("top_k", "router", "prompt", "answer"),
    [
        # Token t goes to expert t % 8: 4 tokens for each expert.
        (1, np.tile(np.eye(EXPERTS), HIDDEN // EXPERTS), (32, 4, 8), (1, 1, 1)),
        # All logits are equal, so that every token goes to the first two experts.
        (2, np.zeros((EXPERTS, HIDDEN)), (64, 32, 2), (2, 1, 2)),
    ],
    ids=["balanced", "unbalanced"],
)
def test_known_routers(top_k, router, prompt, answer, tmp_path):
    folder = model(tmp_path / "model", top_k, router)
    with running_server(folder, tmp_path / "log", engine=None, config=SIZES) as server:
        assert (counted(server) == 0).all()
        body = {"prompt": list(range(8, 40)), "temperature": 0, "ignore_eos": True}
        http = server.http()
        for tokens in (1, 2):
            before = counted(server)
            body["prompt"] = [token + 64 * tokens for token in body["prompt"]]  # routed alike, and not in the cache
            assert http.post("/v1/completions", json=body | {"max_tokens": tokens}).status_code == 200
            passes = [prompt] + [answer] * (tokens - 1)
            routed, busiest, active = LAYERS * np.sum(passes, axis=0)
            expected = [routed, routed / EXPERTS, busiest, active]
            wait_until(lambda total=before[0] + routed: counted(server)[0] >= total)
            np.testing.assert_allclose(counted(server) - before, expected)
