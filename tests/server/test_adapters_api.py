"""LoRA adapters of a real server: names, loading while others stream, more adapters than places, and who may do it."""

import asyncio
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import hostile_files
import httpx
import openai
import pytest
from serving import DEMO, SMALL, running_server, wait_until

sys.path.insert(0, str(Path(__file__).parent.parent))
from adapter_folders import save_adapter

pytestmark = pytest.mark.slow  # compiling the demo with adapters takes half a minute
PROMPT = "def main("
ADMIN = {"Authorization": "Bearer admin"}
PLACES = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed in range(64):
        save_adapter(root / f"a{seed}", seed, rank=1 + seed % 8)
    return root


@pytest.fixture(scope="module")
def server(root, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "server.log"
    modules = [["a0", str(root / "a0")], ["a1", str(root / "a1"), "the-parent"]]
    config = SMALL | {"enable_lora": True, "max_loras": PLACES, "max_lora_rank": 8, "lora_modules": modules}
    config |= {"max_cpu_loras": 16, "kv_pages": 200}
    options = {"config": config, "admin_key": "admin", "lora_root": str(root), "access_log": True}
    options["weights_root"] = str(tmp_path_factory.mktemp("weights"))
    with running_server(DEMO, log, engine=None, **options) as server:
        yield server


def load(server, name: str, path: str | None = None, **fields):
    body = {"lora_name": name, "lora_path": path or name} | fields
    return server.http().post("/v1/load_lora_adapter", json=body, headers=ADMIN)


def unload(server, name: str):
    return server.http().post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


def load_all(server) -> list[str]:
    names = [f"a{i}" for i in range(64)]
    known = {model.id for model in server.openai().models.list()}
    for name in names:
        if name not in known:
            assert load(server, name).status_code == 200
    return names


def text(server, model: str, **options) -> str:
    fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0} | options
    return server.openai().completions.create(model=model, **fields).choices[0].text


async def texts(server, models: list[str], **options) -> list[str]:
    client = server.openai_async(timeout=120)
    fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0} | options
    answers = await asyncio.gather(*(client.completions.create(model=model, **fields) for model in models))
    assert [answer.model for answer in answers] == models
    return [answer.choices[0].text for answer in answers]


def test_adapters_are_models_with_a_parent(server, root):
    cards = {card.id: card.model_dump() for card in server.openai().models.list()}
    assert cards["test-model"]["parent"] is None
    assert (cards["a0"]["parent"], cards["a0"]["root"]) == ("test-model", str(root / "a0"))
    assert cards["a1"]["parent"] == "the-parent"
    assert server.openai().models.retrieve("a1").id == "a1"


def test_two_adapters_and_the_model_in_one_batch(server):
    models = ["test-model", "a0", "a1"] * 4
    alone = {model: text(server, model) for model in models}
    assert len(set(alone.values())) == 3
    assert asyncio.run(texts(server, models)) == [alone[model] for model in models]


def test_every_endpoint_takes_an_adapter_s_name(server):
    client = server.openai()
    http = server.http()
    messages = [{"role": "user", "content": "hello"}]
    options = {"messages": messages, "max_tokens": 12, "temperature": 0}
    answers = [client.chat.completions.create(model=model, **options) for model in ("test-model", "a0", "a1")]
    assert [answer.model for answer in answers] == ["test-model", "a0", "a1"]
    assert len({answer.system_fingerprint for answer in answers}) == 3
    assert len({answer.choices[0].message.content for answer in answers}) == 3
    response = client.responses.create(model="a0", input="hello", max_output_tokens=12, temperature=0)
    assert (response.model, response.output_text) == ("a0", answers[1].choices[0].message.content)
    message = http.post("/v1/messages", json=options | {"model": "a0"}).json()
    assert (message["model"], message["content"][0]["text"]) == ("a0", response.output_text)
    assert http.post("/tokenize", json={"model": "a0", "prompt": PROMPT}).json()["count"] > 0
    assert http.post("/v1/embeddings", json={"model": "a0", "input": "hello"}).status_code == 400
    models = http.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    assert {"test-model", "a0", "a1"} <= set(models["enum"])


def test_several_completions_beams_and_prefixes_keep_to_their_adapter(server):
    """The prompt is longer than a page, so that one adapter's pages could be mistaken for another's."""
    prompt = "import os\nimport sys\n" * 6
    for model in ("a0", "test-model", "a1"):
        server.http().post("/reset_prefix_cache", json={}, headers=ADMIN)
        first = text(server, model, prompt=prompt)
        for other in ("a1", "test-model", "a0"):
            text(server, other, prompt=prompt)
        assert text(server, model, prompt=prompt) == first
    beams = {"n": 3, "extra_body": {"use_beam_search": True}}
    found = {model: text(server, model, **beams) for model in ("test-model", "a0", "a1")}
    assert len(set(found.values())) == 3
    choices = server.openai().completions.create(model="a0", prompt=PROMPT, n=3, max_tokens=12, temperature=0).choices
    assert {choice.text for choice in choices} == {text(server, "a0")}


