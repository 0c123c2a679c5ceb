"""Who is served next of those that wait for a place (host side).

First comes the priority: a lower value goes before a higher one. Within one priority, sequences that had a place and
lost it come before the newcomers of other tenants (API keys). Newcomers are shared fairly between tenants, by deficit
round robin: a tenant may spend `quantum` tokens a round. It may overdraw its turn by one sequence, and is passed over
until the rounds have paid for that. Within one tenant, all go by arrival.

A sequence costs the prompt's tokens and those that it is expected to draw when it begins; `settle` corrects that when
it ends. Nobody who is alone with the queue pays for what was spent then.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Iterator

from jaxserve.scheduling.sequence import NO_SLOT, Sequence, Status

QUANTUM = 512  # tokens
EXPECTED_OUTPUT = 256  # tokens; what an answer counts until its length is known

Order = tuple[int, int, int]


class Waiting:
    """The waiting sequences of one scheduler, each with its own `order`. An aborted one leaves at once."""

    def __init__(self, quantum: int = QUANTUM):
        self._quantum = quantum
        self._levels: dict[int, _Level] = {}  # by priority; none is empty
        self._priorities: list[int] = []  # of the levels, in order
        self._count = 0
        self.num_tokens = 0  # of the prompts
        self.num_completions = 0  # those included that begin with the one that waits

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no order that means anything."""
        for level in self._levels.values():
            for queue in level.queues():
                yield from queue

    def push(self, seq: Sequence, *, resumed: bool = False) -> None:
        """Adds a sequence; `resumed`: it was placed before, so it is neither charged nor queued behind newcomers."""
        if (level := self._levels.get(priority := seq.order[0])) is None:
            level = self._levels[priority] = _Level(self._quantum)
            bisect.insort(self._priorities, priority)
        level.push(seq, resumed)
        self._count += 1
        self.num_tokens += seq.prompt_len
        self.num_completions += _completions(seq)

    def peek(self) -> Sequence:
        """The one to serve next; the same until something is added or removed. Raises IndexError where nobody waits."""
        if not self._levels:
            raise IndexError("nobody waits")
        return self._levels[self._priorities[0]].peek()

    def pop(self) -> Sequence:
        """Removes the one that `peek` shows, and charges its tenant. Raises IndexError where nobody waits."""
        seq = self.peek()
        if seq not in self._levels[seq.order[0]].resumed:
            self.charge(seq)
        self.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence that waits. Raises KeyError for another."""
        level = self._levels[seq.order[0]]
        level.remove(seq)
        if not level.num_newcomers and not level.resumed:
            del self._levels[seq.order[0]]
            self._priorities.remove(seq.order[0])
        self._count -= 1
        self.num_tokens -= seq.prompt_len
        self.num_completions -= _completions(seq)

    def charge(self, seq: Sequence) -> None:
        """Counts what a sequence that begins is expected to cost against its tenant. A sibling shares the prompt."""
        self._spend(seq, _expected(seq) + (seq.prompt_len if seq.index == 0 else 0))

    def settle(self, seq: Sequence, outputs: int) -> None:
        """Corrects the charge of a sequence that ends, now that the number of its output tokens is known."""
        self._spend(seq, outputs - _expected(seq))

    def _spend(self, seq: Sequence, tokens: int) -> None:
        if (level := self._levels.get(seq.order[0])) and (tenant := level.tenants.get(seq.request.tenant)):
            tenant.deficit -= tokens

    def check_integrity(self) -> None:
        """Asserts that the counts are those of who waits, and that these hold no place."""
        seqs = list(self)
        assert len(seqs) == self._count
        assert sum(seq.prompt_len for seq in seqs) == self.num_tokens
        for seq in seqs:
            assert seq.status is Status.WAITING
            assert not seq.pages
            assert seq.slot == NO_SLOT


def _completions(seq: Sequence) -> int:
    """How many wait with it: its siblings begin once it has computed the prompt."""
    return seq.params.n if seq.index == 0 and seq.num_cached is None else 1


def _expected(seq: Sequence) -> int:
    return min(seq.max_tokens, EXPECTED_OUTPUT)


class _Queue:
    """Sequences by order. What is removed leaves at once; of its order, a little may stay in the heap for a while."""

    def __init__(self) -> None:
        self._seqs: dict[Order, Sequence] = {}
        self._heap: list[Order] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs.values())

    def __contains__(self, seq: Sequence) -> bool:
        return self._seqs.get(seq.order) is seq

    def push(self, seq: Sequence) -> None:
        self._seqs[seq.order] = seq
        heapq.heappush(self._heap, seq.order)

    def peek(self) -> Sequence:
        while self._heap[0] not in self._seqs:
            heapq.heappop(self._heap)
        return self._seqs[self._heap[0]]

    def remove(self, seq: Sequence) -> None:
        del self._seqs[seq.order]
        if len(self._heap) > 2 * len(self._seqs):  # so the heap is never more than twice of what waits
            self._heap = list(self._seqs)
            heapq.heapify(self._heap)


class _Tenant:
    """One tenant's newcomers, and the tokens that it may still spend in this round; below 0 it is in debt."""

    def __init__(self, name: str, deficit: int):
        self.name, self.deficit = name, deficit
        self.queue = _Queue()


