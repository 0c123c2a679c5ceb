"""Arguments that several commands have in common: the model, and every setting of the engine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from jaxserve.config import POOL_FRACTION, EngineConfig
from jaxserve.pallas_kernels.registry import BACKENDS

PAGE_SIZE_HELP = "tokens per page of the cache; None: 128 on TPU, else 16"


def add_command(commands: Any, name: str, run: Callable, summary: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("-v", "--verbose", action="store_true", help="log in detail")
    command.set_defaults(run=run)
    return command


def add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", help="a folder in Hugging Face format, a hub id such as org/name, or 'demo'")


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def add_engine_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("engine")
    defaults = {name: f.default for name, f in EngineConfig.__dataclass_fields__.items()}

    def flag(*names: str, field: str, **options: Any) -> None:
        group.add_argument(*names, dest=field, default=defaults[field], **options)

    flag("--revision", field="revision", metavar="NAME",
         help="branch, tag or commit of a hub id, as in org/name@NAME; None: its main branch")  # fmt: skip
    flag("--tokenizer", field="tokenizer", metavar="MODEL",
         help="folder, GGUF file or hub id with the tokenizer to use; None: the model's own")  # fmt: skip
    flag("--ignore-config-keys", field="ignore_config_keys", metavar="KEYS", type=_names,
         help="settings of config.json, with commas between them, that are not understood and that you know to change "
         "nothing")  # fmt: skip
    flag("--max-model-len", field="max_model_len", type=int, metavar="TOKENS",
         help="longest prompt and output together, in tokens; None: the model's own limit")  # fmt: skip
    flag("--max-num-seqs", field="max_num_seqs", type=int, metavar="N", help="most sequences in one step")
    flag("--max-num-batched-tokens", field="max_num_batched_tokens", type=int, metavar="TOKENS",
         help="most tokens in one step, prompts and decodes together; None: 2048, or 8192 on large GPUs")  # fmt: skip
    flag("--max-penalty-seqs", field="max_penalty_seqs", type=int, metavar="N",
         help="most sequences with penalties in one step; None: as many as 256 MiB of token counts hold")  # fmt: skip
    flag("--prefill-chunk", field="prefill_chunk", type=int, metavar="TOKENS",
         help="most tokens in a step with a prompt while others decode; None: 32 on CPU, else what "
         "--latency-goal-ms allows by the device's data sheet")  # fmt: skip
    flag("--decode-steps", field="decode_steps", type=int, metavar="N",
         help="most tokens that a sequence draws in one call of the devices, where nothing waits")  # fmt: skip
    flag("--latency-goal-ms", field="latency_goal_ms", type=float, metavar="MS",
         help="such a call takes no longer while a client streams, and 4 times as long otherwise; sets the default of "
         "--prefill-chunk; None: 40 on CPU, else 10")  # fmt: skip
    flag("--max-waiting", field="max_waiting", type=int, metavar="N",
         help="most completions in the queue, beyond which new requests get 503; None: 32 for each of "
         "--max-num-seqs, at least 8192")  # fmt: skip
    flag("--max-waiting-tokens", field="max_waiting_tokens", type=int, metavar="TOKENS",
         help="most tokens of prompts in the queue, beyond which new requests get 503; None: no limit")  # fmt: skip
    flag("--scheduling-policy", field="scheduling_policy", choices=["fcfs", "priority"],
         help="fcfs ignores requests' priorities; priority serves lower ones first, and preempts others")  # fmt: skip
    flag("--memory-utilization", "--gpu-memory-utilization", field="memory_utilization", type=float, metavar="FRACTION",
         help="of device memory, for weights, KV cache and temporaries together")  # fmt: skip
    flag("--kv-pages", field="kv_pages", type=int, metavar="PAGES",
         help="size of the KV cache in pages; None: what the memory allows, on CPU at most half of what is "
         "free")  # fmt: skip
    flag("--page-size", "--block-size", field="page_size", type=int, metavar="TOKENS",
         help="tokens per KV page, in which prompts share their beginnings; None: 128 on TPU, else 16")  # fmt: skip
    flag("--kv-cache-dtype", field="kv_cache_dtype", choices=["auto", "bf16", "fp8", "int8"],
         help="of cached keys and values, fp8 and int8 with scales; auto: that of the computation")  # fmt: skip
    flag("--dtype", field="dtype", choices=["auto", "float32", "bfloat16", "float16"],
         help="of weights, computation and cache; auto: float32 on CPU (weights in the checkpoint's 16 bits), else the "
         "checkpoint's 16-bit type")  # fmt: skip
    flag("--tensor-parallel-size", "-tp", field="tensor_parallel_size", type=int, metavar="DEVICES",
         help="devices that share each layer")  # fmt: skip
    flag("--attention-backend", field="attention_backend", choices=["auto", *BACKENDS],
         help="kernels for attention; auto: the first that runs here, see `jaxserve kernels`")  # fmt: skip
    flag("--matmul-backend", field="matmul_backend", choices=["auto", *BACKENDS],
         help="the same for products with quantized weights; auto rounds their inputs to 8 bits on CPU, cpu does "
         "not")  # fmt: skip
    flag("--activation-quantization", field="activation_quantization", choices=["auto", "none", "checkpoint"],
         help="where a checkpoint has the inputs of products rounded to 8 bits too (W8A8): auto rounds on devices that "
         "multiply such numbers, none never, checkpoint everywhere")  # fmt: skip
    flag("--quantization", field="quantization", metavar="NAME",
         help="of the weights; auto: as the checkpoint is; int8, int4, fp8, int8-dynamic or fp8-dynamic (inputs of "
         "products too): quantize one in floats while it is loaded; a format such as awq: insist on it")  # fmt: skip
    flag("--load-format", field="load_format", choices=["auto", "dummy"],
         help="auto: read the safetensors; dummy: random weights from config.json alone")  # fmt: skip
    flag("--seed", field="seed", type=int, help="for requests without a seed of their own, and for dummy weights")
    flag("--profile", "--profile-dir", field="profile_dir", metavar="DIR",
         help="folder for traces of JAX's profiler; serve with --admin-key then has POST /profile?steps=N; "
         "None: no traces")  # fmt: skip
    group.add_argument("--dequantize", action="store_true",
                       help="quantized weights become floats as they are loaded: more memory; "
                       "on CPU faster for long prompts")  # fmt: skip
    group.add_argument("--forbid-compile", action="store_true",
                       help="once ready, fail rather than compile (nothing should; for tests)")  # fmt: skip
    group.add_argument("--no-async-scheduling", dest="async_scheduling", action="store_false",
                       help="wait for each step before the next is scheduled")  # fmt: skip
    group.add_argument("--no-prefix-caching", dest="prefix_caching", action="store_false",
                       help="do not reuse the KV pages of equal prompt beginnings")  # fmt: skip


def engine_config(args: argparse.Namespace) -> EngineConfig:
    config = EngineConfig(**{name: getattr(args, name) for name in EngineConfig.__dataclass_fields__})
    os.environ.setdefault(POOL_FRACTION, str(config.memory_utilization))  # JAX has not looked for devices yet
    return config
