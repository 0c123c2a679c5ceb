"""`jaxserve top`: its numbers against a real server's, and the terminal as it leaves it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import httpx
import pytest
from serving import ROOT, free_port, wait_until

from jaxserve.commands.cli import main
from jaxserve.commands.top import View, parse_metrics, quantile

INF = float("inf")
COMMAND = [sys.executable, "-m", "jaxserve", "top"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def test_metrics_are_read():
    text = """# HELP jaxserve:x y
jaxserve:num_requests_running{engine="0",model_name="a \\"b\\""} 3.0
jaxserve:request_success_total{finished_reason="stop"} 2.0
jaxserve:request_success_total{finished_reason="length"} 5.0
jaxserve:e2e_request_latency_seconds_bucket{le="0.5"} 1.0
jaxserve:e2e_request_latency_seconds_bucket{le="+Inf"} 4.0
process_cpu 1e-3
"""
    sample = parse_metrics(text, 1.0)
    assert sample.values == {"num_requests_running": 3, "request_success_total": 7, "process_cpu": 0.001}
    assert sample.buckets == {"e2e_request_latency_seconds": {0.5: 1, INF: 4}}


@pytest.mark.parametrize(
    ("q", "counts", "expected"),
    [
        (0.5, {}, None),
        (0.5, {1.0: 0, INF: 0}, None),
        (0.5, {1.0: 10, INF: 10}, 0.5),
        (0.5, {1.0: 2, 3.0: 10, INF: 10}, 1.75),
        (0.9, {1.0: 5, INF: 10}, 1.0),
        (1.0, {1.0: 5, 2.0: 10, 4.0: 10, INF: 10}, 2.0),
    ],
)
def test_quantiles(q, counts, expected):
    """As Prometheus's histogram_quantile has them."""
    assert quantile(q, counts) == expected


def test_rates_and_latencies_of_the_last_minute():
    def sample(seconds: float, tokens: int, fast: int, slow: int):
        name = "x:time_to_first_token_seconds_bucket"
        lines = [f"x:generation_tokens_total {tokens}", f'{name}{{le="1"}} {fast}', f'{name}{{le="2"}} {slow}']
        return parse_metrics("\n".join([*lines, f'{name}{{le="+Inf"}} {slow}']), seconds)

    view = View("url", color=False)
    view.take(sample(0, 100, 9, 9))  # older than a minute when the last comes
    view.take(sample(30, 100, 9, 9))
    view.take(sample(80, 600, 9, 19))
    frame = "\n".join(view.frame(100, 40))
    assert "tokens/s    10 generated" in frame
    assert re.search(r"last 50 s +p50 +p90 +p99\nfirst token +1\.50 s +1\.90 s +1\.99 s\nbetween tokens +– ", frame)


def test_acceptance_of_proposals():
    view = View("url", color=False)
    counts = {"num_drafts": 10, "num_draft_tokens": 40, "num_accepted_tokens": 14}
    view.take(parse_metrics("\n".join(f"x:spec_decode_{name}_total {count}" for name, count in counts.items()), 1.0))
    assert "speculation 2.40 tokens a check   35% of proposals kept" in view.frame(100, 40)
    view.take(parse_metrics("x:spec_decode_num_drafts_total 0", 2.0))
    assert "speculation" not in "\n".join(view.frame(100, 40))


def test_pictures():
    def sample(encoded: int, seconds: float):
        bucket = "x:step_seconds_bucket"
        lines = [f"x:images_encoded_total {encoded}", "x:images_reused_total 2"]
        lines += [f'{bucket}{{phase="dispatch",le="{le}"}} 50' for le in ("0.01", "0.02", "+Inf")]
        lines += [
            f'{bucket}{{phase="encoder",le="{le}"}} {n}'
            for le, n in (("0.01", 0), ("0.02", encoded), ("+Inf", encoded))
        ]
        return parse_metrics("\n".join(lines), seconds)

    view = View("url", color=False)
    view.take(sample(0, 1.0))
    assert "encode" not in "\n".join(view.frame(100, 40))
    view.take(sample(4, 2.0))
    frame = "\n".join(view.frame(100, 40))
    assert "pictures    4 encoded   2 found" in frame
    assert re.search(r"image encoder +15\.0 ms +19\.0 ms +19\.9 ms", frame)


