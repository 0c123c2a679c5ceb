"""/v1/messages as Claude Code uses it; what its answers hold is checked by the models of Anthropic's own client."""

from __future__ import annotations

import json

import anthropic
import httpx
import msgspec
import pytest
import tokenizers_for_tests as kinds
from pydantic import TypeAdapter
from serving import SMALL, wait_until
from test_clients import CITIES, CITY, needs_demo
from test_messages_api import CALL, MODEL, TOOLS, body, events

from jaxserve.server.chat.conversation import encode_chat
from jaxserve.server.ipc.messages import Ready
from jaxserve.server.schemas.anthropic import CountTokensRequest

EVENT = TypeAdapter(anthropic.types.RawMessageStreamEvent)
WARNING = "x-jaxserve-warning"
USER = {"role": "user", "content": "Weather?"}


def told(response: httpx.Response) -> list[dict]:
    """The events of a stream, each as Anthropic's client requires it; without the pings."""
    shown = [data for _, data in events(response) if data["type"] != "ping"]
    for data in shown:
        EVENT.validate_python(data)
    return shown


def prompt(**fields) -> str:
    """What a model is shown of a request."""
    tokenizer = kinds.byte_level(kinds.TOOL_TEMPLATE)
    sizes = {"vocab_size": 1000, "max_model_len": 10000, "page_size": 16, "max_num_seqs": 1}
    info = Ready(model_folder="", tokenizer_folder="", dtype="", eos_token_ids=(0,), **sizes)
    chat = msgspec.convert({"model": MODEL, "messages": [USER]} | fields, CountTokensRequest).to_chat()
    return tokenizer.decode(encode_chat(tokenizer, info, chat.conversation()), skip_special_tokens=False)


def test_system_messages_inside_the_conversation():
    text = prompt(
        system=[{"type": "text", "text": "First.", "cache_control": {"type": "ephemeral"}}],
        messages=[USER, {"role": "system", "content": [{"type": "text", "text": "Agents: none."}]}, USER],
    )
    assert text.index("system\nFirst.") < text.index("Weather?") < text.index("system\nAgents: none.")


def test_results_of_tools():
    use = {"type": "tool_use", "id": "t", "name": "get_weather", "input": {"city": "Rom"}}
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    results = [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "rain"}, document]},
        {"type": "tool_result", "tool_use_id": "t", "content": "no such city", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "So?"},
    ]
    thoughts = [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": "Hm.", "signature": "s"}]
    text = prompt(
        messages=[USER, {"role": "assistant", "content": [*thoughts, use]}, {"role": "user", "content": results}]
    )
    assert "<think>Hm.</think>[t get_weather Rom]" in text
    for shown in ("rain\nT\nD[for t]", "Error: no such city[for t]", "tool\n[for t]", "user\nSo?"):
        assert shown in text


def test_tools_that_anthropic_defines(scripted):
    """The shell and the editor run at the client and are functions here; the others would run on the server."""
    tools = [
        *TOOLS,
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
    ]
    call = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    with scripted.http() as http:
        servers = [{"type": "url", "url": "https://example.com", "name": "m"}]
        answer = http.post("/v1/messages?beta=true", json=body(call, tools=tools, mcp_servers=servers))
        counted = http.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": [USER], "tools": tools})
    assert answer.status_code == counted.status_code == 200
    for response in (answer, counted):
        assert "web_search_20250305" in response.headers[WARNING]
        assert "computer_20250124" in response.headers[WARNING]
    assert "mcp_servers" in answer.headers[WARNING]
    wait_until(lambda: "web_search_20250305" in scripted.log.read_text())
    assert [(b["name"], b["input"]) for b in answer.json()["content"]] == [("bash", {"command": "ls"})]
    shown = prompt(tools=tools)
    assert '"command"' in shown
    assert "str_replace_based_edit_tool" in shown
    assert "web_search" not in shown
    assert WARNING not in scripted.http().post("/v1/messages", json=body("x", tools=TOOLS)).headers


def test_names_of_128_characters(scripted):
    name = "mcp__" + "x" * 123
    call = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
    answer = scripted.http().post("/v1/messages", json=body(call, tools=[{"name": name, "input_schema": {}}])).json()
    assert answer["content"][0]["name"] == name


@needs_demo
@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_formats_bind(demo_server, field):
    form = {"type": "json_schema", "schema": CITY}
    fields = {"output_config": {"format": form, "effort": "max"}} if field == "output_config" else {field: form}
    request = {"model": MODEL, "max_tokens": 100, "messages": [USER], "temperature": 0, **fields}
    answer = demo_server.http().post("/v1/messages", json=request).json()
    assert json.loads(answer["content"][0]["text"]) in CITIES


def test_events(scripted):
    text = f"<think>Hm. Well.</think>Look. {CALL}"
    whole = anthropic.types.Message.model_validate(
        scripted.http().post("/v1/messages", json=body(text, tools=TOOLS)).json()
    )
    response = scripted.http().post("/v1/messages", json=body(text, tools=TOOLS, stream=True))
    assert [name for name, _ in events(response)][:2] == ["message_start", "ping"]
    shown = told(response)
    assert shown[0]["message"]["usage"]["output_tokens"] == 0
    thinking = [data["delta"]["type"] for data in shown if data["type"] == "content_block_delta" and data["index"] == 0]
    assert thinking[-1] == "signature_delta"
    assert set(thinking[:-1]) == {"thinking_delta"}
    signature = next(d["delta"]["signature"] for d in shown if d.get("delta", {}).get("type") == "signature_delta")
    assert signature == whole.content[0].signature != ""
    assert shown[-2]["usage"]["output_tokens"] == whole.usage.output_tokens > 0


def test_hidden_thinking(scripted):
    thinking = {"type": "adaptive", "display": "omitted"}
    answer = scripted.http().post("/v1/messages", json=body("<think>Hm.</think>Yes.", thinking=thinking)).json()
    assert [block["type"] for block in answer["content"]] == ["text"]


def test_calls_with_half_characters(scripted):
    """An answer with `\\ud83d` alone, which no JSON of ours can carry, is no error of the server's."""
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud83d"}}</tool_call>'
    answer = scripted.http().post("/v1/messages", json=body(call, tools=TOOLS))
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][0]["input"] == {"city": "\ufffd"}


