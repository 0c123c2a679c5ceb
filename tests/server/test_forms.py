"""Forms and tools of a model that thinks, through the real engine: what is asked for holds after the reasoning.

The model is random. A bias makes it close its reasoning, and open calls, sooner or later.
"""

from __future__ import annotations

import json
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest
import tiny_models
from serving import SMALL, running_server

pytestmark = pytest.mark.slow

MODEL = "test-model"
CASE = "qwen3_tied"
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }} {% endfor %}"
    '{# <tool_call>{"name": n, "arguments": a}</tool_call> #}<|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
HI = [{"role": "user", "content": "hi"}]


class Leaf(pydantic.BaseModel):
    size: Literal["s", "m"]


class Tree(pydantic.BaseModel):
    kind: Literal["x", "y"]
    leaf: Leaf
    next: Tree | None


@pytest.fixture(scope="module")
def ids() -> dict[str, str]:
    """The marks' tokens, as keys of logit_bias."""
    return {mark: str(508 + i) for i, mark in enumerate(MARKS)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny_models.build(CASE, tmp_path_factory.mktemp("thinking"))
    tiny_models.build_tokenizer(folder, 512, marks=MARKS, chat_template=TEMPLATE)
    log = tmp_path_factory.mktemp("log") / "server.log"
    config = SMALL | {"max_model_len": 512, "kv_pages": 130}
    with running_server(folder, log, engine=None, config=config) as started:
        yield started


@pytest.fixture(scope="module")
def client(server):
    return server.openai()


def options(ids, thinking: bool | None = True, *, tool: float = 0, **others):
    """Of a request whose model thinks, as the prompt opens it, closes it (False) or leaves open whether it does."""
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    bias = {ids["</think>"]: 4.0, **({ids["<tool_call>"]: tool} if tool else {})}
    extra = {"chat_template_kwargs": kwargs, **others.pop("extra_body", {})}
    return {"model": MODEL, "messages": HI, "max_tokens": 300, "temperature": 1, "seed": 5, "logit_bias": bias} | {
        "extra_body": extra, **others
    }  # fmt: skip


def ask(client, ids, thinking: bool | None = True, **others):
    return client.chat.completions.create(**options(ids, thinking, **others)).choices


def streamed(client, ids, thinking: bool | None = True, **others):
    """Reasoning, content, arguments and the last finish_reason of a stream."""
    reasoning = ""
    content = ""
    arguments = {}
    reason = None
    for chunk in client.chat.completions.create(**options(ids, thinking, stream=True, **others)):
        (choice,) = chunk.choices
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
        reason = choice.finish_reason or reason
    return reasoning, content, arguments, reason


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


def tool(name: str, schema: dict, **others) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": schema, **others}}


# Reasoning first


@pytest.mark.parametrize("form", [{"response_format": FORM}, {"extra_body": {"structured_outputs": {"json": PERSON}}}])
def test_the_form_follows_the_reasoning(client, ids, form):
    for choice in ask(client, ids, n=4, **form):
        assert choice.finish_reason == "stop"
        assert choice.message.reasoning
        assert is_person(choice.message.content)


def test_the_same_comes_as_a_stream_and_after_a_cached_prompt(client, ids):
    message = ask(client, ids, response_format=FORM)[0].message
    for _ in range(2):
        assert streamed(client, ids, response_format=FORM) == (message.reasoning, message.content, {}, "stop")


@pytest.mark.parametrize(
    ("form", "is_right"),
    [
        ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"grammar": 'start: "x" | "(" start ")"'}, lambda text: text.strip("()") == "x"),
        ({"grammar": 'root ::= "a" | "b" root'}, lambda text: text.lstrip("b") == "a"),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ],
    ids=["regex", "choice", "lark", "gbnf", "json_object"],
)
def test_every_kind_of_form(client, ids, form, is_right):
    check_form(client, ids, {"structured_outputs": form}, is_right)


