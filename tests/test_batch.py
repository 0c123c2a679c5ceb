"""Batch files through a real engine process, also when it is killed in the middle."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from jaxserve.commands.cli import main
from jaxserve.server.batches.lines import BatchError
from jaxserve.server.process.batch_files import model_of

ROOT = Path(__file__).parent.parent
CASE = "llama3_gqa"
SMALL = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "128", "--kv-pages", "32"]
SMALL += ["--max-waiting", "1"]  # a server rejects requests beyond it, but a batch must not
TEXTS = [f"text {i} " * (1 + i % 5) for i in range(24)]
CHATS = [f"question {i}" for i in range(10)]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 30, "model": "whatever"}
WRONG = {
    "too hot": {"prompt": "x", "temperature": 11},
    "too long": {"prompt": [5] * 128},
    "no prompt": {"max_tokens": 3},
    "beyond the vocabulary": {"prompt": [5, 10**30]},
    "a seed of 30 digits": {"prompt": "x", "seed": 10**30},
}


def lines():
    made = [{"custom_id": f"t{i}", "body": {"prompt": text} | GREEDY} for i, text in enumerate(TEXTS)]
    made += [{"custom_id": "two", "body": {"prompt": "x", "n": 2, "logprobs": 1} | GREEDY}]
    made += [{"custom_id": name, "body": body} for name, body in WRONG.items()]
    for line in made:
        line["url"] = "/v1/completions"
    for i, text in enumerate(CHATS):
        body = {"messages": [{"role": "user", "content": text}], "stream": True} | GREEDY
        made.insert(3 * i, {"custom_id": f"c{i} ö", "url": "/v1/chat/completions", "body": body})
    return [line | {"method": "POST"} for line in made]


def write_lines(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def command(source, target, folder):
    return [sys.executable, "-m", "jaxserve", "batch", str(source), str(target), "--model", str(folder), *SMALL]


def run(source, target, folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command(source, target, folder), capture_output=True, text=True, env=environment, timeout=200)


def answers(target):
    """custom_id -> status and the model's answer."""
    entries = [json.loads(line) for line in target.read_text().splitlines()]
    assert all(entry.keys() == {"id", "custom_id", "response", "error"} for entry in entries)
    assert len({entry["id"] for entry in entries}) == len(entries)
    once = Counter(entry["custom_id"] for entry in entries)
    assert once == Counter(line["custom_id"] for line in lines()), "each request is answered once"
    replies = {entry["custom_id"]: entry["response"] for entry in entries}
    for reply in replies.values():
        for choice in reply["body"].get("choices", ()):
            choice.pop("logprobs")  # the last bits depend on the other rows of the batch
    return {name: (reply["status_code"], reply["body"].get("choices")) for name, reply in replies.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("batch") / "in.jsonl", lines())


@pytest.fixture(scope="module")
def whole(source, model_folders):
    """The output of an uninterrupted run."""
    target = source.with_name("whole.jsonl")
    done = run(source, target, model_folders(CASE))
    assert done.returncode == 0, done.stderr
    assert "40/40" in done.stderr
    return target


@pytest.mark.slow
def test_every_request_is_answered(whole):
    given = answers(whole)
    wrong = {name: given.pop(name) for name in WRONG}
    assert {status for status, _ in wrong.values()} == {400}
    assert {status for status, _ in given.values()} == {200}
    assert [choice["index"] for choice in given["two"][1]] == [0, 1]
    assert all(choices[0]["finish_reason"] == "length" for _, choices in given.values())
    assert all(choices[0]["text"] for name, (_, choices) in given.items() if name[0] == "t")
    assert all(choices[0]["message"]["content"] for name, (_, choices) in given.items() if name[0] == "c")


def test_errors_are_answers(whole):
    entries = {entry["custom_id"]: entry for entry in map(json.loads, whole.read_text().splitlines())}
    assert entries["too hot"]["response"]["body"]["error"]["param"] == "temperature"
    assert "maximum context length is 128" in entries["too long"]["response"]["body"]["error"]["message"]


