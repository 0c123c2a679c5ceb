"""What requests cost the front, and what it does about it: bodies in memory, texts in threads, completions under a key.

The caps on a single request stand in `jaxserve.limits`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jaxserve.limits import BODIES, MAX_WAITING_TEXT, SMALL_BODY
from jaxserve.server.http.errors import APIError, unavailable
from jaxserve.server.http.keys import ApiKey
from jaxserve.types import InvalidRequestError

T = TypeVar("T")


class Bodies:
    """The bodies of one front's requests, from their first byte until what they ask for is submitted."""

    def __init__(self, longest: int):
        self.longest = longest
        self._held = 0

    def open(self) -> Body:
        return Body(self)

    def take(self, total: int, more: int) -> None:
        """Adds `more` bytes to a body of then `total`. Raises APIError (503) for a long one while others take too much;
        one that is alone is always taken."""
        self._held += more
        if total > SMALL_BODY and total < self._held > BODIES * self.longest:
            raise unavailable("too many long requests are in work; try again later", "too_many_bodies")

    def give(self, size: int) -> None:
        self._held -= size


def too_long(longest: int) -> APIError:
    return APIError(413, f"the body is longer than {longest} bytes", code="body_too_long")


class Body:
    """One request's body, of which `size` bytes have come."""

    def __init__(self, bodies: Bodies):
        self._bodies = bodies
        self.size = self._held = 0

    def grow(self, count: int) -> None:
        """More bytes have come. Raises APIError, 413 or 503, where they are too many."""
        self.size += count
        self.expand(count)
        if self.size > self._bodies.longest:
            raise too_long(self._bodies.longest)

    def expand(self, count: int) -> None:
        """It takes more bytes of memory than before. Raises APIError (503) where that is too much beside others."""
        self._held += count
        self._bodies.take(self._held, count)

    def release(self) -> None:
        """What it asked for is on its way: it counts no longer."""
        self._bodies.give(self._held)
        self._held = 0


class Accounts:
    """The completions that run under each key."""

    def __init__(self, most: int):
        self._most = most  # of one request
        self._running: Counter[ApiKey] = Counter()

    def check(self, key: ApiKey | None, prompts: int, n: int | None) -> int:
        """The completions of a request that asks for n of each prompt.

        Raises InvalidRequestError for more than a request may have, and APIError (429) while too many run under its
        key.
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
        if self._running[key] + count > most:
            text = f"{self._running[key]} completions of at most {most} are running under this key; wait for one to end"
            raise APIError(429, text, code="too_many_requests", headers={"Retry-After": "1"})
        return count

    @contextlib.contextmanager
    def hold(self, key: ApiKey | None, prompts: int, n: int) -> Iterator[None]:
        """Counts a request's completions while they run. Raises what `check` raises."""
        count = self.check(key, prompts, n)
        if key is None:
            yield
            return
        self._running[key] += count
        try:
            yield
        finally:
            self._running[key] -= count
            if not self._running[key]:
                del self._running[key]


class TextThreads:
    """Threads for work on texts, such as tokenizing. Keys take turns, none has all threads, and what waits is bounded.

    Work that waits leaves when its caller is cancelled.
    """

    def __init__(self, threads: int = 4):
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._most = max(1, threads - 1)  # of one key
        self._free = threads
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}  # by key; the first has the turn
        self._bytes: Counter[str] = Counter()  # of these

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def run(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """`work()` in a thread, once it is the tenant's turn; `size` is what it has to hold meanwhile, in bytes.

        Raises APIError (503) where too much waits for this tenant already.
        """
        if not self._free or self._running[tenant] >= self._most:
            await self._turn(tenant, size)
        else:
            self._start(tenant)
        loop = asyncio.get_running_loop()
        try:
            done = self.executor.submit(work)
        except RuntimeError:  # the server has stopped meanwhile
            self._end(tenant)
            raise unavailable("the server is shutting down", "shutting_down") from None
        done.add_done_callback(lambda _: _tell(loop, self._end, tenant))
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

    def _end(self, tenant: str) -> None:
        """A thread is free: it goes to the first key in turn that may have it."""
        self._free += 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        for other in list(self._waiting):
            if self._running[other] < self._most:
                queue = self._waiting.pop(other)
                turn, size = queue.popleft()
                if queue:
                    self._waiting[other] = queue  # behind all others
                self._bytes[other] -= size
                if not queue:
                    del self._bytes[other]
                self._start(other)
                turn.set_result(None)
                return


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[[str], None], tenant: str) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
        loop.call_soon_threadsafe(function, tenant)
