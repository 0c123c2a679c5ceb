"""POST /v1/embeddings, /v1/score and /v1/rerank: results that are made of a prompt's hidden states."""

from __future__ import annotations

import base64
import contextlib
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from jaxserve.models.pooling import probability, unit
from jaxserve.server.http.body import body_of
from jaxserve.server.http.errors import APIError
from jaxserve.server.http.middleware import note_weights
from jaxserve.server.http.sse import run_until_disconnect
from jaxserve.server.http.state import ServerState, key_of, read_body, state_of, tenant_of, to_json
from jaxserve.server.ipc.messages import Ready
from jaxserve.server.observe.metrics import RequestTimes
from jaxserve.server.schemas.pooling import EmbeddingRequest, PoolingFields, RerankRequest, ScoreRequest
from jaxserve.text.score_prompt import ScorePrompt, adds_special_tokens, cut, ended, joined, texts_of
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import InvalidRequestError, QueueFullError, Request, SamplingParams

_embedding_decoder = msgspec.json.Decoder(EmbeddingRequest)
_score_decoder = msgspec.json.Decoder(ScoreRequest)
_rerank_decoder = msgspec.json.Decoder(RerankRequest)

COHERE_PATH = "/v2/rerank"


async def create_embeddings(http: HTTPRequest) -> Response:
    """POST /v1/embeddings, in OpenAI's shape."""
    state = state_of(http)
    body = await read_body(http, _embedding_decoder)
    return await run_until_disconnect(http.receive, _embeddings(state, http, body))


async def create_scores(http: HTTPRequest) -> Response:
    """POST /v1/score and /score, in vLLM's shape."""
    state = state_of(http)
    body = await read_body(http, _score_decoder)
    return await run_until_disconnect(http.receive, _scores(state, http, body))


async def rerank(http: HTTPRequest) -> Response:
    """POST /v1/rerank and /rerank in Jina's shape, /v2/rerank in Cohere's."""
    state = state_of(http)
    body = await read_body(http, _rerank_decoder)
    return await run_until_disconnect(http.receive, _reranked(state, http, body))


