"""Grammars on their way to a matcher: what is refused, what waits, and what they know of the vocabulary."""

import contextlib
import json
import re
import time

import jsonschema
import msgspec
import numpy as np
import pytest
from engines import bound, drain, make_engine, request, run_all
from json_schemas import PERSON

from jaxserve import LLM, SamplingParams
from jaxserve.grammars.grammar import Compiler, _build, read_vocabulary
from jaxserve.limits import MAX_GRAMMAR
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import Grammar, InvalidRequestError, QueueFullError

CASE = "llama3_gqa"  # two end-of-sequence ids
JSON = Grammar("json", json.dumps(PERSON))


@pytest.fixture(scope="module")
def tokenizer(model_folders):
    return load_tokenizer(model_folders(CASE))


@pytest.fixture(scope="module")
def llm(model_folders):
    return LLM(str(model_folders(CASE)), max_num_seqs=16, kv_pages=600)


@pytest.fixture(scope="module")
def engine(model_folders):
    return make_engine(model_folders(CASE), rows=8)


# Refusals


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "weird"}, "weird"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "https://example.com/schema.json"}, "example.com"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        (False, "nothing"),
    ],
    ids=str,
)
def test_schemas_that_cannot_be_served(llm, schema, why):
    params = SamplingParams(grammar=Grammar("json", json.dumps(schema)))
    with pytest.raises(InvalidRequestError, match=re.escape(why)) as caught:
        llm.generate("x", params, progress=False)
    assert caught.value.param == "grammar"


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        ("xml", "", "must be one of"),
        ("json", "{", "not valid JSON"),
        ("json", "[1]", "must be an object"),
        ("json", "[" * 100_000, "not valid JSON"),
        ("json", '{"items":' * 65 + "{}" + "}" * 65, "nested deeper than 64"),
        ("choice", "[]", "1 to 1024"),
        ("choice", '["a", ""]', "not empty"),
        ("choice", json.dumps(["a"] * 1025), "1 to 1024"),
        ("regex", "", "empty"),
        ("regex", "a" * (MAX_GRAMMAR + 1), "at most"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_grammars_that_are_refused_at_once(kind, value, why):
    with pytest.raises(InvalidRequestError, match=why):
        Grammar(kind, value)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(" * 1000 + "a" + ")" * 1000),
        Grammar("regex", "(a"),
        Grammar("lark", "start: " + "(" * 1000 + '"a"' + ")" * 1000),
        Grammar("lark", "start: missing"),
        Grammar("lark", 'start: start "a"'),
        Grammar("lark", 'root ::= ("a"'),
    ],
    ids=lambda grammar: grammar.value[:20],
)
def test_grammars_that_do_not_compile(llm, grammar):
    with pytest.raises(InvalidRequestError, match="the grammar cannot be used"):
        llm.engine.grammars.check(grammar)


def test_rules_that_name_each_other_in_a_long_chain(llm):
    """The compiler descends into each: on a thread of usual size this would be the end of the process."""
    chain = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}, "type": "array", "minItems": 1} for i in range(3000)}
    schema = {"$ref": "#/$defs/d0", "$defs": chain | {"d3000": {"type": "integer"}}}
    llm.engine.grammars.check(Grammar("json", json.dumps(schema)))
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(12_000))
    llm.engine.grammars.check(Grammar("lark", f'start: r0\n{rules}\nr12000: "z"'))


@pytest.mark.slow
def test_a_refusal_is_the_requests_only_update(engine, tokenizer):
    bad = Grammar("json", '{"type": "integer", "minimum": 5, "maximum": 3}')
    for one in (bound("bad", bad, n=2), bound("good", JSON)):
        engine.add_request(one)
    updates = [update for _ in range(1000) if engine.has_work for update in engine.step()]
    refused = [update for update in updates if update.request_id == "bad"]
    assert [(u.index, u.finish_reason, u.error_param) for u in refused] == [
        (0, "error", "grammar"),
        (1, "error", "grammar"),
    ]
    assert "minimum (5)" in refused[0].error
    assert [u.finish_reason for u in updates if u.request_id == "good"][-1] == "stop"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "uri-reference"},
        {"type": "object", "properties": {"n": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 9}}},
        {"anyOf": [{"format": "password", "type": "string"}], "$defs": {"format": {"format": "x", "type": "integer"}}},
        {"type": "object", "propertyNames": {"type": "string", "description": "a name"}, "maxProperties": 1},
        {"type": "object", "propertyNames": True},
        {"type": "object", "propertyNames": {}, "properties": {"propertyNames": {"type": "null"}}},
        {"enum": [{"format": "int32", "propertyNames": {}}]},
        {"type": "object", "properties": {"format": {"const": "int32"}}, "required": ["format"]},
    ],
    ids=str,
)
def test_what_a_validator_may_ignore_is_ignored(llm, schema):
    params = SamplingParams(temperature=1, max_tokens=200, seed=1, n=3, grammar=Grammar("json", json.dumps(schema)))
    (output,) = llm.generate(["x"], params, progress=False)
    for one in output.outputs:
        if one.finish_reason == "stop":
            jsonschema.validate(json.loads(one.text), schema)


