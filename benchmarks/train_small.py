"""Trains the small models of tests/goldens/trained: a mixture of experts and one with latent attention.

Both use the demo model's tokenizer and learn from the same files as the demo (`demo_text`): the source of the running
interpreter's standard library, but for the files held out. The maths is that of transformers, which therefore is
independent of this project. Weights are stored in bfloat16; each file is below 3 MB.

    python benchmarks/train_small.py moe --minutes 4      # needs torch and transformers
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from demo_text import EOT, is_heldout, read_sources

sys.path.pop(0)  # transformers would take kernels.py of this folder for the package of that name

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedConfig, Qwen3MoeConfig

ROOT = Path(__file__).parents[1]
OUT = ROOT / "tests" / "goldens" / "trained"
LENGTH = 256  # tokens of a sequence
ROWS = 8  # sequences of a step
RATE = 4e-3  # highest learning rate
SHARED = {
    "vocab_size": 4096, "hidden_size": 128, "num_hidden_layers": 3, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 0, "moe_intermediate_size": 64,
    "num_attention_heads": 4, "attention_bias": False,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "moe": Qwen3MoeConfig(
        **SHARED, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
    ),
    "mla": DeepseekV3Config(
        **SHARED, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16,
        v_head_dim=32, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=4, topk_group=2,
        first_k_dense_replace=1, intermediate_size=256, norm_topk_prob=True, routed_scaling_factor=1.5,
        rope_interleave=True, rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
    ),
}  # fmt: skip
BALANCE = 1e-2  # how far a step moves a correction bias (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)


def token_stream() -> torch.Tensor:
    """Ids of all files that are not held out, each file ended by the end-of-text token."""
    tokenizer = Tokenizer.from_file(str(ROOT / "checkpoints" / "demo" / "tokenizer.json"))
    texts = [text for name, text in read_sources().items() if not is_heldout(name)]
    random.Random(0).shuffle(texts)
    end = tokenizer.token_to_id(EOT)
    return torch.tensor([i for e in tokenizer.encode_batch(texts) for i in (*e.ids, end)])


def balance(model: torch.nn.Module) -> None:
    """Has each router's correction bias follow its load: experts chosen more often than the mean lose some of it."""
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):

            def count(gate: torch.nn.Module, args: tuple, logits: torch.Tensor) -> None:
                scores = logits[0] if isinstance(logits, tuple) else logits
                bias = gate.e_score_correction_bias
                chosen = (scores.float().reshape(-1, len(bias)).sigmoid() + bias).topk(2).indices
                load = torch.bincount(chosen.flatten(), minlength=len(bias)).float()
                with torch.no_grad():
                    bias += BALANCE * torch.sign(load.mean() - load)

            module.register_forward_hook(count)


def train(name: str, minutes: float) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    balance(model)
    ids = token_stream()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    began = time.monotonic()
    step = 0
    losses = []
    while (passed := (time.monotonic() - began) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 50, (1 - passed) / 0.5)
        first = torch.randint(len(ids) - LENGTH, (ROWS,))
        batch = torch.stack([ids[i : i + LENGTH] for i in first.tolist()])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step += 1
        if step % 50 == 0:
            print(f"{name} step {step} {passed:.0%} loss {sum(losses[-50:]) / 50:.3f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.bfloat16)
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):  # float32 in DeepSeek's files, too
                module.e_score_correction_bias = module.e_score_correction_bias.float()
        model.save_pretrained(folder)
        OUT.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(folder) / "model.safetensors", OUT / f"{name}.safetensors")
        config = json.loads((Path(folder) / "config.json").read_text())
    config.pop("transformers_version", None)
    (OUT / f"{name}.json").write_text(json.dumps(config, indent=1) + "\n")
    print(f"{name}: {step} steps, loss {sum(losses[-50:]) / 50:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="+", choices=CONFIGS)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.models:
        train(name, args.minutes)


if __name__ == "__main__":
    main()
