"""KV pages below the devices' memory, with the simulated device (`simulation`, `fake_tiers`): no sequence ever sees a
wrong page, also when contents are late, lost or damaged."""

import contextlib
from collections import Counter

import numpy as np
import pytest
from null_device import VOCAB
from simulation import TOKENS_PER_CALL, Simulation

from jaxserve.scheduling import block_manager
from jaxserve.scheduling.block_manager import Chunk
from jaxserve.scheduling.page_loads import PageLoads
from jaxserve.scheduling.page_tiers import PageTiers
from jaxserve.types import InvalidRequestError

pytestmark = pytest.mark.compiles

FAMILIES = [[family, *np.random.default_rng(family).integers(0, VOCAB, 39).tolist()] for family in range(6)]
WINDOWS = [(None,), (6,), (None, 6, 6), (None, Chunk(8), Chunk(8))]


def play(seed: int, windows=(None,), *, overlapped=False, tiers=60, files=False) -> Counter[str]:
    """Requests of many kinds with common prefixes in few pages, to the end. Returns what happened."""
    rng = np.random.default_rng(seed)
    pages = {(None,): 13, (6,): 11}.get(windows, 32)
    options = {"windows": windows, "tiers": tiers, "files": files}
    simulation = Simulation(num_pages=pages, page_size=4, max_num_seqs=5, budget=int(rng.integers(5, 20)), **options)
    for i in range(50):
        family = FAMILIES[rng.integers(6)]
        tail = rng.integers(0, VOCAB, rng.integers(1, 4)).tolist()
        with contextlib.suppress(InvalidRequestError):  # beams that have no room
            simulation.add(
                family[: rng.integers(24)] + tail,
                n=int(rng.integers(1, 4)),
                max_tokens=int(rng.integers(1, 20)),
                priority=int(rng.integers(-1, 2)),
                salt=["a", None][rng.integers(2)],
                **{str(kind): True for kind in rng.choice(["masked", "beams", "scored", ""], 1) if kind},
            )
        for tokens_per_call in rng.choice(TOKENS_PER_CALL, rng.integers(0, 12)).tolist():
            if rng.random() < 0.2:
                simulation.propose(int(rng.integers(1, 5)), int(rng.integers(0, 5)))
            simulation.overlapped_step(tokens_per_call) if overlapped else simulation.step(tokens_per_call)
        if i == 25:
            simulation.reset_prefix_cache()
    simulation.drain(overlapped=overlapped)
    return simulation.events


def play_all(windows, **options) -> Counter[str]:
    sizes = [(60, False), (8, False), (60, True), (8, True)]
    return sum(
        (play(seed, windows, tiers=sizes[seed][0], files=sizes[seed][1], **options) for seed in range(4)), Counter()
    )


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("overlapped", [False, True])
def test_under_pressure(overlapped, windows):
    events = play_all(windows, overlapped=overlapped)
    least = {"loaded": 50, "found below": 150, "evicted below": 50, "loads while others run": 12, "preemptions": 12}
    least["failed loads"] = 2
    assert {name: n for name, n in least.items() if events[name] < n} == {}, events


def late(patch):
    """Evicted pages are copied one step later, when others may have written to them."""
    take = PageTiers.take_leaving
    last = []

    def take_last(self, most):
        last.append(take(self, most))
        return last[-2] if len(last) > 1 else []

    patch.setattr(PageTiers, "take_leaving", take_last)


def unpinned(patch):
    """Places are used for other contents while a thread reads them."""
    for name in ("pin", "unpin"):
        patch.setattr(PageTiers, name, lambda self, place: None)


def blind(patch):
    """Pages whose contents could not be had count as loaded."""
    finish = PageLoads.finish
    patch.setattr(PageLoads, "finish", lambda self, load, failed, waiting: finish(self, load, (), waiting))


def mixed_up(patch):
    """Contents are found under other keys, too."""
    find = PageTiers.place_of
    patch.setattr(PageTiers, "place_of", lambda self, key: find(self, next(iter(self._held), key)))
    patch.setattr(PageTiers, "__contains__", lambda self, key: self.num_held > 0)


def unguarded(patch):
    """The prefix before loaded pages may be evicted, and its pages given to others."""
    begin = PageLoads.begin

    def begin_loosely(self, seq):
        with patch.context() as inner:
            inner.setattr(block_manager.BlockManager, "share", lambda self, pages, owners=1: None)
            return begin(self, seq)

    patch.setattr(PageLoads, "begin", begin_loosely)


@pytest.mark.parametrize("mistake", [late, unpinned, blind, mixed_up, unguarded])
def test_mistakes_are_found(mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        play_all((None,))
