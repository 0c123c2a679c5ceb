"""Tools and reasoning through the official client: row "Chat adds" of the API's request fields."""

from __future__ import annotations

import json

import openai
import pytest

MODEL = "test-model"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(scripted):
    return scripted.openai()


def say(text: str) -> list[dict]:
    return [{"role": "user", "content": f"SAY({text})SAY"}]


def ask(client, text: str, **options):
    return client.chat.completions.create(model=MODEL, messages=say(text), **options)


def streamed(client, text: str, **options) -> tuple[dict, list]:
    """The message that the chunks add up to, and the chunks' choices."""
    message: dict = {"content": "", "reasoning": "", "calls": {}}
    choices = [chunk.choices[0] for chunk in ask(client, text, stream=True, **options)]
    for choice in choices[1:]:
        delta = choice.delta
        message["content"] += delta.content or ""
        message["reasoning"] += getattr(delta, "reasoning", "") or ""
        for call in delta.tool_calls or []:
            known = message["calls"].setdefault(call.index, [call.id, call.function.name, ""])
            assert call.id in (None, known[0])
            known[2] += call.function.arguments or ""
        assert delta.content or delta.tool_calls or getattr(delta, "reasoning", None) or choice.finish_reason
    return message, choices


def test_auto(client):
    result = ask(client, f"Let me look.\n{CALL}\n{CALL}", tools=[WEATHER]).choices[0]
    assert result.finish_reason == "tool_calls"
    assert result.message.content == "Let me look."
    assert [call.function.name for call in result.message.tool_calls] == ["get_weather"] * 2
    assert [json.loads(call.function.arguments) for call in result.message.tool_calls] == [{"city": "Köln"}] * 2
    assert len({call.id for call in result.message.tool_calls}) == 2
    alone = ask(client, CALL, tools=[WEATHER], tool_choice="auto").choices[0]
    assert alone.message.content is None
    plain = ask(client, "No need.", tools=[WEATHER]).choices[0]
    assert (plain.finish_reason, plain.message.content, plain.message.tool_calls) == ("stop", "No need.", None)


def test_streamed_arguments_come_in_deltas(client):
    message, choices = streamed(client, f"Look: {CALL}{CALL}", tools=[WEATHER])
    assert message["content"] == "Look:"
    assert [(name, json.loads(text)) for _, name, text in message["calls"].values()] == [
        ("get_weather", {"city": "Köln"})
    ] * 2
    assert sum(bool(choice.delta.tool_calls) for choice in choices) > 4
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    assert choices[0].delta.role == "assistant"


def test_a_cut_stays_length(client):
    """`a length cut stays length; tool_calls only when calls exist and the model stopped by itself`."""
    result = ask(client, CALL, tools=[WEATHER], max_tokens=25).choices[0]
    assert result.finish_reason == "length"
    assert not result.message.tool_calls or "Köln" not in result.message.tool_calls[0].function.arguments


def whole(client, text: str, **options) -> tuple[str, list, str]:
    """Content, names and arguments of calls, and the finish reason."""
    choice = ask(client, text, **options).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert choice.message.content is not None or calls
    return choice.message.content or "", calls, choice.finish_reason


def from_stream(client, text: str, **options) -> tuple[str, list, str]:
    message, choices = streamed(client, text, **options)
    return message["content"], [(call[1], call[2]) for call in message["calls"].values()], choices[-1].finish_reason


NAMED = {"type": "function", "function": {"name": "get_weather"}}
FORCED = json.dumps([{"name": "get_weather", "parameters": {"city": city}} for city in ("Rom", "Ulm")])


@pytest.mark.parametrize("get", [whole, from_stream])
def test_one_call_at_a_time(client, get):
    for options, text, content in (
        ({}, f"Look.\n{CALL}\n{CALL}\nDone.", "Look.\n\nDone."),
        ({"tool_choice": "required"}, FORCED, ""),
    ):
        said, calls, reason = get(client, text, tools=[WEATHER], parallel_tool_calls=False, **options)
        assert (said, len(calls), reason) == (content, 1, "tool_calls")
        assert len(get(client, text, tools=[WEATHER], **options)[1]) == 2


