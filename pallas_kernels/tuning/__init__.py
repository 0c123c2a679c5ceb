"""Block sizes that were measured on a device, for the kernels' plans.

A table is a JSON file for one kind of device. `jaxserve tune` writes one to the user's folder. Its entries override
those of the tables beside this file:

  {"device": "NVIDIA H200", "comment": "…",
   "sizes": {"matmul": {"mosaic_gpu": {"bits=4 group=128 inputs=4096 out=4096 tokens=16":
                                       {"sizes": {"stages": 6}, "us": 9.1, "default_us": 11.8}}}}}

The plan decides sizes that a table does not name. `us` and `default_us` are the measured microseconds with and without
these sizes, for information.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax

SHIPPED = Path(__file__).parent
BUCKETED = ("tokens", "rows", "context")  # numbers of a problem that are rounded up to a power of two

# Sizes that can be set, by operation and backend, with the values worth a trial.
SIZES: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {
    ("matmul", "mosaic_gpu"): {
        "n": (8, 16, 32, 64, 128),
        "m": (64, 128),
        "k": (64, 128),
        "stages": (2, 3, 4, 6, 8, 12),
        "splits": (1, 2, 4, 8, 16),
        "warpgroups": (1, 2, 3),  # warpgroups that share a tile of x
        "dequantize": (1, 2),  # 1: no, 2: yes; dequantize the weight first, see quant_matmul.dequantized
    },
    ("matmul", "triton"): {
        "tokens": (16, 32, 64, 128),
        "outputs": (32, 64, 128),
        "step": (64, 128, 256),
        "stages": (2, 3, 4, 5),
        "warps": (4, 8),
        "splits": (1, 2, 4, 8, 16),
        "dequantize": (1, 2),
    },
    ("matmul", "mosaic_tpu"): {"inputs": (512, 1024, 2048, 4096, 8192), "outs": (256, 512, 1024, 2048)},
    ("decode", "mosaic_gpu"): {"parallel": (132, 264, 528, 1056)},
    ("decode", "triton"): {
        "block": (32, 64, 128),
        "stages": (2, 3, 4),
        "warps": (4, 8),
        "splits": (1, 2, 4, 8, 16, 32, 64),
    },
    ("decode", "mosaic_tpu"): {"block": (128, 256, 512, 1024)},
    ("prompts", "mosaic_gpu"): {"block": (64, 128)},
    ("prompts", "triton"): {"pairs": (64, 128), "block": (32, 64, 128), "stages": (2, 3), "warps": (4, 8)},
    ("prompts", "mosaic_tpu"): {"tile": (32, 64, 128, 256), "block": (128, 256, 512, 1024)},
}


class TuningError(ValueError):
    """A table cannot be used. The message has the file and the reason."""


class Trial(NamedTuple):
    """Sizes that replace those of the tables, and the problems for which they were requested."""

    operation: str
    backend: str
    sizes: Mapping[str, int]
    asked: set[str]


_trial: ContextVar[Trial | None] = ContextVar("trial", default=None)


@contextmanager
def trial(operation: str, backend: str, sizes: Mapping[str, int]) -> Iterator[set[str]]:
    """Plans made inside get these sizes. Yields a set that collects the keys of the problems that ask for them.

    JAX keeps what it has traced, so call `jax.clear_caches()` first.
    """
    now = Trial(operation, backend, sizes, set())
    token = _trial.set(now)
    try:
        yield now.asked
    finally:
        _trial.reset(token)


def lookup(operation: str, backend: str, kind: str | None = None, **problem: Any) -> Mapping[str, int]:
    """Returns the sizes for a problem; empty if it was not tuned.

    Args:
      operation, backend: a key of SIZES.
      kind: kind of device; None: the device that is compiled for.
      problem: everything that the plan depends on. BUCKETED numbers may have any value; others must match exactly.

    Raises:
      TuningError: the device's table is damaged.
    """
    key = problem_key(**problem)
    now = _trial.get()
    if now is not None and (now.operation, now.backend) == (operation, backend):
        now.asked.add(key)
        return now.sizes
    return _merged(kind or device_kind(), user_folder()).get((operation, backend, key), {})


def of_attention(q: jax.Array, data: jax.Array, block_tables: jax.Array) -> dict[str, Any]:
    """The problem, except the number of rows or tokens. data: `KVPages.data`; the rest as in paged_attention."""
    sizes = dict(zip(("heads", "group", "head_dim"), q.shape[1:], strict=True))
    page_size, context = data.shape[3], block_tables.shape[1] * data.shape[3]
    return {"q": q.dtype.name, "kv": data.dtype.name, "page_size": page_size, "context": context, **sizes}


def problem_key(**problem: Any) -> str:
    return " ".join(f"{name}={_bucket(name, problem[name])}" for name in sorted(problem))


def _bucket(name: str, value: Any) -> Any:
    return 1 << (max(value, 1) - 1).bit_length() if name in BUCKETED else value


def device_kind() -> str:
    """Kind of the devices in the mesh of `jax.set_mesh`, or of the first local device if there is none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.devices()[0] if device is None else device).device_kind


def user_folder() -> Path | None:
    """$JAXSERVE_TUNING (empty: None), or jaxserve/tuning in the user's cache folder."""
    chosen = os.environ.get("JAXSERVE_TUNING")
    if chosen is not None:
        return Path(chosen) if chosen else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve" / "tuning"


def file_name(kind: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") + ".json"


@cache
def _merged(kind: str, user: Path | None) -> dict[tuple[str, str, str], dict[str, int]]:
    paths = [folder / file_name(kind) for folder in (SHIPPED, user) if folder is not None]
    return {key: sizes for path in paths if path.exists() for key, sizes in read(path, kind).items()}


def read(path: Path, kind: str) -> dict[tuple[str, str, str], dict[str, int]]:
    """The sizes by operation, backend and problem. Raises TuningError for a table that is damaged or not of `kind`."""
    try:
        table = json.loads(path.read_text())
        found = table["device"]
        entries = [
            (operation, backend, key, dict(entry["sizes"]))
            for operation, backends in table["sizes"].items()
            for backend, problems in backends.items()
            for key, entry in problems.items()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TuningError(f"{path} is no table of block sizes ({error!r}); remove it, or run jaxserve tune") from None
    if found != kind:
        raise TuningError(f"{path} is for {found}, and must be for {kind}")
    for operation, backend, key, sizes in entries:
        allowed = SIZES.get((operation, backend))
        if allowed is None:
            known = ", ".join(" ".join(pair) for pair in SIZES)
            raise TuningError(f"{path}: {operation} {backend} has no sizes; those that have are {known}")
        wrong = [name for name, value in sizes.items() if name not in allowed or type(value) is not int or value < 1]
        if wrong:
            raise TuningError(
                f"{path}: {operation} {backend}, {key}: {wrong[0]} = {sizes[wrong[0]]!r}; sizes must be positive "
                f"integers and among {', '.join(allowed)}"
            )
    return {(operation, backend, key): sizes for operation, backend, key, sizes in entries}


def clear() -> None:
    """Forgets the tables, so that they are read again."""
    _merged.cache_clear()
