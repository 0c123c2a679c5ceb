"""Servers with the roles prefill and decode as processes, with real clients: answers are those of one server alone,
also while the prefill server is killed, stopped and replaced."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from role_engines import SECRET
from serving import DEMO, free_port, running_server, wait_until

pytestmark = pytest.mark.slow

SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 1024, "kv_pages": 400, "page_size": 16}
TIERS = {"kv_offload_gib": 0.25}


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("JAXSERVE_HOST_SECRET", SECRET)


def bodies(count=12, tag=0):
    """Long prompts, greedy and sampled, whole and streamed, with one and two completions."""
    rng = np.random.default_rng(tag)
    made = []
    for i in range(count):
        prompt = rng.integers(300, 4000, int(rng.integers(200, 900)) if i % 4 else 20).tolist()
        wish = {"temperature": 0.9, "top_p": 0.95, "seed": i} if i % 2 else {"temperature": 0}
        made.append({"model": "m", "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "stream": i % 3 == 0,
                     "return_token_ids": True, "n": 1 + (i % 5 == 1), **wish})  # fmt: skip
    return made


def ask(server, body):
    """The tokens of each completion."""
    url = server.url + "/v1/completions"
    if not body["stream"]:
        answer = httpx.post(url, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return [choice["token_ids"] for choice in sorted(answer.json()["choices"], key=lambda one: one["index"])]
    tokens = [[] for _ in range(body["n"])]
    with httpx.stream("POST", url, json=body, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    tokens[choice["index"]] += choice.get("token_ids") or []
    return tokens


def ask_all(server, made):
    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(lambda body: ask(server, body), made))


def start(tmp_path, name, config=None, **serve):
    settings = {**SIZES, **(config or {})}
    folder = settings.pop("model", DEMO)
    return running_server(
        folder, tmp_path / f"{name}.log", engine=None, config=settings, served_model_name="m", **serve
    )


def prefill(tmp_path, port, name="prefill", **config):
    return start(tmp_path, name, {**TIERS, "role": "prefill", "prefill_listen": f"127.0.0.1:{port}", **config})


def decode(tmp_path, *ports, name="decode", config=None, **serve):
    servers = [f"127.0.0.1:{port}" for port in ports]
    own = {"role": "decode", "prefill_servers": servers, "prefill_min_tokens": 64, "prefill_timeout": 20.0}
    return start(tmp_path, name, {**TIERS, **own, **(config or {})}, **serve)


def engine_of(server):
    """The engine's process of a server with one API server."""
    pid = server.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def strike(server, pid, number):
    """Sends a signal to the engine of a prefill server once it has sent some pages."""
    before = server.metric("prefill_export_pages_total")
    wait_until(lambda: server.metric("prefill_export_pages_total") > before, 20)
    os.kill(pid, number)


def forget(server):
    """Waits, if need be, since servers take one such request a second."""

    def reset():
        answer = httpx.post(f"{server.url}/reset_prefix_cache", headers={"Authorization": "Bearer admin"}, json={})
        assert answer.status_code in (200, 429), answer.text
        return answer.status_code == 200

    wait_until(reset)


def up(server):
    return server.metric("prefill_servers_up")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with start(tmp_path_factory.mktemp("alone"), "alone") as server:
        return ask_all(server, bodies())


@pytest.mark.parametrize("api_servers", [1, 2])
def test_answers_of_two_servers(api_servers, expected, tmp_path):
    port = free_port()
    with (
        prefill(tmp_path, port) as first,
        decode(tmp_path, port, api_server_count=api_servers) as server,
    ):
        wait_until(lambda: up(server) == 1, 20)
        assert ask_all(server, bodies()) == expected
        wait_until(lambda: server.metric("prefill_fetch_requests_total") == 9, 5)
        assert server.metric("prefill_fallbacks_total") == 0
        assert server.metric("prefill_fetch_pages_total") == first.metric("prefill_export_pages_total") > 200
        assert ask(first, bodies()[1]) == expected[1]  # it answers clients, too