def start_and_wait(source, target, folder, more):
    """Starts a run in its own process group and waits for `more` answers; returns it and its engine's process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    before = target.read_bytes().count(b"\n") if target.exists() else 0
    process = subprocess.Popen(
        command(source, target, folder), env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not target.exists() or target.read_bytes().count(b"\n") < before + more:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    (engine,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return process, Path(f"/proc/{engine}")


def wait_gone(engine):
    deadline = time.monotonic() + 20
    while engine.exists() and "zombie" not in (engine / "status").read_text():
        assert time.monotonic() < deadline, "the engine outlives its parent"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_killed_and_resumed(source, whole, model_folders, tmp_path):
    target = tmp_path / "out.jsonl"
    folder = model_folders(CASE)
    process, engine = start_and_wait(source, target, folder, more=3)
    process.kill()  # kills only the API server: the engine must notice
    process.wait()
    wait_gone(engine)
    process, engine = start_and_wait(source, target, folder, more=3)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_gone(engine)

    kept = target.read_bytes()
    kept = kept[: kept.rindex(b"\n") + 1]
    kept_lines = kept.count(b"\n")
    assert 6 <= kept_lines < len(lines()) - 2
    target.write_bytes(kept + b'{"id":"batch_req_1","custom_id":"t')  # an incomplete line
    done = run(source, target, folder)
    assert done.returncode == 0, done.stderr
    assert f"{kept_lines} of 40 requests are answered already" in done.stderr
    assert target.read_bytes().startswith(kept)
    assert answers(target) == answers(whole)

    size = target.stat().st_size
    again = run(source, target, folder)  # no request is left, so no model is loaded
    assert (again.returncode, again.stderr) == (0, f"all 40 requests are answered in {target}\n")
    assert target.stat().st_size == size


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_an_engine_that_is_killed(source, whole, model_folders, tmp_path):
    """Another engine is started, which gets the unfinished requests."""
    target = tmp_path / "out.jsonl"
    process, engine = start_and_wait(source, target, model_folders(CASE), more=3)
    os.kill(int(engine.name), signal.SIGKILL)
    assert process.wait(120) == 0
    assert answers(target) == answers(whole)


@pytest.mark.slow
def test_a_full_disk(source, whole, model_folders, tmp_path):
    """The run ends with the reason; its answers count, and the next run continues after them."""
    target = tmp_path / "out.jsonl"
    folder = model_folders(CASE)
    limit = whole.stat().st_size // 2
    done = subprocess.run(
        command(source, target, folder),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=200,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    assert "jaxserve: [Errno 27] File too large" in done.stderr
    assert "Traceback" not in done.stderr
    kept = target.read_bytes()
    assert 0 < kept.count(b"\n") < len(lines())
    assert len(kept) <= limit
    done = run(source, target, folder)
    assert done.returncode == 0, done.stderr
    assert target.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    assert answers(target) == answers(whole)


def test_a_model_that_cannot_be_loaded(source, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = run(source, tmp_path / "out.jsonl", tmp_path)
    assert done.returncode == 1
    assert "architectures=[] is not supported" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == b""


# Invalid files, for which no model may be loaded.


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """A function that runs a batch which must fail, and returns what it prints."""

    def start(*_):
        raise AssertionError("the engine was started")

    monkeypatch.setattr("jaxserve.server.process.batch_files.EngineProcess", start)

    def attempt(source, target=tmp_path / "out.jsonl"):
        assert main(["batch", str(source), str(target), "--model", "demo"]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("jaxserve: ")
        assert err.count("\n") == 1
        return err

    return attempt


GOOD = {"custom_id": "a", "url": "/v1/completions", "method": "POST", "body": {"prompt": "x"}}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (b"{", ":2: Input data was truncated"),
        (b"[]", ":2: Expected an object, got a list"),
        (b"\xff\xfe", ":2: "),
        (b'{"custom_id": "b\xff"}', ":2: "),
        (b"[" * 100_000, ":2: "),
        ({"custom_id": 5}, ":2: custom_id must be a string, got an integer"),
        ({"body": []}, ":2: body must be an object, got a list"),
        ({"custom_id": "a"}, ": custom_id 'a' stands on several lines"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_input_that_is_no_batch(refused, tmp_path, second, message):
    source = tmp_path / "in.jsonl"
    raw = second if isinstance(second, bytes) else json.dumps(GOOD | {"custom_id": "b"} | second).encode()
    source.write_bytes(json.dumps(GOOD).encode() + b"\n" + raw + b"\n")
    assert f"{source}{message}" in refused(source)
    assert not (tmp_path / "out.jsonl").exists()


def test_missing_fields(refused, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"custom_id": "a"}])
    assert "in.jsonl:1: Object missing required field `url`" in refused(source)


def test_files_that_are_missing(refused, tmp_path):
    assert f"No such file or directory: '{tmp_path / 'none'}'" in refused(tmp_path / "none")
    source = write_lines(tmp_path / "in.jsonl", [GOOD])
    assert "No such file or directory" in refused(source, tmp_path / "none" / "out.jsonl")


def test_output_over_the_input(refused, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [GOOD])
    (tmp_path / "link").symlink_to(source)
    assert "input and output are the same file" in refused(source, tmp_path / "link")
    assert json.loads(source.read_text()) == GOOD


@pytest.mark.parametrize("content", [b"precious, and without a newline", b'{"id": 1}\n', b"\n", b"\0" * 100, b"{}"])
def test_output_that_is_something_else_is_left_alone(refused, tmp_path, content):
    source = write_lines(tmp_path / "in.jsonl", [GOOD])
    target = tmp_path / "precious"
    target.write_bytes(content)
    assert "precious is not the output of a batch" in refused(source, target)
    assert target.read_bytes() == content


def test_output_of_another_batch(refused, whole, tmp_path):
    before = whole.read_bytes()
    source = write_lines(tmp_path / "in.jsonl", [GOOD])
    assert "which" in (message := refused(source, whole))
    assert "does not ask: not its output" in message
    assert whole.read_bytes() == before


@pytest.mark.slow
def test_lines_that_are_no_requests_of_a_batch(model_folders, tmp_path):
    """Invalid lines get errors as answers, and the others answers with the model's name."""
    folder = str(model_folders(CASE))
    lines = [
        GOOD,
        GOOD | {"custom_id": "b", "url": "/v1/audio/speech"},
        GOOD | {"custom_id": "c", "method": "GET"},
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    target = tmp_path / "out.jsonl"
    assert main(["batch", str(source), str(target), "--model", folder, *SMALL]) == 0
    answers = {line["custom_id"]: line["response"] for line in map(json.loads, target.read_text().splitlines())}
    assert (answers["a"]["status_code"], answers["a"]["body"]["model"]) == (200, folder)
    assert answers["a"]["body"]["system_fingerprint"].startswith("fp_")
    for name, got in (("b", "got POST /v1/audio/speech"), ("c", "got GET /v1/completions")):
        error = answers[name]["body"]["error"]
        assert (answers[name]["status_code"], error["param"], error["code"]) == (404, "url", "url_not_found")
        assert got in error["message"]
        assert "/v1/chat/completions" in error["message"]


def test_an_empty_batch(tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", [])
    assert main(["batch", str(source), str(tmp_path / "out.jsonl"), "--model", "demo"]) == 0
    assert "all 0 requests are answered" in capsys.readouterr().err


def test_model_named_by_the_requests(tmp_path):
    source = tmp_path / "in.jsonl"

    def write(*models):
        lines = [{"custom_id": str(i), "url": "/v1/completions", "body": {"model": m}} for i, m in enumerate(models)]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    write("demo", "demo")
    assert model_of(source) == "demo"
    for models in (("demo", "other"), (None, None)):
        write(*models)
        with pytest.raises(BatchError, match="--model"):
            model_of(source)


def test_a_byte_order_mark(tmp_path):
    """Editors on Windows write it at the beginning of a file."""
    line = json.dumps({"custom_id": "1", "url": "/v1/completions", "body": {"model": "demo"}})
    source = tmp_path / "in.jsonl"
    source.write_text(f"{line}\n", encoding="utf-8-sig")
    assert model_of(source) == "demo"
    source.write_text(f"{line}\n\ufeff{line}\n", encoding="utf-8")
    with pytest.raises(BatchError, match=r"in\.jsonl:2"):
        model_of(source)
