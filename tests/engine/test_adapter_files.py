"""Adapters' files: GGUF adapters are those of PEFT, and what cannot be served is refused with a reason."""

import io
import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import gguf_name, in_pairs
from safetensors.numpy import load_file, save_file

from jaxserve import entry
from jaxserve.adapters import reading
from jaxserve.adapters.adapter import load_adapter
from jaxserve.adapters.reading import FileReader, read_matrices
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.config import ConfigError
from jaxserve.devices.mesh import make_mesh
from jaxserve.models.adapter_targets import AdapterTargets
from jaxserve.models.load import make_decoder, read_model

GOLDENS = Path(__file__).parent.parent / "goldens" / "adapters"
RANK = 8


@pytest.fixture
def targets(model_folders):
    def of(case: str) -> AdapterTargets:
        mesh = make_mesh()
        return AdapterTargets.of(make_decoder(read_model(model_folders(case)), mesh, "float32"), mesh)

    return of


def as_gguf(folder: Path, path: Path, arch: str, heads: dict[str, int], experts: int = 0) -> None:
    """Writes PEFT's adapter with the layout of llama.cpp's convert_lora_to_gguf.py."""
    config = json.loads((folder / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(config["lora_alpha"]))
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in sorted(load_file(folder / "adapter_model.safetensors").items()):
        stem, side = name.removeprefix("base_model.model.").replace("embedding_", "").rsplit(".lora_", 1)
        side = side[0].lower()
        own = gguf_name(f"{stem}.weight")
        assert own == f"{known.get_name(stem)}.weight"  # by the format's own table
        part = own.split(".")[-2]
        if part == "token_embd":
            tensor = tensor.T if side == "a" else tensor
        elif part in heads and side == "b":
            tensor = in_pairs(tensor, heads[part])
        writer.add_tensor(f"{own}.lora_{side}", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf(targets, tmp_path):
    """The same matrices as PEFT's, with queries and keys in pairs, embeddings and head."""
    found = targets("llama3_gqa")
    as_gguf(GOLDENS / "llama_all", path := tmp_path / "a.gguf", "llama", {"attn_q": 8, "attn_k": 2})
    theirs, ours = (load_adapter(one, "a", found, RANK) for one in (GOLDENS / "llama_all", path))
    assert ours.digest == theirs.digest
    assert ours.matrices.keys() == theirs.matrices.keys() == {target.path for target in found.targets}


def test_digest_is_of_the_content(targets, tmp_path):
    """The name does not matter, the scaling does."""
    found = targets("llama3_gqa")
    folder = GOLDENS / "llama_q_proj"
    other = shutil.copytree(folder, tmp_path / "other")
    assert load_adapter(folder, "a", found, RANK).digest == load_adapter(other, "b", found, RANK).digest
    change(other, lora_alpha=9)
    assert load_adapter(folder, "a", found, RANK).digest != load_adapter(other, "a", found, RANK).digest


def change(folder: Path, **settings) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"),
        ({"peft_type": "IA3"}, "only LORA"),
        ({"init_lora_weights": "pissa_niter_16"}, "has changed the weights"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"r": 5}, "should have rank 5"),
        ({"alpha_pattern": {"q_proj": "x"}}, "must be a number"),
        ({"alpha_pattern": {"(": 1}}, "no valid pattern"),
        ({"rank_pattern": {"q" * 300: 1}}, "at most 256 characters"),
    ],
)
def test_settings_that_are_refused(targets, tmp_path, settings, says):
    folder = shutil.copytree(GOLDENS / "llama_q_proj", tmp_path / "a")
    change(folder, **settings)
    with pytest.raises((ConfigError, CheckpointError), match=says.replace("(", r"\(")):
        load_adapter(folder, "a", targets("llama3_gqa"), RANK)


def rewrite(folder: Path, replace) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(replace(load_file(path)), path)


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("replace", "says"),
    [
        (lambda t: {name: x for name, x in t.items() if name != KEY}, "has only lora_B"),
        (lambda t: t | {KEY: t[KEY][:, :-1].copy()}, "do not fit model.layers.0.self_attn.q_proj.weight"),
        (lambda t: t | {KEY: t[KEY][:-1].copy()}, "do not fit each other"),
        (lambda t: t | {KEY: np.full_like(t[KEY], np.nan)}, "not finite"),
        (lambda t: t | {KEY: t[KEY].astype(np.int8)}, "not a plain float"),
        (lambda t: t | {"base_model.model.model.layers.0.mlp.gates.lora_A.weight": t[KEY]}, "has only lora_A"),
        (lambda t: t | {KEY.replace("lora_A", "lora_magnitude_vector"): t[KEY]}, "DoRA"),
        (
            lambda t: {name.replace("q_proj", "z_proj"): x for name, x in t.items()},
            "not model.layers.0.self_attn.z_proj",
        ),
        (lambda t: {name.replace("layers.0", "layers.7"): x for name, x in t.items()}, "layers.7"),
        (lambda t: t | {"base_model.model.lm_head.weight": t[KEY]}, "neither a lora_A nor a lora_B"),
        (lambda t: {}, "has no matrices"),
    ],
)
def test_tensors_that_are_refused(targets, tmp_path, replace, says):
    folder = shutil.copytree(GOLDENS / "llama_q_proj", tmp_path / "a")
    rewrite(folder, replace)
    with pytest.raises(CheckpointError, match=says) if "DoRA" not in says else pytest.raises(ConfigError, match=says):
        load_adapter(folder, "a", targets("llama3_gqa"), RANK)


