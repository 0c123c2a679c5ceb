"""The adapters that requests can ask for by name, and the weights of some of them in the host's memory.

Files are read, checked and hashed in a thread, so that no step waits for them. Weights that have not been used for
longest leave the memory when there are more than `most`; they are read again when they are needed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from jaxserve.checkpoints.files import contents_of

if TYPE_CHECKING:
    from jaxserve.adapters.adapter import Adapter

log = logging.getLogger(__name__)

MAX_ADAPTERS = 4096  # names that are known at a time


class AdapterError(ValueError):
    """An adapter that cannot be loaded, unloaded or used; the message says why."""


class ServedAdapter(msgspec.Struct, frozen=True):
    """An adapter that requests can ask for.

    Attributes:
      name: the name that requests use.
      digest: identifies its content, in hexadecimal. A changed adapter under the same name is another one.
      path: where its files are.
      parent: the name of the model that it belongs to, for `/v1/models`; None: the served model's.
    """

    name: str
    digest: str
    path: str
    parent: str | None = None


class Registry:
    """The adapters of one engine. Only `read` does its work in a thread; the engine's thread calls everything.

    load: reads an adapter's files, given path and name. Raises ValueError or OSError.
    most: adapters whose weights are kept in memory.
    """

    def __init__(self, load: Callable[[Path, str], Adapter], most: int):
        self._load = load
        self._most = most
        self._names: dict[str, ServedAdapter] = {}
        self._weights: OrderedDict[str, Adapter] = OrderedDict()  # by digest, least recently used first
        self._reading: dict[str, Future[Adapter]] = {}  # by digest, of known adapters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    # Names

    @property
    def served(self) -> list[ServedAdapter]:
        return list(self._names.values())

    def find(self, name: str) -> ServedAdapter | None:
        return self._names.get(name)

    def read(self, name: str, path: str) -> Future[Adapter]:
        """Begins to read an adapter's files; `add` takes the result. Whatever their contents are, the result is an
        adapter, or a ValueError or OSError."""
        return self._thread.submit(self._read, Path(path).expanduser(), name)

    def _read(self, path: Path, name: str) -> Adapter:
        with contents_of(path):
            return self._load(path, name)

    def add(self, adapter: Adapter, path: str, parent: str | None = None) -> ServedAdapter:
        """Makes an adapter known by its name, in place of an earlier one, which requests that ask for it keep.
        Raises AdapterError if there are too many."""
        if len(self._names) >= MAX_ADAPTERS and adapter.name not in self._names:
            raise AdapterError(f"there are {MAX_ADAPTERS} adapters already; unload some")
        served = self._names[adapter.name] = ServedAdapter(adapter.name, adapter.digest.hex(), path, parent)
        self._keep(adapter)
        return served

    def remove(self, name: str) -> None:
        """Forgets a name. Requests that ask for its adapter keep it. Raises AdapterError for an unknown name."""
        if self._names.pop(name, None) is None:
            raise AdapterError(f"there is no adapter {name!r}")

    # Weights

    def weights(self, wanted: Sequence[ServedAdapter], *, patience: float | None = 0.0) -> Adapter | None:
        """The weights of the first of the adapters that are wanted next; the second one is read, too, if it is not in
        memory. None while the first is being read, for which this call waits up to `patience` seconds (None: as long as
        it takes). Raises AdapterError if it cannot be read."""
        first = wanted[0]
        soon = {adapter.digest: adapter for adapter in wanted[:2]}
        self._reading = {digest: one for digest, one in self._reading.items() if digest in soon}
        for digest, adapter in soon.items():
            if digest not in self._weights and digest not in self._reading:
                self._reading[digest] = self.read(adapter.name, adapter.path)
        if first.digest not in self._weights:
            reading = self._reading[first.digest]
            wait([reading], patience)
            if not reading.done():
                return None
            del self._reading[first.digest]
            self._keep(_same(first, reading))
        self._weights.move_to_end(first.digest)
        return self._weights[first.digest]

    def _keep(self, adapter: Adapter) -> None:
        digest = adapter.digest.hex()
        self._weights[digest] = adapter
        self._weights.move_to_end(digest)
        while len(self._weights) > self._most:
            self._weights.popitem(last=False)


def _same(wanted: ServedAdapter, reading: Future[Adapter]) -> Adapter:
    """The adapter that was read again. Raises AdapterError unless it is the one that was read before."""
    try:
        adapter = reading.result()
    except Exception as error:
        raise AdapterError(f"the adapter {wanted.name!r} cannot be read again: {error}") from error
    if adapter.digest.hex() != wanted.digest:
        raise AdapterError(f"the files of the adapter {wanted.name!r} have changed; load it again")
    return adapter
