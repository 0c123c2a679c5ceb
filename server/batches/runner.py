"""Runs the batches of one API server. Each batch is run by one API server at a time, which holds a lock on it.

    validating    every line is checked; a batch with a wrong line fails, before any request is asked
    in_progress   requests are asked at the lowest priority, and each answer is put on the disk as it comes
    finalizing    what has no answer, because the time is over, gets an error; lines become files
    completed, failed, expired, cancelled

What is on the disk is enough to go on at any of these places: an answer counts once its line is whole. A batch whose
disk fails, for example because it is full, waits, and goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections import Counter
from functools import partial
from io import FileIO

import msgspec
from starlette.types import ASGIApp

from jaxserve.server.batches.answers import AnswerFile, NotAnswersError, answer_line, recover, unanswered_line
from jaxserve.server.batches.asking import Asker, Engines, Places, answer_all
from jaxserve.server.batches.lines import BatchLine, check_lines, digest_of, lines_but
from jaxserve.server.http.errors import APIError
from jaxserve.server.http.file_records import BatchErrorRecord, BatchErrors, Outcome, new_id
from jaxserve.server.http.file_store import Claim, CorruptRecordError, FileStore, log, owner_of
from jaxserve.server.http.keys import ApiKey
from jaxserve.server.http.state import ServerState

_AT_ONCE = 8  # batches of one API server that are run at a time; the others wait for their turn
_SEQUENCES = 64  # that an engine of a server with several models is taken to run at once
_AHEAD = 1.25  # requests in work per sequence that the engine can run, so that the engine never waits for one
_MOST_BYTES = 16 * 2**20  # of the requests in work
_LOOK_SECONDS = 1.0  # between two looks for batches that others have created, or want cancelled
_SAVE_SECONDS = 1.0  # between two times that the counts of a batch are written
_TIDY_SECONDS = 3600.0
_PATIENCE = 15.0  # seconds before a batch goes on whose disk has failed
_UNANSWERED = {
    "expired": ("batch_expired", "This request could not be executed before the completion window ended."),
    "cancelled": ("batch_cancelled", "This request was not executed before the batch was cancelled."),
    "failed": ("batch_failed", "This request was not executed before the batch failed."),
}


class BatchRunner:
    """The batches of one API server. `app` answers their requests by `engines`."""

    def __init__(self, state: ServerState, store: FileStore, app: ASGIApp, engines: Engines):
        self._state = state
        self._store = store
        self._app = app
        self._engines = engines
        keys = state.settings.api_keys or (None,)
        self._keys = {owner_of(key): key for key in keys}
        self._key_places = {
            owner: Places(key.max_concurrency) for owner, key in self._keys.items() if key and key.max_concurrency
        }
        self._places = Places(1)
        self._woken = asyncio.Event()
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}  # id of a batch -> owner, task
        self._not_before: dict[str, float] = {}  # id -> time.monotonic() before which it is left alone
        self._looking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Runs batches once the server is ready, until `stop`. The disk's errors are logged."""
        self._looking = asyncio.current_task()
        self._state.wake_batches = self._woken.set
        while self._state.status in ("loading", "restarting"):
            await asyncio.sleep(_LOOK_SECONDS / 10)
        info = self._state.client.info
        sequences = _SEQUENCES if info is None else info.max_num_seqs
        usual = math.ceil(_AHEAD * sequences / self._state.settings.api_server_count)
        self._places = Places(self._state.settings.batch_concurrency or usual, _MOST_BYTES)
        tidy_at = 0.0
        while True:
            self._woken.clear()
            try:
                if time.monotonic() >= tidy_at:
                    tidy_at = time.monotonic() + _TIDY_SECONDS
                    await asyncio.to_thread(self._store.tidy)
                await self._begin()
            except OSError as error:
                log.error("the folder of --files-dir failed: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _LOOK_SECONDS)

    async def stop(self) -> None:
        """Stops at once. Requests without an answer are asked again by whoever runs their batch next."""
        tasks = [task for _, task in self._running.values()]
        if self._looking is not None and self._looking is not asyncio.current_task():
            tasks.append(self._looking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self) -> None:
        """Begins batches that nobody runs: those of owners with few running ones first, then the oldest."""
        waiting = []
        counts = Counter(owner for owner, _ in self._running.values())
        for owner, name in await asyncio.to_thread(self._store.active):
            if name in self._running or owner not in self._keys or time.monotonic() < self._not_before.get(name, 0.0):
                continue
            waiting.append((counts[owner], name, owner))
            counts[owner] += 1
        for _, name, owner in sorted(waiting):
            is_full = len(self._running) >= _AT_ONCE
            if is_full and await asyncio.to_thread(self._store.cancel_wish, owner, name) is None:
                continue
            try:
                claim = await asyncio.to_thread(self._store.claim, owner, name)
            except CorruptRecordError as error:
                log.error("batch %s cannot be run: %s", name, error)
                self._not_before[name] = time.monotonic() + _TIDY_SECONDS
                continue
            if claim is not None:
                task = asyncio.create_task(self._run(claim))
                self._running[name] = owner, task
                task.add_done_callback(partial(self._ended, name))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._running[name]
        self._woken.set()

    async def _run(self, claim: Claim) -> None:
        """Runs a batch until it ends, or until its disk fails."""
        batch = claim.batch
        try:
            await _Run(self, claim).to_the_end()
            counts = batch.request_counts
            log.info(
                "batch %s: %s; %d of %d requests answered, %d failed",
                batch.id, batch.status, counts.completed, counts.total, counts.failed,
            )  # fmt: skip
        except Exception as error:
            self._not_before[batch.id] = time.monotonic() + _PATIENCE
            first = _first(error)
            if not isinstance(first, OSError):
                log.exception("batch %s stopped; it goes on in %g s", batch.id, _PATIENCE)
            else:
                log.error("batch %s stopped; it goes on in %g s: %s", batch.id, _PATIENCE, first)
                await self._tell(claim, f"{first}; the batch goes on when the disk takes its answers")
        finally:
            with contextlib.suppress(OSError):
                self._store.give_up(claim)

    async def _tell(self, claim: Claim, text: str) -> None:
        """Shows why a batch waits, if the disk takes that."""
        claim.batch.errors = BatchErrors([BatchErrorRecord("storage_error", text)])
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._store.save_batch, claim.owner, claim.batch)

    # What a run needs

    @property
    def store(self) -> FileStore:
        return self._store

    @property
    def state(self) -> ServerState:
        return self._state

    def key(self, owner: str) -> ApiKey | None:
        """The key that an owner's batches are asked under; None: the server requires no keys."""
        return self._keys[owner]

    def asker(self, owner: str) -> Asker:
        """Asks under the owner's key. What its batches have in work does not count against the key's limit for other
        requests; it is limited by `places`."""
        found: dict[str, object] = {"background": True}
        if (key := self._keys[owner]) is not None:
            found["api_key"] = dataclasses.replace(key, max_concurrency=None)
        return Asker(self._app, self._engines, found)

    def places(self, owner: str) -> list[Places]:
        return [*filter(None, [self._key_places.get(owner)]), self._places]


