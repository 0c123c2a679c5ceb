"""llama.cpp's own endpoints: /completion, /infill, /props, /slots, /apply-template, and its form of /tokenize.

https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxserve import __version__
from jaxserve.server.chat.conversation import rendered_chat
from jaxserve.server.chat.generation import Generation, json_logprob, name_tokens, whole_choices
from jaxserve.server.endpoints.completions import create_completion, prepare_completion
from jaxserve.server.http.body import put_back, receive_body
from jaxserve.server.http.errors import APIError, unavailable
from jaxserve.server.http.sse import EventStream, run_until_disconnect
from jaxserve.server.http.state import ServerState, key_of, read_body, state_of, to_json
from jaxserve.server.schemas.chat import ChatRequest, TokenizeRequest
from jaxserve.server.schemas.llamacpp import ORDER, InfillRequest, LlamaCompletionRequest, LlamaFields
from jaxserve.text.detokenizer import ChoiceDelta
from jaxserve.text.fill_in_middle import FillInMiddle
from jaxserve.text.foreign_text import ForeignText
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import InvalidRequestError, SamplingParams, TokenLogprob

_completion_decoder = msgspec.json.Decoder(LlamaCompletionRequest)
_infill_decoder = msgspec.json.Decoder(InfillRequest)
_chat_decoder = msgspec.json.Decoder(ChatRequest)
_fields_decoder = msgspec.json.Decoder(dict[str, Any])
_OPENAI_ONLY = ("max_tokens", "logprobs", "echo", "suffix", "best_of", "stream_options")
_LLAMA_ONLY = ("n_predict", "n_probs", "cache_prompt", "id_slot", "n_keep", "return_tokens", "response_fields")


async def completion(http: HTTPRequest) -> Response:
    """POST /completion."""
    state = state_of(http)
    body = await read_body(http, _completion_decoder)
    state.check_model(body.model)
    tokenizer, _ = state.require_ready()
    prompts = body.prompts()
    state.accounts.check(key_of(http), len(prompts), body.n_cmpl)
    firsts = [prompt[0] if prompt and isinstance(prompt[0], str) else None for prompt in prompts]
    openings = iter(await state.encode(http, [text for text in firsts if text is not None], True))
    rest = [piece for prompt in prompts for piece in prompt[1:] if isinstance(piece, str)]
    later = iter(await state.encode(http, rest, False))
    ids = []
    for prompt, first in zip(prompts, firsts, strict=True):
        parts = [next(openings)] if first is not None else [[int(piece)] for piece in prompt[:1]]
        parts += [next(later) if isinstance(piece, str) else [piece] for piece in prompt[1:]]
        ids.append([token for part in parts for token in part])
    return await _answered(state, http, tokenizer, body, ids, is_list=len(prompts) > 1)


async def completions(http: HTTPRequest) -> Response:
    """POST /completions: llama.cpp's form, or OpenAI's for a body with fields that only that form has."""
    received = await receive_body(http)
    put_back(http, received)
    fields = await read_body(http, _fields_decoder)
    put_back(http, received)
    openai, llama = ([name for name in names if fields.get(name) is not None] for names in (_OPENAI_ONLY, _LLAMA_ONLY))
    if openai and llama:
        raise InvalidRequestError(
            f"{llama[0]} is a field of llama.cpp's /completion, and {openai[0]} one of OpenAI's /v1/completions: use "
            "one of these paths",
            llama[0],
        )
    return await (create_completion(http) if openai else completion(http))


async def infill(http: HTTPRequest) -> Response:
    """POST /infill: the text between two others, for models that were trained for it."""
    state = state_of(http)
    body = await read_body(http, _infill_decoder)
    state.check_model(body.model)
    tokenizer, _ = state.require_ready()
    try:
        middle = FillInMiddle(tokenizer)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"/infill: {error}", "input_suffix", error.code) from None
    extra = [f"{one.filename}\n{one.text}\n" for one in body.input_extra or ()]
    texts = [body.input_prefix + body.prompt, middle.lead + body.input_suffix, *extra]
    prefix, suffix, *files = await state.encode(http, texts, False)
    ids = middle.prompt(prefix, suffix, files)
    return await _answered(state, http, tokenizer, body, [ids], middle)


async def _answered(
    state: ServerState,
    http: HTTPRequest,
    tokenizer: Tokenizer,
    body: LlamaFields,
    prompts: list[list[int]],
    middle: FillInMiddle | None = None,
    *,
    is_list: bool = False,
) -> Response:
    """The answer to prompts as token ids, whole or as a stream; a list if there are several."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    ends = middle.end_ids if middle else ()
    recommended = tokenizer.generation_defaults.sampling()
    request = body.completion(prompts, ends, encode, recommended, infills=middle is not None)
    answer = await run_until_disconnect(http.receive, prepare_completion(state, http, request))
    writer = _Writer(state, http, tokenizer, body, answer.generation)
    if body.stream:
        return EventStream(writer.stream(), closing=b"")
    answers = await run_until_disconnect(http.receive, writer.whole())
    return _json(answers if is_list or len(answers) > 1 else answers[0])


