"""The OpenAPI description of the endpoints. Bodies are described from the types that decode them.

These types hold the fixed bounds. This module adds the bounds that depend on the model, the values that are accepted in
fields that are not served, and rules between fields.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.limits import MAX_STOP_TOKENS
from jaxserve.server.endpoints.openapi_rules import FIELDS, RULES
from jaxserve.server.schemas.adapters import LoadAdapterRequest, UnloadAdapterRequest
from jaxserve.server.schemas.anthropic import CountTokensRequest, MessagesRequest
from jaxserve.server.schemas.batches import BatchRequest
from jaxserve.server.schemas.chat import ChatRequest, TokenizeRequest
from jaxserve.server.schemas.common import CompletionRequest, DetokenizeRequest, EngineFields
from jaxserve.server.schemas.foreign_fields import NOT_SERVED
from jaxserve.server.schemas.llamacpp import REFUSED, InfillRequest, LlamaCompletionRequest
from jaxserve.server.schemas.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaNameRequest,
)
from jaxserve.server.schemas.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from jaxserve.server.schemas.responses import InputTokensRequest, ResponsesRequest
from jaxserve.server.schemas.weights import UpdateWeightsRequest

_POSTS = {
    "/v1/completions": (CompletionRequest, "Continue a prompt"),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/v1/responses": (ResponsesRequest, "Answer, with earlier answers remembered"),
    "/v1/responses/input_tokens": (InputTokensRequest, "Tokens of such a prompt"),
    "/v1/messages": (MessagesRequest, "Answer a conversation, in Anthropic's shape"),
    "/v1/messages/count_tokens": (CountTokensRequest, "Tokens of such a conversation"),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a conversation"),
    "/detokenize": (DetokenizeRequest, "Text of token ids"),
    "/api/chat": (OllamaChatRequest, "Answer a conversation, in Ollama's shape"),
    "/api/generate": (OllamaGenerateRequest, "Answer a prompt, in Ollama's shape"),
    "/api/show": (OllamaNameRequest, "Facts about a model, in Ollama's shape"),
    "/api/pull": (OllamaNameRequest, "Whether a model is served, in Ollama's shape"),
    "/completion": (LlamaCompletionRequest, "Continue a prompt, in llama.cpp's shape"),
    "/infill": (InfillRequest, "Write the text between two others, in llama.cpp's shape"),
    "/apply-template": (ChatRequest, "The text of a conversation's prompt"),
}
# Of servers with a folder for files.
_BATCH_POSTS = {"/v1/batches": (BatchRequest, "Answer a file of requests when there is time")}
_ADMIN_POSTS = {
    "/v1/load_lora_adapter": (LoadAdapterRequest, "Load a LoRA adapter (admin)"),
    "/v1/unload_lora_adapter": (UnloadAdapterRequest, "Unload a LoRA adapter (admin)"),
    "/update_weights": (UpdateWeightsRequest, "Replace the model's weights (admin)"),
}
# Of models that do not generate, by `Ready.task`.
_POOLING_POSTS: dict[str, dict[str, tuple[type[msgspec.Struct], str]]] = {
    "embed": {
        "/v1/embeddings": (EmbeddingRequest, "Embeddings of texts or tokens"),
        "/api/embed": (OllamaEmbedRequest, "The same, in Ollama's shape"),
        "/api/embeddings": (OllamaEmbeddingsRequest, "The same of one text, in Ollama's older shape"),
    },
    "score": {
        "/v1/score": (ScoreRequest, "How well pairs of texts fit each other"),
        "/v1/rerank": (RerankRequest, "Documents in the order in which they fit a query"),
        "/v2/rerank": (RerankRequest, "The same, in Cohere's shape"),
    },
}
_GETS = {
    "/v1": "What is here",
    "/v1/models": "The models that are served",
    "/models": "The same, for clients without /v1",
    "/api/tags": "The models that are served, in Ollama's shape",
    "/api/ps": "The models that are loaded, in Ollama's shape",
    "/api/version": "The version of Ollama's API",
    "/props": "Facts about the model, in llama.cpp's shape",
    "/slots": "Places in the batch, in llama.cpp's shape",
    "/load": "How many requests are being answered",
    "/server_info": "What is served, and with which settings",
    "/tokenizer_info": "What a client that tokenizes has to know",
    "/health": "Whether the server is alive",
    "/ping": "The same",
    "/ready": "Whether requests are served",
    "/version": "The server's version",
    "/metrics": "Prometheus metrics",
    "/pool": "Who owns which KV page",
    "/openapi.json": "This document",
    "/docs": "This document as a page",
}


class ModelFacts(msgspec.Struct, frozen=True):
    """The facts about the loaded model on which bounds depend.

    Attributes:
      vocab_size: token ids are less than this.
      max_model_len: a prompt has fewer tokens than this.
      num_end_ids: number of the model's end-of-sequence ids, which count towards MAX_STOP_TOKENS.
      fills_in: its tokenizer has markers to fill in the middle, so that completions may have a suffix.
      task: what the model is for. The endpoints of models that embed or score are described for such models only.
    """

    vocab_size: int
    max_model_len: int
    num_end_ids: int
    fills_in: bool
    task: str = "generate"


def openapi_document(
    version: str, names: Sequence[str], model: ModelFacts | None, own_templates: bool = False, has_files: bool = False
) -> dict[str, Any]:
    """The document of /openapi.json for a model with these names; without its bounds if `model` is None.

    `own_templates`: requests may bring a chat template. `has_files`: files and batches are served.
    """
    posts = _POSTS | _POOLING_POSTS.get(model.task if model else "generate", {}) | _ADMIN_POSTS
    posts |= _BATCH_POSTS if has_files else {}
    types = [body for body, _ in posts.values()]
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for name, rules in RULES.items():
        components[name]["allOf"] = rules
    for name, better in FIELDS.items():
        components[name]["properties"] |= better
    for kind in dict.fromkeys(types):
        fields = components[kind.__name__]["properties"]
        if "model" in components[kind.__name__].get("required", ()):
            fields["model"] = {"enum": [*names, *(f"{name}:latest" for name in names)]}
        elif "model" in fields:
            fields["model"] = {"enum": [None, *names], "default": None}
        if issubclass(kind, EngineFields):
            for name in NOT_SERVED:
                del fields[name]
            components[kind.__name__]["description"] += " Fields of NotServed are accepted with its values only."
        if "chat_template" in fields and not own_templates:
            fields["chat_template"] = {"type": "null", "description": "Needs --trust-request-chat-template"}
    for name in ("OllamaOptions", "LlamaCompletionRequest", "InfillRequest"):
        refused = {field: _harmless(field) for field in REFUSED if field in components[name]["properties"]}
        components[name]["properties"] |= refused
    components["NotServed"] = {
        "description": "Fields of other servers, with the values that are accepted because they ask for nothing",
        "type": "object",
        "properties": {name: _harmless(name) for name in NOT_SERVED},
    }
    if model is not None and not model.fills_in:
        components["CompletionRequest"]["properties"]["suffix"] = {
            "enum": [None, ""], "description": "Needs a model that fills in the middle"
        }  # fmt: skip
    components = {name: _with_bounds(schema, model) for name, schema in components.items()}
    answers = {"200": {"description": "The answer"}, "default": {"description": "An error, in OpenAI's shape"}}
    paths: dict[str, Any] = {
        path: {"get": {"summary": summary, "responses": answers}} for path, summary in _GETS.items()
    }
    for (path, (_, summary)), reference in zip(posts.items(), references, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": answers}}
    either = {"anyOf": [references[1], references[0]]}
    llama = {"anyOf": [references[list(posts).index("/completion")], references[0]]}
    paths["/completions"] = {
        "post": {
            "summary": "llama.cpp's /completion, or /v1/completions by fields such as max_tokens",
            "requestBody": {"required": True, "content": {"application/json": {"schema": llama}}},
            "responses": answers,
        }
    }
    paths["/invocations"] = {
        "post": {
            "summary": "A chat completion, or a completion, by its body",
            "requestBody": {"required": True, "content": {"application/json": {"schema": either}}},
            "responses": answers,
        }
    }
    steps = {"name": "steps", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 10_000}}
    paths["/profile"] = {"post": {"summary": "Trace the next steps", "parameters": [steps], "responses": answers}}
    name_of_response = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/responses/{id}"] = {
        "parameters": [name_of_response],
        "get": {"summary": "A stored response", "responses": answers},
        "delete": {"summary": "Forget a stored response", "responses": answers},
    }
    paths["/v1/responses/{id}/input_items"] = {
        "parameters": [name_of_response],
        "get": {"summary": "The items of a stored response's input", "responses": answers},
    }
    paths["/v1/responses/{id}/cancel"] = {
        "parameters": [name_of_response],
        "post": {"summary": "Stop a response that is made in the background", "responses": answers},
    }
    if has_files:
        paths["/v1/batches"]["get"] = {"summary": "The batches of this key", "responses": answers}
        paths |= _file_paths(answers)
    paths["/reset_prefix_cache"] = {"post": {"summary": "Forget earlier prompts (admin)", "responses": answers}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }


def _harmless(field: str) -> dict[str, Any]:
    """The values that are accepted in a field that is not served."""
    return {"enum": [None, *NOT_SERVED[field].harmless]}


def _file_paths(answers: dict[str, Any]) -> dict[str, Any]:
    """The paths of files and batches that take no JSON."""
    form = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"enum": ["batch"]},
            "expires_after[anchor]": {"enum": ["created_at"]},
            "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
        },
    }
    body = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    named = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]

    def does(summary: str) -> dict[str, Any]:
        return {"summary": summary, "responses": answers}

    return {
        "/v1/files": {"get": does("The files of this key"), "post": does("Upload a file") | {"requestBody": body}},
        "/v1/files/{id}": {"parameters": named, "get": does("A file"), "delete": does("Delete a file")},
        "/v1/files/{id}/content": {"parameters": named, "get": does("The bytes of a file")},
        "/v1/batches/{id}": {"parameters": named, "get": does("A batch")},
        "/v1/batches/{id}/cancel": {"parameters": named, "post": does("Cancel a batch")},
    }


def _with_bounds(node: Any, model: ModelFacts | None) -> Any:
    """A schema in which formats such as "token-id" get their bounds, and `x-replaced-by` replaces its parent."""
    if isinstance(node, list):
        return [_with_bounds(child, model) for child in node]
    if not isinstance(node, dict):
        return node
    if (better := node.get("x-replaced-by")) is not None:
        return _with_bounds(better, model)
    bounded = {name: _with_bounds(child, model) for name, child in node.items()}
    if model is None or not isinstance(kind := bounded.get("format"), str):
        return bounded
    if kind == "token-id":
        at_most = model.vocab_size - 1
        return bounded | ({"pattern": numbers_up_to(at_most)} if "pattern" in bounded else {"maximum": at_most})
    if kind == "token-ids":
        return bounded | {"maxItems": model.max_model_len - 1}
    if kind == "stop-tokens":
        return bounded | {"maxItems": MAX_STOP_TOKENS - model.num_end_ids}
    return bounded


def numbers_up_to(most: int) -> str:
    """A regular expression for the decimal numbers 0 to `most`, without leading zeros."""
    digits = str(most)
    shapes = ["0"] if len(digits) > 1 else []
    if len(digits) > 2:
        shapes.append(f"[1-9][0-9]{{0,{len(digits) - 2}}}")
    elif len(digits) == 2:
        shapes.append("[1-9]")
    for place, digit in enumerate(digits):
        low = "1" if place == 0 and len(digits) > 1 else "0"
        if digit > low:
            shapes.append(f"{digits[:place]}[{low}-{int(digit) - 1}][0-9]{{{len(digits) - place - 1}}}")
    return f"^({'|'.join([*shapes, re.escape(digits)])})$"
