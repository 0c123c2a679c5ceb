"""Several models behind one server: which model answers, what is in memory, and what nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from browser import CHROMIUM, open_page
from serving import DEMO, ServerUnderTest, server_of_models, wait_until
from test_batches import ended, line, lines_of, start

from jaxserve.config import ConfigError
from jaxserve.server.http.keys import ApiKey, read_keys
from jaxserve.server.http.one_model import OneModel
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.http.state import ServerState
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.models.catalog import models_in, models_of, seconds_of
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.process.app import build_app
from jaxserve.start import ENGINE

ADMIN = {"Authorization": "Bearer admin"}
SIZE = 474  # MiB of one of the models, most of which is the process
FLAGS = (
    "--load-format", "dummy", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256",
    "--admin-key", "admin", "--model-wait", "60", "--model-start-limit", "90", "--engine-restarts", "1",
)  # fmt: skip


def make_models(folder: Path, count: int) -> Path:
    """A folder of models whose numbers the engine answers with: m-0, m-1, …"""
    for number in range(count):
        (folder / f"m-{number}").mkdir(parents=True)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(DEMO / name, folder / f"m-{number}")
    return folder


def room_for(count: float) -> tuple[str, str]:
    """The flags of a budget for so many of the models."""
    return "--models-memory", str(count * SIZE * 1.03 / 1024)


def ask(server: ServerUnderTest, model: str, tokens: int = 4, prompt=(70, 71), **options) -> httpx.Response:
    body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "return_token_ids": True, **options}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def number_of(response: httpx.Response) -> int:
    """The number of the model that has answered."""
    assert response.status_code == 200, response.text
    ids = set(response.json()["choices"][0]["token_ids"])
    assert len(ids) == 1
    return ids.pop() - 100


def children(server: ServerUnderTest) -> list[int]:
    """The processes of a server's engines."""
    number = server.process.pid
    return [int(word) for word in Path(f"/proc/{number}/task/{number}/children").read_text().split()]


def states(server: ServerUnderTest) -> dict[str, str]:
    return {card["id"]: card["state"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]}


def memory_of(server: ServerUnderTest) -> tuple[dict[str, float], float, float]:
    """What each model takes, what all take, and what they may take, by one reading of /metrics."""
    text = httpx.get(f"{server.url}/metrics").text
    each = dict(re.findall(r'^jaxserve:model_memory_bytes{model_name="(.+)"} (.+)$', text, re.MULTILINE))
    used, limit = (
        re.search(rf'^jaxserve:models_memory_{name}{{device="host"}} (.+)$', text, re.MULTILINE)[1]
        for name in ("bytes", "limit_bytes")
    )
    return {name: float(size) for name, size in each.items()}, float(used), float(limit)


def engines_of(server: ServerUnderTest) -> list[int]:
    """Those of a server's children that are engines and have not ended."""
    found = []
    for child in children(server):
        with contextlib.suppress(OSError):
            if ENGINE.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"), 4)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """Four models, with memory for two."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    flags = ["--model-dir", str(folder), "--files-dir", str(log.parent / "files"), *room_for(2), *FLAGS]
    with server_of_models(log, *flags) as server:
        yield server


def resident(server: ServerUnderTest) -> list[str]:
    return [name for name, state in states(server).items() if state != "unloaded"]


def test_a_request_starts_its_model_and_others_make_room(server):
    assert set(states(server)) == {"m-0", "m-1", "m-2", "m-3"}
    for number in (0, 1, 2, 0, 3, 3):
        assert number_of(ask(server, f"m-{number}")) == number
        assert states(server)[f"m-{number}"] == "ready"
        assert len(resident(server)) <= 2
    assert set(resident(server)) == {"m-0", "m-3"}, "the least recently used ones were stopped"


