"""Files with random damage are read or refused, in little time and memory: adapters, safetensors, GGUF files, bundles.

The damage is of bytes and of tokens of JSON. Bundles get the right digests afterwards, as their author would give them.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import re
import shutil
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))
import hostile_files
from adapter_folders import DEMO, save_adapter

from jaxserve.adapters.reading import read_matrices
from jaxserve.bundles import stored_weights
from jaxserve.bundles.container import DIGEST, WEIGHTS, Bundle, BundleError, File, Manifest, seal
from jaxserve.checkpoints.errors import CheckpointError, TooLongError
from jaxserve.checkpoints.gguf import read_gguf
from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.config import ConfigError
from jaxserve.devices.mesh import make_mesh
from jaxserve.models.adapter_targets import AdapterTargets
from jaxserve.models.changeable import Changeable
from jaxserve.models.load import make_decoder, read_model

SECONDS = 2.0
MEMORY = 2**28
TOKENS = [
    b"null", b"[]", b"{}", b"true", b"-1", b"0", b"1e999", b"NaN", b'""', b'"x"', b"9" * 400, b"18446744073709551616",
    b"1152921504606846976", b"0.5", b'"\\ud800"', b"[[[[1]]]]", b'{"a":{"b":[]}}', b'"(.+)+!"',
]  # fmt: skip
SIZES = [0, 1, 255, 2**16, 2**31 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 1]
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|true|false|null|[][{}]')


def damaged(rng: random.Random, data: bytes, head: int) -> bytes:
    """The data with one to three changes, mostly in the first `head` bytes."""
    for _ in range(rng.randint(1, 3)):
        end = min(head, len(data)) if rng.random() < 0.9 else len(data)
        at = rng.randrange(max(end, 1))
        match rng.randrange(7):
            case 0:
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 1:
                data = data[:at] + rng.choice(SIZES).to_bytes(8, "little") + data[at + 8 :]
            case 2:
                data = data[:at] + data[at + rng.randint(1, 16) :]
            case 3:
                data = data[:at] + data[max(0, at - rng.randint(1, 64)) : at] + data[at:]
            case 4:
                data = data[:at] if rng.random() < 0.3 else data[:at] + rng.randbytes(4) + data[at + 4 :]
            case _:
                if tokens := list(_TOKEN.finditer(data, 0, end)):
                    token = rng.choice(tokens)
                    data = data[: token.start()] + rng.choice(TOKENS) + data[token.end() :]
    return data


@pytest.fixture(scope="module")
def changeable() -> Changeable:
    mesh = make_mesh(devices=jax.devices()[:1])
    return AdapterTargets.of(make_decoder(read_model(DEMO), mesh, "float32"), mesh).changeable(8)


class Case:
    """A good file, and how it is read. `files`: those that are damaged, with the length of their headers."""

    def __init__(self, folder: Path, changeable: Changeable):
        self.folder = folder
        self.changeable = changeable

    def read(self) -> None:
        raise NotImplementedError

    def mend(self, path: Path) -> None:
        """What the author of a damaged file does to hide the damage."""


class OfAdapter(Case):
    def write(self) -> dict[Path, int]:
        save_adapter(self.folder, 0, rank=2)
        patterns = {r"layers\.[01]\..*v_proj": 4, "q_proj": 3}
        hostile_files.with_settings_of(self.folder, alpha_pattern=patterns, rank_pattern={"down_proj": 2})
        return {self.folder / hostile_files.CONFIG: 10**6, self.folder / hostile_files.WEIGHTS: 4000}

    def read(self) -> None:
        read_matrices(self.folder, self.changeable)


class OfGGUFAdapter(Case):
    def write(self) -> dict[Path, int]:
        return {hostile_files.good_gguf(self.folder / "a.gguf"): 400}

    def read(self) -> None:
        read_matrices(self.folder / "a.gguf", self.changeable)


class OfSafetensors(Case):
    def write(self) -> dict[Path, int]:
        tensors = {f"t{i}": np.zeros((2, i), np.float16) for i in range(8)}
        save_file(tensors, self.folder / "model.safetensors", metadata={"made by": "a test"})
        return {self.folder / "model.safetensors": 1000}

    def read(self) -> None:
        for tensor in read_folder(self.folder).values():
            tensor.read()


class OfGGUF(Case):
    def write(self) -> dict[Path, int]:
        path = self.folder / "a.gguf"
        entries = [hostile_files.LLAMA, hostile_files.strings("tokenizer.ggml.tokens", 9)]
        infos = [hostile_files.tensor(f"blk.{i}.ffn_up.weight", 8, 4, start=128 * i) for i in range(4)]
        return {hostile_files.gguf(path, entries, infos, bytes(512)): 600}

    def read(self) -> None:
        read_gguf(self.folder / "a.gguf")


class OfBundle(Case):
    def write(self) -> dict[Path, int]:
        self.mesh = make_mesh(devices=jax.devices()[:1])
        place = NamedSharding(self.mesh, PartitionSpec(None, None))
        arrays = [jax.device_put(np.full((4, i + 1), i, np.float32), place) for i in range(3)]
        forms = {f"p{i}": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for i, x in enumerate(arrays)}
        stored_weights.write(self.folder, forms, arrays)
        names = [WEIGHTS, "weights/00000.bin"]
        listed = {name: _file(self.folder / name) for name in names}
        manifest = Manifest(
            format=1, model="m", target="cpu", environment={}, settings={}, pages=1, longest=1, files=listed, source={}
        )
        seal(self.folder, manifest, None)
        return {self.folder / WEIGHTS: 10**6, self.folder / "bundle.json": 10**6, self.folder / names[1]: 10}

    def mend(self, path: Path) -> None:
        manifest = self.folder / "bundle.json"
        if path != manifest:
            value = json.loads(manifest.read_bytes())
            size = _file(path).bytes
            digest = _file(path).sha256
            value["files"][str(path.relative_to(self.folder))] = {"bytes": size, "sha256": digest}
            manifest.write_text(json.dumps(value))
        digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
        (self.folder / DIGEST).write_text(f"{digest}  bundle.json\n")

    def read(self) -> None:
        bundle = Bundle.open(self.folder)
        bundle.check(bundle.names(WEIGHTS, "weights"))
        stored = stored_weights.StoredWeights(bundle)
        stored.forms(self.mesh)
        stored.arrays(self.mesh)


def _file(path: Path) -> File:
    return File(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


CASES: dict[str, Callable[[Path, Changeable], Case]] = {
    "adapters": OfAdapter, "GGUF adapters": OfGGUFAdapter, "safetensors": OfSafetensors, "GGUF": OfGGUF,
    "bundles": OfBundle,
}  # fmt: skip


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "weights/../../outside"])
def test_a_bundle_names_only_its_own_files(name, changeable, tmp_path):
    case = OfBundle(tmp_path / "good", changeable)
    case.folder.mkdir()
    case.write()
    path = case.folder / "bundle.json"
    value = json.loads(path.read_bytes())
    value["files"][name] = {"bytes": 1, "sha256": ""}
    path.write_text(json.dumps(value))
    case.mend(path)
    with pytest.raises(BundleError, match="is no file of the bundle"):
        case.read()


def _too_long(*_: object) -> None:
    raise TooLongError("too long")


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_damage_is_read_or_refused(kind, count, changeable, tmp_path):
    rng = random.Random(f"{kind} {count}")
    case = CASES[kind](tmp_path / "good", changeable)
    case.folder.mkdir()
    good = {path: (path.read_bytes(), head) for path, head in case.write().items()}
    others = {path: path.read_bytes() for path in case.folder.iterdir() if path.is_file()}
    case.read()
    read = 0
    longest = 0.0
    largest = 0
    signal.signal(signal.SIGPROF, _too_long)
    tracemalloc.start()
    try:
        for _ in range(count):
            path = rng.choice(list(good))
            path.write_bytes(damaged(rng, *good[path]))
            case.mend(path)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, 2 * SECONDS)
            says = ""
            try:
                case.read()
                read += 1
            except (CheckpointError, ConfigError) as error:
                says = str(error)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                longest = max(longest, time.process_time() - began)
                largest = max(largest, tracemalloc.get_traced_memory()[1] - before)
            assert len(says) < 3000
            assert "too much memory" not in says
            assert longest < SECONDS, path.read_bytes()[:500]
            assert largest < MEMORY, path.read_bytes()[:500]
            for other, data in others.items():
                other.write_bytes(data)
            path.write_bytes(good[path][0])
    finally:
        tracemalloc.stop()
    print(f"{kind}: {read} of {count} read, longest {longest:.3f} s, {largest / 2**20:.1f} MiB")
    assert 0 < read < count
    gc.collect()
    shutil.rmtree(case.folder)
