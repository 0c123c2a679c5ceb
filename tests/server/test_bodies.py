"""Bodies before anything is made of them, and texts on their way through the threads."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
import tracemalloc

import msgspec
import pytest
import tokenizers_for_tests as kinds
from starlette.requests import Request

from jaxserve import types
from jaxserve.limits import MAX_CONTAINERS, MAX_NESTING, MAX_SCHEMA, MAX_STRINGS
from jaxserve.server.chat.conversation import prepare
from jaxserve.server.http.body import receive_body
from jaxserve.server.http.body_errors import explain
from jaxserve.server.http.errors import APIError
from jaxserve.server.http.middleware import BodyLimit
from jaxserve.server.http.request_limits import Accounts, Bodies, Body, TextThreads
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.http.state import ServerState, read_body, to_json
from jaxserve.server.images.long_strings import whole
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.ipc.messages import Ready
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.schemas.anthropic import MessagesRequest
from jaxserve.server.schemas.chat import ChatRequest, Part
from jaxserve.server.schemas.common import CompletionRequest, DetokenizeRequest
from jaxserve.server.schemas.response_items import listed
from jaxserve.server.schemas.responses import ResponsesRequest
from jaxserve.types import InvalidRequestError

CHATS = msgspec.json.Decoder(ChatRequest)
USER = b'"messages":[{"role":"user","content":"hi"}]'


def read(data: bytes) -> bytes:
    """What a handler gets of a body, which comes in pieces of 100,000 bytes."""
    pieces = [data[at : at + 100_000] for at in range(0, len(data), 100_000)] or [b""]

    async def receive():
        body = pieces.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(pieces)}

    return asyncio.run(receive_body(Request({"type": "http", "headers": []}, receive))).whole()


def error_of(data: bytes) -> APIError:
    with pytest.raises(APIError) as caught:
        read(data)
    assert caught.value.status == 400
    return caught.value


BOMBS = {
    "tools": b'{%b,"tools":[{"function":{"name":"f","parameters":{"x":[%b]}}}]}',
    "response_format": b'{%b,"response_format":{"json_schema":{"schema":{"x":[%b]}}}}',
    "structured_outputs": b'{%b,"structured_outputs":{"json":{"x":[%b]}}}',
    "input_schema": b'{%b,"tools":[{"name":"f","input_schema":{"x":[%b]}}]}',
    "output_config": b'{%b,"output_config":{"format":{"x":[%b]}}}',
    "metadata": b'{%b,"metadata":{"x":[%b]}}',
    "unknown": b'{%b,"nobody knows this":[%b]}',
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_bombs_are_refused_before_they_are_built(bomb):
    """16 MiB of empty objects: they were a gigabyte of dicts before they were refused."""
    data = bomb % (USER, b"{}," * (16 * 2**20 // 3) + b"{}")
    tracemalloc.start()
    error = error_of(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"more than {MAX_CONTAINERS} objects and lists" in error.message
    assert peak < 3 * len(data)  # its pieces, and the whole


def test_older_names_of_structured_outputs_are_refused_with_the_newer():
    body = msgspec.json.decode(b'{"prompt": "x", "guided_json": {}}', type=CompletionRequest)
    with pytest.raises(InvalidRequestError, match="structured_outputs") as refused:
        body.check()
    assert refused.value.param == "guided_json"


@pytest.mark.parametrize("name", ["tools", "response_format", "structured_outputs", "input_schema", "metadata"])
def test_schemas_have_a_limit_of_their_own(name):
    few = b'"' + b"x" * (MAX_SCHEMA - 200) + b'"'
    assert read(BOMBS[name] % (USER, few) + b" " * 1000)
    error = error_of(BOMBS[name] % (USER, few + b"," + b'"' + b"x" * 300 + b'"'))
    assert f"at most {MAX_SCHEMA} are allowed" in error.message
    assert error.param == ("tools" if name == "input_schema" else name)


def test_long_texts_are_no_schemas():
    """Prompts, messages and many tools may be longer than one schema."""
    text = json.dumps('{[x, \\" ]}' * 60_000).encode()
    for data in (b'{"prompt":%b}' % text, b'{"messages":[{"role":"user","content":%b}]}' % text, b'{"user":%b}' % text):
        assert read(data) == data
    tool = b'{"function":{"name":"f","description":"%b"}}' % (b"x" * 100_000)
    assert read(b'{"tools":[%b]}' % b",".join([tool] * 20))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting(opening):
    close = b"]" if opening == b"[" else b"}"
    deep = opening * (MAX_NESTING - 1) + b"1" + close * (MAX_NESTING - 1)
    assert read(b"[%b]" % deep)
    assert "nested too deeply" in error_of(b"[[%b]]" % deep).message
    assert "nested too deeply" in error_of(b'["%b",[[%b]]]' % (b'\\\\\\"[' * 100_000, deep)).message
    quoted = json.dumps((opening * 1000).decode()).encode()
    assert read(b'[%b,"\\\\",%b]' % (quoted, quoted))  # brackets within strings are none


@pytest.mark.parametrize(
    "rest", ['"\\ud800"', "[", "1e999", "[" * 3000 + "]" * 3000], ids=["text", "open", "number", "deep"]
)
@pytest.mark.parametrize(
    ("tokens", "message"), [("5", "tokens must be a list, got an integer"), ("[1e30]", "tokens[0]")]
)
def test_what_is_wrong_behind_the_first_error(tokens, message, rest):
    """The error that is found first is told, even if the rest is no JSON at all."""
    body = f'{{"tokens":{tokens},"other":{rest}}}'
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(body, type=DetokenizeRequest)
    answer = explain(caught.value, body)
    assert message in answer.message
    assert answer.param == "tokens"


def test_many_strings():
    assert f"more than {MAX_STRINGS} strings" in error_of(b'{"prompt":[%b"a"]}' % (b'"a",' * MAX_STRINGS)).message
    assert read(b'{"prompt":[%b1]}' % (b"12345," * 200_000))


def test_what_is_no_json_is_left_to_others():
    for data in (b"", b"{", b"\xff" * 300_000, b'{"tools":[{]}' + b" " * 300_000, b"]" * 300_000, b'"' * 300_001):
        assert read(data) == data


async def _post(app, size: int, started: asyncio.Event | None = None) -> int:
    """The status of a body of so many bytes."""
    messages = [{"type": "http.request", "body": b" " * size, "more_body": False}]
    status = 0

    async def receive():
        return messages.pop()

    async def send(message):
        nonlocal status
        status = message.get("status", status)

    try:
        await app({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send)
    except APIError as error:
        return error.status
    return status


def test_bodies_count_until_they_are_submitted():
    """Not until they have come: what they become is more than they were."""

    async def run() -> None:
        go = asyncio.Event()

        async def handler(scope, receive, send):
            await receive()
            if scope["state"]["body"].size == 1_000_000:
                await go.wait()
                scope["state"]["body"].release()
                await asyncio.sleep(60)
            await send({"type": "http.response.start", "status": 200})

        app = BodyLimit(handler, Bodies(1_000_000))
        slow = [asyncio.create_task(_post(app, 1_000_000)) for _ in range(8)]
        await asyncio.sleep(0)
        assert [await _post(app, size) for size in (999_999, 60_000)] == [503, 200]
        go.set()
        await asyncio.sleep(0.01)
        assert await _post(app, 999_999) == 200
        assert await _post(app, 1_000_001) == 413
        for task in slow:
            task.cancel()

    asyncio.run(run())


def test_what_a_body_becomes_counts():
    bodies = Bodies(1000_000)
    one = Body(bodies)
    other = Body(bodies)
    one.grow(900_000)
    one.expand(100_000_000)  # alone, it may be anything
    other.grow(1000)
    with pytest.raises(APIError) as caught:
        other.grow(100_000)
    assert (caught.value.status, caught.value.code) == (503, "too_many_bodies")
    one.release()
    other.release()
    Body(bodies).grow(900_000)


def test_keys_take_turns_with_their_texts():
    async def run() -> None:
        texts = TextThreads(threads=1)
        gate = threading.Event()
        order = []

        def work(name: str):
            return lambda: (gate.wait(10), order.append(name))

        tasks = [asyncio.create_task(texts.run("flood", 10, work("flood"))) for _ in range(50)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(texts.run("late", 10, work("late"))) for _ in range(3)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)
        assert [i for i, name in enumerate(order) if name == "late"] == [2, 4, 6]
        assert not texts._running
        assert not texts._bytes
        assert not texts._waiting
        assert texts._free == 1

    asyncio.run(run())


def test_no_key_has_all_the_threads():
    async def run() -> None:
        texts = TextThreads(threads=3)
        gate = threading.Event()
        flood = [asyncio.create_task(texts.run("flood", 10, lambda: gate.wait(10))) for _ in range(50)]
        await asyncio.sleep(0)
        assert texts.num_waiting == 48
        assert await texts.run("other", 10, lambda: 7) == 7
        assert texts.num_waiting == 48
        gate.set()
        await asyncio.gather(*flood)

    asyncio.run(run())


def test_texts_of_clients_that_left_are_not_worked_on():
    async def run() -> None:
        texts = TextThreads(threads=1)
        gate = threading.Event()
        done = []
        first = asyncio.create_task(texts.run("a", 1, lambda: gate.wait(10)))
        await asyncio.sleep(0)
        left = [asyncio.create_task(texts.run("a", 1, lambda: done.append("left"))) for _ in range(100)]
        last = asyncio.create_task(texts.run("a", 1, lambda: done.append("last")))
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        assert texts.num_waiting == 1
        gate.set()
        await asyncio.gather(first, last)
        assert done == ["last"]
        running = asyncio.create_task(texts.run("a", 1, lambda: gate.wait(10)))
        await asyncio.sleep(0)
        running.cancel()  # its thread is taken until it has ended
        with contextlib.suppress(asyncio.CancelledError):
            await running
        while texts._free < 1:
            await asyncio.sleep(0.01)
        assert not texts._running

    asyncio.run(run())


def test_texts_that_wait_are_bounded():
    """By their length, so that many short ones may; one alone is always taken."""

    async def run() -> None:
        texts = TextThreads(threads=1)
        gate = threading.Event()
        tasks = [asyncio.create_task(texts.run("a", 1, lambda: gate.wait(10)))]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(texts.run("a", size, lambda: None)) for size in (*[0] * 500, 10**9)]
        await asyncio.sleep(0)
        with pytest.raises(APIError) as caught:
            await texts.run("a", 10, lambda: None)
        assert (caught.value.status, caught.value.code) == (503, "too_much_text")
        tasks.append(asyncio.create_task(texts.run("b", 10, lambda: None)))
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())


CHAT = {"messages": [{"role": "user", "content": "hi"}], "stop_token_ids": [5], "min_tokens": 3}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required", "max_tokens": 7}


@pytest.mark.parametrize("more", [{}, FORM, TOOLS, {"max_tokens": 2**20}])
def test_parameters_are_built_and_checked_once(monkeypatch, more):
    """From a chat request to what the engine gets. All that they follow from is known before."""
    state = ServerState(ServerSettings(model_names=("m",)), EngineClient(), Metrics("m"))
    state.tokenizer = kinds.byte_level()
    sizes = {"vocab_size": 1000, "max_model_len": 1000, "page_size": 16, "max_num_seqs": 1}
    state.client.info = Ready(model_folder="", tokenizer_folder="", dtype="", eos_token_ids=(7,), **sizes)
    checked = []
    check = types._check_number
    monkeypatch.setattr(types, "_check_number", lambda name, *rest: (checked.append(name), check(name, *rest)))
    body = msgspec.convert({**CHAT, **more}, ChatRequest)
    run = asyncio.run(prepare(state, Request({"type": "http", "headers": []}), body))
    assert checked.count("temperature") == 1
    (request,) = run.generation.requests
    params = request.params
    assert params.max_tokens == min(more.get("max_tokens", 1000), 1000 - len(request.prompt_token_ids))
    assert (params.min_tokens, params.stop_token_ids) == (3, (5, *state.tokenizer.eos_token_ids))
    assert (params.grammar is not None) == (more in (FORM, TOOLS))


def test_accounts_of_keyless_servers_count_nothing():
    accounts = Accounts(10)
    with accounts.hold(None, 5, 2), accounts.hold(None, 5, 2):
        assert not accounts._counts._counts


DATA = base64.b64encode(bytes(range(256)) * 8_000).decode()  # 2.7 MB
URL = f"data:image/png;base64,{DATA}"
PICTURE = {"type": "image_url", "image_url": {"url": URL}}


def ask(body: dict, decoder: msgspec.json.Decoder, size: int = 60_000):
    """The decoded body, which comes in pieces of so many bytes; 0: the second one begins with the first data."""
    data = json.dumps(body, ensure_ascii=False).encode()
    size = size or min(data.index(start) for start in (DATA[:99].encode(), URL[:99].encode()) if start in data)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]

    async def receive():
        body = pieces.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(pieces)}

    headers = [(b"content-type", b"application/json")]
    return asyncio.run(read_body(Request({"type": "http", "headers": headers}, receive), decoder))


@pytest.mark.parametrize("size", [50_000, 0, 131_071, 10**7])
def test_long_pictures_stay_in_pieces(size):
    chat = ask({"messages": [{"role": "user", "content": ["\\\\", PICTURE, "x", PICTURE]}]}, CHATS, size)
    assert [whole(source.url) for source in chat.conversation().pictures] == [URL] * 2
    assert any(len(one.url) < len(URL) for one in chat.conversation().pictures)
    item = {"role": "user", "content": [{"type": "input_image", "image_url": URL}]}
    response = ask({"input": [item]}, msgspec.json.Decoder(ResponsesRequest), size)
    assert json.loads(to_json(listed(response.items)))[0]["content"] == item["content"]
    source = {"type": "base64", "media_type": "image/webp", "data": DATA}
    claude = ask(
        {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}], "max_tokens": 1},
        msgspec.json.Decoder(MessagesRequest), size,
    )  # fmt: skip
    (block,) = claude.messages[0].content
    assert whole(block.source.data) == DATA


@pytest.mark.parametrize(
    "content",
    [
        URL,
        [{"type": "text", "text": URL}],
        [PICTURE, {"type": "text", "text": DATA}],
        [{"type": "text", "text": "é" * 10**6}],
        [{"type": "text", "text": DATA + '"' + DATA}],
    ],
    ids=["data URL", "part", "beside a picture", "not ASCII", "escape"],
)
def test_long_texts_come_whole(content):
    chat = ask({"messages": [{"role": "user", "content": content}]}, CHATS)
    assert msgspec.json.decode(to_json(chat.messages[0].content)) == msgspec.json.decode(
        to_json(msgspec.convert(content, str | list[Part]))
    )


def test_arguments_of_calls_come_whole():
    call = {"function": {"name": "show", "arguments": {"url": URL}}}
    (message,) = ask({"messages": [{"role": "assistant", "tool_calls": [call]}]}, CHATS).messages
    assert message.tool_calls[0].function.arguments == {"url": URL}


def test_a_long_form_is_refused_though_it_is_one_string():
    with pytest.raises(APIError, match="at most 262144 are allowed"):
        ask({"messages": [{"role": "user", "content": "hi"}], "metadata": {"x": DATA}}, CHATS)