class _Choice:
    """One completion while it grows, and the limits that llama.cpp's fields set to it."""

    def __init__(self, body: LlamaFields):
        self._indent = body.n_indent or 0
        self._most = (body.t_max_predict_ms or 0) / 1000
        self._first: float | None = None
        self._held = ""  # a line break and the white space after it, whose line is not known yet
        self.num_tokens = 0
        self.has_new_line = False
        self.end: ChoiceDelta | None = None  # its last part

    def take(self, delta: ChoiceDelta) -> None:
        """Takes the next part, whose text may be cut or held back, and ends it where a limit is reached."""
        now = time.monotonic()
        self._first = now if self._first is None else self._first
        self.num_tokens += len(delta.token_ids)
        is_over = False
        if self._indent:
            delta.text, is_over = self._cut(self._held + delta.text, delta.finish_reason is not None)
        self.has_new_line |= "\n" in delta.text
        is_over |= bool(self._most) and self.has_new_line and now - self._first > self._most
        if is_over and delta.finish_reason is None:
            delta.finish_reason = "length"
        if delta.finish_reason is not None:
            self.end = delta

    def _cut(self, text: str, ends: bool) -> tuple[str, bool]:
        """The text up to a line that is indented less than it has to be, and whether there was one."""
        self._held = ""
        at = text.find("\n")
        while at >= 0:
            line = text[at + 1 :].lstrip(" \t")
            if not line and not ends:
                self._held = text[at:]
                return text[:at], False
            start = len(text) - len(line)
            if line and line[0] != "\n" and start - at - 1 < self._indent:
                return text[:at], True
            at = text.find("\n", at + 1)
        return text, False


