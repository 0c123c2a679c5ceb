"""The operator's settings of an engine: one frozen record, checked once, handed to every part that needs it."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxserve.limits import DEFAULT_WAITING, MAX_LOGPROBS, WAITING_PER_SLOT
from jaxserve.pallas_kernels.registry import BACKENDS
from jaxserve.setting import (
    A_FOLDER,
    A_WHOLE_NUMBER,
    SOME_TEXT,
    Rule,
    between,
    check_settings,
    documented,
    in_range,
    list_of,
    one_of,
    setting,
    settings_of,
)
from jaxserve.setting import ConfigError as ConfigError
from jaxserve.text.generation_defaults import check_override

# defaults of `latency_goal_ms`, on accelerators and on CPU
LATENCY_GOAL_MS = 10.0
CPU_LATENCY_GOAL_MS = 40.0
PAGE_SIZES = (8, 16, 32, 64, 128, 256)  # values of `page_size`
# defaults of `page_size`, on TPUs and elsewhere
TPU_PAGE_SIZE = 128
USUAL_PAGE_SIZE = 16
PAGE_SIZE_HELP = f"tokens per KV page; None: {TPU_PAGE_SIZE} on TPU, else {USUAL_PAGE_SIZE}"
MAX_TOKENS_PER_CALL = 16  # most tokens that one call of a compiled step samples for a decoding row
MAX_PROPOSALS = 31  # most tokens that speculative decoding proposes for a sequence in a step
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,255}")  # metrics list such names, separated by commas
ADDRESS = re.compile(r"(\[[^\]]+\]|[^\[\]:]+):\d{1,5}")  # host:port
AUTO_COORDINATOR = "auto"  # as the coordinator: the hosts are those of the environment

_Method = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"]
_METHODS = typing.get_args(_Method)
_DEVICES = between(1, 2**16)
_KERNELS = one_of("auto", *BACKENDS)
_PAGE_SIZE = Rule(f"{', '.join(map(str, PAGE_SIZES[:-1]))} or {PAGE_SIZES[-1]} tokens", lambda size: size in PAGE_SIZES)


def default_page_size(platform: str) -> int:
    """The default number of tokens per page. On a TPU one DMA copies a page of a head, and scales of 8-bit pages lie
    along its 128 lanes, so pages are large. Small pages let prompts share more of their common beginnings."""
    return TPU_PAGE_SIZE if platform == "tpu" else USUAL_PAGE_SIZE


@documented
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding, with vLLM's names. Raises ConfigError."""

    method: _Method = setting(
        "ngram",
        "ngram proposes what followed the last tokens where they stood earlier in the prompt or the output; suffix: "
        "also what followed them in recent outputs for the same tenant; draft_model: what a smaller model with the "
        "same vocabulary samples; eagle3: an EAGLE-3 draft; mtp: the model's own head for multi-token prediction",
        rule=Rule(" or ".join(_METHODS), lambda method: method in _METHODS),
    )  # fmt: skip
    model: str | None = setting(None, "folder or hub id of the draft model or EAGLE-3 draft")
    num_speculative_tokens: int = setting(
        8, "most tokens that are proposed for a sequence in a step",
        more="Fewer are proposed where they do not pay.",
        rule=between(1, MAX_PROPOSALS),
    )  # fmt: skip
    prompt_lookup_min: int = setting(2, "how many of the last tokens must have stood earlier", rule=between(1, 64))
    prompt_lookup_max: int = setting(16, "how many of the last tokens are compared at most; more are preferred")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """From a JSON object, as in vLLM's flag --speculative-config."""
        allowed = settings_of(cls)
        if unknown := [name for name in given if name not in allowed]:
            raise ConfigError(f"speculative_config must have only {', '.join(allowed)}, got {', '.join(unknown)}")
        return cls(**given)

    def __post_init__(self) -> None:
        check_settings(self, "speculative_config's ")
        between(self.prompt_lookup_min, 64).check("speculative_config's prompt_lookup_max", self.prompt_lookup_max)
        if (self.method in ("draft_model", "eagle3")) != (self.model is not None):
            raise ConfigError(f"speculative_config's model names a draft model, got {self.model!r} for {self.method}")
        if not isinstance(self.model, str | None) or self.model == "":
            raise ConfigError(f"speculative_config's model must be a folder or a hub id, got {self.model!r}")


