"""Clients of others, which bring their own idea of the API; each is tested where it is installed. Tool calls and
objects come from the real engine, held to their schema, or from one that says what it is told to."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Literal

import pytest
from pydantic import BaseModel
from serving import DEMO
from test_tools_http import CALL, WEATHER

MODEL = "test-model"
CITY = {"type": "object", "properties": {"city": {"enum": ["Rom", "Oslo"]}}, "required": ["city"]}
CITY |= {"title": "get_weather", "description": "The weather", "additionalProperties": False}
CITIES = ({"city": "Rom"}, {"city": "Oslo"})
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": CITY}}
QUESTION = [{"role": "user", "content": "Weather?"}]
TEXT = "Grüße aus Köln: naïve café, and more 😀."


class Weather(BaseModel, extra="forbid"):
    """The weather."""

    city: Literal["Rom", "Oslo"]


needs_demo = pytest.mark.skipif(not DEMO.is_dir(), reason="the bundled model is missing")


def say(text: str) -> str:
    """A prompt that the scripted engine answers with `text`."""
    return f"SAY({text})SAY"


@pytest.mark.slow
class TestLangChain:
    @pytest.fixture(scope="class")
    def chat(self):
        """A function from a server to a model of it."""
        langchain = pytest.importorskip("langchain_openai")

        def make(server, **options):
            url = f"{server.url}/v1"
            return langchain.ChatOpenAI(
                model=MODEL, base_url=url, api_key="none", temperature=0, max_retries=0, **options
            )

        return make

    def test_text_whole_and_streamed(self, chat, scripted):
        model = chat(scripted, stream_usage=True)
        whole = model.invoke(say(TEXT))
        chunks = list(model.stream(say(TEXT)))
        total = sum(chunks[1:], chunks[0])
        assert whole.content == total.content == TEXT
        assert len(chunks) > 5
        assert whole.usage_metadata == total.usage_metadata
        assert whole.usage_metadata["output_tokens"] > 5
        assert whole.response_metadata["finish_reason"] == total.response_metadata["finish_reason"] == "stop"

    def test_async(self, chat, scripted):
        async def run():
            model = chat(scripted)
            answers = await asyncio.gather(*(model.ainvoke(say(f"number {i}")) for i in range(8)))
            streamed = [chunk.content async for chunk in model.astream(say("as it comes"))]
            return [answer.content for answer in answers], "".join(streamed)

        assert asyncio.run(run()) == ([f"number {i}" for i in range(8)], "as it comes")

    def test_the_model_chooses_to_call(self, chat, scripted):
        model = chat(scripted).bind_tools([WEATHER])
        whole = model.invoke(say(f"Let me look.\n{CALL}{CALL}"))
        chunks = list(model.stream(say(f"Let me look.\n{CALL}{CALL}")))
        total = sum(chunks[1:], chunks[0])
        for message in (whole, total):
            assert message.content == "Let me look."
            assert [(call["name"], call["args"]) for call in message.tool_calls] == [
                ("get_weather", {"city": "Köln"})
            ] * 2
            assert message.response_metadata["finish_reason"] == "tool_calls"
        assert sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 4
        assert model.invoke(say("No need.")).tool_calls == []

    def test_the_next_turn(self, chat, scripted):
        from langchain_core.messages import HumanMessage, ToolMessage

        model = chat(scripted).bind_tools([WEATHER])
        question = HumanMessage(say(CALL))
        answer = model.invoke([question])
        result = ToolMessage(say("Wet."), tool_call_id=answer.tool_calls[0]["id"])
        assert model.invoke([question, answer, result]).content == "Wet."

    @needs_demo
    @pytest.mark.parametrize("choice", ["any", "get_weather"])  # LangChain's word for "required", and a name
    def test_forced_calls(self, chat, demo_server, choice):
        model = chat(demo_server, max_tokens=100).bind_tools([TOOL], tool_choice=choice, parallel_tool_calls=False)
        whole = model.invoke("Weather?")
        chunks = list(model.stream("Weather?"))
        total = sum(chunks[1:], chunks[0])
        for message in (whole, total):
            (call,) = message.tool_calls
            assert call["name"] == "get_weather"
            assert call["args"] in CITIES
        assert whole.tool_calls[0]["args"] == total.tool_calls[0]["args"]

    @needs_demo
    def test_objects(self, chat, demo_server):
        model = chat(demo_server, max_tokens=100)
        models = [model.with_structured_output(CITY, method=name) for name in ("json_schema", "function_calling")]

        async def run():
            return await asyncio.gather(*(model.ainvoke("Weather?") for model in models))

        for answer in [*(model.invoke("Weather?") for model in models), *asyncio.run(run())]:
            assert answer in CITIES

    @needs_demo
    def test_classes(self, chat, demo_server):
        model = chat(demo_server, max_tokens=100).with_structured_output(Weather, method="json_schema")
        assert isinstance(model.invoke("Weather?"), Weather)
        *_, last = model.stream("Weather?")
        assert isinstance(last, Weather)

    def test_json_mode(self, chat, scripted):
        model = chat(scripted).with_structured_output(None, method="json_mode")
        assert model.invoke(say('{"city": "Rom"}')) == {"city": "Rom"}

    @needs_demo
    def test_logprobs_and_several_answers(self, chat, demo_server):
        from langchain_core.messages import HumanMessage

        model = chat(demo_server, max_tokens=6, logprobs=True, top_logprobs=2)
        entries = model.invoke("Hello").response_metadata["logprobs"]["content"]
        assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in entries)
        several = chat(demo_server, max_tokens=6, n=3).generate([[HumanMessage("Hello")]])
        assert len(several.generations[0]) == 3

    def test_responses_api(self, chat, scripted):
        model = chat(scripted, use_responses_api=True)
        chunks = list(model.stream(say("Hello there")))
        assert model.invoke(say("Hello there")).text == sum(chunks[1:], chunks[0]).text == "Hello there"
        (call,) = model.bind_tools([WEATHER]).invoke(say(CALL)).tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Köln"})

    def test_the_reason_of_a_refusal(self, chat, scripted):
        import openai

        with pytest.raises(openai.BadRequestError, match="temperature must be a number <= 10"):
            chat(scripted).invoke("x", temperature=11)


class TestLiteLLM:
    @pytest.fixture(scope="class")
    def litellm(self):
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
        return pytest.importorskip("litellm")

    @staticmethod
    def to(server, text: str, **options) -> dict:
        where = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
        return where | {"messages": [{"role": "user", "content": text}], "temperature": 0} | options

    def together(self, litellm, request: dict):
        """The streamed answer as one."""
        chunks = list(litellm.completion(**request, stream=True, stream_options={"include_usage": True}))
        assert len(chunks) > 4
        return litellm.stream_chunk_builder(chunks, messages=request["messages"])

    def test_text_whole_and_streamed(self, litellm, scripted):
        request = self.to(scripted, say(TEXT))
        whole = litellm.completion(**request)
        total = self.together(litellm, request)
        for answer in (whole, total):
            assert answer.choices[0].message.content == TEXT
            assert answer.choices[0].finish_reason == "stop"
        assert whole.usage.completion_tokens == total.usage.completion_tokens > 5
        assert whole.usage.prompt_tokens == total.usage.prompt_tokens

    def test_async(self, litellm, scripted):
        async def run():
            requests = [self.to(scripted, say(f"number {i}")) for i in range(8)]
            answers = await asyncio.gather(*(litellm.acompletion(**request) for request in requests))
            stream = await litellm.acompletion(**self.to(scripted, say("as it comes")), stream=True)
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return [answer.choices[0].message.content for answer in answers], "".join(texts)

        assert asyncio.run(run()) == ([f"number {i}" for i in range(8)], "as it comes")

    def test_the_model_chooses_to_call(self, litellm, scripted):
        request = self.to(scripted, say(f"{CALL}{CALL}"), tools=[WEATHER], tool_choice="auto")
        for answer in (litellm.completion(**request), self.together(litellm, request)):
            assert answer.choices[0].finish_reason == "tool_calls"
            assert called(answer) == [("get_weather", {"city": "Köln"})] * 2

    def test_the_next_turn(self, litellm, scripted):
        request = self.to(scripted, say(CALL), tools=[WEATHER])
        message = litellm.completion(**request).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": say("Wet.")}
        request["messages"] += [message, result]
        assert litellm.completion(**request).choices[0].message.content == "Wet."

    @needs_demo
    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
    def test_forced_calls(self, litellm, demo_server, choice):
        options = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 100}
        request = self.to(demo_server, "Weather?", **options)
        whole = called(litellm.completion(**request))
        total = called(self.together(litellm, request))
        assert whole == total
        ((name, arguments),) = whole
        assert name == "get_weather"
        assert arguments in CITIES

    @needs_demo
    def test_objects(self, litellm, demo_server):
        form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": CITY, "strict": True}}
        request = self.to(demo_server, "Weather?", response_format=form, max_tokens=100)
        for answer in (litellm.completion(**request), self.together(litellm, request)):
            assert json.loads(answer.choices[0].message.content) in CITIES

    @needs_demo
    def test_text_completion(self, litellm, demo_server):
        request = self.to(demo_server, "", max_tokens=6) | {
            "prompt": "import os\n",
            "model": f"text-completion-openai/{MODEL}",
        }
        del request["messages"]
        text = litellm.text_completion(**request).choices[0].text
        assert "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**request, stream=True)) == text

    def test_the_reason_of_a_refusal(self, litellm, scripted):
        with pytest.raises(litellm.BadRequestError, match="temperature must be a number <= 10"):
            litellm.completion(**self.to(scripted, "x", temperature=11))


def called(answer) -> list[tuple[str, dict]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in answer.choices[0].message.tool_calls]


@needs_demo
def test_instructor(demo_server):
    instructor = pytest.importorskip("instructor")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(demo_server.openai(), mode=mode)
        options = {"model": MODEL, "max_tokens": 100, "temperature": 0, "max_retries": 0}
        answer = client.chat.completions.create(response_model=Weather, messages=QUESTION, **options)
        assert isinstance(answer, Weather)


@needs_demo
@pytest.mark.parametrize("endpoint", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(demo_server, endpoint):
    ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    model = getattr(models, endpoint)(MODEL, provider=OpenAIProvider(openai_client=demo_server.openai_async()))
    kinds = (ai.ToolOutput(Weather), ai.NativeOutput(Weather))
    options = {"max_tokens": 100, "temperature": 0}

    async def run():
        agents = [ai.Agent(model, output_type=kind, model_settings=options) for kind in kinds]
        return [(await agent.run("Weather?")).output for agent in agents]

    assert all(isinstance(answer, Weather) for answer in asyncio.run(run()))


@needs_demo
@pytest.mark.parametrize("endpoint", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(demo_server, endpoint):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    model = getattr(agents, endpoint)(MODEL, demo_server.openai_async())
    asked = []

    @agents.function_tool
    def get_weather(city: Literal["Rom", "Oslo"]) -> str:
        """The weather"""
        asked.append(city)
        return "rain"

    options = {"max_tokens": 100, "temperature": 0}
    forced = agents.ModelSettings(**options, tool_choice="required", parallel_tool_calls=False)
    teller = agents.Agent("a", output_type=Weather, model=model, model_settings=agents.ModelSettings(**options))
    caller = agents.Agent(
        "b", tools=[get_weather], tool_use_behavior="stop_on_first_tool", model=model, model_settings=forced
    )

    async def run():
        return [(await agents.Runner.run(agent, "Weather?")).final_output for agent in (teller, caller)]

    told, called = asyncio.run(run())
    assert isinstance(told, Weather)
    assert called == "rain"
    assert asked in (["Rom"], ["Oslo"])
