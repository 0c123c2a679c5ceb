"""The small endpoints: models, tokens, health, version, metrics."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve import __version__
from jaxserve.deployment.record import with_kernels
from jaxserve.limits import MAX_DETOKENIZED
from jaxserve.server.chat.conversation import encode_chat
from jaxserve.server.endpoints.llamacpp import tokens_of
from jaxserve.server.endpoints.openapi import ModelFacts, openapi_document
from jaxserve.server.http.counts import STREAMS
from jaxserve.server.http.errors import APIError, own_path
from jaxserve.server.http.keys import ApiKey, find_key
from jaxserve.server.http.state import (
    ServerState,
    fit_text,
    key_of,
    models_of,
    read_body,
    require_json,
    state_of,
    to_json,
)
from jaxserve.server.schemas.chat import Conversation, TokenizeRequest
from jaxserve.server.schemas.common import DetokenizeRequest
from jaxserve.text.fill_in_middle import marker_ids
from jaxserve.text.tokenizer import Tokenizer, token_strings
from jaxserve.types import InvalidRequestError

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


def _names(http: Request) -> list[str]:
    """The names of all models that a request's key may use."""
    models = models_of(http)
    listed = models.listed(key_of(http))
    return [name for one in listed for name in (one.name, *one.aliases, *models.adapters_of(one.name))]


async def root(http: Request) -> Response:
    """GET /v1: what is here, for who tries the base URL of a client in a browser."""
    about = {"server": "jaxserve", "version": __version__, "models": _names(http), "description": "/openapi.json"}
    return _json(about)


async def list_models(http: Request) -> Response:
    """GET /v1/models."""
    state = state_of(http)
    names = [*state.settings.model_names, *state.client.adapters]
    return _json({"object": "list", "data": [_card(state, name) for name in names]})


async def get_model(http: Request) -> Response:
    """GET /v1/models/{name}."""
    state = state_of(http)
    name = http.path_params["name"]
    state.check_model(name)
    return _json(_card(state, name))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    info = state.client.info
    adapter = state.check_model(name)
    parent = None if adapter is None else adapter.parent or state.settings.model_name
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxserve",
        "root": state.settings.model_name if adapter is None else adapter.path,
        "parent": parent,
        "max_model_len": None if info is None else info.max_model_len,
        "modalities": ["text"] if info is None or info.sees is None else ["text", "image"],
    }