def test_all_endpoints_find_the_model_of_the_request(server):
    client = server.openai()
    assert client.models.retrieve("m-0").id == "m-0"
    chat = client.chat.completions.create(model="m-0", messages=[{"role": "user", "content": "a"}], max_tokens=2)
    assert chat.model == "m-0"
    stored = client.responses.create(model="m-0", input="a", max_output_tokens=2)
    assert client.responses.retrieve(stored.id).model == "m-0"
    message = server.anthropic().messages.create(model="m-0", max_tokens=2, messages=[{"role": "user", "content": "a"}])
    assert message.model == "m-0"
    assert server.http().post("/tokenize", json={"model": "m-0", "prompt": "a"}).json()["count"] >= 1
    assert server.http().get("/tokenizer_info?model=m-0").status_code == 200
    assert "m-0" in server.http().get("/openapi.json").text


def test_names_that_are_missing_unknown_or_of_a_wrong_type(server):
    assert [card["id"] for card in server.http().get("/models").json()["data"]] == [f"m-{i}" for i in range(4)]
    assert error(ask(server, "m-9")) == (404, "model_not_found")
    assert "'m-0'" in ask(server, "m-9").text
    with pytest.raises(openai.BadRequestError, match="several models"):
        server.openai().post("/completions", body={"prompt": "a"}, cast_to=object)
    http = server.http()
    assert http.post("/v1/completions", json={"model": 5, "prompt": "a"}).status_code == 400
    assert http.post("/v1/completions", content="{", headers={"Content-Type": "application/json"}).status_code == 400
    assert http.get("/tokenizer_info").status_code == 400
    assert error(http.post("/reset_prefix_cache?model=m-1", headers=ADMIN, json={})) == (503, "model_not_loaded")
    assert http.post("/reset_prefix_cache?model=m-0", json={}).status_code == 401
    assert http.get("/v1/models/m-9").status_code == 404


def test_metrics_and_log_have_the_names_of_models(server):
    ask(server, "m-0")
    text = httpx.get(f"{server.url}/metrics").text
    assert text.count("# TYPE jaxserve:num_requests_running gauge") == 1
    assert server.metric("generation_tokens_total", "m-0") >= 4
    assert server.metric("model_state", "m-0", "ready") == 1
    assert server.metric("model_starts_total", "m-1") >= 1
    each, used, limit = memory_of(server)
    assert 0 < sum(each.values()) == used <= limit
    lines = server.log.read_text()
    assert '"path":"/v1/completions","status":200,"model":"m-0"' in lines
    assert "INFO jaxserve.engine: m-0: this is number 100" in lines, "the engine's own lines begin with the name"


def test_a_model_with_requests_is_not_stopped_and_others_wait(server):
    for number in (0, 1):
        ask(server, f"m-{number}")
    with ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(ask, server, f"m-{number}", 200) for number in (0, 1)]
        time.sleep(0.3)
        began = time.monotonic()
        other = pool.submit(ask, server, "m-2")
        wait_until(lambda: states(server)["m-2"] == "waiting")
        assert [number_of(one.result()) for one in busy] == [0, 1]
        assert number_of(other.result()) == 2
        assert time.monotonic() - began > 0.4, "it waited for the others"


def test_a_batch_asks_several_models(server):
    client = server.openai()
    names = [f"m-{i % 3}" for i in range(6)]
    own = {"prompt": [70], "max_tokens": 2, "return_token_ids": True}
    lines = [line(f"{i} {name}", model=name, **own) for i, name in enumerate(names)]
    done = ended(client, start(client, *lines), 60)
    assert (done.status, done.errors) == ("completed", None)
    answers = lines_of(client, done.output_file_id)
    found = {key: one["response"]["body"]["choices"][0]["token_ids"][0] for key, one in answers.items()}
    assert found == {f"{i} {name}": 100 + i % 3 for i, name in enumerate(names)}
    done = ended(client, start(client, line("a", model="m-0"), line("b", model="m-9")))
    assert (done.status, done.errors.data[0].code, done.errors.data[0].line) == ("failed", "model_not_found", 2)
    assert "'m-9' does not exist; this server has 'm-0'" in done.errors.data[0].message


