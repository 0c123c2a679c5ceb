"""What `LLM` takes and returns: prompts, adapters, completions. How its engine is loaded."""

from __future__ import annotations

import atexit
import base64
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

from jaxserve import jax_pools
from jaxserve.adapters.registry import ServedAdapter
from jaxserve.config import EngineConfig, LoRAModule
from jaxserve.devices.jax_versions import has_started
from jaxserve.engine.adapter_places import Adapters
from jaxserve.engine.engine import Engine
from jaxserve.engine.worker_host import follow, leave
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import FinishReason, InvalidRequestError, TokenLogprob

Prompt = str | Sequence[int] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]
P = ParamSpec("P")
R = TypeVar("R")


def takes_use_tqdm(method: Callable[P, R]) -> Callable[P, R]:
    """The method with another name for its argument `progress`: vLLM's `use_tqdm`."""

    @functools.wraps(method)
    def renamed(*args: P.args, **kwargs: P.kwargs) -> R:
        if "use_tqdm" in kwargs:
            kwargs["progress"] = bool(kwargs.pop("use_tqdm"))
        return method(*args, **kwargs)

    return renamed


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter to generate with, as in vLLM. `lora_path` is a folder in PEFT's layout or a GGUF file; it is read
    once for each name and path. `lora_int_id` has no effect."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(kw_only=True)
class CompletionOutput:
    """One completion. `stop_reason` is the stop string or token id that ended it; None for the model's own ones."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(kw_only=True)
class RequestOutput:
    """A prompt with its completions. The first entry of `prompt_logprobs` is None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


def token_ids_of(value: Any) -> list[int] | None:
    """A sequence of integers of any type as plain ones; None where `value` is not such a sequence."""
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes):
        return None
    if any(isinstance(token, bool) or not hasattr(token, "__index__") for token in value):
        return None
    try:
        return [operator.index(token) for token in value]
    except TypeError:  # an array has __index__, which raises for more than one element
        return None


def prompt_list(prompts: Any) -> Sequence[Prompt]:
    """A list of prompts; a single prompt becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray) or isinstance(prompts, bytes):
        raise InvalidRequestError(f"prompts must be a prompt or a list of prompts, got {prompts!r:.80}", "prompt")
    if len(prompts) > 0 and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> tuple[str | None, list[int]]:
    """The prompt's text, where it has one, and its token ids. Raises InvalidRequestError if it is no prompt."""
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    text: Any = None
    ids: Any = prompt
    if isinstance(prompt, Mapping):
        text = prompt.get("prompt")
        ids = prompt.get("prompt_token_ids")
        if ids is None and isinstance(text, str):
            return encode_prompt(tokenizer, text)
    if (tokens := token_ids_of(ids)) is not None and (text is None or isinstance(text, str)):
        return text, tokens
    raise InvalidRequestError(
        f"a prompt must be a string, a list of token ids, or a dict with one of these, got {prompt!r:.80}", "prompt"
    )


class Video(NamedTuple):
    """A video, see `images.videos.as_clip`, and its frames a second, if these are known."""

    given: Any
    rate: float | None = None


def images_of(prompt: Prompt) -> Sequence[Any]:
    """The pictures and videos of a prompt: its "images", among which a video is a `Video`, or in vLLM's form
    {"multi_modal_data": {"image": ..., "video": ...}}."""
    if not isinstance(prompt, Mapping):
        return []
    data = prompt.get("multi_modal_data") or {}
    found = prompt.get("images") or data.get("image") or []
    found = list(found) if isinstance(found, list | tuple) else [found]
    if (video := data.get("video")) is not None:
        found.append(Video(video))
    return found


def taken_pictures(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """The messages with {"type": "image"} or {"type": "video"} in the place of each picture or video, as templates
    expect it, and the pictures and videos."""
    pictures: list[Any] = []

    def without(part: Any) -> Any:
        if isinstance(part, Mapping) and part.get("type") in ("video", "video_url"):
            pictures.append(_video(part))
            return {"type": "video"}
        if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url", "input_image"):
            return part
        given = part.get("image", part.get("image_url"))
        given = given.get("url") if isinstance(given, Mapping) else given
        if isinstance(given, str) and given.startswith("data:"):
            given = base64.b64decode(given.partition(",")[2])
        pictures.append(given)
        return {"type": "image"}

    made: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content")
        made.append({**message, "content": list(map(without, content))} if isinstance(content, list) else message)
    return made, pictures


def _video(part: Mapping[str, Any]) -> Video:
    given = part.get("video", part.get("video_url"))
    given = given.get("url") if isinstance(given, Mapping) else given
    if isinstance(given, str) and given.startswith("data:"):
        files = [base64.b64decode(one) for one in given.partition(",")[2].split(",")]
        given = files[0] if len(files) == 1 else files
    return Video(given, part.get("fps"))


def serve_adapter(adapters: Adapters | None, wanted: LoRARequest | None) -> ServedAdapter | None:
    """The adapter that is wanted; it is loaded unless it is served from this path already. Raises InvalidRequestError
    without `enable_lora`, and CheckpointError or ConfigError for an adapter that cannot be loaded."""
    if wanted is None:
        return None
    if adapters is None:
        raise InvalidRequestError("LoRA adapters need LLM(..., enable_lora=True)", "lora_request")
    LoRAModule.of((wanted.lora_name, wanted.lora_path))
    found = adapters.registry.find(wanted.lora_name)
    if found is None or found.path != wanted.lora_path:
        adapter = adapters.registry.read(wanted.lora_name, wanted.lora_path).result()
        found = adapters.registry.add(adapter, wanted.lora_path)
    return found


def load_engine(settings: EngineConfig) -> Engine:
    """The engine of an `LLM`. On all hosts but the first this does not return."""
    if not has_started():
        jax_pools.reserve(settings.memory_utilization)
    if settings.host_id:
        leave(follow(settings))
    engine = Engine.load(settings)
    if engine.hosts is not None:
        atexit.register(engine.hosts.close)
    # Speculation compares the times of steps. XLA:GPU needs memory to compile, which a cache in use would not leave.
    if engine.speculator is not None or jax.default_backend() == "gpu":
        engine.compile()
    return engine
