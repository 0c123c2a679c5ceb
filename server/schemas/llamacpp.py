"""Bodies of llama.cpp's own endpoints, and their conversion to completions.

https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxserve import limits
from jaxserve.server.schemas.common import CompletionRequest, GrammarText, SamplingOptions
from jaxserve.server.schemas.response_format import JSON_SCHEMA
from jaxserve.types import InvalidRequestError

ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
_LLAMA_ORDER = ("penalties", "top_k", "top_p", "min_p", "temperature")  # llama.cpp's own, which programs send as it is
# What turns each sampler off, by its name; others are refused by their parameters, if these ask for something.
_OFF: dict[str, dict[str, float]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
}
_OTHERS = ("dry", "top_n_sigma", "typ_p", "typical_p", "xtc")
_LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature", "i": "infill",
}  # fmt: skip
_BAN = -100.0  # the logit bias that `false` stands for
# Fields that are passed on as they are: those that a completion has too, and those that it refuses by name.
_SAME = ("model", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop",
         "ignore_eos", "grammar", "json_schema", "stream")  # fmt: skip
REFUSED = ("dynatemp_range", "typical_p", "top_n_sigma", "xtc_probability", "dry_multiplier", "mirostat", "min_keep",
           "post_sampling_probs", "repeat_last_n", "lora", "tfs_z")  # fmt: skip

Piece = str | int
_BiasKey = Annotated[str, Meta(max_length=limits.MAX_WORD_LENGTH)]
_Bias = float | bool
_MOST = Meta(max_length=limits.MAX_LOGIT_BIAS, description="By token id or text; false excludes a token")
Biases = Annotated[dict[_BiasKey, _Bias], _MOST] | Annotated[list[tuple[_BiasKey | int, _Bias]], _MOST]
Prediction = Annotated[int, Meta(ge=-2, le=limits.MAX_INT, description="-1, -2: to the end of the context")]
Milliseconds = Annotated[float, Meta(ge=0)]


class LlamaFields(SamplingOptions, kw_only=True):
    """The fields that /completion and /infill have in common. None stands for the default."""

    model: str | None = None
    stream: bool | None = None
    n_predict: Prediction | None = None
    n_cmpl: limits.Count | None = None
    ignore_eos: bool = False
    logit_bias: Biases | None = None
    grammar: GrammarText | None = None
    json_schema: Annotated[dict[str, Any] | str, Meta(extra_json_schema=JSON_SCHEMA)] | None = None
    samplers: str | list[str] | None = None
    n_probs: limits.NumLogprobs | None = None
    n_indent: Annotated[int, Meta(ge=0, description="A line that is indented less ends the answer")] | None = None
    t_max_predict_ms: Milliseconds | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    response_fields: list[str] | None = None
    # of others' samplers
    dynatemp_range: Any = None
    typical_p: Any = None
    top_n_sigma: Any = None
    xtc_probability: Any = None
    dry_multiplier: Any = None
    mirostat: Any = None
    min_keep: Any = None
    post_sampling_probs: Any = None
    repeat_last_n: Any = None
    lora: Any = None
    tfs_z: Any = None

    def completion(
        self,
        prompts: list[list[int]],
        ends: Sequence[int],
        encode: Callable[[str], list[int]],
        recommended: dict[str, Any],
        *,
        infills: bool = False,
    ) -> CompletionRequest:
        """A completion of prompts as token ids; `ends` are tokens that end it. Raises InvalidRequestError.

        `recommended`: the model's sampling parameters, which count where the body has none.
        """
        if self.return_progress:
            raise InvalidRequestError(
                "return_progress is not supported by this server; leave it out", "return_progress"
            )
        fields = {name: getattr(self, name) for name in (*_SAME, *REFUSED)}
        fields |= {
            "n": self.n_cmpl,
            "seed": None if self.seed == -1 else self.seed,
            "repetition_penalty": self.repeat_penalty,
            "logprobs": self.n_probs or None,
            "stop_token_ids": [] if self.ignore_eos else list(ends),
            "logit_bias": self._biases(encode),
        }
        if self.cache_prompt is False:
            fields["cache_salt"] = uuid.uuid4().hex
        if self.samplers is not None:
            fields |= self._without(fields, recommended, infills)
        limit = self.n_predict
        if limit == 0:  # the prompt is computed, and nothing else
            return CompletionRequest(prompt=prompts, max_tokens=0, echo=True, **fields)  # type: ignore[arg-type]
        return CompletionRequest(
            prompt=prompts, max_tokens=-1 if limit is None or limit < 0 else limit, **fields  # type: ignore[arg-type]
        )  # fmt: skip

    def _biases(self, encode: Callable[[str], list[int]]) -> dict[str, float] | None:
        """The biases by token id. A text stands for each of its tokens."""
        pairs = list(self.logit_bias.items()) if isinstance(self.logit_bias, dict) else self.logit_bias or []
        biases: dict[str, float] = {}
        for key, value in pairs:
            if value is True:
                raise InvalidRequestError(
                    "logit_bias must hold numbers, or false for a token that is excluded", "logit_bias"
                )
            is_text = isinstance(key, str) and not (isinstance(self.logit_bias, dict) and key.isdecimal())
            ids = encode(str(key)) if is_text else [int(key)]
            if min(ids, default=0) < 0:
                raise InvalidRequestError(f"logit_bias holds the token id {key}, which is negative", "logit_bias")
            biases |= dict.fromkeys(map(str, ids), _BAN if value is False else float(value))
        if len(biases) > limits.MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias holds {len(biases)} tokens; at most {limits.MAX_LOGIT_BIAS} are allowed", "logit_bias"
            )
        return biases or None

    def _without(self, fields: dict[str, Any], recommended: dict[str, Any], infills: bool) -> dict[str, float]:
        """What turns off the samplers that are not in `samplers`. Raises InvalidRequestError for unknown ones, and for
        an order that would matter, unless it is the one that llama.cpp has where a request has no `samplers`."""
        given = self.samplers or []
        names = [_LETTERS.get(letter, letter) for letter in given] if isinstance(given, str) else given
        known = (*_OFF, *_OTHERS, *(("infill",) if infills else ()))
        if unknown := next((name for name in names if name not in known), None):
            raise InvalidRequestError(
                f"samplers names {unknown[:64]!r}, which is not supported; there are {', '.join(_OFF)}", "samplers"
            )
        off = {key: value for name, values in _OFF.items() if name not in names for key, value in values.items()}
        ours = [name for name in names if name in _OFF]
        if ours == [name for name in _LLAMA_ORDER if name in ours]:
            return off
        resolved = {**recommended, **{key: value for key, value in fields.items() if value is not None}, **off}
        if resolved.get("temperature", 1) in (0, 1) or all(
            resolved.get(key) in (None, *_OFF[key].values()) for key in ("top_p", "min_p")
        ):
            ours = [name for name in ours if name != "temperature"]  # its place does not matter
        elif "temperature" in ours and "top_k" in ours:  # they may change places
            ours.remove("top_k")
        if ours != [name for name in ORDER if name in ours]:
            raise InvalidRequestError(
                f"samplers has an order that is not supported; this server draws by {', '.join(ORDER)}", "samplers"
            )
        return off


class LlamaCompletionRequest(LlamaFields, kw_only=True):
    """Body of /completion."""

    prompt: Annotated[
        str | list[Any] | dict[str, Any],
        Meta(description="Text, also as prompt_string of an object, token ids, both mixed, or a list of such prompts"),
    ]

    def prompts(self) -> list[list[Piece]]:
        """The prompts, each as texts and token ids. Raises InvalidRequestError for anything else."""
        given = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if not given:
            raise InvalidRequestError("prompt must not be an empty list", "prompt")
        if any(type(one) is int for one in given):
            given = [given]
        if len(given) > limits.MAX_PROMPTS:
            raise InvalidRequestError(f"prompt holds {len(given)} prompts; at most {limits.MAX_PROMPTS}", "prompt")
        given = [_text_of(one) for one in given]
        prompts: list[Any] = [[one] if isinstance(one, str) else one for one in given]
        if not all(isinstance(one, list) and all(type(piece) in (str, int) for piece in one) for one in prompts):
            raise InvalidRequestError(
                "prompt must be text, a list of token ids and texts, or a list of such prompts; pictures come with "
                "/v1/chat/completions",
                "prompt",
            )
        return prompts


def _text_of(prompt: Any) -> Any:
    """The text of a prompt that is an object without pictures; other prompts as they are."""
    if isinstance(prompt, dict) and isinstance(text := prompt.get("prompt_string"), str):
        return prompt if prompt.get("multimodal_data") else text
    return prompt


class ExtraFile(msgspec.Struct):
    """Another file, or a part of one, that the answer may draw on."""

    text: str
    filename: str = "file"


class InfillRequest(LlamaFields, kw_only=True):
    """Body of /infill: the text before and after what is asked for. `prompt` is the text right before it."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Meta(max_length=limits.MAX_PROMPTS - 2)] | None = None
    prompt: str = ""
