"""Front and engine in one process, joined by a real socket: several fronts, bad frames, fronts that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest
from fake_engine import ParrotEngine, SlowEngine

from jaxserve.config import EngineConfig
from jaxserve.types import EngineDeadError, InvalidRequestError, Request, SamplingParams, SequenceUpdate, StepOutput
from server import bridge, messages
from server.bridge import EngineServer
from server.client import EngineClient
from server.messages import Ready, Submit, frame_length, to_frame

READY = Ready(
    model_folder="x",
    tokenizer_folder="x",
    dtype="float32",
    max_model_len=256,
    vocab_size=100,
    eos_token_ids=(),
    page_size=16,
    max_num_seqs=4,
)


def request(request_id: str, prompt=(50, 51), **params) -> Request:
    return Request(
        request_id=request_id, prompt_token_ids=list(prompt), params=SamplingParams(**{"max_tokens": 4, **params})
    )


@contextlib.contextmanager
def engine_at(path: str, engine):
    server = EngineServer(path)
    thread = threading.Thread(target=server.run, args=(engine, READY), daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        server.close()


async def connected(path: str) -> EngineClient:
    client = EngineClient()
    await client.connect(path, lambda: True)
    await client.wait_ready()
    return client


async def tokens_of(client: EngineClient, *requests: Request) -> list[int]:
    async with contextlib.aclosing(client.generate(requests)) as batches:
        return [token async for updates in batches for update in updates for token in update.token_ids]


async def until(condition) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("timed out")


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "engine.sock")


@pytest.fixture
def config(tmp_path):
    return EngineConfig(model=str(tmp_path))


def test_fronts_with_the_same_request_ids_are_kept_apart(path, config):
    async def run():
        first, second = await connected(path), await connected(path)
        answers = await asyncio.gather(
            tokens_of(first, request("a", [7, 8]), request("b", [3])), tokens_of(second, request("a", [4, 5]))
        )
        await first.close()
        assert await tokens_of(second, request("a", [6])) == [6] * 4
        return answers

    with engine_at(path, ParrotEngine(config)):
        both, one = asyncio.run(run())
    assert sorted(both) == [3, 3, 3, 3, 7, 7, 8, 8]
    assert one == [4, 5, 4, 5]


def test_a_closing_front_takes_its_requests_along(path, config):
    async def run(engine):
        leaving, staying = await connected(path), await connected(path)
        stream = leaving.generate([request("a", max_tokens=10_000)])
        await anext(stream)
        assert engine.has_work
        await leaving.close()
        await until(lambda: not engine.has_work)
        assert len(await tokens_of(staying, request("a"))) == 4

    with engine_at(path, SlowEngine(config)) as engine:
        asyncio.run(run(engine))


def test_rejections_and_aborts(path, config):
    async def run(engine):
        client = await connected(path)
        with pytest.raises(InvalidRequestError) as caught:
            await tokens_of(client, request("fine", max_tokens=10_000), request("long", [1] * 300))
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
        await until(lambda: not engine.has_work)
        async with contextlib.aclosing(client.generate([request("n", n=2, max_tokens=10_000)])) as stream:
            await anext(stream)
            client.abort("n", 0)
            await until(lambda: len(engine._running) == 1)
        await until(lambda: not engine.has_work)
        assert client.num_streams == 0

    with engine_at(path, SlowEngine(config)) as engine:
        asyncio.run(run(engine))


def test_bad_frames_cost_only_their_sender(path, config):
    async def run():
        client = await connected(path)
        for junk in (b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", b"\x01\x00"):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(path)
                raw.sendall(junk)
                raw.shutdown(socket.SHUT_WR)
                raw.settimeout(5)
                while raw.recv(4096):
                    pass
        assert len(await tokens_of(client, request("a"))) == 4

    with engine_at(path, ParrotEngine(config)):
        asyncio.run(run())


def test_a_front_that_does_not_read_is_disconnected(path, config, monkeypatch):
    monkeypatch.setattr(bridge, "MAX_BACKLOG", 2000)

    async def run(engine):
        aborted = []  # what the engine still had to do for the front when it was disconnected
        abort = engine.abort
        engine.abort = lambda *which: aborted.append(which) or abort(*which)
        client = await connected(path)
        with socket.socket(socket.AF_UNIX) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            raw.connect(path)
            raw.sendall(to_frame(Submit([request("deaf", n=100, max_tokens=100_000)])))
            await until(lambda: aborted and not engine.has_work)
        assert len(await tokens_of(client, request("a"))) == 4

    with engine_at(path, ParrotEngine(config)) as engine:
        asyncio.run(run(engine))


def test_frames_are_bounded(monkeypatch):
    monkeypatch.setattr(messages, "MAX_FRAME", 1000)
    with pytest.raises(ValueError, match="longer than the limit"):
        to_frame(Submit([request("a", [1000] * 1000)]))
    with pytest.raises(ValueError, match="limit is 1000"):
        frame_length(b"\xff\xff\x00\x00")
    sent = []

    class Front:
        def send(self, message):
            sent.append(messages.decode_engine_message(to_frame(message)[4:]))

    updates = [SequenceUpdate("r", i, [70_000] * 100) for i in range(5)]
    updates.append(SequenceUpdate("r", 5, [70_000] * 1000))
    bridge._send_output(Front(), StepOutput(updates=updates))
    received = [update for message in sent for update in message.output]
    assert [update.index for update in received] == [0, 1, 2, 3, 4, 5]
    assert all(len(update.token_ids) == 100 for update in received[:5])
    assert received[5].finish_reason == "error"


def test_waiting_streams_hear_of_the_engines_end(path, config):
    async def run():
        server = EngineServer(path)
        client = EngineClient()
        await client.connect(path, lambda: True)
        assert server.fail("out of memory")
        with pytest.raises(EngineDeadError, match="out of memory"):
            await client.wait_ready()
        assert client.is_dead
        with pytest.raises(EngineDeadError, match="out of memory"):
            await tokens_of(client, request("a"))
        server.close()

    asyncio.run(run())


def test_an_engine_process_that_never_listens(path):
    async def run():
        with pytest.raises(EngineDeadError, match="ended before"):
            await EngineClient().connect(path, lambda: False)

    asyncio.run(run())