class LoRAModule(NamedTuple):
    """An adapter that is loaded at start, with vLLM's names.

    Attributes:
      name: the name under which requests ask for it.
      path: folder in PEFT's layout, or GGUF file.
      base_model_name: the parent that `/v1/models` shows; None: the served model's name.
      required: whether an adapter that cannot be loaded is an error. If not, it is left out.
    """

    name: str
    path: str
    base_model_name: str | None = None
    required: bool = True

    @classmethod
    def of(cls, given: Any) -> LoRAModule:
        """From `name=path`, or from a JSON object as in vLLM's flag --lora-modules. Raises ConfigError."""
        if isinstance(given, str):
            name, _, path = given.partition("=")
            given = {"name": name, "path": path}
        if isinstance(given, Mapping):
            if unknown := [name for name in given if name not in ("name", "path", "base_model_name")]:
                raise ConfigError(f"an adapter must have only name, path and base_model_name, got {unknown[0]!r}")
            given = given.get("name"), given.get("path"), given.get("base_model_name")
        module = cls(*given)
        if not isinstance(module.name, str) or not ADAPTER_NAME.fullmatch(module.name):
            what = "letters, digits and . _ : / @ + -, at most 256"
            raise ConfigError(f"an adapter's name must consist of {what}, got {str(module.name)[:300]!r}")
        if not isinstance(module.path, str) or not module.path:
            raise ConfigError(f"the adapter {module.name!r} needs a path, as in {module.name}=PATH")
        if not isinstance(module.base_model_name, str | None):
            raise ConfigError(f"base_model_name of {module.name!r} must be a string, got {module.base_model_name!r}")
        return module