@pytest.mark.slow
def test_a_crash_is_seen_by_nobody_else(server):
    for number in (0, 1):
        ask(server, f"m-{number}")
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(ask, server, "m-1", 200)
        assert error(ask(server, "m-0", prompt=(66, 70))) == (503, "engine_unavailable")
        assert number_of(ask(server, "m-1")) == 1
        assert number_of(long.result()) == 1
    wait_until(lambda: ask(server, "m-0").status_code == 200, 60)
    ask(server, "m-0", prompt=(66, 70))  # more deaths than are allowed: the model ends, and the next request starts it
    wait_until(lambda: states(server)["m-0"] == "failed", 60)
    response = ask(server, "m-0")
    assert error(response) == (503, "model_failed")
    assert int(response.headers["Retry-After"]) <= 5
    assert number_of(ask(server, "m-1")) == 1
    wait_until(lambda: ask(server, "m-0").status_code == 200, 60)


@pytest.mark.slow
def test_a_folder_that_vanishes(server, folder):
    wait_until(lambda: ask(server, "m-1").status_code == 200, 60)
    http = server.http()
    assert http.post("/v2/repository/models/m-3/unload", headers=ADMIN).status_code == 200
    os.rename(folder / "m-3", folder / "away")
    try:
        response = ask(server, "m-3")
        assert error(response) == (503, "model_failed")
        assert "no such model" in response.text
    finally:
        os.rename(folder / "away", folder / "m-3")
    assert states(server)["m-3"] == "failed"
    assert number_of(ask(server, "m-1")) == 1
    wait_until(lambda: ask(server, "m-3").status_code == 200, 60)


@pytest.mark.slow
def test_a_model_that_never_gets_ready(tmp_path):
    folder = make_models(tmp_path / "models", 2)
    (folder / "m-1" / "hang").touch()
    flags = ["--model-dir", str(folder), *room_for(2), *FLAGS, "--model-start-limit", "25"]
    with server_of_models(tmp_path / "log", *flags) as server, ThreadPoolExecutor(1) as pool:
        hangs = pool.submit(ask, server, "m-1")
        assert number_of(ask(server, "m-0")) == 0
        assert error(hangs.result()) == (503, "model_failed")
        assert "was not ready within 25 s" in hangs.result().text
        assert len(children(server)) == 1, "its process has ended"
        (folder / "m-1" / "hang").unlink()
        wait_until(lambda: ask(server, "m-1").status_code == 200, 60)


