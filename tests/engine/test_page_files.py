"""Files of KV pages: whole or not used, bounded, private, and found again by the next engine."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import ConfigError
from jaxserve.engine.page_files import DIGEST_BYTES, MAGIC, PageFiles

SHAPES = [jax.ShapeDtypeStruct((3, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((3, 2), jnp.float32)]
FILE_BYTES = len(MAGIC) + DIGEST_BYTES + 3 * 2 * 64 * 2 + 3 * 2 * 4


def page(number: int) -> list[np.ndarray]:
    rng = np.random.default_rng(number)
    return [rng.normal(size=x.shape).astype(x.dtype) for x in SHAPES]


def key(number: int) -> bytes:
    return number.to_bytes(33, "big")


def files(folder: Path, name: str = "model", most: int = 2**30) -> PageFiles:
    return PageFiles(folder, name, SHAPES, most)


def same(one, other) -> bool:
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def test_what_was_written_is_read_also_by_the_next_engine(tmp_path):
    first = files(tmp_path / "new" / "kv")
    for number in range(5):
        assert first.write(key(number), page(number))
    for one in (first, files(tmp_path / "new" / "kv")):
        assert [number for number in range(7) if key(number) in one] == [0, 1, 2, 3, 4]
        assert all(same(one.read(key(number)), page(number)) for number in range(5))
        assert one.read(key(5)) is None
        assert one.bytes == 5 * FILE_BYTES
    other = files(tmp_path / "new" / "kv", "other model")
    assert key(1) not in other
    assert other.read(key(1)) is None
    assert other.bytes == 5 * FILE_BYTES  # they count


@pytest.mark.parametrize("damage", ["bit", "cut", "longer", "empty", "renamed"])
def test_no_damaged_file_is_used(damage, tmp_path):
    one = files(tmp_path / "kv")
    rng = np.random.default_rng(1)
    for number in range(80):
        one.write(key(number), page(number))
    for number in range(0, 80, 2):
        path = tmp_path / "kv" / one._name(key(number))
        data = bytearray(path.read_bytes())
        if damage == "bit":
            data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        elif damage == "renamed":
            path = tmp_path / "kv" / one._name(key(number + 1))
        path.write_bytes(
            {"cut": data[: rng.integers(len(data))], "longer": data + b"x", "empty": b""}.get(damage, data)
        )
        bad = number + 1 if damage == "renamed" else number
        assert one.read(key(bad)) is None
        assert key(bad) not in one
        assert not path.exists()
    assert one.damaged == 40


def test_the_least_recently_used_files_are_deleted(tmp_path):
    one = files(tmp_path / "kv", most=10 * FILE_BYTES)
    for number in range(10):
        one.write(key(number), page(number))
        one.read(key(0))
    one.write(key(10), page(10))
    assert [number for number in range(11) if key(number) in one] == [0, *range(2, 11)]
    assert one.evictions == 1
    for i, number in enumerate((3, 2)):  # the next engine goes by the times of files
        os.utime(tmp_path / "kv" / one._name(key(number)), (i, i))
    smaller = files(tmp_path / "kv", "other", most=8 * FILE_BYTES)
    assert smaller.bytes == 8 * FILE_BYTES == sum(path.stat().st_size for path in (tmp_path / "kv").glob("*/*"))
    again = files(tmp_path / "kv")
    assert [number for number in range(11) if key(number) in again] == [0, *range(4, 11)]


def test_forgetting(tmp_path):
    one = files(tmp_path / "kv")
    other = files(tmp_path / "kv", "other")
    one.write(key(1), page(1))
    other.write(key(2), page(2))
    one.clear()
    assert key(1) not in one
    assert one.read(key(1)) is None
    assert other.read(key(2)) is not None


def test_nobody_else_may_enter(tmp_path):
    files(tmp_path / "kv").write(key(1), page(1))
    for path in (tmp_path / "kv", tmp_path / "kv" / "model"):
        assert path.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "kv").glob("*/*"))
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="closed to others"):
        files(tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        files(tmp_path / "file" / "kv")


def test_a_disk_that_fails_costs_nothing_else(tmp_path, monkeypatch, caplog):
    one = files(tmp_path / "kv")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not one.write(key(1), page(1))
    assert not one.write(key(2), page(2))
    assert caplog.text.count("could not be written") == 1
    monkeypatch.undo()
    assert one.write(key(1), page(1))
    assert len(list((tmp_path / "kv").glob("*/*"))) == 1
    assert one.bytes == FILE_BYTES


def test_how_long_a_page_takes_to_read(tmp_path, monkeypatch):
    """Measured with a file that is gone afterwards; infinite where none can be written."""
    one = files(tmp_path / "kv")
    assert 0 < one.seconds_to_read() < math.inf
    assert one.bytes == 0
    assert not list((tmp_path / "kv").glob("*/*"))
    monkeypatch.setattr(os, "open", mock.Mock(side_effect=OSError(28, "No space left on device")))
    assert one.seconds_to_read() == math.inf


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from test_page_files import files, key, page
one = files(Path({folder!r}))
print("go", flush=True)
for number in range(10**9):
    one.write(key(number), page(number))
"""


@pytest.mark.slow
@pytest.mark.parametrize("milliseconds", [5, 30, 80])
def test_killed_while_it_writes(milliseconds, tmp_path):
    """Only whole pages are found afterwards, and what was not finished is removed."""
    folder = tmp_path / "kv"
    script = WRITER.format(paths=[str(Path(__file__).parent), *sys.path], folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"go\n"
    time.sleep(milliseconds / 1000)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = sorted((folder / "model").iterdir())
    (folder / "model" / ".new-1-1").write_bytes(b"half of a page")
    one = files(folder)
    names = [path.name for path in (folder / "model").iterdir()]
    assert not [name for name in names if name.startswith(".")]
    assert len(names) >= len(left) - 1
    assert all(same(one.read(key(number)), page(number)) for number in range(len(names)))
    assert one.damaged == 0
    assert key(len(names)) not in one