def test_a_prefill_server_that_is_killed_stopped_and_replaced(expected, tmp_path):
    port = free_port()
    with decode(tmp_path, port, admin_key="admin") as server:
        assert ask_all(server, bodies()) == expected  # there is none yet
        assert server.metric("prefill_fallbacks_total") == 9
        with prefill(tmp_path, port) as first:
            wait_until(lambda: up(server) == 1, 30)
            for number, recovers in ((signal.SIGKILL, 60), (signal.SIGSTOP, 30)):
                forget(server)
                pid = engine_of(first)
                pages = server.metric("prefill_fetch_pages_total")
                fallbacks = server.metric("prefill_fallbacks_total")
                threading.Thread(target=strike, args=(first, pid, number)).start()
                began = time.monotonic()
                assert ask_all(server, bodies()) == expected
                seconds = time.monotonic() - began
                print(number, f"{seconds:.1f} s", server.metric("prefill_fetch_pages_total") - pages, "pages came")
                assert server.metric("prefill_fallbacks_total") > fallbacks
                assert seconds < 60
                wait_until(lambda: up(server) == 0, 10)
                if number == signal.SIGSTOP:
                    os.kill(pid, signal.SIGCONT)
                wait_until(lambda: up(server) == 1, recovers)  # its server has started another engine, or it goes on
            forget(server)
            before = server.metric("prefill_fallbacks_total")
            assert ask_all(server, bodies()) == expected
            assert server.metric("prefill_fallbacks_total") == before
        wait_until(lambda: up(server) == 0, 10)
        with prefill(tmp_path, port, name="again"):
            wait_until(lambda: up(server) == 1, 30)


def test_one_of_several_prefill_servers_is_killed(expected, tmp_path):
    """No request is lost: what it was asked for is computed by the decode server, later prompts by the other one."""
    ports = [free_port(), free_port()]
    with (
        prefill(tmp_path, ports[0], "first") as first,
        prefill(tmp_path, ports[1], "second") as second,
        decode(tmp_path, *ports, admin_key="admin") as server,
    ):
        wait_until(lambda: up(server) == 2, 30)
        assert ask_all(server, bodies()) == expected
        shares = [one.metric("prefill_export_requests_total") for one in (first, second)]
        assert min(shares) > 0
        assert sum(shares) == 9
        assert server.metric("prefill_fallbacks_total") == 0

        forget(server)
        pid = engine_of(first)
        os.kill(pid, signal.SIGSTOP)  # so that prompts that it is asked for are not computed when it is killed
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(ask_all, server, bodies())
            wait_until(lambda: server.metric("prefill_fetch_requests_total") == 18, 20)
            first.process.kill()
            os.kill(pid, signal.SIGKILL)
            assert answers.result(60) == expected
        fallbacks = server.metric("prefill_fallbacks_total")
        assert 0 < fallbacks < 9
        wait_until(lambda: up(server) == 1, 10)

        forget(server)
        before = second.metric("prefill_export_requests_total")
        assert ask_all(server, bodies()) == expected
        assert second.metric("prefill_export_requests_total") == before + 9
        assert server.metric("prefill_fallbacks_total") == fallbacks


def test_servers_that_do_not_fit(expected, tmp_path, monkeypatch):
    """Another secret, another page size, other weights: refused with the reason, and everything is computed here."""
    ports = [free_port() for _ in range(3)]
    other = tmp_path / "other"
    other.mkdir()
    for path in DEMO.iterdir():
        if path.is_file():
            (other / path.name).write_bytes(path.read_bytes())
    weights = next(other.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with (
        prefill(tmp_path, ports[0], "page", page_size=32),
        prefill(tmp_path, ports[1], "weights", model=other),
    ):
        monkeypatch.setenv("JAXSERVE_HOST_SECRET", "another secret, as long")
        with prefill(tmp_path, ports[2], "secret") as third:
            monkeypatch.setenv("JAXSERVE_HOST_SECRET", SECRET)
            with decode(tmp_path, *ports) as server:
                reasons = "it has another secret", "its page is 16 tokens", "its checkpoint (model.safetensors) is"
                wait_until(lambda: all(reason in server.log.read_text() for reason in reasons), 20)
                assert up(server) == 0
                assert ask_all(server, bodies()) == expected
                assert server.metric("prefill_fetch_requests_total") == 0
            assert third.status("/health") == 200
