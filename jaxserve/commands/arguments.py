"""Arguments that several commands share: the model, and every setting of the engine."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from typing import Any

from jaxserve import jax_pools
from jaxserve.commands.help import CommandParser
from jaxserve.config import CHOICES, OTHER_NAMES, ConfigError, EngineConfig, LoRAModule
from jaxserve.hosts.host_environment import found_hosts

PAGE_SIZE_HELP = "tokens per KV page; None: 128 on TPU, else 16"


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not those of flags such as --no-ui, for which it would be that of the opposite."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.const is False else super()._get_help_string(action)


class _Usual(argparse.Action):
    """A flag for what is so without it."""

    def __call__(self, *_: Any) -> None:
        pass


def add_command(commands: Any, name: str, run: Callable, summary: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=_Help,
    )
    command.add_argument("-v", "--verbose", action="store_true", help="log in detail")
    command.set_defaults(run=run)
    return command


def add_model(command: argparse.ArgumentParser, **options: Any) -> None:
    what = "a folder in Hugging Face format, a bundle, a hub id such as org/name, or 'demo'"
    command.add_argument("model", help=what, **options)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _tokens(text: str) -> int:
    """A number of tokens; as in vLLM, 32k is 32,000 and 32K is 32,768."""
    unit = {"k": 1000, "K": 1024}.get(text[-1:])
    try:
        return int(text) if unit is None else int(text[:-1]) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a number of tokens, such as 32768, 32k or 32K: {text}") from None


def json_object(text: str) -> dict[str, Any]:
    """A flag's value that is a JSON object."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text}") from None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text}")
    return given