def test_property_names_that_say_something_are_refused(llm):
    grammar = Grammar("json", '{"type": "object", "propertyNames": {"pattern": "^a"}}', field="text")
    with pytest.raises(InvalidRequestError, match="propertyNames") as caught:
        llm.engine.grammars.check(grammar)
    assert caught.value.param == "text"


def test_the_part_that_is_wrong_is_named(llm):
    bad = Grammar("json", '{"type": "weird"}', field="tools", origin="the schema of 'f'")
    whole = Grammar("lark", "start: @a | @b", (("a", JSON), ("b", bad)))
    with pytest.raises(InvalidRequestError, match=r"the schema of 'f' cannot be used: .*weird") as caught:
        llm.engine.grammars.check(whole)
    assert caught.value.param == "tools"
    loose = Grammar("json", '{"type": "object", "properties": {"x": {"type": "weird"}}}', is_loose=True)
    llm.engine.grammars.check(Grammar("lark", "start: @a | @b", (("a", JSON), ("b", loose))))


MCP = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 2, "maxItems": 2},
        "mail": {"type": "string", "pattern": r"^(?!\.)[a-z]{2}$", "maxLength": 3},
        "size": {"oneOf": [{"type": "integer", "maximum": 9}, {"const": 3}], "not": {"const": 5}},
    },
    "required": ["tags", "mail", "size"],
    "if": {"properties": {"size": {"const": 1}}},
    "then": {"required": ["mail"]},
    "additionalProperties": False,
}


@pytest.mark.parametrize("kind", ["lenient", "loose"])
def test_what_a_grammar_cannot_hold_is_left_out_of_a_lenient_schema(llm, caplog, monkeypatch, kind):
    """The rest of the schema holds, and the log tells once what is left out."""
    monkeypatch.setattr("jaxserve.grammars.grammar._noted", set())
    text = json.dumps(MCP)
    with pytest.raises(InvalidRequestError, match=r"uniqueItems|oneOf|then|not"):
        llm.engine.grammars.check(Grammar("json", text))
    whole = Grammar("json", text, is_lenient=True)
    if kind == "loose":
        whole = Grammar("lark", "start: @a", (("a", Grammar("json", text, is_loose=True)),))
    rest = json.loads(text)
    for name in ("if", "then"):
        del rest[name]
    rest["properties"]["mail"].pop("pattern")
    rest["properties"]["tags"].pop("uniqueItems")
    rest["properties"]["size"] = {"type": "integer", "maximum": 9}
    params = SamplingParams(temperature=1, max_tokens=300, seed=1, n=4, grammar=whole)
    (output,) = llm.generate(["x"], params, progress=False)
    ended = [one.text for one in output.outputs if one.finish_reason == "stop"]
    assert ended
    for one in ended:
        jsonschema.validate(json.loads(one), rest)
    llm.engine.grammars.check(msgspec.structs.replace(whole, origin="the same once more"))
    for name in ("uniqueItems", "oneOf", "the pattern", "then"):
        assert sum(name in record.getMessage() for record in caplog.records) == 1, caplog.text


# The queue of the compiler


def build_slowly(monkeypatch, seconds):
    """Has every grammar take this long to compile; returns those that were begun."""
    begun = []

    def build(tokens, grammar):
        begun.append(grammar.value)
        time.sleep(seconds)
        return _build(tokens, grammar)

    monkeypatch.setattr("jaxserve.grammars.grammar._build", build)
    return begun


@pytest.mark.slow
def test_the_time_in_the_queue_does_not_count(engine, monkeypatch):
    """Twelve at 0.3 s on two threads: the last waits longer than a grammar may take."""
    monkeypatch.setattr("jaxserve.grammars.grammar.COMPILE_SECONDS", 1.2)
    build_slowly(monkeypatch, 0.3)
    results = run_all(engine, *(bound(f"q{i}", Grammar("regex", f"q{i}[a-z]")) for i in range(12)))
    assert [one.finish_reason for one in results.values()] == ["stop"] * 12


