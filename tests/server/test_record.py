"""Requests that a server recorded are run again: equal bits pass, one other bit is found."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import running_server, server_of_models

from jaxserve.commands.replay import replay
from jaxserve.records import unpack_bits

BODY = {"model": "test-model", "max_tokens": 12, "logprobs": 1, "temperature": 0.8, "n": 2, "stop": ["the"]}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record")
    file = folder / "requests.jsonl"
    options = {"model": "demo", "dtype": "bfloat16", "deterministic": True, "max_num_seqs": 4, "kv_pages": 200}
    with running_server(folder, folder / "log", engine=None, config=options, record=str(file)) as server:
        ask = lambda i: httpx.post(server.url + "/v1/completions", json=BODY | {"prompt": f"Once {i}"}, timeout=120)  # noqa: E731
        with ThreadPoolExecutor(4) as threads:
            answers = [answer.json() for answer in threads.map(ask, range(4))]
    assert all(len(answer["choices"]) == 2 for answer in answers)
    return file


@pytest.mark.slow
def test_a_server_s_records_are_equal_when_they_run_again(recorded, capsys):
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert len(lines) == 4
    assert recorded.stat().st_mode & 0o777 == 0o600
    assert "tenant" not in lines[0]["request"]
    with recorded.open("a") as file:
        file.write('{"version":1,"settings"')  # the server was killed while it wrote
    other = recorded.with_name("other.jsonl")
    first = lines[1]
    values = unpack_bits(first["outputs"][0]["logprobs"])
    first["outputs"][0]["tokens"][-1] += 1
    other.write_text(json.dumps(first) + "\n")
    assert replay([recorded], model=None, settings={"max_num_seqs": 2}, limit=None) == 0
    assert replay([recorded, other], model=None, settings={}, limit=None) == 1
    told = capsys.readouterr().out
    assert "5 requests" in told
    assert f"other.jsonl:1, request {first['request']['request_id']}: completion 0, token {len(values) - 1}" in told


@pytest.mark.slow
def test_several_models_record_into_one_file(tmp_path, capsys):
    """Also after one has been unloaded and started again. The engines of the records are those of the models."""
    engine = "dtype: bfloat16, deterministic: true, kv-pages: 200"
    (tmp_path / "models.yaml").write_text(
        f"models: [{{name: a, source: demo, settings: {{max-num-seqs: 4, {engine}}}}},"
        f" {{name: b, source: demo, settings: {{max-num-seqs: 2, {engine}}}}}]"
    )
    file = tmp_path / "requests.jsonl"
    flags = ["--models", str(tmp_path / "models.yaml"), "--record", str(file), "--admin-key", "admin"]
    with server_of_models(tmp_path / "log", *flags, engine=None) as server:
        for name in ("a", "b", "a"):
            answer = httpx.post(f"{server.url}/v1/completions", json=BODY | {"model": name, "prompt": "x"}, timeout=120)
            assert answer.status_code == 200, answer.text
            unload = f"{server.url}/v2/repository/models/{name}/unload"
            assert httpx.post(unload, headers={"Authorization": "Bearer admin"}, timeout=60).status_code == 200
    sizes = [json.loads(line)["settings"]["max_num_seqs"] for line in file.read_text().splitlines()]
    assert sizes == [4, 2, 4]
    assert file.stat().st_mode & 0o777 == 0o600
    assert replay([file], model=None, settings={}, limit=None) == 0
    assert "3 requests" in capsys.readouterr().out


def test_what_is_no_record_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text('{"hello": 1}\n')
    with pytest.raises(ValueError, match="file:1 is not a record"):
        replay([file], model=None, settings={}, limit=None)
