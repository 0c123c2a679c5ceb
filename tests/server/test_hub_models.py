"""A server of a model of the hub at a tag, with the tokenizer of another repository; the hub is on this machine."""

from pathlib import Path

import pytest
from fake_hub import running_hub
from serving import SMALL, running_server

from jaxserve.text.tokenizer import load_tokenizer

WORDS = Path(__file__).parents[1] / "goldens" / "tokenizers" / "bpe.model"


@pytest.fixture(scope="module")
def hub(tiny_model_folder):
    files = {path.name: path.read_bytes() for path in tiny_model_folder.iterdir() if path.is_file()}
    with running_hub() as hub:
        hub.tagged = hub.commit("org/tiny", files, "v1")
        hub.commit("org/tiny", {"config.json": b"{}", "model.safetensors": b"broken"}, "main")
        hub.words = hub.commit("org/words", {"tokenizer.model": WORDS.read_bytes()}, "main")
        yield hub


@pytest.mark.slow
def test_a_tag_and_the_tokenizer_of_another(hub, tmp_path, monkeypatch):
    for name, value in hub.environment(tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    config = SMALL | {"model": "org/tiny@v1", "tokenizer": "org/words", "download_dir": str(tmp_path / "models")}
    with running_server("org/tiny@v1", tmp_path / "log", engine=None, config=config) as server:
        log = (tmp_path / "log").read_text()
        assert f"org/tiny@v1 is at commit {hub.tagged}" in log
        assert f"org/words is at commit {hub.words}" in log
        assert len(list((tmp_path / "models").glob("models--org--*/snapshots"))) == 2
        (folder := tmp_path / "words").mkdir()
        (folder / "tokenizer.model").write_bytes(WORDS.read_bytes())
        ids = load_tokenizer(folder).encode("Hello world")
        answer = server.http().post("/tokenize", json={"prompt": "Hello world"}).json()
        assert answer["tokens"] == ids
        choice = server.openai().completions.create(model="test-model", prompt="Hello", max_tokens=4).choices[0]
        assert choice.finish_reason in ("length", "stop")
