"""Who is served next of those that wait: priority, then fairly between tenants, then by arrival."""

import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.scheduling.block_manager import BlockManager
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.waiting import QUANTUM, Waiting
from jaxserve.types import Request, SamplingParams


def sequence(arrival, tenant="", *, tokens=1, priority=0, max_tokens=1, n=1) -> Sequence:
    request = Request(
        request_id=f"{tenant}-{arrival}",
        prompt_token_ids=[1] * tokens,
        params=SamplingParams(max_tokens=max_tokens, n=n),
        priority=priority,
        tenant=tenant,
    )
    return Sequence(request, 0, 0, max_tokens, frozenset(), arrival)


def fill(queue: Waiting, *seqs: Sequence) -> None:
    for seq in seqs:
        queue.push(seq)


def drain(queue: Waiting) -> list[Sequence]:
    order = []
    while queue:
        first = queue.peek()
        assert queue.peek() is first
        order.append(queue.pop())
        assert order[-1] is first
    return order


def test_one_tenant_is_served_by_arrival():
    queue = Waiting()
    seqs = [sequence(arrival, tokens=1 + 700 * (arrival % 3)) for arrival in range(30)]
    fill(queue, *reversed(seqs))
    assert drain(queue) == seqs


def test_lower_priorities_come_first():
    queue = Waiting()
    fill(queue, sequence(0, priority=5), sequence(1, priority=-1), sequence(2, "b", priority=5), sequence(3))
    assert [seq.order[1] for seq in drain(queue)] == [1, 3, 0, 2]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1000), (400, 10), (5000, 50)])
def test_tenants_that_both_wait_are_served_alike(sizes):
    """However long their prompts are, and however many of them wait."""
    queue = Waiting()
    tenants = dict(zip("ab", sizes, strict=True))
    fill(queue, *(sequence(arrival, "a", tokens=sizes[0]) for arrival in range(6000)))
    fill(queue, *(sequence(10_000 + arrival, "b", tokens=sizes[1]) for arrival in range(6000)))
    spent = Counter()
    for _ in range(1000):
        seq = queue.pop()
        spent[seq.request.tenant] += tenants[seq.request.tenant] + 1
        assert abs(spent["a"] - spent["b"]) <= QUANTUM + 2 * max(sizes) + 2


def test_a_newcomer_waits_for_one_turn_of_the_others():
    queue = Waiting()
    fill(queue, *(sequence(arrival, "flood", tokens=100) for arrival in range(10_000)))
    for _ in range(77):
        queue.pop()
    queue.push(sequence(20_000, "late", tokens=3000))
    before = next(i for i in range(10_000) if queue.pop().request.tenant == "late")
    assert before * 101 <= QUANTUM + 101


def test_outputs_count_too():
    """Requests of one token that draw thousands cost what they drew, not what they brought."""
    queue = Waiting()
    spent = Counter()
    fill(queue, *(sequence(arrival, "long", max_tokens=5000) for arrival in range(2000)))
    fill(queue, *(sequence(10_000 + arrival, "short", max_tokens=100) for arrival in range(2000)))
    for _ in range(1000):
        seq = queue.pop()
        spent[seq.request.tenant] += seq.max_tokens
        queue.correct_charge(seq, seq.max_tokens)
    assert spent["long"] == pytest.approx(spent["short"], abs=2 * 5000 + QUANTUM)


def test_what_was_spent_while_nobody_else_waited_is_forgotten():
    queue = Waiting()
    for arrival in range(100):
        queue.push(sequence(arrival, "alone", tokens=5000))
        queue.correct_charge(queue.pop(), 5000)
    fill(queue, sequence(200, "alone", tokens=10), sequence(201, "other", tokens=10))
    assert [seq.request.tenant for seq in drain(queue)] == ["alone", "other"]


def test_debts_cannot_be_shed_by_leaving_the_queue():
    """A tenant that has one huge request waiting at a time gets no more than one that has many small ones."""
    queue = Waiting()
    spent = Counter()
    fill(queue, *(sequence(arrival, "small", tokens=50) for arrival in range(4000)))
    queue.push(sequence(10_000, "huge", tokens=5000))
    for i in range(2000):
        seq = queue.pop()
        spent[seq.request.tenant] += seq.prompt_len + 1
        if seq.request.tenant == "huge":
            queue.push(sequence(10_001 + i, "huge", tokens=5000))
    assert spent["huge"] <= spent["small"] + 5000 + QUANTUM


def test_those_that_had_a_place_come_before_other_tenants_newcomers():
    queue = Waiting()
    fill(queue, sequence(0, "b"), sequence(1, "a"))
    for arrival in (9, 7):
        queue.push(sequence(arrival, "c"), resumed=True)
    assert [seq.order[1] for seq in drain(queue)] == [7, 9, 0, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "resume", "pop", "remove"]),
            st.sampled_from("abc"),
            st.integers(0, 2),
            st.integers(1, 3000),
        ),
        max_size=60,
    )
)
def test_nothing_is_lost_and_nothing_stays(operations):
    queue = Waiting()
    here = []
    for arrival, (operation, tenant, priority, tokens) in enumerate(operations):
        if operation in ("push", "resume"):
            here.append(sequence(arrival, tenant, tokens=tokens, priority=priority, n=3))
            queue.push(here[-1], resumed=operation == "resume")
        elif here and operation == "pop":
            popped = queue.pop()
            assert popped.order[0] == min(seq.order[0] for seq in here)
            here.remove(popped)
        elif here:
            queue.remove(here.pop(tokens % len(here)))
        assert len(queue) == len(here)
        assert set(queue) == set(here)
        assert queue.num_tokens == sum(seq.prompt_len for seq in here)
        assert queue.num_completions == 3 * len(here)
    assert set(drain(queue)) == set(here)
    with pytest.raises(IndexError):
        queue.peek()


def test_aborted_requests_leave_nothing_behind():
    """Also not where the head of the queue is blocked for as long as it takes."""
    scheduler = Scheduler(BlockManager(8, 4, prefix_caching=False), max_num_seqs=1, max_num_batched_tokens=8,
                          max_model_len=28)  # fmt: skip
    scheduler.add(sequence(0, tokens=8, max_tokens=20))
    assert scheduler.schedule() is not None
    scheduler.add(sequence(1, tokens=8))
    kept = sequence(2, tokens=8)
    references = sys.getrefcount(kept)
    for arrival in range(3, 10_003):
        kept.order = (0, arrival, 0)
        scheduler.add(kept)
        assert len(scheduler.waiting) == 2
        scheduler.abort(kept.request_id)
    assert len(scheduler.waiting) == 1
    assert sys.getrefcount(kept) == references
    (level,) = scheduler.waiting._levels.values()
    assert list(level) == list(scheduler.waiting)
    scheduler.check_integrity()
