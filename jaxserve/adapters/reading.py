"""Reads files that somebody else has written in a process of its own, which is limited in time and memory.

Files can be made to take long or much, by means that nobody has thought of yet. Python's decoders and regular
expressions also hold the interpreter's lock, so that a thread that reads would hold up the engine's. The process gets
the path and sends the matrices of an adapter, or why it cannot be served. Its answers are checked again here.

Messages on the process's standard input and output are msgpack behind their length. The numbers of matrices follow an
`Answer` in the order in which it lists them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
import numpy as np

from jaxserve import entry
from jaxserve.checkpoints.errors import CheckpointError, TooLongError
from jaxserve.checkpoints.files import clipped, contents_of
from jaxserve.checkpoints.gguf import read_gguf
from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.config import ConfigError
from jaxserve.models.changeable import Changeable, LowRank

log = logging.getLogger(__name__)

# Limits. An adapter gets time and memory for the numbers of the largest one that the model allows.
CPU_SECONDS = 2.0
CPU_PER_WEIGHT = 2e-4
CPU_PER_BYTE = 1e-8
CPU_HEADERS = 10.0  # for those of a whole checkpoint
# beside ten times the time to compute, because files may lie on slow disks
SECONDS = 30.0
PER_BYTE = 1e-7
MAX_MEMORY = 2**31
MEMORY_PER_BYTE = 5
T = TypeVar("T")


def read_matrices(path: Path, changeable: Changeable) -> dict[str, LowRank]:
    """Name of a weight of the model -> the matrices that an adapter adds to it, in float32. `path` is a folder in
    PEFT's layout, or a GGUF file.

    Raises CheckpointError for files that are damaged or do not fit the model, and ConfigError for adapters of a kind
    that is not supported, or of a rank that is too high.
    """
    with contents_of(path):
        if path.suffix == ".gguf":
            from jaxserve.adapters.gguf_adapter import read_gguf_adapter  # imports JAX

            return read_gguf_adapter(path, changeable)
        from jaxserve.adapters.peft import read_peft

        return read_peft(path, changeable)


class Ask(msgspec.Struct):
    """Asks for the matrices of an adapter, or with `headers` for a look at a checkpoint's headers. `cpu_seconds`: time
    to compute."""

    path: str
    headers: bool
    cpu_seconds: float


class Answer(msgspec.Struct):
    """Names of weights with the shapes of A and B, or an error. `of_kind`: the kind of adapter is not supported."""

    found: list[tuple[str, tuple[int, int], tuple[int, int]]] = []
    error: str | None = None
    of_kind: bool = False


class FileReader:
    """The process, as its owner sees it. It starts with the first file and stays; after a file that took too long, or
    that ended it, the next file starts another one. Any thread may call it; files are read one after another.

    changeable: what adapters may change; None: only `check_headers` is called.
    """

    def __init__(self, changeable: Changeable | None = None):
        self._changeable = changeable
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def read_adapter(self, path: Path, changeable: Changeable) -> dict[str, LowRank]:
        """As `read_matrices`."""
        assert self._changeable is not None
        return self._ask(path, headers=False)

    def check_headers(self, path: Path) -> None:
        """Reads the headers of a checkpoint, a folder or GGUF file, as a load would. Raises CheckpointError for files
        that are damaged, or that take too long to read."""
        self._ask(path, headers=True)

    def _ask(self, path: Path, *, headers: bool) -> dict[str, LowRank]:
        cpu_seconds = CPU_HEADERS
        size = 0
        if self._changeable is not None and not headers:
            size = self._changeable.most_bytes
            cpu_seconds = CPU_SECONDS + CPU_PER_WEIGHT * len(self._changeable.shapes) + CPU_PER_BYTE * size
        seconds = SECONDS + PER_BYTE * size + 10 * cpu_seconds
        with self._lock:
            process = self._process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            late = threading.Timer(seconds, process.kill)
            late.daemon = True
            late.start()
            end = time.monotonic() + seconds
            try:
                _send(process.stdin, Ask(str(path), headers, cpu_seconds))
                if (answer := _receive(process.stdout, Answer)) is None:
                    raise EOFError
                return self._matrices(path, answer, process.stdout)
            except (CheckpointError, ConfigError):
                raise
            except (EOFError, OSError, msgspec.MsgspecError) as error:
                _end(process)
                if time.monotonic() >= end:
                    raise CheckpointError(f"{path} cannot be read within {seconds:.0f} seconds") from error
                raise CheckpointError(
                    f"{path} cannot be read: the process that read it has ended with {_code(process)}"
                ) from error
            except BaseException:
                _end(process)
                raise
            finally:
                late.cancel()

    def _matrices(self, path: Path, answer: Answer, numbers: IO[bytes]) -> dict[str, LowRank]:
        if answer.error is not None:
            raise (ConfigError if answer.of_kind else CheckpointError)(answer.error)
        found: dict[str, LowRank] = {}
        for name, a, b in answer.found:
            assert self._changeable is not None
            self._changeable.check(path, name, a, b)
            found[name] = _numbers(numbers, a), _numbers(numbers, b)
        return found

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        own = entry.child_environment() | {"OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(
            entry.command("jaxserve.adapters.reading"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=own
        )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None
        _send(process.stdin, self._changeable)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # what was not sent yet cannot be sent any more
                stream.close()


def _code(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _send(stream: IO[bytes], message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def _receive(stream: IO[bytes], kind: type[T] | Any) -> T | None:
    """None at the end of the stream."""
    if len(head := stream.read(8)) < 8:
        return None
    return msgspec.msgpack.decode(stream.read(int.from_bytes(head, "little")), type=kind)


def _numbers(stream: IO[bytes], shape: tuple[int, int]) -> np.ndarray:
    made = np.empty(shape, np.float32)
    left = memoryview(made).cast("B")  # type: ignore[arg-type]
    while len(left):
        count = stream.readinto(left)  # type: ignore[attr-defined]
        if not count:
            raise EOFError
        left = left[count:]
    return made


# What runs in the process.


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may stand between the answers
    asks = sys.stdin.buffer
    changeable: Changeable | None = _receive(asks, Changeable | None)
    _limit_memory(MAX_MEMORY + (0 if changeable is None else MEMORY_PER_BYTE * changeable.most_bytes))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with its owner, which closes its standard input
    os.nice(5)  # the engine's steps come first
    while (ask := _receive(asks, Ask)) is not None:
        answer, matrices = _answer(ask, changeable)
        _send(answers, answer)
        for a, b in matrices:
            answers.write(memoryview(np.ascontiguousarray(a)).cast("B"))
            answers.write(memoryview(np.ascontiguousarray(b)).cast("B"))
        answers.flush()
        del matrices  # an adapter's numbers are not kept until the next one comes


def _answer(ask: Ask, changeable: Changeable | None) -> tuple[Answer, list[LowRank]]:
    path = Path(ask.path)
    if path.suffix == ".gguf" and not ask.headers:
        from jaxserve.adapters import gguf_adapter  # noqa: F401  (importing JAX does not count)

    def stop(*_: object) -> None:
        raise TooLongError(f"{path} takes more than {ask.cpu_seconds:.0f} seconds of computing to read")

    signal.signal(signal.SIGPROF, stop)
    try:
        signal.setitimer(signal.ITIMER_PROF, ask.cpu_seconds)
        try:
            with contents_of(path):
                if ask.headers:
                    _read_headers(path)
                    return Answer(), []
                assert changeable is not None
                found = read_matrices(path, changeable)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except Exception as error:
        if not isinstance(error, ValueError):
            log.exception("%s cannot be read", path)
        return Answer(error=clipped(str(error) or type(error).__name__), of_kind=isinstance(error, ConfigError)), []
    return Answer([(name, a.shape, b.shape) for name, (a, b) in found.items()]), list(found.values())


def _read_headers(path: Path) -> None:
    if path.suffix == ".gguf":
        read_gguf(path)
    elif any(path.glob("*.safetensors")):
        read_folder(path)


def _limit_memory(most: int) -> None:
    """Limits what this process may map. Under a sanitizer, which has mapped terabytes already, nothing is limited."""
    with contextlib.suppress(OSError):  # the system has no such file
        mapped = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        if mapped > most:
            return
    with contextlib.suppress(OSError, ValueError):  # a lower limit is set already, or the system has none
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    main()