@pytest.mark.parametrize(
    ("fields", "is_right"),
    [
        ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
        ({"ebnf": 'root ::= "a" | "b" root'}, lambda text: text.lstrip("b") == "a"),
        ({"grammar": 'root ::= ("yes" | "no") [0-9]{2}'}, lambda text: text[:-2] in ("yes", "no")),
        ({"json_schema": json.dumps(PERSON)}, is_person),
        ({"json_schema": PERSON, "grammar": "", "regex": None}, is_person),
    ],
    ids=["regex", "ebnf", "grammar", "schema as text", "schema"],
)
def test_forms_by_names_of_other_servers(client, ids, fields, is_right):
    """SGLang's regex, ebnf and json_schema, and llama.cpp's grammar and json_schema."""
    check_form(client, ids, fields, is_right)
    completion = client.completions.create(model=MODEL, prompt="hi", max_tokens=300, seed=3, extra_body=fields)
    assert completion.choices[0].finish_reason == "stop"
    assert is_right(completion.choices[0].text)


def test_forms_of_responses_and_messages(server):
    """vLLM's structured_outputs, and other constraints of sampling, hold in every body."""
    http = server.http()
    outputs = {"choice": ["left", "right"], "enable_in_reasoning": True}
    form = {"structured_outputs": outputs, "bad_words": ["left"]}
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "hi", "max_output_tokens": 50, **form}).json()
    assert answer["output"][-1]["content"][0]["text"] == "right"
    body = {"model": MODEL, "messages": HI, "max_tokens": 50, **form}
    assert http.post("/v1/messages", json=body).json()["content"][-1]["text"] == "right"
    for path, body in (("/v1/responses", {"input": "hi"}), ("/v1/messages", {"messages": HI, "max_tokens": 5})):
        error = http.post(path, json={"model": MODEL, **body, "regex": "("}).json()["error"]
        assert "regex" in error["message"]


def check_form(client, ids, fields, is_right) -> None:
    choices = ask(client, ids, n=3, extra_body=fields)
    ended = [choice.message for choice in choices if choice.finish_reason == "stop"]
    assert ended
    assert all(message.reasoning and is_right(message.content) for message in ended)


def test_a_prompt_that_closed_the_reasoning_leaves_the_form_alone(client, ids):
    for choice in ask(client, ids, False, response_format=FORM, n=2):
        assert getattr(choice.message, "reasoning", None) is None
        assert is_person(choice.message.content)


def test_a_model_that_may_think_thinks_or_not(client, ids):
    for thinks in (True, False):
        bias = {ids["</think>"]: 4.0, ids["<think>"]: 20.0 if thinks else -20.0}
        # Without it the model may spell the mark with other tokens.
        extra = {} if thinks else {"bad_words": ["<"]}
        for choice in ask(client, ids, None, response_format=FORM, n=2, logit_bias=bias, extra_body=extra):
            assert is_person(choice.message.content)
            assert bool(getattr(choice.message, "reasoning", None)) == thinks


def test_by_a_field_the_form_binds_from_the_start(client, ids):
    for others in (
        {"response_format": FORM, "extra_body": {"structured_outputs": {"enable_in_reasoning": True}}},
        {"extra_body": {"structured_outputs": {"json": PERSON, "enable_in_reasoning": True}}},
    ):
        (choice,) = ask(client, ids, **others)
        assert getattr(choice.message, "reasoning", None) is None
        assert is_person(choice.message.content)


def test_min_tokens_do_not_break_the_form(client, ids):
    (choice,) = ask(client, ids, response_format=FORM, extra_body={"min_tokens": 200})
    assert is_person(choice.message.content)


