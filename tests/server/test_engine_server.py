"""API server and engine in one process, joined by a real socket: several API servers, bad frames, API servers that do
not read."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import time
from dataclasses import replace

import pytest
import tokenizers_for_tests as kinds
from fake_engine import ParrotEngine, SlowEngine

from jaxserve.config import EngineConfig
from jaxserve.server.ipc import api_server_connection, engine_client, engine_server, messages
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.ipc.engine_server import EngineServer
from jaxserve.server.ipc.messages import Ready, Submit, frame_length, to_frame
from jaxserve.text.detokenizer import OutputProcessor
from jaxserve.types import EngineDeadError, InvalidRequestError, Request, SamplingParams, SequenceUpdate, StepOutput

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


def test_api_servers_with_the_same_request_ids_are_kept_apart(path, config):
    async def run():
        first = await connected(path)
        second = await connected(path)
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
        leaving = await connected(path)
        staying = await connected(path)
        stream = leaving.generate([request("a", max_tokens=10_000)])
        await anext(stream)  # accepted
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


def test_acceptance(path, config):
    """A stream begins when the engine has taken all of its requests, however long their first tokens take."""

    class Busy(ParrotEngine):
        step_seconds = 0.5

    async def run():
        client = await connected(path)
        async with contextlib.aclosing(client.generate([request("a"), request("b")])) as stream:
            assert await anext(stream) == []
            assert {update.request_id for update in await anext(stream)} == {"a", "b"}
        with pytest.raises(InvalidRequestError):
            await anext(client.generate([request("c"), request("long", [1] * 300)]))

    with engine_at(path, Busy(config)):
        asyncio.run(run())


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


@pytest.mark.slow
def test_a_front_that_does_not_read_holds_up_the_work_and_loses_nothing(path, config, monkeypatch):
    monkeypatch.setattr(api_server_connection, "MAX_BACKLOG", 2000)
    wanted = 10 * 20_000

    def read_all(raw: socket.socket) -> int:
        """How many tokens come, until all have ended."""
        count = ended = 0
        with raw.makefile("rb") as stream:
            while ended < 10:
                message = messages.decode_engine_message(stream.read(frame_length(stream.read(4))))
                for update in message.output if isinstance(message, messages.Update) else ():
                    count += len(update.token_ids)
                    ended += update.finish_reason is not None
        return count

    async def run(engine):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(path)
            raw.sendall(to_frame(Submit.of([request("deaf", n=10, max_tokens=20_000, ignore_eos=True)])))
            steps = -1
            while steps != engine._stats.steps or not steps:
                steps = engine._stats.steps
                await asyncio.sleep(0.3)
            assert engine.has_work
            assert steps < 20_000
            used = time.process_time()
            await asyncio.sleep(0.5)
            assert time.process_time() - used < 0.4  # nor does it wait in a busy loop
            raw.settimeout(60)
            assert await asyncio.to_thread(read_all, raw) == wanted
            await until(lambda: not engine.has_work)

    with engine_at(path, ParrotEngine(replace(config, max_model_len=100_000))) as engine:
        asyncio.run(run(engine))


def test_a_slow_reader_pauses_its_request_alone(path, config, monkeypatch):
    monkeypatch.setattr(engine_client, "MAX_UNREAD", 500)

    async def run(engine):
        client = await connected(path)
        slow = request("slow", n=3, max_tokens=5_000, ignore_eos=True, logprobs=3)
        async with contextlib.aclosing(client.generate([slow])) as stream:
            first = await anext(stream)
            await until(lambda: not engine.has_work)  # all that is there pauses
            assert engine._running
            assert len(await tokens_of(client, request("quick", max_tokens=50, ignore_eos=True))) == 50
            held = client._unread  # what had been sent before that answer has arrived, too
            assert 500 < held < 20_000  # a few steps were on their way when it was told to pause
            assert len(await tokens_of(client, request("another", max_tokens=50, ignore_eos=True))) == 50
            assert client._unread == held
            count = sum(len(update.token_ids) for update in first)
            async for updates in stream:
                assert len(updates) < 10_000
                count += sum(len(update.token_ids) for update in updates)
        assert count == 3 * 5_000
        assert (client._unread, client.num_streams) == (0, 0)
        async with contextlib.aclosing(client.generate([request("gone", max_tokens=5_000, ignore_eos=True)])) as stream:
            await anext(stream)
            await until(lambda: not engine.has_work)
        await until(lambda: not engine._running)  # who leaves while paused is gone
        assert client._unread == 0

    with engine_at(path, ParrotEngine(replace(config, max_model_len=100_000))) as engine:
        asyncio.run(run(engine))


def test_all_slow_readers_together_are_bounded(path, config, monkeypatch):
    monkeypatch.setattr(engine_client, "MAX_UNREAD", 4000)
    monkeypatch.setattr(engine_client, "MAX_ALL_UNREAD", 1000)

    async def run(engine):
        client = await connected(path)
        async with contextlib.AsyncExitStack() as stack:
            for i in range(4):
                one = request(str(i), max_tokens=50_000, ignore_eos=True)
                await anext(await stack.enter_async_context(contextlib.aclosing(client.generate([one]))))
            await until(lambda: not engine.has_work)
            sizes = [stream.unread for stream in set(client._streams.values())]
        assert len(sizes) == 4
        assert min(sizes) < 4000

    with engine_at(path, SlowEngine(config)) as engine:
        engine.step_seconds = 0.001
        asyncio.run(run(engine))


def test_many_prompt_logprobs_come_in_pieces(path, config, monkeypatch):
    """So that no message takes long to read."""
    monkeypatch.setattr(engine_server, "MAX_SCORED", 50)
    whole = Request(
        request_id="r", prompt_token_ids=[50, 51] * 100, params=SamplingParams(max_tokens=1, prompt_logprobs=2)
    )
    sizes = []

    async def run():
        client = await connected(path)
        processor = OutputProcessor(kinds.byte_level(), whole)
        async with contextlib.aclosing(client.generate([whole])) as batches:
            async for updates in batches:
                for update in updates:
                    sizes.append(len(update.prompt_logprobs or ()))
                    processor.process(update)
        assert len(processor.prompt_logprobs) == 200
        assert processor.prompt_logprobs[0] is None
        assert [entry.token_id for entry in processor.prompt_logprobs[1:]] == whole.prompt_token_ids[1:]
        assert processor.finished

    with engine_at(path, ParrotEngine(config)):
        asyncio.run(run())
    assert sizes == [50, 50, 50, 50]


def test_running_requests_go_on_while_many_new_ones_arrive(tmp_path, monkeypatch, config):
    """All messages that had arrived were taken before the next step: 10,000 requests held it up for a second."""
    monkeypatch.setattr(engine_server, "TAKE_SECONDS", 0.02)
    order = []

    class Slow(ParrotEngine):
        def add_requests(self, requests):
            order.append("add")
            time.sleep(0.005)
            super().add_requests(requests)

        def step(self):
            order.append("step")
            return super().step()

    async def run():
        path = str(tmp_path / "engine")
        with engine_at(path, Slow(config)):
            client = await connected(path)
            streams = [client.generate([request(f"r{i}", max_tokens=2)]) for i in range(40)]
            await asyncio.gather(*(drained(stream) for stream in streams))
            await client.close()

    async def drained(stream):
        async for _ in stream:
            pass

    asyncio.run(run())
    assert order.count("add") == 40
    assert "step" in order[: order.index("add") + 20], "steps come between the first and the last request"


def test_frames_are_bounded(monkeypatch):
    monkeypatch.setattr(messages, "MAX_FRAME", 1000)
    with pytest.raises(ValueError, match="longer than the limit"):
        to_frame(Submit.of([request("a", [1000] * 1000)]))
    with pytest.raises(ValueError, match="limit is 1000"):
        frame_length(b"\xff\xff\x00\x00")
    sent = []

    class ApiServer:
        def send(self, message):
            sent.append(messages.decode_engine_message(to_frame(message)[4:]))

    updates = [SequenceUpdate("r", i, [70_000] * 100) for i in range(5)]
    updates.append(SequenceUpdate("r", 5, [70_000] * 1000))
    engine_server._send_output(ApiServer(), StepOutput(updates=updates))
    received = [update for message in sent for update in message.output]
    assert [update.index for update in received] == [0, 1, 2, 3, 4, 5]
    assert all(len(update.token_ids) == 100 for update in received[:5])
    assert received[5].finish_reason == "error"


# A task or thread that ends for any reason must not leave others waiting.


def test_a_front_that_cannot_handle_what_it_hears_takes_the_engine_for_dead(path, config):
    async def run():
        client = await connected(path)

        def fail(stats):
            raise KeyError("unexpected")

        client.on_stats = fail
        with pytest.raises(EngineDeadError, match="could not be handled: KeyError"):
            await asyncio.wait_for(tokens_of(client, request("a", max_tokens=10_000)), 20)
        assert await client.wait_lost(0)
        await client.close()

    with engine_at(path, SlowEngine(config)):
        asyncio.run(run())


def test_an_engine_that_cannot_handle_what_it_hears_lets_the_front_know(path, config, monkeypatch):
    async def run(engine):
        client = await connected(path)

        def fail(body):
            raise RecursionError("too deep")

        monkeypatch.setattr(messages, "decode_api_server_message", fail)
        with pytest.raises(EngineDeadError, match="ended"):
            await asyncio.wait_for(tokens_of(client, request("a", max_tokens=10_000)), 20)
        await until(lambda: not engine.has_work)
        await client.close()

    with engine_at(path, SlowEngine(config)) as engine:
        asyncio.run(run(engine))


def test_a_writer_that_fails_ends_the_connection():
    ours, theirs = socket.socketpair()

    class Connection:
        """The socket, but for sending."""

        def sendall(self, data):
            raise MemoryError

        def __getattr__(self, name):
            return getattr(ours, name)

    inbox: queue.SimpleQueue = queue.SimpleQueue()
    api_server = api_server_connection.ApiServerConnection(0, Connection(), inbox)
    api_server.send(READY)
    assert inbox.get(timeout=20) == (api_server, None)
    assert theirs.recv(1) == b""
    theirs.close()
    ours.close()


def test_the_engine_says_for_how_long_a_step_goes_on(path, config, monkeypatch):
    monkeypatch.setattr(engine_server, "BEAT_SECONDS", 0.05)
    release = threading.Event()

    class Hanging(ParrotEngine):
        def step(self):
            release.wait(30)
            return super().step()

    async def run(engine):
        client = await connected(path)
        await asyncio.sleep(0.3)
        assert client.stalled == 0.0, "there is no work"
        work = asyncio.ensure_future(tokens_of(client, request("a")))
        await until(lambda: client.stalled > 0.5)
        engine.compiling = True
        await until(lambda: client.stalled < 0.3)
        engine.compiling = False
        await until(lambda: client.stalled > 0.5)
        release.set()
        assert len(await work) == 4
        assert client.stalled == 0.0
        await client.close()

    with engine_at(path, Hanging(config)) as engine:
        asyncio.run(run(engine))


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
