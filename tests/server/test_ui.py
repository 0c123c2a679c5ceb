"""The page at `/` and GET /pool: over HTTP, and as a reader meets them, in a browser."""

from __future__ import annotations

import asyncio
import json
import re
import threading

import httpx
import pytest
from browser import needs_browser
from fake_engine import ParrotEngine
from serving import wait_until
from test_engine_server import READY, connected, engine_at

from jaxserve.config import EngineConfig
from jaxserve.scheduling.page_snapshot import CACHED, LISTED, SHARED
from jaxserve.server.endpoints.page import PATHS
from jaxserve.server.http.keys import ApiKey
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.http.state import ServerState
from jaxserve.server.ipc import engine_client
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.ipc.engine_server import EngineServer
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.process.app import build_app
from jaxserve.types import EngineDeadError

PAGES = {"/", "/docs"}


def test_files_of_the_page(http):
    parts = set()
    for path in PAGES:
        page = http.get(path)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        parts |= {"/" + path for path in re.findall(r'(?:href|src)="(ui/[^"]+)"', page.text)}
    for path in PATHS - {"/"}:
        answer = http.get(path)
        assert answer.status_code == 200
        parts |= {"/ui/" + name for name in re.findall(r'from "\./([^"]+)"', answer.text)}
        assert not re.search(r"https?://(?!www\.w3\.org)", answer.text), "it fetches from elsewhere"
        again = http.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert parts == PATHS - PAGES


def statuses(paths: set[str], key: str | None = None, **settings) -> set[int]:
    """What a server with these settings, whose engine is still loading, answers."""
    state = ServerState(ServerSettings(model_names=("x",), **settings), EngineClient(), Metrics("x"))
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def ask() -> set[int]:
        transport = httpx.ASGITransport(build_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            return {(await client.get(path)).status_code for path in paths}

    return asyncio.run(ask())


def test_no_page_where_it_is_off():
    assert statuses(PATHS) == {200}
    assert statuses(PATHS - {"/"}, ui=False) == {404}
    assert statuses({"/"}, ui=False) == {200}  # a line of text, for Ollama's clients


def test_the_pool_needs_the_key_and_the_page_does_not():
    keys = (ApiKey("secret"),)
    assert statuses(PATHS, api_keys=keys) == {200}
    assert statuses({"/pool"}, api_keys=keys) == {401}
    assert statuses({"/pool"}, "secret", api_keys=keys) == {503}


def test_the_engine_is_asked_twice_a_second_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_client, "POOL_SECONDS", 0.2)
    path = str(tmp_path / "engine.sock")
    asked = []

    class Engine(ParrotEngine):
        def pool(self):
            asked.append(1)
            return super().pool()

    async def run():
        client = await connected(path)
        both = await asyncio.gather(*(client.pool() for _ in range(50)))
        assert len(asked) == 1
        assert all(snapshot is both[0] for snapshot in both)
        assert await client.pool() is both[0]
        await asyncio.sleep(0.25)
        assert await client.pool() is not both[0]
        await client.close()

    with engine_at(path, Engine(EngineConfig(model=str(tmp_path)))):
        asyncio.run(run())
    assert len(asked) == 2


def test_who_waits_for_the_pool_hears_that_the_engine_died(tmp_path):
    path = str(tmp_path / "engine.sock")

    class Engine(ParrotEngine):
        def pool(self):
            raise RuntimeError("broken")

    async def run():
        client = await connected(path)
        with pytest.raises(EngineDeadError, match="the engine failed"):
            await asyncio.wait_for(client.pool(), 5)
        with pytest.raises(EngineDeadError):
            await client.pool()
        await client.close()

    def serve():
        with pytest.raises(RuntimeError, match="broken"):
            server.run(Engine(EngineConfig(model=str(tmp_path))), READY)
        server.fail("the engine failed", patience=0)  # as run_engine does

    server = EngineServer(path)
    thread = threading.Thread(target=serve)
    thread.start()
    asyncio.run(run())
    thread.join(5)
    server.close()


