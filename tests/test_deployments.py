"""Records of deployments: flags from files, hashes that are verified, differences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jaxserve.checkpoints import hub
from jaxserve.commands import deployment
from jaxserve.commands.cli import main, make_parser
from jaxserve.commands.serve_flags import read_serve
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.deployment import record


def serve(*argv: str):
    """The flags of `jaxserve serve` with these arguments."""
    return read_serve(make_parser().parse_args(["serve", *argv]).serve_parser, argv)


@pytest.fixture
def demo(tmp_path) -> Path:
    return Path(shutil.copytree(Path(hub.__file__).parent / "demo", tmp_path / "demo"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "model: demo\nmax-num-seqs: 3\nprefix-caching: false\nserved-model-name: [a, b]\n"
                   "speculative_config: {method: ngram}\nui: false\n"),
        ("a.json", '{"model": "demo", "max_num_seqs": 3, "no-prefix-caching": true, "served-model-name": ["a", "b"], '
                   '"speculative-config": {"method": "ngram"}, "no-ui": true}'),
        ("a.toml", 'model = "demo"\nmax-num-seqs = 3\nprefix_caching = false\nserved-model-name = ["a", "b"]\n'
                   'ui = false\n[speculative-config]\nmethod = "ngram"\n'),
    ],
)  # fmt: skip
def test_flags_from_a_file_and_the_command_line_goes_first(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    args = serve("--config", str(path))
    assert (args.model, args.max_num_seqs, args.prefix_caching, args.ui) == ("demo", 3, False, False)
    assert (args.served_model_name, args.speculative_config) == (["a", "b"], {"method": "ngram"})
    args = serve("other", "--config", str(path), "--max-num-seqs", "5", "--served-model-name", "c")
    assert (args.model, args.max_num_seqs, args.served_model_name) == ("other", 5, ["c"])
    assert args.flags["max-num-seqs"] == 5
    assert args.flags["no-prefix-caching"] is True


@pytest.mark.parametrize(
    ("argv", "model", "names"),
    [
        (["demo", "--served-model-name", "a", "b", "--port", "0"], "demo", ["a", "b"]),
        (["--served-model-name", "a", "demo"], "demo", ["a"]),
        (["--served-model-name", "a", "demo", "--served-model-name=b", "--port", "0"], "demo", ["a", "b"]),
        (["--served-model-name", "a", "--served-model-name", "b", "demo"], "demo", ["a", "b"]),
    ],
)
def test_several_names_beside_the_model(argv, model, names):
    args = serve(*argv)
    assert (args.model, args.served_model_name) == (model, names)
    assert args.flags["served-model-name"] == names


def test_a_model_before_or_after_flags_with_several_values(tmp_path):
    """The file's flags came before the command line, so that its last list took the model."""
    path = tmp_path / "serve.yaml"
    path.write_text("enable-lora: true\nlora-modules: [a=one, b=two]\n")
    adapters = [("a", "one"), ("b", "two")]
    args = serve("demo", "--config", str(path))
    assert (args.model, [(one.name, one.path) for one in args.lora_modules]) == ("demo", adapters)
    path.write_text("model: demo\n")
    args = serve("--config", str(path), "--enable-lora", "--lora-modules", "a=one", "b=two")
    assert (args.model, [(one.name, one.path) for one in args.lora_modules]) == ("demo", adapters)
    args = serve("--config", str(path), "--served-model-name", "a", "b")
    assert (args.model, args.served_model_name) == ("demo", ["a", "b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: demo\nmax-seqs: 3", "no flag --max-seqs"),
        ("model: demo\napi-key: abc", "api-key is a secret"),
        ("model: demo\nui: 3", "ui must be true or false"),
        ("- demo", "must hold flags by their names"),
        ("a: [", "neither valid YAML nor JSON"),
        ("max-num-seqs: 3", "needs a model"),
        ('{"jaxserve_lock": 9, "model": {}}', "form 9"),
    ],
)
def test_wrong_files_are_refused(tmp_path, text, message):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        serve("--config", str(path))


def locked_demo(demo: Path, lock: Path, *flags: str) -> dict:
    assert main(["lock", str(demo), "--out", str(lock), *flags]) == 0
    return json.loads(lock.read_text())