def test_the_queue_is_bounded_and_those_who_leave_make_room(engine, monkeypatch):
    begun = build_slowly(monkeypatch, 0.2)
    monkeypatch.setattr(engine.grammars, "_max_queued", 3)
    grammars = [Grammar("regex", f"full{i}[a-z]") for i in range(9)]
    accepted = []
    for i, grammar in enumerate(grammars):
        with contextlib.suppress(QueueFullError):
            engine.add_request(bound(f"f{i}", grammar))
            accepted.append(i)
    assert 3 <= len(accepted) <= 5  # two may have begun
    with pytest.raises(QueueFullError, match="grammars wait to be compiled"):
        engine.add_request(bound("one more", grammars[-1]))
    engine.add_request(bound("the same", grammars[accepted[-1]]))  # needs no place
    engine.abort(f"f{accepted[-1]}")
    engine.abort(f"f{accepted[-2]}", 0)
    engine.add_request(bound("later", Grammar("regex", "later[a-z]")))
    results = drain(engine)
    assert {name for name, _ in results} == {*(f"f{i}" for i in accepted[:-2]), "the same", "later"}
    assert grammars[accepted[-2]].value not in begun
    assert grammars[accepted[-1]].value in begun
    again = run_all(engine, bound("again", grammars[accepted[-2]]))  # what left the queue may come back
    assert again["again", 0].finish_reason == "stop"


def test_compiling_has_a_time_limit_and_holds_nobody_up(engine, monkeypatch):
    monkeypatch.setattr("jaxserve.grammars.grammar.COMPILE_SECONDS", 0.3)
    monkeypatch.setattr("jaxserve.grammars.grammar._build", lambda vocabulary, grammar: time.sleep(1.5))
    engine.add_request(bound("slow", Grammar("regex", "slow")))
    engine.add_request(request("other", [5], max_tokens=4))
    start = time.monotonic()
    ended = {}
    while engine.has_work:
        for update in engine.step():
            if update.finish_reason is not None:
                ended[update.request_id] = (time.monotonic() - start, update)
    assert ended["other"][0] < ended["slow"][0] < 1.2
    assert "within 0.3 s" in ended["slow"][1].error


# Tokens


@pytest.mark.parametrize("kind", ["tokenizer.json", "another kind"])
def test_the_vocabulary_has_the_bytes_of_the_tokenizer(model_folders, tmp_path, monkeypatch, kind):
    folder = model_folders(CASE)
    tokenizer = load_tokenizer(model_folders(CASE))
    if kind == "another kind":
        monkeypatch.setattr("jaxserve.grammars.grammar.load_tokenizer", lambda *_, **__: tokenizer)
        folder = tmp_path
    vocabulary = read_vocabulary(folder, 515, (2, 4))  # the model's own is padded
    assert (vocabulary.vocab_size, sorted(vocabulary.eos_tokens)) == (515, [2, 4])
    for token in set(range(512)) - tokenizer.special_ids:
        expected = tokenizer.token_bytes(token)
        assert vocabulary.decode_bytes([token]) == (b"" if expected == b"\xff" else expected)  # which no text holds
    assert all(vocabulary.is_special_token(token) for token in tokenizer.special_ids)


@pytest.mark.parametrize("kind", ["tokenizer.json", "another kind"])
def test_marks_are_tokens_or_text(model_folders, tmp_path, monkeypatch, tokenizer, kind):
    folder = model_folders(CASE)
    if kind == "another kind":
        monkeypatch.setattr("jaxserve.grammars.grammar.load_tokenizer", lambda *_, **__: tokenizer)
        folder = tmp_path
    vocabulary = read_vocabulary(folder, 512, (2, 4))
    for mark in ("<|im_start|>", "</think>", "[A/B] #1&~"):
        matcher = _build(vocabulary, Grammar("lark", 'start: until_end "z"', marks=(("end", mark),)))
        for text, is_whole in ((f"So,\n\t{mark}z", True), (f"{mark}z", True), (f"{mark}{mark}z", False), ("z", False)):
            state = matcher.deep_copy()
            taken = [state.consume_token(token) for token in tokenizer.encode(text)]
            assert (all(taken) and state.is_accepting()) == is_whole


def test_special_tokens_by_name(model_folders, tokenizer):
    compiler = Compiler(model_folders(CASE), 512, (2, 4))
    matcher = compiler.compile(Grammar("lark", 'start: <|im_start|> "a"')).future.result().deep_copy()
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    assert np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist() == tokenizer.encode("<|im_start|>")
