"""Copies of KV pages between the devices, the host's memory and files; `scheduling.page_tiers` says what is where.

Nothing here waits inside a step. Down: the pages that the prefix cache has evicted are gathered into one array by a
call of the devices, which runs before the next step can write to them. A thread waits for the array and puts its pages
into the host's memory; another one writes files. Up: a thread collects pages into one array, and before a step the
devices get it and spread it over pages. While sequences run, only some of these calls are made before each step.

Arrays on their way are bounded. What exceeds the bound is not copied, and is computed again if it is wanted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.loading import EngineParts
from jaxserve.engine.page_files import PageFiles
from jaxserve.engine.page_fingerprint import page_fingerprint
from jaxserve.engine.role import HasRole, Role
from jaxserve.execution.memory import OFFLOAD_BYTES, available_host_bytes
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.step_shape import StepShape
from jaxserve.scheduling.block_manager import BlockManager
from jaxserve.scheduling.page_loads import Load, PageLoads
from jaxserve.scheduling.page_tiers import CopyCosts, PageTiers
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.speculation.step_times import prompt_seconds

log = logging.getLogger(__name__)

GIB = 2**30
BUSY_SECONDS = 0.002  # for uploads before each step while sequences run
PATIENCE = 0.005  # seconds that an engine with nothing else to do waits for a thread
WRITTEN_BYTES = 2**27  # most bytes on their way to files
READS_AHEAD = 4  # arrays that the thread may collect before the devices get them


@dataclass
class _Save:
    """Pages on their way from the devices."""

    places: list[int]
    future: Future[None]


@dataclass
class _Progress:
    """A load: the parts of it that are not on the devices yet, and the pages whose contents could not be had."""

    parts: int
    failed: set[int] = field(default_factory=set)


@dataclass
class _Read:
    """A part of a load, as (page, key, pinned place or None for a file), whose contents a thread collects."""

    load: Load
    part: list[tuple[int, bytes, int | None]]
    future: Future[tuple[list[np.ndarray], set[int]]] | None = None


class PageCopies:
    """Makes the copies of one engine. One thread calls everything; `_store`, `_collect` and `_write` run in others.

    threads: they run `_store`, `_collect` and `_write`, each one call at a time in their order; None: new ones.
    """

    def __init__(
        self,
        tiers: PageTiers,
        runner: ModelRunner,
        files: PageFiles | None,
        threads: Sequence[Executor] | None = None,
    ):
        self.tiers = tiers
        self.files = files
        self._runner = runner
        self._sizes = runner.layout.copy_sizes
        self._page_bytes = runner.layout.page_bytes
        # For each of a page's arrays, that of all places. The system provides memory when a place is first written.
        self.memory = [
            np.empty((tiers.num_places, *x.shape[1:]), x.dtype) for x in runner.layout.contents(runner.mesh, 1)
        ]
        names = "kv-saver", "kv-loader", "kv-writer"
        self._saver, self._loader, self._writer = threads or [ThreadPoolExecutor(1, name) for name in names]
        self._saves: deque[_Save] = deque()
        self._reads: deque[_Read] = deque()  # parts of loads in their order
        self._progress: dict[Load, _Progress] = {}
        self._writing = 0  # pages on their way to files
        self._lock = threading.Lock()
        self._resets = 0
        self.patience = PATIENCE
        self._idle: tuple[int, list[int]] = (-1, [])  # the cache's generation, and its pages that were not looked at
        self.saved = self.loaded = self.failed = 0  # pages
        self.role: Role | None = None

    @classmethod
    def of(cls, config: EngineConfig, parts: EngineParts) -> PageCopies | None:
        """For an engine's settings; None if they turn lower tiers off. Raises ConfigError."""
        if not config.kv_offload_gib:
            return None
        runner = parts.runner
        most = int(config.kv_offload_gib * GIB)
        if most > (free := available_host_bytes()):
            raise ConfigError(f"kv_offload_gib must be at most the free memory, {free / GIB:.1f}, got {most / GIB:g}")
        if not (places := most // runner.layout.page_bytes):
            raise ConfigError(f"kv_offload_gib {most / GIB:g} holds no page of {runner.layout.page_bytes} bytes")
        files = None
        if config.kv_offload_dir is not None:
            fingerprint = page_fingerprint(config, parts.plan.folder, runner)
            shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in runner.layout.contents(runner.mesh, 1)]
            bytes_of_files = int(config.kv_offload_dir_gib * GIB)
            files = PageFiles(Path(config.kv_offload_dir).expanduser(), fingerprint, shapes, bytes_of_files)
            log.info("%d KV pages of earlier engines in %s", files.found, config.kv_offload_dir)
        return cls(PageTiers(places, files), runner, files)

    # Before a step

    def before_step(self, scheduler: Scheduler, *, busy: bool, may_load: bool) -> None:
        """Uploads pages that sequences wait for, and lets the sequences begin whose pages are complete. Takes
        BUSY_SECONDS and a call while sequences run (`busy`). Unless `may_load`, no more sequences are set aside."""
        self.tiers.may_load = may_load
        self._take_saves()
        if self.role is not None:
            self.role.pages.before_step(scheduler, busy=busy)
        end = time.perf_counter() + BUSY_SECONDS
        while self._begin_reads(scheduler.loads):
            future = self._reads[0].future
            assert future is not None
            if not future.done() and (busy or not wait([future], self.patience).done):
                return
            self._finish(self._reads.popleft(), scheduler)
            if busy and time.perf_counter() > end:
                return

    @property
    def has_work(self) -> bool:
        """Whether pages are on their way from or to other servers."""
        return self.role is not None and self.role.pages.active

    @property
    def loading(self) -> bool:
        return bool(self._reads)

    def _begin_reads(self, loads: PageLoads) -> bool:
        """Has the thread collect the next parts of loads. Returns whether there are any."""
        for load in loads.active:
            if load not in self._progress:
                parts = list(_cut(load.missing, self._sizes[-1]))
                self._progress[load] = _Progress(len(parts))
                for part in parts:
                    places = [self.tiers.place_of(key) for _, key in part]
                    for place in places:
                        if place is not None:
                            self.tiers.pin(place)
                    self._reads.append(_Read(load, [(*one, place) for one, place in zip(part, places, strict=True)]))
        for i in range(min(READS_AHEAD, len(self._reads))):
            read = self._reads[i]
            if read.future is None:
                read.future = self._loader.submit(self._collect, read)
        return bool(self._reads)

    def _collect(self, read: _Read) -> tuple[list[np.ndarray], set[int]]:
        """The contents of a part as arrays for `write_pages`, and the pages whose contents could not be had."""
        size = next(size for size in self._sizes if size >= len(read.part))
        failed = set()
        # New arrays each time, since JAX may read them long after the call that takes them. What is not filled is 0,
        # since attention may multiply what is behind the end of a sequence by 0.
        contents = [np.zeros((size, *x.shape[1:]), x.dtype) for x in self.memory]
        if read.load.stopped:
            return contents, {page for page, _, _ in read.part}
        for i, (page, key, place) in enumerate(read.part):
            found = None
            if place is not None:
                found = [x[place] for x in self.memory]
            elif self.files is not None:
                found = self.files.read(key)
            if found is None:
                failed.add(page)
                continue
            for array, one in zip(contents, found, strict=True):
                array[i] = one
        return contents, failed

    def _finish(self, read: _Read, scheduler: Scheduler) -> None:
        assert read.future is not None
        contents, failed = read.future.result()
        for _, _, place in read.part:
            if place is not None:
                self.tiers.unpin(place)
        progress = self._progress[read.load]
        progress.parts -= 1
        progress.failed |= failed
        if not read.load.stopped:  # else others may own the pages
            self.save()  # the last contents of these pages may be wanted, too
            self._runner.write_pages([page for page, _, _ in read.part], contents)
            self.loaded += len(read.part) - len(failed)
            self.failed += len(failed)
        if not progress.parts:
            del self._progress[read.load]
            if not read.load.stopped:
                scheduler.loads.finish(read.load, progress.failed, scheduler.waiting)

    # From the devices

    def save(self) -> None:
        """Copies the pages that were evicted since the last call, before anything is dispatched that writes to them."""
        self._take_saves()
        on_their_way = sum(len(save.places) for save in self._saves)
        leaving = self.tiers.take_leaving(max(OFFLOAD_BYTES // self._page_bytes, 1) - on_their_way)
        at = 0
        for count, arrays in self._runner.read_pages([page for page, _, _ in leaving]) if leaving else ():
            for array in arrays:
                array.copy_to_host_async()
            some = leaving[at : at + count]
            keys = [key for _, key, _ in some]
            places = [place for _, _, place in some]
            self._saves.append(_Save(places, self._saver.submit(self._store, arrays, keys, places, self._resets)))
            at += count

    def _store(self, arrays: list[jax.Array], keys: list[bytes], places: list[int], resets: int) -> None:
        """Waits for the contents of pages, and puts them into their places."""
        pages = [np.asarray(array) for array in arrays]
        for i, place in enumerate(places):
            for memory, contents in zip(self.memory, pages, strict=True):
                memory[place] = contents[i]
        if self.files is not None and (self._writing + len(keys)) * self._page_bytes <= WRITTEN_BYTES:
            with self._lock:
                self._writing += len(keys)
            self._writer.submit(self._write, pages, keys, resets)

    def _write(self, pages: list[np.ndarray], keys: list[bytes], resets: int) -> None:
        assert self.files is not None
        for i, key in enumerate(keys):
            if resets == self._resets:
                self.files.write(key, [contents[i] for contents in pages])
        with self._lock:
            self._writing -= len(keys)

    def _take_saves(self) -> None:
        """Lets sequences find the contents that have arrived."""
        while self._saves and self._saves[0].future.done():
            save = self._saves.popleft()
            if (error := save.future.exception()) is not None:  # the step that should have computed them has failed
                log.warning("%d KV pages could not be copied to the host: %s", len(save.places), error)
            else:
                self.saved += len(save.places)
            for place in save.places:
                self.tiers.arrived(place, intact=error is None)

    # Between requests

    def idle(self, blocks: BlockManager) -> bool:
        """Copies a few of the pages that are only in the prefix cache to files, the most recently used ones first, so
        that the next engine finds them. Returns whether there is more to do. Nothing may run."""
        if self.files is None:
            return False
        if self._idle[0] != blocks.generation:
            self._idle = blocks.generation, blocks.cached_pages()
        left = self._idle[1]
        some = 0
        self._take_saves()
        while left and some < self._sizes[-1] and len(self._saves) < READS_AHEAD and not self._behind:
            page = left.pop()
            if (key := blocks.key_of(page)) is not None and key not in self.tiers:
                self.tiers.evicted(page, key)
                some += 1
        self._idle = blocks.generation, left  # looking for keys changes the generation
        self.save()
        return bool(left or self._saves or self._writing)

    @property
    def _behind(self) -> bool:
        """Whether the thread that writes files has much to do."""
        return self._writing * self._page_bytes > WRITTEN_BYTES // 2

    def clear(self, scheduler: Scheduler) -> None:
        """Forgets all contents, in files too."""
        scheduler.loads.give_way(scheduler.waiting)
        self._resets += 1
        self.tiers.clear()
        if self.files is not None:
            self.files.clear()

    def stats(self, loads: PageLoads) -> dict[str, Any]:
        """The fields of EngineStats that concern lower tiers."""
        tiers = self.tiers
        files = self.files
        each = self._page_bytes
        stats = {
            "offload_hits": loads.hits,
            "offload_host_bytes": tiers.num_held * each,
            "offload_host_capacity": tiers.num_places * each,
            "offload_host_evictions": tiers.evictions,
            "offload_stored_bytes": self.saved * each,
            "offload_loaded_bytes": self.loaded * each,
            "offload_dropped": tiers.dropped,
        }
        if files is not None:
            stats |= {
                "offload_disk_bytes": files.bytes,
                "offload_disk_evictions": files.evictions,
                "offload_disk_written_bytes": files.written * each,
                "offload_disk_read_bytes": files.read_pages * each,
                "offload_disk_damaged": files.damaged,
            }
        return stats if self.role is None else stats | self.role.pages.stats()

    # Measured at start

    def begin(self, engine: HasRole, parts: EngineParts) -> None:
        """Measures, and connects with servers of the other role, if the engine has one."""
        self.measure(engine.shapes)
        if engine.config.role != "both":
            self.role = Role(engine, parts.plan, self.memory, parts.listener)

    def measure(self, shapes: Sequence[StepShape]) -> None:
        """Measures what decides whether loading pays. All pages must be free."""
        one, most = (self._seconds_to_load(size) for size in (self._sizes[0], self._sizes[-1]))
        page = (most - one) / (self._sizes[-1] - 1) if self._sizes[-1] > 1 else one
        page = max(page, 0.0)
        token = prompt_seconds(self._runner, shapes)
        file = 0.0 if self.files is None else self.files.seconds_to_read()
        self.tiers.costs = CopyCosts(page, page + file, token, wait=one)
        each = self._runner.layout.page_size * token / max(self._runner.layout.groups.num_groups, 1)
        log.info(
            "KV pages below the devices: %d in host memory; to load a page takes %.2f ms from there, %.2f ms from a "
            "file, to compute it %.2f ms", self.tiers.num_places, 1e3 * page, 1e3 * (page + file), 1e3 * each,
        )  # fmt: skip

    def _seconds_to_load(self, size: int) -> float:
        """The least time in which `size` pages are collected and written, here to the null page."""
        places = range(size)
        best = np.inf
        for _ in range(4):
            start = time.perf_counter()
            contents = [np.empty((size, *x.shape[1:]), x.dtype) for x in self.memory]
            for i in places:
                for array, memory in zip(contents, self.memory, strict=True):
                    array[i] = memory[i % len(memory)]
            self._runner.write_pages([], contents)
            jax.block_until_ready(self._runner.cache)
            best = min(best, time.perf_counter() - start)
        return best


def _cut(items: list, most: int) -> Iterator[list]:
    for at in range(0, len(items), most):
        yield items[at : at + most]
