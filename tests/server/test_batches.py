"""Files and batches through a server's process and the official client."""

from __future__ import annotations

import json
from collections import Counter

import httpx
import openai
import pytest
from serving import ServerUnderTest, wait_until

KEYS = ["sk-one", "sk-two"]


@pytest.fixture(scope="module")
def server(tiny_model_folder, tmp_path_factory):
    from serving import running_server

    folder = tmp_path_factory.mktemp("files")
    options = {
        "files_dir": str(folder / "state"), "api_keys": KEYS, "max_files_bytes": 2**20, "max_file_bytes": 2**19,
        "max_batch_requests": 50, "max_batches_in_progress": 2,
    }  # fmt: skip
    with running_server(tiny_model_folder, folder / "log", engine="SlowEngine", **options) as server:
        yield server


def client_of(server: ServerUnderTest, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30)


def line(name: str, url: str = "/v1/completions", **body) -> str:
    body = {"model": "test-model", "prompt": f"say {name}", "max_tokens": 5} | body
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def upload(client: openai.OpenAI, *lines: str, name: str = "in.jsonl"):
    return client.files.create(file=(name, "\n".join(lines).encode()), purpose="batch")


def start(client: openai.OpenAI, *lines: str, endpoint: str = "/v1/completions", window: str = "24h", **more):
    file = upload(client, *lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **more)


def ended(client: openai.OpenAI, batch, seconds: float = 20):
    """The batch once it has ended."""
    over = ("completed", "failed", "expired", "cancelled")
    wait_until(lambda: client.batches.retrieve(batch.id).status in over, seconds)
    return client.batches.retrieve(batch.id)


def lines_of(client: openai.OpenAI, file_id: str | None) -> dict[str, dict]:
    """The lines of a file of answers, each of which answers another request."""
    if file_id is None:
        return {}
    found = [json.loads(one) for one in client.files.content(file_id).text.splitlines()]
    assert all(one.keys() == {"id", "custom_id", "response", "error"} for one in found)
    assert max(Counter(one["custom_id"] for one in found).values()) == 1
    return {one["custom_id"]: one for one in found}


def test_the_whole_cycle(server):
    client = client_of(server)
    chats = [
        line(f"c{i}", "/v1/chat/completions", messages=[{"role": "user", "content": f"Hi {i}"}], stream=True)
        for i in range(8)
    ]
    wrong = line("hot", "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], temperature=11)
    file = upload(client, *chats, wrong, name="night ö.jsonl")
    assert (file.object, file.purpose, file.filename, file.status) == ("file", "batch", "night ö.jsonl", "processed")
    assert file.bytes == len("\n".join([*chats, wrong]))
    assert file.expires_at - file.created_at == 30 * 86_400
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"job": "7"}
    )
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"job": "7"})
    assert batch.expires_at - batch.created_at == 86_400
    with pytest.raises(openai.ConflictError, match="is the input of batch_"):
        client.files.delete(file.id)
    done = ended(client, batch)
    assert (done.status, done.errors, done.model) == ("completed", None, "test-model")
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.request_counts.model_dump() == {"total": 9, "completed": 8, "failed": 1}

    answers = lines_of(client, done.output_file_id)
    assert answers.keys() == {f"c{i}" for i in range(8)}
    for answer in answers.values():
        assert answer["id"].startswith("batch_req_")
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
        assert answer["response"]["request_id"]
        assert answer["response"]["body"]["object"] == "chat.completion"
    (failed,) = lines_of(client, done.error_file_id).values()
    assert (failed["custom_id"], failed["error"], failed["response"]["status_code"]) == ("hot", None, 400)
    assert failed["response"]["body"]["error"]["param"] == "temperature"

    output = client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert {one.id for one in client.files.list(purpose="batch_output")} >= {output.id, done.error_file_id}
    content = httpx.get(
        f"{server.url}/v1/files/{output.id}/content", headers={"Authorization": "Bearer sk-one", "Range": "bytes=0-8"}
    )
    assert (content.status_code, content.text) == (206, '{"id":"ba')
    assert client.batches.list(limit=1).data[0].id == batch.id
    for one in (file.id, output.id):
        assert client.files.delete(one).deleted
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            client.files.retrieve(one)
