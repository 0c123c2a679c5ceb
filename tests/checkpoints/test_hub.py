"""Models of the hub: which revision, which files, which commit. The hub's own client asks a hub on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import running_hub

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.hub import commit_of, local_folder, resolve_model, resolve_tokenizer, wanted_files

ROOT = Path(__file__).parents[2]
REPO = "org/tiny"
PROGRAM = """
import json, sys
from jaxserve.checkpoints.hub import resolve_model, commit_of
from jaxserve.checkpoints.errors import CheckpointError
for options in json.loads(sys.argv[1]):
    try:
        folder = resolve_model(**options)
        files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        print(json.dumps([commit_of(folder), sorted(files)]))
    except CheckpointError as error:
        print(json.dumps([None, str(error)]))
"""
WEIGHTS = {
    "model-00001-of-00002.safetensors": b"a",
    "model-00002-of-00002.safetensors": b"b",
    "model.safetensors.index.json": b"{}",
}
REST = {"config.json": b"{}", "tokenizer.json": b"{}", "tokenizer.model.v3": b"x", "chat_template.jinja": b"x"}
COPIES = {
    "consolidated.safetensors": b"c",
    "original/model.safetensors": b"c",
    "original/params.json": b"{}",
    "pytorch_model.bin": b"d",
    "consolidated.00.pth": b"e",
    "modeling_tiny.py": b"raise SystemExit",
    "onnx/model.safetensors": b"f",
}


@pytest.fixture(scope="module")
def hub():
    with running_hub() as hub:
        hub.old = hub.commit(REPO, WEIGHTS | REST | {"config.json": b'{"old": true}'}, "v1")
        hub.main = hub.commit(REPO, WEIGHTS | REST | COPIES, "main")
        hub.branch = hub.commit(REPO, REST | {"output.safetensors": b"q"}, "4.0bpw", "feature/x")
        hub.commit("org/native", {"params.json": b"{}", "tekken.json": b"{}", "consolidated.safetensors": b"c"}, "main")
        hub.commit("org/pickles", {"config.json": b"{}", "pytorch_model.bin": b"d"}, "main")
        yield hub


def ask(hub, cache, *options, **environment):
    """What a process of its own finds for each of the options."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(options)],
        env={**os.environ, **hub.environment(cache), "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_revisions_and_files(hub, tmp_path):
    main, old, tag, branch, short, twice, tokens = ask(
        hub,
        tmp_path,
        {"model": REPO},
        {"model": REPO, "revision": hub.old},
        {"model": f"{REPO}@v1"},
        {"model": f"{REPO}@feature/x"},
        {"model": REPO, "revision": "4.0bpw"},
        {"model": f"{REPO}@v1", "revision": "main"},
        {"model": "org/native"},
    )
    assert main == [hub.main, sorted([*WEIGHTS, *REST])]
    assert old == tag == [hub.old, main[1]]
    assert branch == short == [hub.branch, sorted([*REST, "output.safetensors"])]
    assert twice == [None, "'org/tiny@v1' names the revision 'v1', but 'main' was asked for beside it"]
    assert tokens[1] == ["consolidated.safetensors", "params.json", "tekken.json"]
    # Nothing beside was fetched, and nothing twice.
    assert not {name.rsplit("/", 1)[-1] for name in hub.downloaded} & {"pytorch_model.bin", "modeling_tiny.py"}

    offline = ask(hub, tmp_path, {"model": f"{REPO}@v1"}, {"model": REPO}, HF_ENDPOINT="http://127.0.0.1:9")
    assert offline == [old, main]
    offline = ask(hub, tmp_path, {"model": f"{REPO}@v1"}, {"model": "org/other"}, HF_HUB_OFFLINE="1")
    assert offline[0] == old
    assert "could not get 'org/other' from the hub" in offline[1][1]


def test_without_weights(hub, tmp_path):
    assert ask(hub, tmp_path, {"model": f"{REPO}@v1", "weights": False}) == [
        [hub.old, sorted([*REST, "model.safetensors.index.json"])]
    ]


def test_downloads_go_to_the_named_folder(hub, tmp_path):
    there = tmp_path / "models"
    options = {"model": f"{REPO}@v1", "download_dir": str(there)}
    assert ask(hub, tmp_path / "home", options) == [[hub.old, sorted([*WEIGHTS, *REST])]]
    assert list(there.glob(f"models--*/snapshots/{hub.old}/config.json"))
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    offline = ask(hub, tmp_path / "home", options, {"model": f"{REPO}@v1"}, HF_HUB_OFFLINE="1")
    assert [commit for commit, _ in offline] == [hub.old, None]


def test_what_is_not_there_is_named(hub, tmp_path):
    revision, repo, pickles = ask(
        hub, tmp_path, {"model": f"{REPO}@v9"}, {"model": "org/none"}, {"model": "org/pickles"}
    )
    assert revision[1].startswith("could not get 'org/tiny' at revision 'v9' from the hub")
    assert repo[1].startswith("could not get 'org/none' from the hub, and there is no local folder of that name")
    assert pickles[1].startswith("'org/pickles' holds no .safetensors files, only pytorch_model.bin. Pickles")


def test_local_models_have_no_revisions(tmp_path):
    with pytest.raises(CheckpointError, match="is no hub id like 'org/name', so it has no revision 'v1'"):
        resolve_model(str(tmp_path), revision="v1")
    with pytest.raises(CheckpointError, match="'demo' is no hub id"):
        resolve_model("demo", revision="v1")
    named = tmp_path / "model@v1"
    named.mkdir()
    assert resolve_model(str(named)) == local_folder(str(named)) == named
    assert commit_of(named) is None
    assert local_folder("org/name@v1") is None
    assert resolve_tokenizer(None, named) == named
    assert resolve_tokenizer(str(tmp_path), named) == tmp_path


def test_consolidated_copies_are_wanted_where_they_are_all_there_is():
    assert wanted_files(["consolidated-00001-of-00002.safetensors", "params.json"], True) == [
        "params.json",
        "consolidated-00001-of-00002.safetensors",
    ]
    quantized = ["gptq_model-4bit-128g.safetensors", "quantize_config.json"]
    assert set(wanted_files(quantized, True)) == set(quantized)
    modules = ["1_Pooling/config.json", "2_Dense/model.safetensors"]  # of sentence-transformers
    assert set(wanted_files(["model.safetensors", "onnx/config.json", *modules])) == {"model.safetensors", *modules}
    assert wanted_files(modules, weights=False) == modules[:1]
    assert wanted_files(["additional_chat_templates/tools.jinja", "docs/x.json"]) == [
        "additional_chat_templates/tools.jinja"
    ]