def test_responses(client):
    """There is no bias here, so the reasoning of a random model ends at times."""
    text = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    for seed in range(30):
        result = client.responses.create(
            model=MODEL, input="hi", text=text, max_output_tokens=450, temperature=2,
            extra_body={"seed": seed, "chat_template_kwargs": {"enable_thinking": True}},
        )  # fmt: skip
        if result.status == "completed":
            break
        assert {item.type for item in result.output} <= {"reasoning"}
    assert [item.type for item in result.output] == ["reasoning", "message"]
    assert is_person(result.output_text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tell"}}])
def test_a_forced_call_follows_the_reasoning(client, ids, choice):
    options = {"tools": [tool("tell", PERSON)], "tool_choice": choice, "parallel_tool_calls": False}
    (result,) = ask(client, ids, **options)
    assert result.finish_reason == "tool_calls"
    (call,) = result.message.tool_calls
    assert (bool(result.message.reasoning), result.message.content) == (True, None)
    assert is_person(call.function.arguments)
    reasoning, content, arguments, reason = streamed(client, ids, **options)
    assert (reasoning, content, reason) == (result.message.reasoning, "", "tool_calls")
    assert arguments == {0: call.function.arguments}


def test_a_forced_call_of_messages(server):
    for _ in range(30):
        message = server.anthropic().messages.create(
            model=MODEL, messages=HI, max_tokens=450, thinking={"type": "enabled", "budget_tokens": 1024},
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            tools=[{"name": "tell", "input_schema": PERSON}],
        )  # fmt: skip
        if message.stop_reason == "tool_use":
            break
        assert all(block.type == "thinking" for block in message.content)
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    jsonschema.validate(message.content[1].input, PERSON)


# References in tools


def pointer_tools() -> list[dict]:
    definitions = {"a b/c~d": {"enum": ["q"]}}
    escaped = {"type": "object", "properties": {"v": {"$ref": "#/$defs/a%20b~1c~0d"}}, "required": ["v"]}
    recursive = {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n"]}
    older = {"type": "object", "properties": {"w": {"$ref": "#/definitions/W"}}, "required": ["w"]}
    named = {"type": "object", "properties": {"$ref": {"enum": ["#/nowhere"]}}, "required": ["$ref"]}
    schemas = [
        {**escaped, "$defs": definitions},
        recursive,
        {**older, "definitions": {"W": {"type": "boolean"}}},
        named,
        {**older, "definitions": {"W": {"enum": ["the same name, another schema"]}}},
    ]
    schemas = [{**schema, "additionalProperties": False} for schema in schemas]
    return [tool(f"t{i}", schema) for i, schema in enumerate(schemas)]


@pytest.mark.parametrize("choice", ["required", "named"])
def test_references_resolve_in_the_tool_that_holds_them(client, ids, choice):
    tools = [*pointer_tools(), openai.pydantic_function_tool(Tree, name="grow")]
    for i, one in enumerate(tools):
        function = one["function"]
        given = tools if choice == "required" else [one]
        asked = "required" if choice == "required" else {"type": "function", "function": {"name": function["name"]}}
        (result,) = ask(
            client, ids, False, tools=given, tool_choice=asked, parallel_tool_calls=False, seed=i, max_tokens=200
        )
        if result.finish_reason == "length":
            continue  # a recursion of a random model
        (call,) = result.message.tool_calls
        schemas = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


def test_a_recursive_model_is_one_all_the_way_down(server, client, ids):
    """`{"$ref": "#"}` and `#/$defs/…` beside other tools."""
    (brace,) = server.http().post("/tokenize", json={"prompt": "{"}).json()["tokens"]
    grow, shrink = (openai.pydantic_function_tool(Tree, name=name) for name in ("grow", "shrink"))
    (result, *others) = ask(
        client,
        ids,
        False,
        tools=[grow, shrink],
        tool_choice="required",
        parallel_tool_calls=False,
        n=6,
        logit_bias={str(brace): 3},
    )
    ended = [one for one in (result, *others) if one.finish_reason == "tool_calls"]
    assert ended
    trees = [Tree.model_validate_json(one.message.tool_calls[0].function.arguments) for one in ended]
    assert any(tree.next is not None for tree in trees)


# Tools together with a form
def test_a_model_that_may_call_calls_or_holds_to_the_form(client, ids):
    kinds = set()
    tools = [tool("tell", PERSON)]
    for choice in ask(client, ids, False, tools=tools, response_format=FORM, tool=3.0, n=16, max_tokens=200):
        if choice.finish_reason == "length":
            continue
        kinds.add(choice.finish_reason)
        if choice.message.tool_calls:
            assert choice.message.content is None
            assert all(is_person(call.function.arguments) for call in choice.message.tool_calls)
        else:
            assert is_person(choice.message.content)
    assert kinds == {"stop", "tool_calls"}


def test_after_reasoning_too(client, ids):
    choices = ask(client, ids, tools=[tool("tell", PERSON)], response_format=FORM, tool=3.0, n=4)
    for choice in choices:
        assert choice.message.reasoning
        assert choice.message.tool_calls or is_person(choice.message.content)


def test_the_form_waits_while_a_call_is_forced(client, ids):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    (choice,) = ask(
        client, ids, False, tools=[tool("tell", PERSON)], tool_choice="required", response_format=form,
        parallel_tool_calls=False,
    )  # fmt: skip
    assert is_person(choice.message.tool_calls[0].function.arguments)


def test_strict_and_one_call_hold_where_the_model_chooses(client, ids):
    bias = {"tool": 7.0, "n": 8, "max_tokens": 250}
    choices = ask(client, ids, False, tools=[tool("tell", PERSON, strict=True)], parallel_tool_calls=False, **bias)
    called = [choice for choice in choices if choice.message.tool_calls and choice.finish_reason == "tool_calls"]
    assert called
    assert any(choice.message.content for choice in called)  # free text before it
    for choice in called:
        (call,) = choice.message.tool_calls
        assert is_person(call.function.arguments)


def test_a_schema_with_more_than_a_grammar_holds(client, ids):
    """Such a tool may be forced: the rest of its schema holds. A strict tool and a response_format are refused."""
    schema = PERSON | {"not": {"required": ["zzz"]}}
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = ask(client, ids, False, tools=[tool("tell", schema)], **forced)
    assert is_person(choice.message.tool_calls[0].function.arguments)
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for fields in ({"tools": [tool("tell", schema, strict=True)], **forced}, {"response_format": form}):
        with pytest.raises(openai.BadRequestError, match="not"):
            ask(client, ids, False, **fields)


def test_a_strict_schema_that_cannot_be_enforced_is_no_reason_to_refuse(client, ids):
    schema = {"type": "object", "properties": {"d": {"type": "string", "pattern": "^(?!0)[0-9]+$"}}}
    for choice in ask(client, ids, False, tools=[tool("tell", schema, strict=True)], tool=7.0, n=3, max_tokens=60):
        assert choice.finish_reason


@pytest.mark.parametrize("chosen", ["none", "auto", "required"])
def test_white_space_cannot_go_on_for_ever(server, client, ids, chosen):
    """A model that wants nothing else writes the form all the same."""
    spaces = server.http().post("/tokenize", json={"prompt": " \n\t"}).json()["tokens"]
    (choice,) = ask(
        client, ids, False, tools=[tool("tell", PERSON, strict=True)], tool_choice=chosen, response_format=FORM,
        logit_bias=dict.fromkeys(map(str, spaces), 100), parallel_tool_calls=False, max_tokens=460,
    )  # fmt: skip
    assert choice.finish_reason in ("stop", "tool_calls")


def test_allowed_tools(client, ids):
    tools = [tool(name, PERSON) for name in ("a", "b", "c")]
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "b"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        results = ask(client, ids, False, tools=tools, tool_choice=choice, tool=8.0, n=6)
        calls = [call for result in results for call in result.message.tool_calls or ()]
        assert {call.function.name for call in calls} == {"b"}


def test_legacy_functions(client, ids):
    functions = [tool("tell", PERSON)["function"]]
    (result,) = ask(client, ids, False, functions=functions, function_call={"name": "tell"})
    assert (result.finish_reason, result.message.tool_calls) == ("function_call", None)
    assert is_person(result.message.function_call.arguments)


# Errors


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": "BAD"}}}, None),
        ("chat/completions", {"structured_outputs": {"json": "BAD"}}, None),
        ("chat/completions", {"tools": [tool("f", "BAD")], "tool_choice": "required"}, None),
        ("chat/completions", {"functions": [tool("f", "BAD")["function"]], "function_call": {"name": "f"}}, None),
        ("completions", {"structured_outputs": {"json": "BAD"}}, None),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "n", "schema": "BAD"}}}, None),
    ],
    ids=str,
)
def test_an_error_names_the_field_that_the_client_sent(server, path, body, param):
    bad = {"type": "object", "properties": {"x": {"type": "weird"}}}
    body = json.loads(json.dumps(body).replace('"BAD"', json.dumps(bad)))
    opening = {"chat/completions": {"messages": HI}, "completions": {"prompt": "x"}, "responses": {"input": "hi"}}
    response = server.http().post(f"/v1/{path}", json=opening[path] | body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert "weird" in error["message"]
    assert error["param"] == (param or next(iter(body)))