@pytest.mark.parametrize("side", ["lora_A", "lora_B"])
@pytest.mark.parametrize(("value", "refused"), [(np.inf, ("float32", "float16", "bfloat16")), (7e4, ("float16",))])
def test_numbers_that_are_infinite_on_the_devices(targets, tmp_path, side, value, refused):
    """Also in GGUF files. 70,000 is infinite in float16."""
    found = targets("llama3_gqa")
    folder = shutil.copytree(GOLDENS / "llama_all", tmp_path / "a")
    path = tmp_path / "a.gguf"
    key = KEY.replace("lora_A", side)
    change(folder, lora_alpha=RANK, alpha_pattern={})  # a scaling of 1
    rewrite(folder, lambda t: t | {key: np.full_like(t[key], value)})
    as_gguf(folder, path, "llama", {"attn_q": 8, "attn_k": 2})
    for dtype in ("float32", "float16", "bfloat16"):
        for given in (folder, path):
            if dtype in refused:
                says = "not finite" if value == np.inf else "up to 7e[+]04, and float16 ends at 6.55e[+]04: serve"
                with pytest.raises(CheckpointError, match=f"layers.0.self_attn.q_proj.weight have numbers .*{says}"):
                    load_adapter(given, "a", found, RANK, dtype)
            else:
                load_adapter(given, "a", found, RANK, dtype)


def test_rank(targets):
    with pytest.raises(ConfigError, match="rank 8, and at most 4 is served: raise --max-lora-rank"):
        load_adapter(GOLDENS / "llama_all", "a", targets("llama3_gqa"), 4)


def test_experts_of_another_model(targets):
    with pytest.raises(CheckpointError, match="no experts"):
        load_adapter(GOLDENS / "mixtral_experts", "a", targets("llama3_gqa"), RANK)
    with pytest.raises(CheckpointError, match="do not fit"):
        load_adapter(GOLDENS / "mixtral_experts", "a", targets("qwen3_moe_plain"), RANK)


def test_missing_files(targets, tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_adapter(tmp_path, "a", targets("llama3_gqa"), RANK)
    folder = shutil.copytree(GOLDENS / "llama_q_proj", tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="is a pickle"):
        load_adapter(folder, "a", targets("llama3_gqa"), RANK)


def test_the_process_that_reads(targets, tmp_path):
    """It reads what this process would, and another one takes its place where it was ended."""
    found = targets("llama3_gqa").changeable(RANK)
    reader = FileReader(found)
    for folder in (GOLDENS / "llama_all", GOLDENS / "llama_q_proj"):
        mine = read_matrices(folder, found)
        its = reader.read_adapter(folder, found)
        assert mine.keys() == its.keys()
        for name in mine:
            for one, other in zip(mine[name], its[name], strict=True):
                np.testing.assert_array_equal(one, other)
    with pytest.raises(CheckpointError, match="nothing"):
        reader.read_adapter(tmp_path / "nothing", found)
    reader._process.kill()
    reader._process.wait()
    assert reader.read_adapter(folder, found).keys() == mine.keys()
    os.kill(reader._process.pid, signal.SIGSTOP)  # as one that reads for ever
    threading.Timer(0.3, reader._process.kill).start()
    with pytest.raises(CheckpointError, match=r"has ended with signal SIGKILL"):
        reader.read_adapter(folder, found)
    assert reader.read_adapter(folder, found).keys() == mine.keys()


def test_the_process_ends_with_its_owner(targets, tmp_path):
    """It answers what it was asked before: matrices, an error, and that headers are whole."""
    found = targets("llama3_gqa").changeable(RANK)
    folder = GOLDENS / "llama_q_proj"
    sent = io.BytesIO()
    reading._send(sent, found)
    for path, headers in ((folder, False), (tmp_path / "nothing", False), (folder, True)):
        reading._send(sent, reading.Ask(str(path), headers, cpu_seconds=30.0))
    command = entry.command("jaxserve.adapters.reading")
    done = subprocess.run(command, input=sent.getvalue(), stdout=subprocess.PIPE, check=True, timeout=60)
    got = io.BytesIO(done.stdout)
    mine = read_matrices(folder, found)
    answer = reading._receive(got, reading.Answer)
    assert [name for name, _, _ in answer.found] == list(mine)
    for name, *shapes in answer.found:
        for shape, wanted in zip(shapes, mine[name], strict=True):
            np.testing.assert_array_equal(reading._numbers(got, shape), wanted)
    error = reading._receive(got, reading.Answer)
    assert "nothing" in error.error
    assert not error.of_kind
    assert reading._receive(got, reading.Answer) == reading.Answer()
    assert got.read() == b""


def test_patterns(targets, tmp_path):
    """The first that matches the end of a module's name counts, be it a plain name or an expression."""
    folder = shutil.copytree(GOLDENS / "llama_q_proj", tmp_path / "a")
    found = targets("llama3_gqa").changeable(RANK)
    name = "model.layers.1.self_attn.q_proj.weight"

    def scale(**patterns: int) -> float:
        change(folder, lora_alpha=1, alpha_pattern=patterns)
        return read_matrices(folder, found)[name][1].max()

    one = scale()
    for patterns, factor in [
        ({"q_proj": 2}, 2),
        ({"_proj": 2}, 1),
        ({"self_attn.q_proj": 3, "q_proj": 2}, 3),
        ({"q_proj": 2, "self_attn.q_proj": 3}, 2),
        ({r"layers\.[1-9]\..*": 4, "q_proj": 2}, 4),
        ({"q_proj": 2, r"layers\.[1-9]\..*": 4}, 2),
        ({r"layers\.[2-9]\..*": 4, "q_proj": 2}, 2),
    ]:
        assert scale(**patterns) == pytest.approx(factor * one), patterns
    change(folder, alpha_pattern={"(.+)+!": 2})
    with pytest.raises(ConfigError, match=r"takes too long to match: '\(\.\+\)\+!'"):
        read_matrices(folder, found)
