"""Histories that clients send: what a server has said, and what clients make of it, is taken back."""

from __future__ import annotations

import pytest
import tokenizers_for_tests as kinds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_agents import data_of
from test_clients import MODEL, TOOL

from jaxserve.server.chat.conversation import encode_chat
from jaxserve.server.ipc.messages import Ready
from jaxserve.server.schemas.chat import CalledFunction, Conversation, Message, ToolCall
from jaxserve.server.tools.choice import Function, Tool

SIZES = {"vocab_size": 1000, "max_model_len": 1000, "page_size": 16, "max_num_seqs": 1}
INFO = Ready(model_folder="", tokenizer_folder="", dtype="", eos_token_ids=(0,), **SIZES)

CALL_ID = "call_1"
CALLED = {"id": CALL_ID, "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rom"}'}}
CUSTOM = {"id": CALL_ID, "type": "custom", "custom": {"name": "x", "input": "y"}}
USER = {"role": "user", "content": "Weather?"}


def calling(**function) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [CALLED | {"function": CALLED["function"] | function}]}


class TestHistories:
    @pytest.mark.parametrize(
        ("message", "shown"),
        [
            ({"role": "assistant", "content": None}, "<|im_start|>assistant\n<|im_end|>"),
            ({"role": "assistant", "content": None, "tool_calls": []}, "<|im_start|>assistant\n<|im_end|>"),
            ({"role": "assistant"}, "<|im_start|>assistant\n<|im_end|>"),
            (calling(), '{"city": "Rom"}'),
            (calling(arguments={"city": "Rom"}), '{"city": "Rom"}'),
            (calling(arguments='{"city": "Rom", "when": {"day": "to'), '{"city": "Rom", "when": {"day": "to"}}'),
            (calling(arguments='{"city": "Rom", "wh'), '{"city": "Rom"}'),
            (calling(arguments=""), '"arguments": {}}'),
            (calling(arguments=None), '"arguments": {}}'),
            (calling(arguments="Rom"), '{"arguments": "Rom"}'),
            (calling(arguments='{"city": "\\ud83d"}'), '{"city": "\ufffd"}'),
            (
                {"role": "assistant", "tool_calls": [CUSTOM]},
                '{"name": "x", "arguments": {"input": "y"}}',
            ),
            ({"role": "assistant", "content": None, "function_call": CALLED["function"]}, '{"city": "Rom"}'),
            ({"role": "function", "name": "get_weather", "content": "rain"}, "<|im_start|>tool\nrain"),
            ({"role": "tool", "tool_call_id": CALL_ID, "content": [{"type": "text", "text": "rain"}]}, "rain"),
            ({"role": "tool", "tool_call_id": CALL_ID, "content": None}, "<|im_start|>tool\n<|im_end|>"),
            ({"role": "assistant", "content": None, "refusal": "I will not."}, "I will not."),
            ({"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}, "I will not."),
            ({"role": "assistant", "content": [{"type": "output_text", "text": "Sun."}]}, "Sun."),
            ({"role": "developer", "content": "Be brief.", "name": None}, "<|im_start|>system\nBe brief."),
        ],
    )  # fmt: skip
    def test_it_is_taken_back(self, parrot, message, shown):
        nulls = dict.fromkeys(["refusal", "tool_calls", "function_call", "audio", "annotations", "reasoning"])
        with parrot.http() as http:
            body = {"model": MODEL, "messages": [USER, nulls | message, USER], "tools": [TOOL], "max_tokens": 1}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
            ids = http.post("/tokenize", json={"messages": body["messages"]}).json()["tokens"]
            assert shown in http.post("/detokenize", json={"tokens": ids}).json()["prompt"]

    @pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
    def test_reasoning(self, scripted, field):
        messages = [USER, {"role": "assistant", "content": None, field: "Hm."}, USER]
        with scripted.http() as http:
            ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
            assert "<think>Hm.</think>" in http.post("/detokenize", json={"tokens": ids}).json()["prompt"]

    @pytest.mark.parametrize(
        "message",
        [
            {"role": "user", "content": None},
            {"role": "system"},
            {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            {"role": "assistant", "tool_calls": [{"id": "c"}]},
            {"role": "user", "content": "x", "tool_calls": [CALLED]},
        ],
    )
    def test_what_stays_refused(self, parrot, message):
        body = {"model": MODEL, "messages": [USER, message, USER], "max_tokens": 1}
        response = parrot.http().post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"


# As Qwen 3.5 and Mistral have it: one system message, user and assistant by turns.
STRICT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "{% if m.role == 'user' and (loop.previtem or {}).role == 'user' %}{{ raise_exception('user twice') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
FORGETFUL_TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("template", [STRICT_TEMPLATE, FORGETFUL_TEMPLATE])
def test_templates_that_know_one_system_message(template):
    """Coding agents send several system messages, some of them late, and several of the user's in a row."""
    turns = [
        ("system", "A."),
        ("developer", "B."),
        ("user", "C."),
        ("user", "D."),
        ("assistant", "E."),
        ("system", "F."),
    ]
    text = rendered(template, [Message(role, text) for role, text in turns])
    assert text == "[system]A.\n\nB.[user]C.\n\nD.[assistant]E.[user]<system>\nF.\n</system>"


def rendered(template: str, messages: list[Message], **fields) -> str:
    tokenizer = kinds.byte_level(template)
    return tokenizer.decode(encode_chat(tokenizer, INFO, Conversation(messages=messages, **fields)))


FUNCTION = Tool(Function("f", parameters={"type": "object"}))
CALLING = Message("assistant", "Look.", tool_calls=[ToolCall(CalledFunction("f", '{"city": "Köln"}'), "1")])


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        # DeepSeek joins texts to the arguments.
        (
            "{% for m in messages %}{% for tool in m['tool_calls'] %}"
            "{{ tool['function']['name'] + ':' + tool['function']['arguments'] + ';' }}{% endfor %}{% endfor %}",
            'f:{"city": "Köln"};',
        ),
        (
            "{% for m in messages %}{% for tool in m.tool_calls %}"
            "{{ tool.function.name }}:{{ tool.function.arguments | tojson }};{% endfor %}{% endfor %}",
            'f:{"city": "Köln"};',
        ),
        # Apertus's joins them in messages of another form, which nobody sends.
        (
            "{% for m in messages %}{% for tool in m.blocks %}{{ tool.name + tool.arguments + ';' }}{% endfor %}"
            "{% for tool in m.tool_calls %}{% set function = tool.function %}"
            "{{ function.name + ':' + function.arguments|tojson + ';' }}{% endfor %}{% endfor %}",
            'f:{"city": "Köln"};',
        ),
        # Phi-4-mini looks for the tools in the system message, and shows no calls.
        (
            "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
            "{% if 'tools' in message and message['tools'] is not none %}<|tool|>{{ message['tools'] }}<|/tool|>"
            "{% endif %}{% endfor %}",
            '<system><|tool|>[{"name": "f", "parameters": {"type": "object"}}]<|/tool|><user>Hi<assistant>Look.'
            '<|tool_call|>[{"name": "f", "arguments": {"city": "Köln"}}]<|/tool_call|><tool>rain',
        ),
        # Granite 3 shows no calls.
        (
            "{% for message in messages %}<|start_of_role|>{{ message['role'] }}:{{ message['content'] }}{% endfor %}"
            "{# respond with <|tool_call|> #}",
            "<|start_of_role|>user:Hi<|start_of_role|>assistant:Look."
            '<|tool_call|>[{"name": "f", "arguments": {"city": "Köln"}}]<|start_of_role|>tool:rain',
        ),
        # SmolLM3 reads the tools from another variable.
        (
            "{% if xml_tools %}{% for tool in xml_tools[:] %}{{ tool.function.name }}{% endfor %}{% endif %}"
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# tool_calls #}",
            "f<user>Hi<assistant>Look.<tool>rain",
        ),
    ],
    ids=["deepseek", "others", "apertus", "phi", "granite", "smollm"],
)  # fmt: skip
def test_what_particular_templates_want(template, prompt):
    messages = [Message("user", "Hi"), CALLING, Message("tool", "rain", tool_call_id="1")]
    assert rendered(template, messages, tools=[FUNCTION], add_generation_prompt=False) == prompt


def test_templates_that_need_descriptions_and_parameters():
    """gpt-oss's joins texts to a description; Seed-OSS's walks through the properties."""
    template = (
        "{% for tool in tools %}{{ '// ' + tool.function.description }}{{ tool.function.name }}("
        "{% for name, of in tool.function.parameters.properties.items() %}{{ name }}{% endfor %}){% endfor %}"
    )
    properties = {"type": "object", "properties": {"x": {}}}
    tools = [Tool(Function("a")), Tool(Function("b", "B", parameters=properties))]
    assert rendered(template, [Message("user", "Hi")], tools=tools) == "// a()// Bb(x)"
    assert rendered("{{ tools | tojson }}", [Message("user", "Hi")], tools=tools[:1]) == (
        '[{"type": "function", "function": {"name": "a"}}]'
    )


def test_templates_that_read_functions_in_the_place_of_tools():
    """Apertus's, which joins texts to a description; vLLM's for the same model reads tools."""
    template = "{% for tool in tools %}{{ '// ' + tool.description }}{{ tool.name }};{% endfor %}{# <|tools_prefix|> #}"
    tools = [Tool(Function("a", "A")), Tool(Function("b", "B", parameters={"type": "object"}))]
    assert rendered(template, [Message("user", "Hi")], tools=tools) == "// Aa;// Bb;"
    assert rendered(template, [Message("user", "Hi")], tools=[Tool(Function("a"))]) == "// a;"
    assert rendered(template.replace("tool.", "tool.function."), [Message("user", "Hi")], tools=tools) == "// Aa;// Bb;"


@pytest.mark.parametrize(
    ("template", "fields", "prompt"),
    [
        ("{{ reasoning_effort }}", {"reasoning_effort": "none"}, "none"),
        ("{{ reasoning_effort }}{# ['low', 'no_think'] #}", {"reasoning_effort": "none"}, "no_think"),
        ("{{ reasoning_effort }}{# ['low', 'no_think'] #}", {"reasoning_effort": "low"}, "low"),
        ("{{ thinking }}", {"chat_template_kwargs": {"enable_thinking": True}}, "True"),
        ("{{ thinking }}", {"reasoning_effort": "none"}, "False"),
        ("{{ thinking }}", {"chat_template_kwargs": {"enable_thinking": True, "thinking": 3}}, "3"),
        ("{{ thinking is defined }}", {}, "False"),
        ("{{ thinking }}{{ enable_thinking }}", {"reasoning_effort": "none"}, "False"),
    ],
)
def test_other_names_of_thinking(template, fields, prompt):
    assert rendered(template, [Message("user", "Hi")], **fields) == prompt


def test_phi_s_tools_beside_a_system_message():
    template = (
        "{% for message in messages %}{{ message['content'] }}<|tool|>{{ message['tools'] }}<|/tool|>{% endfor %}"
    )
    shown = rendered(template, [Message("system", "Be kind.")], tools=[FUNCTION])
    assert shown == 'Be kind.<|tool|>[{"name": "f", "parameters": {"type": "object"}}]<|/tool|>'
    assert rendered(template, [Message("system", "Be kind.")]) == "Be kind.<|tool|><|/tool|>"


CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "K\\u00f6ln", "n": [1, {"x": null}]}}</tool_call>'
FRAGMENTS = st.sampled_from(
    [
        "Text. ", " \n", "<think>", "</think>", "Hm. ", CALL, "<tool_call>", "</tool_call>", "\ufffd😀",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud83d"}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": {"city": Rom,}}</tool_call>',
        '<tool_call>{"name": "unheard of", "arguments": {}}</tool_call>', '{"city": "Rom"}', '{"city": "Ro',
        '[{"name": "get_weather", "parameters": {"city": "Rom"}}',
    ]
)  # fmt: skip
ANSWERS = st.builds(
    lambda parts, cut: "".join(parts)[: cut or None], st.lists(FRAGMENTS, min_size=0, max_size=5), st.integers(0, 200)
)
SCHEMA = TOOL["function"]["parameters"]