def test_triton_s_endpoints(server):
    http = server.http()
    wait_until(lambda: ask(server, "m-0").status_code == 200, 60)
    assert http.get("/v2/health/live").status_code == http.get("/v2/health/ready").status_code == 200
    assert http.get("/v2").json()["name"] == "jaxserve"
    assert http.get("/v2/models/m-0").json()["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [1]}]
    assert http.get("/v2/models/m-0/versions/1/ready").status_code == 200
    assert http.get("/v2/models/m-0/versions/2").status_code == 404
    assert http.get("/v2/models/m-9").json() == {"error": http.get("/v2/models/m-9").json()["error"]}
    assert isinstance(http.get("/v2/models/m-9").json()["error"], str)
    entries = {one["name"]: one["state"] for one in http.post("/v2/repository/index").json()}
    assert entries["m-0"] == "READY"
    assert len(entries) == 4
    ready = http.post("/v2/repository/index", json={"ready": True}).json()
    assert {one["state"] for one in ready} == {"READY"}

    for path in ("load", "unload"):
        assert http.post(f"/v2/repository/models/m-0/{path}").status_code == 401
        assert http.post(f"/v2/repository/models/m-9/{path}", headers=ADMIN).status_code == 404
        wrong = http.post(f"/v2/repository/models/m-0/{path}", headers=ADMIN, json={"parameters": {"config": "{}"}})
        assert wrong.status_code == 400
    assert http.post("/v2/repository/models/m-0/unload", headers=ADMIN).status_code == 200
    assert http.get("/v2/models/m-0/ready").status_code == 503
    assert http.post("/v2/repository/models/m-0/load", headers=ADMIN).status_code == 200
    assert http.get("/v2/models/m-0/ready").status_code == 200

    text = {"text_input": "hello", "parameters": {"max_tokens": 3, "temperature": 0}}
    whole = http.post("/v2/models/m-0/generate", json=text).json()
    assert whole["model_name"] == "m-0"
    assert whole["text_output"].startswith("hello")
    alone = {**text, "parameters": {"max_tokens": 3, "exclude_input_in_output": True}}
    output = http.post("/v2/models/m-0/generate", json=alone).json()["text_output"]
    assert whole["text_output"] == f"hello{output}"
    with http.stream("POST", "/v2/models/m-0/generate_stream", json=text) as stream:
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert "".join(json.loads(event)["text_output"] for event in events) == output
    own = {"text_input": "hello", "max_tokens": 3, "bad_words": "", "stop_words": [""], "pad_id": 2, "end_id": 2}
    assert http.post("/v2/models/m-0/generate", json=own | {"temperature": 0}).json() == whole, "TensorRT-LLM's names"
    ended = http.post("/v2/models/m-0/generate", json=own | {"end_id": 100}).json()
    assert ended["text_output"] == "hello"
    for body, what in (
        (b"{}", "text_input"),
        (b'{"text_input": 5}', "text_input"),
        (b'{"text_input": "a", "parameters": 5}', "parameters"),
        (b'{"text_input": "a", "parameters": {"beam_width": 4}}', "beam_width"),
        (b'{"text_input": "a", "max_tokens": "x"}', "max_tokens"),
        (b'{"text_input": "a", "exclude_input_in_output": 1}', "exclude_input_in_output must be true or false"),
        (b'{"text_input": "a", "seed": 1%s}' % (b"0" * 40), "seed"),
        (b'{"text_input": "\xff"}', "UTF-8"),
        (b"{", "JSON"),
    ):
        answer = http.post("/v2/models/m-0/generate", content=body)
        assert answer.status_code == 400
        assert what in answer.json()["error"]
    for path in ("models/m-0/infer", "models/m-0/stats", "trace/setting", "systemsharedmemory/status"):
        answer = http.request("POST" if path.endswith("infer") else "GET", f"/v2/{path}")
        assert isinstance(answer.json()["error"], str)
        assert answer.status_code == (400 if "m-0" in path else 404)


def test_ollama_s_endpoints(server):
    """A name finds its model with and without a tag; keep_alive is that of the model; nothing else starts one."""

    def post(path: str, **body) -> httpx.Response:
        return httpx.post(f"{server.url}/api/{path}", json={"stream": False} | body, timeout=60)

    def listed(path: str) -> dict[str, str | None]:
        entries = httpx.get(f"{server.url}/api/{path}").json()["models"]
        return {entry["name"]: entry.get("expires_at") for entry in entries}

    asked = {"prompt": "a", "raw": True, "options": {"num_predict": 2}}
    assert post("generate", model="m-1:latest", keep_alive=-1, **asked).status_code == 200
    assert set(listed("tags")) == {f"m-{number}:latest" for number in range(4)}
    tags = httpx.get(f"{server.url}/api/tags").json()["models"]
    assert {entry["details"]["family"] for entry in tags} == {"llama"}, "also of models that were never started"
    assert listed("ps")["m-1:latest"].startswith("9999")
    before = set(listed("ps"))
    assert post("pull", model="m-2").json() == {"status": "success"}
    assert set(listed("ps")) == before
    for path in ("generate", "pull"):
        answer = post(path, model="m-9")
        assert answer.status_code == 404
        assert "'m-9' does not exist; this server has 'm-0'" in answer.json()["error"]
    shown = post("show", name="m-1").json()
    assert shown["details"]["format"] == "safetensors"
    config = json.loads((DEMO / "config.json").read_text())
    facts = {
        "context_length": 256,
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
    }
    assert {name: shown["model_info"][f"llama.{name}"] for name in facts} == facts
    assert post("generate", model="m-1", keep_alive=0, **asked).status_code == 200
    wait_until(lambda: "m-1:latest" not in listed("ps"))
    assert post("show", model="m-1:latest").json() == shown, "what was shown once is remembered"
    for path, member in (("generate", {"response": ""}), ("chat", {"message": {"role": "assistant", "content": ""}})):
        answer = post(path, model="m-1", keep_alive="0s").json()
        assert (answer["model"], answer["done_reason"]) == ("m-1", "unload")
        assert answer.items() >= member.items()
    assert "m-1:latest" not in listed("ps"), "neither has started it"
    first = post("generate", model="m-1", **asked).json()
    again = post("generate", model="m-1", **asked).json()
    assert 10**8 < first["load_duration"] < first["total_duration"]
    assert again["load_duration"] < 10**8
    entries = {entry["name"]: entry for entry in httpx.get(f"{server.url}/api/ps").json()["models"]}
    assert entries["m-1:latest"]["size"] > 2**28, "the memory that it takes"


@pytest.mark.slow
def test_tritonclient_controls_models(server):
    client_library = pytest.importorskip("tritonclient.http")
    client = client_library.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    client.load_model("m-2", headers=ADMIN)
    assert client.is_model_ready("m-2")
    assert client.get_model_metadata("m-2")["name"] == "m-2"
    assert client.get_model_config("m-2")["backend"] == "jaxserve"
    index = {one["name"]: one["state"] for one in client.get_model_repository_index()}
    assert index["m-2"] == "READY"
    client.unload_model("m-2", headers=ADMIN)
    assert not client.is_model_ready("m-2")
    with pytest.raises(client_library.InferenceServerException, match="admin key"):
        client.load_model("m-2")
    with pytest.raises(client_library.InferenceServerException, match="does not exist"):
        client.load_model("m-9", headers=ADMIN)


@pytest.mark.slow
def test_load_and_unload_race_with_requests(server):
    http = server.http()
    stop = threading.Event()
    failures = []

    def control() -> None:
        while not stop.is_set():
            for path in ("load", "unload"):
                answer = http.post(f"/v2/repository/models/m-1/{path}", headers=ADMIN, timeout=60)
                if answer.status_code not in (200, 503):
                    failures.append(answer.text)

    thread = threading.Thread(target=control)
    thread.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: ask(server, "m-1", 20), range(20)))
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert {number_of(answer) for answer in answers} == {1}


