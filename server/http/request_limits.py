"""Limits on what requests cost the API server: memory for bodies, threads for texts, completions per key.

The limits on a single request's fields are in `jaxserve.limits`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from jaxserve.limits import BODIES, MAX_WAITING_TEXT, SMALL_BODY
from jaxserve.server.http.counts import BODY_BYTES, Counts, completions_of
from jaxserve.server.http.errors import APIError, unavailable
from jaxserve.server.http.keys import ApiKey
from jaxserve.types import InvalidRequestError

T = TypeVar("T")


class Bodies:
    """Memory of the request bodies of all API servers, each from its first byte until its request reaches the
    engine."""

    def __init__(self, longest: int, counts: Counts | None = None):
        self.longest = longest
        self._counts = counts or Counts()

    def take(self, total: int, more: int) -> None:
        """Adds `more` bytes to a body, which then has `total`. Raises APIError (503) for a long body if all bodies
        together take too much; a body is always accepted if it is the only one."""
        self._counts.add(BODY_BYTES, more)
        if total > SMALL_BODY and total < self._counts.total(BODY_BYTES) > BODIES * self.longest:
            raise unavailable("too many long requests are in work; try again later", "too_many_bodies")

    def give(self, size: int) -> None:
        self._counts.add(BODY_BYTES, -size)


def too_long(longest: int) -> APIError:
    return APIError(413, f"the body is longer than {longest} bytes", code="body_too_long")


class Body:
    """The account of one request's body. `size`: bytes that have arrived."""

    def __init__(self, bodies: Bodies):
        self._bodies = bodies
        self.size = self._held = 0

    def grow(self, count: int) -> None:
        """Counts `count` more bytes that have arrived. Raises APIError (413 or 503) if there are too many."""
        self.size += count
        self.expand(count)
        if self.size > self._bodies.longest:
            raise too_long(self._bodies.longest)

    def expand(self, count: int) -> None:
        """Counts `count` more bytes of memory. Raises APIError (503) if all bodies together take too much."""
        self._held += count
        self._bodies.take(self._held, count)

    def release(self) -> None:
        """Stops counting the body, because its request has reached the engine or has ended."""
        self._bodies.give(self._held)
        self._held = 0


class Accounts:
    """Counts the completions that run under each key with a limit."""

    def __init__(self, most: int, counts: Counts | None = None):
        self._most = most  # completions of one request
        self._counts = counts or Counts()

    def check(self, key: ApiKey | None, prompts: int, n: int | None) -> int:
        """The number of completions of a request that asks for n of each prompt.

        Raises InvalidRequestError if no request under this key may have so many, and APIError (429) if too many are
        running now.
        """
        count = prompts * max(n or 1, 1)
        if count > self._most:
            raise InvalidRequestError(
                f"{prompts} prompts with n of {n or 1} ask for {count} completions; one request may ask for at most "
                f"{self._most}",
                "n" if prompts == 1 else "prompt",
            )
        if key is None or (most := key.max_concurrency) is None:
            return count
        if count > most:
            raise InvalidRequestError(f"{count} completions are more than the {most} that this key may have", "n")
        if (running := self._counts.total(completions_of(key))) + count > most:
            text = f"{running} completions of at most {most} are running under this key; wait for one to end"
            raise APIError(429, text, code="too_many_requests", headers={"Retry-After": "1"})
        return count

    @contextlib.contextmanager
    def hold(self, key: ApiKey | None, prompts: int, n: int) -> Iterator[None]:
        """Counts a request's completions while they run. Raises what `check` raises."""
        if key is None or key.max_concurrency is None:
            self.check(key, prompts, n)
            yield
            return
        name = completions_of(key)
        with self._counts.lock():
            count = self.check(key, prompts, n)
            self._counts.add(name, count)
        try:
            yield
        finally:
            self._counts.add(name, -count)


class TextThreads:
    """Threads for work on texts, such as tokenizing. Tenants (API keys) take turns, and none gets all threads.

    The waiting work of each tenant is bounded in bytes. Work whose caller is cancelled leaves the queue.
    """

    def __init__(self, threads: int = 4):
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._most = max(1, threads - 1)  # threads of one tenant
        self._free = threads
        self._running: Counter[str] = Counter()  # tenant -> threads in use
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}  # by tenant, the next in turn first
        self._bytes: Counter[str] = Counter()  # tenant -> bytes of its waiting work

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def run(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """The result of `work()`, run in a thread when it is the tenant's turn. `size`: bytes that it holds meanwhile.

        Raises APIError (503) if too many bytes of this tenant are waiting.
        """
        if not self._free or self._running[tenant] >= self._most:
            await self._turn(tenant, size)
        else:
            self._start(tenant)
        loop = asyncio.get_running_loop()
        try:
            done = self.executor.submit(work)
        except RuntimeError:  # the server has shut the executor down
            self._end(tenant)
            raise unavailable("the server is shutting down", "shutting_down") from None
        done.add_done_callback(partial(self._ended, tenant, loop))
        return await asyncio.wrap_future(done)

    async def _turn(self, tenant: str, size: int) -> None:
        if (here := self._bytes[tenant]) and here + size > MAX_WAITING_TEXT:
            raise unavailable("too much text waits to be tokenized; try again later", "too_much_text")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(tenant, deque())
        queue.append((turn, size))
        self._bytes[tenant] += size
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(tenant)
            else:
                queue.remove((turn, size))
                self._left(tenant, size)
            raise

    def _left(self, tenant: str, size: int) -> None:
        self._bytes[tenant] -= size
        if not self._waiting.get(tenant, True):
            del self._waiting[tenant], self._bytes[tenant]

    def _start(self, tenant: str) -> None:
        self._free -= 1
        self._running[tenant] += 1

    def _ended(self, tenant: str, loop: asyncio.AbstractEventLoop, _: Future[T]) -> None:
        """`_end`, called by the thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no work is waiting
            loop.call_soon_threadsafe(self._end, tenant)

    def _end(self, tenant: str) -> None:
        """Frees a tenant's thread, and gives it to the first waiting tenant that may use another thread."""
        self._free += 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        for other in list(self._waiting):
            if self._running[other] < self._most:
                queue = self._waiting.pop(other)
                turn, size = queue.popleft()
                if queue:
                    self._waiting[other] = queue  # to the end of the order
                self._bytes[other] -= size
                if not queue:
                    del self._bytes[other]
                self._start(other)
                turn.set_result(None)
                return