async def embed(
    state: ServerState, http: HTTPRequest, body: EmbeddingRequest
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The embedding of each input, float32 with as many numbers as asked for, and the usage."""
    tokenizer, info = _prepare(state, body, "embed")
    if body.dimensions is not None and body.dimensions > info.result_size:
        raise InvalidRequestError(
            f"dimensions must be at most {info.result_size}, the model's own, got {body.dimensions}", "dimensions"
        )
    prompts = body.prompts()
    state.accounts.check(key_of(http), len(prompts), 1)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await _encode(state, http, texts, body.add_special_tokens, body.truncate_prompt_tokens, "input"))
    ids = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
    ids = [fit(tokenizer, one, info, body.truncate_prompt_tokens, "input") for one in ids]
    vectors, cached = await pool(state, http, ids, body)
    if body.dimensions is not None:
        vectors = [unit(vector[: body.dimensions]).astype("<f4") for vector in vectors]
    return vectors, usage_of(ids, cached)


async def _embeddings(state: ServerState, http: HTTPRequest, body: EmbeddingRequest) -> Response:
    vectors, usage = await embed(state, http, body)
    head = {"object": "list", "model": body.model or state.settings.model_name}
    data = await state.text_work(http, partial(_embeddings_json, head, vectors, body, usage), short=len(vectors) == 1)
    return Response(data, media_type="application/json")


def _embeddings_json(
    head: dict[str, Any], vectors: Sequence[np.ndarray], body: EmbeddingRequest, usage: dict[str, Any]
) -> bytes:
    """The answer. Slow for many vectors of floats: call it in a thread."""
    data = []
    for index, vector in enumerate(vectors):
        encoded = base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": encoded})
    return to_json({**head, "data": data, "usage": usage})


async def _scores(state: ServerState, http: HTTPRequest, body: ScoreRequest) -> Response:
    tokenizer, info = _prepare(state, body, "score")
    pairs = body.pairs()
    scores, usage = await _score_pairs(state, http, tokenizer, info, pairs, body, "text_2")
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    answer = {
        "id": f"score-{body.request_id or uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model or state.settings.model_name,
        "data": data,
        "usage": usage,
    }
    return Response(to_json(answer), media_type="application/json")


async def _reranked(state: ServerState, http: HTTPRequest, body: RerankRequest) -> Response:
    tokenizer, info = _prepare(state, body, "score")
    texts = body.texts()
    pairs = [(body.query, text) for text in texts]
    scores, usage = await _score_pairs(state, http, tokenizer, info, pairs, body, "documents")
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    cohere = http.url.path.endswith(COHERE_PATH)
    with_texts = not cohere if body.return_documents is None else body.return_documents
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
    if with_texts:
        results = [result | {"document": {"text": texts[result["index"]]}} for result in results]
    answer: dict[str, Any] = {"id": f"rerank-{body.request_id or uuid.uuid4().hex}"}
    if cohere:
        tokens = {"input_tokens": usage["prompt_tokens"]}
        answer |= {"results": results, "meta": {"api_version": {"version": "2"}, "tokens": tokens}}
    else:
        answer |= {"model": body.model or state.settings.model_name, "results": results, "usage": usage}
    return Response(to_json(answer), media_type="application/json")


async def _score_pairs(
    state: ServerState,
    http: HTTPRequest,
    tokenizer: Tokenizer,
    info: Ready,
    pairs: Sequence[tuple[str, str]],
    body: ScoreRequest | RerankRequest,
    param: str,
) -> tuple[list[float], dict[str, Any]]:
    """The scores of pairs of a query and a document, and the usage: probabilities, or with use_activation false their
    log-odds."""
    state.accounts.check(key_of(http), len(pairs), 1)
    kind = cast(ScorePrompt, info.score_prompt)
    texts = [texts_of(kind, query, document, body.instruction) for query, document in pairs]
    flat = [text for some in texts for text in some]
    encoded = iter(await _encode(state, http, flat, adds_special_tokens(kind), body.truncate_prompt_tokens, param))
    most = _most(info, body.truncate_prompt_tokens)
    prompts = [joined(tokenizer, kind, [next(encoded) for _ in some], most) for some in texts]
    prompts = [fit(tokenizer, prompt, info, None, param) for prompt in prompts]
    results, cached = await pool(state, http, prompts, body)
    odds = [float(result[0]) for result in results]
    return [probability(one) for one in odds] if body.use_activation else odds, usage_of(prompts, cached)


def _prepare(state: ServerState, body: PoolingFields, task: str) -> tuple[Tokenizer, Ready]:
    """The tokenizer and the facts about the engine. Raises APIError for a model that is not served for this task."""
    state.check_model(body.model)
    body.check()
    tokenizer, info = state.require_ready()
    if info.task != task:
        raise APIError(
            400,
            f"this model is served with --task {info.task}; this endpoint needs --task {task}",
            param="model",
            code="unsupported_task",
        )
    return tokenizer, info


async def _encode(
    state: ServerState, http: HTTPRequest, texts: list[str], special: bool, truncate: int | None, param: str
) -> list[list[int]]:
    """Token ids of each text; where they are truncated, of enough of its beginning."""
    tokenizer, info = state.require_ready()
    if truncate is not None:
        longest = (_most(info, truncate) or info.max_model_len) * 2 * (tokenizer.longest_token or 64)
        texts = [text[:longest] for text in texts]
    try:
        encoded = await state.encode(http, texts, special, truncate)
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error), param, error.code) from None
    return [ended(tokenizer, ids) for ids in encoded] if special else encoded


def _most(info: Ready, truncate: int | None) -> int | None:
    """Tokens that a prompt is cut to; None: it is not cut."""
    if truncate is None:
        return None
    return info.max_model_len if truncate == -1 else min(truncate, info.max_model_len)


def fit(tokenizer: Tokenizer, ids: list[int], info: Ready, truncate: int | None, param: str) -> list[int]:
    """The prompt, cut to its first `truncate` tokens if that is given (-1: to what the model takes). Raises
    InvalidRequestError for a prompt that is empty or too long, and for ids outside the vocabulary."""
    if (most := _most(info, truncate)) is not None:
        ids = cut(tokenizer, ids, most)
    if not ids:
        raise InvalidRequestError("the input is empty; it must hold at least one token", param)
    if len(ids) > info.max_model_len:
        raise InvalidRequestError(
            f"This model's maximum context length is {info.max_model_len} tokens, and your input has {len(ids)}. "
            "Please shorten it, or set truncate_prompt_tokens to -1.",
            param,
            "context_length_exceeded",
        )
    if min(ids) < 0 or max(ids) >= info.vocab_size:
        raise InvalidRequestError(f"{param} holds token ids outside 0 to {info.vocab_size - 1}", param)
    return ids


async def pool(
    state: ServerState, http: HTTPRequest, prompts: Sequence[list[int]], body: PoolingFields
) -> tuple[list[np.ndarray], int]:
    """The engine's results for prompts, float32 each, and how many of their tokens were cached.

    Raises what `EngineClient.generate` raises, and APIError (500) if the engine gives up on a prompt.
    """
    params = SamplingParams(max_tokens=0, ignore_eos=True)
    priority = state.priority(http, body.priority)
    cache_salt = state.cache_salt(http, body.cache_salt)
    shared: dict[str, Any] = {"params": params, "priority": priority, "cache_salt": cache_salt, "pools": True}
    requests = [
        Request(request_id=uuid.uuid4().hex, prompt_token_ids=ids, tenant=tenant_of(http), **shared) for ids in prompts
    ]
    times = {request.request_id: RequestTimes(state.metrics, request) for request in requests}
    results: dict[str, np.ndarray] = {}
    cached = 0
    http_body = body_of(http)
    try:
        with state.accounts.hold(key_of(http), len(requests), 1):
            timeout = state.timeout(http)
            noted = partial(note_weights, http)
            updates = state.client.generate(requests, timeout, noted)
            async with contextlib.aclosing(updates) as batches:
                async for batch in batches:
                    if http_body is not None:
                        http_body.release()  # the engine has the requests, so the body's memory is free
                    for update in batch:
                        if update.finish_reason is None:
                            continue
                        state.metrics.succeeded(update.finish_reason)
                        times[update.request_id].finish_reasons.append(update.finish_reason)
                        times[update.request_id].finished(time.monotonic())
                        if update.pooled is None:
                            raise APIError(
                                500, update.error or "the engine gave up on the request", code="internal_error"
                            )
                        results[update.request_id] = np.frombuffer(update.pooled, "<f4")
                        cached += update.num_cached_tokens
    except QueueFullError:
        state.metrics.rejections.inc()
        raise
    return [results[request.request_id] for request in requests], cached


def usage_of(prompts: Sequence[list[int]], cached: int) -> dict[str, Any]:
    tokens = sum(map(len, prompts))
    return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
