"""What agents and chat programs send, several turns each, against a real server with the demo's tokenizer and template.

The bodies stand in agent_bodies/, with what the server has to answer. What it answers is read by the models of OpenAI's
and Anthropic's own clients, so that no field may be missing that these require.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic.types
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import TypeAdapter
from serving import DEMO, running_server
from test_clients import MODEL, TOOL, needs_demo

BODIES = sorted((Path(__file__).parent / "agent_bodies").glob("*.json"))
RESPONSE_EVENT = TypeAdapter(openai.types.responses.ResponseStreamEvent)
MESSAGE_EVENT = TypeAdapter(anthropic.types.RawMessageStreamEvent)
TURNS = [
    pytest.param(path, i, id=f"{path.stem}-{i + 1}")
    for path in BODIES
    for i in range(len(json.loads(path.read_text())["turns"]))
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Says what the last SAY(…)SAY of the prompt tells it to."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    config = {"max_model_len": 8192}
    with running_server(DEMO, log, engine="ScriptEngine", config=config, reasoning_parser="qwen3") as running:
        yield running


def parsed(arguments: str) -> Any:
    return json.loads(arguments or "{}")


def read_response(response: dict) -> dict:
    """The answer that a response is, as the files tell of it."""
    whole = openai.types.responses.Response.model_validate(response)
    assert whole.status == "completed"
    answer: dict = {"reasoning": "", "text": whole.output_text, "calls": []}
    for item in whole.output:
        match item.type:
            case "reasoning":
                answer["reasoning"] += item.content[0].text
            case "function_call":
                answer["calls"].append([item.type, item.name, item.namespace, parsed(item.arguments)])
            case "custom_tool_call":
                answer["calls"].append([item.type, item.name, item.namespace, item.input])
            case "local_shell_call":
                answer["calls"].append([item.type, None, None, item.action.model_dump(exclude_none=True)])
    return answer


def read_message(message: dict) -> dict:
    whole = anthropic.types.Message.model_validate(message)
    answer: dict = {"reasoning": "", "text": "", "calls": []}
    for block in whole.content:
        match block.type:
            case "thinking":
                answer["reasoning"] += block.thinking
            case "text":
                answer["text"] += block.text
            case "tool_use":
                answer["calls"].append([block.type, block.name, None, block.input])
    assert whole.stop_reason == ("tool_use" if answer["calls"] else "end_turn")
    return answer


def read_chat(completion: dict) -> dict:
    message = openai.types.chat.ChatCompletion.model_validate(completion).choices[0].message
    calls = [[c.type, c.function.name, None, parsed(c.function.arguments)] for c in message.tool_calls or []]
    return {"reasoning": getattr(message, "reasoning", ""), "text": message.content or "", "calls": calls}


def data_of(lines: Iterator[str]) -> Iterator[dict]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def follow_response(events: list[dict]) -> dict:
    """The answer that the deltas add up to, which must be what the last event holds."""
    parts: dict[str, dict[int, str]] = {}
    for event in events:
        RESPONSE_EVENT.validate_python(event, strict=False)
        if event["type"].endswith(".delta"):
            texts = parts.setdefault(event["type"], {})
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    last = events[-1]["response"]
    for kind, field in (("function_call_arguments", "arguments"), ("custom_tool_call_input", "input")):
        for index, text in parts.get(f"response.{kind}.delta", {}).items():
            assert last["output"][index][field] == text
    for kind in ("output_text", "reasoning_text"):
        for index, text in parts.get(f"response.{kind}.delta", {}).items():
            assert last["output"][index]["content"][0]["text"] == text
    return read_response(last)


def follow_message(events: list[dict]) -> dict:
    """The message that the deltas add up to."""
    message: dict = {}
    for event in events:
        if event["type"] == "ping":
            continue
        MESSAGE_EVENT.validate_python(event)
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"] | {"partial": ""})
            case "content_block_delta":
                kind = event["delta"]["type"].removesuffix("_delta")
                field = "partial" if kind == "input_json" else kind
                message["content"][event["index"]][field] += event["delta"].get("partial_json") or event["delta"][kind]
            case "message_delta":
                message |= event["delta"]
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = parsed(block["partial"])
    return read_message(message)


def follow_chat(chunks: list[dict]) -> dict:
    answer: dict = {"reasoning": "", "text": "", "calls": []}
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in openai.types.chat.ChatCompletionChunk.model_validate(chunk).choices:
            answer["text"] += choice.delta.content or ""
            answer["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.function.name:
                    answer["calls"].append([call.type, call.function.name, None, None])
                texts[call.index] = texts.get(call.index, "") + (call.function.arguments or "")
    for index, text in texts.items():
        answer["calls"][index][3] = parsed(text)
    return answer


READERS = {
    "/v1/responses": (read_response, follow_response),
    "/v1/messages": (read_message, follow_message),
    "/v1/chat/completions": (read_chat, follow_chat),
}


@pytest.mark.parametrize(("path", "turn"), TURNS)
def test_turns_of_clients(server, path, turn):
    """Streamed, as the client asks for it, and whole: both give the answer that the file holds."""
    recorded = json.loads(path.read_text())
    body = recorded["turns"][turn]["body"]
    expected = recorded["turns"][turn]["answer"]
    read, follow = READERS[recorded["path"].partition("?")[0]]
    with server.http(headers=recorded["headers"]) as http:
        with http.stream("POST", recorded["path"], json=body) as response:
            assert response.status_code == 200, response.read()
            streamed = follow(list(data_of(response.iter_lines())))
        whole = http.post(recorded["path"], json={**body, "stream": False, "stream_options": None})
    assert streamed == expected
    assert whole.status_code == 200, whole.text
    assert read(whole.json()) == expected


@needs_demo
class TestDemo:
    """First contact with the bundled model must not be a 400."""

    def test_tools_of_an_agent(self, demo_server):
        """The model may choose by itself, and is told which tools there are."""
        with demo_server.http() as http:
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]
            body = {"model": MODEL, "messages": messages, "tools": [TOOL], "max_tokens": 8, "temperature": 0}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            call = {"name": "get_weather", "arguments": '{"city": "Rom"}'}
            messages += [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "rain"},
            ]
            assert http.post("/v1/chat/completions", json=body).status_code == 200
            ids = http.post("/tokenize", json={"messages": messages, "tools": [TOOL]}).json()["tokens"]
            text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert '{"name": "get_weather", "description": "The weather"' in text
        assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Rom"}}</tool_call>' in text
        assert "Be brief." in text

    def test_chats_without_tools_are_as_before(self):
        """The model was trained on ChatML without tools; such prompts must not change by a character."""
        from jaxserve.text.tokenizer import load_tokenizer

        turns = [("system", "Be brief."), ("user", " hi\n"), ("assistant", "ho"), ("tool", "x")]
        messages = [{"role": role, "content": content} for role, content in turns]
        text = load_tokenizer(DEMO).render_chat(messages)
        chat = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        assert text == chat + "<|im_start|>assistant\n"


def rolling(name: str) -> str:
    return f'SAY(I roll. <tool_call>{{"name": "{name}", "arguments": {{"sides": 6}}}}</tool_call>)SAY'


@pytest.mark.parametrize("endpoint", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(server, endpoint):
    """The model calls a tool by itself, and the agent goes on with the result, whole and streamed."""
    ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    def roll(sides: int) -> str:
        """Rolls a die."""
        return f"SAY({sides} it is.)SAY"

    async def run() -> list[str]:
        model = getattr(models, endpoint)(MODEL, provider=OpenAIProvider(openai_client=server.openai_async()))
        agent = ai.Agent(model, tools=[roll], instructions="Be brief.")
        first = await agent.run(rolling("roll"))
        second = await agent.run("SAY(As before.)SAY", message_history=first.all_messages())
        async with agent.run_stream("SAY(Streamed now.)SAY", message_history=second.all_messages()) as stream:
            return [first.output, second.output, await stream.get_output()]

    assert asyncio.run(run()) == ["6 it is.", "As before.", "Streamed now."]


@pytest.mark.parametrize("endpoint", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(server, endpoint):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def roll(sides: int) -> str:
        """Rolls a die."""
        return f"SAY({sides} it is.)SAY"

    async def run() -> list[str]:
        model = getattr(agents, endpoint)(MODEL, server.openai_async())
        agent = agents.Agent("a", instructions="Be brief.", tools=[roll], model=model)
        stream = agents.Runner.run_streamed(agent, rolling("roll"))
        kinds = [event.type async for event in stream.stream_events()]
        assert "run_item_stream_event" in kinds
        history = [*stream.to_input_list(), {"role": "user", "content": "SAY(As before.)SAY"}]
        return [stream.final_output, (await agents.Runner.run(agent, history)).final_output]

    assert asyncio.run(run()) == ["6 it is.", "As before."]
