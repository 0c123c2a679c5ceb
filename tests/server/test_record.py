"""Requests that a server recorded are run again: equal bits pass, one other bit is found."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import running_server

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


def test_what_is_no_record_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text('{"hello": 1}\n')
    with pytest.raises(ValueError, match="file:1 is not a record"):
        replay([file], model=None, settings={}, limit=None)
