"""Adapters, weights, records and paths of a server whose engine has no model: what the API server, the engine's process
and `jaxserve replay` do about them. The same with models: test_adapters_api.py, test_weights_api.py, test_record.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
from fake_engine import ParrotEngine
from safetensors.numpy import save_file
from serving import ServerUnderTest, running_server, wait_until

from jaxserve.commands.replay import replay

ADMIN = {"Authorization": "Bearer admin"}
PROMPT = list(range(50, 56))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("root")
    for name, config in (("a", "{}"), ("b", '{"r": 2}'), ("damaged", "{")):
        (root / name).mkdir()
        (root / name / "adapter_config.json").write_text(config)
    for name in ("old", "new"):
        (root / name).mkdir()
        save_file({"weight": np.zeros(3, np.float32)}, root / name / "model.safetensors")
    (root / "cut").mkdir()
    (root / "cut" / "model.safetensors").write_bytes(b"\0" * 9)
    return root


@pytest.fixture(scope="module")
def server(root, tiny_model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    settings = {"enable_lora": True, "max_loras": 2, "max_model_len": 256}
    options = {"admin_key": "admin", "lora_root": str(root), "weights_root": str(root), "root_path": "/proxy"}
    options["record"] = str(folder / "requests.jsonl")
    with running_server(
        tiny_model_folder, folder / "log", engine="ChangingEngine", config=settings, **options
    ) as server:
        yield server


def post(server: ServerUnderTest, path: str, body: dict | None = None, headers=ADMIN) -> httpx.Response:
    return httpx.post(server.url + path, json=body or {}, headers=headers, timeout=30)


def tokens(server: ServerUnderTest, model: str = "test-model") -> list[int]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 6, "return_token_ids": True}
    answer = post(server, "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def recorded(server, tmp_path_factory) -> Path:
    """Records of two requests, before anything changes."""
    file = Path(json.loads(server.process.args[-1])["serve"]["record"])
    body = {"model": "test-model", "prompt": PROMPT, "max_tokens": 9, "logprobs": 1, "temperature": 0.7}
    for fields in ({"n": 2}, {"prompt_logprobs": 1, "user": "somebody", "cache_salt": "of-somebody"}):
        assert post(server, "/v1/completions", body | fields).status_code == 200
    wait_until(lambda: file.exists() and file.read_bytes().count(b"\n") == 2)
    return Path(shutil.copy(file, tmp_path_factory.mktemp("records") / "requests.jsonl"))


def test_records_are_run_again(recorded, capsys, monkeypatch):
    monkeypatch.setattr("jaxserve.engine.engine.Engine", ParrotEngine)
    first, second = (json.loads(line) for line in recorded.read_text().splitlines())
    assert len(first["outputs"]) == 2
    assert first["request"]["params"]["seed"] is not None  # drawn, so that it can be repeated
    assert "prompt_logprobs" in second
    assert "somebody" not in recorded.read_text()
    assert replay([recorded], model=None, settings={}, limit=None) == 0
    assert "2 requests with 27 tokens: 0 differ" in capsys.readouterr().out
    first["outputs"][1]["tokens"][4] += 1
    other = recorded.with_name("other.jsonl")
    other.write_text(json.dumps(first) + "\n" + '{"version":1,"settings"')  # killed while it wrote
    assert replay([recorded, other], model=None, settings={"max_num_seqs": 1}, limit=None) == 1
    told = capsys.readouterr()
    place = f"{other}:1, request {first['request']['request_id']}"
    assert "3 requests with 45 tokens: 1 differ" in told.out
    assert f"{place}: completion 1, token 4: tokens was {PROMPT[4] + 1}; now {PROMPT[4]}" in told.out
    assert "other.jsonl:2 is incomplete and left out" in told.err
    first["outputs"][1]["tokens"][4] -= 1
    first["outputs"][0]["logprobs"] = "AAAAAA" + first["outputs"][0]["logprobs"][6:]
    other.write_text(json.dumps(first) + "\n")
    assert replay([other], model=None, settings={}, limit=1) == 1
    assert "completion 0, token 0: log-probability was 0 (0x00000000); now -0.5 (0xbf000000)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="settings that are not understood: nothing"):
        replay([other], model=None, settings={"nothing": 1}, limit=None)


def test_paths_at_which_a_proxy_serves(server):
    for path in ("/health", "/proxy/health"):
        assert httpx.get(server.url + path).status_code == 200
    assert httpx.get(server.url + "/other/health").status_code == 404


def test_adapters_come_and_go(server, recorded):
    def load(name: str, path: str, **fields) -> httpx.Response:
        return post(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path} | fields)

    plain = tokens(server)
    assert load("a", "a").status_code == 200
    assert tokens(server, "a") == plain[::-1]
    cards = {card["id"]: card for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert cards["a"]["parent"] == "test-model"
    for name, path, code, says in [
        ("test-model", "a", 400, "the name of the model itself"),
        ("a", "a", 400, "already; unload it first"),
        ("", "a", 400, "name"),
        ("c", "none", 404, "there is no 'none' below --lora-root"),
        ("c", "..", 400, "must name a folder or a file below --lora-root"),
        ("c", "damaged", 400, "damaged"),
        ("c", "new", 400, "adapter_config.json"),
    ]:
        answer = load(name, path)
        assert answer.status_code == code, answer.text
        assert says in answer.json()["error"]["message"]
    assert load("a", "b", load_inplace=True).status_code == 200
    assert tokens(server, "a") == plain[::-1]
    for key in ({}, {"Authorization": "Bearer other"}):
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "a"}, key).status_code == 401
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "a"}).status_code == 200
    gone = post(server, "/v1/unload_lora_adapter", {"lora_name": "a"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert post(server, "/v1/completions", {"model": "a", "prompt": PROMPT}).status_code == 404


def test_weights_are_put_aside_and_replaced(server, recorded):
    def update(folder: str, **fields) -> httpx.Response:
        return post(server, "/update_weights", {"model_path": folder} | fields)

    def is_sleeping() -> bool:
        return httpx.get(f"{server.url}/is_sleeping", headers=ADMIN).json()["is_sleeping"]

    plain = tokens(server)
    assert update("old").json()["weight_version"] == "1"
    assert tokens(server) == plain[1:] + plain[:1]
    assert update("new", weight_version="named", mode="abort").json()["message"] == (
        "the weights of new are served as version named"
    )
    assert tokens(server) == plain[2:] + plain[:2]
    info = httpx.get(f"{server.url}/server_info").json()
    assert info["weight_version"] == "named"
    assert post(server, "/sleep?level=2").json() == {"is_sleeping": True}
    assert is_sleeping()
    refused = post(server, "/v1/completions", {"model": "test-model", "prompt": PROMPT})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
    assert post(server, "/wake_up").json() == {"is_sleeping": False}
    assert not is_sleeping()
    for folder, fields, code, says in [
        ("a", {}, 400, "has no weights"),
        ("cut", {}, 400, "cut"),
        ("none", {}, 404, "below --weights-root"),
        ("..", {}, 400, "below --weights-root"),
        ("old", {"flush_cache": False}, 400, "flush_cache must be true"),
        ("old", {"mode": "keep"}, 400, "mode"),
    ]:
        answer = update(folder, **fields)
        assert answer.status_code == code, answer.text
        assert says in answer.json()["error"]["message"]
    for query, says in (("level=3", "1 or 2"), ("mode=keep", "wait or abort"), ("timeout=1e9", "a whole number")):
        answer = post(server, f"/sleep?{query}")
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]
    assert httpx.get(f"{server.url}/is_sleeping").status_code == 401
    assert tokens(server) == plain[2:] + plain[:2]