@pytest.mark.parametrize("get", [whole, from_stream])
def test_white_space_around_a_call(client, get):
    call = ("get_weather", '{"city": "Köln"}')
    assert get(client, f"Before.\n{CALL}\nAfter.", tools=[WEATHER]) == ("Before.\n\nAfter.", [call], "tool_calls")
    assert get(client, f"\n{CALL}\n", tools=[WEATHER]) == ("", [call], "tool_calls")


@pytest.mark.parametrize(("choice", "text"), [("required", FORCED), (NAMED, '{"city": "Rom"}'), ("auto", CALL)])
def test_what_a_cut_leaves_unfinished(client, choice, text):
    """It is neither text nor a call, unless parts of its arguments have come."""
    options = {"tools": [WEATHER], "tool_choice": choice}
    shown = []
    for limit in range(1, 200, 4):
        cut = whole(client, f"<think>Hm.</think>{text}", max_tokens=limit, **options)
        if cut[2] == "tool_calls":
            break
        assert cut[::2] == ("", "length")
        assert all(name == "get_weather" and arguments[0] == "{" for name, arguments in cut[1])
        shown.append(len(cut[1]))
        assert from_stream(client, f"<think>Hm.</think>{text}", max_tokens=limit, **options) == cut
    assert shown == sorted(shown)
    assert set(shown) == ({0, 1, 2} if choice == "required" else {0, 1})
    assert len(cut[1]) == shown[-1]


def test_none_leaves_the_text_alone(client):
    result = ask(client, CALL, tools=[WEATHER], tool_choice="none").choices[0]
    assert (result.finish_reason, result.message.content, result.message.tool_calls) == ("stop", CALL, None)


@pytest.mark.parametrize("stream", [False, True])
def test_required_and_named(client, stream):
    calls = [{"name": "get_weather", "parameters": {"city": "Rom"}}, {"name": "add", "parameters": {}}]
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, text, expected in (
        ("required", json.dumps(calls), [("get_weather", {"city": "Rom"}), ("add", {})]),
        (named, '{"city": "Rom"}', [("get_weather", {"city": "Rom"})]),
    ):
        options = {"tools": [WEATHER, ADD], "tool_choice": choice, "parallel_tool_calls": True}
        if stream:
            message, choices = streamed(client, text, **options)
            found = [(name, json.loads(arguments)) for _, name, arguments in message["calls"].values()]
            assert choices[-1].finish_reason == "tool_calls"
        else:
            result = ask(client, text, **options).choices[0]
            found = [(call.function.name, json.loads(call.function.arguments)) for call in result.message.tool_calls]
            assert result.finish_reason == "tool_calls"
        assert found == expected


def test_the_next_turn(client, scripted):
    """Calls and their results reach the template, arguments as an object."""
    first = ask(client, CALL, tools=[WEATHER]).choices[0].message
    call = first.tool_calls[0]
    messages = [
        {"role": "user", "content": "Weather?"},
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain SAY(Wet.)SAY"},
    ]
    assert client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content == "Wet."
    http = scripted.http()
    ids = http.post("/tokenize", json={"messages": messages, "tools": [WEATHER]}).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert f"[{call.id} get_weather Köln]" in text
    assert f"[for {call.id}]" in text
    assert '"description": "The weather"' in text


def test_reasoning(client):
    """`Reasoning text: field reasoning`, counted in the usage."""
    text = f"<think>\nHm, <tool_call> maybe.\n</think>\n\nYes.\n{CALL}"
    result = ask(client, text, tools=[WEATHER])
    message = result.choices[0].message
    assert (message.reasoning, message.content) == ("Hm, <tool_call> maybe.", "Yes.")
    assert len(message.tool_calls) == 1
    assert 5 < result.usage.completion_tokens_details.reasoning_tokens < result.usage.completion_tokens
    told, _ = streamed(client, text, tools=[WEATHER])
    assert (told["reasoning"], told["content"], len(told["calls"])) == (message.reasoning, "Yes.", 1)
    hidden = ask(client, text, extra_body={"include_reasoning": False}).choices[0].message
    assert getattr(hidden, "reasoning", None) is None


def test_reasoning_that_the_prompt_closed(client):
    text = "Four </think> no"
    for options in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        assert ask(client, text, **options).choices[0].message.content == text


