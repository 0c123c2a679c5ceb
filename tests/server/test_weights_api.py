"""A server that sleeps and whose weights are replaced: who may do it, what clients see; no answer mixes weights."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import save_file
from serving import DEMO, SMALL, running_server, wait_until
from test_api_servers import children, of_each_api_server, ready_of_each, wait_all_ready

from jaxserve.checkpoints.safetensors import read_folder

pytestmark = pytest.mark.slow

ADMIN = {"Authorization": "Bearer admin"}
PROMPTS = [f"def thing_{i}(" for i in range(4)]


def write_weights(folder: Path, factor: float) -> Path:
    """A folder with the demo's weights, of which those of the second layer's MLP are multiplied."""
    folder.mkdir(parents=True)
    shutil.copy(DEMO / "config.json", folder)
    values = {name: tensor.read() for name, tensor in read_folder(DEMO).items()}
    for name in values:
        if name.startswith("model.layers.1.mlp"):
            values[name] = (values[name].astype(np.float32) * factor).astype(values[name].dtype)
    save_file(values, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    write_weights(root / "a", 3.0)
    write_weights(root / "b", -2.0)
    (root / "empty").mkdir()
    (root / "out").symlink_to(DEMO)
    return root


@pytest.fixture(scope="module")
def server(root, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "server.log"
    options = {"config": SMALL, "admin_key": "admin", "weights_root": str(root), "engine_restarts": 1}
    with running_server(DEMO, log, engine=None, **options) as server:
        yield server


def post(server, path: str, **options) -> httpx.Response:
    return httpx.post(server.url + path, headers=ADMIN, timeout=60, **options)


def update(server, folder: str, **fields) -> httpx.Response:
    return post(server, "/update_weights", json={"model_path": folder} | fields)


def complete(server, prompt: str = PROMPTS[0], **options) -> httpx.Response:
    body = {"model": "test-model", "prompt": prompt, "max_tokens": 12, "temperature": 0} | options
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def facts(answer: httpx.Response) -> tuple[str, str, str]:
    """An answer's text, fingerprint and version of the weights."""
    body = answer.json()
    return body["choices"][0]["text"], body["system_fingerprint"], answer.headers["x-weight-version"]


def is_sleeping(server) -> bool:
    return httpx.get(f"{server.url}/is_sleeping", headers=ADMIN).json()["is_sleeping"]


def test_new_weights(server):
    first, old, version = facts(complete(server))
    compiled = server.metric("executables")
    answer = update(server, "a")
    assert answer.status_code == 200, answer.text
    assert answer.json() | {"seconds": 0} == {
        "success": True, "message": "the weights of a are served as version 1", "weight_version": "1", "seconds": 0,
    }  # fmt: skip
    changed, new, number = facts(complete(server))
    assert (version, number) == ("0", "1")
    assert changed != first
    assert new != old
    with server.openai().completions.with_streaming_response.create(
        model="test-model", prompt=PROMPTS[0], max_tokens=12, temperature=0, stream=True
    ) as stream:
        assert stream.headers["x-weight-version"] == "1"
        chunks = list(stream.parse())
    assert {chunk.system_fingerprint for chunk in chunks} == {new}
    assert "".join(chunk.choices[0].text for chunk in chunks) == changed
    chat = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        body = chat if path != "/v1/responses" else {"model": "test-model", "input": "hello"}
        assert httpx.post(server.url + path, json=body, timeout=60).headers["x-weight-version"] == "1"
    info = httpx.get(f"{server.url}/server_info").json()
    assert (info["weight_version"], info["system_fingerprint"], info["is_sleeping"]) == ("1", new, False)
    assert server.metric("weight_version_info", "1") == 1
    assert server.metric("weight_updates_total") == 1
    body = {"model_path": str(DEMO), "weight_version": "step-7"}  # SGLang's name and fields
    assert post(server, "/update_weights_from_disk", json=body).status_code == 400  # it is not below the root
    body["model_path"] = "b"
    assert post(server, "/update_weights_from_disk", json=body).json()["weight_version"] == "step-7"
    text, name, number = facts(complete(server))
    assert number == "step-7"
    assert text != changed
    assert name not in (old, new)
    assert server.metric("executables") == compiled


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(server, level):
    before = facts(complete(server))
    assert not is_sleeping(server)
    for _ in range(2):
        assert post(server, f"/sleep?level={level}").json() == {"is_sleeping": True}
    assert is_sleeping(server)
    assert (server.status("/health"), server.status("/ready")) == (200, 503)
    assert httpx.get(f"{server.url}/ready").json() == {"status": "sleeping"}
    refused = complete(server)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "the engine sleeps" in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == "sleeping"
    state = ("awake", "weights_offloaded", "discard_all")
    assert [server.metric("engine_sleep_state", name) for name in state] == [0, level == 1, level == 2]
    for _ in range(2):
        assert post(server, "/wake_up").json() == {"is_sleeping": False}
    assert server.status("/ready") == 200
    assert facts(complete(server)) == before


