"""Which rows of the devices' array of image features belong to which picture (host side).

A picture in a prompt needs rows from when its features are computed until all tokens in whose place they stand are in
the cache. Then the rows stay until others need them: the same picture in another request is not computed again. A step
may compute a sequence's tokens up to the first picture that has no rows yet.

The encoder runs before a step, so others wait for it. Where a step's tokens are limited because some sequences decode,
a patch counts as one of these tokens: pictures that exceed them wait for a later step, and what they take, prompts do
not get. One picture is encoded in any case, however large.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxserve.scheduling.image_prompts import SHOWN, EncoderJob, ImageInPrompt
from jaxserve.scheduling.row_choice import TokenBudget
from jaxserve.scheduling.running_table import NO_STOP, RunningTable
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step_plan import Rows


@dataclass(eq=False)
class _Held:
    """A picture that has rows, and how many sequences still read them."""

    rows: np.ndarray
    readers: int = 0


class ImageRows:
    """The rows of one engine, of which there are `count`."""

    def __init__(self, count: int, patches_per_step: int, horizon: int, whole: int = 0):
        """`patches_per_step`: most patches that the encoder computes before a step, if it computes several pictures.
        `horizon`: pictures among so many next tokens of a sequence get rows: most tokens of a step. `whole`: tokens of
        the largest picture, if its tokens are computed in one step, which then must have room for them; else 0."""
        self.count = count
        self.whole = whole
        self._left: int | None = None  # tokens of the next step that pictures and prompts share; None: any number
        self._horizon = horizon
        self._patches_per_step = patches_per_step
        self.num_encoded = 0  # pictures whose features were computed
        self.num_reused = 0  # pictures whose features were there already
        self.start_over()

    def start_over(self) -> None:
        """Forgets all pictures."""
        self._free = np.arange(self.count, dtype=np.int32)
        self._held: dict[bytes, _Held] = {}
        self._unread: OrderedDict[bytes, int] = OrderedDict()  # pictures without readers, the oldest first; their rows
        self._reading: dict[Sequence, list[ImageInPrompt]] = {}  # pictures of running sequences that have rows
        self._jobs: list[EncoderJob] = []
        self.patches = 0  # of the jobs
        self._prompts = 0  # tokens of the next step's prompts, if its tokens are limited

    def forget_unread(self) -> None:
        """Forgets the pictures that nobody reads any more."""
        while self._unread:
            self._evict()

    def can_begin(self, seq: Sequence, computed: int) -> bool:
        """Whether the next token of a sequence, of which `computed` are in the cache, can be computed in this step."""
        needed = next((one for one in seq.images if one.end > computed), None)
        return needed is None or needed.first > computed or self._finds_room(needed)

    def begin(self, running: RunningTable, seq: Sequence) -> None:
        """Takes note of a sequence that has been placed in the running table."""
        if seq.images:
            self._reading[seq] = []
            self._advance(running, seq)

    def end(self, seq: Sequence) -> None:
        """A sequence has lost its slot."""
        for one in self._reading.pop(seq, ()):
            self._let_go(one)

    def advance(self, running: RunningTable, budget: TokenBudget) -> None:
        """Gives rows to pictures among the next tokens of running sequences, and takes those whose tokens are in the
        cache. `budget`: of the step that comes next."""
        slot = running.batch.slot
        decodes = int(np.count_nonzero(running.total[slot] - running.computed[slot] == 1))
        self._left = budget.chunk - decodes if budget.chunk is not None and decodes else None
        for seq in list(self._reading):
            self._advance(running, seq)

    def note(self, rows: Rows) -> None:
        """Takes note of the rows of running sequences in the step, before new ones begin."""
        if self._left is not None:
            self._prompts = int(rows.count[rows.count > 1].sum())

    def drain(self) -> list[EncoderJob]:
        """Takes the pictures whose features must be computed before the step."""
        jobs = self._jobs
        self._jobs = []
        self.patches = 0
        self._prompts = 0
        return jobs

    def _advance(self, running: RunningTable, seq: Sequence) -> None:
        computed = int(running.computed[seq.slot])
        reading = self._reading[seq]
        for one in [one for one in reading if one.end <= computed]:
            reading.remove(one)
            self._let_go(one)
        running.image_stop[seq.slot] = NO_STOP
        for one in seq.images:
            if one.end <= computed or one in reading:
                continue
            if one.first >= computed + self._horizon or not self._finds_room(one):
                running.image_stop[seq.slot] = one.first
                return
            reading.append(one)
            running.show_image(seq.slot, one.places, SHOWN - self._rows_of(one))
        if not [one for one in seq.images if one.end > computed]:
            del self._reading[seq]

    def _finds_room(self, one: ImageInPrompt) -> bool:
        """Whether the picture has rows, or finds some and may be computed before this step."""
        if one.key in self._held:
            return True
        most = self._patches_per_step if self._left is None else min(self._patches_per_step, self._left)
        if (self._jobs or self._prompts) and self.patches + self._prompts + one.image.num_patches > most:
            return False
        return len(one.places) <= len(self._free) + sum(self._unread.values())

    def _rows_of(self, one: ImageInPrompt) -> np.ndarray:
        """The rows of a picture that has some or finds room; one more sequence reads them."""
        held = self._held.get(one.key)
        if held is None:
            while len(self._free) < len(one.places):
                self._evict()
            rows, self._free = np.split(self._free, [len(one.places)])
            held = self._held[one.key] = _Held(rows)
            self._jobs.append(EncoderJob(one.image, rows))
            self.patches += one.image.num_patches
            self.num_encoded += 1
        else:
            self._unread.pop(one.key, None)
            self.num_reused += 1
        held.readers += 1
        return held.rows

    def _let_go(self, one: ImageInPrompt) -> None:
        held = self._held[one.key]
        held.readers -= 1
        if not held.readers:
            self._unread[one.key] = len(held.rows)

    def _evict(self) -> None:
        """Takes the rows of the picture that nobody has read for the longest time."""
        key, _ = self._unread.popitem(last=False)
        self._free = np.concatenate([self._free, self._held.pop(key).rows])

    def stats(self) -> dict[str, int]:
        """The counters of `EngineStats` that concern pictures."""
        return {"images_encoded": self.num_encoded, "images_reused": self.num_reused}

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Asserts that each row has one owner, and that readers are running sequences."""
        owned = [self._free, *(held.rows for held in self._held.values())]
        assert sorted(np.concatenate(owned).tolist()) == list(range(self.count))
        assert set(self._reading) <= set(running)
        for key, held in self._held.items():
            assert held.readers == sum(one.key == key for some in self._reading.values() for one in some)
            assert (key in self._unread) == (held.readers == 0)
