"""The load generator: its arithmetic on timelines with known answers, its client, and a run against a real server."""

import asyncio
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from serving import ROOT

from jaxserve.bench.client import Client
from jaxserve.bench.prompts import Lengths, Vocabulary, prefix_prompts, sharegpt_prompts
from jaxserve.bench.serve import arrival_times
from jaxserve.bench.stats import RequestRecord, distribution, parse_goodput, peak_concurrency, summarize
from jaxserve.commands.cli import main

RECORDS = [
    RequestRecord(start=0.0, end=1.0, input_tokens=10, output_tokens=4, arrivals=[0.1, 0.3, 0.5, 0.7], last=0.7),
    RequestRecord(start=0.5, end=2.0, input_tokens=20, output_tokens=2, arrivals=[1.0, 1.4], last=1.4),
    RequestRecord(start=1.0, end=1.5, error="503: busy"),
]


def test_summary_of_a_known_timeline():
    summary = summarize(RECORDS, {"ttft": 200.0, "tpot": 250.0})
    assert (summary["successful"], summary["failed"], summary["first_error"]) == (2, 1, "503: busy")
    assert summary["duration_s"] == 2.0
    assert summary["output_tokens_per_s"] == pytest.approx(3.0)
    assert summary["input_tokens_per_s"] == pytest.approx(15.0)
    assert summary["ttft_ms"]["mean"] == pytest.approx((100 + 500) / 2)
    assert summary["tpot_ms"]["mean"] == pytest.approx((200 + 400) / 2)
    assert summary["itl_ms"]["mean"] == pytest.approx((3 * 200 + 400) / 4)
    assert summary["e2e_ms"]["p50"] == pytest.approx(1250)
    assert summary["peak_concurrency"] == 2
    assert summary["goodput_percent"] == pytest.approx(100 / 3), "only the first request meets the limits"
    assert summary["goodput_requests_per_s"] == pytest.approx(0.5)


def test_distribution_and_concurrency():
    assert distribution([]) is None
    figures = distribution(np.arange(1, 101) / 1000)
    assert (figures["mean"], figures["p50"], figures["p99"]) == pytest.approx((50.5, 50.5, 99.01))
    back_to_back = [RequestRecord(start=i, end=i + 1) for i in range(5)]
    assert peak_concurrency(back_to_back) == 1
    assert parse_goodput(["ttft:200", "e2e:5000"]) == {"ttft": 200.0, "e2e": 5000.0}
    for wrong in ("ttft", "speed:3", "tpot:-1", "tpot:nan"):
        with pytest.raises(ValueError, match="goodput"):
            parse_goodput([wrong])


def test_poisson_arrivals():
    times = arrival_times(20_000, 50.0, seed=3)
    gaps = np.diff(times)
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert np.std(gaps) == pytest.approx(1 / 50, rel=0.05), "exponential gaps have a deviation equal to their mean"
    assert arrival_times(5, float("inf"), seed=3) == [0.0] * 5


def test_prompts_share_their_prefix():
    vocabulary = Vocabulary(range(1000))
    prompts = prefix_prompts(vocabulary, Lengths(30, 5), count=12, seed=0, prefix_len=20, num_prefixes=2)
    beginnings = {tuple(prompt.content[:20]) for prompt in prompts}
    assert len(beginnings) == 2
    assert len({tuple(prompt.content) for prompt in prompts}) == 12


def test_sharegpt_file(tmp_path):
    def talk(*turns):
        return {"conversations": [{"from": who, "value": text} for who, text in turns]}

    path = tmp_path / "talks.json"
    question = "How do I sort a list in Python?"
    answer = "Call sorted() with it; " * 8
    path.write_text(json.dumps([talk(("human", question), ("gpt", answer)), talk(("gpt", "x")), talk()]))
    (prompt,) = sharegpt_prompts(path, 1, seed=0)
    assert prompt.content == question
    assert prompt.output_len == pytest.approx(len(answer) / 4, abs=2)


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_client_reads_chunks_cut_anywhere(piece):
    """Events do not depend on the pieces in which a chunked answer arrives."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (b"data: a", b"bc\n\nda", b"ta: [DONE]\n\n"))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = head + body + b"0\r\n\r\n"

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for at in range(0, len(answer), piece):
            writer.write(answer[at : at + piece])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}")
        events = []
        async with server:
            response = await client.request("POST", "/x", b"{}", on_event=lambda at, data: events.append(data))
        return response.status, events

    status, events = asyncio.run(run())
    assert status == 200
    assert events == [b"abc", b"[DONE]"]


def test_a_run_against_a_server(parrot, tmp_path, capsys):
    results = tmp_path / "results.json"
    picture = tmp_path / "plot.png"
    load = ["--num-requests", "24", "--concurrency", "6", "--input-len", "12", "--output-len", "8"]
    outputs = ["--json", str(results), "--plot", str(picture), "--detail", "--goodput", "ttft:60000"]
    assert main(["bench", "serve", "--url", parrot.url, *load, *outputs]) == 0
    assert main(["bench", "serve", "--url", parrot.url, *load, "--model", "nobody"]) == 1
    document = json.loads(results.read_text())
    summary = document["summary"]
    assert (summary["successful"], summary["failed"], summary["goodput_percent"]) == (24, 0, 100)
    assert summary["input_tokens"] == 24 * 12
    assert 0 < summary["output_tokens"] <= 24 * 8
    assert len(document["requests"]) == 24
    assert summary["peak_concurrency"] <= 6
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000
    assert "Time to first token" in capsys.readouterr().out


@pytest.mark.slow
def test_host_work_of_few_sequences(tmp_path):
    """`benchmarks/host.py` with few sequences, whose prompts are longer than a step."""
    path = tmp_path / "host.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "host.py"), "--running", "3", "--json", str(path)]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)})
    figures = json.loads(path.read_text())["3"]
    assert 0 < figures["schedule"]["p50_us"] < figures["step"]["p50_us"] < 1e6
