"""Servers that several tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tokenizers_for_tests as kinds
from browser import Page, open_page
from serving import DEMO, SMALL, ServerUnderTest, free_port, running_server


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory) -> Path:
    """A model's folder: the bundled one, or a tokenizer alone where there is none (enough for stand-in engines)."""
    if DEMO.is_dir():
        return DEMO
    folder = tmp_path_factory.mktemp("model")
    kinds.save_byte_level(folder)
    return folder


@pytest.fixture
def start_server(tiny_model_folder, tmp_path):
    """Starts servers of a test's own: start_server(engine="SlowEngine", drain_seconds=1)."""
    with contextlib.ExitStack() as stack:

        def start(engine: str | None = "ParrotEngine", **options) -> ServerUnderTest:
            log = tmp_path / f"server-{free_port()}.log"
            return stack.enter_context(running_server(tiny_model_folder, log, engine=engine, **options))

        yield start


@pytest.fixture(scope="session")
def parrot(tiny_model_folder, tmp_path_factory) -> Iterator[ServerUnderTest]:
    """A server whose engine repeats the prompt."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    with running_server(tiny_model_folder, log, engine="ParrotEngine", config={"max_model_len": 256}) as server:
        yield server


@pytest.fixture(scope="session")
def http(parrot) -> httpx.Client:
    return parrot.http()


@pytest.fixture(scope="session")
def scripted(tmp_path_factory) -> Iterator[ServerUnderTest]:
    """A server whose engine says what the prompt tells it to; its chat template knows tools and reasoning."""
    folder = tmp_path_factory.mktemp("tool-model")
    kinds.save_byte_level(folder, kinds.TOOL_TEMPLATE)
    log = tmp_path_factory.mktemp("log") / "server.log"
    with running_server(folder, log, engine="ScriptEngine", config={"max_model_len": 4096}) as server:
        yield server


@pytest.fixture(scope="module")
def slow(tiny_model_folder, tmp_path_factory) -> Iterator[ServerUnderTest]:
    """The same at 20 ms a token."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    with running_server(tiny_model_folder, log, engine="SlowEngine", config={"max_model_len": 2048}) as server:
        yield server


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory) -> Iterator[ServerUnderTest]:
    """The real engine on the bundled model."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    config = SMALL | {"profile_dir": str(tmp_path_factory.mktemp("traces"))}
    files = str(log.parent / "files")
    with running_server(DEMO, log, engine=None, config=config, admin_key="admin", files_dir=files) as server:
        yield server


@pytest.fixture
def page(tmp_path) -> Iterator[Page]:
    """A tab of a browser. Its console must have no errors at the end."""
    with open_page(tmp_path / "profile") as page:
        page.size(1280, 800)
        yield page
        assert not page.errors
