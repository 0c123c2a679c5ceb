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
    own = {"prompt": f"say {name}", "max_tokens": 5} if url == "/v1/completions" else {}
    body = {"model": "test-model"} | own | body
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


@pytest.mark.parametrize(
    ("endpoint", "fields", "kind"),
    [("/v1/responses", {"input": "Hi", "background": True}, "response"), ("/v1/completions", {}, "text_completion")],
)
def test_other_endpoints(server, endpoint, fields, kind):
    client = client_of(server)
    done = ended(client, start(client, line("a", endpoint, max_output_tokens=3, **fields), endpoint=endpoint))
    (answer,) = lines_of(client, done.output_file_id).values()
    assert answer["response"]["body"]["object"] == kind
    assert done.error_file_id is None


def test_what_the_model_cannot_do_fails_each_request(server):
    client = client_of(server)
    done = ended(client, start(client, line("a", "/v1/embeddings", input="x"), endpoint="/v1/embeddings"))
    assert (done.status, done.output_file_id) == ("completed", None)
    assert lines_of(client, done.error_file_id)["a"]["response"]["status_code"] == 400


def test_line_ends_and_marks_of_other_systems(server):
    client = client_of(server)
    data = b"\xef\xbb\xbf\r\n" + line("a").encode() + b"\r\n\r\n  \r\n" + line("b").encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    done = ended(client, batch)
    assert (done.status, done.request_counts.completed) == ("completed", 2)
    assert lines_of(client, done.output_file_id).keys() == {"a", "b"}


def test_lines_that_are_wrong(server):
    """A batch with a wrong line fails before any request is asked, and tells which lines are wrong."""
    client = client_of(server)
    wrong = [
        ("{", "invalid_json_line", None),
        (line("one").replace('"custom_id": "one", ', ""), "missing_required_parameter", None),
        (line("ok"), "duplicate_custom_id", "custom_id"),
        (line("other", "/v1/chat/completions"), "invalid_url", "url"),
        (line("get").replace("POST", "GET"), "invalid_method", "method"),
        (line("who", model="nobody"), "model_not_found", "body.model"),
        (line("x" * 600), "invalid_custom_id", "custom_id"),
        (json.dumps({"custom_id": 5, "url": "/v1/completions", "body": {}}), "invalid_request", None),
    ]
    done = ended(client, start(client, line("ok"), "", *(text for text, _, _ in wrong)))
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert done.failed_at >= done.created_at
    expected = [(code, param, number) for number, (_, code, param) in enumerate(wrong, start=3)]
    assert [(one.code, one.param, one.line) for one in done.errors.data] == expected
    for lines, code in (([" "], "empty_file"), ([line(f"n{i}") for i in range(51)], "request_limit_exceeded")):
        done = ended(client, start(client, *lines))
        assert (done.status, [one.code for one in done.errors.data]) == ("failed", [code])


def test_keys_do_not_see_each_others_files(server):
    mine = client_of(server)
    other = client_of(server, KEYS[1])
    batch = start(mine, line("a"))
    done = ended(mine, batch)
    for ask in (
        lambda: other.files.retrieve(batch.input_file_id),
        lambda: other.files.content(done.output_file_id),
        lambda: other.files.delete(batch.input_file_id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
        ),
        lambda: mine.files.retrieve("file-../../../etc/passwd"),
        lambda: mine.batches.retrieve(f"{batch.id}.json"),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert (other.files.list().data, other.batches.list().data) == ([], [])
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "sk-none").files.list()


def test_bad_requests(server):
    client = client_of(server)
    headers = {"Authorization": f"Bearer {KEYS[0]}"}

    def refusal(path: str, **options) -> tuple[int, str | None]:
        response = httpx.post(server.url + path, headers=headers, **options)
        return response.status_code, response.json()["error"]["param"]

    some = {"file": ("a.jsonl", b"{}")}
    assert refusal("/v1/files", data={"purpose": "assistants"}, files=some) == (400, "purpose")
    assert refusal("/v1/files", data={"purpose": "batch"}, files={"data": b"{}"}) == (400, "file")
    assert refusal("/v1/files", json={"purpose": "batch"}) == (400, None)
    for expiry in (
        {"expires_after[anchor]": "now"},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "9"},
    ):
        assert refusal("/v1/files", data={"purpose": "batch"} | expiry, files=some) == (400, "expires_after")
    file = upload(client, line("a"))
    good = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for field, value in (
        ("endpoint", "/v1/audio/speech"),
        ("endpoint", "/v1/completions\n"),
        ("completion_window", "soon"),
        ("completion_window", "31d"),
        ("metadata", {"a": 5}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 9}),
    ):
        assert refusal("/v1/batches", json=good | {field: value}) == (400, field)
    for path, field in (("files", "limit"), ("files", "order"), ("files", "purpose"), ("batches", "limit")):
        response = httpx.get(f"{server.url}/v1/{path}", params={field: "x"}, headers=headers)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    client.files.delete(file.id)


