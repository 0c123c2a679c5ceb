"""The OpenAPI description of the endpoints; bodies are described from the types that decode them."""

from __future__ import annotations

from typing import Any

import msgspec

from server.schemas import CompletionRequest, DetokenizeRequest
from server.schemas_chat import ChatRequest, TokenizeRequest
from server.schemas_messages import CountTokensRequest, MessagesRequest
from server.schemas_responses import InputTokensRequest, ResponsesRequest

_POSTS = {
    "/v1/completions": (CompletionRequest, "Continue a prompt"),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/v1/responses": (ResponsesRequest, "Answer, with earlier answers remembered"),
    "/v1/responses/input_tokens": (InputTokensRequest, "Tokens of such a prompt"),
    "/v1/messages": (MessagesRequest, "Answer a conversation, in Anthropic's shape"),
    "/v1/messages/count_tokens": (CountTokensRequest, "Tokens of such a conversation"),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a conversation"),
    "/detokenize": (DetokenizeRequest, "Text of token ids"),
}
_GETS = {
    "/v1/models": "The models that are served",
    "/load": "How many requests are being answered",
    "/tokenizer_info": "What a client that tokenizes has to know",
    "/health": "Whether the server is alive",
    "/ready": "Whether requests are served",
    "/version": "The server's version",
    "/metrics": "Prometheus metrics",
    "/pool": "Who owns which KV page",
    "/openapi.json": "This document",
}


def openapi_document(version: str) -> dict[str, Any]:
    """The document of /openapi.json."""
    types = [body for body, _ in _POSTS.values()]
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    answers = {"200": {"description": "The answer"}, "default": {"description": "An error, in OpenAI's shape"}}
    paths: dict[str, Any] = {
        path: {"get": {"summary": summary, "responses": answers}} for path, summary in _GETS.items()
    }
    for (path, (_, summary)), reference in zip(_POSTS.items(), references, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": answers}}
    steps = {"name": "steps", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 10_000}}
    paths["/profile"] = {"post": {"summary": "Trace the next steps", "parameters": [steps], "responses": answers}}
    name = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/responses/{id}"] = {
        "parameters": [name],
        "get": {"summary": "A stored response", "responses": answers},
        "delete": {"summary": "Forget a stored response", "responses": answers},
    }
    paths["/v1/responses/{id}/input_items"] = {
        "parameters": [name],
        "get": {"summary": "The items of a stored response's input", "responses": answers},
    }
    paths["/v1/responses/{id}/cancel"] = {
        "parameters": [name],
        "post": {"summary": "Stop a response that is made in the background", "responses": answers},
    }
    paths["/reset_prefix_cache"] = {"post": {"summary": "Forget earlier prompts (admin)", "responses": answers}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
