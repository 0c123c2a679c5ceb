"""Pages that prefill servers compute for this decode server: which prompts, whom to ask, and what to do if it fails.

A new request with a long prompt that is not cached here is held, and a prefill server is asked for its pages. They come
to the host's memory as they are computed, and the new request then finds them like pages that were evicted here. If
they do not come, for whatever reason, it is let in all the same, uses those that have come, and the rest is computed
here.

The engine's thread calls everything here. It waits for no connection.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.prefix_routing import PrefixTable
from jaxserve.roles import messages
from jaxserve.roles.prefill_server import PrefillServer, Transfer
from jaxserve.scheduling.block_manager import BlockManager
from jaxserve.scheduling.page_tiers import PageTiers, page_key
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence, Status

PATIENCE = 0.005  # seconds that an engine with nothing else to do waits for pages
SHARE = 2  # pages that are asked for take at most 1 / SHARE of the host's memory for pages, until their requests begin
SLACK = 4  # requests by which a prefill server may have more than its share, for the sake of what it has cached


@dataclass(eq=False)
class _Fetch:
    """A new request's pages. `wanted` and `keys`: as in `Transfer`. `server`: whom they are asked of."""

    seq: Sequence
    wanted: np.ndarray
    keys: list[bytes]
    deadline: float
    server: PrefillServer | None = None
    transfer: Transfer | None = None
    let_in: bool = False