def test_pages_of_real_requests(demo_server):
    body = {"prompt": list(range(100, 140)), "max_tokens": 150, "n": 2, "ignore_eos": True, "stream": True}
    with demo_server.http() as http:
        with http.stream("POST", "/v1/completions", json={"model": "test-model", **body}) as response:
            lines = response.iter_lines()
            next(lines)
            seen: list[dict] = []

            def shared() -> bool:
                seen.append(demo_server.http().get("/pool").json())
                return SHARED in seen[-1]["cells"]

            wait_until(shared, 10)
            for _ in lines:
                pass
        during = seen[-1]
        assert len(during["cells"]) == during["pages"] == 25
        assert {owner["index"] for owner in during["owners"]} == {0, 1}
        assert set(during["share_owners"]) == {0, 1}
        assert during["pages_used"] == sum(code >= SHARED for code in during["cells"])
        assert {LISTED, LISTED + 1} <= set(during["cells"])

        def idle() -> bool:
            seen.append(http.get("/pool").json())
            return seen[-1]["num_running"] == 0

        wait_until(idle, 10)
        after = seen[-1]
        assert after["pages_used"] == 0
        assert after["cells"].count(CACHED) == after["pages_cached"] > 0
        assert after["generation_tokens"] >= during["generation_tokens"]