@pytest.mark.slow
def test_work_in_the_background_keeps_its_model(server):
    client = server.openai()
    response = client.responses.create(model="m-0", input="a", max_output_tokens=150, background=True)
    assert number_of(ask(server, "m-1")) == 1
    assert number_of(ask(server, "m-2")) == 2
    wait_until(lambda: client.responses.retrieve(response.id).status != "in_progress", 60)
    done = client.responses.retrieve(response.id)
    assert done.status in ("completed", "incomplete"), done
    assert done.usage.output_tokens == 150


@pytest.mark.slow
def test_settings_of_a_file(folder, tmp_path):
    """A pinned model, an alias, times to keep models, keys, a model that is too large, and one that waits too long."""
    (tmp_path / "keys").write_text("all every\nsome limited - 0 first,m-2\n")
    (tmp_path / "keys").chmod(0o600)
    (tmp_path / "models.yaml").write_text(f"""
models:
  - name: team/one
    source: {folder}/m-0
    aliases: [first, org/first.v1:2]
    pinned: true
  - {{name: m-1, source: {folder}/m-1, keep_alive: 300ms}}
  - {{name: m-2, source: {folder}/m-2, memory: 460 MiB}}
  - {{name: m-3, source: {folder}/m-3, settings: {{max-num-seqs: 2, kv-pages: 200000}}}}
  - {{name: gone, source: {folder}/gone}}
""")
    flags = ["--models", str(tmp_path / "models.yaml"), "--api-key-file", str(tmp_path / "keys"), *room_for(2), *FLAGS]
    flags[flags.index("--model-wait") + 1] = "25"
    with server_of_models(tmp_path / "log", *flags) as server:
        http = server.http(headers={"Authorization": "Bearer all"})

        def answer(model: str, key: str = "all") -> httpx.Response:
            body = {"model": model, "prompt": [70], "max_tokens": 2, "return_token_ids": True}
            return server.http(headers={"Authorization": f"Bearer {key}"}).post("/v1/completions", json=body)

        cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
        assert cards["team/one"]["state"] == cards["first"]["state"] == "ready"
        assert cards["gone"]["state"] == "failed"
        assert "no such model" in cards["gone"]["reason"]
        assert http.get("/v1/models/team/one").json()["pinned"] is True
        assert number_of(answer("first")) == number_of(answer("team/one")) == number_of(answer("org/first.v1:2")) == 0
        assert http.get("/v1/models/org/first.v1:2").json()["root"] == "team/one"
        for wrong in ("../one", "team", "team/one/", "team//one", "first.v1:2", "team/../first"):
            assert error(answer(wrong)) == (404, "model_not_found")

        assert number_of(answer("m-1")) == 1
        wait_until(lambda: http.get("/v1/models/m-1").json()["state"] == "unloaded", 60)
        assert http.get("/v1/models/team/one").json()["state"] == "ready"

        large = answer("m-3")
        assert error(large) == (503, "model_too_large")
        assert "needs at least" in large.text
        assert "GiB" in large.text
        assert re.search(r"\d+ pages \(--kv-pages\) would fit", large.text), large.text
        small = answer("m-2")
        assert error(small) == (503, "model_too_large")
        assert "460 MiB are for it" in small.text

        some = server.http(headers={"Authorization": "Bearer some"})
        seen = some.get("/v1/models").json()["data"]
        assert (
            {card["id"] for card in seen}
            == {"team/one", "first", "org/first.v1:2", "m-2"}
            == set(some.get("/v1").json()["models"])
        )
        assert "m-1" not in some.get("/openapi.json").text
        assert number_of(answer("team/one", "some")) == 0, "the key may use it by its alias"
        assert error(answer("m-1", "some")) == (404, "model_not_found")
        assert "this key may use" in answer("m-1", "some").text
        assert answer("m-1", "wrong").status_code == 401
        assert http.post("/v2/repository/models/m-1/load", headers=ADMIN).status_code == 200

        (folder / "m-1" / "hang").touch()
        try:
            assert http.post("/v2/repository/models/m-1/unload", headers=ADMIN).status_code == 200
            late = answer("m-1")
        finally:
            (folder / "m-1" / "hang").unlink()
        assert error(late) == (503, "model_starting")
        assert late.headers["Retry-After"]
        assert number_of(answer("first")) == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(40) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_random_requests_while_engines_are_killed(tmp_path, seed):
    """Twelve models, with memory for four; names by Zipf's law, and an engine that is killed every other second."""
    folder = make_models(tmp_path / "models", 12)
    choose = random.Random(seed)
    names = choose.choices(range(12), [1 / (rank + 1) for rank in range(12)], k=1000)
    seen = Counter()
    most = most_engines = kills = 0
    flags = ("--model-dir", str(folder), *room_for(4), *FLAGS, "--engine-restarts", "100")
    with server_of_models(tmp_path / "log", *flags) as server:
        client = server.http()

        def one(number: int) -> None:
            body = {"model": f"m-{number}", "prompt": [70, 71], "max_tokens": choose.randint(1, 20)}
            response = client.post("/v1/completions", json=body | {"return_token_ids": True}, timeout=300)
            if response.status_code == 200:
                assert number_of(response) == number
                seen["answered"] += 1
            else:
                assert response.status_code == 503, response.text
                assert response.headers["Retry-After"]
                seen[response.json()["error"]["code"]] += 1

        assert number_of(ask(server, "m-0")) == 0
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(one, number) for number in names]
            while not all(request.done() for request in asked):
                each, used, limit = memory_of(server)
                assert sum(each.values()) == used
                most = max(most, used / limit)
                most_engines = max(most_engines, len(engines := engines_of(server)))
                if engines:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(choose.choice(engines), signal.SIGKILL)
                    kills += 1
                time.sleep(2)
            for request in asked:
                request.result()
        starts = sum(server.metric("model_starts_total", f"m-{number}") for number in range(12))
        print(dict(seen), f"{kills} kills, {starts:g} starts, {most:.2f} of the memory, {most_engines} engines")
    assert most <= 1
    assert most_engines <= 4
    assert seen.total() == 1000
    assert set(seen) <= {"answered", "engine_unavailable"}, "requests that had begun when their engine was killed"
    assert seen["answered"] >= 975


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: []", "must have a list named `models`"),
        ("- a", "must hold flags by their names"),
        ("models: [{name: a}]", "source must be a folder"),
        ("models: [{source: demo}]", "a name must consist of"),
        ("models: [{name: ../a, source: demo}]", "a name must consist of"),
        ("models: [{name: a, source: x}, {name: b, source: y, aliases: [a]}]", "two models are called 'a': x and y"),
        ("models: [{name: a, source: demo, pin: true}]", "got 'pin'"),
        ("models: [{name: a, source: demo, pinned: 1}]", "pinned must be true or false"),
        ("models: [{name: a, source: demo, keep_alive: soon}]", "keep_alive must be seconds"),
        ("models: [{name: a, source: demo, memory: 3}]", "memory must be a text such as"),
        ("models: [{name: a, source: demo, devices: [x]}]", "devices must be a list of numbers"),
        ("models: [{name: a, source: demo, settings: {max-num-seqs: many}}]", "the model a: argument --max-num-seqs"),
        ("models: [{name: a, source: demo, settings: {max-num-seqs: 0}}]", "max_num_seqs must be"),
        ("models: [{name: a, source: demo, settings: {frobnicate: 1}}]", "the model a: there is no flag --frobnicate"),
        ("models: [{name: a, source: demo, settings: {port: 1}}]", "port is a setting of the whole server"),
        ("models: [{name: a, source: demo, settings: {api-key: x}}]", "is a secret"),
    ],
)  # fmt: skip
def test_files_of_models_with_mistakes(tmp_path, capsys, text, message):
    from jaxserve.commands.cli import main

    file = tmp_path / "models.yaml"
    file.write_text(text)
    assert main(["serve", "--models", str(file)]) == 1
    assert message in capsys.readouterr().err


