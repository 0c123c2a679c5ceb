"""/v1/responses as Codex uses it: its kinds of tools and items, background, events, and what is left out."""

from __future__ import annotations

import json

import openai
import pytest
from serving import wait_until
from test_agents import data_of, follow_response
from test_clients import CITIES, CITY, needs_demo
from test_responses import CALL, MODEL, TOOLS, ask

WARNING = "x-jaxserve-warning"
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}
DOCS = {
    "type": "namespace",
    "name": "mcp__docs",
    "description": "Docs.",
    "tools": [
        {"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}},
        {"type": "custom", "name": "note"},
    ],
}
SLOW = "SAYSLOWLY(" + "word " * 100 + ")SAY"


@pytest.fixture(scope="module")
def client(scripted):
    return scripted.openai()


@pytest.fixture(scope="module")
def http(scripted):
    return scripted.http()


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def prompt_of(http, **body) -> int:
    return http.post("/v1/responses/input_tokens", json={"model": MODEL, **body}).json()["input_tokens"]


class TestTools:
    @pytest.mark.slow
    def test_what_cannot_run_here_is_left_out_and_told(self, scripted, http):
        tools = [*TOOLS, {"type": "web_search", "filters": {}}, {"type": "mcp\n", "server_label": "x"}]
        for stream in (False, True):
            body = {"model": MODEL, "input": f"SAY({CALL})SAY", "tools": tools, "stream": stream}
            response = http.post("/v1/responses", json=body)
            assert response.status_code == 200, response.text
            assert response.headers[WARNING].startswith("tools of type 'web_search' do not run here; ")
            assert "'mcp\\n'" in response.headers[WARNING]
        assert "tools of type 'web_search' do not run here" in scripted.log.read_text()
        assert WARNING not in http.post("/v1/responses", json={"model": MODEL, "input": "x", "tools": TOOLS}).headers

    def test_the_response_tells_what_was_kept(self, client):
        result = ask(client, "x", tools=[*TOOLS, PATCH | {"format": GRAMMAR}, DOCS, {"type": "local_shell"}])
        assert [tool.type for tool in result.tools] == ["function", "custom", "namespace", "local_shell"]
        assert result.tools[1].format.definition == "start: /x+/"
        assert [tool.name for tool in result.tools[2].tools] == ["search", "note"]

    def test_the_model_is_told_of_grammars_and_namespaces(self, http):
        plain = prompt_of(http, input="x", tools=[PATCH])
        assert prompt_of(http, input="x", tools=[PATCH | {"format": GRAMMAR}]) > plain + 20
        assert prompt_of(http, input="x", tools=[PATCH, DOCS]) > plain + 40

    @pytest.mark.parametrize(
        "arguments", ['{"input": "a\\u00e9\\ud83d\\ude00\\n"}', '{"patch": "aé😀\\n"}', '{"input": "aé😀\\n", "x": 1}']
    )
    def test_free_text(self, http, arguments):
        body = {"model": MODEL, "tools": [PATCH], "input": f"SAY({call('apply_patch', arguments)})SAY"}
        (item,) = http.post("/v1/responses", json=body).json()["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", "aé😀\n")
        events = list(data_of(http.post("/v1/responses", json=body | {"stream": True}).iter_lines()))
        assert follow_response(events)["calls"] == [["custom_tool_call", "apply_patch", None, "aé😀\n"]]
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[-4:] == [
            "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done", "completed",
        ]  # fmt: skip
        if arguments.startswith('{"input": "a\\u'):
            assert kinds.count("custom_tool_call_input.delta") > 3

    def test_namespaces(self, client):
        text = call("mcp__docs__search", '{"q": 1}') + call("mcp__docs__note", '{"input": "n"}')
        items = ask(client, text, tools=[DOCS]).output
        assert [(i.type, i.name, i.namespace) for i in items] == [
            ("function_call", "search", "mcp__docs"),
            ("custom_tool_call", "note", "mcp__docs"),
        ]

    def test_a_shell_command_that_was_cut_short_is_none(self, client):
        text = call("local_shell", '{"command": ["rm", "-r", "/tmp/x"]}')
        result = ask(client, text, tools=[{"type": "local_shell"}], max_output_tokens=60)
        assert result.status == "incomplete"
        for item in result.output:
            assert item.type != "local_shell_call" or item.action.command == []
        (item,) = ask(client, text, tools=[{"type": "local_shell"}]).output
        assert item.action.command == ["rm", "-r", "/tmp/x"]

    @pytest.mark.parametrize("kind", ["function", "web_search", "namespace"])
    def test_too_many(self, http, kind):
        many = [{"type": kind if kind != "namespace" else "function", "name": f"f{i}"} for i in range(1000)]
        tools = [{"type": "namespace", "name": "n", "tools": many}] if kind == "namespace" else many
        response = http.post("/v1/responses", json={"model": MODEL, "input": "x", "tools": tools})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")

    def test_choices(self, http, client):
        for choice in ({"type": "custom", "name": "apply_patch"}, {"type": "function", "name": "search"}):
            (item,) = ask(client, '{"input": "x"}', tools=[PATCH, DOCS], tool_choice=choice).output
            assert item.name == choice["name"]
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]}
        text = '[{"name": "apply_patch", "parameters": {"input": "x"}}]'
        (item,) = ask(client, text, tools=[PATCH, DOCS], tool_choice=allowed).output
        assert item.input == "x"

    @pytest.mark.slow
    @needs_demo
    def test_a_forced_function_of_a_namespace_is_held_to_its_schema(self, demo_server):
        tool = {"type": "function", "name": "get_weather", "parameters": CITY}
        tools = [{"type": "namespace", "name": "mcp__w", "description": "", "tools": [tool]}]
        choice = {"type": "function", "name": "get_weather", "namespace": "mcp__w"}
        options = {"tools": tools, "tool_choice": choice, "max_output_tokens": 100, "temperature": 0}
        (item,) = demo_server.openai().responses.create(model=MODEL, input="Weather?", **options).output
        assert json.loads(item.arguments) in CITIES
        assert (item.name, item.namespace) == ("get_weather", "mcp__w")