def test_tokens_and_logprobs_of_hidden_text_are_not_lost(client):
    options = {"tools": [WEATHER], "logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = ask(client, CALL, **options)
    _, choices = streamed(client, CALL, **options)
    ids = [token for choice in choices for token in getattr(choice, "token_ids", None) or []]
    assert ids == whole.choices[0].token_ids
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert len(entries) == len(ids) == whole.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_legacy_functions(client, stream):
    """A client that knows `functions` gets one call in `function_call`, and sends it back with role "function"."""
    functions = [WEATHER["function"], ADD["function"]]
    for choice, text, said in (
        ("auto", f"Look. {CALL}{CALL}", "Look."),
        ({"name": "get_weather"}, '{"city": "Köln"}', ""),
    ):
        options = {"functions": functions, "function_call": choice}
        if stream:
            chunks = [chunk.choices[0] for chunk in ask(client, text, stream=True, **options)]
            calls = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
            assert [call.name for call in calls if call.name] == ["get_weather"]
            arguments = "".join(call.arguments or "" for call in calls)
            reason = chunks[-1].finish_reason
            content = "".join(chunk.delta.content or "" for chunk in chunks)
            assert not any(chunk.delta.tool_calls for chunk in chunks)
        else:
            result = ask(client, text, **options).choices[0]
            assert (result.message.function_call.name, result.message.tool_calls) == ("get_weather", None)
            arguments = result.message.function_call.arguments
            reason = result.finish_reason
            content = result.message.content or ""
        assert (json.loads(arguments), reason, content) == ({"city": "Köln"}, "function_call", said)


def test_legacy_history(client, scripted):
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "get_weather", "arguments": '{"city": "Rom"}'},
        },
        {"role": "function", "name": "get_weather", "content": "rain SAY(Wet.)SAY"},
    ]
    ids = scripted.http().post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = scripted.http().post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert "get_weather Rom]" in text
    assert "<|im_start|>tool\nrain" in text
    assert client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content == "Wet."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "a b"}]}, "functions"),
        ({"functions": [{"name": "a"}], "tools": [ADD]}, "functions"),
        ({"functions": [{"name": "a"}], "function_call": {"name": "b"}}, "function_call"),
        ({"functions": [{"name": "a"}], "function_call": "required"}, "function_call"),
        ({"function_call": {"name": "b"}}, "function_call"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice"),
        ({"structured_outputs": {"enable_in_reasoning": "yes", "regex": "a"}}, "structured_outputs"),
    ],
    ids=str,
)
def test_bad_tools_and_forms(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x", extra_body=fields)
    assert caught.value.param == param


def test_allowed_tools(client):
    """Two of three: the prompt shows all, and calls are read as ever."""
    names = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "add")]
    other = {"type": "function", "function": {"name": "other"}}
    for mode, text in (("auto", CALL), ("required", '[{"name": "get_weather", "parameters": {"city": "Köln"}}]')):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
        result = ask(client, text, tools=[WEATHER, ADD, other], tool_choice=choice).choices[0]
        assert [call.function.name for call in result.message.tool_calls] == ["get_weather"]


@pytest.mark.slow
def test_response_field_by_flag(start_server, tmp_path):
    import tokenizers_for_tests as kinds

    kinds.save_byte_level(tmp_path / "m", kinds.TOOL_TEMPLATE)
    server = start_server(
        "ScriptEngine", config={"model": str(tmp_path / "m"), "max_model_len": 999},
        reasoning_field="reasoning_content",
        tool_call_parser="none", reasoning_parser="deepseek_r1",
    )  # fmt: skip
    message = ask(server.openai(), "Hm.</think>Yes.").choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        ask(server.openai(), "x", tools=[WEATHER])


@pytest.mark.slow
def test_marks_of_reasoning_that_are_special_tokens(start_server, tmp_path):
    """They stay in the text until the reasoning is found, although special tokens are left out of answers."""
    import tokenizers_for_tests as kinds

    kinds.save_byte_level(tmp_path / "m", kinds.TOOL_TEMPLATE)
    kinds.add_special_tokens(tmp_path / "m", ["<think>", "</think>", "<other>"])
    server = start_server("ScriptEngine", config={"model": str(tmp_path / "m"), "max_model_len": 999})
    message = ask(server.openai(), "<think>Hm.</think>Yes.").choices[0].message
    assert (message.reasoning, message.content) == ("Hm.", "Yes.")