def test_flags_that_several_models_cannot_have(tmp_path, capsys):
    from jaxserve.commands.cli import main

    file = tmp_path / "models.yaml"
    file.write_text("models: [{name: a, source: demo}]")
    for flags, message in (
        (["demo"], "leave out demo"),
        (["--model-dir", str(tmp_path)], "leave one out"),
        (["--served-model-name", "x"], "--served-model-name is for a server with one model"),
        (["--api-server-count", "2"], "has one API server"),
        (["--record", str(tmp_path)], "Is a directory"),
        (["--models-memory", "0"], "models_memory must be"),
    ):
        assert main(["serve", "--models", str(file), *flags]) == 1
        assert message in capsys.readouterr().err
    assert main(["lock", "--models", str(file)]) == 1
    assert "is for one model" in capsys.readouterr().err


def test_folders_of_models(tmp_path, caplog):
    folder = make_models(tmp_path / "models", 2)
    (folder / "notes").mkdir()
    (folder / "g.gguf").touch()
    (folder / "mmproj-g.gguf").touch()
    outside = make_models(tmp_path / "outside", 1)
    (folder / "link").symlink_to(outside / "m-0")
    (folder / "with space").symlink_to(folder / "m-0")
    assert [model.name for model in models_in(folder)] == ["g", "m-0", "m-1"]
    assert f"link is left out: it leads to {outside / 'm-0'}" in caplog.text
    assert "with space is left out" in caplog.text
    (folder / "m-1.gguf").touch()
    with pytest.raises(ConfigError, match=r"two models are called 'm-1': .*/m-1 and .*/m-1.gguf"):
        models_in(folder)
    with pytest.raises(ConfigError, match="has no models"):
        models_in(folder / "notes")
    with pytest.raises(ConfigError, match="must be a folder"):
        models_in(tmp_path / "nowhere")