def test_the_log_and_the_pool_name_the_adapter(server):
    stream = server.openai().completions.create(
        model="a1", prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    owners = server.http().get("/pool").json()["owners"]
    assert [owner["adapter"] for owner in owners] == ["a1"]
    stream.close()
    wait_until(lambda: '"model":"a1"' in server.log.read_text())


def test_unknown_names_are_not_found(server):
    with pytest.raises(openai.NotFoundError, match="does not exist") as raised:
        text(server, "a-1")
    assert raised.value.code == "model_not_found"


def test_64_adapters_in_8_places(server):
    """Each answers as it does alone, in whatever order they come."""
    names = load_all(server)
    alone = {name: text(server, name) for name in names}
    assert len(set(alone.values())) > 56
    loads = server.metric("lora_loads_total")
    evictions = server.metric("lora_evictions_total")
    models = [names[(17 * i) % 64] for i in range(192)]
    assert asyncio.run(texts(server, models)) == [alone[model] for model in models]
    assert server.metric("lora_loads_total") - loads >= 64 - PLACES
    assert server.metric("lora_evictions_total") - evictions >= 64 - PLACES


def gauge(server) -> tuple[str, set[str], set[str]]:
    """The labels of lora_requests_info: places, and the names that run and that wait."""
    labels = {}
    for line in server.http().get("/metrics").text.splitlines():
        if line.startswith("jaxserve:lora_requests_info{"):
            assert not labels, "only the present state is told"
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    names = [set(filter(None, labels[f"{what}_lora_adapters"].split(","))) for what in ("running", "waiting")]
    return labels["max_lora"], *names


def test_the_gauge_names_what_runs_and_waits(server):
    names = load_all(server)[:20]

    async def run():
        client = server.openai_async(timeout=120)
        fields = {"prompt": PROMPT, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
        tasks = [asyncio.create_task(client.completions.create(model=name, **fields)) for name in names]
        seen = []
        while not all(task.done() for task in tasks):
            seen.append(await asyncio.to_thread(gauge, server))
            await asyncio.sleep(0.05)
        await asyncio.gather(*tasks)
        return seen

    seen = asyncio.run(run())
    assert {most for most, _, _ in seen} == {str(PLACES)}
    assert all(len(running) <= PLACES for _, running, _ in seen)
    assert max(len(running) for _, running, _ in seen) > PLACES // 2
    assert set().union(*(running | waiting for _, running, waiting in seen)) == set(names)
    wait_until(lambda: gauge(server)[1:] == (set(), set()))


def test_loading_while_others_stream(server, root):
    """No step waits for long, and nothing compiles (the server runs with --forbid-compile)."""
    load_all(server)
    buckets = [0.005, 10.0]

    def held_up() -> list[float]:
        return [server.metric("step_seconds_bucket", "adapters", str(bound)) for bound in buckets]

    before = held_up()
    compiled = server.metric("compilations_total")

    async def run():
        client = server.openai_async(timeout=120)
        fields = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True}}
        streams = [asyncio.create_task(client.completions.create(model="test-model", **fields)) for _ in range(4)]
        await asyncio.sleep(0.1)
        for i in range(6):
            name = f"late-{i}"
            assert (await asyncio.to_thread(load, server, name, f"a{i}")).status_code == 200
            answer = await client.completions.create(model=name, prompt=PROMPT, max_tokens=12, temperature=0)
            assert answer.choices[0].text == await asyncio.to_thread(text, server, f"a{i}")
            assert (await asyncio.to_thread(unload, server, name)).status_code == 200
        return {answer.choices[0].text for answer in await asyncio.gather(*streams)}

    assert len(asyncio.run(run())) == 1
    below, all_ = (now - then for now, then in zip(held_up(), before, strict=True))
    assert all_ > 20
    assert below >= 0.9 * all_, "uploads held up steps by more than 5 ms"  # other processes take this machine's time
    assert server.metric("compilations_total") == compiled


