"""A device that keeps, in every place of every page, what was written there.

It obeys the packed buffers of `jaxserve.execution.step_buffer` alone, as the compiled step does. It "computes" a token
as a fingerprint of the whole prefix up to it, chained through the pages, and compares all that a row can see with what
the row's own sequence should have written. Wrong sharing, a missing copy, a page reused too early, a stale block table
or a wrong prefix hit all show at once.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from jaxserve.adapters.registry import ServedAdapter
from jaxserve.execution.cost import StepCost
from jaxserve.execution.sampling import SCORE_WORDS
from jaxserve.execution.step_buffer import StepBatch, split
from jaxserve.execution.step_shape import StepShape
from jaxserve.limits import MAX_LOGPROBS
from jaxserve.scheduling.block_manager import BlockManager, Chunk
from jaxserve.scheduling.image_prompts import SHOWN, tokens_of
from jaxserve.scheduling.running_table import RunningTable
from jaxserve.scheduling.sequence import Sequence, child_seed
from jaxserve.scheduling.step_plan import Rows, StepPlan

VOCAB = 6
PIECES = 3  # calls in which an adapter is uploaded


def fingerprint(state: int, token: int) -> int:
    return hash((state, token))


def root_state(salt: str | None, adapter: ServedAdapter | None = None) -> int:
    return hash(tuple(((salt or "") + (adapter.digest if adapter else "")).encode()))


def next_token(state: int, seed: int, allowed: Callable[[int], bool] = lambda token: True) -> int:
    """The first that is allowed of the tokens that a state and a seed bring forth."""
    return next(token for i in count(1) if allowed(token := hash((state, seed, i)) % VOCAB))


def pack_scores(state: int) -> np.ndarray:
    """Log-probabilities of what may follow, as `Sampled.scores` packs them; no two are alike."""
    row = np.full(SCORE_WORDS, -1, np.int32)
    tokens = sorted(range(VOCAB), key=lambda token: hash((state, token, 2)))
    row[2 : 2 + VOCAB] = tokens
    values = [-(1 + i + (hash((state, token, 2)) % 99_991) / 1e5) / 4 for i, token in enumerate(tokens)]
    row[2 + MAX_LOGPROBS :][:VOCAB] = np.asarray(values, np.float32).view(np.int32)
    return row


class Row(NamedTuple):
    seq: Sequence
    start: int
    count: int
    num_new: int
    scores_prompt: bool

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def checks(self) -> bool:
        return self.count > 1 and self.num_new > 1


def each(rows: Rows) -> list[Row]:
    columns = (rows.start, rows.count, rows.num_new, rows.scores_prompt)
    return list(map(Row, rows.seqs, *(column.tolist() for column in columns)))


@dataclass
class Ran:
    """A batch that ran: its rows in the order in which they did, what they drew, and what draws later."""

    rows: Rows
    tokens: np.ndarray  # int32 [rows, steps]
    scores: np.ndarray  # int32 [1, rows, SCORE_WORDS], of rows that want log-probabilities
    deferred: dict[int, int] = field(default_factory=dict)  # row -> state


class Device:
    """Pages, block tables and slots; the last slot is nobody's, as in `jaxserve.execution.slots`."""

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        check_read: Callable[[Sequence, int, list], None],
        cost: StepCost | None = None,
        longest: int = 0,
        recurrent: int | None = None,
        whole: int = 0,
    ):
        """`recurrent`: the model is, and has so many places for snapshots. `whole`: see `Simulation`."""
        self.cost = cost
        self.blocks = blocks
        self.num_slots = max_num_seqs
        self._check_read = check_read
        half = -(-max_num_seqs // 2)  # buckets below the engine's limits, so that plans are cut into several batches
        self.widest = max(range(blocks.num_groups), key=lambda group: blocks.windows[group] or 2**30)
        decodes = [StepShape(rows, rows, rows, decode_only=True) for rows in (1, half)]
        mixed = [StepShape(tokens, min(tokens, half), 2, decode_only=False) for tokens in (2, max(7, whole))]
        self.shapes = decodes + mixed
        self.events: Counter[str] = Counter()
        self.memory: list[list[object]] = [["never written"] * blocks.page_size for _ in range(blocks.num_pages)]
        width = max(blocks.num_pages, blocks.pages_for(longest)) + blocks.num_groups
        self.tables = [[0] * width for _ in range(max_num_seqs + 1)]
        self.last_token = [-1] * (max_num_seqs + 1)
        self.length = [0] * (max_num_seqs + 1)  # tokens whose content lies in the slot's pages
        self.slot_params = [(0, 0, frozenset())] * (max_num_seqs + 1)  # root state, seed, stop ids
        # Of a recurrent model: the state behind the last token of each slot, then the snapshots.
        self.recurrent = None if recurrent is None else [0] * (max_num_seqs + 1 + recurrent)

        self.features: dict[int, int] = {}  # row of the features of pictures -> the token that stands for them
        self.places: dict[int, list[str]] = {}  # place of an adapter -> digest of the adapter of each piece in it
        self.place_of: Callable[[Sequence], int | None] = lambda seq: None
        self.slot_place: list[int | None] = [None] * (max_num_seqs + 1)

    def adapter_uploads(self, place: int, adapter: ServedAdapter) -> Iterator[Callable[[], None]]:
        """As `ModelRunner.adapter_uploads`."""
        pieces = self.places.setdefault(place, ["never written"] * PIECES)
        for piece in range(PIECES):
            yield partial(pieces.__setitem__, piece, adapter.digest)
            self.events["uploads"] += 1

    def run(self, plan: StepPlan, running: RunningTable) -> list[Ran]:
        for seq in plan.placed:
            self.slot_place[seq.slot] = self.place_of(seq)
            self.last_token[seq.slot] = 0
            self.length[seq.slot] = int(running.start[seq.slot])
            self.slot_params[seq.slot] = self.params_of(seq)
        self._copy(plan.copies)
        self._copy_states(plan.restored, "restored")
        for job in plan.images:
            self.features.update(zip(job.rows.tolist(), tokens_of(job.image).tolist(), strict=True))
        for source, target in plan.table_copies:
            self.tables[target] = self.tables[source].copy()
        self.events["copied tables"] += len(plan.table_copies)
        self.events["table entries"] += plan.table_updates.shape[1]
        batches = list(split(plan.rows, self.shapes, self.cost))
        self.events["cut plans"] += len(batches) > 1
        updates = plan.table_updates
        results = []
        assert len(set(map(tuple, updates[:2].T.tolist()))) == updates.shape[1], "a place is written twice at once"
        for batch in batches:
            room = batch.shape.table_updates
            self._update_tables(updates[:, room:])
            self.events["overflow"] += updates[:, room:].shape[1]
            results.append(self._run_batch(batch, running, updates[:, :room]))
            updates = updates[:, :0]
        self._copy_states(plan.kept, "kept")
        self._check_split(plan, [row for batch in batches for row in each(batch.rows)])
        return results

    @staticmethod
    def params_of(seq: Sequence) -> tuple[int, int, frozenset[int]]:
        return root_state(seq.request.cache_salt, seq.adapter), child_seed(seq.seed, 0), seq.stop_ids

    def sample_deferred(self, ran: Ran, running: RunningTable) -> None:
        """Draws for the rows that left it for later; all steps before have been taken in."""
        rows = ran.rows
        for i, state in ran.deferred.items():
            seq = rows.seqs[i]
            slot = int(rows.slot[i])
            if running.slot_generation[slot] != rows.slot_generation[i]:
                continue
            output = running.tokens[slot, seq.prompt_len : rows.end[i]].tolist()
            assert output == seq.matcher.tokens, "a row draws before its grammar knows all that it drew"
            token = next_token(state, self.slot_params[slot][1], seq.matcher.allows)
            ran.tokens[i, 0] = token
            self.last_token[slot] = -1 if token in self.slot_params[slot][2] else token
            self.events["late draws"] += 1
        ran.deferred = {}

    def buffer_of(self, batch: StepBatch, running: RunningTable, updates: np.ndarray) -> np.ndarray:
        return batch.pack(running, updates)

    def _update_tables(self, updates) -> None:
        for slot, index, page in np.asarray(updates).T.tolist():
            self.tables[slot][index] = page

    def _run_batch(self, batch: StepBatch, running: RunningTable, updates: np.ndarray) -> Ran:
        assert batch.shape in self.shapes
        rows = each(batch.rows)
        images = ((row.end, one) for row in rows for one in row.seq.images)
        assert not any(one.whole and one.first < end < one.end for end, one in images), "a picture is cut"
        ones = [row.count == 1 for row in rows]
        assert ones == sorted(ones, reverse=True), "rows of one token come first"
        assert not batch.shape.decode_only or not any(row.scores_prompt for row in rows), "nothing to score is kept"
        packed = self.buffer_of(batch, running, updates)
        fields = {name: packed[at : at + size].tolist() for name, (at, size) in batch.shape.fields.items()}
        self._update_tables([fields["update_slot"], fields["update_index"], fields["update_page"]])
        assert fields["num_decodes"] == [sum(ones)]
        assert fields["q_start"][len(rows) :] == [sum(row.count for row in rows)] * (batch.shape.rows + 1 - len(rows))
        assert set(fields["slot"][len(rows) :]) <= {self.num_slots}
        (most,) = fields["tokens_per_call"]
        steps = most if batch.shape.decode_only else 1
        assert 1 <= steps <= batch.shape.max_tokens_per_call
        slots = fields["slot"]
        ended = [self.last_token[slots[i]] < 0 for i in range(len(rows))]
        self.events["ended on the device"] += sum(ended)
        going = [fields["num_new"][i] > 0 and not ended[i] for i in range(len(rows))]
        scores = np.zeros((1, len(rows), SCORE_WORDS), np.int32)
        ran = Ran(batch.rows, np.full((len(rows), most), -1, np.int32), scores)
        for step in range(steps):
            written: set[tuple[int, int]] = set()
            advancing = [i for i in range(len(rows)) if going[i] or (step == 0 and not ended[i])]
            for i in advancing:
                self._check_adapter(rows[i].seq, slots[i])
                assert step > 0 or self.length[slots[i]] == rows[i].start, "host and device count differently"
                self._write_row(fields, i, written, step, checks=rows[i].checks)
            self.scribble()
            for i in advancing:
                seq = rows[i].seq
                slot = slots[i]
                if rows[i].checks:
                    first = fields["q_start"][i + 1] - rows[i].num_new
                    self._check_proposals(rows[i], slot, fields["tokens"][first:], ran.tokens[i])
                    continue
                state = self._read_row(slot, seq)
                if seq.params.logprobs is not None:
                    scores[0, i] = pack_scores(state)
                if fields["num_new"][i] < 0:
                    ran.deferred[i] = state
                if going[i]:
                    token = next_token(state, self.slot_params[slot][1])
                    stops = token in self.slot_params[slot][2]
                    ran.tokens[i, step] = token
                    self.last_token[slot] = -1 if stops else token
                    going[i] = not stops and step + 1 < fields["num_new"][i]
        self.events["loops"] += steps > 1
        self.events["loops beside single draws"] += steps > 1 and any(row.seq.params.has_mask for row in rows)
        return ran

    def _check_adapter(self, seq: Sequence, slot: int) -> None:
        place = self.slot_place[slot]
        assert (place is None) == (seq.adapter is None)
        if place is not None and seq.adapter is not None:
            assert self.places[place] == [seq.adapter.digest] * PIECES, "a row would see another adapter's weights"
            self.events["rows with adapters"] += 1

    def _check_proposals(self, row: Row, slot: int, given: list[int], drawn: np.ndarray) -> None:
        """Draws behind the row's last known token, then behind each of its proposals that equals the draw before it.
        The slot's length ends with the last token that counts; what was written behind it stays. The recurrent state
        advances by the tokens that count. given: the row's tokens."""
        _, *proposed = given
        self.length[slot] -= row.num_new - 1
        for i in range(row.num_new):
            if self.recurrent is not None:
                self.recurrent[slot] = fingerprint(self.recurrent[slot], given[i])
                assert self.recurrent[slot] == self._read(slot, self.length[slot] - 1, self.widest)
            token = next_token(self._read_row(slot, row.seq), self.slot_params[slot][1])
            stops = token in self.slot_params[slot][2]
            drawn[i] = token
            self.last_token[slot] = -1 if stops else token
            if stops or i == row.num_new - 1 or token != proposed[i]:
                self.events["kept proposals"] += i
                self.events["lost proposals"] += row.num_new - 1 - i
                return
            self.length[slot] += 1

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        """All are read before any is written; one after the other must give the same, as there may be many."""
        expected = [self.memory[source][:] for source, _ in pairs]
        for source, target in pairs:
            self.memory[target] = self.memory[source][:]
        assert [self.memory[target] for _, target in pairs] == expected, "copies overlap"
        self.events["copies"] += len(pairs)

    def _copy_states(self, pairs: list[tuple[int, int]], event: str) -> None:
        for source, target in pairs:
            assert self.recurrent is not None
            self.recurrent[target] = self.recurrent[source]
        self.events[event] += len(pairs)

    def _write_row(
        self, batch: dict[str, list[int]], i: int, written: set[tuple[int, int]], step: int, *, checks: bool
    ) -> None:
        """Computes a row's tokens. If it `checks` proposals, the recurrent state stays as it is before them."""
        (first, last), slot = batch["q_start"][i : i + 2], batch["slot"][i]
        start = self.length[slot]
        end = self.length[slot] + last - first - 1
        chunks = [window for window in self.blocks.windows if isinstance(window, Chunk)]
        assert all(start // chunk == end // chunk for chunk in chunks), "a row's tokens lie in several chunks"
        self.events["ends of chunks"] += any((end + 1) % chunk == 0 for chunk in chunks)
        state = self._read(slot, start - 1, self.widest)
        if self.recurrent is not None and start > 0:
            state = self.recurrent[slot]
        for at in range(first, last):
            position = start + at - first
            token = batch["tokens"][at]
            if token <= SHOWN:
                token = self.features[SHOWN - token]
                self.events["tokens of pictures"] += 1
            elif token < 0 or step > 0:
                token = self.last_token[slot]
                self.events["unknown tokens"] += step == 0
            state = fingerprint(state, token)
            for group in range(self.blocks.num_groups):
                page, offset = self._place(slot, position, group)
                assert page != 0, "a real token would be written to the null page"
                assert (page, offset) not in written, "two rows write to the same place"
                written.add((page, offset))
                self.memory[page][offset] = group, state
        self.length[slot] = start + last - first
        if self.recurrent is not None and not checks:
            self.recurrent[slot] = state

    def _read_row(self, slot: int, seq: Sequence) -> int:
        """Looks at all that the slot's last token can attend to in each group; returns the state after it."""
        length = self.length[slot]
        for group, window in enumerate(self.blocks.windows):
            first = 0 if window is None else max(length - window, 0)
            if isinstance(window, Chunk):
                first = (length - 1) // window * window
            seen = [self._read(slot, position, group) for position in range(first, length)]
            self._check_read(seq, first, seen)
        return seen[-1]

    def _place(self, slot: int, position: int, group: int) -> tuple[int, int]:
        block, offset = divmod(position, self.blocks.page_size)
        return self.tables[slot][block * self.blocks.num_groups + group], offset

    def _read(self, slot: int, position: int, group: int):
        """The state that was written there; anything else, another group's content included, as it lies there."""
        if position < 0:
            return self.slot_params[slot][0]
        page, offset = self._place(slot, position, group)
        content = self.memory[page][offset]
        return content[1] if isinstance(content, tuple) and content[0] == group else content

    def scribble(self) -> None:
        """What nobody owns and nobody can find again may be overwritten at any time."""
        for page in [0, *self.blocks._free]:
            self.memory[page] = [f"scribble {page}"] * self.blocks.page_size

    @staticmethod
    def _check_split(plan: StepPlan, rows: list[Row]) -> None:
        """The pieces that ran make up the plan."""
        assert all(row.count > 0 for row in rows)
        for whole in each(plan.rows):
            pieces = [row for row in rows if row.seq is whole.seq]
            assert [piece.start for piece in pieces] == [whole.start, *(piece.end for piece in pieces[:-1])]
            assert pieces[-1].end == whole.end
            assert len(pieces) == 1 or not whole.checks, "proposals are checked in one piece"
            assert [piece.num_new for piece in pieces] == [0] * (len(pieces) - 1) + [whole.num_new]
        assert {row.seq for row in rows} == set(plan.rows.seqs)
