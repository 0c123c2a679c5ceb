"""Pages that this prefill server computes for decode servers.

What a decode server asks for becomes a request of the engine's own, with one token to sample. After each step its new
pages are read from the devices, as far as few bytes wait to be sent. Pages that were evicted meanwhile are taken from
the host's memory. A page that is in neither place is not sent, and the decode server computes it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np

from jaxserve.execution.runner import ModelRunner
from jaxserve.roles.page_listener import Contents, Export
from jaxserve.scheduling.block_manager import HASH_BYTES, BlockManager, hash_pages, root_hash
from jaxserve.scheduling.page_tiers import PageTiers, page_key
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.types import InvalidRequestError, QueueFullError, Request, SamplingParams

UNSENT_BYTES = 2**26  # most bytes of one export that wait to be sent
ALL_UNSENT_BYTES = 2**28  # of all exports
PATIENCE = 0.005  # seconds that an engine with nothing else to do waits for a connection
_PREFIX = "prefill/"  # of the requests' ids; those of API servers begin with a number


class AddsRequests(Protocol):
    scheduler: Scheduler

    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: str, index: int | None = None) -> None: ...


@dataclass(eq=False)
class _Running:
    """An export and its request. `at`: how many of the wanted pages were sent or given up."""

    export: Export
    request: Request
    hashes: list[bytes]  # that of the root, then of all blocks
    wanted: list[int]
    at: int = 0
    lost: int = 0


class PageExports:
    """The exports of one engine. One thread calls everything but `begin`."""

    def __init__(
        self, engine: AddsRequests, blocks: BlockManager, runner: ModelRunner, memory: Sequence[np.ndarray],
        woken: threading.Event, wake: Callable[[], None], unchanged: Callable[[], bool],
    ):  # fmt: skip
        """`memory`: see `PageCopies`. `wake`: called by `begin`, so that the engine's loop looks here. `unchanged`:
        whether the weights are those of the start."""
        assert blocks.tiers is not None
        self._engine = engine
        self._blocks = blocks
        self._runner = runner
        self._memory = memory
        self._tiers: PageTiers = blocks.tiers
        self._page_bytes = runner.layout.page_bytes
        self._most = runner.layout.copy_sizes[-1]
        self._woken = woken
        self._wake = wake
        self._inbox: queue.SimpleQueue[_Running] = queue.SimpleQueue()
        self._running: list[_Running] = []
        self._numbers = count()
        self._unchanged = unchanged
        self.sent = self.requests = self.lost = 0

    def begin(self, export: Export) -> None:
        """Takes a new export, on any thread. Raises InvalidRequestError for what no prompt here can have."""
        self._inbox.put(self._checked(export))
        self._wake()

    @property
    def active(self) -> bool:
        return bool(self._running) or not self._inbox.empty()

    def before_step(self, scheduler: Scheduler, *, busy: bool) -> None:
        """Adds requests, and reads their new pages. Waits a little if there is nothing else to do."""
        if not self.active:
            return
        if not busy and not scheduler.waiting and self._inbox.empty():
            self._woken.wait(PATIENCE)
        self._woken.clear()
        while not self._inbox.empty():
            self._add(self._inbox.get())
        unsent = sum(one.export.unsent for one in self._running)
        for one in self._running.copy():
            if one.export.cancelled:
                self._engine.abort(one.request.request_id)
                self._running.remove(one)
                continue
            finished = one.request.request_id not in scheduler  # before its last pages are looked for
            unsent += self._read(one, finished, (ALL_UNSENT_BYTES - unsent * self._page_bytes) // self._page_bytes)
            if one.at == len(one.wanted):
                one.export.end("pages are not there any more" if one.lost else None)
                self._running.remove(one)
                self._engine.abort(one.request.request_id)

    def _checked(self, export: Export) -> _Running:
        ask = export.ask
        size = self._blocks.page_size
        groups = self._blocks.num_groups
        tokens, wanted = (np.frombuffer(given, np.int32).tolist() for given in (ask.tokens, ask.wanted))
        full = (len(tokens) - 1) // size
        if not wanted or min(wanted) < 0 or max(wanted) >= full * groups or sorted(set(wanted)) != wanted:
            raise InvalidRequestError("it asks for pages that the prompt does not have")
        digest = ask.adapter_digest or None
        hashes = hash_pages(tokens, ask.cache_salt, size, digest)
        if hashes != ask.page_hashes:
            raise InvalidRequestError("the hashes of the prompt's pages are not those of its tokens")
        request = Request(
            request_id=f"{_PREFIX}{next(self._numbers)}",
            prompt_token_ids=tokens,
            params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            priority=ask.priority,
            cache_salt=ask.cache_salt,
            tenant=ask.tenant,
            page_hashes=hashes,
            adapter=ask.adapter,
            adapter_digest=ask.adapter_digest,
        )
        each = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        return _Running(export, request, [root_hash(ask.cache_salt, digest), *each], wanted)

    def _add(self, one: _Running) -> None:
        if one.export.cancelled:
            return
        if not self._unchanged():
            one.export.end("the prefill server's weights were replaced")
            return
        try:
            self._engine.add_request(one.request)
        except InvalidRequestError as error:
            one.export.refuse(error)
        except QueueFullError as error:
            one.export.end(str(error))
        else:
            self._running.append(one)
            self.requests += 1

    def _read(self, one: _Running, finished: bool, room: int) -> int:
        """Queues the next pages of an export that are there, in their order. Unless it has `finished`, stops at a page
        that is not there yet. Returns their number."""
        room = min(room, UNSENT_BYTES // self._page_bytes - one.export.unsent)
        read = 0
        room = max(room, 0 if one.export.unsent else 1)
        while room > read and one.at < len(one.wanted):
            places = list[int]()
            keys = list[bytes]()
            pages = list[int]()
            while len(pages) < min(self._most, room - read) and one.at < len(one.wanted):
                block, group = divmod(one.wanted[one.at], self._blocks.num_groups)
                page = self._blocks.page_of(one.hashes[block], one.hashes[block + 1], group)
                if page is None:
                    break
                places.append(one.at)
                keys.append(page_key(one.hashes[block + 1], group))
                pages.append(page)
                one.at += 1
            if pages:
                ((_, arrays),) = self._runner.read_pages(pages)
                for array in arrays:
                    array.copy_to_host_async()
                one.export.put(Contents(places, b"".join(keys), arrays))
                read += len(pages)
            elif (sent := self._from_host(one, finished)) is None:
                break
            else:
                read += sent
        self.sent += read
        return read

    def _from_host(self, one: _Running, finished: bool) -> int | None:
        """Queues the next page from the host's memory, or gives it up. Returns the number of pages that it queued; None
        if the page may still come."""
        block, group = divmod(one.wanted[one.at], self._blocks.num_groups)
        key = page_key(one.hashes[block + 1], group)
        place = self._tiers.place_of(key)
        if place is not None:
            one.export.put(Contents([one.at], key, [x[place][None].copy() for x in self._memory]))
        elif finished:
            one.lost += 1
            self.lost += 1
        else:
            return None
        one.at += 1
        return int(place is not None)

    def stats(self) -> dict[str, Any]:
        """The fields of EngineStats that concern pages for other servers."""
        return {
            "export_requests": self.requests,
            "export_pages": self.sent,
            "export_bytes": self.sent * self._page_bytes,
            "export_lost": self.lost,
        }
