"""Request bodies as bounded types, and their conversion to SamplingParams.

A known field that is not served is refused if it asks for something (`foreign_fields`). Fields without effect on the
output (`user`, `metadata`, `store`, …) and unknown fields are ignored, because clients keep adding new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxserve import limits
from jaxserve.server.schemas.foreign_fields import ForeignFields, check_foreign
from jaxserve.server.schemas.response_format import (
    FORM_FIELDS,
    JSON_SCHEMA,
    RESPONSE_FORMAT,
    STRUCTURED_OUTPUTS,
    grammar_of,
)
from jaxserve.text.generation_defaults import SAMPLING
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import Grammar, InvalidRequestError, SamplingParams, check_min_tokens

# Parameters whose defaults no model recommends, and that the engine has by the same names.
_OTHER_SAMPLING = ("n", "presence_penalty", "frequency_penalty", "min_tokens", "use_beam_search", "length_penalty")

COMPLETION_TOKENS = 16  # the default of max_tokens in /v1/completions

# Types of fields that several bodies share. msgspec checks the bounds, and /openapi.json shows them.
TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": limits.MAX_INT, "format": "token-id"}
PositiveTokens = Annotated[int, Meta(ge=1, le=limits.MAX_INT)]
TokenId = Annotated[int, Meta(ge=0, le=limits.MAX_INT, extra_json_schema={"format": "token-id"})]
StopString = Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_LENGTH)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=limits.MAX_STOP_STRINGS)]
Word = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=limits.MAX_WORD_LENGTH,
        description=f"At most {limits.MAX_BAD_WORD_TOKENS} tokens, also after a space",
    ),
]
BadWords = Annotated[list[Word], Meta(max_length=limits.MAX_WORDS)]
StopTokens = Annotated[
    list[TokenId], Meta(max_length=limits.MAX_STOP_TOKENS, extra_json_schema={"format": "stop-tokens"})
]
LogitBias = Annotated[
    dict[Annotated[str, Meta(pattern=r"^[0-9]{1,10}$", extra_json_schema={"format": "token-id"})], float],
    Meta(max_length=limits.MAX_LOGIT_BIAS),
]
GrammarText = Annotated[
    str, Meta(max_length=limits.MAX_GRAMMAR, description="Excludes other fields that ask for a form")
]
_NO_LIMIT = "-1: no limit but the context's"
MaxTokens = Annotated[int, Meta(ge=-1, le=limits.MAX_INT, description=_NO_LIMIT)]
SomeTokens = Annotated[
    int, Meta(ge=-1, le=limits.MAX_INT, description=_NO_LIMIT, extra_json_schema={"not": {"const": 0}})
]
AskedLogprobs = Annotated[
    int,
    Meta(
        ge=-1,
        le=limits.MAX_LOGPROBS,
        extra_json_schema={
            "x-replaced-by": {
                "type": "integer",
                "minimum": 0,
                "maximum": limits.MAX_LOGPROBS,
                "description": "Or -1: the whole vocabulary, where --max-logprobs allows that many",
            }
        },
    ),
]
NamedTokens = Annotated[
    list[TokenId],
    Meta(max_length=limits.MAX_LOGPROBS, description="The alternatives of each token; needs logprobs, and no echo"),
]
TruncationSide = Annotated[Literal["left", "right"], Meta(description="Which end truncate_prompt_tokens cuts off")]
Priority = Annotated[int, Meta(ge=-limits.MAX_INT - 1, le=limits.MAX_INT)]
Truncation = Annotated[int, Meta(ge=-1, le=limits.MAX_INT, extra_json_schema={"not": {"const": 0}})]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_LENGTH)]
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


# One prompt or several, as text or as token ids. `prompts` checks that they are not mixed, which a type cannot express.
Prompt = Annotated[
    Annotated[str, Meta(min_length=1)] | Annotated[list[str | int | list[int]], Meta(min_length=1)],
    Meta(
        extra_json_schema={
            "x-replaced-by": {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {
                        "type": "array",
                        "items": {"type": "string", "minLength": 1},
                        "minItems": 1,
                        "maxItems": limits.MAX_PROMPTS,
                    },
                    {"type": "array", "items": TOKEN_ID, "minItems": 1, "format": "token-ids"},
                    {
                        "type": "array",
                        "items": {"type": "array", "items": TOKEN_ID, "minItems": 1, "format": "token-ids"},
                        "minItems": 1,
                        "maxItems": limits.MAX_PROMPTS,
                    },
                ]
            }
        }
    ),
]


class SamplingOptions(msgspec.Struct, kw_only=True):
    """The parameters of sampling that llama.cpp and Ollama call alike. None stands for the default."""

    temperature: limits.Temperature | None = None
    top_k: limits.TopK | None = None
    top_p: limits.Fraction | None = None
    min_p: limits.Fraction | None = None
    seed: limits.Seed | None = None
    stop: Stop | None = None
    repeat_penalty: limits.RepetitionPenalty | None = None
    presence_penalty: limits.Penalty | None = None
    frequency_penalty: limits.Penalty | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class EngineFields(ForeignFields, kw_only=True):
    """The fields that all bodies have in common. None stands for the default."""

    temperature: limits.Temperature | None = None
    top_p: limits.Fraction | None = None
    top_k: limits.TopK | None = None
    min_p: limits.Fraction | None = None
    repetition_penalty: limits.RepetitionPenalty | None = None
    presence_penalty: limits.Penalty | None = None
    frequency_penalty: limits.Penalty | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=limits.MAX_ALLOWED_TOKENS)] | None = None
    bad_words: BadWords | None = None
    seed: limits.Seed | None = None
    stop_token_ids: StopTokens | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[limits.Tokens, Meta(description="At most max_tokens")] | None = None
    skip_special_tokens: bool = True
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    structured_outputs: Annotated[Any, Meta(extra_json_schema=STRUCTURED_OUTPUTS)] = None
    # forms of outputs by SGLang's and llama.cpp's names
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    grammar: GrammarText | None = None
    json_schema: Annotated[dict[str, Any] | str, Meta(extra_json_schema=JSON_SCHEMA)] | None = None

    def check(self) -> None:
        """Raises InvalidRequestError, naming the field, for errors that can be found without the model."""
        check_foreign(self)

    def engine_fields(self) -> dict[str, Any]:
        """The fields of this class, for a chat request made of another body."""
        return {name: getattr(self, name) for name in _ENGINE_FIELDS}


_ENGINE_FIELDS = [name for name in EngineFields.__struct_fields__ if name not in ForeignFields.__struct_fields__]


class SamplingFields(EngineFields, kw_only=True):
    """The fields that completions and chat have in common. None stands for the default."""

    model: str | None = None
    max_tokens: MaxTokens | None = None
    n: limits.Count | None = None
    best_of: Annotated[int, Meta(description="1, or the same as n")] | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprob_token_ids: NamedTokens | None = None
    prompt_logprobs: AskedLogprobs | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: TruncationSide | None = None
    request_id: RequestId | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: Annotated[Any, Meta(extra_json_schema=RESPONSE_FORMAT)] = None
    use_beam_search: bool | None = None
    length_penalty: limits.LengthPenalty | None = None

    def check(self) -> None:
        super().check()
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
        if self.logprob_token_ids and not self.wants_logprobs:
            raise InvalidRequestError("logprob_token_ids is only allowed together with logprobs", "logprob_token_ids")
        check_range("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, limits.MAX_INT, excluded=0)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities of its tokens."""
        raise NotImplementedError

    def count_logprobs(self, vocab_size: int, most: int) -> None:
        """Replaces -1 in the fields that ask for log-probabilities by the number of tokens it stands for. Raises
        InvalidRequestError for more than `most`, the server's bound."""
        if (named := len(self.logprob_token_ids or ())) > most:
            raise InvalidRequestError(
                f"logprob_token_ids has {named} ids; this server gives at most {most} (--max-logprobs)",
                "logprob_token_ids",
            )
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            asked = getattr(self, name, None)
            count = vocab_size if asked == -1 else asked or 0
            if count > most:
                all_tokens = f", for all {vocab_size} tokens" if asked == -1 else ""
                raise InvalidRequestError(
                    f"{name} is {asked}{all_tokens}; this server gives at most {most} (--max-logprobs)", name
                )
            if asked == -1:
                setattr(self, name, count)

    @property
    def usage_mode(self) -> Literal["off", "last", "always"]:
        options = self.stream_options or StreamOptions()
        if not options.include_usage:
            return "off"
        return "always" if options.continuous_usage_stats else "last"

    def form(self) -> Grammar | None:
        """The form of the answer that the client asks for; None: any text."""
        return grammar_of({name: getattr(self, name) for name in FORM_FIELDS})

    def sampling_params(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        max_tokens: int | None,
        room: int | None = None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        stop_token_ids: tuple[int, ...],
        grammar: Grammar | None,
        skip_special_tokens: bool,
        seed: int | None,
    ) -> SamplingParams:
        """The engine's parameters. A parameter that the client does not set has the model's recommended value, or
        OpenAI's default if there is none.

        What else they follow from than this body is known by now, so that they are built and checked once: `max_tokens`
        is the client's limit and `room` what the context leaves of it, if that is known; `stop_token_ids` has all
        tokens that end the output besides those that the engine knows; `grammar` is that of the whole output.
        """
        given: dict[str, Any] = {}
        if not self.use_beam_search:  # beams compare the model's unmodified probabilities
            given |= tokenizer.generation_defaults.sampling()
        for name in (*SAMPLING, *_OTHER_SAMPLING):
            if (value := getattr(self, name)) is not None:
                given[name] = value
        if room is not None:
            least = given.get("min_tokens", 0)
            check_min_tokens(least, max_tokens)
            given["min_tokens"] = min(least, room)
        params = SamplingParams(
            **given,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()} if self.logit_bias else None,
            seed=seed,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=_bad_words(self.bad_words, tokenizer) if self.bad_words else (),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            max_tokens=max_tokens if room is None else room,
            logprobs=logprobs,
            logprob_token_ids=tuple(self.logprob_token_ids or ()),
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=skip_special_tokens,
            grammar=grammar,
        )
        for field in ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            ids = getattr(params, field) or ()
            if (beyond := max(ids, default=0)) >= vocab_size:
                raise InvalidRequestError(f"{field} holds id {beyond}; the vocabulary has {vocab_size} tokens", field)
        return params


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: AskedLogprobs | None = None
    add_special_tokens: bool = True
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one entry each. Raises InvalidRequestError for an empty or mixed list."""
        return prompts_of(self.prompt, "prompt")

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def output_limit(self) -> int | None:
        """The most tokens of output; None: what the context leaves."""
        return COMPLETION_TOKENS if self.max_tokens is None else None if self.max_tokens == -1 else self.max_tokens

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequestError("max_tokens must be at least 1, or 0 together with echo", "max_tokens")
        if self.echo and self.logprob_token_ids:
            raise InvalidRequestError("echo cannot be combined with logprob_token_ids", "echo")
        if self.suffix:
            for name, allowed in (("echo", (None, False)), ("truncate_prompt_tokens", (None,))):
                if getattr(self, name) not in allowed:
                    raise InvalidRequestError(f"{name} cannot be combined with suffix", name)
            if not all(isinstance(prompt, str) for prompt in self.prompts()):
                raise InvalidRequestError("with suffix, prompt must be text, not token ids", "prompt")


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences of each word: at the beginning of a text, and after a space."""
    forms = (tokenizer.encode(space + word, add_special_tokens=False) for word in words for space in ("", " "))
    return tuple(dict.fromkeys(tuple(form) for form in forms if form))


def prompts_of(given: str | list[Any], param: str) -> list[str | list[int]]:
    """The prompts in a field, one entry each. Raises InvalidRequestError for an empty or mixed list."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError(f"{param} must not be an empty list", param)
    kinds = set(map(type, given))
    if len(kinds) > 1:
        raise InvalidRequestError(
            f"{param} must be a string, a list of strings, a list of token ids or a list of such lists", param
        )
    if kinds == {int}:
        return [given]
    if len(given) > limits.MAX_PROMPTS:
        raise InvalidRequestError(f"{param} holds {len(given)} prompts; at most {limits.MAX_PROMPTS}", param)
    return given


def check_range(name: str, value: int | None, low: int, high: int, excluded: int | None = None) -> None:
    if value is not None and (not low <= value <= high or value == excluded):
        but = "" if excluded is None else f" and not {excluded}"
        raise InvalidRequestError(f"{name} must be between {low} and {high}{but}, got {value}", name)