def test_times_and_keys_are_read(tmp_path):
    given = {"90s": 90, "10m": 600, "1.5h": 5400, 3: 3, "-1": float("inf"), "250ms": 0.25}
    assert [seconds_of(value) for value in given] == list(given.values())
    for wrong in ("", "5 minutes", None, True, float("nan")):
        with pytest.raises(ConfigError):
            seconds_of(wrong)
    file = tmp_path / "keys"
    file.write_text("a\nb two 3 0 x,y\nc three - -5 -\n")
    assert [key.models for key in read_keys(file)] == [None, ("x", "y"), None]
    file.write_text("a b 1 0 ,\n")
    with pytest.raises(ValueError, match=r"\[models\]"):
        read_keys(file)
    (model,) = models_of({"models": [{"name": "a", "source": "demo", "keep_alive": -1}]}, tmp_path / "f.yaml")
    assert model.keep_alive == float("inf")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_the_page_offers_the_models_and_says_that_one_is_starting(server, folder, tmp_path):
    wait_until(lambda: ask(server, "m-0").status_code == 200, 60)
    server.http().post("/v2/repository/models/m-3/unload", headers=ADMIN)
    with open_page(tmp_path / "profile") as page:
        page.goto(server.url)
        page.wait("document.querySelectorAll('#model option').length == 4")
        page.wait("document.querySelector('#status').textContent == 'ready'")
        page.errors.clear()  # it has looked at the pool of no model before it knew the models
        page.run("(list => { list.selectedIndex = 3; list.onchange(); })(document.querySelector('#model select'))")
        page.wait("document.querySelector('#status').textContent == 'starts when asked'")
        shown = "document.querySelector('#model select').selectedOptions[0].textContent"
        assert page.run(shown) == "m-3 · unloaded"
        page.wait("document.querySelector('#running').textContent == '–'")
        (folder / "m-3" / "hang").touch()
        page.run("document.querySelector('#prompt').focus()")
        page.type("hello")
        page.press("Enter")
        page.wait("document.querySelector('.assistant .facts').textContent == 'm-3: starting'")
        assert page.run(shown) == "m-3 · starting"
        (folder / "m-3" / "hang").unlink()
        page.wait("document.querySelector('.assistant .facts').textContent.includes('first token')")
        assert page.run("document.querySelector('.assistant .who').textContent") == "m-3"
        page.wait(f"{shown} == 'm-3'")
        assert not page.errors


