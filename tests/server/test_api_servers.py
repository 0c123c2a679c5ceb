"""Several API servers for one engine: they share the listening socket, limits, responses and metrics; each may die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from serving import DEMO, SMALL, ServerUnderTest, running_server, wait_until

sys.path.insert(0, str(Path(__file__).parent.parent))
from adapter_folders import save_adapter

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
BODY = {"model": "test-model", "prompt": [50, 51], "max_tokens": 5, "ignore_eos": True}
LONG = BODY | {"max_tokens": 2000}
SLOWLY = "SAYSLOWLY(" + "word " * 400 + ")SAY"


def children(server: ServerUnderTest) -> dict[str, list[int]]:
    """The processes that a server started, by "API server" and "engine", in the order of their start."""
    pid = server.process.pid
    found = {"api_server": [], "engine": []}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):  # it may have ended meanwhile
            command = Path(f"/proc/{child}/cmdline").read_text()
            if match := re.search(r"(api_server|engine)_process", command):
                found[match[1]].append(int(child))
    return found


def api_servers(server) -> list[int]:
    return children(server)["api_server"]


def of_each_api_server(server, ask, count: int) -> dict[int, list]:
    """`ask(client)` over new connections until each API server has answered one; the results by the number of the API
    server."""
    answers: dict[int, list] = {}

    def ask_again() -> bool:
        for _ in range(4):
            request_id = f"probe-{time.monotonic_ns()}"
            with httpx.Client(base_url=server.url, timeout=30, headers={"X-Request-Id": request_id}) as client:
                answer = ask(client)
            answers.setdefault(api_server_of(server, request_id), []).append(answer)
        return len(answers) == count

    wait_until(ask_again, seconds=20, message="some front was never reached")
    return answers


def api_server_of(server, request_id: str) -> int:
    """The API server that answered a request, from the access log."""
    found: list[int] = []

    def logged() -> bool:
        for line in server.log.read_text().splitlines(keepends=True):
            if f'"{request_id}"' in line and line.endswith("\n"):  # else it is still being written
                found.append(json.loads(line)["front"])
        return bool(found)

    wait_until(logged)
    return found[0]


def wait_all_ready(server, count: int) -> None:
    """Until every API server has said that it is ready."""
    wait_until(lambda: server.log.read_text().count("ready: ") >= count, seconds=60)


@pytest.fixture(scope="module")
def two(tiny_model_folder, tmp_path_factory) -> Iterator[ServerUnderTest]:
    """Two API servers, an engine at 20 ms a token, and limits."""
    folder = tmp_path_factory.mktemp("two")
    keys = folder / "keys"
    keys.write_text("limited someone 3\nother other\n")
    keys.chmod(0o600)
    options = {
        "api_key_file": str(keys),
        "admin_key": "admin",
        "api_server_count": 2,
        "access_log": True,
        "max_connections": 40,
    }
    config = {"max_model_len": 2048, "max_waiting": 8}
    with running_server(tiny_model_folder, folder / "log", engine="SlowEngine", config=config, **options) as server:
        wait_all_ready(server, 2)
        yield server


OTHER = {"Authorization": "Bearer other"}
LIMITED = {"Authorization": "Bearer limited"}
ADMIN = {"Authorization": "Bearer admin", "Content-Type": "application/json"}


class TestLimits:
    """What one API server may do depends on what all of them do."""

    @pytest.mark.slow
    def test_processes(self, two):
        assert {kind: len(found) for kind, found in children(two).items()} == {"api_server": 2, "engine": 1}

    @pytest.mark.slow
    def test_every_front_is_reached(self, two):
        of_each_api_server(two, lambda client: client.get("/v1/models", headers=OTHER), 2)

    def test_a_key(self, two):
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                client = stack.enter_context(httpx.Client(base_url=two.url, timeout=30, headers=LIMITED))
                stream = stack.enter_context(client.stream("POST", "/v1/completions", json=LONG | {"stream": True}))
                assert stream.status_code == 200
            refused = of_each_api_server(
                two, lambda client: client.post("/v1/completions", json=BODY, headers=LIMITED), 2
            )
            for answers in refused.values():
                for answer in answers:
                    assert answer.status_code == 429
                    assert answer.json()["error"]["code"] == "too_many_requests"
            load = of_each_api_server(two, lambda client: client.get("/load", headers=ADMIN).json(), 2)
            assert {answer["server_load"] for answers in load.values() for answer in answers} == {3}

        def served() -> bool:
            return httpx.post(two.url + "/v1/completions", json=BODY, headers=LIMITED).status_code == 200

        wait_until(served)

    def test_many_at_once(self, two):
        """Exactly as many as allowed, however they spread over API servers."""

        async def run() -> list[int]:
            async with contextlib.AsyncExitStack() as stack:
                clients = [await stack.enter_async_context(httpx.AsyncClient(timeout=30)) for _ in range(12)]
                body = BODY | {"max_tokens": 40}
                url = two.url + "/v1/completions"
                answers = await asyncio.gather(*(one.post(url, json=body, headers=LIMITED) for one in clients))
            return [answer.status_code for answer in answers]

        codes = asyncio.run(run())
        assert (codes.count(200), codes.count(429)) == (3, 9)

    def test_the_queue(self, two):
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                client = stack.enter_context(httpx.Client(base_url=two.url, timeout=30, headers=OTHER))
                stack.enter_context(client.stream("POST", "/v1/completions", json=LONG | {"stream": True}))
            refused = of_each_api_server(
                two, lambda client: client.post("/v1/completions", json=BODY, headers=OTHER), 2
            )
            assert {answer.status_code for answers in refused.values() for answer in answers} == {503}

    @pytest.mark.slow
    def test_connections(self, two):
        with contextlib.ExitStack() as stack:
            for _ in range(41):
                client = stack.enter_context(httpx.Client(base_url=two.url, timeout=30))
                assert client.get("/health").status_code == 200  # beyond the limit, this is still answered
            ask = [httpx.get(two.url + "/v1/models", headers=OTHER) for _ in range(8)]
            assert {answer.status_code for answer in ask} == {503}
            assert ask[0].json()["error"]["code"] == "too_many_connections"
        wait_until(lambda: httpx.get(two.url + "/v1/models", headers=OTHER).status_code == 200)

    def test_calls_a_second(self, two):
        def reset(client) -> int:
            return client.post("/reset_prefix_cache", headers=ADMIN).status_code

        begin = time.monotonic()
        codes = [code for answers in of_each_api_server(two, reset, 2).values() for code in answers]
        assert 1 <= codes.count(200) <= 1 + (time.monotonic() - begin)
        assert set(codes) == {200, 429}


@pytest.fixture(scope="module")
def three(tiny_model_folder, tmp_path_factory) -> Iterator[ServerUnderTest]:
    import tokenizers_for_tests as kinds

    folder = tmp_path_factory.mktemp("three")
    kinds.save_byte_level(folder, kinds.TOOL_TEMPLATE)
    options = {"api_server_count": 3, "access_log": True, "config": {"max_model_len": 8192}}
    with running_server(folder, folder / "log", engine="ScriptEngine", **options) as server:
        wait_all_ready(server, 3)
        yield server


class TestResponses:
    """Those of one API server are known to all."""

    @pytest.mark.slow
    def test_conversation(self, three):
        first = three.openai().responses.create(model="test-model", input="SAY(one)SAY")

        def go_on(client):
            body = {"model": "test-model", "input": "SAY(two)SAY", "previous_response_id": first.id}
            return client.post("/v1/responses", json=body)

        answers = [one for found in of_each_api_server(three, go_on, 3).values() for one in found]
        assert {answer.status_code for answer in answers} == {200}
        ((tokens),) = {answer.json()["usage"]["input_tokens"] for answer in answers}
        assert tokens > first.usage.input_tokens, "the conversation was not found"
        three.openai().responses.delete(first.id)
        gone = of_each_api_server(three, lambda client: client.get(f"/v1/responses/{first.id}").status_code, 3)
        assert {code for codes in gone.values() for code in codes} == {404}

    @pytest.mark.slow
    def test_background(self, three):
        """Any API server shows its events, and can stop it."""
        body = {"model": "test-model", "input": SLOWLY, "background": True, "stream": True}
        with httpx.stream("POST", three.url + "/v1/responses", json=body, timeout=30) as stream:
            lines = stream.iter_lines()
            name = json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))
        name = name["response"]["id"]
        states = of_each_api_server(three, lambda client: client.get(f"/v1/responses/{name}").json()["status"], 3)
        assert {state for found in states.values() for state in found} <= {"queued", "in_progress"}
        events: list[str] = []

        def follow() -> None:
            events.extend(httpx.get(f"{three.url}/v1/responses/{name}?stream=true", timeout=60).text.splitlines())

        followers = [threading.Thread(target=follow) for _ in range(6)]
        for follower in followers:
            follower.start()
        time.sleep(0.3)
        stopped = httpx.post(f"{three.url}/v1/responses/{name}/cancel")
        assert stopped.json()["status"] == "cancelled"
        for follower in followers:
            follower.join(20)
            assert not follower.is_alive()
        numbers = [json.loads(line[6:])["sequence_number"] for line in events if line.startswith("data: {")]
        assert numbers.count(0) == 6
        wait_until(lambda: three.metric("num_requests_running") == 0)

    @pytest.mark.slow
    def test_background_of_a_front_that_dies(self, three):
        body = {"model": "test-model", "input": SLOWLY, "background": True}
        names = [httpx.post(three.url + "/v1/responses", json=body).json()["id"] for _ in range(2)]
        killed = api_servers(three)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(set(api_servers(three)) - set(killed)) == 3)
        three.wait_ready()
        for name in names:
            answer = httpx.get(f"{three.url}/v1/responses/{name}").json()
            assert (answer["status"], answer["error"]["code"]) == ("failed", "server_error")


def totals(server) -> dict[str, float]:
    """Counters, and buckets, sums and counts of histograms."""
    found = {}
    for line in httpx.get(server.url + "/metrics", timeout=30).text.splitlines():
        name, _, value = line.rpartition(" ")
        if re.search(r"_(total|bucket|sum|count)\{", name):
            found[name] = float(value)
    return found


class Load:
    """Short streamed requests from several threads, each over a new connection, until `stop`."""

    def __init__(self, server, threads: int = 3):
        self.done = 0
        self.broken = 0
        self.longest = 0.0
        self.refused = 0  # connections
        self._server = server
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            begin = time.monotonic()
            try:
                answer = httpx.post(self._server.url + "/v1/completions", json=BODY | {"stream": True}, timeout=30)
                whole = answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
                kind = "done" if whole and '"error"' not in answer.text else "broken"
            except httpx.ConnectError:
                kind = "refused"
            except httpx.HTTPError:
                kind = "broken"
            with self._lock:
                setattr(self, kind, getattr(self, kind) + 1)
                self.longest = max(self.longest, time.monotonic() - begin)

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(40)


@pytest.mark.slow
def test_a_front_that_is_killed(start_server):
    """Under load: its own requests break, no connection is refused, and nothing that was counted is lost."""
    server = start_server("SlowEngine", access_log=True, api_server_count=2, config={"max_model_len": 2048})
    wait_all_ready(server, 2)
    load = Load(server)
    before = totals(server)
    body = LONG | {"max_tokens": 600, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        keeps = busy_api_server(server)
        (victim,) = set(api_servers(server)) - {keeps}
        os.kill(victim, signal.SIGKILL)
        while server.log.read_text().count("ready: ") < 3:
            after = totals(server)
            assert not {name: (value, after.get(name)) for name, value in before.items() if after[name] < value}
            before = after
            time.sleep(0.1)
        load.stop()
        assert list(lines)[-2] == "data: [DONE]", "the other front's request ended"
    assert load.refused == 0
    assert load.broken <= 3
    assert load.done > 10
    assert load.longest < 5
    after = totals(server)
    (restarts,) = (value for name, value in after.items() if "front_restarts" in name)
    assert restarts == 1
    wait_until(lambda: server.metric("num_requests_running") == 0)
    assert server.stop() == 0


def busy_api_server(server) -> int:
    """The API server that holds the only request that is long, by its connections from clients that stay."""

    def established() -> set[int]:
        found = set()
        inodes = {
            line.split()[9]
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if line.split()[1].endswith(f":{server.port:04X}") and line.split()[3] == "01"
        }
        for pid in api_servers(server):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if (match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd))) and match[1] in inodes:
                        found.add((pid, match[1]))
        return found

    common = established()
    deadline = time.monotonic() + 10
    while len(common) > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
        common &= established()
    ((pid, _),) = common
    return pid


@pytest.mark.slow
def test_an_engine_that_is_killed(start_server):
    """It is started once, and every API server recovers."""
    server = start_server("SlowEngine", access_log=True, api_server_count=3, config={"max_model_len": 2048})
    wait_all_ready(server, 3)
    of_each_api_server(server, lambda client: client.post("/v1/completions", json=BODY), 3)
    before = totals(server)
    (engine,) = children(server)["engine"]
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: children(server)["engine"] not in ([], [engine]))
    wait_until(lambda: all(v == [200] * len(v) for v in ready_of_each(server).values()), seconds=30)
    answers = of_each_api_server(server, lambda client: client.post("/v1/completions", json=BODY).status_code, 3)
    assert {code for codes in answers.values() for code in codes} == {200}
    after = totals(server)
    assert not {name for name, value in before.items() if after[name] < value}
    assert server.metric("engine_restarts_total") == 1
    assert server.metric("front_restarts_total") == 0
    assert len(children(server)["engine"]) == 1
    assert server.stop() == 0


def ready_of_each(server, count: int = 3) -> dict[int, list[int]]:
    def ask(client) -> int:
        client.post("/v1/completions", json=BODY)  # is in the access log, as /ready is not
        return client.get("/ready").status_code

    return of_each_api_server(server, ask, count)


@pytest.mark.slow
def test_a_front_that_hangs_is_replaced(start_server):
    """The others go on meanwhile."""
    server = start_server("SlowEngine", access_log=True, api_server_count=2, watchdog_seconds=2.0)
    wait_all_ready(server, 2)
    hanging = api_servers(server)[0]
    os.kill(hanging, signal.SIGSTOP)
    answered = 0
    while hanging in api_servers(server):
        with contextlib.suppress(httpx.ReadTimeout):
            answered += httpx.post(server.url + "/v1/completions", json=BODY, timeout=10).status_code == 200
    assert answered > 5
    wait_all_ready(server, 3)
    assert "has stood still" in server.log.read_text()
    assert server.stop() == 0


@pytest.mark.slow
def test_sigterm_drains(start_server):
    """Running requests of all API servers end by themselves; then all processes do, the engine last."""
    server = start_server("SlowEngine", access_log=True, api_server_count=2)
    wait_all_ready(server, 2)
    answers: list[httpx.Response] = []
    body = BODY | {"max_tokens": 50}

    def ask() -> None:
        answers.append(httpx.post(server.url + "/v1/completions", json=body, timeout=30))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.metric("num_requests_running") == 6)
    found = children(server)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.log.read_text().count("stopping: ") == 2)
    with contextlib.suppress(httpx.HTTPError):
        assert httpx.post(server.url + "/v1/completions", json=BODY).status_code == 503
    for thread in threads:
        thread.join(30)
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {50}
    assert server.process.wait(20) == 0
    for pid in (*found["api_server"], *found["engine"]):
        assert not Path(f"/proc/{pid}").exists()
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_all_end_with_their_parent(start_server, monkeypatch, request):
    folder = Path(tempfile.mkdtemp(prefix="t"))  # with a short name, as sockets need
    request.addfinalizer(lambda: shutil.rmtree(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    server = start_server(api_server_count=2)
    found = children(server)
    assert list(folder.glob("jaxserve-*/shared/responses.sqlite"))
    server.process.kill()
    server.process.wait()
    for pid in (*found["api_server"], *found["engine"]):
        status = Path(f"/proc/{pid}/status")
        wait_until(lambda status=status: not status.exists() or "zombie" in status.read_text(), seconds=20)
    assert start_server().stop() == 0  # which removes the folder that was left
    assert not list(folder.glob("jaxserve-*"))


@pytest.mark.slow
def test_what_no_front_can_do_ends_the_server(start_server, tmp_path):
    server = start_server(api_server_count=2, ready=False, config={"model": str(tmp_path)})  # has no tokenizer
    assert server.process.wait(60) == 1
    assert "cannot go on" in server.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_engine(tmp_path):
    """OpenAI's client streams the same from every API server. Adapters that one API server loads are known to all, at
    once and to the next engine, too."""
    save_adapter(tmp_path / "a", 0, rank=4)
    config = SMALL | {"enable_lora": True, "max_loras": 8, "max_lora_rank": 8, "max_cpu_loras": 16, "kv_pages": 200}
    options = {"config": config, "admin_key": "admin", "lora_root": str(tmp_path), "access_log": True}
    with running_server(DEMO, tmp_path / "log", engine=None, api_server_count=2, **options) as server:
        wait_all_ready(server, 2)

        def streamed(model: str):
            def ask(client) -> str:
                api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=client)
                fields = {"prompt": "def main(", "max_tokens": 12, "temperature": 0, "stream": True}
                try:
                    chunks = list(api.completions.create(model=model, **fields))
                except openai.NotFoundError:
                    return "not found"
                return "".join(chunk.choices[0].text for chunk in chunks)

            return {text for texts in of_each_api_server(server, ask, 2).values() for text in texts}

        (plain,) = streamed("test-model")
        for name in ("x", "y", "z"):
            body = {"lora_name": name, "lora_path": "a"}
            assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, headers=ADMIN).status_code == 200
            (adapted,) = streamed(name)
            assert adapted not in (plain, "not found")
        body = {"lora_name": "x"}
        assert httpx.post(f"{server.url}/v1/unload_lora_adapter", json=body, headers=ADMIN).status_code == 200
        assert streamed("x") == {"not found"}
        (engine,) = children(server)["engine"]
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: children(server)["engine"] not in ([], [engine]))
        wait_until(lambda: server.status("/ready") == 200, seconds=120)
        wait_until(lambda: {200} == {code for codes in ready_of_each(server, 2).values() for code in codes}, 30)
        assert streamed("z") == {adapted}
        assert server.stop() == 0


@pytest.mark.slow
def test_the_number_is_checked(start_server):
    server = start_server(api_server_count=0, ready=False)
    assert server.process.wait(60) == 1
    assert "--api-server-count must be from 1 to 64, got 0" in server.log.read_text()