class _Writer:
    """Writes the answers to one request in llama.cpp's shape."""

    def __init__(
        self, state: ServerState, http: HTTPRequest, tokenizer: Tokenizer, body: LlamaFields, generation: Generation
    ):
        self._state = state
        self._http = http
        self._tokenizer = tokenizer
        self._body = body
        self._generation = generation
        self._n = generation.requests[0].params.n
        self._choices = [_Choice(body) for _ in range(self._n * len(generation.requests))]

    async def whole(self) -> list[dict[str, Any]]:
        deltas = await whole_choices(self._gained())

        def answers() -> list[dict[str, Any]]:
            return [self._selected(self._part(delta, delta.text) | self._end(delta)) for delta in deltas]

        return await self._state.text_work(self._http, answers, short=not self._body.n_probs)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._gained()) as batches:
            async for deltas in batches:
                parts = []
                for delta in deltas:
                    part = self._part(delta, delta.text)
                    if delta.finish_reason is not None:
                        part |= self._end(delta)
                    elif self._body.timings_per_token:
                        part["timings"] = self._timings(delta.index)
                    parts.append(part)
                yield b"".join(b"data: " + to_json(part) + b"\n\n" for part in parts)

    async def _gained(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """What the choices gain; ends when all have ended, by themselves or by limits of the body."""
        async with contextlib.aclosing(self._generation.deltas()) as batches:
            async for deltas in batches:
                taken = []
                for delta in deltas:
                    if (choice := self._choices[delta.index]).end is None:
                        choice.take(delta)
                        taken.append(delta)
                yield taken
                if all(choice.end for choice in self._choices):
                    return

    def _part(self, delta: ChoiceDelta, text: str) -> dict[str, Any]:
        shows_tokens = self._body.return_tokens or self._body.stream
        part: dict[str, Any] = {
            "index": delta.index,
            "content": text,
            "tokens": delta.token_ids if shows_tokens else [],
            "stop": False,
            "id_slot": -1,  # a request has no slot that would be its own before and after
            "tokens_predicted": self._choices[delta.index].num_tokens,
            "tokens_evaluated": len(self._generation.requests[delta.index // self._n].prompt_token_ids),
        }
        if self._body.n_probs and delta.logprobs:
            part["completion_probabilities"] = [self._probabilities(entry) for entry in delta.logprobs]
        return part

    def _end(self, delta: ChoiceDelta) -> dict[str, Any]:
        """The members of the last part."""
        request = self._generation.requests[delta.index // self._n]
        word = delta.stop_reason if isinstance(delta.stop_reason, str) else ""
        by_itself = "word" if word else "eos"
        return {
            "stop": True,
            "stop_type": "limit" if delta.finish_reason == "length" else by_itself,
            "stopping_word": word,
            "model": self._body.model or self._state.settings.model_name,
            "prompt": self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False),
            "generation_settings": _settings(request.params) | {"stream": bool(self._body.stream)},
            "has_new_line": self._choices[delta.index].has_new_line,
            "truncated": False,
            "tokens_cached": self._generation.processors[delta.index // self._n].num_cached_tokens,
            "timings": self._timings(delta.index),
        }

    def _timings(self, index: int) -> dict[str, float]:
        """Milliseconds of the first prompt and its output, and tokens a second."""
        cached = self._generation.processors[index // self._n].num_cached_tokens
        prompt = len(self._generation.requests[index // self._n].prompt_token_ids) - cached
        output = self._choices[index].num_tokens
        timings: dict[str, float] = {"cache_n": cached}
        for name, tokens, seconds in zip(
            ("prompt", "predicted"), (prompt, output), self._generation.times[0].seconds(), strict=True
        ):
            ms = max(seconds * 1000, 1e-6)
            timings |= {
                f"{name}_n": tokens,
                f"{name}_ms": ms,
                f"{name}_per_token_ms": ms / max(tokens, 1),
                f"{name}_per_second": tokens / ms * 1000,
            }
        return timings

    def _probabilities(self, entry: TokenLogprob) -> dict[str, Any]:
        """A token's log-probability with its alternatives."""

        def one(token: int, logprob: float) -> dict[str, Any]:
            (text,) = name_tokens(self._tokenizer, [token], False)
            data = list(self._tokenizer.token_bytes(token))
            return {"id": token, "token": text, "bytes": data, "logprob": json_logprob(logprob)}

        top = [one(*alternative) for alternative in entry.top[: self._body.n_probs or 0]]
        return {**one(entry.token_id, entry.logprob), "top_logprobs": top}

    def _selected(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The members that `response_fields` names; those within others by a path, such as timings/prompt_n."""
        if not self._body.response_fields:
            return answer
        chosen = {}
        for path in self._body.response_fields:
            value: Any = answer
            *_, last = names = path.split("/")
            for name in names:
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                chosen[last] = value
        return chosen


# Parameters of samplers that are not here, with the values that turn them off.
_OFF = {
    "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "top_n_sigma": -1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1,
    "typical_p": 1.0, "repeat_last_n": -1, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2,
    "dry_penalty_last_n": -1, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "n_keep": 0, "n_discard": 0,
    "min_keep": 0, "post_sampling_probs": False, "lora": [],
}  # fmt: skip


def _settings(params: SamplingParams) -> dict[str, Any]:
    """The parameters that a completion is sampled with, by llama.cpp's names."""
    limit = -1 if params.max_tokens is None else params.max_tokens
    return {
        **_OFF,
        "n_predict": limit,
        "max_tokens": limit,
        "seed": 2**32 - 1 if params.seed is None else params.seed,  # which stands for a random one
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
        "samplers": list(ORDER),
    }


async def props(http: HTTPRequest) -> Response:
    """GET /props: facts about the model and the server."""
    state = state_of(http)
    tokenizer, info = state.require_loaded()
    defaults = SamplingParams(max_tokens=None, **tokenizer.generation_defaults.sampling())
    return _json(
        {
            "default_generation_settings": {
                "id": -1,
                "id_task": -1,
                "n_ctx": info.max_model_len,
                "speculative": False,
                "is_processing": False,
                "params": _settings(defaults),
            },
            "total_slots": info.max_num_seqs,
            "model_alias": state.settings.model_name,
            "model_path": state.settings.model_name,
            "modalities": {"vision": info.sees is not None, "audio": False},
            "chat_template": tokenizer.chat_template or "",
            "bos_token": _text_of(tokenizer, tokenizer.bos_token_id),
            "eos_token": _text_of(tokenizer, next(iter((*tokenizer.eos_token_ids, *info.eos_token_ids)), None)),
            "build_info": f"jaxserve {__version__}",
            "is_sleeping": state.sleeps,
        }
    )


def _text_of(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.decode([token], skip_special_tokens=False)


async def slots(http: HTTPRequest) -> Response:
    """GET /slots: how many completions can run at a time, and how many do. With ?fail_on_no_slot=1, 503 if all do."""
    state = state_of(http)
    _, info = state.require_loaded()
    running = min(state.metrics.latest().num_running, info.max_num_seqs)
    if http.query_params.get("fail_on_no_slot") and running == info.max_num_seqs:
        raise unavailable("no slot is available", "no_slot")
    return _json(
        [
            {"id": i, "n_ctx": info.max_model_len, "speculative": False, "is_processing": i < running}
            for i in range(info.max_num_seqs)
        ]
    )


async def apply_template(http: HTTPRequest) -> Response:
    """POST /apply-template: the text of a conversation's prompt, from the body of a chat request."""
    state = state_of(http)
    body = await read_body(http, _chat_decoder)
    state.check_model(body.model)
    body.check()
    if body.chat_template is not None:
        state.check_template()
    tokenizer, _ = state.require_ready()
    conversation = body.conversation()

    def render() -> str:
        text, foreign = rendered_chat(tokenizer, conversation)
        return foreign.plain(text)

    return _json({"prompt": await state.text_work(http, render)})


def tokens_of(tokenizer: Tokenizer, text: str, body: TokenizeRequest) -> list[Any]:
    """The tokens of a text in llama.cpp's form of /tokenize: ids, or objects with each token's text."""
    foreign = ForeignText(tokenizer, text, escapes=not body.parse_special or None)
    ids = foreign.encode(foreign.hidden, body.add_special)
    return [{"id": token, "piece": _piece(tokenizer, token)} for token in ids] if body.with_pieces else ids


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """A token's text, or its bytes if they are no whole characters."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def refuse(http: HTTPRequest) -> Response:
    """What would change the server or its slots."""
    raise APIError(
        400, "this server has no slots to save, restore or erase; they are places in the batch", code="unsupported"
    )


def _json(body: Any) -> Response:
    return Response(to_json(body), media_type="application/json")


ROUTES = [
    Route("/completion", completion, methods=["POST"]),
    Route("/completions", completions, methods=["POST"]),
    Route("/infill", infill, methods=["POST"]),
    Route("/props", props),
    Route("/slots", slots),
    Route("/slots/{id}", refuse, methods=["POST"]),
    Route("/apply-template", apply_template, methods=["POST"]),
]