def test_a_server_with_one_model_refuses_keys_for_others():
    keys = tuple(ApiKey(name, models=models) for name, models in (("a", ("other",)), ("b", ("x", "y")), ("c", None)))
    state = ServerState(ServerSettings(model_names=("x",), api_keys=keys), EngineClient(), Metrics("x"))
    state.models = OneModel(state, "demo")

    async def statuses() -> list[int]:
        transport = httpx.ASGITransport(build_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asked = [client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}) for key in "abc"]
            return [(await one).status_code for one in asked]

    assert asyncio.run(statuses()) == [403, 200, 200]


def test_triton_s_endpoints_of_a_server_with_one_model(parrot):
    http = parrot.http()
    assert http.get("/v2/health/ready").status_code == 200
    assert http.post("/v2/repository/index").json() == [
        {"name": "test-model", "version": "1", "state": "READY", "reason": ""}
    ]
    assert http.get("/v2/models/test-model/ready").status_code == 200
    assert http.get("/v2/models/other").status_code == 404
    body = {"text_input": "hello", "max_tokens": 2, "exclude_input_in_output": True}
    assert http.post("/v2/models/test-model/generate", json=body).json()["text_output"]
    assert http.post("/v2/repository/models/test-model/unload", headers=ADMIN).status_code == 404, "no admin key is set"
