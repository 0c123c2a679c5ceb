"""API keys, the admin key and the metrics key: how they are given, and what each of them opens."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import jax
import pytest
from serving import DEMO, SMALL, ServerUnderTest, free_port
from test_limits import error_of, post

from jaxserve import entry
from jaxserve.commands import cli
from jaxserve.engine.timeline import MOST_STEPS, Timeline
from jaxserve.server.http.keys import ApiKey, read_key, read_keys
from jaxserve.server.http.settings import ServerSettings

MONITORS = ("/metrics", "/load", "/pool")


def cached(server, key: str | None = None, **body) -> int:
    answer = post(server, key=key, max_tokens=1, **body)
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def get(server, path: str, key: str | None) -> httpx.Response:
    return httpx.get(server.url + path, headers={} if key is None else {"x-api-key": key}, timeout=30)


def test_key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\n\nabc\ndef team-a\nghi team-b 3\n")
    assert read_keys(path) == [ApiKey("abc"), ApiKey("def", "team-a"), ApiKey("ghi", "team-b", 3)]
    path.write_text("abc\ndef team-a - -5\nghi team-b 3 7\n")
    assert read_keys(path) == [ApiKey("abc"), ApiKey("def", "team-a", None, -5), ApiKey("ghi", "team-b", 3, 7)]
    wrong = (
        ("a b c\n", ":1:"),
        ("a b 0\n", ":1:"),
        ("x\na b 1 d\n", ":2:"),
        ("a b 1 2 models 3\n", ":1:"),
        ("# none\n", "no API key"),
    )
    for text, what in wrong:
        path.write_text(text)
        with pytest.raises(ValueError, match=what) as caught:
            read_keys(path)
        assert "secret" not in str(caught.value)


def test_keys_of_a_file_have_salts_and_limits(start_server, tmp_path):
    """`several keys, from a file`; two keys or more are salted without being told."""
    path = tmp_path / "keys"
    path.write_text("one a\ntwo b 1\n")
    server = start_server("CachingEngine", api_keys=["zero"], api_key_file=str(path))
    assert post(server).status_code == 401
    assert cached(server, "one") == 0
    assert cached(server, "one") == 2
    assert cached(server, "one", cache_salt="x") == 0
    assert cached(server, "zero") == cached(server, "two") == 0
    assert httpx.get(server.url + "/v1/models", headers={"x-api-key": "one"}).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "salt", "shared"), [(["a", "b"], False, True), (["a"], None, True), (["a"], True, True)]
)
def test_salts(start_server, keys, salt, shared):
    """Off by a flag; one key is one tenant."""
    server = start_server("CachingEngine", api_keys=keys, salt_by_key=salt)
    assert cached(server, "a") == 0
    assert cached(server, keys[-1]) == (2 if shared else 0)


def test_which_keys_are_salted():
    one = ApiKey("a")
    two = ApiKey("b")
    for keys, given, salts in (
        ((), None, False),
        ((one,), None, False),
        ((one, ApiKey("a", "twice")), None, False),
        ((one, two), None, True),
        ((one, two), False, False),
        ((one,), True, True),
    ):
        assert ServerSettings(model_names=("m",), api_keys=keys, salt_by_key=given).salts_by_key == salts


@pytest.mark.parametrize("flag", ["--api-key", "--admin-key", "--metrics-key"])
def test_empty_keys_are_refused(flag, monkeypatch, capsys):
    for text in ("", "  "):
        with pytest.raises(SystemExit) as ended:
            cli.main(["serve", "demo", flag, text])
        assert ended.value.code == 2
        assert f"argument {flag}: a key must not be empty" in capsys.readouterr().err
    variable = f"JAXSERVE_{flag.removeprefix('--').replace('-', '_').upper()}"
    monkeypatch.setenv(variable, "")
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "demo"])
    assert ended.value.code == 2
    assert f"error: {variable}: a key must not be empty" in capsys.readouterr().err


def test_empty_keys_are_refused_from_python_too():
    with pytest.raises(ValueError, match="empty"):
        ApiKey("")


def test_a_key_does_not_show():
    assert "hush" not in repr(ServerSettings(model_names=("m",), api_keys=(ApiKey("hush", "team"),)))
    assert "hush" not in repr(ServerSettings(model_names=("m",), admin_key="hush", metrics_key="hush"))


def test_key_files_of_everybody(tmp_path, caplog):
    path = tmp_path / "keys"
    path.write_text("hush\n")
    for read in (read_keys, read_key):
        for mode, warns in ((0o644, True), (0o640, True), (0o602, True), (0o600, False), (0o400, False)):
            path.chmod(mode)
            caplog.clear()
            read(path)
            assert (str(path) in caplog.text) == warns
            assert "hush" not in caplog.text
    for text in ("", "two words"):
        path.write_text(text)
        with pytest.raises(ValueError, match="must hold one key"):
            read_key(path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The real engine, started from the command line, with keys of two users, an admin and a monitor; no argument is
    a key."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text("ann-key ann\nbob-key bob\n")
    (folder / "admin").write_text("admin-key\n")
    port = free_port()
    log = folder / "log"
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if value is not True]
    flags = [f"--port={port}", f"--api-key-file={folder / 'keys'}", f"--admin-key-file={folder / 'admin'}"]
    with log.open("w") as output:
        process = subprocess.Popen(
            entry.command("jaxserve", "serve", str(DEMO), "--served-model-name=test-model", *flags, *settings),
            env=os.environ
            | {"JAXSERVE_API_KEY": "cyd-key", "JAXSERVE_METRICS_KEY": "metrics-key", "JAX_PLATFORMS": "cpu"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = ServerUnderTest(process, port, "test-model", log)
    try:
        server.wait_ready(seconds=240)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


@pytest.mark.slow
def test_who_sees_the_requests_of_all(shared):
    for path in MONITORS:
        assert get(shared, path, None).status_code == 401
        for key in ("ann-key", "bob-key", "cyd-key"):
            answer = get(shared, path, key)
            assert (answer.status_code, error_of(answer)["code"]) == (403, "admin_key_required")
            assert "--metrics-key" in error_of(answer)["message"]
        for key in ("admin-key", "metrics-key"):
            assert get(shared, path, key).status_code == 200
    assert get(shared, "/v1/models", "metrics-key").status_code == 401
    assert get(shared, "/v1/models", "ann-key").status_code == 200


@pytest.mark.slow
def test_a_prompt_of_another_key_is_not_found(shared):
    """Its tokens are computed anew, so that neither cached_tokens nor the time tells of it."""
    prompt = list(range(50, 150))
    assert [cached(shared, "ann-key", prompt=prompt) for _ in range(2)] == [0, 96]
    assert cached(shared, "bob-key", prompt=prompt) == 0


@pytest.mark.slow
def test_no_process_shows_a_key(shared):
    """Neither in its arguments nor, of the engine, in its environment."""
    children = subprocess.run(
        ["ps", "--ppid", str(shared.process.pid), "-o", "pid="], capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(children) == 1
    for pid in (shared.process.pid, *children):
        assert b"-key\0" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"-key\0" not in Path(f"/proc/{children[0]}/environ").read_bytes()
    assert "-key" not in shared.log.read_text()


@pytest.mark.slow
def test_open_metrics(start_server):
    server = start_server(api_keys=["one", "two"], open_metrics=True)
    assert httpx.get(server.url + "/metrics").status_code == 200
    assert {get(server, path, None).status_code for path in ("/load", "/pool")} == {401}


@pytest.mark.slow
def test_a_single_key_sees_all(start_server):
    """There is nobody else whom it could tell of."""
    server = start_server(api_keys=["one"])
    assert {get(server, path, "one").status_code for path in MONITORS} == {200}
    assert {get(server, path, None).status_code for path in MONITORS} == {401}


@pytest.mark.slow
def test_admin_endpoints(start_server, tmp_path):
    """`admin endpoints are off by default with a key of their own`; not for forms of other pages; once a second."""
    server = start_server("CachingEngine", api_keys=["user"], admin_key="admin", config={"profile_dir": str(tmp_path)})
    for path in ("/reset_prefix_cache", "/profile"):
        for key in (None, "user"):
            assert post(server, path, key).status_code == 401
        form = {"Authorization": "Bearer admin", "Content-Type": "text/plain"}
        assert httpx.post(server.url + path, headers=form, content="{}").status_code == 400
        assert httpx.get(server.url + path, headers=form).status_code == 405
        assert post(server, path, "admin").status_code == 200
        answers = [post(server, path, "admin") for _ in range(5)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert refused[0].headers["retry-after"]
    assert post(server, key="admin", max_tokens=1).status_code == 401


@pytest.mark.slow
def test_the_prefix_cache_is_reset(start_server):
    server = start_server("CachingEngine", admin_key="admin")
    assert [cached(server) for _ in range(2)] == [0, 2]
    assert post(server, "/reset_prefix_cache", "admin").status_code == 200
    assert cached(server) == 0
    answer = post(server, "/profile", "admin")
    assert (answer.status_code, "--profile DIR" in error_of(answer)["message"]) == (404, True)


def test_no_admin_endpoint_without_a_key(http):
    for path in ("/reset_prefix_cache", "/profile"):
        answer = http.post(path, json={})
        assert (answer.status_code, "--admin-key" in answer.json()["error"]["message"]) == (404, True)


def test_errors_of_the_profiler_stay_with_it(tmp_path, caplog):
    timeline = Timeline(str(tmp_path))
    jax.profiler.start_trace(str(tmp_path / "other"))  # only one at a time may run
    timeline.trace(2)
    with timeline.step():
        pass
    assert "no trace was begun" in caplog.text
    jax.profiler.stop_trace()
    timeline.trace(1)
    with timeline.step():
        jax.profiler.stop_trace()
    assert "no trace was written" in caplog.text
    timeline.trace(1)
    with timeline.step():
        time.sleep(0.01)
    assert any(tmp_path.glob("plugins/**/*.xplane.pb"))


def test_traces_do_not_add_up(tmp_path):
    timeline = Timeline(str(tmp_path))
    for _ in range(3):
        timeline.trace(MOST_STEPS)
    assert timeline._steps_to_trace == MOST_STEPS