def test_once(demo_server, capsys):
    body = {"model": "test-model", "prompt": [5] * 40, "max_tokens": 20, "ignore_eos": True}
    httpx.post(demo_server.url + "/v1/completions", json=body, timeout=60).raise_for_status()
    wait_until(lambda: demo_server.metric("num_requests_running") == 0)
    assert main(["top", demo_server.url.removeprefix("http://"), "--once"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "test-model" in out
    assert f"{demo_server.metric('generation_tokens_total'):.0f} generated" in out
    pool = httpx.get(demo_server.url + "/pool").json()
    assert f"(0 of 25)   0 shared   {pool['pages_cached']} cached" in out
    assert out.count("□") == pool["cells"].count(1) + 1  # one in the legend
    assert re.search(r"first token +\d[\d.]+ m?s", out)


def test_no_server(capsys):
    assert main(["top", f"http://127.0.0.1:{free_port()}", "--once"]) == 1
    assert "is a server there" in capsys.readouterr().err


def test_live(slow):
    """Frames come until q is pressed; then the terminal is as before."""
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    before = termios.tcgetattr(inner)
    command = [*COMMAND, slow.url, "--interval", "0.2"]
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=ENVIRONMENT | {"TERM": "xterm"})
    shown = b""
    deadline = time.monotonic() + 60
    while shown.count(b"\x1b[H") < 3 and time.monotonic() < deadline:
        shown += os.read(terminal, 65536)
    os.write(terminal, b"q")
    assert process.wait(20) == 0
    shown += os.read(terminal, 65536)
    assert shown.startswith(b"\x1b[?1049h")
    assert shown.endswith(b"\x1b[?1049l")
    assert b"tokens/s" in shown
    assert termios.tcgetattr(inner) == before


def test_several_models():
    """A line for each: those in memory first, and as many as fit."""

    def sample(seconds: float, tokens: int, count: int = 3):
        states = {"idle": "unloaded", "small": "ready", "coder": "starting"} | {
            f"m-{i}": "unloaded" for i in range(count - 3)
        }
        lines = ['x:models_memory_limit_bytes{device="host"} 4194304000']
        for name, state in states.items():
            labels = f'model_name="{name}"'
            lines += [
                f'x:model_state{{{labels},state="{one}"}} {int(one == state)}'
                for one in ("ready", "starting", "unloaded")
            ]
            lines.append(f"x:model_memory_bytes{{{labels}}} {0 if state == 'unloaded' else 2**30}")
        lines += [f'x:generation_tokens_total{{engine="0",model_name="small"}} {tokens}']
        lines += ['x:num_requests_running{model_name="small"} 2', 'x:kv_cache_usage_perc{model_name="small"} 0.5']
        lines += ['x:model_requests_waiting{model_name="coder"} 3', 'x:num_requests_waiting{model_name="small"} 1']
        return parse_metrics("\n".join(lines), seconds)

    view = View("url", color=False)
    view.take(sample(1.0, 100))
    view.take(sample(3.0, 180))
    title, _, load, rates, memory, *rest = view.frame(110, 30)
    assert title == "jaxserve top  3 models, 1 ready  url"
    assert "2 running   4 waiting" in load
    assert rates.startswith("tokens/s    40 generated")
    assert memory == "memory      2.00 GiB of 3.91 GiB for models   51%"
    rows = [line.split() for line in rest[1:5]]
    assert rows[0] == ["model", "state", "running", "waiting", "tokens/s", "pages", "memory"]
    assert rows[1] == ["small", "ready", "2", "1", "40", "50%", "█████░░░░░░░░░░░░░░░", "1.00", "GiB"]
    assert rows[2][:5] == ["coder", "starting", "0", "3", "0"]
    assert rows[3] == ["idle", "unloaded", "0", "0", "0", "–", "–"]

    view.take(sample(4.0, 180, count=40))
    frame = view.frame(80, 24)
    assert len(frame) <= 24
    assert any(line.startswith("and 3") for line in frame)
    assert any(line.startswith("first token") for line in frame)
    assert all(len(line) <= 80 for line in frame[5:])
