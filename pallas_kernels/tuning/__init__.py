"""What was measured on a device: which kernels are the fastest, and their block sizes.

A table is a JSON file for one kind of device. `jaxserve tune` writes one to the user's folder. Its entries override
those of the tables beside this file:

  {"device": "NVIDIA A100", "comment": "…",
   "products": {"bias=0 block=1x128 codes=int4 inputs=4096 out=4096 x=bfloat16 zero=0":
                {"shuffled": false, "ways": {"1": "triton", "32": "triton", "1024": "dequantize"}, "us": {…}}},
   "decode": {"group=4 head_dim=128 heads=8 kv=bfloat16 page_size=16 q=bfloat16": {"backend": "triton", "us": {…}}},
   "sizes": {"matmul": {"triton": {"codes=int4 group=128 inputs=4096 out=4096 tokens=16 x=bfloat16":
                                   {"sizes": {"stages": 3}, "us": 9.1, "default_us": 11.8}}}}}

  products  for a weight of this form on one device: whether its codes are shuffled, and for some numbers of rows the
            fastest way to multiply by it (`quant_matmul.ways`). Weights in floats are here with the activation that
            gates the product
  decode    the backend of attention in steps that only decode
  sizes     block sizes of kernels. Their plans decide those that a table does not name

`us` and `default_us` are measured microseconds, for information. Where a start has timed products itself, what it found
is kept in a file of the same form (`kept_path`), and counts where no table has an entry.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.pallas_kernels.installed import versions
from jaxserve.pallas_kernels.registry import BACKENDS

if TYPE_CHECKING:  # records of deployments read tables without loading JAX
    import jax

SHIPPED = Path(__file__).parent
BUCKETED = ("tokens", "rows", "context")  # numbers of a problem that are rounded up to a power of two
WAYS = (*BACKENDS, "dequantize", "dot")  # see `quant_matmul.ways`
VERSIONS = ("jax", "jaxlib", "jax-triton", "triton", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")

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


class Product(NamedTuple):
    """How to multiply by a weight: whether its codes are shuffled, and the fastest way for some numbers of rows, which
    ascend."""

    shuffled: bool
    ways: tuple[tuple[int, str], ...]

    def way(self, rows: int) -> str:
        """The way of the number of rows that is nearest by ratio."""
        return min(self.ways, key=lambda one: abs(math.log(rows / one[0])))[1]

    def as_json(self) -> dict[str, Any]:
        return {"shuffled": self.shuffled, "ways": {str(rows): way for rows, way in self.ways}}


class Table(NamedTuple):
    """The contents of tables: sizes by operation, backend and problem; products, and backends that decode, by
    problem."""

    sizes: Mapping[tuple[str, str, str], dict[str, int]] = {}
    products: Mapping[str, Product] = {}
    decode: Mapping[str, str] = {}


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
    return tables(kind or device_kind()).sizes.get((operation, backend, key), {})


_in_use: dict[str, Table] = {}  # by kind of device


def use(kind: str, table: Table) -> None:
    """From now on, the products of `table` count where it has an entry, before those of the files: what this start has
    measured, or what the programs of a bundle were compiled with."""
    _in_use[kind] = table


def product(kind: str, key: str) -> Product | None:
    """How to multiply by a weight whose problem has this key; None: it was not measured on this kind of device."""
    return everything(kind).products.get(key)


def everything(kind: str) -> Table:
    """What the tables have, and what is in `use`."""
    found = tables(kind)
    more = _in_use.get(kind)
    if more is None:
        return found
    return Table(found.sizes, {**found.products, **more.products}, {**found.decode, **more.decode})


def tables(kind: str) -> Table:
    """What the user's table and the package's have. Raises TuningError if one is damaged."""
    return _merged(kind, user_folder())


def kept_path(kind: str) -> Path | None:
    """Where starts keep what they measured; None: nowhere, as there is no user's folder. Not beside the user's tables,
    which must be the same on all hosts of a replica."""
    folder = user_folder()
    return None if folder is None else folder / "kept" / file_name(kind)


def kept(kind: str) -> Mapping[str, Product]:
    """The products that earlier starts measured with the same versions of packages. None from a damaged file, which is
    only measured again."""
    path = kept_path(kind)
    try:
        if path is None or json.loads(path.read_text())["versions"] != versions(VERSIONS):
            return {}
        return read(path, kind).products
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def keep(kind: str, products: Mapping[str, Product]) -> None:
    """Writes products for `kept`. Raises OSError."""
    path = kept_path(kind)
    if path is None:
        return
    table = {"device": kind, "versions": versions(VERSIONS), "sizes": {}}
    table["products"] = {key: one.as_json() for key, one in sorted(products.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(table, indent=1) + "\n")
    temporary.replace(path)  # several starts may do this at a time


def describe() -> dict[str, Any]:
    """The contents of the tables of this machine, by file, without times; for records of deployments."""
    user = user_folder()
    return _described("package", SHIPPED) | ({} if user is None else _described("user", user))


def describe_kept() -> dict[str, Any]:
    """As `describe`, for what starts on this machine have kept."""
    user = user_folder()
    return {} if user is None else _described("kept", user / "kept")


def _described(place: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            table = json.loads(path.read_text())
            found[f"{place}/{path.name}"] = _without_times({name: table.get(name, {}) for name in Table._fields})
        except (OSError, ValueError, AttributeError):
            continue  # what cannot be read chooses nothing, or is an error where it is needed
    return found


def _without_times(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_times(part) for name, part in value.items() if name not in ("us", "default_us")}


def of_attention(q: jax.Array, data: jax.Array, block_tables: jax.Array) -> dict[str, Any]:
    """The problem, except the number of rows or tokens. data: `KVPages.data`; the rest as in paged_attention."""
    sizes = dict(zip(("heads", "group", "head_dim"), q.shape[1:], strict=True))
    page_size = data.shape[3]
    context = block_tables.shape[1] * data.shape[3]
    return {"q": q.dtype.name, "kv": data.dtype.name, "page_size": page_size, "context": context, **sizes}


def problem_key(**problem: Any) -> str:
    return " ".join(f"{name}={_bucket(name, problem[name])}" for name in sorted(problem))


def _bucket(name: str, value: Any) -> Any:
    return 1 << (max(value, 1) - 1).bit_length() if name in BUCKETED else value


def device_kind() -> str:
    """Kind of the devices in the mesh of `jax.set_mesh`, or of the first local device if there is none."""
    import jax

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
def _merged(kind: str, user: Path | None) -> Table:
    paths = [folder / file_name(kind) for folder in (SHIPPED, user) if folder is not None]
    merged = Table({}, {}, {})
    for found in (read(path, kind) for path in paths if path.exists()):
        merged = Table(
            {**merged.sizes, **found.sizes}, {**merged.products, **found.products}, {**merged.decode, **found.decode}
        )
    return merged


def read(path: Path, kind: str) -> Table:
    """The contents of a file. Raises TuningError for a table that is damaged or not of `kind`."""
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
        raise TuningError(f"{path} is no table of jaxserve tune ({error!r}); remove it, or run jaxserve tune") from None
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
    return table_of(table, path)._replace(sizes={(part, backend, key): sizes for part, backend, key, sizes in entries})


def choices(kind: str) -> dict[str, Any]:
    """The products and backends that count for a kind of device, as JSON for `table_of`."""
    found = everything(kind)
    decode = {key: {"backend": backend} for key, backend in found.decode.items()}
    return {"products": {key: one.as_json() for key, one in found.products.items()}, "decode": decode}


def table_of(values: Mapping[str, Any], path: Path) -> Table:
    """The products and backends in a file's JSON, without sizes. Raises TuningError."""
    try:
        products = {key: _product(entry) for key, entry in values.get("products", {}).items()}
        decode = {key: entry["backend"] for key, entry in values.get("decode", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TuningError(f"{path} is no table of jaxserve tune ({error}); remove it, or run jaxserve tune") from None
    unknown = [backend for backend in decode.values() if backend not in BACKENDS]
    if unknown:
        raise TuningError(f"{path}: decode: {unknown[0]!r} is no backend; those are {', '.join(BACKENDS)}")
    return Table({}, products, decode)


def _product(entry: Mapping[str, Any]) -> Product:
    """An entry of a table. Raises ValueError."""
    ways = tuple(sorted((int(rows), way) for rows, way in entry["ways"].items()))
    if type(entry["shuffled"]) is not bool or not ways or ways[0][0] < 1:
        raise ValueError(f"shuffled must be true or false, and ways be by positive numbers of rows: {entry}")
    if wrong := next((way for _, way in ways if way not in WAYS), None):
        raise ValueError(f"{wrong!r} is no way; those are {', '.join(WAYS)}")
    return Product(entry["shuffled"], ways)


def clear() -> None:
    """Forgets the tables, so that they are read again, and what is in `use`."""
    _merged.cache_clear()
    _in_use.clear()
