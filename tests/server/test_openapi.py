"""/openapi.json states the bounds of what a client may send. `test_schemathesis.py` makes requests from it."""

from __future__ import annotations

import re

import pytest

from jaxserve.server.endpoints.openapi import numbers_up_to


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
