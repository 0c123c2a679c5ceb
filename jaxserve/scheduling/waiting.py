"""The queue of sequences that wait for a slot, and the order in which they are served (host side).

Lower priorities are served first. Within one priority, sequences that had a slot and lost it are served before the new
requests of other tenants (API keys). New requests of different tenants share by deficit round robin: a tenant may spend
`quantum` tokens a round. It may overdraw its turn by one sequence, and is then skipped until later rounds have paid the
debt. Within one tenant, sequences are served by arrival.

A new request for which there are too few KV pages lets those behind it begin in the same step (`pass_by`), and has its
turn again in the next step. Once those that passed it have been charged as much as it will be itself, nothing passes it
until it has begun. So its start is delayed by about as much work as it is, and by no more however many requests come.

Sequences whose adapter has no place on the devices are parked meanwhile (`adapter_pool.py`), and those whose pages are
being loaded are set aside (`page_loads.py`). Those whose prompt another server computes are held. They count as
waiting, and are served once they are released.

A sequence is charged its prompt tokens and its expected output tokens when it is placed; `correct_charge` corrects this
when it ends. A tenant that has the queue to itself keeps no debt."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from jaxserve.limits import BACKGROUND
from jaxserve.scheduling.adapter_pool import AdapterPool
from jaxserve.scheduling.sequence import NO_SLOT, Sequence, Status

QUANTUM = 512  # tokens
EXPECTED_OUTPUT = 256  # tokens charged for an output until its length is known
MOST_PASSED = 8  # sequences that others may pass in a step: each step looks again for pages for all of them

Queue = list[tuple[tuple[int, int, int], Sequence]]  # by `Sequence.order`, which no two sequences share


class Fetches(Protocol):
    """Prompts that other servers compute, see `jaxserve.engine.page_fetches`."""

    def begin(self, seq: Sequence) -> bool:
        """Whether another server is asked for a new request's pages, which is held until then."""


class Waiting:
    """The waiting sequences of one scheduler, each with its own `order`."""

    def __init__(self, quantum: int = QUANTUM, adapters: AdapterPool | None = None):
        self._quantum = quantum
        self.adapters = adapters
        self._levels: dict[int, _Level] = {}  # priority -> level; no level is empty
        self._priorities: list[int] = []  # the levels' priorities, ascending
        self._aside: dict[Sequence, None] = {}
        self._held: dict[Sequence, None] = {}
        self._passed: list[Sequence] = []  # those that have let others pass in this step
        self.holds_background = False  # background sequences may not be served
        self._count = 0
        self.num_tokens = 0  # tokens of the waiting prompts
        self.num_completions = 0  # completions of the waiting requests, with siblings that fork later

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        """Whether a sequence waits that may be served: one that is neither parked nor set aside nor held back."""
        return bool(self._levels) and not (self.holds_background and self._priorities[0] == BACKGROUND)

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences, in arbitrary order."""
        if self.adapters is not None:
            yield from self.adapters.parked
        yield from self._aside
        yield from self._held
        yield from self._passed
        for level in self._levels.values():
            yield from level

    def push(self, seq: Sequence, *, resumed: bool = False, held: bool = False) -> None:
        """Adds a sequence. If it was placed before (`resumed`), it is not charged, and not queued behind new requests.
        If it is `held`, because another server computes its prompt, it is not served until `let_in`."""
        self._count += 1
        self.num_tokens += seq.prompt_len
        self.num_completions += _completions(seq)
        seq.is_resumed = resumed
        seq.was_set_aside = False
        if held:
            self._held[seq] = None
        elif self.adapters is None or self.adapters.admit(seq):
            self._enqueue(seq)

    def let_in(self, seq: Sequence) -> None:
        """Queues a sequence that is held. Has no effect on any other."""
        if seq in self._held:
            del self._held[seq]
            if self.adapters is None or self.adapters.admit(seq):
                self._enqueue(seq)

    def release(self, seqs: Iterable[Sequence]) -> None:
        """Queues sequences that were parked or set aside and may begin now."""
        for seq in seqs:
            self._aside.pop(seq, None)
            self._enqueue(seq)

    def set_aside(self, seq: Sequence) -> None:
        """Takes a sequence that may be served out of the order until it is released."""
        self._aside[seq] = None
        self._dequeue(seq)

    def _enqueue(self, seq: Sequence) -> None:
        if (level := self._levels.get(priority := seq.order[0])) is None:
            level = self._levels[priority] = _Level(self._quantum)
            insort(self._priorities, priority)
        level.push(seq)

    @property
    def has_foreground(self) -> bool:
        """Whether a sequence waits that may be served, and for which background sequences step aside."""
        return bool(self._levels) and self._priorities[0] < BACKGROUND

    def peek(self) -> Sequence:
        """The next sequence. It stays the same until one is added or removed. Raises IndexError for an empty queue."""
        if not self._levels:
            raise IndexError("no sequence waits")
        return self._levels[self._priorities[0]].peek()

    def pop(self) -> Sequence:
        """Removes the next sequence and charges its tenant. Raises IndexError when the queue is empty."""
        seq = self.peek()
        if not seq.is_resumed:
            self.charge(seq, expected_tokens(seq))
        self.remove(seq)
        for passed in self._passed:
            passed.tokens_passing += expected_tokens(seq)
        if any(passed.tokens_passing >= expected_tokens(passed) for passed in self._passed):
            self.rejoin()
        return seq

    def pass_by(self) -> bool:
        """Lets others pass the next sequence until `rejoin`, if it is a new request and not too many have passed it.
        One that was preempted is not passed: new requests would take the pages that running sequences need to grow."""
        seq = self.peek()
        passable = (
            seq.num_cached is None and seq.tokens_passing < expected_tokens(seq) and len(self._passed) < MOST_PASSED
        )
        if passable:
            self._dequeue(seq)
            self._passed.append(seq)
        return passable

    def rejoin(self) -> None:
        """Queues the sequences that others have passed, in their places."""
        for seq in self._passed:
            self._enqueue(seq)
        self._passed = []

    def remove(self, seq: Sequence) -> None:
        """Removes a waiting sequence. Raises KeyError for any other."""
        if seq in self._aside:
            del self._aside[seq]
        elif seq in self._held:
            del self._held[seq]
        elif self.adapters is None or not self.adapters.unpark(seq):
            self._dequeue(seq)
        self._count -= 1
        self.num_tokens -= seq.prompt_len
        self.num_completions -= _completions(seq)

    def _dequeue(self, seq: Sequence) -> None:
        level = self._levels[seq.order[0]]
        level.remove(seq)
        if not level.num_new_seqs and not level.resumed:
            del self._levels[seq.order[0]]
            self._priorities.remove(seq.order[0])

    def charge(self, seq: Sequence, tokens: int) -> None:
        """Charges the sequence's tenant; a negative number of tokens is given back."""
        if (level := self._levels.get(seq.order[0])) and (tenant := level.tenants.get(seq.request.tenant)):
            tenant.deficit -= tokens

    def correct_charge(self, seq: Sequence, outputs: int) -> None:
        """Corrects the charge of a sequence that ends with this number of output tokens."""
        self.charge(seq, outputs - _expected(seq))

    def check_integrity(self) -> None:
        """Asserts that the counts are right, and that waiting sequences hold no slots and no pages."""
        seqs = list(self)
        assert len(seqs) == self._count
        assert not self._passed
        assert sum(seq.prompt_len for seq in seqs) == self.num_tokens
        for seq in seqs:
            assert seq.status is Status.WAITING
            assert not seq.pages
            assert seq.slot == NO_SLOT