def test_an_upload_that_breaks_off_leaves_nothing(server):
    client = client_of(server, KEYS[1])
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"y" * 3000
    response = httpx.post(
        f"{server.url}/v1/files", content=body,
        headers={"Authorization": f"Bearer {KEYS[1]}", "Content-Type": "multipart/form-data; boundary=x"},
    )  # fmt: skip
    assert (response.status_code, "too early" in response.json()["error"]["message"]) == (400, True)
    assert client.files.list().data == []


def test_limits_of_a_key(server):
    client = client_of(server, KEYS[1])
    with pytest.raises(openai.APIStatusError, match="524288 bytes that a file may have") as refused:
        upload(client, "x" * 600_000)
    assert refused.value.status_code == 413
    files = [upload(client, "x" * 500_000).id for _ in range(2)]
    with pytest.raises(openai.APIStatusError, match="--max-files-bytes") as refused:
        upload(client, "x" * 100_000)
    assert refused.value.status_code == 413
    client_of(server).files.delete(upload(client_of(server), "x" * 100_000).id)  # another key has room
    found = [one.id for one in client.files.list(limit=1)]  # the client asks for page after page
    assert found == files[::-1]
    assert [one.id for one in client.files.list(order="asc", limit=1)] == files
    for one in files:
        client.files.delete(one)
    long = [line(f"l{i}", max_tokens=100, ignore_eos=True) for i in range(4)]
    running = [start(client, *long) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="--max-batches-in-progress"):
        start(client, line("a"))
    for batch in running:
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    for batch in running:
        done = ended(client, batch)
        assert done.status == "cancelled"
        assert done.cancelling_at <= done.cancelled_at
        errors = lines_of(client, done.error_file_id)
        assert {one["error"]["code"] for one in errors.values()} <= {"batch_cancelled"}
        assert len(errors) + len(lines_of(client, done.output_file_id)) == done.request_counts.total
        with pytest.raises(openai.ConflictError, match="cannot be cancelled"):
            client.batches.cancel(batch.id)


def test_a_batch_whose_time_is_over(server):
    client = client_of(server)
    lines = [line("short"), *(line(f"long {i}", max_tokens=200, ignore_eos=True) for i in range(3))]
    done = ended(client, start(client, *lines, window="1s"))
    assert (done.status, done.request_counts.total) == ("expired", 4)
    assert done.expired_at >= done.expires_at
    assert lines_of(client, done.output_file_id).keys() == {"short"}
    errors = lines_of(client, done.error_file_id)
    assert errors.keys() == {"long 0", "long 1", "long 2"}
    for one in errors.values():
        assert (one["response"], one["error"]["code"]) == (None, "batch_expired")


def test_openapi_names_the_endpoints_of_files(server, http):
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    paths = httpx.get(f"{server.url}/openapi.json", headers=headers).json()["paths"]
    own = {"/v1/files", "/v1/files/{id}", "/v1/files/{id}/content", "/v1/batches", "/v1/batches/{id}"}
    assert paths.keys() > own | {"/v1/batches/{id}/cancel"}
    assert set(paths["/v1/batches"]) == {"get", "post"}
    assert own.isdisjoint(http.get("/openapi.json").json()["paths"])


def test_a_server_without_a_folder_says_so(http):
    for response in (http.get("/v1/files"), http.post("/v1/batches", json={})):
        assert response.status_code == 404
        assert "--files-dir" in response.json()["error"]["message"]


def test_a_folder_that_cannot_be_made(tiny_model_folder, tmp_path):
    from serving import running_server

    (tmp_path / "file").write_text("")
    log = tmp_path / "log"
    with running_server(
        tiny_model_folder, log, engine="ParrotEngine", ready=False, files_dir=str(tmp_path / "file" / "x")
    ) as server:
        assert server.process.wait(60) == 1
    assert "Not a directory" in log.read_text()