def chat_turn(server, question: dict, stream: bool, forced: bool, most: int) -> dict:
    """Asks, and returns the fields of the request that goes on from the answer, as a client puts it together."""
    request = {"model": MODEL, "tools": [TOOL], "tool_choice": "required" if forced else "auto", "max_tokens": most}
    with server.http() as http:
        if stream:
            body = {**request, "messages": [question], "stream": True}
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                answer = put_together(data_of(response.iter_lines()))
        else:
            response = http.post("/v1/chat/completions", json={**request, "messages": [question]})
            answer = response.json()["choices"][0]["message"]
    ids = [call["id"] for call in answer.get("tool_calls") or []]
    return request | {
        "messages": [question, answer, *({"role": "tool", "tool_call_id": i, "content": ""} for i in ids)]
    }


def put_together(chunks) -> dict:
    message: dict = {"role": "assistant", "content": "", "reasoning": None, "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] = (message["reasoning"] or "") + delta.get("reasoning", "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({**call, "function": call["function"] | {"arguments": ""}})
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def response_turn(server, question: dict, stream: bool, forced: bool, most: int) -> dict:
    tools = [{"type": "function", **TOOL["function"]}]
    request = {"tools": tools, "tool_choice": "required" if forced else "auto", "max_output_tokens": most}
    answer = server.openai().responses.create(model=MODEL, input=[question], stream=stream, **request)
    output = [event.item for event in answer if event.type == "response.output_item.done"] if stream else answer.output
    items = [item.model_dump() for item in output]
    ids = [item["call_id"] for item in items if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": name, "output": ""} for name in ids]
    return request | {"input": [question, *items, *results]}


def message_turn(server, question: dict, stream: bool, forced: bool, most: int) -> dict:
    tools = [{"name": "get_weather", "input_schema": SCHEMA}]
    request = {"tools": tools, "tool_choice": {"type": "any" if forced else "auto"}, "max_tokens": most}
    ask = server.anthropic().messages
    if stream:
        with ask.stream(model=MODEL, messages=[question], **request) as events:
            answer = events.get_final_message()
    else:
        answer = ask.create(model=MODEL, messages=[question], **request)
    blocks = [block.model_dump() for block in answer.content]
    ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": name, "content": ""} for name in ids]
    turns = [question, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    return request | {"messages": turns}


ENDPOINTS = {
    "/v1/chat/completions": ("messages", chat_turn),
    "/v1/responses": ("input", response_turn),
    "/v1/messages": ("messages", message_turn),
}


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@settings(max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(text=ANSWERS, stream=st.booleans(), forced=st.booleans(), most=st.sampled_from([5, 30, 500]))
def test_the_server_takes_back_what_it_says(scripted, endpoint, text, stream, forced, most):
    """Every answer, whole or put together from a stream, with all its nulls, may stand in the next request."""
    field, turn = ENDPOINTS[endpoint]
    request = turn(scripted, {"role": "user", "content": f"SAY({text})SAY"}, stream, forced, most)
    request[field].append({"role": "user", "content": "SAY(Done.)SAY"})
    with scripted.http() as http:
        answer = http.post(endpoint, json={"model": MODEL, **request})
    assert answer.status_code == 200, (text, answer.text, request[field])