class TestItems:
    def test_references(self, client, http):
        """An item that is stored here stands for itself; another one is dropped, and the header says so."""
        first = ask(client, f"Look. {CALL}", tools=TOOLS)
        message, made = first.output
        output = {"type": "function_call_output", "call_id": made.call_id, "output": "rain SAY(Wet.)SAY"}
        question = {"role": "user", "content": "Weather?"}
        references = [{"type": "item_reference", "id": message.id}, {"id": made.id}]
        response = http.post("/v1/responses", json={"model": MODEL, "input": [question, *references, output]})
        assert response.json()["output"][0]["content"][0]["text"] == "Wet."
        assert WARNING not in response.headers
        spelled = [item.model_dump(exclude_none=True) for item in first.output]
        counts = {prompt_of(http, input=[question, *items, output]) for items in (references, spelled)}
        assert len(counts) == 1
        lost = [question, {"type": "item_reference", "id": "rs_x"}, output]
        response = http.post("/v1/responses", json={"model": MODEL, "input": lost})
        assert response.status_code == 200
        assert response.headers[WARNING] == "input[1] refers to 'rs_x', which is not stored here, or is there already"

    def test_references_do_not_multiply(self, client, http):
        """Some bytes of input do not become an answer's length each."""
        (item,) = ask(client, "word " * 200).output
        once = [{"type": "item_reference", "id": item.id}, {"role": "user", "content": "x"}]
        assert prompt_of(http, input=[*once[:1] * 100, *once[1:]]) == prompt_of(http, input=once)

    def test_items_of_other_servers_are_left_out(self, http):
        foreign = [{"type": "web_search_call", "id": "ws", "status": "completed", "action": {}}]
        foreign += [{"type": "compaction", "encrypted_content": "x"}]
        response = http.post(
            "/v1/responses", json={"model": MODEL, "input": [*foreign, {"role": "user", "content": "x"}]}
        )
        assert response.status_code == 200
        assert response.headers[WARNING].count("is of another server") == 2

    def test_reasoning_comes_back(self, client, http):
        """As its text, as what this server calls encrypted, or as a summary; what others encrypt cannot be read."""
        result = ask(client, "<think>Hm, well.</think>Yes.", include=["reasoning.encrypted_content"], store=False)
        item = result.output[0].model_dump(exclude_none=True)
        assert item["encrypted_content"]
        assert ask(client, "<think>Hm.</think>Yes.").output[0].encrypted_content is None
        ends = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "So?"}]

        def tokens(**reasoning) -> int:
            return prompt_of(http, input=[{"type": "reasoning", "id": "rs", "summary": [], **reasoning}, *ends])

        shown = tokens(content=item["content"])
        assert shown == tokens(encrypted_content=item["encrypted_content"])
        assert shown == tokens(summary=[{"type": "summary_text", "text": "Hm, well."}], encrypted_content="gAAA")
        assert shown > tokens(encrypted_content="gAAA") == tokens(encrypted_content="jaxserve.reasoning:%")

    def test_tools_that_items_bring(self, client):
        """The same tools may come again and again."""
        items = [{"type": "additional_tools", "role": "developer", "tools": TOOLS}] * 2
        items += [{"type": "tool_search_output", "execution": "client", "tools": [DOCS]}] * 2
        items += [{"role": "user", "content": f"SAY({CALL})SAY"}]
        assert client.responses.create(model=MODEL, input=items).output[0].type == "function_call"