def test_unloaded_while_in_use(server):
    """Requests that run keep their adapter; new ones are refused."""
    load_all(server)
    expected = text(server, "a2", max_tokens=150, extra_body={"ignore_eos": True})
    stream = server.openai().completions.create(
        model="a2", prompt=PROMPT, max_tokens=150, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    parts = [next(stream).choices[0].text]
    assert unload(server, "a2").status_code == 200
    with pytest.raises(openai.NotFoundError):
        text(server, "a2")
    assert unload(server, "a2").status_code == 404
    parts += [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert "".join(parts) == expected
    assert load(server, "a2").status_code == 200


def test_a_changed_adapter_under_the_same_name_is_another_one(server, root):
    save_adapter(root / "mine", 100)
    assert load(server, "mine").status_code == 200
    prompt = "import os\nimport sys\n" * 6  # cached pages of the first one must not be found
    first = text(server, "mine", prompt=prompt)
    fingerprints = [server.openai().completions.create(model="mine", prompt="a").system_fingerprint]
    save_adapter(root / "mine", 101)
    refused = load(server, "mine")
    assert refused.status_code == 400
    assert "load_inplace" in refused.json()["error"]["message"]
    assert load(server, "mine", load_inplace=True).status_code == 200
    second = text(server, "mine", prompt=prompt)
    fingerprints.append(server.openai().completions.create(model="mine", prompt="a").system_fingerprint)
    assert first != second
    assert len(set(fingerprints)) == 2
    save_adapter(root / "copy", 101)
    assert load(server, "copy").status_code == 200
    assert text(server, "copy", prompt=prompt) == second
    for name in ("mine", "copy"):
        assert unload(server, name).status_code == 200


def test_paths_must_lie_below_the_root(server, root, tmp_path):
    outside = save_adapter(tmp_path / "outside", 7)
    (root / "link").symlink_to(outside)
    (root / "linked").mkdir()
    for file in outside.iterdir():
        (root / "linked" / file.name).symlink_to(file)
    wrong = [str(outside), "../outside", "link", "linked", ".", "/etc/passwd", f"a0/../../{outside}"]
    for path in wrong:
        answer = load(server, "intruder", path)
        assert answer.status_code == 400, path
        assert "below --lora-root" in answer.json()["error"]["message"]
    assert load(server, "intruder", "nothing-here").status_code == 404
    assert load(server, "intruder", "a0\0").status_code == 400
    assert "intruder" not in {model.id for model in server.openai().models.list()}


def test_bodies_that_are_refused(server, root):
    (root / "damaged").mkdir(exist_ok=True)
    (root / "damaged" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    (root / "damaged" / "adapter_model.safetensors").write_bytes(b"\0" * 64)
    save_adapter(root / "high", 3, rank=9)
    for name, path, what in [
        ("test-model", "a0", "the name of the model"),
        ("a0", "a1", "already"),
        ("a,b", "a0", "name"),
        ("", "a0", "name"),
        ("x" * 300, "a0", "name"),
        ("damaged", "damaged", "damaged"),
        ("high", "high", "rank 9"),
    ]:
        answer = load(server, name, path)
        assert answer.status_code == 400, (name, answer.text)
        assert what in answer.json()["error"]["message"]


def test_only_the_admin_may(server):
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = {"lora_name": "a0", "lora_path": "a0"}
        assert server.http().post(path, json=body).status_code == 401
        wrong = {"Authorization": "Bearer wrong"}
        assert server.http().post(path, json=body, headers=wrong).status_code == 401
        form = {"Content-Type": "text/plain"} | ADMIN
        assert server.http().post(path, content=b"{}", headers=form).status_code == 400


def test_servers_without_the_flags_refuse(start_server, tmp_path):
    plain = start_server(admin_key="admin", lora_root=str(tmp_path))
    answer = load(plain, "a0")
    assert (answer.status_code, "--enable-lora" in answer.text) == (404, True)
    closed = start_server()
    assert (load(closed, "a0").status_code, "--admin-key" in load(closed, "a0").text) == (404, True)


def engine_of(server) -> int:
    """The number of the engine's process."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    (engine,) = [pid for pid in children if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(engine)


class Stream:
    """Streams one completion after the other, and notes when each token came."""

    def __init__(self, server):
        self.times: list[float] = []
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        fields = {"model": "test-model", "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
        while not self._ended.is_set():
            with httpx.stream("POST", f"{self._server.url}/v1/completions", json=fields, timeout=120) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        assert "error" not in json.loads(line[6:])
                        self.times.append(time.monotonic())

    def __enter__(self):
        self._thread.start()
        wait_until(lambda: self.times, 60)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def longest_gap(self, work) -> float:
        """The longest time without a token while `work` is done, and until the first token after that."""
        wait_until(lambda: self.times, 60)
        first = len(self.times) - 1
        work()
        end = time.monotonic()
        wait_until(lambda: self.times[-1] > end, 120)
        times = self.times[first:]
        return max(after - before for before, after in itertools.pairwise(times))


STALL = 0.1  # seconds


def holds_nobody_up(stream: Stream, work) -> None:
    """Other processes take this machine's time too, so that `work` may be repeated, and counts against a pause that is
    as long."""
    gaps = []
    for _ in range(5):
        began = time.monotonic()
        beside = stream.longest_gap(work)
        took = time.monotonic() - began
        gaps.append((beside, took, 0.0 if beside < STALL else stream.longest_gap(lambda took=took: time.sleep(took))))
        if beside < max(STALL, 2 * gaps[-1][2]):
            return
    raise AssertionError(f"the stream stalled; (seconds beside the work, of the work, in a pause): {gaps}")


@pytest.mark.parametrize("kind", ["adapters", pytest.param("slow adapters", marks=pytest.mark.slow)])
def test_hostile_adapters(server, root, kind):
    """Each is refused with an answer that names the file, while a stream goes on; the engine's process stays."""
    engine = engine_of(server)
    took = {}
    with Stream(server) as stream:
        for name, (write, says) in (
            hostile_files.ADAPTERS if kind == "adapters" else hostile_files.SLOW_ADAPTERS
        ).items():
            path = f"hostile/{name}"
            write(root / path)

            def refused(path=path, name=name, says=says) -> None:
                began = time.monotonic()
                body = {"lora_name": "hostile", "lora_path": path}
                answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, headers=ADMIN, timeout=60)
                took[name] = round(time.monotonic() - began, 2)
                assert answer.status_code == 400, (name, answer.text[:1000])
                message = answer.json()["error"]["message"]
                assert Path(path).name in message, name
                assert says in message, (name, message)
                assert len(message) < 700, name

            holds_nobody_up(stream, refused)
    print("seconds:", took)
    assert engine_of(server) == engine
    assert text(server, "a0") != text(server, "test-model")
    assert load(server, "after", "a3").status_code == 200  # the next adapter is read as ever
    assert unload(server, "after").status_code == 200


def test_hostile_adapters_that_are_read_again(server, root):
    """A request for an adapter whose files were changed ends with an error that says so."""
    engine = engine_of(server)
    save_adapter(root / "turned", 3)
    assert load(server, "turned").status_code == 200
    hostile_files.with_settings(root / "turned", lora_alpha=10**400)
    asyncio.run(texts(server, load_all(server)))  # more than stay in the host's memory
    with pytest.raises(openai.APIError, match="turned"):
        text(server, "turned")
    assert engine_of(server) == engine
    assert unload(server, "turned").status_code == 200


def update(server, path: Path) -> httpx.Response:
    return httpx.post(f"{server.url}/update_weights", headers=ADMIN, json={"model_path": str(path)}, timeout=120)


def test_hostile_checkpoints(server, tmp_path_factory):
    weights = next(tmp_path_factory.getbasetemp().glob("weights*"))
    engine = engine_of(server)
    expected = text(server, "test-model")
    with Stream(server) as stream:
        for name, (write, says) in hostile_files.CHECKPOINTS.items():
            path = write(weights / name)

            def refused(path=path, says=says) -> None:
                answer = update(server, path)
                assert answer.status_code == 400, (path, answer.text[:1000])
                message = answer.json()["error"]["message"]
                assert path.name in message
                assert says in message, message

            holds_nobody_up(stream, refused)
    assert engine_of(server) == engine
    assert text(server, "test-model") == expected


def test_a_copy_in_float32_takes_the_place_of_bfloat16(server, tmp_path_factory):
    """As trainers save models. The numbers are the same, and so is the answer."""
    weights = next(tmp_path_factory.getbasetemp().glob("weights*"))
    config = json.loads((DEMO / "config.json").read_text())
    assert config.get("torch_dtype", config.get("dtype")) == "bfloat16"
    expected = text(server, "test-model")
    answer = update(server, hostile_files.as_float32(weights / "float32"))
    assert answer.status_code == 200, answer.text
    assert text(server, "test-model") == expected


def test_adapters_survive_a_restart_of_the_engine(server, root):
    """Also those that were loaded while the server ran, except where the files are gone."""
    load_all(server)
    save_adapter(root / "gone", 5)
    assert load(server, "gone").status_code == 200
    assert unload(server, "a1").status_code == 200
    expected = text(server, "a5")
    (root / "gone" / "adapter_model.safetensors").unlink()
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    engines = [pid for pid in children if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(engines) == 1
    os.kill(int(engines[0]), signal.SIGKILL)
    wait_until(lambda: server.status("/ready") != 200, 20)
    wait_until(lambda: server.status("/ready") == 200, 240)
    names = {model.id for model in server.openai().models.list()}
    assert {"a0", "a5", "a63"} <= names
    assert not {"gone", "a1"} & names
    assert text(server, "a5") == expected