class _Run:
    """One batch that is being run."""

    def __init__(self, runner: BatchRunner, claim: Claim):
        self._runner = runner
        self._store = runner.store
        self._owner = claim.owner
        self._batch = claim.batch
        self._input = self._store.path(claim.owner, claim.batch.input_file_id)
        self._done: set[bytes] = set()  # digests of the custom_ids that have a line

    async def to_the_end(self) -> None:
        batch = self._batch
        if batch.outcome is None:
            batch.errors = None  # of a disk that failed
            if not self._input.is_file():
                self._fail([BatchErrorRecord("input_file_not_found", f"{batch.input_file_id} has been removed")])
            elif await self._over() is None and batch.status == "validating":
                await self._validate()
            if batch.outcome is None and batch.request_counts.total:
                await self._answer()
            counts = batch.request_counts
            is_answered = bool(counts.total) and counts.completed + counts.failed == counts.total
            batch.outcome = batch.outcome or (None if is_answered else await self._over()) or "completed"
            await self._name_files()
        for kind, name in (("output", batch.output_file_id), ("errors", batch.error_file_id)):
            if name is not None:
                await asyncio.to_thread(self._store.publish, self._owner, batch, kind, name)
        assert batch.outcome is not None
        batch.become(batch.outcome)
        await self._save()

    async def _save(self) -> None:
        await asyncio.to_thread(self._store.save_batch, self._owner, self._batch)

    def _fail(self, errors: list[BatchErrorRecord]) -> None:
        self._batch.errors = BatchErrors(errors)
        self._batch.outcome = "failed"

    async def _over(self) -> Outcome | None:
        """Whether somebody wants the batch cancelled, or its time is over."""
        wish = await asyncio.to_thread(self._store.cancel_wish, self._owner, self._batch.id)
        if wish is not None:
            self._batch.cancelling_at = wish
            return "cancelled"
        return "expired" if time.time() >= self._batch.expires_at else None

    async def _validate(self) -> None:
        settings = self._runner.state.settings
        loop = asyncio.get_running_loop()

        def why_not(model: str) -> str | None:
            return asyncio.run_coroutine_threadsafe(self._why_not(model), loop).result()

        check = partial(
            check_lines,
            self._input,
            self._batch.endpoint,
            most=settings.max_batch_requests,
            longest=settings.max_body_bytes,
            why_not=why_not,
        )
        checked = await asyncio.to_thread(check)
        self._batch.model = checked.model
        if checked.errors:
            self._fail(checked.errors)
            return
        self._batch.request_counts.total = checked.total
        self._batch.become("in_progress")
        log.info("batch %s: %d requests to %s", self._batch.id, checked.total, self._batch.endpoint)
        await self._save()

    async def _why_not(self, model: str) -> str | None:
        """Why a model is not served to the batch's key; None: it is."""
        models = self._runner.state.models
        assert models is not None
        try:
            models.find(model, self._runner.key(self._owner))
        except APIError as error:
            return error.message
        return None

    async def _answer(self) -> None:
        """Answers what has no answer yet, until the batch is over. Raises OSError if the disk fails."""
        counts = self._batch.request_counts
        with contextlib.ExitStack() as stack:
            files: list[AnswerFile] = []
            found = []
            for kind in ("output", "errors"):
                file = stack.enter_context(self._store.lines(self._owner, self._batch.id, kind))
                found.append(await asyncio.to_thread(self._recover, file))
                files.append(AnswerFile(file))
                stack.callback(files[-1].close)
            counts.completed, counts.failed = found
            output, errors = files

            async def take(line: BatchLine, status: int, body: bytes) -> None:
                self._done.add(line.digest)  # from here on the line is written, whatever happens to this task
                is_answer = status == 200
                counts.completed += is_answer
                counts.failed += not is_answer
                await (output if is_answer else errors).append(answer_line(line.custom_id, status, body))

            lines = lines_but(self._input, self._done)
            runner = self._runner
            answering = asyncio.create_task(
                answer_all(lines, runner.asker(self._owner), runner.places(self._owner), take)
            )
            try:
                outcome = await self._watch(answering)
            finally:
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
                await lines.aclose()
                for answers in files:
                    with contextlib.suppress(OSError):
                        await answers.flush()
            if outcome is None:
                answering.result()
                return
            self._batch.become("cancelling" if outcome == "cancelled" else "finalizing")
            await self._save()
            counts.failed += await self._end_unanswered(errors, outcome)
            self._batch.outcome = outcome

    def _recover(self, file: FileIO) -> int:
        """Notes which requests have lines in a file, and returns their number. Cuts off what is no line, for example
        after the machine has lost power: these requests are asked again."""

        def take(custom_id: str) -> None:
            self._done.add(digest_of(custom_id))

        try:
            return recover(file, take)
        except NotAnswersError as error:
            log.error("batch %s: cut off its answers after %d bytes: %s", self._batch.id, error.end, error)
            file.truncate(error.end)
            return recover(file, take)

    async def _watch(self, answering: asyncio.Task[None]) -> Outcome | None:
        """Waits until all is answered (None) or the batch is over. Writes its counts meanwhile."""
        saved = msgspec.structs.replace(self._batch.request_counts)
        while (outcome := await self._over()) is None:
            await asyncio.wait({answering}, timeout=_SAVE_SECONDS)
            if answering.done():
                return None
            if self._batch.request_counts != saved:
                saved = msgspec.structs.replace(self._batch.request_counts)
                await self._save()
        return outcome

    async def _end_unanswered(self, errors: AnswerFile, outcome: Outcome) -> int:
        """Writes an error for each request without an answer; returns their number."""
        count = 0
        some: list[bytes] = []
        async with contextlib.aclosing(lines_but(self._input, self._done)) as lines:
            async for line in lines:
                some.append(unanswered_line(line.custom_id, *_UNANSWERED[outcome]))
                count += 1
                if len(some) == 1000:
                    await errors.append(b"".join(some))
                    some = []
        if some:
            await errors.append(b"".join(some))
        return count

    async def _name_files(self) -> None:
        """Gives names to the files that the batch will have, and puts them on the disk."""
        batch = self._batch
        has_lines = partial(self._store.has_lines, self._owner, batch.id)
        if await asyncio.to_thread(has_lines, "output"):
            batch.output_file_id = new_id("file-")
        if await asyncio.to_thread(has_lines, "errors"):
            batch.error_file_id = new_id("file-")
        if batch.outcome == "cancelled":
            batch.become("cancelling")
        elif batch.outcome != "failed":
            batch.become("finalizing")
        await self._save()


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