def _adapter(text: str) -> LoRAModule:
    try:
        return LoRAModule.of(json_object(text) if text.lstrip().startswith("{") else text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_engine_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("engine")
    defaults = {name: f.default for name, f in EngineConfig.__dataclass_fields__.items()}

    def flag(*names: str, field: str, group: Any = group, **options: Any) -> None:
        if others := OTHER_NAMES.get(field):
            options["type"] = lambda name: others.get(name, name)
        group.add_argument(*names, dest=field, default=defaults[field], choices=CHOICES.get(field), **options)

    flag("--revision", field="revision", metavar="NAME",
         help="branch, tag or commit of a hub id, as in org/name@NAME; None: its main branch")  # fmt: skip
    flag("--tokenizer", field="tokenizer", metavar="MODEL",
         help="folder, GGUF file or hub id with the tokenizer; None: the model's own")  # fmt: skip
    flag("--download-dir", field="download_dir", metavar="DIR",
         help="folder for what is downloaded from the hub; None: the hub's own cache (HF_HOME)")  # fmt: skip
    flag("--generation-config", field="generation_config", metavar="FOLDER",
         help="recommended sampling parameters: auto: the model's; none (or vllm): none; else those of "
         "generation_config.json in this folder")  # fmt: skip
    flag("--override-generation-config", field="override_generation_config", type=json_object, metavar="JSON",
         help='sampling parameters that replace recommended ones, for example {"temperature": 0.6}')  # fmt: skip
    flag("--ignore-config-keys", field="ignore_config_keys", metavar="KEYS", type=_names,
         help="unsupported settings of config.json to ignore, separated by commas; only for settings that do not "
         "affect the computation")  # fmt: skip
    flag("--max-model-len", field="max_model_len", type=_tokens, metavar="TOKENS",
         help="longest prompt and output together, in tokens; None: the model's own limit; 32K: 32768")  # fmt: skip
    flag("--max-num-seqs", field="max_num_seqs", type=int, metavar="N", help="most sequences in one step")
    flag("--max-num-batched-tokens", field="max_num_batched_tokens", type=_tokens, metavar="TOKENS",
         help="most tokens in one step, prompts and decodes together; None: 2048, or 8192 on large GPUs")  # fmt: skip
    flag("--max-penalty-seqs", field="max_penalty_seqs", type=int, metavar="N",
         help="most sequences with penalties in one step; None: as many as 256 MiB of token counts hold")  # fmt: skip
    flag("--prefill-chunk", field="prefill_chunk", type=int, metavar="TOKENS",
         help="caps a step that computes prompts while others decode; None: 32 on CPU, else what "
         "--latency-goal-ms allows by the time that such steps take")  # fmt: skip
    group.add_argument("--prompts-first", action="store_true",
                       help="while no client streams, give prompts whole steps, as `batch` does: more tokens a second, "
                       "and tokens come later (not on CPU)")  # fmt: skip
    flag("--decode-steps", field="decode_steps", type=int, metavar="N",
         help="most tokens that one call of the devices samples for a sequence, while no request waits")  # fmt: skip
    flag("--latency-goal-ms", field="latency_goal_ms", type=float, metavar="MS",
         help="longest time of such a call while a client streams, 4 times that otherwise; also sets the default of "
         "--prefill-chunk; None: 40 on CPU, else 10")  # fmt: skip
    flag("--max-waiting", field="max_waiting", type=int, metavar="N",
         help="most completions in the queue; beyond it new requests get status 503; None: no limit, or in a server 32 "
         "for each of --max-num-seqs, at least 8192")  # fmt: skip
    flag("--max-waiting-tokens", field="max_waiting_tokens", type=int, metavar="TOKENS",
         help="most prompt tokens in the queue; beyond it new requests get status 503; None: no limit")  # fmt: skip
    flag("--max-logprobs", field="max_logprobs", type=int, metavar="N",
         help="most alternatives for each token that a request may ask for, at most 20")  # fmt: skip
    flag("--scheduling-policy", field="scheduling_policy",
         help="fcfs ignores requests' priorities; priority serves lower values first, and preempts others")  # fmt: skip
    flag("--memory-utilization", "--gpu-memory-utilization", field="memory_utilization", type=float, metavar="FRACTION",
         help="of device memory, for weights, KV cache and temporaries together")  # fmt: skip
    flag("--kv-pages", "--num-gpu-blocks-override", field="kv_pages", type=int, metavar="PAGES",
         help="size of the KV cache in pages; None: as many as the memory allows, on CPU at most half of what is "
         "free")  # fmt: skip
    flag("--page-size", "--block-size", field="page_size", type=int, metavar="TOKENS",
         help=f"{PAGE_SIZE_HELP}; prompts share cached beginnings in whole pages")  # fmt: skip
    flag("--kv-cache-dtype", field="kv_cache_dtype",
         help="dtype of cached keys and values; fp8 and int8 have scales; auto: the computation's")  # fmt: skip
    flag("--dtype", field="dtype",
         help="dtype of weights, computation and cache; auto: float32 on CPU (with 16-bit weights if the checkpoint "
         "has them), else the checkpoint's 16-bit type")  # fmt: skip
    flag("--tensor-parallel-size", "-tp", field="tensor_parallel_size", type=int, metavar="DEVICES",
         help="devices that share each layer; with several hosts all of their devices")  # fmt: skip
    flag("--pipeline-parallel-size", "-pp", field="pipeline_parallel_size", type=int, metavar="STAGES",
         help="groups of --tensor-parallel-size devices that each have some of the layers")  # fmt: skip
    flag("--data-parallel-size", "-dp", field="data_parallel_size", type=int, metavar="GROUPS",
         help="groups of --tensor-parallel-size devices that each have their own sequences, cache and copy of "
              "attention's weights; all devices share the experts. --max-num-seqs, --max-num-batched-tokens and "
              "--kv-pages are of each group")  # fmt: skip
    flag("--decode-context-parallel-size", "-dcp", field="decode_context_parallel_size", type=int, metavar="DEVICES",
         help="devices that keep different tokens of the same key-value heads, so that the cache holds that many times "
         "as many; for models with fewer such heads than devices")  # fmt: skip
    flag("--attention-backend", field="attention_backend",
         help="kernels for attention; auto: the first that runs here, see `jaxserve kernels`")  # fmt: skip
    flag("--matmul-backend", field="matmul_backend",
         help="kernels for products with quantized weights; on CPU auto rounds the products' inputs to 8 bits, and cpu "
         "does not")  # fmt: skip
    flag("--activation-quantization", field="activation_quantization",
         help="whether to round the inputs of products to 8 bits for checkpoints that ask for it (W8A8); auto: on "
         "devices that multiply such numbers")  # fmt: skip
    flag("--quantization", field="quantization", metavar="NAME",
         help="format of the weights; auto: the checkpoint's; int8, int4, fp8, int8-dynamic or fp8-dynamic (rounds "
         "inputs of products too): quantize while loading; another name: require that format")  # fmt: skip
    flag("--task", field="task",
         help="what the model is for; auto: what its files say")  # fmt: skip
    flag("--pooling", field="pooling",
         help="which hidden states embeddings and scores are made of; auto: what the files say, else the last "
         "token's")  # fmt: skip
    flag("--score-tokens", field="score_tokens", metavar="NO,YES", type=_names,
         help="tokens whose odds are the score, for --task score with a model that generates")  # fmt: skip
    flag("--score-prompt", field="score_prompt",
         help="how a query and a document become a prompt; qwen3: as Qwen3-Reranker wants it; auto: plain for "
         "classifiers, else qwen3")  # fmt: skip
    flag("--load-format", field="load_format",
         help="auto: read the checkpoint; dummy: random weights, for which config.json is enough")  # fmt: skip
    flag("--bundle-key-file", field="bundle_key_file", metavar="FILE",
         help="file with the key that signs a bundle, or with which its signature is checked; None: the code of a "
         "bundle is run if nobody but this user and root can write to it")  # fmt: skip
    flag("--speculative-config", field="speculative_config", type=json_object, metavar="JSON",
         help='speculative decoding, for example {"method": "ngram", "num_speculative_tokens": 5}: proposes what '
         "followed the last tokens where they stood earlier; suffix: also in recent outputs; draft_model: by a smaller "
         "\"model\"; eagle3: by an EAGLE-3 draft; mtp: by the model's own head; answers stay the same")  # fmt: skip
    flag("--max-loras", field="max_loras", type=int, metavar="N",
         help="LoRA adapters on the devices at a time, and so in one batch; requests for others wait")  # fmt: skip
    flag("--max-lora-rank", field="max_lora_rank", type=int, metavar="RANK",
         help="highest rank of an adapter; each of --max-loras takes memory for it")  # fmt: skip
    flag("--lora-dtype", field="lora_dtype",
         help="of adapters' matrices on the devices; auto: the model's. bfloat16 halves what a float32 model reads of "
         "them")  # fmt: skip
    flag("--max-cpu-loras", field="max_cpu_loras", type=int, metavar="N",
         help="adapters in the host's memory; others are read when they are needed; None: 4 for each of "
         "--max-loras")  # fmt: skip
    flag("--lora-modules", field="lora_modules", nargs="+", type=_adapter, metavar="NAME=PATH",
         help='adapters to load at start: name=path, or a JSON object such as {"name": "n", "path": "p", '
         '"base_model_name": "m"}; needs --enable-lora')  # fmt: skip
    flag("--kv-offload-gib", field="kv_offload_gib", type=float, metavar="GIB",
         help="host memory for KV pages that the prefix cache evicts; they come back by a copy; 0: none")  # fmt: skip
    flag("--kv-offload-dir", field="kv_offload_dir", metavar="DIR",
         help="private folder for the same pages in files, which survive a restart with the same model and settings; "
         "needs --kv-offload-gib; None: no files")  # fmt: skip
    flag("--kv-offload-dir-gib", field="kv_offload_dir_gib", type=float, metavar="GIB",
         help="most GiB of these files; the least recently used ones are deleted")  # fmt: skip
    flag("--cpu-offload-gib", "--cpu-offload-gb", field="cpu_offload_gib", type=float, metavar="GIB",
         help="weights of each device that stay in host memory, by layer; every step copies them to the devices, so "
         "it is slow; for models that do not fit; 0: none")  # fmt: skip
    flag("--state-snapshots", field="state_snapshots", type=int,
         help="of a model with recurrent layers: states at the ends of prompts that are kept for later requests; "
         "None: a quarter of --max-num-seqs, at least 8")  # fmt: skip
    flag("--platform", field="platform",
         help="what JAX runs on; auto: what it finds, but not by mistake the CPU of a machine with an accelerator: say "
         "cpu where that is meant, here or in JAX_PLATFORMS")  # fmt: skip
    flag("--seed", field="seed", type=int, help="seed of requests without one of their own, and of dummy weights")
    flag("--profile", "--profile-dir", field="profile_dir", metavar="DIR",
         help="folder for traces of JAX's profiler; adds POST /profile?steps=N to a server with --admin-key; "
         "None: no traces")  # fmt: skip
    hosts = command.add_argument_group("several hosts", "Run the same command on each host, with its --host-id.")
    flag("--coordinator", field="coordinator", group=hosts, metavar="HOST:PORT",
         help="address of the first host; auto: take the hosts from the environment of Slurm, a LeaderWorkerSet or a "
         "TPU pod on GKE; None: there is one host")  # fmt: skip
    flag("--num-hosts", field="num_hosts", group=hosts, type=int, metavar="N", help="hosts of the replica")
    flag("--host-id", field="host_id", group=hosts, type=int, metavar="I",
         help="which of them this is; 0: the first, which serves; the others follow it")  # fmt: skip
    flag("--command-host", field="command_host", group=hosts, metavar="HOST",
         help="address of the first host's own at which it waits for the others, where it does not have the "
         "coordinator's, as behind a load balancer; 0.0.0.0: all of its addresses; None: the "
         "coordinator's")  # fmt: skip
    flag("--command-port", field="command_port", group=hosts, type=int, metavar="PORT",
         help="port of the first host to which the others connect; None: the one after the coordinator's")  # fmt: skip
    flag("--host-secret-file", field="host_secret_file", group=hosts, metavar="FILE",
         help="file with a secret of at least 16 bytes that all hosts know; None: read from "
         "JAXSERVE_HOST_SECRET")  # fmt: skip
    flag("--host-timeout", field="host_timeout", group=hosts, type=float, metavar="SECONDS",
         help="a host that is silent or behind for so long ends the replica")  # fmt: skip
    roles = command.add_argument_group("prefill and decode apart", "Servers of one model that share the work.")
    flag("--role", field="role", group=roles,
         help="prefill: compute prompts for servers with the role decode, and send them the KV pages; decode: ask such "
         "servers for the pages of long prompts; both: neither")  # fmt: skip
    flag("--prefill-listen", field="prefill_listen", group=roles, metavar="HOST:PORT",
         help="where a server with the role prefill waits for servers with the role decode")  # fmt: skip
    flag("--prefill-servers", field="prefill_servers", group=roles, metavar="HOST:PORT,...", type=_names,
         help="where the servers with the role prefill wait, separated by commas")  # fmt: skip
    flag("--prefill-min-tokens", field="prefill_min_tokens", group=roles, type=int, metavar="TOKENS",
         help="prompts with fewer tokens that are not cached here are computed here")  # fmt: skip
    flag("--prefill-timeout", field="prefill_timeout", group=roles, type=float, metavar="SECONDS",
         help="most time that a request waits for pages before its prompt is computed here")  # fmt: skip
    group.add_argument("--enable-expert-parallel", "-ep", action="store_true",
                       help="each device has some of a mixture's experts whole, instead of a part of each; all devices "
                       "share attention and dense MLPs as before")  # fmt: skip
    group.add_argument("--enable-lora", action="store_true",
                       help="serve LoRA adapters, each under a model name of its own")  # fmt: skip
    group.add_argument("--dequantize", action="store_true",
                       help="turn quantized weights into floats while loading: takes more memory; on CPU faster for "
                       "long prompts")  # fmt: skip
    group.add_argument("--forbid-compile", action="store_true",
                       help="once ready, fail instead of compiling (for tests)")  # fmt: skip
    group.add_argument("--deterministic", action="store_true",
                       help="the same bits of tokens and log-probabilities for a request whatever else runs, on one "
                       "CPU and others of its kind; refused where this is not known")  # fmt: skip
    group.add_argument("--no-kernel-timing", dest="kernel_timing", action="store_false",
                       help="do not measure which kernels multiply fastest when a device is new; take an "
                       "estimate")  # fmt: skip
    group.add_argument("--no-async-scheduling", dest="async_scheduling", action="store_false",
                       help="wait for each step's tokens before scheduling the next step")  # fmt: skip
    group.add_argument("--no-prefix-caching", "--no-enable-prefix-caching", dest="prefix_caching", action="store_false",
                       help="do not reuse the KV pages of equal prompt prefixes")  # fmt: skip
    group.add_argument("--async-scheduling", "--enable-prefix-caching", "--enable-chunked-prefill",
                       "--enable-auto-tool-choice", "--disable-log-requests", "--no-enable-log-requests",
                       "--enable-prompt-tokens-details", "--enable-request-id-headers", "--enable-server-load-tracking",
                       "--enable-sleep-mode", action=_Usual, nargs=0, dest=argparse.SUPPRESS,
                       default=argparse.SUPPRESS, help="flags of vLLM for what is so without them")  # fmt: skip
    if isinstance(command, CommandParser):
        command.use_topics()


def engine_config(args: argparse.Namespace) -> EngineConfig:
    config = found_hosts(EngineConfig(**{name: getattr(args, name) for name in EngineConfig.__dataclass_fields__}))
    jax_pools.reserve(config.memory_utilization)
    if config.cpu_offload_gib:
        weights = math.ceil(2 * config.cpu_offload_gib * config.tensor_parallel_size)  # twice: the pool has gaps
        os.environ.setdefault(jax_pools.HOST_POOL, str(jax_pools.USUAL_HOST_POOL + weights))
    return config
