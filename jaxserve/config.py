"""The operator's settings: one frozen record, checked once, handed to every part that needs it."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.config_parts import ADAPTER_NAME as ADAPTER_NAME
from jaxserve.config_parts import MAX_PROPOSALS as MAX_PROPOSALS
from jaxserve.config_parts import ConfigError as ConfigError
from jaxserve.config_parts import LoRAModule as LoRAModule
from jaxserve.config_parts import SpeculativeConfig as SpeculativeConfig
from jaxserve.limits import DEFAULT_WAITING, MAX_LOGPROBS, WAITING_PER_SLOT
from jaxserve.pallas_kernels.registry import BACKENDS
from jaxserve.text.generation_defaults import check_override

# defaults of `latency_goal_ms`, on accelerators and on CPU
LATENCY_GOAL_MS = 10.0
CPU_LATENCY_GOAL_MS = 40.0
PAGE_SIZES = (8, 16, 32, 64, 128, 256)  # values of `page_size`
MAX_TOKENS_PER_CALL = 16  # most tokens that one call of a compiled step samples for a decoding row
ADDRESS = re.compile(r"(\[[^\]]+\]|[^\[\]:]+):\d{1,5}")  # host:port
OTHER_NAMES = {  # vLLM's other names of values, by setting
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"bfloat16": "bf16", "fp8_e4m3": "fp8"},
    "load_format": {"safetensors": "auto", "gguf": "auto"},
}
AUTO_COORDINATOR = "auto"  # as the coordinator: the hosts are those of the environment


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Sizes are in tokens, pages or sequences, as named.

    Attributes:
      model: local folder or hub id in Hugging Face format, or "demo" for the bundled model.
      revision: branch, tag or commit of a hub id, as after the @ of "org/name@revision"; None is its main branch.
      tokenizer: folder, GGUF file or hub id with the tokenizer; None is the model's own.
      download_dir: folder for what is downloaded from the hub; None is the hub's own cache.
      generation_config: recommended sampling parameters. "auto": the model's; "none" (or "vllm", as vLLM has it): none;
        else those of the generation_config.json in this folder. Tokens that end a sequence are always the model's.
      override_generation_config: sampling parameters that replace recommended ones, by name: temperature, top_k, top_p,
        min_p, repetition_penalty. None: none.
      ignore_config_keys: unsupported settings of config.json (or of a GGUF file) that the operator knows not to affect
        the computation. They count as absent.
      dtype: dtype of computation and cache; "auto" is float32 on CPU, else the checkpoint's own 16-bit type. A single
        CPU with kernels always computes in float32. There "auto" keeps 16-bit weights of the checkpoint, bfloat16 and
        float16 round all weights, and bfloat16 also rounds the inputs of products (with AVX512-BF16, products with
        many rows then take two thirds of the time).
      load_format: "auto" reads the checkpoint's weights; "dummy" makes random weights from the config.
      bundle_key_file: file with the key that the MAC of a bundle is checked with; None: a bundle is trusted if nobody
        but this user and root can write to it.
      max_model_len: longest prompt plus output in tokens; None is the model's own limit.
      max_num_seqs: most sequences in one step.
      max_num_batched_tokens: most tokens in one step (prompt chunks and decodes together); None is 2048, or 8192 on
        GPUs with 60 GB and more.
      prefill_chunk: caps a step that computes prompts while others decode. Decode tokens count, but prompts keep at
        least an eighth (on CPU half, and as many tokens as decodes). None on CPU is 32, and the cap grows when prompts
        outnumber a quarter of the decodes. None elsewhere is what the devices compute within the latency goal, or in
        the time of reading the weights where that is longer: at first by their data sheets (512 tokens of an 8B model
        on an H200), then by the time that such steps take.
      prompts_first: while no client streams, steps compute as many tokens of prompts as max_num_batched_tokens allows,
        also beside decodes. `LLM` and `jaxserve batch` set it. It has no effect on CPU, and none with a prefill_chunk.
      max_penalty_seqs: most sequences with a repetition, presence or frequency penalty in one step; more of them wait.
        Each takes 5 bytes of device memory per token of the vocabulary. None is what 256 MiB hold, at least 8.
      max_waiting: most completions in the queue; a request beyond that is rejected, unless the queue is empty. None is
        no limit for `LLM`, and `queue_limit` for a server.
      max_waiting_tokens: the same limit in prompt tokens; None is no limit.
      max_logprobs: most alternatives for each token that a request may ask for, at most 20.
      scheduling_policy: "fcfs" ignores the priorities of requests; "priority" serves lower ones first, and preempts for
        them.
      page_size: tokens per KV page: 8, 16, 32, 64, 128 or 256. None is 128 on TPU, whose copies move whole tiles, and
        16 elsewhere, or less where a model's attention chunks (Llama 4) are no multiple of that. Prompts share whole
        pages, so a larger page leaves more of a common prefix to be computed again.
      kv_cache_dtype: dtype of cached keys and values; fp8 and int8 have a scale for each head of each token.
      kv_pages: pages of the KV cache; None sizes it from memory_utilization.
      memory_utilization: fraction of device memory for weights, cache and temporaries together. On CPU, fraction of
        the memory that is available at start, of which the cache takes at most half unless kv_pages is given.
      tensor_parallel_size: devices that share each layer; with several hosts all of their devices.
      pipeline_parallel_size: groups of so many devices, each of which has some of the layers.
      data_parallel_size: groups of so many devices with their own sequences and copies of all weights but experts.
        max_num_seqs, max_num_batched_tokens, max_penalty_seqs and kv_pages are those of each group.
      decode_context_parallel_size: devices that keep different tokens of the same key-value heads, where a head is on
        several devices; it divides tensor_parallel_size.
      enable_expert_parallel: each device has some of a mixture's experts whole, instead of a part of each.
      coordinator: "host:port" of the first of several hosts that serve the model together, or "auto": hosts as Slurm, a
        LeaderWorkerSet or a TPU pod tells them in the environment. None: there is one host.
      num_hosts, host_id: how many hosts there are, and which of them this is; 0 is the first.
      command_host: an address that the first host has, where that is not the coordinator's, as behind a load balancer;
        there it waits for the others. "0.0.0.0": all of its addresses. None: the coordinator's.
      command_port: port of the first host at which it tells the others what to do; None: the one after the
        coordinator's.
      host_secret_file: file with a secret that all hosts know; None: the environment variable JAXSERVE_HOST_SECRET.
      host_timeout: seconds after which a silent or slow host ends the replica.
      quantization: format of the weights. "auto" is the checkpoint's; the name of a format requires that the checkpoint
        has it; int8, int4 or fp8 quantizes float weights while they are loaded; int8-dynamic and fp8-dynamic round the
        inputs of products as well.
      dequantize: turn quantized weights into floats while they are loaded. Takes more memory; useful for comparison,
        and on CPU when prompts matter more than decoding.
      attention_backend: the kernels for attention: auto, or one of `jaxserve.pallas_kernels.registry.BACKENDS`.
      matmul_backend: the kernels for products with quantized weights, likewise. On one CPU auto rounds the inputs of
        most products to 8 bits, in blocks of 32 with a scale each; "cpu" keeps them in float32. Only auto follows
        `activation_quantization`.
      kernel_timing: where no table says which of its kernels a device multiplies the model's weights fastest with, a
        start on an accelerator times them in at most 10 s, while weights are loaded, and keeps the result in the user's
        cache folder (docs/kernels.md). Off: such a device takes what an estimate says, and earlier results count no
        more. It is off with several hosts, deterministic, pipelines, cpu_offload_gib and a named matmul_backend.
      activation_quantization: when to round the inputs of products whose checkpoint asks for 8 bits (W8A8). "auto":
        where the device multiplies such numbers (NVIDIA GPUs, TPUs with int8); "none": never; "checkpoint":
        everywhere, where on CPU the rounded values are multiplied as floats.
      task: what the model is for. generate: tokens; embed: embeddings; score: how well a document fits a query.
        "auto": what its files say (sentence-transformers' modules.json, the name of the architecture).
      pooling: which of a prompt's hidden states an embedding or score is made of: that of the last token, the mean of
        all, or that of the first token (cls). "auto": what the files say, else the last.
      score_tokens: with task score and a model that generates, the tokens whose odds are the score: (no, yes).
      score_prompt: how a query and a document become a prompt: "plain", one after the other, or "qwen3", the prompt of
        Qwen3-Reranker. "auto": plain for classifiers, qwen3 for models that generate.
      speculative_config: speculative decoding, or a mapping with its settings; None: none. Answers do not depend on it.
      enable_lora: serve LoRA adapters beside the model.
      max_loras: adapters whose weights are on the devices at a time, and so the most in one batch, 1 to 256. Requests
        for others wait for a place.
      max_lora_rank: highest rank of an adapter; all adapters take memory for it.
      lora_dtype: dtype of adapters' matrices on the devices, to which those of files are rounded. "auto": the model's.
      max_cpu_loras: adapters whose weights are in the host's memory, at least `max_loras`; others are read from their
        files when they are needed. None: four times `max_loras`.
      lora_modules: adapters to load at start, each a LoRAModule, `name=path` or a mapping with its fields.
      async_scheduling: dispatch a step before the host knows the tokens of the step before it.
      decode_steps: most tokens that one call of the devices samples for a decoding sequence, 1 to 16. Applies while no
        prompt is computed and no request waits. The loop runs on the devices; answers do not depend on it.
      latency_goal_ms: longest time of such a call while a client streams; four times that otherwise. None: 40 on CPU,
        where the host's work between calls takes cores from the model, elsewhere 10.
      forbid_compile: after `Engine.compile`, a step that would have to compile is an error instead of a stall.
      prefix_caching: reuse KV pages of equal prompt prefixes.
      state_snapshots: of a model with recurrent layers: states at the ends of prompts that are kept for later requests
        with the same beginning. Each takes the memory of a sequence's state. None is a quarter of max_num_seqs, at
        least 8; with 0 no prefix is reused.
      kv_offload_gib: GiB of host memory for KV pages that the prefix cache evicts; requests with the same prefix get
        them back by a copy where that is faster than to compute them. 0: none.
      kv_offload_dir: folder for the same pages in files, which the next engine with the same model and settings finds;
        only this user may enter it. None: there are no files. Needs kv_offload_gib.
      kv_offload_dir_gib: most GiB of these files.
      cpu_offload_gib: GiB of weights on each device that stay in host memory instead, as whole layers, the last ones of
        the model. Every step copies them to the devices, one ahead of the computation. A call samples one token for a
        sequence then, and no step is dispatched ahead. 0: none.
      role: "prefill": computes prompts for other servers, and sends them the KV pages. "decode": asks such servers for
        the pages of long prompts. "both": neither. The first two need kv_offload_gib, and a secret as hosts do.
      prefill_listen: "host:port" at which a server with the role prefill waits for those with the role decode.
      prefill_servers: where they wait, each "host:port". Only for the role decode.
      prefill_min_tokens: prompts with fewer tokens that are not cached here are computed here.
      prefill_timeout: most seconds that a request waits for pages before its prompt is computed here.
      deterministic: a request's tokens and log-probabilities are the same bits whatever else runs, on one CPU and
        others of its kind. Devices, settings and models for which this is not known are refused.
      platform: what JAX runs on. "auto": what it finds, but the CPU of a machine with an accelerator is refused, unless
        the environment variable JAX_PLATFORMS asks for it.
      profile_dir: folder for traces of JAX's profiler (`Engine.profile`); None turns them off.
      seed: seed of dummy weights, and of requests without a seed of their own.
    """

    model: str
    revision: str | None = None
    tokenizer: str | None = None
    download_dir: str | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    ignore_config_keys: tuple[str, ...] = ()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    bundle_key_file: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    prefill_chunk: int | None = None
    prompts_first: bool = False
    max_penalty_seqs: int | None = None
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    max_logprobs: int = MAX_LOGPROBS
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    page_size: int | None = None
    kv_cache_dtype: Literal["auto", "bf16", "fp8", "int8"] = "auto"
    kv_pages: int | None = None
    memory_utilization: float = 0.90
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    coordinator: str | None = None
    num_hosts: int = 1
    host_id: int = 0
    command_host: str | None = None
    command_port: int | None = None
    host_secret_file: str | None = None
    host_timeout: float = 20.0
    quantization: str = "auto"
    dequantize: bool = False
    attention_backend: str = "auto"
    matmul_backend: str = "auto"
    kernel_timing: bool = True
    activation_quantization: Literal["auto", "none", "checkpoint"] = "auto"
    task: Literal["auto", "generate", "embed", "score"] = "auto"
    pooling: Literal["auto", "last", "mean", "cls"] = "auto"
    score_tokens: tuple[str, ...] = ("no", "yes")
    score_prompt: Literal["auto", "plain", "qwen3"] = "auto"
    speculative_config: SpeculativeConfig | None = None
    enable_lora: bool = False
    max_loras: int = 4
    max_lora_rank: int = 16
    lora_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_cpu_loras: int | None = None
    lora_modules: tuple[LoRAModule, ...] = ()
    async_scheduling: bool = True
    decode_steps: int = 16
    latency_goal_ms: float | None = None
    forbid_compile: bool = False
    prefix_caching: bool = True
    state_snapshots: int | None = None
    kv_offload_gib: float = 0.0
    kv_offload_dir: str | None = None
    kv_offload_dir_gib: float = 32.0
    cpu_offload_gib: float = 0.0
    role: Literal["both", "prefill", "decode"] = "both"
    prefill_listen: str | None = None
    prefill_servers: tuple[str, ...] = ()
    prefill_min_tokens: int = 256
    prefill_timeout: float = 10.0
    deterministic: bool = False
    platform: Literal["auto", "cpu", "cuda", "tpu"] = "auto"
    profile_dir: str | None = None
    seed: int = 0

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
    def schedules_ahead(self) -> bool:
        """The `async_scheduling` in effect: a step that waits for weights leaves nothing to do ahead."""
        return self.async_scheduling and not self.cpu_offload_gib

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
        for name, low, high in (
            ("max_model_len", 1, 2**24),
            ("max_num_seqs", 1, 2**16),
            ("max_num_batched_tokens", 1, 2**20),
            ("prefill_chunk", 1, 2**20),
            ("max_penalty_seqs", 1, 2**16),
            ("max_waiting", 1, 2**31),
            ("max_waiting_tokens", 1, 2**62),
            ("max_logprobs", 0, MAX_LOGPROBS),
            ("kv_pages", 2, 2**31 - 1),
            ("state_snapshots", 0, 2**16),
            *((f"{kind}_parallel_size", 1, 2**16) for kind in ("tensor", "pipeline", "data", "decode_context")),
            ("num_hosts", 1, 2**12),
            ("host_id", 0, 2**12 - 1),
            ("command_port", 1, 2**16 - 1),
            ("decode_steps", 1, MAX_TOKENS_PER_CALL),
            ("max_loras", 1, 256),
            ("max_lora_rank", 1, 512),
            ("max_cpu_loras", self.max_loras, 2**16),
            ("prefill_min_tokens", 1, 2**24),
        ):
            value = getattr(self, name)
            if value is None and type(self).__dataclass_fields__[name].default is None:
                continue
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"{name} must be between {low} and {high}, got {value!r}")
        for name in ("revision", "tokenizer", "download_dir", "generation_config", "command_host"):
            if getattr(self, name) is not None and not (isinstance(value := getattr(self, name), str) and value):
                raise ConfigError(f"{name} must be a string that is not empty, got {value!r}")
        if (override := self.override_generation_config) is not None:
            try:
                check_override(override)
            except ValueError as error:
                raise ConfigError(f"override_generation_config: {error}") from None
        keys = self.ignore_config_keys
        if isinstance(keys, str) or not all(isinstance(key, str) and key for key in keys):
            raise ConfigError(f"ignore_config_keys must be a list of keys, got {keys!r}")
        object.__setattr__(self, "ignore_config_keys", tuple(keys))  # JSON knows no tuples
        tokens = self.score_tokens
        if isinstance(tokens, str) or len(tokens) != 2 or not all(isinstance(one, str) and one for one in tokens):
            raise ConfigError(f"score_tokens must be two texts, that of no and that of yes, got {tokens!r}")
        object.__setattr__(self, "score_tokens", tuple(tokens))
        if isinstance(self.speculative_config, Mapping):
            object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        if not isinstance(self.speculative_config, SpeculativeConfig | None):
            raise ConfigError(f"speculative_config must be an object of settings, got {self.speculative_config!r}")
        self._check_adapters()
        self._check_hosts()
        self._check_offload()
        self._check_role()
        if self.page_size not in (None, *PAGE_SIZES):
            raise ConfigError(f"page_size must be 8, 16, 32, 64, 128 or 256 tokens, got {self.page_size}")
        if type(self.seed) is not int:
            raise ConfigError(f"seed must be an integer, got {self.seed!r}")
        if type(self.memory_utilization) not in (int, float) or not 0.05 <= self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization must be in [0.05, 1.0], got {self.memory_utilization}")
        goal = self.latency_goal_ms
        if goal is not None and (type(goal) not in (int, float) or not 0 <= goal <= 60_000):
            raise ConfigError(f"latency_goal_ms must be in [0, 60000], got {goal!r}")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    def _check_hosts(self) -> None:
        if type(self.host_timeout) not in (int, float) or not 1 <= self.host_timeout <= 3600:
            raise ConfigError(f"host_timeout must be in [1, 3600] seconds, got {self.host_timeout!r}")
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
        for name, low in (("kv_offload_gib", 0.0), ("kv_offload_dir_gib", 0.001), ("cpu_offload_gib", 0.0)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not low <= value <= 2**20:
                raise ConfigError(f"{name} must be between {low:g} and {2**20} GiB, got {value!r}")
        if not isinstance(self.kv_offload_dir, str | None) or self.kv_offload_dir == "":
            raise ConfigError(f"kv_offload_dir must be a folder, got {self.kv_offload_dir!r}")
        if self.kv_offload_dir is not None and not self.kv_offload_gib:
            raise ConfigError("kv_offload_dir needs kv_offload_gib (--kv-offload-gib): pages pass through host memory")
        if self.kv_offload_gib and not self.prefix_caching:
            raise ConfigError("kv_offload_gib needs the prefix cache, which finds the pages")
        if self.kv_offload_gib and self.num_hosts > 1:
            raise ConfigError("kv_offload_gib is for replicas on one host")

    def _check_role(self) -> None:
        servers: Any = self.prefill_servers
        if isinstance(servers, str) or not all(isinstance(one, str) and ADDRESS.fullmatch(one) for one in servers):
            raise ConfigError(f"prefill_servers must be a list of host:port, got {servers!r}")
        object.__setattr__(self, "prefill_servers", tuple(dict.fromkeys(servers)))
        if (self.role == "decode") != bool(servers):
            raise ConfigError(f"role decode goes with prefill_servers, got {self.role} with {servers!r}")
        if (self.role == "prefill") != (self.prefill_listen is not None):
            raise ConfigError(f"role prefill goes with prefill_listen, got {self.role} with {self.prefill_listen!r}")
        if self.prefill_listen is not None and not ADDRESS.fullmatch(str(self.prefill_listen)):
            raise ConfigError(f"prefill_listen must be host:port, got {self.prefill_listen!r}")
        if type(self.prefill_timeout) not in (int, float) or not 0.1 <= self.prefill_timeout <= 3600:
            raise ConfigError(f"prefill_timeout must be in [0.1, 3600] seconds, got {self.prefill_timeout!r}")
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


CHOICES: dict[str, tuple[str, ...]] = {  # the values of each setting that is one of a list
    name: typing.get_args(kind)
    for name, kind in typing.get_type_hints(EngineConfig).items()
    if typing.get_origin(kind) is Literal
} | dict.fromkeys(("attention_backend", "matmul_backend"), ("auto", *BACKENDS))
