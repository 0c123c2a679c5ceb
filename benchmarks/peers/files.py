"""The GGUF files that engines are compared on: one that is given, or one made here of random weights."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

from jaxserve.checkpoints.gguf import known_gguf

HERE = Path(__file__).resolve().parent


class NoFile(RuntimeError):  # noqa: N818
    """A file could not be made, and why."""


def write_gguf(model: Path, path: Path, python: str = sys.executable) -> None:
    """The model of a folder as GGUF in its own dtype, unless it is there and newer. Raises NoFile."""
    config = model / "config.json"
    if path.is_file() and path.stat().st_mtime > config.stat().st_mtime:
        return
    _make([python, str(HERE / "write_gguf.py"), str(model), str(path)], path)


def quantized_gguf(model: Path, kind: str, llama_quantize: Path, python: str = sys.executable) -> Path:
    """The same by llama.cpp's llama-quantize, as `kind`: Q4_K_M, Q8_0, F16, BF16. Raises NoFile."""
    plain = model.with_name(f"{model.name}.gguf")
    path = model.with_name(f"{model.name}-{kind}.gguf")
    write_gguf(model, plain, python)
    if not path.is_file() or path.stat().st_mtime <= plain.stat().st_mtime:
        _make([str(llama_quantize), str(plain), str(path), kind], path)
    return path


def quantized_shape(name: str, folder: Path, kind: str, llama_quantize: Path, python: str = sys.executable) -> Path:
    """One of the shapes of `gguf_shapes` as `kind`, beside a float16 file in `folder`. Raises NoFile."""
    path = folder / f"{name}-{kind}.gguf"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        plain = folder / f"{name}.gguf"
        if not plain.is_file():
            _make([python, str(HERE / "gguf_shapes.py"), name, str(plain)], plain)
        _make([str(llama_quantize), str(plain), str(path), kind], path)
    return path


def vocabulary_size(path: Path) -> int:
    """How many tokens a GGUF file's tokenizer has."""
    return len(known_gguf(path).metadata["tokenizer.ggml.tokens"])


def parameter_count(path: Path) -> int:
    return sum(math.prod(tensor.shape) for tensor in known_gguf(path).tensors.values())


def _make(command: list[str], path: Path) -> None:
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise NoFile(f"{command[0]} cannot be run: {error.strerror}") from None
    if run.returncode:
        path.unlink(missing_ok=True)
        end = "\n".join(run.stdout.rstrip().splitlines()[-5:])
        raise NoFile(f"{path.name} could not be made: {end}")
