"""Lines of a batch reach the disk in order, off the event loop, and several at a time where the disk is slow."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from jaxserve.server.batches.answers import AnswerFile


def test_the_loop_goes_on_while_the_disk_is_slow(tmp_path, monkeypatch):
    may_go_on = threading.Event()
    synced = []

    def fsync(descriptor):
        assert may_go_on.wait(20), "the event loop waits for the disk"
        synced.append(os.path.getsize(tmp_path / "out"))

    monkeypatch.setattr(os, "fsync", fsync)

    async def run(output):
        writing = [asyncio.ensure_future(output.append(b"0\n"))]
        await asyncio.sleep(0.05)
        writing += [asyncio.ensure_future(output.append(b"%d\n" % i)) for i in range(1, 100)]
        await asyncio.sleep(0.05)
        assert not any(one.done() for one in writing), "a line counts as written that is not on the disk"
        may_go_on.set()
        await asyncio.gather(*writing)

    with open(tmp_path / "out", "ab+", buffering=0) as file:
        output = AnswerFile(file)
        asyncio.run(run(output))
        output.close()
    assert (tmp_path / "out").read_bytes() == b"".join(b"%d\n" % i for i in range(100))
    assert len(synced) == 2, "what came while the disk was busy is written together"


def test_after_an_error_nothing_more_is_written(tmp_path):
    class File:
        """A disk on which there is room for 10 bytes."""

        def __init__(self, file):
            self._file = file
            self._room = 10

        def write(self, data):
            if not self._room:
                raise OSError(28, "No space left on device")
            count = self._file.write(data[: self._room])
            self._room -= count
            return count

        def fileno(self):
            return self._file.fileno()

    async def run(output):
        await output.append(b"whole\n")
        results = await asyncio.gather(*(output.append(b"torn\n") for _ in range(3)), return_exceptions=True)
        assert all(isinstance(result, OSError) and "No space left" in str(result) for result in results)
        output._file._room = 100
        with pytest.raises(OSError, match="No space left"):
            await output.append(b"late\n")

    with open(tmp_path / "out", "ab+", buffering=0) as file:
        output = AnswerFile(File(file))  # type: ignore[arg-type]
        asyncio.run(run(output))
        output.close()
    assert (tmp_path / "out").read_bytes() == b"whole\ntorn"
