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
from jaxserve.server.endpoints.batches import MOST_LISTED as MOST_BATCHES
from jaxserve.server.endpoints.files import LONGEST_LIFE, SHORTEST_LIFE
from jaxserve.server.endpoints.files import MOST_LISTED as MOST_FILES
from jaxserve.server.endpoints.openapi_rules import FIELDS, RULES
from jaxserve.server.http.file_records import INPUT, OUTPUT
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
from jaxserve.server.schemas.triton import IndexRequest, LoadRequest, UnloadRequest, generate_schemas
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
    "/v2/repository/index": (IndexRequest, "The models and their states, in Triton's shape"),
}
# Of servers with a folder for files.
_BATCH_POSTS = {"/v1/batches": (BatchRequest, "Answer a file of requests when there is time")}
_ADMIN_POSTS = {
    "/v1/load_lora_adapter": (LoadAdapterRequest, "Load a LoRA adapter (admin)"),
    "/v1/unload_lora_adapter": (UnloadAdapterRequest, "Unload a LoRA adapter (admin)"),
    "/update_weights": (UpdateWeightsRequest, "Replace the model's weights (admin)"),
    "/update_weights_from_disk": (UpdateWeightsRequest, "The same, by SGLang's name (admin)"),
    "/v2/repository/models/{name}/load": (LoadRequest, "Start a model, in Triton's shape (admin)"),
    "/v2/repository/models/{name}/unload": (UnloadRequest, "Stop a model, in Triton's shape (admin)"),
}
# Of models that do not generate, by `Ready.task`; of all of them where it is not known.
_POOLING_POSTS: dict[str, dict[str, tuple[type[msgspec.Struct], str]]] = {
    "embed": {
        "/v1/embeddings": (EmbeddingRequest, "Embeddings of texts or tokens"),
        "/api/embed": (OllamaEmbedRequest, "The same, in Ollama's shape"),
        "/api/embeddings": (OllamaEmbeddingsRequest, "The same of one text, in Ollama's older shape"),
    },
    "score": {
        "/v1/score": (ScoreRequest, "How well pairs of texts fit each other"),
        "/score": (ScoreRequest, "The same, for clients without /v1"),
        "/v1/rerank": (RerankRequest, "Documents in the order in which they fit a query"),
        "/rerank": (RerankRequest, "The same, for clients without /v1"),
        "/v2/rerank": (RerankRequest, "The same, in Cohere's shape"),
    },
}
_GETS = {
    "/v1": "What is here",
    "/v1/models": "The models that are served",
    "/models": "The same, for clients without /v1",
    "/v1/models/{name}": "One of them",
    "/api/tags": "The models that are served, in Ollama's shape",
    "/api/ps": "The models that are loaded, in Ollama's shape",
    "/api/version": "The version of Ollama's API",
    "/props": "Facts about the model, in llama.cpp's shape",
    "/slots": "Places in the batch, in llama.cpp's shape",
    "/v1/responses/{id}": "A stored response",
    "/v1/responses/{id}/input_items": "The items of a stored response's input",
    "/v2": "What is here, in Triton's shape",
    "/v2/health/live": "Whether the server is alive, for Triton's clients",
    "/v2/health/ready": "Whether requests are served, for Triton's clients",
    "/load": "How many requests are being answered",
    "/server_info": "What is served, and with which settings",
    "/tokenizer_info": "What a client that tokenizes has to know",
    "/health": "Whether the server is alive",
    "/v1/health": "The same, for clients with /v1",
    "/ping": "The same, for Amazon SageMaker",
    "/ready": "Whether requests are served",
    "/is_sleeping": "Whether the model sleeps (admin)",
    "/version": "The server's version",
    "/metrics": "Prometheus metrics",
    "/pool": "Who owns which KV page",
    "/openapi.json": "This document",
    "/docs": "This document as a page",
}


# Those that neither take a body nor are to get.
_OTHERS = {
    "/ping": ("post", "The same as GET"),
    "/profile": ("post", "Trace the next steps (admin)"),
    "/reset_prefix_cache": ("post", "Forget earlier prompts (admin)"),
    "/sleep": ("post", "Free the devices' memory (admin)"),
    "/wake_up": ("post", "Serve requests again (admin)"),
    "/v1/responses/{id}": ("delete", "Forget a stored response"),
    "/v1/responses/{id}/cancel": ("post", "Stop a response that is made in the background"),
}
# Of one of Triton's models, behind its name or its version.
_OF_MODEL = {
    "": ("get", "A model's inputs and outputs, in Triton's shape"),
    "/ready": ("get", "Whether a model is in memory, for Triton's clients"),
    "/config": ("get", "A model's configuration, in Triton's shape"),
    "/generate": ("post", "Continue a text, in Triton's shape"),
    "/generate_stream": ("post", "The same in server-sent events"),
}
_TEXT = {"type": "string"}
# Parameters of an operation's query.
_QUERIES: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    ("/profile", "post"): {"steps": {"type": "integer", "minimum": 1, "maximum": 10_000}},
    ("/sleep", "post"): {
        "level": {"enum": [1, 2]},
        "mode": {"enum": ["wait", "abort"]},
        "timeout": {"type": "integer", "minimum": 0, "maximum": 3600},
    },
    ("/v1/files", "get"): {
        "after": _TEXT,
        "limit": {"type": "integer", "minimum": 1, "maximum": MOST_FILES},
        "order": {"enum": ["asc", "desc"]},
        "purpose": {"enum": [INPUT, OUTPUT]},
    },
    ("/v1/batches", "get"): {"after": _TEXT, "limit": {"type": "integer", "minimum": 1, "maximum": MOST_BATCHES}},
}
_ANSWERS = {
    "200": {"description": "The answer"},
    "default": {"description": "An error, in the shape of the API that the path belongs to"},
}