def test_new_weights_wake_the_engine_up(server):
    assert update(server, "a", weight_version="x").status_code == 200
    first = facts(complete(server))
    assert post(server, "/sleep?level=2").status_code == 200
    assert update(server, "a", weight_version="x").status_code == 200
    assert not is_sleeping(server)
    assert facts(complete(server)) == first


def test_who_may_do_it(server, parrot, start_server):
    for path in ("/sleep", "/wake_up", "/update_weights"):
        assert httpx.post(server.url + path, json={}).status_code == 401
        form = {"Content-Type": "text/plain"}
        assert httpx.post(server.url + path, headers=ADMIN | form, content="{}").status_code == 400
    assert httpx.get(f"{server.url}/is_sleeping").status_code == 401
    assert post(parrot, "/sleep").status_code == 404  # it has no admin key
    other = start_server(admin_key="admin")
    assert "--weights-root" in update(other, "a").json()["error"]["message"]
    answer = post(other, "/sleep")  # this engine has no weights
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400, "the weights of this engine cannot be changed",
    )  # fmt: skip


def test_what_is_refused_changes_nothing(server, root, tmp_path):
    before = facts(complete(server))
    for folder in ("..", "/etc", "out", ".", "none", "empty", str(tmp_path)):
        answer = update(server, folder)
        assert answer.status_code in (400, 404), (folder, answer.text)
        assert answer.json()["error"]["message"]
    for fields in ({"mode": "keep"}, {"timeout": -1}, {"weight_version": "a b"}, {"flush_cache": False}):
        assert update(server, "a", **fields).status_code == 400
    for query in ("level=3", "level=x", "mode=keep", "timeout=1e9"):
        assert post(server, f"/sleep?{query}").status_code == 400
    assert facts(complete(server)) == before
    assert not is_sleeping(server)


def test_requests_that_run_and_requests_that_come(server):
    """Running requests end with the old weights, new ones wait for the new ones. A change is given up if a request runs
    for too long, and aborts those that run if it may."""
    assert update(server, "a", weight_version="a").status_code == 200
    old = {prompt: facts(complete(server, prompt)) for prompt in PROMPTS}
    long = {"max_tokens": 200, "n": 8, "temperature": 1, "ignore_eos": True}  # has to be preempted, so it takes long

    def is_running() -> bool:
        return server.metric("num_requests_running") > 0

    with ThreadPoolExecutor(8) as pool:

        def submit_long() -> Future:
            """A long request that runs when this returns."""
            wait_until(lambda: not is_running())  # so that the gauge is of the request that comes now
            answer = pool.submit(complete, server, PROMPTS[0], **long)
            wait_until(is_running)
            return answer

        first = submit_long()
        late = update(server, "b", timeout=0)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "busy")
        change = pool.submit(update, server, "b", weight_version="b")
        time.sleep(0.05)
        held = [pool.submit(complete, server, prompt) for prompt in PROMPTS]
        second = update(server, "b")
        codes = sorted(one.status_code for one in (change.result(), second))
        assert codes in ([200, 200], [200, 503])  # 503 to the one that comes while the other one waits
        assert first.result().headers["x-weight-version"] == "a"
        assert first.result().json()["usage"]["completion_tokens"] == 8 * 200
        for prompt, one in zip(PROMPTS, held, strict=True):
            text, name, version = facts(one.result())
            assert (text, name, version) == old[prompt] or (version != "a" and text != old[prompt][0])
        doomed = submit_long()
        assert post(server, "/sleep?mode=abort").status_code == 200
        assert doomed.result().status_code == 503
        assert "try again" in doomed.result().json()["error"]["message"]
        assert post(server, "/wake_up").status_code == 200