class _Level:
    """Those of one priority. A tenant in debt stays in the ring until it is paid, though nothing of it waits."""

    def __init__(self, quantum: int):
        self._quantum = quantum
        self.resumed = _Queue()
        self.tenants: dict[str, _Tenant] = {}
        self._ring: deque[_Tenant] = deque()  # of the same; the first has the turn
        self.num_newcomers = 0

    def push(self, seq: Sequence, resumed: bool) -> None:
        if resumed:
            self.resumed.push(seq)
        else:
            self._join(seq.request.tenant).queue.push(seq)
            self.num_newcomers += 1

    def queues(self) -> Iterator[_Queue]:
        yield self.resumed
        for tenant in self._ring:
            yield tenant.queue

    def _join(self, name: str) -> _Tenant:
        """The tenant of this name, which takes its place at the end of the ring if it has none."""
        if (tenant := self.tenants.get(name)) is None:
            tenant = self.tenants[name] = _Tenant(name, self._quantum)
            self._ring.append(tenant)
        return tenant

    def remove(self, seq: Sequence) -> None:
        if seq in self.resumed:
            self.resumed.remove(seq)
            return
        tenant = self.tenants[seq.request.tenant]
        tenant.queue.remove(seq)
        self.num_newcomers -= 1
        if not tenant.queue and tenant.deficit >= 0:
            self._leave(tenant)

    def _leave(self, tenant: _Tenant) -> None:
        del self.tenants[tenant.name]
        self._ring.remove(tenant)

    def peek(self) -> Sequence:
        """The next of a level that is not empty."""
        if not self.num_newcomers:
            return self.resumed.peek()
        new = self._newcomer()
        if not self.resumed:
            return new
        old = self.resumed.peek()
        return new if new.order < old.order and new.request.tenant == old.request.tenant else old

    def _newcomer(self) -> Sequence:
        """The first newcomer of the tenant whose turn it is."""
        self._skip_rounds()
        while not ((tenant := self._ring[0]).queue and tenant.deficit > 0):
            tenant.deficit += self._quantum
            self._ring.rotate(-1)
            if not tenant.queue and tenant.deficit >= 0:
                self._leave(tenant)
        return tenant.queue.peek()

    def _skip_rounds(self) -> None:
        """Pays everybody at once for the rounds in which nobody would have a turn."""
        best = max(tenant.deficit for tenant in self._ring if tenant.queue)
        if best <= 0:
            for tenant in self._ring:
                tenant.deficit += -best // self._quantum * self._quantum