class ModelFacts(msgspec.Struct, frozen=True):
    """The facts about the loaded model on which bounds depend.

    Attributes:
      vocab_size: token ids are less than this.
      max_model_len: a prompt has fewer tokens than this.
      num_end_ids: number of the model's end-of-sequence ids, which count towards MAX_STOP_TOKENS.
      fills_in: its tokenizer has markers to fill in the middle, so that completions may have a suffix.
      task: what the model is for. The endpoints of models that embed or score are not described for others.
    """

    vocab_size: int
    max_model_len: int
    num_end_ids: int
    fills_in: bool
    task: str = "generate"


def openapi_document(
    version: str, names: Sequence[str], model: ModelFacts | None, own_templates: bool = False, has_files: bool = False
) -> dict[str, Any]:
    """The document of /openapi.json for a model with these names. If `model` is None, as with several models, bounds
    that depend on it are missing, and all models' endpoints are described.

    `own_templates`: requests may bring a chat template. `has_files`: files and batches are served.
    """
    of_tasks = _POOLING_POSTS.values() if model is None else [_POOLING_POSTS.get(model.task, {})]
    posts = _POSTS | _ADMIN_POSTS | (_BATCH_POSTS if has_files else {})
    for of_task in of_tasks:
        posts |= of_task
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
    components |= generate_schemas(components["CompletionRequest"])
    components = {name: _with_bounds(schema, model) for name, schema in components.items()}
    bodies = dict(zip(posts, references, strict=True))
    either = {"anyOf": [bodies["/v1/chat/completions"], bodies["/v1/completions"]]}
    llama = {"anyOf": [bodies["/completion"], bodies["/v1/completions"]]}
    of_generate = {"$ref": "#/components/schemas/GenerateRequest"}
    operations = [
        *((path, "get", summary, None) for path, summary in _GETS.items()),
        *((path, method, summary, None) for path, (method, summary) in _OTHERS.items()),
        *((path, "post", summary, bodies[path]) for path, (_, summary) in posts.items()),
        *(
            (f"/v2/models/{{name}}{version}{end}", method, summary, of_generate if method == "post" else None)
            for version in ("", "/versions/{version}")
            for end, (method, summary) in _OF_MODEL.items()
        ),
        ("/completions", "post", "llama.cpp's /completion, or /v1/completions by fields such as max_tokens", llama),
        ("/invocations", "post", "A chat completion, or a completion, by its body", either),
    ]
    paths: dict[str, Any] = {}
    for path, method, summary, body in operations:
        _describe(paths, path, method, summary, body and {"application/json": {"schema": body}})
    if has_files:
        _describe_files(paths)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }


def _describe(
    paths: dict[str, Any], path: str, method: str, summary: str, content: dict[str, Any] | None = None
) -> None:
    """Adds an operation to `paths`. content: the schema of its body by media type."""
    operations = paths.setdefault(path, {})
    named = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    asked = [
        {"name": name, "in": "query", "schema": schema} for name, schema in _QUERIES.get((path, method), {}).items()
    ]
    if named:
        operations["parameters"] = named
    operations[method] = {"summary": summary, "responses": _ANSWERS} | ({"parameters": asked} if asked else {})
    if content is not None:
        operations[method]["requestBody"] = {"required": True, "content": content}


def _describe_files(paths: dict[str, Any]) -> None:
    """Adds the paths of files and batches that take no JSON."""
    form = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"enum": [INPUT]},
            "expires_after[anchor]": {"enum": ["created_at"]},
            "expires_after[seconds]": {"type": "integer", "minimum": SHORTEST_LIFE, "maximum": LONGEST_LIFE},
        },
    }
    _describe(paths, "/v1/files", "get", "The files of this key")
    _describe(paths, "/v1/files", "post", "Upload a file", {"multipart/form-data": {"schema": form}})
    _describe(paths, "/v1/files/{id}", "get", "A file")
    _describe(paths, "/v1/files/{id}", "delete", "Delete a file")
    _describe(paths, "/v1/files/{id}/content", "get", "The bytes of a file")
    _describe(paths, "/v1/batches", "get", "The batches of this key")
    _describe(paths, "/v1/batches/{id}", "get", "A batch")
    _describe(paths, "/v1/batches/{id}/cancel", "post", "Cancel a batch")


def _harmless(field: str) -> dict[str, Any]:
    """The values that are accepted in a field that is not served."""
    return {"enum": [None, *NOT_SERVED[field].harmless]}


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
