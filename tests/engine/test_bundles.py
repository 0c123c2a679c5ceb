"""Bundles: what they hold, that nothing compiles when they are served, and that damage and differences are noticed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import jax._src.compiler as compiler
import numpy as np
import pytest
from engines import generate, request
from PIL import Image, ImageDraw
from tiny_models import build

from jaxserve import LLM, SamplingParams
from jaxserve.bundles import environment, program_cache, trees
from jaxserve.bundles.container import Bundle, BundleError, read_key, seal
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.commands.bundling import make_bundle
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.prepared import Prepared
from jaxserve.pallas_kernels import selfcheck_stamps
from jaxserve.pallas_kernels.checked_ops import Trials
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import Activations, PanelArray, QuantArray
from jaxserve.plan.share import share_of

pytestmark = pytest.mark.compiles

SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "kv_pages": 40, "decode_steps": 2}
STAMP = "of a check that was passed"
PROMPTS = [[1, 5, 9, 200, 7], [3] * 20, [2, 400]]
# Serves a bundle in a process whose XLA raises, and prints the tokens.
SERVE = """
import sys, json
import jax._src.compiler as compiler
def refuse(*a, **k): raise RuntimeError("XLA was asked to compile")
compiler.compile_or_get_cached = compiler.backend_compile_and_load = refuse
sys.path.insert(0, sys.argv[1])
from test_bundles import tokens_of
from jaxserve.config import EngineConfig
print(json.dumps(tokens_of(EngineConfig(**json.loads(sys.argv[2])))))
"""


def answers(engine: Engine) -> list[list[int]]:
    sampled = {"temperature": 1.0, "seed": 7}, {"temperature": 0.0}
    requests = [
        request(str(number), prompt, max_tokens=8, ignore_eos=True, **sampled[number % 2])
        for number, prompt in enumerate(PROMPTS)
    ]
    return [completion.token_ids for completion in generate(engine, *requests)]


def tokens_of(config: EngineConfig) -> list[list[int]]:
    engine = Engine.load(config, progress=False)
    engine.compile()
    return answers(engine)


def served_without_compiler(config: EngineConfig) -> list[list[int]]:
    names = "model", *SMALL, "tensor_parallel_size", "quantization", "deterministic"
    given = {name: getattr(config, name) for name in names}
    command = [sys.executable, "-c", SERVE, str(Path(__file__).parent), json.dumps(given)]
    paths = os.pathsep.join([str(Path(__file__).parent.parent), str(Path(__file__).parent)])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[EngineConfig, Path, list[list[int]]]:
    """The settings of a tiny model, a bundle of it, and the tokens of the engine that the bundle was made of."""
    folder = tmp_path_factory.mktemp("bundles")
    build("llama3_gqa", folder / "model")
    config = EngineConfig(model=str(folder / "model"), **SMALL)
    loaded = []
    load = Engine.load

    def kept(*args, **options) -> Engine:
        loaded.append(load(*args, **options))
        return loaded[-1]

    stamped = mock.patch.object(selfcheck_stamps, "_passed", {STAMP})
    with stamped, mock.patch.object(Engine, "load", kept), mock.patch.dict(os.environ):
        os.environ.pop(program_cache.OFF)
        make_bundle(config, folder / "bundle")
    (engine,) = loaded
    assert engine.runner.kept is None, "programs that were kept by a start cannot be written into a bundle"
    return config, folder / "bundle", answers(engine)


@pytest.mark.slow
def test_a_model_that_sees_is_served_without_a_compiler(tmp_path, monkeypatch):
    config = EngineConfig(model="demo-vision", **SMALL)
    bundle = tmp_path / "bundle"
    make_bundle(config, bundle)
    refuse_compiling(monkeypatch)
    picture = Image.new("RGB", (150, 120), "white")
    ImageDraw.Draw(picture).rectangle([40, 25, 110, 95], fill="blue")
    question = [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]
    llm = LLM(str(bundle), **SMALL)
    (answer,) = llm.chat([[{"role": "user", "content": question}]], SamplingParams(temperature=0.0), progress=False)
    assert answer.outputs[0].text == "a blue square"
    (bundle / "encoder" / "00000.bin").write_bytes(b"")
    with pytest.raises(BundleError, match=r"encoder/00000\.bin is damaged"):
        Engine.load(replace(config, model=str(bundle)), progress=False)


@pytest.fixture
def copy(made, tmp_path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "copy"))


@pytest.mark.slow
def test_a_bundle_is_served_by_another_process_without_a_compiler(made):
    config, bundle, tokens = made
    assert served_without_compiler(replace(config, model=str(bundle))) == tokens


def refuse_compiling(monkeypatch) -> None:
    def refuse(*args, **options):
        raise RuntimeError("XLA was asked to compile")

    monkeypatch.setattr(compiler, "compile_or_get_cached", refuse)
    monkeypatch.setattr(compiler, "backend_compile_and_load", refuse)


def test_a_bundle_is_served_without_a_compiler(made, monkeypatch):
    config, bundle, tokens = made
    refuse_compiling(monkeypatch)
    assert tokens_of(replace(config, model=str(bundle))) == tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("llama3_gqa", {"tensor_parallel_size": 2}),
        ("llama3_gqa", {"quantization": "int8"}),
        ("llama3_gqa", {"quantization": "int4", "tensor_parallel_size": 2}),
        ("mixtral_experts", {}),
        ("llama3_gqa", {"deterministic": True}),
    ],
)
def test_other_forms_of_weights_and_several_devices(case, settings, tmp_path):
    build(case, tmp_path / "model")
    config = EngineConfig(model=str(tmp_path / "model"), **SMALL, **settings)
    make_bundle(config, tmp_path / "bundle")
    assert served_without_compiler(replace(config, model=str(tmp_path / "bundle"))) == tokens_of(config)


@pytest.mark.slow
def test_a_gguf_file(tmp_path):
    """The bundle has the header of the file, from which config and tokenizer are read, and panels in its types."""
    gguf_files = pytest.importorskip("gguf_files")
    build("llama3_gqa", tmp_path / "model")
    path = gguf_files.write_gguf(tmp_path / "model", tmp_path / "m.gguf", lambda name: gguf_files.Kind.Q8_0)
    config = EngineConfig(model=str(path), **SMALL)
    make_bundle(config, tmp_path / "bundle")
    assert (tmp_path / "bundle" / "model" / "model.gguf").stat().st_size < path.stat().st_size / 2
    bundled = replace(config, model=str(tmp_path / "bundle"))
    assert served_without_compiler(bundled) == tokens_of(config)
    assert share_of(replace(bundled, kv_pages=30), 2**31) == share_of(replace(config, kv_pages=30), 2**31)


def check(folder: Path) -> None:
    bundle = Bundle.open(folder)
    bundle.check(bundle.manifest.files)


def flips(bundle: Path, count: int, seed: int):
    """(file, position, bit) of random flips, with every file among them if there are enough."""
    files = sorted(path for path in bundle.rglob("*") if path.is_file())
    chosen = random.Random(seed)
    for number in range(count):
        path = files[number % len(files)] if number < len(files) else chosen.choice(files)
        yield path, chosen.randrange(path.stat().st_size), 1 << chosen.randrange(8)


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_flipped_bit_anywhere_is_noticed(copy, count):
    for path, at, bit in flips(copy, count, seed=count):
        data = bytearray(path.read_bytes())
        data[at] ^= bit
        path.write_bytes(data)
        with pytest.raises(BundleError, match="is damaged"):
            check(copy)
        data[at] ^= bit
        path.write_bytes(data)
    check(copy)


@pytest.mark.parametrize("name", ["weights/00000.bin", "weights.json", "model/config.json", "bundle.json"])
def test_damaged_weights_or_settings_are_refused(copy, made, name):
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 4
    (copy / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name}.* is damaged"):
        Engine.load(replace(made[0], model=str(copy)), progress=False)


def reasons(config: EngineConfig, caplog) -> str:
    """Why the programs of a bundle are not used, by the log."""
    caplog.clear()
    caplog.set_level("INFO", "jaxserve")
    Engine.load(config, progress=False)
    return "".join(record.getMessage() for record in caplog.records if "are not used" in record.getMessage())


@pytest.mark.slow
def test_programs_that_cannot_be_used_are_compiled_and_the_log_says_why(copy, made, caplog, monkeypatch):
    config = replace(made[0], model=str(copy))
    assert reasons(config, caplog) == ""
    assert "max_num_seqs is 1, not 2" in reasons(replace(config, max_num_seqs=1), caplog)
    assert "kv_pages is 50, not 40" in reasons(replace(config, kv_pages=50), caplog)
    program = next((copy / "programs").glob("*.bin"))
    whole = program.read_bytes()
    program.write_bytes(whole[:-1])
    assert "is damaged" in reasons(config, caplog)
    assert tokens_of(config) == tokens_of(made[0])
    program.unlink()
    assert "cannot be read" in reasons(config, caplog)
    program.write_bytes(whole)
    copy.chmod(0o770)
    assert "others may write" in reasons(config, caplog)
    copy.chmod(0o700)
    monkeypatch.setattr(environment.installed, "versions", lambda names: dict.fromkeys(names, "0.0.1"))
    assert "jaxlib is 0.0.1, not 0." in reasons(config, caplog)


def test_checks_that_were_passed_travel(copy, made, caplog, monkeypatch):
    """If nobody else may have written them."""
    config = replace(made[0], model=str(copy))
    monkeypatch.setattr(selfcheck_stamps, "_passed", set())
    monkeypatch.setattr(selfcheck_stamps, "_folder", lambda create=False: None)
    copy.chmod(0o770)
    assert Prepared.of(config).reasons != []
    assert not selfcheck_stamps.has_passed(STAMP)
    copy.chmod(0o700)
    assert Prepared.of(config).reasons == []
    assert selfcheck_stamps.has_passed(STAMP)
    selfcheck_stamps._passed.clear()
    (copy / "checks.json").write_text("[]")
    assert Prepared.of(config).reasons == []
    assert not selfcheck_stamps.has_passed(STAMP)
    assert "checks.json is damaged" in caplog.text


def test_wrong_kernels_of_a_bundle(made):
    """Its programs are not used, and its weights only if they are stored as without these kernels."""
    prepared = Prepared.of(replace(made[0], model=str(made[1])))
    ops = Ops(draw=len, fused=len)
    prepared.check_kernels(replace(ops, trials=Trials()), ops)
    assert prepared.reasons == []
    prepared.check_kernels(ops, replace(ops, draw=None))
    assert "kernels that are wrong on this device" in prepared.reasons[0]
    with pytest.raises(BundleError, match=r"stored for kernels that are wrong here .* serve .*model instead"):
        prepared.check_kernels(ops, replace(ops, fused=None))


def test_another_form_of_weights_is_refused(made):
    config = replace(made[0], model=str(made[1]), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, not 1"):
        Engine.load(config, progress=False)


def test_a_signature_needs_the_right_key(made, copy, tmp_path):
    key = tmp_path / "key"
    other = tmp_path / "other"
    key.write_bytes(b"k" * 32)
    other.write_bytes(b"o" * 32)
    digest = seal(copy, Bundle.open(copy).manifest, read_key(key))
    assert digest == Bundle.open(made[1]).digest
    assert Bundle.open(copy, read_key(key)).signed
    copy.chmod(0o777)
    assert Bundle.open(copy, read_key(key)).distrust() is None
    assert "others may write" in str(Bundle.open(copy).distrust())
    with pytest.raises(BundleError, match="another key"):
        Bundle.open(copy, read_key(other))
    with pytest.raises(BundleError, match="no MAC"):
        Bundle.open(made[1], read_key(key))
    other.write_bytes(b"short")
    with pytest.raises(BundleError, match="at least 16 bytes"):
        read_key(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_lora": True}, "LoRA"),
        ({"tokenizer": "demo"}, "own tokenizer"),
        ({"speculative_config": {"method": "draft_model", "model": "demo"}}, "draft models"),
        ({"num_hosts": 2, "coordinator": "a:1"}, "one host"),
    ],
)
def test_what_bundles_do_not_hold_is_refused_before_anything_loads(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        make_bundle(EngineConfig(model="no-such-model", **changes), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_trees_come_back_and_other_classes_are_refused():
    wanted = Activations("int8", 128)
    panels = PanelArray(np.zeros(1), np.zeros(1), (3, 4), "int8")
    tree = {"a": [QuantArray(1.0, 2.0, block=(1, 64), activations=wanted), None], "b": (panels,)}
    leaves, structure = jax.tree.flatten(tree)
    described = json.loads(json.dumps(trees.describe(structure), default=list))
    classes = {"QuantArray": QuantArray, "PanelArray": PanelArray}
    assert jax.tree.structure(trees.build(described, leaves, classes)) == structure
    with pytest.raises(ValueError, match="a class that trees do not have: 'PanelArray'"):
        trees.build(described, leaves, {"QuantArray": QuantArray})
    for wrong in ({"class": "system", "fields": {}}, {"set": []}, 99, "text", {"list": [], "dict": {}}):
        with pytest.raises(ValueError, match=r"tree|leaf"):
            trees.build(wrong, leaves, classes)