@needs_browser
def test_a_conversation(page, demo_server):
    page.goto(demo_server.url)
    page.wait("document.body.dataset.state === 'ready' && document.activeElement.id === 'prompt'")
    page.run("document.querySelector('#sampling').open = true")
    for name, value in {"temperature": 0, "max_tokens": 150, "seed": 7}.items():
        page.run(f"document.querySelector('[name={name}]').focus()")
        page.type(str(value))
    assert (
        page.run("document.querySelector('#sampling-summary').textContent") == "temperature 0, max_tokens 150, seed 7"
    )
    page.run("document.querySelector('#prompt').focus()")
    question = "Write a Python function `read_file`: Return the text of a file."
    page.type(question)
    page.press("Enter")
    page.wait("document.querySelector('.assistant .facts').textContent")
    shown = page.run("document.querySelector('.assistant .text').textContent")
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 150}
    body |= {"logprobs": True, "top_logprobs": 5, "model": "test-model"}
    answer = httpx.post(demo_server.url + "/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    assert shown == answer["message"]["content"] != ""
    tokens = [entry["token"] for entry in answer["logprobs"]["content"]]
    spans = page.run("[...document.querySelectorAll('.token')].map(span => span.textContent)")
    assert spans == tokens[: len(spans)]
    assert len(tokens) - len(spans) <= 1  # the one that ends it

    page.point(".token")
    best = answer["logprobs"]["content"][0]["top_logprobs"]
    rows = page.run("[...document.querySelectorAll('#tip tr')].map(row => row.textContent)")
    assert len(rows) == len(best) == 5
    assert page.run("!document.querySelector('#tip').hidden && document.querySelectorAll('#tip .chosen').length") == 1
    page.run("document.querySelector('.assistant .text').focus()")
    page.press("ArrowRight")  # from where the mouse is
    assert page.run("document.querySelector('.token.on').textContent") == tokens[1]
    page.press("Escape")
    assert page.run("document.querySelector('#tip').hidden")


# Colours, greys aside, of at least 100 pixels in the picture of the pool.
COLOURS = """(() => {
    const {canvas} = document.querySelector("#pool").getContext("2d"), count = {};
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < data.length; i += 4) {
        const colour = data.slice(i, i + 3);
        if (Math.max(...colour) - Math.min(...colour) > 60) count[colour] = (count[colour] ?? 0) + 1;
    }
    return Object.values(count).filter((pixels) => pixels >= 100).length;
})()"""


@needs_browser
def test_the_api_page(page, demo_server):
    """Lists what the document has, finds words, shows fields, and sends a request."""
    page.goto(demo_server.url + "/docs")
    page.wait("document.querySelectorAll('.operation').length > 30")
    paths = httpx.get(demo_server.url + "/openapi.json").json()["paths"]
    assert page.run("document.querySelectorAll('.operation').length") == sum(
        len(methods.keys() - {"parameters"}) for methods in paths.values()
    )
    groups = page.run("[...document.querySelectorAll('#paths h2')].map(one => one.textContent)")
    assert groups[1:4] == ["Ollama's API", "llama.cpp's API", "Triton's API"]
    page.run("document.querySelector('#filter').focus()")
    page.type("upload purpose")
    assert page.run("document.querySelectorAll('.operation:not([hidden])').length") == 1  # a form, not JSON
    page.run("document.querySelector('#filter').select()")
    page.type("mirostat ollama")
    assert page.run("document.querySelectorAll('.operation:not([hidden])').length") == 0
    page.run("document.querySelector('#filter').select()")
    page.type("/v1/completions")
    one = "[...document.querySelectorAll('.operation')].find(one => one.innerText.includes('/v1/completions'))"
    page.run(f"{one}.open = true")
    page.wait(f"{one}.querySelector('textarea')")
    body = json.loads(page.run(f"{one}.querySelector('textarea').value"))
    assert body == {"prompt": "Hello", "model": "test-model"}
    page.run(f"{one}.querySelector('button').click()")
    page.wait(f"{one}.querySelector('.row span').textContent")
    answer = json.loads(page.run(f"{one}.querySelector('pre').textContent"))
    assert answer["object"] == "text_completion"


@needs_browser
def test_stop_and_pool(page, demo_server):
    page.goto(demo_server.url)
    page.wait("document.body.dataset.state === 'ready'")
    page.run("document.querySelector('#prompt').focus()")
    page.type("count " * 60)
    assert page.run(COLOURS) == 0
    stop = threading.Event()

    def others() -> None:
        while not stop.is_set():
            body = {"model": "test-model", "prompt": [9] * 40, "n": 2, "max_tokens": 100, "ignore_eos": True}
            httpx.post(demo_server.url + "/v1/completions", json=body, timeout=60)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        page.wait("document.querySelectorAll('#owners li').length === 2")
        page.wait("+document.querySelector('#rate').textContent.replaceAll(',', '')")
        page.wait("+document.querySelector('#n-shared').textContent > 0")
        wait_until(lambda: page.run(COLOURS) >= 2, 10, "the canvas shows no owners")
        page.run("document.querySelector('#pool').focus()")
        page.press("ArrowRight")
        page.press("ArrowRight")
        assert page.run("document.querySelector('#tip').textContent").startswith("Page 2")
    finally:
        stop.set()
        thread.join()
    page.press("Escape")
    page.run("document.querySelector('[name=logprobs]').click(); document.querySelector('#prompt').focus()")
    page.press("Enter")
    page.wait("document.querySelector('#send').textContent === 'Stop'")
    page.run("document.querySelector('#send').click()")
    page.wait("document.querySelector('#send').textContent === 'Send'")
    wait_until(lambda: httpx.get(demo_server.url + "/pool").json()["num_running"] == 0, 5)


@needs_browser
def test_key_and_errors(page, start_server):
    server = start_server(api_keys=["secret"])
    page.goto(server.url)
    page.errors.clear()
    page.wait("document.querySelector('#key-dialog').open")
    page.type("wrong")
    page.press("Enter")
    page.wait("document.querySelector('#key-dialog').open && document.querySelector('#key').value === 'wrong'")
    page.run("document.querySelector('#key').value = 'secret'")
    page.press("Enter")
    page.wait(
        "document.body.dataset.state === 'ready' && document.querySelector('#model').textContent === 'test-model'"
    )
    page.run("document.querySelector('#prompt').focus()")
    page.type("x" * 4000)
    page.press("Enter")
    page.wait("document.querySelector('.error')?.textContent.includes('maximum context length')")
    assert page.run("document.querySelector('#prompt').value.length") == 4000
    assert json.loads(page.run("JSON.stringify(sessionStorage)")) == {"jaxserve-api-key": "secret"}
    page.errors.clear()  # the browser notes answers of 401 and 400 as errors of the network


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(page, parrot, scheme):
    page.size(360, 740, scheme)
    page.goto(parrot.url)
    page.wait("document.body.dataset.state === 'ready'")
    page.run("document.querySelector('#sampling').open = true")
    for view in ("chat", "engine"):
        page.run(f"document.querySelector('[data-show={view}]').click()")
        assert page.run("document.documentElement.scrollWidth") <= 360
        wide = "[...document.querySelectorAll('button, input, canvas, textarea')].filter(e => e.offsetParent && "
        wide += "(e.getBoundingClientRect().right > 361 || e.getBoundingClientRect().left < 0)).map(e => e.outerHTML)"
        assert page.run(wide) == []