class TestEvents:
    @pytest.mark.slow
    def test_background_and_stream(self, client):
        events = list(client.responses.create(model=MODEL, input=SLOW, background=True, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[0].response.background is True
        name = events[0].response.id
        last = events[-1]
        assert last.type == "response.completed"
        assert client.responses.retrieve(name).output_text == last.response.output_text == "word " * 100
        again = list(client.responses.retrieve(name, stream=True, starting_after=4))
        assert again == events[5:]
        assert list(client.responses.retrieve(name, stream=True)) == events

    @pytest.mark.slow
    def test_it_goes_on_when_the_client_leaves_and_can_be_followed(self, client, http):
        stream = client.responses.create(model=MODEL, input=SLOW, background=True, stream=True)
        name = next(iter(stream)).response.id
        stream.close()
        assert client.responses.retrieve(name).status in ("queued", "in_progress")
        rest = list(client.responses.retrieve(name, stream=True, starting_after=0))
        assert rest[0].sequence_number == 1
        assert rest[-1].type == "response.completed"

    def test_cancelled(self, client):
        stream = client.responses.create(model=MODEL, input=SLOW, background=True, stream=True)
        name = next(iter(stream)).response.id
        assert client.responses.cancel(name).status == "cancelled"
        assert not any(event.type == "response.completed" for event in stream)
        assert client.responses.retrieve(name).status == "cancelled"

    def test_what_has_no_events(self, client, http):
        plain = ask(client, "x")
        response = http.get(f"/v1/responses/{plain.id}?stream=true")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")
        name = ask(client, "x", background=True, stream=True)
        name = next(iter(name)).response.id
        response = http.get(f"/v1/responses/{name}?stream=true&starting_after=x")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "starting_after")


class TestInput:
    def test_items_are_listed(self, client, http):
        items = [{"role": "user", "content": f"number {i}"} for i in range(3)]
        items += [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
        items += [{"type": "function_call_output", "call_id": "c", "output": "1"}]
        name = client.responses.create(model=MODEL, input=items).id
        page = client.responses.input_items.list(name, order="asc")
        assert [item.type for item in page] == ["message"] * 3 + ["function_call", "function_call_output"]
        assert page.data[1].content[0].text == "number 1"
        newest = http.get(f"/v1/responses/{name}/input_items", params={"limit": 2}).json()
        assert [item["type"] for item in newest["data"]] == ["function_call_output", "function_call"]
        assert (newest["has_more"], newest["last_id"]) == (True, newest["data"][1]["id"])
        older = list(client.responses.input_items.list(name, after=newest["last_id"]))
        assert [item.content[0].text for item in older] == ["number 2", "number 1", "number 0"]
        (only,) = client.responses.input_items.list(ask(client, "x").id)
        assert (only.role, only.content[0].text) == ("user", "SAY(x)SAY")

    @pytest.mark.parametrize(
        ("field", "value"), [("limit", "0"), ("limit", "x"), ("order", "up"), ("after", "nothing")]
    )
    def test_bad_queries(self, client, http, field, value):
        name = ask(client, "x").id
        response = http.get(f"/v1/responses/{name}/input_items", params={field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)

    def test_tokens_are_counted(self, client):
        options = {"tools": TOOLS, "instructions": "Be brief."}
        counted = client.responses.input_tokens.count(model=MODEL, input="SAY(x)SAY", **options)
        assert counted.object == "response.input_tokens"
        first = ask(client, "x", **options)
        assert counted.input_tokens == first.usage.input_tokens
        longer = client.responses.input_tokens.count(model=MODEL, input="SAY(x)SAY", previous_response_id=first.id)
        second = ask(client, "x", previous_response_id=first.id)
        assert longer.input_tokens == second.usage.input_tokens
        with pytest.raises(openai.BadRequestError, match="no message"):
            client.responses.input_tokens.count(model=MODEL)

    def test_fields_that_clients_send(self, http):
        fields = {
            "prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "auto", "client_metadata": {"a": "b"},
            "text": {"verbosity": "low"}, "max_tool_calls": 3, "prompt_cache_retention": "24h",
            "include": ["reasoning.encrypted_content", "web_search_call.action.sources"], "stream_options": None,
        }  # fmt: skip
        answer = http.post("/v1/responses", json={"model": MODEL, "input": "SAY(x)SAY", **fields}).json()
        response = openai.types.responses.Response.model_validate(answer)
        assert (response.prompt_cache_key, response.safety_identifier, response.max_tool_calls) == ("k", "s", 3)
        assert (response.text.verbosity, response.text.format.type) == ("low", "text")
        assert response.usage.input_tokens_details.cache_write_tokens == 0


def test_memory_of_custom_calls(client, http):
    """What a response called is in the conversation that the next one goes on from."""
    first = ask(client, call("apply_patch", '{"input": "x"}'), tools=[PATCH])
    made = first.output[0]
    output = {"type": "custom_tool_call_output", "call_id": made.call_id, "output": "SAY(Done.)SAY"}
    second = client.responses.create(model=MODEL, input=[output], previous_response_id=first.id)
    assert second.output_text == "Done."
    question = {"role": "user", "content": f"SAY({call('apply_patch', json.dumps({'input': 'x'}))})SAY"}
    spelled = [question, made.model_dump(exclude_none=True), output]
    assert second.usage.input_tokens == prompt_of(http, input=spelled)
    wait_until(lambda: http.get(f"/v1/responses/{second.id}").status_code == 200)