def test_a_load_of_streams_loses_no_request(server):
    """Weights are replaced again and again under load. Each answer is that of one of the weights, as its version says;
    nothing is lost or refused."""
    expected = {}
    for name in ("a", "b"):
        assert update(server, name, weight_version=name).status_code == 200
        for prompt in PROMPTS:
            expected[name, prompt] = facts(complete(server, prompt, max_tokens=30))
    over = threading.Event()
    seen = []

    def client(number: int) -> None:
        api = server.openai(http_client=httpx.Client())
        while not over.is_set():
            prompt = PROMPTS[number % len(PROMPTS)]
            options = {"model": "test-model", "prompt": prompt, "max_tokens": 30, "temperature": 0, "stream": True}
            with api.completions.with_streaming_response.create(**options) as stream:
                version = stream.headers["x-weight-version"]
                chunks = list(stream.parse())
            text = "".join(chunk.choices[0].text for chunk in chunks)
            (name,) = {chunk.system_fingerprint for chunk in chunks}
            assert (text, name, version) == expected[version, prompt]
            seen.append(version)

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client, number) for number in range(6)]
        for name in ("a", "b", "a", "b"):
            assert update(server, name, weight_version=name).status_code == 200
            already = len(seen)
            wait_until(lambda already=already: len(seen) > already + 6 or any(one.done() for one in clients), 30)
        over.set()
        for one in clients:
            one.result()
    assert set(seen) == {"a", "b"}
    assert len(seen) > 24


@pytest.mark.timeout(300)
def test_an_engine_that_died_comes_back_with_the_new_weights(server):
    assert update(server, "b", weight_version="last").status_code == 200
    before = facts(complete(server))
    (engine,) = children(server)["engine"]
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: server.status("/ready") == 503)
    wait_until(lambda: server.status("/ready") == 200, seconds=120)
    assert facts(complete(server)) == before


@pytest.mark.timeout(300)
def test_several_fronts(root, tmp_path):
    """All API servers refuse requests while the engine sleeps, and answer with the new weights once they are
    replaced."""
    options = {"config": SMALL, "admin_key": "admin", "weights_root": str(root), "access_log": True}
    with running_server(DEMO, tmp_path / "log", engine=None, api_server_count=2, **options) as server:
        wait_all_ready(server, 2)

        def ask(client) -> str:
            api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=client)
            try:
                return api.completions.create(model="test-model", prompt="x", max_tokens=2).system_fingerprint
            except openai.InternalServerError as error:
                return error.code

        def answers() -> set[str]:
            return {one for some in of_each_api_server(server, ask, 2).values() for one in some}

        (before,) = answers()
        for name in ("a", "b"):
            assert update(server, name).status_code == 200
            (after,) = answers()
            assert after != before
            assert post(server, "/sleep").status_code == 200
            assert answers() == {"sleeping"}
            assert post(server, "/wake_up").status_code == 200
            assert answers() == {after}
            before = after
        assert {200} == {code for codes in ready_of_each(server, 2).values() for code in codes}
