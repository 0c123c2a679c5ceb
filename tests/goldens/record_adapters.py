"""Make LoRA adapters with PEFT for checkpoints of tests/tiny_models.py, and record what transformers computes with each
after `merge_and_unload`. With --check, compare a fresh run with the files.

Needs torch and peft; see README.md beside this file.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import record
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

HERE = Path(__file__).resolve().parent / "adapters"
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PATTERNS = {
    "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 6, r"layers\.0\..*v_proj": 3},
    "alpha_pattern": {"up_proj": 20, "layers.1.mlp.down_proj": 5},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # adapter -> (checkpoint, settings of LoraConfig)
    **{f"llama_{name}": ("llama3_gqa", {"target_modules": [name]}) for name in [*LLAMA, "embed_tokens", "lm_head"]},
    "llama_all": ("llama3_gqa", {"target_modules": [*LLAMA, "embed_tokens", "lm_head"], "r": 8, "lora_alpha": 16}),
    "llama_rslora": ("llama3_gqa", {"target_modules": "all-linear", "use_rslora": True}),
    "llama_patterns": ("llama3_gqa", {"target_modules": LLAMA, "use_rslora": True, **PATTERNS}),
    "qwen2_biases": ("qwen2_tied", {"target_modules": LLAMA}),
    "phi3_fused": ("phi3_window", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "gpt2_transposed": ("gpt2_inner", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gemma2_all": ("gemma2_caps", {"target_modules": LLAMA}),
    "neox_grouped": (
        "neox_parallel",
        {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]},
    ),
    "falcon_fused": (
        "falcon_7b",
        {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]},
    ),
    "deepseek_latents": (
        "deepseek_v2_lite",
        {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"]},
    ),
    "mixtral_experts": ("mixtral_experts", {"target_modules": ["q_proj", "v_proj"], "target_parameters": EXPERTS}),
    "qwen3_moe_experts": ("qwen3_moe_step", {"target_modules": LLAMA, "target_parameters": EXPERTS}),
    "qwen3_moe_down": ("qwen3_moe_plain", {"target_modules": ["o_proj"], "target_parameters": EXPERTS[1:]}),
    "qwen2_moe_shared": ("qwen2_moe_shared", {"target_modules": [*LLAMA, "shared_expert_gate"]}),
    "gpt_oss_experts": ("gpt_oss_sinks", {"target_modules": LLAMA[:4], "target_parameters": EXPERTS}),
    "qwen3_next_delta": (
        "qwen3_next_groups",
        {"target_modules": [*LLAMA, "in_proj_qkvz", "in_proj_ba", "out_proj"]},
    ),
}
SLOTS = (1, 2)  # the prompts of 7 and 37 tokens
record.NEW_TOKENS = 16


def make(name: str, folder: Path) -> None:
    """Saves an adapter with random matrices, large enough to change which tokens are generated."""
    checkpoint, settings = CASES[name]
    model = record.load(record.tiny_models.build(checkpoint, folder / "model"))
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "task_type": "CAUSAL_LM", **settings})
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(list(CASES).index(name))
    for key, value in sorted(adapted.named_parameters()):
        if "lora_" in key:
            size = 0.5 / np.sqrt(value.shape[-1]) if "_A" in key else 0.1
            value.data = size * torch.randn(value.shape, generator=generator)
    adapted.save_pretrained(str(HERE / name), save_embedding_layers=False)
    (HERE / name / "README.md").unlink()
    saved = HERE / name / "adapter_config.json"
    values = json.loads(saved.read_text()) | {"base_model_name_or_path": checkpoint}
    lists = {key: sorted(value) for key, value in values.items() if key == "target_modules" and type(value) is list}
    saved.write_text(json.dumps(values | lists, indent=2) + "\n")


def merged(name: str, folder: Path) -> transformers.PreTrainedModel:
    """The checkpoint with the saved adapter merged into its weights."""
    model = record.load(record.tiny_models.build(CASES[name][0], folder / "merged"))
    return PeftModel.from_pretrained(model, str(HERE / name)).merge_and_unload().eval()


def results(name: str, folder: Path, seeds: list[int] | None) -> dict[str, np.ndarray]:
    """The content of an adapter's golden.npz: of each prompt, its tokens, the logits of its last positions, and the
    greedy tokens. Without `seeds`, the first seed is taken whose greedy path is unambiguous."""
    model = merged(name, folder)
    checkpoint = CASES[name][0]
    content: dict[str, np.ndarray] = {}
    chosen = []
    for i, slot in enumerate(SLOTS):
        for seed in range(record.SEEDS) if seeds is None else [seeds[i]]:
            prompt = record.make_prompt(checkpoint, slot, seed)
            found = record.greedy(model, prompt)
            if found.margin > record.SMALLEST_MARGIN:
                break
        else:
            raise RuntimeError(f"{name}: no prompt is unambiguous")
        content |= {f"prompt_{i}": prompt, f"logits_{i}": found.logits, f"tokens_{i}": found.tokens}
        chosen.append(seed)
    return content | {"seeds": np.array(chosen, np.int32)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="all, if none is named")
    parser.add_argument("--check", action="store_true", help="compare a fresh run with the files; write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    failed = False
    for name in arguments.cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = HERE / name / "golden.npz"
            if not arguments.check:
                (HERE / name).mkdir(parents=True, exist_ok=True)
                make(name, Path(folder))
                np.savez_compressed(path, **results(name, Path(folder), None))
                print(f"{name}: recorded", flush=True)
                continue
            golden = np.load(path)
            fresh = results(name, Path(folder), golden["seeds"].tolist())
            far = [key for key in fresh if not np.allclose(fresh[key], golden[key], rtol=0, atol=record.LOGITS_ATOL)]
            failed |= bool(far)
            print(f"{name}: {f'{far} differ' if far else 'ok'}", flush=True)
    if not arguments.check:
        versions = {"peft": peft.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        (HERE / "VERSIONS.json").write_text(json.dumps(versions, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