class TestBudgets:
    """`thinking.budget_tokens` closes the reasoning by force, and the answer follows."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_reasoning_ends_at_the_budget(self, scripted, stream):
        text = "<think>one two three four five six seven eight nine ten</think>never|THEN|The answer."
        thinking = {"type": "enabled", "budget_tokens": 12}
        with scripted.anthropic() as client:
            if stream:
                with client.messages.stream(**body(text, thinking=thinking)) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(**body(text, thinking=thinking))
            free = client.messages.create(**body(text, thinking=thinking | {"budget_tokens": 999}))
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert "one two three four five six seven eight nine ten".startswith(message.content[0].thinking)
        assert 3 < len(message.content[0].thinking) < 40
        assert message.content[1].text == "The answer."
        assert message.stop_reason == "end_turn"
        assert free.content[0].thinking.endswith("ten")
        assert message.usage.input_tokens == free.usage.input_tokens

    def test_it_counts_tokens(self, scripted):
        """As vLLM's field in chats, where the usage tells the reasoning's tokens."""
        text = "<think>one two three four five six</think>never|THEN|The answer."
        request = {"model": MODEL, "messages": [{"role": "user", "content": f"SAY({text})SAY"}]}
        http = scripted.http()
        for budget in (1, 2, 7):
            answer = http.post("/v1/chat/completions", json=request | {"thinking_token_budget": budget}).json()
            assert answer["choices"][0]["message"]["content"] == "The answer."
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
        refused = http.post("/v1/chat/completions", json=request | {"thinking_token_budget": 5, "n": 2})
        assert refused.json()["error"]["param"] == "thinking_token_budget"

    def test_max_tokens_are_never_exceeded(self, scripted):
        text = "<think>one two three four five six</think>never|THEN|The answer is longer than that."
        for most in (3, 12, 14, 20):
            answer = (
                scripted.http()
                .post(
                    "/v1/messages", json=body(text, max_tokens=most, thinking={"type": "enabled", "budget_tokens": 10})
                )
                .json()
            )
            assert answer["usage"]["output_tokens"] == most
            assert answer["stop_reason"] == "max_tokens"

    @pytest.mark.slow
    @needs_demo
    def test_the_model_goes_on_from_its_own_tokens(self, start_server):
        """The real engine: what follows the forced end is what it says to the prompt, its reasoning and the mark."""
        server = start_server(engine=None, config=SMALL, reasoning_parser="deepseek_r1")
        messages = [{"role": "user", "content": "Write a Python function `is_dir`."}]
        request = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
        http = server.http()
        free = http.post("/v1/chat/completions", json=request).json()["choices"][0]
        held = http.post("/v1/chat/completions", json=request | {"thinking_token_budget": 6}).json()
        ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        mark = http.post("/tokenize", json={"prompt": "\n</think>\n\n", "add_special_tokens": False}).json()["tokens"]
        again = {"model": MODEL, "prompt": ids + free["token_ids"][:6] + mark, "temperature": 0, "max_tokens": 18}
        expected = http.post("/v1/completions", json=again).json()["choices"][0]["text"]
        assert held["choices"][0]["message"]["content"].strip() == expected.strip()
        assert held["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6

    @pytest.mark.slow
    @needs_demo
    def test_a_form_binds_after_the_forced_end(self, start_server):
        server = start_server(engine=None, config=SMALL, reasoning_parser="deepseek_r1")
        request = {
            "model": MODEL, "max_tokens": 100, "messages": [USER], "temperature": 0,
            "thinking": {"type": "enabled", "budget_tokens": 6},
            "output_config": {"format": {"type": "json_schema", "schema": CITY}},
        }  # fmt: skip
        thinking, text = server.http().post("/v1/messages", json=request).json()["content"]
        assert thinking["thinking"]
        assert json.loads(text["text"]) in CITIES
