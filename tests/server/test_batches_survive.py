"""Batches survive what befalls a server: kills, full disks, damaged files, and large files."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
import time
from pathlib import Path

import httpx
import openai
import pytest
from serving import free_port, running_server, wait_until
from test_batches import ended, line, lines_of, start, upload

pytestmark = pytest.mark.slow


@pytest.fixture
def lives(tiny_model_folder, tmp_path):
    """A function that starts a server on the same folder and port, each time a new process."""
    port = free_port()

    @contextlib.contextmanager
    def live(engine: str = "SlowEngine", **options):
        options = {"files_dir": str(tmp_path / "state"), "port": port, "batch_concurrency": 2} | options
        with running_server(tiny_model_folder, tmp_path / "log", engine=engine, ready=False, **options) as server:
            server.wait_ready(240)
            yield server

    return live


@pytest.mark.parametrize(("requests", "kills", "servers"), [(60, 4, 1), (60, 4, 2), (500, 50, 1)])
def test_kills_at_random_moments(lives, requests, kills, servers):
    """All requests are answered, each once, and none of the answers that were there is lost."""
    rng = random.Random(requests)
    names = [f"r{i}" for i in range(requests)]
    with lives(api_server_count=servers) as server:
        client = server.openai()
        wrong = {name for name in names if rng.random() < 0.1}
        lines = [line(name, temperature=11 if name in wrong else 0, max_tokens=3) for name in names]
        batch = start(client, *lines)
        wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        server.process.kill()
    before = 0
    for _ in range(kills - 1):
        with lives(api_server_count=servers) as server:
            time.sleep(rng.random() * 0.07 * requests / kills)
            with contextlib.suppress(openai.APIConnectionError):
                counts = client.batches.retrieve(batch.id).request_counts
                assert counts.completed + counts.failed >= before
                before = counts.completed + counts.failed
            server.process.kill()
    with lives(api_server_count=servers) as server:
        client = server.openai()
        done = ended(client, batch, seconds=120)
        assert (done.status, done.request_counts.total) == ("completed", requests)
        answers = lines_of(client, done.output_file_id)  # asserts that each is there once
        errors = lines_of(client, done.error_file_id)
        assert answers.keys() == set(names) - wrong
        assert errors.keys() == wrong
        assert (done.request_counts.completed, done.request_counts.failed) == (len(answers), len(errors))
        assert server.stop() == 0


def test_a_drain_ends_at_once(lives):
    """Requests of batches are not waited for; the next server asks them again."""
    with lives() as server:
        batch = start(server.openai(), *(line(f"l{i}", max_tokens=250, ignore_eos=True) for i in range(4)))
        wait_until(lambda: server.openai().batches.retrieve(batch.id).status == "in_progress")
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 4
    with lives() as server:
        assert ended(server.openai(), batch, 60).request_counts.completed == 4


def test_a_full_disk(lives):
    """An upload is refused; a batch waits, says why, and goes on when there is room again."""
    with lives("ParrotEngine") as server:
        client = server.openai()
        batch_lines = [line(f"r{i}", prompt=f"word {i} " * 20, max_tokens=100) for i in range(300)]
        pid = server.process.pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        file = httpx.post(
            f"{server.url}/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"x" * 200_000)}, timeout=20
        )
        assert (file.status_code, file.json()["error"]["code"]) == (507, "disk_full")
        assert client.files.list().data == []
        batch = start(client, *batch_lines)

        def trouble():
            errors = client.batches.retrieve(batch.id).errors
            return errors is not None and errors.data[0].code == "storage_error"

        wait_until(trouble, 20)
        assert client.batches.retrieve(batch.id).status == "in_progress"
        assert client.completions.create(model="test-model", prompt="Hi", max_tokens=2).choices, "others are served"
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        done = ended(client, batch, 60)
        assert (done.status, done.errors) == ("completed", None)
        assert len(lines_of(client, done.output_file_id)) == 300


def test_damaged_files(lives, tmp_path):
    """What cannot be read is told, and harms nothing else. Answers behind a damaged line are asked for again."""
    with lives() as server:
        client = server.openai()
        names = {f"r{i}" for i in range(40)}
        batch = start(client, *(line(name) for name in sorted(names)))
        lost = start(client, *(line(name) for name in sorted(names)))
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 5)
        server.process.kill()
    folder = tmp_path / "state" / "everybody"
    output = folder / "batches" / f"{batch.id}.output"
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:3]) + b"\0" * 4096 + b"".join(lines[3:]))
    (folder / "batches" / f"{lost.id}.json").write_bytes(b'{"id": "batch')
    damaged = folder / "files" / f"{lost.input_file_id}.json"
    damaged.write_bytes(b"\xff")
    with lives() as server:
        client = server.openai()
        done = ended(client, batch, 60)
        assert done.status == "completed"
        assert lines_of(client, done.output_file_id).keys() == names
        for path in (f"batches/{lost.id}", f"files/{lost.input_file_id}"):
            response = server.http().get(f"/v1/{path}")
            assert (response.status_code, response.json()["error"]["code"]) == (500, "corrupt_record")
        assert [one.id for one in client.batches.list()] == [batch.id]
        assert ended(client, start(client, line("a"))).status == "completed"
        assert str(damaged) in server.log.read_text()
        assert "cut off its answers" in server.log.read_text()
        batch = start(client, *(line(name, max_tokens=100, ignore_eos=True) for name in sorted(names)))
        wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        server.process.kill()
    (folder / "files" / batch.input_file_id).unlink()
    with lives() as server:
        done = ended(server.openai(), batch, 60)
        assert (done.status, done.errors.data[0].code) == ("failed", "input_file_not_found")


def memory(pid: int) -> int:
    """Most bytes of memory that a process has had since its clear_refs were written to."""
    (text,) = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("VmHWM")]
    return int(text.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_file_of_200_mb_costs_little_memory(lives, tmp_path):
    """Upload, validation, a batch of it, and download, with 50,000 requests and with a single line."""
    source = tmp_path / "large.jsonl"
    with source.open("w") as file:
        for i in range(50_000):
            file.write(line(f"request {i}", prompt="x" * 3950, truncate_prompt_tokens=20, max_tokens=1) + "\n")
    assert source.stat().st_size > 200e6
    with lives("ParrotEngine", batch_concurrency=None) as server:
        client = server.openai()
        ended(client, start(client, *(line(f"warm {i}") for i in range(300))))
        pid = server.process.pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        before = memory(pid)
        large = client.with_options(timeout=200).files.create(file=source, purpose="batch")
        after_upload = memory(pid)
        batch = client.batches.create(input_file_id=large.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 500, 100)
        client.batches.cancel(batch.id)
        done = ended(client, batch, 100)
        assert done.request_counts.total == 50_000
        with client.files.with_streaming_response.content(large.id) as content:
            assert sum(len(part) for part in content.iter_bytes(2**20)) == large.bytes
        whole = upload(client, "x" * 2**20 * 200)
        failed = client.batches.create(input_file_id=whole.id, endpoint="/v1/completions", completion_window="24h")
        assert ended(client, failed, 60).errors.data[0].code == "line_too_long"
        cost = memory(pid) - before
        print(f"upload {(after_upload - before) / 2**20:.1f} MiB, all {cost / 2**20:.1f} MiB")
        assert cost < 64 * 2**20


def test_an_upload_may_be_slow_but_not_stand_still(lives):
    with lives("ParrotEngine", client_timeout=1.0) as server:
        head = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        head += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'

        def send(pause: float, size: int) -> int:
            total = len(head) + 12 * size + len(b"\r\n--x--\r\n")
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(
                    b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
                    b"Content-Length: %d\r\n\r\n" % total + head
                )
                with contextlib.suppress(ConnectionError):
                    for _ in range(12):
                        connection.sendall(b"y" * size)
                        time.sleep(pause)
                    connection.sendall(b"\r\n--x--\r\n")
                return int(connection.recv(100).split()[1])

        assert send(0.2, 2**19) == 200
        assert send(0.2, 10) == 408
        assert len(json.loads(server.http().get("/v1/files").text)["data"]) == 1