async def tokenize(http: Request) -> Response:
    """POST /tokenize: token ids of a prompt, or of messages rendered as the chat endpoint renders them."""
    state = state_of(http)
    body = await read_body(http, _tokenize_decoder)
    state.check_model(body.model)
    tokenizer, info = state.require_ready()
    if [body.prompt, body.messages, body.content].count(None) != 2:
        raise InvalidRequestError("give either prompt, messages or content", "prompt")
    if body.content is not None:
        text = fit_text(body.content, tokenizer, info, None, "content")
        return _json({"tokens": await state.text_work(http, lambda: tokens_of(tokenizer, text, body), short=True)})
    if body.prompt is not None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        (ids,) = await state.encode(http, [body.prompt], special)
    else:
        chat = Conversation(
            messages=body.messages or [],
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=bool(body.add_special_tokens),
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        if chat.chat_template is not None:
            state.check_template()
        ids = await state.text_work(http, lambda: encode_chat(tokenizer, info, chat))
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = await state.text_work(http, lambda: token_strings(tokenizer, ids), short=True)
    return _json(answer)


async def detokenize(http: Request) -> Response:
    """POST /detokenize: the text of token ids, special ones included."""
    state = state_of(http)
    body = await read_body(http, _detokenize_decoder)
    state.check_model(body.model)
    tokenizer, info = state.require_ready()
    if len(body.tokens) > MAX_DETOKENIZED:
        raise InvalidRequestError(f"tokens has {len(body.tokens)} ids; at most {MAX_DETOKENIZED} are allowed", "tokens")
    if body.tokens and (min(body.tokens) < 0 or max(body.tokens) >= info.vocab_size):
        raise InvalidRequestError(f"tokens must be ids between 0 and {info.vocab_size - 1}", "tokens")
    text = await state.text_work(http, lambda: tokenizer.decode(body.tokens, skip_special_tokens=False), short=True)
    return _json({"prompt": text, "content": text})  # the second is llama.cpp's name


async def health(http: Request) -> Response:
    """GET /health: 200 while a loaded engine runs; otherwise 503, with the reason if an engine died."""
    state = state_of(http)
    status = state.status
    if status in ("ready", "draining", "sleeping"):
        return _json({"status": "ok"})
    reason = state.client.error
    return _json({"status": status} | ({"reason": reason} if reason else {}), 503)


async def server_info(http: Request) -> Response:
    """GET /server_info: the model and the settings, without secrets. With an admin key, only its holder sees the record
    of the deployment, which names files of this machine."""
    state = state_of(http)
    _, info = state.require_loaded()
    settings = state.settings
    return _json(
        {
            "version": __version__,
            "models": [*settings.model_names, *state.client.adapters],
            "system_fingerprint": state.fingerprint_of(info.weights),
            "weight_version": info.weights.version,
            "is_sleeping": state.sleeps,
            "record": with_kernels(settings.deployment) if settings.deployment and _is_operator(http) else None,
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "dtype": info.dtype,
            "task": info.task,
            "page_size": info.page_size,
            "max_num_seqs": info.max_num_seqs,
            "tool_call_parser": _module_name(state.tool_format),
            "reasoning_parser": _module_name(state.reasoning_format),
            "max_body_bytes": settings.max_body_bytes,
            "request_timeout": settings.request_timeout,
        }
    )


def _is_operator(http: Request) -> bool:
    """Whether a request has the admin key, if there is one."""
    key = state_of(http).settings.admin_key
    return key is None or find_key([ApiKey(key)], http.headers) is not None


def _module_name(module: ModuleType | None) -> str | None:
    return None if module is None else module.__name__.rpartition(".")[2]


async def ready(http: Request) -> Response:
    """GET /ready: 200 if new requests are served; 503 while loading, sleeping, restarting, draining or dead."""
    status = state_of(http).status
    return _json({"status": status}, 200 if status == "ready" else 503)


async def version(http: Request) -> Response:
    """GET /version."""
    return _json({"version": __version__})


async def metrics(http: Request) -> Response:
    """GET /metrics, in Prometheus's text format."""
    text = state_of(http).metrics.render()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def profile(http: Request) -> Response:
    """POST /profile?steps=N: traces the engine's next N steps (default 10). Needs `--profile DIR` and the admin key."""
    state = state_of(http)
    require_admin(http)
    _, info = state.require_ready()
    if info.profile_dir is None:
        raise APIError(404, "profiling is off; start the server with --profile DIR")
    text = http.query_params.get("steps", "10")
    steps = int(text) if text.isdecimal() and len(text) < 6 else 0
    if not 1 <= steps <= 10_000:
        raise APIError(400, f"steps must be a number from 1 to 10000, got {text[:64]!r}", param="steps")
    _not_too_often(http)
    state.client.profile(steps)
    return _json({"steps": steps, "folder": info.profile_dir})


async def load(http: Request) -> Response:
    """GET /load: the number of requests that are being answered."""
    return _json({"server_load": state_of(http).counts.total(STREAMS)})


async def tokenizer_info(http: Request) -> Response:
    """GET /tokenizer_info: facts for clients that tokenize prompts themselves."""
    tokenizer, info = state_of(http).require_ready()
    eos = (*tokenizer.eos_token_ids, *info.eos_token_ids)
    special = {token: text for token in sorted(tokenizer.special_ids) if (text := tokenizer.decode([token], False))}
    return _json(
        {
            "tokenizer_class": tokenizer.class_name,
            "vocab_size": tokenizer.vocab_size,
            "model_vocab_size": info.vocab_size,
            "max_model_len": info.max_model_len,
            "bos_token": _text_of(tokenizer, tokenizer.bos_token_id),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token": _text_of(tokenizer, eos[0] if eos else None),
            "eos_token_ids": sorted(set(eos)),
            "special_tokens": special,
            "chat_template": tokenizer.chat_template,
        }
    )


def _text_of(tokenizer: Tokenizer, token: int | None) -> str | None:
    return None if token is None else tokenizer.decode([token], skip_special_tokens=False)


async def reset_prefix_cache(http: Request) -> Response:
    """POST /reset_prefix_cache: forgets the cached pages of earlier prompts. Needs the admin key."""
    state = state_of(http)
    require_admin(http)
    state.require_ready()
    _not_too_often(http)
    state.client.reset_prefix_cache()
    return _json({"status": "ok"})


def require_admin(http: Request, *, may_be_empty: bool = False) -> None:
    """Raises APIError: 404 if the server has no admin key, 401 for a request without it, and 400 for a request that is
    not declared as JSON, because a form on another site's page could have sent it. Forms always declare a type, so
    `may_be_empty` allows requests without any."""
    if (key := state_of(http).settings.admin_key) is None:
        raise APIError(404, "admin endpoints are off; start the server with --admin-key KEY")
    if find_key([ApiKey(key)], http.headers) is None:
        raise APIError(401, "the admin key is required, as in 'Authorization: Bearer KEY'", code="invalid_api_key")
    if not (may_be_empty and "content-type" not in http.headers):
        require_json(http)


def _not_too_often(http: Request) -> None:
    """Raises APIError (429) if the endpoint was called within the last second."""
    counts = state_of(http).counts
    path = own_path(http.scope)
    now = time.monotonic_ns()
    with counts.lock():
        if now - (latest := counts.total(path)) < 10**9:
            raise APIError(429, f"{path} may be called once a second", headers={"Retry-After": "1"})
        counts.add(path, now - latest)  # see `LIMITED_PATHS`


async def openapi(http: Request) -> Response:
    """GET /openapi.json."""
    state = state_of(http)
    model = None
    if state.status == "ready" and state.tokenizer is not None:
        tokenizer, info = state.require_ready()
        ends = {*tokenizer.eos_token_ids, *info.eos_token_ids}
        fills_in = marker_ids(tokenizer) is not None
        model = ModelFacts(info.vocab_size, info.max_model_len, len(ends), fills_in, info.task)
    names = _names(http)
    own_templates = state.settings.trust_request_chat_template
    document = openapi_document(__version__, names, model, own_templates, has_files=state.files is not None)
    if state.settings.root_path:
        document["servers"] = [{"url": state.settings.root_path}]
    return _json(document)