@documented
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Sizes are in tokens, pages or sequences, as named.

    `model` is a local folder or hub id in Hugging Face format, or "demo" for the bundled model. The other settings
    stand in the order in which --help shows them.
    """

    model: str

    # What clients see

    generation_config: str = setting(
        "auto", "recommended sampling parameters: auto: the model's; none (or vllm): none; else those of "
        "generation_config.json in this folder",
        more="Tokens that end a sequence are always the model's.",
        topic="api", short="recommended sampling: auto, none or a folder", metavar="FOLDER", rule=SOME_TEXT,
    )  # fmt: skip
    override_generation_config: Mapping[str, Any] | None = setting(
        None, 'sampling parameters that replace recommended ones, for example {"temperature": 0.6}',
        more="They may be temperature, top_k, top_p, min_p and repetition_penalty.",
        topic="api", metavar="JSON",
    )  # fmt: skip
    max_logprobs: int = setting(
        MAX_LOGPROBS, f"most alternatives for each token that a request may ask for, at most {MAX_LOGPROBS}",
        topic="api", metavar="N", rule=between(0, MAX_LOGPROBS),
    )  # fmt: skip

    # Limits of clients

    max_waiting: int | None = setting(
        None, "most completions in the queue; beyond it new requests get status 503; None: no limit, or in a server "
        f"{WAITING_PER_SLOT} for each of --max-num-seqs, at least {DEFAULT_WAITING}",
        more="An empty queue takes requests of any size.",
        topic="limits", metavar="N", rule=between(1, 2**31),
    )  # fmt: skip
    max_waiting_tokens: int | None = setting(
        None, "most prompt tokens in the queue; beyond it new requests get status 503; None: no limit",
        topic="limits", metavar="TOKENS", rule=between(1, 2**62),
    )  # fmt: skip

    # Logs, metrics, traces

    profile_dir: str | None = setting(
        None,
        "folder for traces of JAX's profiler; adds POST /profile?steps=N to a server with --admin-key; None: no traces",
        topic="watching", flag="--profile", also="--profile-dir", metavar="DIR",
    )  # fmt: skip

    # Model and weights

    revision: str | None = setting(
        None, "branch, tag or commit of a hub id, as in org/name@NAME; None: its main branch",
        topic="model", short="branch, tag or commit of a hub id", metavar="NAME", rule=SOME_TEXT,
    )  # fmt: skip
    tokenizer: str | None = setting(
        None, "folder, GGUF file or hub id with the tokenizer; None: the model's own",
        topic="model", short="folder, GGUF file or hub id of another one", metavar="MODEL", rule=SOME_TEXT,
    )  # fmt: skip
    download_dir: str | None = setting(
        None, "folder for what is downloaded from the hub; None: the hub's own cache (HF_HOME)",
        topic="model", short="folder for what is downloaded from the hub", metavar="DIR", rule=SOME_TEXT,
    )  # fmt: skip
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "dtype of weights, computation and cache; auto: float32 on CPU (with 16-bit weights if the checkpoint has "
        "them), else the checkpoint's 16-bit type",
        more="A single CPU with kernels always computes in float32: there bfloat16 and float16 round all weights, and "
        "bfloat16 also rounds the inputs of products (with AVX512-BF16, products with many rows then take two thirds "
        "of the time).",
        topic="model", short="of weights, computation and cache", other_values={"half": "float16", "float": "float32"},
    )  # fmt: skip
    quantization: str = setting(
        "auto",
        "format of the weights; auto: the checkpoint's; int8, int4, fp8, int8-dynamic or fp8-dynamic (rounds inputs "
        "of products too): quantize while loading; another name: require that format",
        topic="model", short="int8, int4, fp8: quantize while loading", metavar="NAME",
    )  # fmt: skip
    load_format: Literal["auto", "dummy"] = setting(
        "auto", "auto: read the checkpoint; dummy: random weights, for which config.json is enough",
        topic="model", short="dummy: random weights, for tests", other_values={"safetensors": "auto", "gguf": "auto"},
    )  # fmt: skip
    ignore_config_keys: tuple[str, ...] = setting(
        (),
        "unsupported settings of config.json to ignore, separated by commas; only for settings that do not affect the "
        "computation",
        more="Those of a GGUF file likewise. All count as absent.",
        topic="model", metavar="KEYS", rule=list_of("a list of keys"),
    )  # fmt: skip
    language_model_only: bool = setting(
        False, "serve the language model of a model that sees, without its image encoder: pictures are refused",
        topic="model",
    )  # fmt: skip
    mmproj: str | None = setting(
        None, "GGUF file with the image encoder of a model in a GGUF file; default: the one beside it that fits",
        topic="model", metavar="FILE",
    )  # fmt: skip
    dequantize: bool = setting(
        False, "turn quantized weights into floats while loading: takes more memory; on CPU faster for long prompts",
        topic="model",
    )  # fmt: skip
    activation_quantization: Literal["auto", "none", "checkpoint"] = setting(
        "auto",
        "whether to round the inputs of products to 8 bits for checkpoints that ask for it (W8A8); auto: on devices "
        "that multiply such numbers",
        more="Such devices are NVIDIA GPUs, and TPUs with int8. With checkpoint, a CPU multiplies the rounded values "
        "as floats.",
        topic="model",
    )  # fmt: skip
    bundle_key_file: str | None = setting(
        None,
        "file with the key that signs a bundle, or with which its signature is checked; None: the code of a bundle is "
        "run if nobody but this user and root can write to it",
        topic="model", metavar="FILE",
    )  # fmt: skip
    seed: int = setting(
        0, "seed of requests without one of their own, and of dummy weights",
        topic="model", rule=A_WHOLE_NUMBER,
    )  # fmt: skip

    # Lengths and batches

    max_model_len: int | None = setting(
        None, "longest prompt and output together, in tokens; None: the model's own limit; 32K: 32768",
        topic="batches", short="longest prompt and output together", type="tokens", metavar="TOKENS",
        rule=between(1, 2**24),
    )  # fmt: skip
    max_num_seqs: int = setting(
        256, "most sequences in one step",
        topic="batches", usual=True, metavar="N", rule=between(1, 2**16),
    )  # fmt: skip
    max_num_batched_tokens: int | None = setting(
        None, "most tokens in one step, prompts and decodes together; None: 2048, or 8192 on large GPUs",
        more="Large GPUs have 60 GB and more.",
        topic="batches", short="most tokens in one step", type="tokens", metavar="TOKENS", rule=between(1, 2**20),
    )  # fmt: skip
    prefill_chunk: int | None = setting(
        None,
        "caps a step that computes prompts while others decode; None: 32 on CPU, else what --latency-goal-ms allows "
        "by the time that such steps take",
        more="Decode tokens count, but prompts keep at least an eighth (on CPU half, and as many tokens as decodes). "
        "The default on CPU grows when prompts outnumber a quarter of the decodes. Elsewhere it is at least what the "
        "devices compute in the time of reading the weights; it follows from data sheets at first (512 tokens of an 8B "
        "model on an H200), then from measured steps.",
        topic="batches", metavar="TOKENS", rule=between(1, 2**20),
    )  # fmt: skip
    prompts_first: bool = setting(
        False,
        "while no client streams, give prompts whole steps, as `batch` does: more tokens a second, and tokens come "
        "later (not on CPU)",
        more="`LLM` sets it, too. It has no effect with --prefill-chunk.",
        topic="batches",
    )  # fmt: skip
    max_penalty_seqs: int | None = setting(
        None, "most sequences with penalties in one step; None: as many as 256 MiB of token counts hold",
        more="Further ones wait. Each takes 5 bytes of device memory per token of the vocabulary; the default is at "
        "least 8.",
        topic="batches", metavar="N", rule=between(1, 2**16),
    )  # fmt: skip
    decode_steps: int = setting(
        16, "most tokens that one call of the devices samples for a sequence, while no request waits",
        more="It samples one while a prompt is computed. The loop runs on the devices; answers do not depend on it.",
        topic="batches", metavar="N", rule=between(1, MAX_TOKENS_PER_CALL),
    )  # fmt: skip
    latency_goal_ms: float | None = setting(
        None, "longest time of such a call while a client streams, 4 times that otherwise; also sets the default of "
        f"--prefill-chunk; None: {CPU_LATENCY_GOAL_MS:g} on CPU, else {LATENCY_GOAL_MS:g}",
        more="The default is longer on CPU, where the host's work between calls takes cores from the model.",
        topic="batches", metavar="MS", rule=in_range(0, 60_000),
    )  # fmt: skip
    scheduling_policy: Literal["fcfs", "priority"] = setting(
        "fcfs", "fcfs ignores requests' priorities; priority serves lower values first, and preempts others",
        topic="batches",
    )  # fmt: skip
    async_scheduling: bool = setting(
        True, "wait for each step's tokens before scheduling the next step",
        topic="batches",
    )  # fmt: skip
    forbid_compile: bool = setting(
        False, "once ready, fail instead of compiling (for tests)",
        topic="batches",
    )  # fmt: skip

    # Memory and KV cache

    memory_utilization: float = setting(
        0.90, "of device memory, for weights, KV cache and temporaries together",
        more="On CPU, of the memory that is available at the start, of which the cache takes at most half unless "
        "--kv-pages is given.",
        topic="memory", also="--gpu-memory-utilization", short="share of device memory to use", metavar="FRACTION",
        rule=in_range(0.05, 1.0),
    )  # fmt: skip
    kv_pages: int | None = setting(
        None, "size of the KV cache in pages; None: as many as the memory allows, on CPU at most half of what is free",
        topic="memory", also="--num-gpu-blocks-override", short="size of the KV cache (default: what fits)",
        metavar="PAGES", rule=between(2, 2**31 - 1),
    )  # fmt: skip
    kv_cache_dtype: Literal["auto", "bf16", "fp8", "int8"] = setting(
        "auto", "dtype of cached keys and values; fp8 and int8 have scales; auto: the computation's",
        more="They have one for each head of each token.",
        topic="memory", short="of cached keys and values", other_values={"bfloat16": "bf16", "fp8_e4m3": "fp8"},
    )  # fmt: skip
    prefix_caching: bool = setting(
        True, "do not reuse the KV pages of equal prompt prefixes",
        topic="memory", also="--no-enable-prefix-caching", short="do not reuse equal beginnings of prompts",
    )  # fmt: skip
    kv_offload_gib: float = setting(
        0.0, "host memory for KV pages that the prefix cache evicts; they come back by a copy; 0: none",
        more="They come back where that is faster than to compute them.",
        topic="memory", short="host memory for evicted KV pages", metavar="GIB", rule=between(0.0, 2**20, "GiB"),
    )  # fmt: skip
    page_size: int | None = setting(
        None, f"{PAGE_SIZE_HELP}; prompts share cached beginnings in whole pages",
        more="The default is less where a model's attention chunks (Llama 4) are no multiple of that. A larger page "
        "leaves more of a common prefix to be computed again.",
        topic="memory", also="--block-size", metavar="TOKENS", rule=_PAGE_SIZE,
    )  # fmt: skip
    kv_offload_dir: str | None = setting(
        None,
        "private folder for the same pages in files, which survive a restart with the same model and settings; needs "
        "--kv-offload-gib; None: no files",
        topic="memory", metavar="DIR", rule=A_FOLDER,
    )  # fmt: skip
    kv_offload_dir_gib: float = setting(
        32.0, "most GiB of these files; the least recently used ones are deleted",
        topic="memory", metavar="GIB", rule=between(0.001, 2**20, "GiB"),
    )  # fmt: skip
    cpu_offload_gib: float = setting(
        0.0,
        "weights of each device that stay in host memory, by layer; every step copies them to the devices, so it is "
        "slow; for models that do not fit; 0: none",
        more="They are the last layers, and are copied one ahead of the computation. A call samples one token for a "
        "sequence then, and no step is dispatched ahead.",
        topic="memory", also="--cpu-offload-gb", metavar="GIB", rule=between(0.0, 2**20, "GiB"),
    )  # fmt: skip
    state_snapshots: int | None = setting(
        None,
        "of a model with recurrent layers: states at the ends of prompts that are kept for later requests; None: a "
        "quarter of --max-num-seqs, at least 8",
        more="Each takes the memory of a sequence's state. With 0 no prefix is reused.",
        topic="memory", rule=between(0, 2**16),
    )  # fmt: skip
    state_snapshot_interval: int | None = setting(
        None,
        "tokens between such states within a prompt, for requests that share a part of it; None: as many as have pages "
        "of a state's size, but 512 to 1024; 0: none are kept within prompts",
        more="It is rounded up to whole pages. Prompts are computed in pieces that end there.",
        topic="memory", rule=between(0, 2**20),
    )  # fmt: skip

    # Devices

    platform: Literal["auto", "cpu", "cuda", "tpu"] = setting(
        "auto",
        "what JAX runs on; auto: what it finds, but not by mistake the CPU of a machine with an accelerator: say cpu "
        "where that is meant, here or in JAX_PLATFORMS",
        topic="devices", short="what JAX runs on",
    )  # fmt: skip
    tensor_parallel_size: int = setting(
        1, "devices that share each layer; with several hosts all of their devices",
        topic="devices", also="-tp", usual=True, metavar="DEVICES", rule=_DEVICES,
    )  # fmt: skip
    pipeline_parallel_size: int = setting(
        1, "groups of --tensor-parallel-size devices that each have some of the layers",
        topic="devices", also="-pp", short="groups that each have some of the layers", metavar="STAGES", rule=_DEVICES,
    )  # fmt: skip
    data_parallel_size: int = setting(
        1, "groups of --tensor-parallel-size devices that each have their own sequences, cache and copy of attention's "
        "weights; all devices share the experts. --max-num-seqs, --max-num-batched-tokens and --kv-pages are of each "
        "group",
        more="And so is --max-penalty-seqs.",
        topic="devices", also="-dp", short="groups with sequences of their own", metavar="GROUPS", rule=_DEVICES,
    )  # fmt: skip
    enable_expert_parallel: bool = setting(
        False,
        "each device has some of a mixture's experts whole, instead of a part of each; all devices share attention "
        "and dense MLPs as before",
        topic="devices", also="-ep", short="each device has some experts whole",
    )  # fmt: skip
    decode_context_parallel_size: int = setting(
        1, "devices that keep different tokens of the same key-value heads, so that the cache holds that many times as "
        "many; for models with fewer such heads than devices",
        more="Their number divides --tensor-parallel-size.",
        topic="devices", also="-dcp", metavar="DEVICES", rule=_DEVICES,
    )  # fmt: skip
    attention_backend: str = setting(
        "auto", "kernels for attention; auto: the first that runs here, see `jaxserve kernels`",
        topic="devices", rule=_KERNELS,
    )  # fmt: skip
    matmul_backend: str = setting(
        "auto",
        "kernels for products with quantized weights; on CPU auto rounds the products' inputs to 8 bits, and cpu does "
        "not",
        more="The inputs are rounded in blocks of 32 with a scale each. Only auto follows --activation-quantization.",
        topic="devices", rule=_KERNELS,
    )  # fmt: skip
    kernel_timing: bool = setting(
        True, "do not measure which kernels multiply fastest when a device is new; take an estimate",
        more="Else, where no table says which of its kernels a device multiplies the model's weights fastest with, a "
        "start on an accelerator times them in at most 10 s, while weights are loaded, and keeps the result in the "
        "user's cache folder (docs/kernels.md). Nothing is measured, and earlier results count no more, with several "
        "hosts, --deterministic, pipelines, --cpu-offload-gib and a named --matmul-backend.",
        topic="devices",
    )  # fmt: skip

    # Several hosts

    coordinator: str | None = setting(
        None,
        "address of the first host; auto: take the hosts from the environment of Slurm, a LeaderWorkerSet or a TPU "
        "pod on GKE; None: there is one host",
        topic="hosts", metavar="HOST:PORT",
    )  # fmt: skip
    num_hosts: int = setting(1, "hosts of the replica", topic="hosts", metavar="N", rule=between(1, 2**12))
    host_id: int = setting(
        0, "which of them this is; 0: the first, which serves; the others follow it",
        topic="hosts", metavar="I", rule=between(0, 2**12 - 1),
    )  # fmt: skip
    command_host: str | None = setting(
        None,
        "address of the first host's own at which it waits for the others, where it does not have the coordinator's, "
        "as behind a load balancer; 0.0.0.0: all of its addresses; None: the coordinator's",
        topic="hosts", metavar="HOST", rule=SOME_TEXT,
    )  # fmt: skip
    command_port: int | None = setting(
        None, "port of the first host to which the others connect; None: the one after the coordinator's",
        topic="hosts", metavar="PORT", rule=between(1, 2**16 - 1),
    )  # fmt: skip
    host_secret_file: str | None = setting(
        None, "file with a secret of at least 16 bytes that all hosts know; None: read from JAXSERVE_HOST_SECRET",
        topic="hosts", metavar="FILE",
    )  # fmt: skip
    host_timeout: float = setting(
        20.0, "a host that is silent or behind for so long ends the replica",
        topic="hosts", metavar="SECONDS", rule=in_range(1, 3600, "seconds"),
    )  # fmt: skip

    # Prefill and decode on servers of their own

    role: Literal["both", "prefill", "decode"] = setting(
        "both",
        "prefill: compute prompts for servers with the role decode, and send them the KV pages; decode: ask such "
        "servers for the pages of long prompts; both: neither",
        more="The first two need --kv-offload-gib, and a secret as hosts do.",
        topic="roles",
    )  # fmt: skip
    prefill_listen: str | None = setting(
        None, "where a server with the role prefill waits for servers with the role decode",
        topic="roles", metavar="HOST:PORT",
    )  # fmt: skip
    prefill_servers: tuple[str, ...] = setting(
        (), "where the servers with the role prefill wait, separated by commas",
        more="Only for the role decode.",
        topic="roles", metavar="HOST:PORT,...", rule=list_of("a list of host:port", ADDRESS.fullmatch),
    )  # fmt: skip
    prefill_min_tokens: int = setting(
        256, "prompts with fewer tokens that are not cached here are computed here",
        topic="roles", metavar="TOKENS", rule=between(1, 2**24),
    )  # fmt: skip
    prefill_timeout: float = setting(
        10.0, "most time that a request waits for pages before its prompt is computed here",
        topic="roles", metavar="SECONDS", rule=in_range(0.1, 3600, "seconds"),
    )  # fmt: skip

    # Speculative decoding

    speculative_config: SpeculativeConfig | None = setting(
        None,
        'speculative decoding, for example {"method": "ngram", "num_speculative_tokens": 5}: proposes what followed '
        "the last tokens where they stood earlier; suffix: also in recent outputs; draft_model: by a smaller "
        '"model"; eagle3: by an EAGLE-3 draft; mtp: by the model\'s own head; answers stay the same',
        topic="speculation", short='for example {"method": "ngram"}', metavar="JSON",
    )  # fmt: skip

    # LoRA adapters

    enable_lora: bool = setting(
        False, "serve LoRA adapters, each under a model name of its own",
        topic="lora", short="serve LoRA adapters beside the model",
    )  # fmt: skip
    lora_modules: tuple[LoRAModule, ...] = setting(
        (), 'adapters to load at start: name=path, or a JSON object such as {"name": "n", "path": "p", '
        '"base_model_name": "m"}; needs --enable-lora',
        topic="lora", short="adapters to load at start", nargs="+", metavar="NAME=PATH",
    )  # fmt: skip
    max_loras: int = setting(
        4, "LoRA adapters on the devices at a time, and so in one batch; requests for others wait",
        topic="lora", short="adapters on the devices at a time", metavar="N", rule=between(1, 256),
    )  # fmt: skip
    max_lora_rank: int = setting(
        16, "highest rank of an adapter; each of --max-loras takes memory for it",
        topic="lora", metavar="RANK", rule=between(1, 512),
    )  # fmt: skip
    lora_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "of adapters' matrices on the devices; auto: the model's. bfloat16 halves what a float32 model reads of them",
        topic="lora",
    )  # fmt: skip
    max_cpu_loras: int | None = setting(
        None, "adapters in the host's memory; others are read when they are needed; None: 4 for each of --max-loras",
        more="There must be at least --max-loras.",
        topic="lora", metavar="N",
    )  # fmt: skip

    # The same bits for the same request

    deterministic: bool = setting(
        False,
        "the same bits of tokens and log-probabilities for a request whatever else runs, on one CPU and others of its "
        "kind; refused where this is not known",
        topic="determinism", short="whatever else runs beside it",
    )  # fmt: skip

    # Embeddings and scores

    task: Literal["auto", "generate", "embed", "score"] = setting(
        "auto", "what the model is for; auto: what its files say",
        more="generate: tokens; embed: embeddings; score: how well a document fits a query. The files that say it are "
        "sentence-transformers' modules.json and the name of the architecture.",
        topic="pooling", short="what the model is for",
    )  # fmt: skip
    pooling: Literal["auto", "last", "mean", "cls"] = setting(
        "auto",
        "which hidden states embeddings and scores are made of; auto: what the files say, else the last token's",
        more="mean: the mean of all tokens'; cls: the first token's.",
        topic="pooling",
    )  # fmt: skip
    score_tokens: tuple[str, ...] = setting(
        ("no", "yes"), "tokens whose odds are the score, for --task score with a model that generates",
        topic="pooling", metavar="NO,YES", rule=list_of("two texts, that of no and that of yes", length=2),
    )  # fmt: skip
    score_prompt: Literal["auto", "plain", "qwen3"] = setting(
        "auto",
        "how a query and a document become a prompt; qwen3: as Qwen3-Reranker wants it; auto: plain for classifiers, "
        "else qwen3",
        more="plain: one after the other.",
        topic="pooling",
    )  # fmt: skip

    @classmethod
    def usual_names(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Settings by their names here, also where they, or their values, have vLLM's."""
        settings = settings_of(cls)
        names = {other: name for name, known in settings.items() for other in known.other_names}
        found = {names.get(name, name): value for name, value in given.items()}
        for name, value in found.items():
            if name in settings and isinstance(value, str):
                found[name] = settings[name].other_values.get(value, value)
        return found

    @property
    def queue_limit(self) -> int:
        """A server's default of max_waiting: grows with the slots that empty the queue, and bounds its memory."""
        return max(DEFAULT_WAITING, WAITING_PER_SLOT * self.max_num_seqs)

    @property
    def rounding(self) -> str:
        """The `activation_quantization` in effect: a named matmul_backend never rounds."""
        return self.activation_quantization if self.matmul_backend == "auto" else "none"

    @property
    def times_kernels(self) -> bool:
        """The `kernel_timing` in effect. All hosts must choose the same kernels, and `deterministic` the same at every
        start."""
        whole = self.pipeline_parallel_size == 1 and not self.cpu_offload_gib
        alone = self.num_hosts == 1 and not self.deterministic and self.matmul_backend == "auto"
        return self.kernel_timing and whole and alone

    @property
    def num_proposals(self) -> int:
        """Most tokens that speculative decoding proposes for a sequence in a step."""
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens

    @property
    def host_adapters(self) -> int:
        """The `max_cpu_loras` in effect."""
        return 4 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def num_snapshots(self) -> int:
        """The `state_snapshots` in effect."""
        if not self.prefix_caching:
            return 0
        return max(8, self.max_num_seqs // 4) if self.state_snapshots is None else self.state_snapshots

    def latency_goal(self, *, on_cpu: bool) -> float:
        """Longest time of a call while a client streams, in seconds."""
        default = CPU_LATENCY_GOAL_MS if on_cpu else LATENCY_GOAL_MS
        return (default if self.latency_goal_ms is None else self.latency_goal_ms) / 1000

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_cpu_loras is not None:
            between(self.max_loras, 2**16).check("max_cpu_loras", self.max_cpu_loras)
        if (override := self.override_generation_config) is not None:
            try:
                check_override(override)
            except ValueError as error:
                raise ConfigError(f"override_generation_config: {error}") from None
        for name in ("ignore_config_keys", "score_tokens"):  # JSON knows no tuples
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.speculative_config, Mapping):
            object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        if not isinstance(self.speculative_config, SpeculativeConfig | None):
            raise ConfigError(f"speculative_config must be an object of settings, got {self.speculative_config!r}")
        self._check_adapters()
        self._check_hosts()
        self._check_offload()
        self._check_role()

    def _check_hosts(self) -> None:
        if self.coordinator == AUTO_COORDINATOR:
            return
        if (self.num_hosts > 1) != (self.coordinator is not None):
            what = "its coordinator, and a coordinator needs several hosts"
            raise ConfigError(f"num_hosts {self.num_hosts} needs {what}, got coordinator {self.coordinator!r}")
        if self.coordinator is not None and not ADDRESS.fullmatch(self.coordinator):
            raise ConfigError(f"coordinator must be host:port or auto, got {self.coordinator!r}")
        if self.host_id >= self.num_hosts:
            raise ConfigError(f"host_id must be between 0 and num_hosts - 1 = {self.num_hosts - 1}, got {self.host_id}")

    def _check_offload(self) -> None:
        if self.kv_offload_dir is not None and not self.kv_offload_gib:
            raise ConfigError("kv_offload_dir needs kv_offload_gib (--kv-offload-gib): pages pass through host memory")
        if self.kv_offload_gib and not self.prefix_caching:
            raise ConfigError("kv_offload_gib needs the prefix cache, which finds the pages")
        if self.kv_offload_gib and self.num_hosts > 1:
            raise ConfigError("kv_offload_gib is for replicas on one host")

    def _check_role(self) -> None:
        servers = self.prefill_servers
        object.__setattr__(self, "prefill_servers", tuple(dict.fromkeys(servers)))
        if (self.role == "decode") != bool(servers):
            raise ConfigError(f"role decode goes with prefill_servers, got {self.role} with {servers!r}")
        if (self.role == "prefill") != (self.prefill_listen is not None):
            raise ConfigError(f"role prefill goes with prefill_listen, got {self.role} with {self.prefill_listen!r}")
        if self.prefill_listen is not None and not ADDRESS.fullmatch(str(self.prefill_listen)):
            raise ConfigError(f"prefill_listen must be host:port, got {self.prefill_listen!r}")
        if self.role in ("prefill", "decode") and not self.kv_offload_gib:
            raise ConfigError(f"role {self.role} needs kv_offload_gib: pages pass through host memory")
        if self.role != "both" and (self.deterministic or self.pipeline_parallel_size > 1):
            raise ConfigError(f"role {self.role} needs an engine without deterministic and pipeline_parallel_size")

    def _check_adapters(self) -> None:
        given: Any = self.lora_modules
        if isinstance(given, str | Mapping):
            raise ConfigError(f"lora_modules must be a list of adapters, got {given!r}")
        modules = tuple(map(LoRAModule.of, given))
        object.__setattr__(self, "lora_modules", modules)
        if modules and not self.enable_lora:
            raise ConfigError("lora_modules need enable_lora (--enable-lora)")
        names = [module.name for module in modules]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"lora_modules must have names of their own, got {twice!r} twice")
