"""/openapi.json states the bounds of what a client may send. `test_schemathesis.py` makes requests from it."""

from __future__ import annotations

import re

import pytest

from jaxserve.server.endpoints.openapi import ModelFacts, numbers_up_to, openapi_document
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.http.state import ServerState
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.process.app import build_app

# Registered, and not in the document.
NOT_DESCRIBED = {
    ("GET", "/v1/"), ("GET", "/v1/models/"),  # the same as without the slash
    ("POST", "/api/create"), ("POST", "/api/copy"), ("POST", "/api/push"), ("DELETE", "/api/delete"),  # refused, as are
    ("POST", "/api/blobs/{digest}"), ("POST", "/slots/{id}"),
    *((method, f"/v2/models/{{name}}{version}{end}") for method, end in (("POST", "/infer"), ("GET", "/stats"))
      for version in ("", "/versions/{version}")),
    ("GET", "/v1/responses/compact"), ("POST", "/v1/responses/compact"), ("DELETE", "/v1/responses/compact"),
    ("GET", "/"),  # a page, with its files
}  # fmt: skip


@pytest.mark.parametrize("most", [0, 7, 9, 10, 42, 99, 100, 999, 1000, 12_345, 151_935])
def test_numbers_as_an_expression(most):
    pattern = re.compile(numbers_up_to(most))
    near = range(max(most - 1200, 0), most + 1200)
    assert all(bool(pattern.search(str(n))) == (n <= most) for n in (*range(200), *near))
    assert not pattern.search("01")
    assert not pattern.search("")


def test_the_document_states_the_bounds(http):
    """Of types, of the model, and of what the operator allows."""
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas["ChatRequest"]["properties"]
    assert schemas["NotServed"]["properties"]["typical_p"] == {"enum": [None, 1]}
    for name in ("CompletionRequest", "ChatRequest", "ResponsesRequest", "MessagesRequest"):
        assert "NotServed" in schemas[name]["description"]
        assert {"structured_outputs", "regex", "ebnf", "grammar", "json_schema"} <= schemas[name]["properties"].keys()
        assert "typical_p" not in schemas[name]["properties"]
    assert (fields["max_tokens"]["anyOf"][0]["minimum"], fields["truncation_side"]["anyOf"][0]["enum"]) == (
        -1, ["left", "right"]
    )  # fmt: skip

    def of(name: str) -> dict:
        return fields[name]["anyOf"][0]

    assert (of("temperature")["minimum"], of("temperature")["maximum"]) == (0, 10)
    assert (of("n")["type"], of("n")["minimum"], of("n")["maximum"]) == ("integer", 1, 128)
    assert of("stop") == {"type": "string", "minLength": 1, "maxLength": 1024}
    assert fields["stop"]["anyOf"][1]["maxItems"] == 64
    assert fields["messages"]["maxItems"] == 4096
    assert of("tools")["maxItems"] == 512
    assert fields["model"]["enum"] == [None, "test-model"]
    vocab_size = http.get("/tokenizer_info").json()["model_vocab_size"]
    assert of("allowed_token_ids")["items"]["maximum"] == vocab_size - 1
    assert of("stop_token_ids")["maxItems"] == 14  # beside the model's own two
    assert re.search(of("logit_bias")["propertyNames"]["pattern"], str(vocab_size - 1))
    assert not re.search(of("logit_bias")["propertyNames"]["pattern"], str(vocab_size))
    assert fields["chat_template"]["type"] == "null"


def test_every_route_is_described():
    """And nothing else is."""
    state = ServerState(ServerSettings(model_names=("x",)), EngineClient(), Metrics("x"))
    registered = {
        (method, route.path.replace(":path}", "}"))
        for route in build_app(state).routes
        for method in route.methods - {"HEAD"}
        if not route.path.startswith("/ui/")
    }

    def described(model: ModelFacts | None, has_files: bool = True) -> set[tuple[str, str]]:
        paths = openapi_document("1", ["x"], model, has_files=has_files)["paths"]
        methods = {(method.upper(), path) for path, methods in paths.items() for method in methods}
        return {one for one in methods if one[0] != "PARAMETERS"}

    assert described(None) == registered - NOT_DESCRIBED
    assert registered > NOT_DESCRIBED
    tasks = {task: described(ModelFacts(100, 100, 1, False, task)) for task in ("generate", "embed", "score")}
    assert set.union(*tasks.values()) == described(None)
    assert ("POST", "/v1/embeddings") in tasks["embed"] - tasks["generate"]
    assert ("POST", "/v1/rerank") in tasks["score"] - tasks["generate"]
    assert {path for _, path in tasks["generate"] - described(ModelFacts(100, 100, 1, False), has_files=False)} == {
        "/v1/files", "/v1/files/{id}", "/v1/files/{id}/content",
        "/v1/batches", "/v1/batches/{id}", "/v1/batches/{id}/cancel",
    }  # fmt: skip