class PageFetches:
    """The fetches of one engine."""

    def __init__(
        self, servers: Items[PrefillServer], memory: Items[np.ndarray], page_bytes: int, least: int, seconds: float,
        blocks: BlockManager, woken: threading.Event, unchanged: Callable[[], bool],
    ):  # fmt: skip
        """`memory`: see `PageCopies`. `least`: fewer tokens are computed here. `seconds`: most that a request waits.
        `woken`: set when a transfer has made progress. `unchanged`: whether the weights are those that servers have."""
        assert blocks.tiers is not None
        self._servers = servers
        self._memory = memory
        self._page_bytes = page_bytes
        self._least = least
        self._seconds = seconds
        self._blocks = blocks
        self._woken = woken
        self._tiers: PageTiers = blocks.tiers
        self._table = PrefixTable(slack=SLACK)
        self._most = self._tiers.num_places // SHARE
        self._queue: deque[_Fetch] = deque()  # no server was asked yet, as too much is on its way
        self._asked: list[_Fetch] = []  # their transfers are not over
        self._here: list[_Fetch] = []  # their pages are here, and their requests have not begun
        self._unchanged = unchanged
        self.requests = self.failed = self.fallbacks = self.received = 0
        self.seconds = 0.0

    @property
    def active(self) -> bool:
        return bool(self._queue or self._asked)

    def begin(self, seq: Sequence) -> bool:
        """See `jaxserve.scheduling.waiting.Fetches`."""
        if len(seq.prompt) < self._least or seq.scores_prompt or seq.params.use_beam_search:
            return False
        if not (self._tiers.may_load and self._unchanged()):
            return False
        wanted, keys, tokens = self._missing(seq)
        if tokens < self._least or not keys:
            return False
        if len(keys) > self._most or not any(server.up for server in self._servers):
            self.fallbacks += 1
            return False
        self._queue.append(_Fetch(seq, wanted, keys, time.monotonic() + self._seconds))
        self._ask()
        return True

    def _missing(self, seq: Sequence) -> tuple[np.ndarray, list[bytes], int]:
        """The pages to ask for (see `messages.Ask.wanted`), their keys, and the tokens that need not be computed."""
        blocks = self._blocks
        size = self._blocks.page_size
        full = (len(seq.prompt) - 1) // size
        hashes = list(seq.page_hashes(seq.prompt, full, size))
        cached = len(blocks.match_below(seq.root_hash, hashes)) // blocks.num_groups
        firsts = blocks.first_blocks(full)
        wanted = []
        keys = []
        for block in range(min(cached, *firsts), full):
            parent = hashes[block - 1] if block else seq.root_hash
            for group, first in enumerate(firsts):
                key = page_key(hashes[block], group)
                if block >= first and key not in self._tiers and not blocks.page_of(parent, hashes[block], group):
                    wanted.append(block * blocks.num_groups + group)
                    keys.append(key)
        return np.asarray(wanted, np.int32), keys, (full - cached) * size

    # Before a step

    def before_step(self, scheduler: Scheduler, *, busy: bool) -> None:
        """Takes what has arrived, and lets new requests in. Waits a little if there is nothing else to do."""
        if not self.active:
            return
        if not busy and not scheduler.waiting:
            self._woken.wait(PATIENCE)
        self._woken.clear()
        now = time.monotonic()
        for fetch in self._asked.copy():
            assert fetch.transfer is not None
            over = fetch.transfer.over  # before its last pages are taken
            for place in fetch.transfer.take_arrived():
                self._tiers.arrived(place)
            if over:
                self._end(fetch)
            elif now > fetch.deadline or fetch.seq.status is Status.FINISHED:
                fetch.transfer.cancel()
            if over or now > fetch.deadline:
                self._let_in(fetch, scheduler)
        for fetch in [fetch for fetch in self._queue if now > fetch.deadline]:
            self._queue.remove(fetch)
            self.fallbacks += 1
            self._let_in(fetch, scheduler)
        self._here = [fetch for fetch in self._here if fetch.seq.status is Status.WAITING]
        for fetch in self._ask():
            self._let_in(fetch, scheduler)

    def _let_in(self, fetch: _Fetch, scheduler: Scheduler) -> None:
        if not fetch.let_in and fetch.seq.status is Status.WAITING:
            scheduler.waiting.let_in(fetch.seq)
        fetch.let_in = True

    def _end(self, fetch: _Fetch) -> None:
        """A transfer is over. Counts it, and gives up the places of pages that have not come."""
        transfer = fetch.transfer
        server = fetch.server
        assert transfer is not None
        assert server is not None
        self._asked.remove(fetch)
        for place in transfer.left():
            self._tiers.arrived(place, intact=False)
        server.num_transfers -= 1
        self.received += transfer.received
        self.seconds += time.monotonic() - transfer.began
        if fetch.seq.status is Status.FINISHED:
            return
        complete = transfer.received == len(fetch.keys)
        self.failed += not complete
        self.fallbacks += not complete
        if fetch.seq.status is Status.WAITING:
            self._here.append(fetch)

    def _ask(self) -> list[_Fetch]:
        """Asks for the pages of the first fetches in the queue, as far as there is room. Returns those that nobody can
        be asked for."""
        lost = []
        while self._queue:
            fetch = self._queue[0]
            taken = sum(len(one.keys) for one in (*self._asked, *self._here))
            loads = {one.address: max(one.num_transfers, one.load) for one in self._servers if one.up}
            if fetch.seq.status is Status.FINISHED:
                self._queue.popleft()
            elif not loads:
                lost.append(self._queue.popleft())
                self.fallbacks += 1
            elif taken + len(fetch.keys) > self._most or (places := self._places(fetch.keys)) is None:
                break
            else:
                self._submit(self._queue.popleft(), places, loads)
        return lost

    def _places(self, keys: list[bytes]) -> list[int] | None:
        """Places for these keys; None if there are not enough."""
        places: list[int] = []
        for key in keys:
            if (place := self._tiers.expect(key)) is None:
                for one in places:
                    self._tiers.arrived(one, intact=False)
                return None
            places.append(place)
        return places

    def _submit(self, fetch: _Fetch, places: list[int], loads: dict[str, int]) -> None:
        seq = fetch.seq
        size = self._blocks.page_size
        full = (len(seq.prompt) - 1) // size
        hashes = list(seq.page_hashes(seq.prompt, full, size))
        address = self._table.choose(hashes[:512], loads)
        self._table.note(hashes[:512], address)
        server = next(one for one in self._servers if one.address == address)
        adapter: dict[str, Any] = {}
        if seq.adapter is not None:
            adapter = {"adapter": seq.adapter.name, "adapter_digest": seq.adapter.digest}
        ask = messages.Ask(
            tokens=seq.prompt[: full * size + 1].tobytes(),
            wanted=fetch.wanted.tobytes(),
            page_hashes=b"".join(hashes),
            cache_salt=seq.request.cache_salt,
            tenant=seq.request.tenant,
            priority=seq.request.priority,
            **adapter,
        )
        seconds = max(fetch.deadline - time.monotonic(), 0.0)
        fetch.transfer = Transfer(ask, fetch.keys, places, self._store, self._page_bytes, seconds)
        fetch.server = server
        self.requests += 1
        server.num_transfers += 1
        self._asked.append(fetch)
        server.submit(fetch.transfer)

    def _store(self, place: int, data: memoryview) -> None:
        """Puts a page into its place, which belongs to the transfer that calls this in its thread."""
        at = 0
        for memory in self._memory:
            shape = memory.shape[1:]
            size = math.prod(shape) * memory.dtype.itemsize
            memory[place] = np.frombuffer(data[at : at + size], memory.dtype).reshape(shape)
            at += size

    def stats(self) -> dict[str, Any]:
        """The fields of EngineStats that concern pages of other servers."""
        return {
            "fetch_requests": self.requests,
            "fetch_failed": self.failed,
            "fetch_fallbacks": self.fallbacks,
            "fetch_pages": self.received,
            "fetch_bytes": self.received * self._page_bytes,
            "fetch_seconds": self.seconds,
            "prefill_servers_up": sum(server.up for server in self._servers),
        }