def _completions(seq: Sequence) -> int:
    """Completions that a waiting sequence stands for: it forks its siblings once it has computed the prompt."""
    return seq.params.n if seq.index == 0 and seq.num_cached is None else 1


def expected_tokens(seq: Sequence) -> int:
    """Tokens that a sequence is charged when it begins. A sibling is not charged for the prompt."""
    return _expected(seq) + (seq.prompt_len if seq.index == 0 else 0)


def _expected(seq: Sequence) -> int:
    return min(seq.max_tokens, EXPECTED_OUTPUT)


@dataclass(eq=False)
class _Tenant:
    """One tenant's new requests, and the tokens that it may still spend in this round (below 0: its debt)."""

    name: str
    deficit: int
    queue: Queue = field(default_factory=list)


class _Level:
    """The sequences of one priority. A tenant in debt stays in the ring until the debt is paid, even if it is empty."""

    def __init__(self, quantum: int):
        self._quantum = quantum
        self.resumed: Queue = []
        self.tenants: dict[str, _Tenant] = {}
        self._ring: deque[_Tenant] = deque()  # the same tenants; the first has the turn
        self.num_new_seqs = 0

    def __iter__(self) -> Iterator[Sequence]:
        for queue in (self.resumed, *(tenant.queue for tenant in self._ring)):
            yield from (seq for _, seq in queue)

    def push(self, seq: Sequence) -> None:
        """Queues a sequence. A tenant that is new joins the end of the ring."""
        if seq.is_resumed:
            insort(self.resumed, (seq.order, seq))
            return
        name = seq.request.tenant
        if (tenant := self.tenants.get(name)) is None:
            tenant = self.tenants[name] = _Tenant(name, self._quantum)
            self._ring.append(tenant)
        insort(tenant.queue, (seq.order, seq))
        self.num_new_seqs += 1

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence. Raises KeyError if it is not queued here."""
        tenant = None if seq.is_resumed else self.tenants[seq.request.tenant]
        queue = self.resumed if tenant is None else tenant.queue
        place = bisect_left(queue, (seq.order,))  # type: ignore[type-var]
        if place == len(queue) or queue[place][1] is not seq:
            raise KeyError(seq.request_id)
        del queue[place]
        if tenant is None:
            return
        self.num_new_seqs -= 1
        if not tenant.queue and tenant.deficit >= 0:
            self._leave(tenant)

    def _leave(self, tenant: _Tenant) -> None:
        del self.tenants[tenant.name]
        self._ring.remove(tenant)

    def peek(self) -> Sequence:
        """The next sequence; the level must not be empty."""
        if not self.num_new_seqs:
            return self.resumed[0][1]
        new = self._next_new()
        if not self.resumed:
            return new
        old = self.resumed[0][1]
        return new if new.order < old.order and new.request.tenant == old.request.tenant else old

    def _next_new(self) -> Sequence:
        """The first new request of the tenant that has the turn. All tenants are paid at once for the rounds in which
        all waiting ones would still be in debt."""
        best = max(tenant.deficit for tenant in self._ring if tenant.queue)
        if best <= 0:
            for tenant in self._ring:
                tenant.deficit += -best // self._quantum * self._quantum
        while not ((tenant := self._ring[0]).queue and tenant.deficit > 0):
            tenant.deficit += self._quantum
            self._ring.rotate(-1)
            if not tenant.queue and tenant.deficit >= 0:
                self._leave(tenant)
        return tenant.queue[0][1]