def test_a_record_is_written_verified_and_never_has_keys(demo, tmp_path):
    lock = tmp_path / "jaxserve.lock"
    given = ["--max-num-seqs", "3", "--api-key", "secret-1", "--admin-key", "secret-2", "--metrics-key", "secret-3"]
    found = locked_demo(demo, lock, *given)
    assert "secret" not in lock.read_text()
    assert found["flags"] == {"max-num-seqs": 3}
    assert found["settings"]["max_num_seqs"] == 3
    assert found["settings"]["kv_cache_dtype"] == "auto"
    assert found["model"]["format"] == "safetensors"
    assert len(found["model"]["files"]["model.safetensors"]) == 64
    args = serve("--config", str(lock))
    assert (args.model, args.max_num_seqs) == (str(demo), 3)
    assert deployment.locked(args) == found
    assert deployment.locked(serve("--config", str(lock), "--port", "0"))["flags"]["port"] == 0


def test_a_record_names_the_kernels_that_were_chosen(demo, tmp_path, monkeypatch, caplog):
    """Tables must be those of the record; what starts have measured may differ, with a warning."""
    lock = tmp_path / "jaxserve.lock"
    folder = tmp_path / "tuning"
    monkeypatch.setenv("JAXSERVE_TUNING", str(folder))
    (folder / "kept").mkdir(parents=True)

    def table(path: Path, way: str) -> None:
        product = {"shuffled": False, "ways": {"1": way}, "us": {"1": {way: 3.5}}}
        path.write_text(json.dumps({"device": "X", "sizes": {}, "products": {"problem": product}}))

    table(folder / "x.json", "triton")
    table(folder / "kept" / "x.json", "dot")
    found = locked_demo(demo, lock)["kernels"]
    assert found["tables"]["user/x.json"]["products"]["problem"] == {"shuffled": False, "ways": {"1": "triton"}}
    assert found["kept"]["kept/x.json"]["products"]["problem"]["ways"] == {"1": "dot"}
    started = serve("--config", str(lock))
    assert deployment.locked(started)["kernels"] == found
    table(folder / "kept" / "x.json", "dequantize")
    assert record.with_kernels({"kernels": found})["kernels"]["kept"] != found["kept"], "of a server that has measured"
    assert "bits may differ" not in caplog.text
    deployment.locked(started)
    assert "bits may differ" in caplog.text
    table(folder / "x.json", "dot")
    with pytest.raises(ConfigError, match=r'kernels\.tables\.user/x\.json\.products\.problem\.ways\.1: "triton" in'):
        deployment.locked(started)
    assert locked_demo(demo, lock, "--no-kernel-timing")["kernels"]["kept"] is None, "it does not count"
    older = json.loads(lock.read_text())
    del older["kernels"]
    lock.write_text(json.dumps(older))
    assert deployment.locked(serve("--config", str(lock)))["model"] == older["model"], "of an earlier version"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"])
def test_wrong_weights_tokenizer_or_template_are_refused(demo, tmp_path, name):
    lock = tmp_path / "jaxserve.lock"
    locked_demo(demo, lock)
    data = bytearray((demo / name).read_bytes())
    data[-2] ^= 1
    (demo / name).write_bytes(data)
    with pytest.raises(ConfigError, match=rf"{lock} does not describe what is here: model.files.{name}"):
        deployment.locked(serve("--config", str(lock)))


def test_other_versions_and_models_are_refused(demo, tmp_path, monkeypatch, capsys):
    lock = tmp_path / "jaxserve.lock"
    before = locked_demo(demo, lock)
    with pytest.raises(ConfigError, match="is a record of the model"):
        serve("other", "--config", str(lock))
    monkeypatch.setattr(record, "versions", lambda: before["versions"] | {"jax": "0.0.1"})
    assert main(["serve", "--config", str(lock)]) == 1
    assert 'versions.jax: "0.' in capsys.readouterr().err


@pytest.mark.slow
def test_diff_shows_what_differs(demo, tmp_path, capsys):
    one = tmp_path / "one.lock"
    other = tmp_path / "other.lock"
    locked_demo(demo, one)
    locked_demo(demo, other)
    capsys.readouterr()
    assert main(["diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out == ""
    locked_demo(demo, other, "--max-num-seqs", "3")
    capsys.readouterr()
    assert main(["diff", str(one), str(other)]) == 1
    assert "settings.max_num_seqs\n  - 256\n  + 3" in capsys.readouterr().out
    assert main(["diff", str(one), "http://127.0.0.1:9"]) == 1
    assert "does not answer with its record" in capsys.readouterr().err


def test_settings_of_a_record_have_no_secrets_and_no_place_in_a_replica():
    config = EngineConfig(model="m", num_hosts=2, coordinator="a:1", host_id=1, host_secret_file="s")
    assert not {"host_id", "coordinator", "host_secret_file"} & record.settings_of(config).keys()
