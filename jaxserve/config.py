"""What the operator chooses: one frozen record, checked once, handed to every part that needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.limits import DEFAULT_WAITING, WAITING_PER_SLOT
from jaxserve.pallas_kernels.registry import BACKENDS

POOL_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # environment: what JAX takes of a GPU's memory when it starts
LATENCY_GOAL_MS, CPU_LATENCY_GOAL_MS = 10.0, 40.0  # where the operator says nothing
MAX_TOKENS_PER_CALL = 16  # tokens that a decoding row can draw in one call of a compiled step


class ConfigError(ValueError):
    """A setting that cannot work; the message names what was given, what is allowed and what to change."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Sizes are in tokens, pages or sequences, as named.

    Attributes:
      model: local folder or hub id in Hugging Face format, or "demo" for the bundled model.
      revision: branch, tag or commit of a hub id, as after the @ of "org/name@revision"; None is its main branch.
      tokenizer: folder, GGUF file or hub id to take the tokenizer from; None is the model's own.
      ignore_config_keys: settings of config.json (or of a GGUF file) that count as absent; for those which are not
        understood and which the operator knows to change nothing.
      dtype: computation and cache dtype; "auto" is float32 on CPU, else the checkpoint's own 16-bit type. One CPU with
        kernels computes in float32 whatever is said here, and keeps weights in 16 bits where the checkpoint does;
        bfloat16 and float16 round all weights to that, and bfloat16 also the inputs of their products, which then take
        two thirds of the time with many rows (AVX512-BF16).
      load_format: "auto" reads the checkpoint's safetensors; "dummy" fills random weights from the config alone.
      max_model_len: longest prompt + output in tokens; None takes the model's own limit.
      max_num_seqs: most sequences in one step.
      max_num_batched_tokens: most tokens in one step (prompt chunks and decodes together); None is 2048, or 8192 on
        GPUs with 60 GB and more.
      prefill_chunk: most tokens in a step that goes on with a prompt while others decode, theirs included where
        possible, so that they do not stall. None is 32 on CPU, where a step takes more where many prompts wait beside
        few that decode. Elsewhere it is what the devices compute within the latency goal by their data sheets (512
        tokens of an 8B model on an H200), or what costs no more than reading the weights where that takes longer.
      max_penalty_seqs: most sequences with a repetition, presence or frequency penalty in one step; more of them wait.
        Each keeps 5 bytes on the device for every token of the vocabulary. None is what 256 MiB hold, at least 8.
      max_waiting: most completions waiting for a place before new requests are turned away; a request that would wait
        alone is always taken. None is no limit; a server takes `queue_limit` then.
      max_waiting_tokens: the same in tokens of their prompts; None is no limit.
      scheduling_policy: "fcfs" ignores the priorities of requests; "priority" serves lower ones first, and preempts for
        them.
      page_size: tokens per KV page: 8, 16, 32, 64, 128 or 256. None is 128 on TPU, whose copies move whole tiles, and
        16 elsewhere. Prompts share cached beginnings in whole pages, so that larger ones find less of them.
      kv_cache_dtype: of keys and values in the cache; fp8 and int8 with a scale for each head of each token.
      kv_pages: pages of the KV cache; None sizes it from memory_utilization.
      memory_utilization: fraction of device memory for weights, cache and temporaries together. On CPU, fraction of
        the memory that is available at start; the cache takes at most half of it unless kv_pages says otherwise.
      tensor_parallel_size: devices that share each layer.
      quantization: of the weights: auto is what the checkpoint has; the name of a format insists on it; int8, int4 or
        fp8 quantizes a checkpoint in floats while it is loaded (and dummy weights); int8-dynamic and fp8-dynamic have
        inputs of products rounded too.
      dequantize: quantized weights become floats as they are loaded: more memory, and plain products; for comparison,
        and on CPU where the memory is there and prompts matter more than decoding.
      attention_backend: the kernels for attention: auto, or one of `jaxserve.pallas_kernels.registry.BACKENDS`.
      matmul_backend: the same for products with quantized weights. On one CPU auto rounds the inputs of most of them to
        8 bits, in blocks of 32 with a scale each; "cpu" computes with the values as they are, in float32. auto alone
        rounds inputs as `activation_quantization` says; a backend that is named does not.
      activation_quantization: what becomes of the inputs of weights whose checkpoint has them rounded to 8 bits as well
        (W8A8): auto rounds where the device multiplies such numbers (NVIDIA GPUs, TPUs with int8), "none" never,
        "checkpoint" everywhere, on CPU computing with the rounded values as floats.
      async_scheduling: dispatch a step before the tokens of the one before it are known to the host.
      decode_steps: most tokens that a decoding sequence draws in one call of the devices, where no prompt is computed
        and nothing waits; 1 to 16. The loop runs on the devices; answers do not depend on it.
      latency_goal_ms: such a call takes no longer than this while a client streams, and four times as long otherwise;
        None: 40 on CPU, where the host's work between calls takes cores from the model, elsewhere 10.
      forbid_compile: after `Engine.compile`, a step that would have to compile is an error instead of a stall.
      prefix_caching: reuse KV pages of equal prompt prefixes.
      profile_dir: folder for traces of JAX's profiler (`Engine.profile`); None turns them off.
      seed: of dummy weights, and of requests that bring no seed of their own.
    """

    model: str
    revision: str | None = None
    tokenizer: str | None = None
    ignore_config_keys: tuple[str, ...] = ()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    prefill_chunk: int | None = None
    max_penalty_seqs: int | None = None
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    page_size: int | None = None
    kv_cache_dtype: Literal["auto", "bf16", "fp8", "int8"] = "auto"
    kv_pages: int | None = None
    memory_utilization: float = 0.90
    tensor_parallel_size: int = 1
    quantization: str = "auto"
    dequantize: bool = False
    attention_backend: str = "auto"
    matmul_backend: str = "auto"
    activation_quantization: Literal["auto", "none", "checkpoint"] = "auto"
    async_scheduling: bool = True
    decode_steps: int = 16
    latency_goal_ms: float | None = None
    forbid_compile: bool = False
    prefix_caching: bool = True
    profile_dir: str | None = None
    seed: int = 0

    @property
    def queue_limit(self) -> int:
        """max_waiting of a server whose operator gives none: what waits for each slot is soon worked off, and no flood
        takes more of the memory than that."""
        return max(DEFAULT_WAITING, WAITING_PER_SLOT * self.max_num_seqs)

    @property
    def rounding(self) -> str:
        """`activation_quantization`, as far as the backend for products leaves the choice."""
        return self.activation_quantization if self.matmul_backend == "auto" else "none"

    def latency_goal(self, *, on_cpu: bool) -> float:
        """Seconds that a call may take while a client streams: what the operator said, or what suits the device."""
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
            ("kv_pages", 2, 2**31 - 1),
            ("tensor_parallel_size", 1, 2**16),
            ("decode_steps", 1, MAX_TOKENS_PER_CALL),
        ):
            value = getattr(self, name)
            if value is None and type(self).__dataclass_fields__[name].default is None:
                continue
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"{name} must be between {low} and {high}, got {value!r}")
        for name in ("revision", "tokenizer"):
            if getattr(self, name) is not None and not (isinstance(value := getattr(self, name), str) and value):
                raise ConfigError(f"{name} must be a string that is not empty, got {value!r}")
        keys = self.ignore_config_keys
        if isinstance(keys, str) or not all(isinstance(key, str) and key for key in keys):
            raise ConfigError(f"ignore_config_keys must be a list of keys, got {keys!r}")
        object.__setattr__(self, "ignore_config_keys", tuple(keys))  # JSON knows no tuples
        if self.page_size not in (None, 8, 16, 32, 64, 128, 256):
            raise ConfigError(f"page_size must be 8, 16, 32, 64, 128 or 256 tokens, got {self.page_size}")
        if type(self.seed) is not int:
            raise ConfigError(f"seed must be an integer, got {self.seed!r}")
        if type(self.memory_utilization) not in (int, float) or not 0.05 <= self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization must be in [0.05, 1.0], got {self.memory_utilization}")
        goal = self.latency_goal_ms
        if goal is not None and (type(goal) not in (int, float) or not 0 <= goal <= 60_000):
            raise ConfigError(f"latency_goal_ms must be in [0, 60000], got {goal!r}")
        for name, allowed in (
            ("dtype", ("auto", "float32", "bfloat16", "float16")),
            ("load_format", ("auto", "dummy")),
            ("scheduling_policy", ("fcfs", "priority")),
            ("kv_cache_dtype", ("auto", "bf16", "fp8", "int8")),
            ("attention_backend", ("auto", *BACKENDS)),
            ("matmul_backend", ("auto", *BACKENDS)),
            ("activation_quantization", ("auto", "none", "checkpoint")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
