"""Who reads slowly, or asks for a long answer, holds up nobody else."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import httpx
import msgspec
import pytest
import tokenizers_for_tests as kinds
from serving import wait_until

from jaxserve.server.chat.generation import prompt_logprobs_json
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.http.state import ServerState
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.observe.metrics import Metrics
from jaxserve.types import TokenLogprob


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200])
def test_prompt_logprobs_are_the_same_in_pieces(length):
    tokenizer = kinds.byte_level()
    entries = [None, *(TokenLogprob(50 + i % 3, -0.5, 2, [(10, -0.25), (11, float("-inf"))]) for i in range(length))]
    written = msgspec.json.decode(prompt_logprobs_json(tokenizer, entries))
    assert len(written) == length + 1
    assert written[0] is None
    for i, entry in enumerate(written[1:]):
        assert list(entry) == ["10", "11", str(50 + i % 3)]
        assert [one["rank"] for one in entry.values()] == [1, 2, 2]
        assert entry["11"]["logprob"] == -9999.0
    assert prompt_logprobs_json(tokenizer, None) is None


def test_long_prompt_logprobs_are_written_beside_the_loop():
    tokenizer = kinds.byte_level()
    top = [(token, -0.1 * token) for token in range(20)]
    entries = [None, *(TokenLogprob(50, -0.5, 2, top) for _ in range(20_000))]
    settings = ServerSettings(model_names=("m",))
    state = ServerState(settings, EngineClient(), Metrics("m", "jaxserve"))

    async def run() -> tuple[float, float]:
        """The longest time between two turns of the loop meanwhile, and the whole time."""
        begin = last = time.perf_counter()
        gap = 0.0
        work = asyncio.ensure_future(state.off_loop(lambda: prompt_logprobs_json(tokenizer, entries)))
        while not work.done():
            await asyncio.sleep(0)
            gap = max(gap, time.perf_counter() - last)
            last = time.perf_counter()
        assert len(await work) > 10_000_000
        return gap, time.perf_counter() - begin

    gap, whole = asyncio.run(run())
    assert gap < whole / 4


@pytest.mark.slow
def test_a_client_that_hardly_reads(start_server):
    """Its request pauses, so that the API server holds little for it; and all of the answer comes once it does read."""
    count = 30_000
    server = start_server(config={"max_model_len": 2 * count})
    body = {"model": "test-model", "prompt": [50, 51], "max_tokens": count, "ignore_eos": True, "stream": True}
    body |= {"logprobs": 3, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        assert client.recv(100).startswith(b"HTTP/1.1 200")

        def made() -> float:
            return server.metric("generation_tokens_total")

        def stands_still() -> bool:
            before = made()
            time.sleep(0.5)
            return made() == before > 0

        wait_until(stands_still, seconds=60)
        assert made() < count
        assert httpx.get(server.url + "/health").status_code == 200
        quick = {"model": "test-model", "prompt": [50, 51], "max_tokens": 5}
        assert httpx.post(server.url + "/v1/completions", json=quick, timeout=30).status_code == 200
        client.settimeout(60)
        answer = b"".join(iter(lambda: client.recv(2**20), b""))
    events = answer.decode().split("\n\n")
    last = next(event for event in reversed(events) if '"usage":{' in event)
    assert json.loads(last[last.index("{") :])["usage"]["completion_tokens"] == count
    assert "data: [DONE]" in answer.decode()[-40:]
