"""Request bodies: typed, bounded, and turned into SamplingParams.

A field that we know and do not serve yet is refused by name when it is set; fields without effect on the output
(`user`, `metadata`, `store`, …) and fields that we do not know are ignored, because clients send new ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.tokenizer import Tokenizer
from jaxserve.types import MAX_LOGIT_BIAS, MAX_LOGPROBS, InvalidRequestError, SamplingParams
from server.structured import grammar_of

MAX_PROMPTS = 1024
MAX_BAD_WORDS = 128
MAX_STOP_LENGTH = 1024  # characters of one stop string
COMPLETION_TOKENS = 16  # max_tokens of /v1/completions where the client gives none
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

# Fields that are known and not served, with the values that ask for nothing.
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "early_stopping": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What completions and chat have in common; None stands for the default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = None
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    # known and not served, see _NOT_SERVED
    suffix: Any = None
    early_stopping: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logits_processors: Any = None
    prompt_embeds: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None
    documents: Any = None
    chat_template: Any = None

    def check(self) -> None:
        """Raises InvalidRequestError, naming the field, for what can be told without the model."""
        for name, harmless in _NOT_SERVED.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise InvalidRequestError(f"{name} is not supported by this server", name, "unsupported_parameter")
        if self.best_of not in (None, 1, self.n):
            raise InvalidRequestError(
                f"best_of is only supported when it equals n ({self.n or 1}), got {self.best_of}; "
                "use_beam_search with n gives the n most likely outputs",
                "best_of",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed when stream is true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs is not available when stream is true", "prompt_logprobs")
        for stop in [self.stop] if isinstance(self.stop, str) else self.stop or []:
            if not 0 < len(stop) <= MAX_STOP_LENGTH:
                raise InvalidRequestError(
                    f"stop strings must have 1 to {MAX_STOP_LENGTH} characters, got one of {len(stop)}", "stop"
                )
        if len(self.bad_words or ()) > MAX_BAD_WORDS or not all(0 < len(w) <= 256 for w in self.bad_words or ()):
            raise InvalidRequestError(
                f"bad_words must hold at most {MAX_BAD_WORDS} words of 1 to 256 characters", "bad_words"
            )
        check_range("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, 2**31 - 1, excluded=0)
        check_range("priority", self.priority, -(2**31), 2**31 - 1)
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= 256:
            raise InvalidRequestError("cache_salt must have 1 to 256 characters", "cache_salt")
        if self.request_id is not None and not _REQUEST_ID.fullmatch(self.request_id):
            raise InvalidRequestError("request_id must be 1 to 128 letters, digits or ._:-", "request_id")

    @property
    def usage_mode(self) -> str:
        options = self.stream_options or StreamOptions()
        if not options.include_usage:
            return "off"
        return "always" if options.continuous_usage_stats else "last"

    def sampling_params(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """The engine's parameters: the client's where given, else the model's recommendation, else OpenAI's default."""
        given, defaults = {}, tokenizer.generation_defaults
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if value is None and not self.use_beam_search:  # which looks at the model's own probabilities alone
                value = getattr(defaults, name)
            if value is not None:
                given[name] = value
        for name in ("n", "presence_penalty", "frequency_penalty", "min_tokens", "use_beam_search", "length_penalty"):
            if (value := getattr(self, name)) is not None:
                given[name] = value
        params = SamplingParams(
            **given,
            logit_bias=_logit_bias(self.logit_bias),
            seed=self.seed,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=_bad_words(self.bad_words or (), tokenizer),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            grammar=grammar_of(self.response_format, self.structured_outputs),
        )
        for field in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            ids = getattr(params, field) or ()
            if (beyond := max(ids, default=0)) >= vocab_size:
                raise InvalidRequestError(f"{field} holds id {beyond}; the vocabulary has {vocab_size} tokens", field)
        return params


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one entry each. Raises InvalidRequestError for an empty or mixed list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequestError("prompt must not be an empty list", "prompt")
        kinds = set(map(type, self.prompt))
        if len(kinds) > 1:
            raise InvalidRequestError(
                "prompt must be a string, a list of strings, a list of token ids or a list of such lists", "prompt"
            )
        if kinds == {int}:
            return [self.prompt]  # type: ignore[list-item]
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidRequestError(f"prompt holds {len(self.prompt)} prompts; at most {MAX_PROMPTS}", "prompt")
        return self.prompt  # type: ignore[return-value]

    def check(self) -> None:
        super().check()
        check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequestError("max_tokens must be at least 1, or 0 together with echo", "max_tokens")


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIAS} are allowed", "logit_bias"
        )
    bias = {}
    for key, value in given.items():
        if not re.fullmatch(r"[0-9]{1,10}", key, re.ASCII):
            raise InvalidRequestError(f"logit_bias keys must be token ids, got {key[:64]!r}", "logit_bias")
        bias[int(key)] = value
    return bias


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens, as it stands at a text's beginning and after a space."""
    forms = (tokenizer.encode(space + word, add_special_tokens=False) for word in words for space in ("", " "))
    return tuple(dict.fromkeys(tuple(form) for form in forms if form))


def check_range(name: str, value: int | None, low: int, high: int, excluded: int | None = None) -> None:
    if value is not None and (not low <= value <= high or value == excluded):
        but = "" if excluded is None else f" and not {excluded}"
        raise InvalidRequestError(f"{name} must be between {low} and {high}{but}, got {value}", name)
