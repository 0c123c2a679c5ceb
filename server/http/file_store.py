"""Files and batches of all keys, in a folder that several processes share and that survives their end at any moment.

    OWNER/files/ID        the bytes of a file: a file exists from the moment at which this name does
    OWNER/files/ID.json   what is known of it, written before
    OWNER/files/ID.part   an upload, locked by the process that receives it; without a lock it is a remainder
    OWNER/batches/ID.json         a batch, which only the process that runs it writes once it has begun
    OWNER/batches/ID.cancel       somebody wants it cancelled
    OWNER/batches/ID.output, ID.errors    lines of answers, which become files when the batch ends
    active/OWNER.ID       the batch has not ended; locked by the process that runs it
    OWNER/lock            held for a moment by whoever creates a batch or deletes a file

An owner is an API key, by its digest, or everybody where there are no keys. JSON files are replaced as a whole, so a
process that is killed leaves the old one or the new one. All methods may wait for the disk: call them off the event
loop."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TypeVar

import msgspec

from jaxserve.server.http.errors import APIError
from jaxserve.server.http.file_records import (
    BATCH_ID,
    FILE_ID,
    INPUT,
    OUTPUT,
    BatchRecord,
    FileRecord,
    new_id,
    sync_folder,
)
from jaxserve.server.http.keys import ApiKey

log = logging.getLogger("jaxserve.server")

_LEAST_BYTES = 4096  # that any file counts, because of its name and its block on the disk
_LOOK_BYTES = 8 * 2**20  # of an upload, after which its owner's files are counted again
_NEW_SECONDS = 60.0  # an upload that has grown meanwhile may not be locked yet
_EVERYBODY = "everybody"
_ACTIVE = "active"

Record = TypeVar("Record", FileRecord, BatchRecord)


def owner_of(key: ApiKey | None) -> str:
    """The folder of a key's files."""
    return _EVERYBODY if key is None else key.digest.hex()[:32]


class CorruptRecordError(ValueError):
    """A JSON file of the store cannot be read; the message names it."""


class FileStore:
    """The folder. `max_bytes`: most bytes of one owner's files together; `longest`: of one file."""

    def __init__(self, root: Path, *, max_bytes: int, longest: int):
        """Raises OSError if the folder cannot be made or written to."""
        self.root = root
        self.max_bytes = max_bytes
        self.longest = longest
        (root / _ACTIVE).mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(root / _ACTIVE, os.W_OK | os.X_OK):
            raise PermissionError(13, "the folder of --files-dir cannot be written to", str(root))

    def _folder(self, owner: str, kind: str) -> Path:
        folder = self.root / owner / kind
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_folder(folder.parent)
            sync_folder(self.root)
        return folder

    @contextlib.contextmanager
    def _locked(self, owner: str) -> Iterator[None]:
        self._folder(owner, "files")
        lock = os.open(self.root / owner / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    # Files

    def path(self, owner: str, file_id: str) -> Path:
        return self._folder(owner, "files") / file_id

    def used_bytes(self, owner: str) -> int:
        """Bytes of an owner's files, with those that are arriving."""
        with os.scandir(self._folder(owner, "files")) as entries:
            sizes = []
            for entry in entries:
                if not entry.name.endswith(".json"):
                    with contextlib.suppress(FileNotFoundError):
                        sizes.append(max(entry.stat().st_size, _LEAST_BYTES))
        return sum(sizes)

    def check_room(self, owner: str, more: int) -> None:
        """Raises APIError (413) if an owner's files may not have `more` bytes."""
        if (size := self.used_bytes(owner) + more) > self.max_bytes:
            text = (
                f"the files of a key may have {self.max_bytes} bytes together (--max-files-bytes); with this one they "
                f"would have {size}; delete some"
            )
            raise APIError(413, text, param="file", code="files_too_large")

    def file(self, owner: str, file_id: str, param: str | None = None) -> FileRecord:
        """Raises APIError (404) if the owner has no such file."""
        if FILE_ID.fullmatch(file_id) and (path := self.path(owner, file_id)).is_file():
            record = _read(path.with_name(f"{file_id}.json"), FileRecord)
            if record is not None and (not record.is_expired or self._batch_that_reads(owner, file_id)):
                return record
        raise APIError(404, f"there is no file {file_id[:80]!r}", param=param, code="file_not_found")

    def files(
        self, owner: str, after: str | None, limit: int, newest_first: bool, purpose: str | None
    ) -> tuple[list[FileRecord], bool]:
        """At most `limit` files behind `after`, and whether there are more."""
        folder = self._folder(owner, "files")
        names = [name for name in os.listdir(folder) if FILE_ID.fullmatch(name)]

        def wanted(record: FileRecord) -> bool:
            return purpose in (None, record.purpose) and not record.is_expired

        return _page(folder, names, FileRecord, after, limit, newest_first, wanted)

    def put_file(self, owner: str, record: FileRecord, part: Path) -> None:
        """Makes a complete and synchronized file one of the owner's."""
        path = self.path(owner, record.id)
        _write(path.with_name(f"{record.id}.json"), record)
        os.rename(part, path)
        sync_folder(path.parent)

    def delete_file(self, owner: str, file_id: str) -> None:
        """Raises APIError: 404 if there is no such file, 409 while a batch reads it."""
        with self._locked(owner):
            if not (FILE_ID.fullmatch(file_id) and self.path(owner, file_id).is_file()):
                raise APIError(404, f"there is no file {file_id[:80]!r}", code="file_not_found")
            if (batch := self._batch_that_reads(owner, file_id)) is not None:
                text = f"{file_id} is the input of {batch}, which has not ended; cancel it first"
                raise APIError(409, text, code="file_in_use")
            self._remove(owner, file_id)

    def _remove(self, owner: str, file_id: str) -> None:
        path = self.path(owner, file_id)
        part = path.with_name(f"{file_id}.part")
        os.rename(path, part)
        _remove_part(part)

    def _batch_that_reads(self, owner: str, file_id: str) -> str | None:
        for one, batch_id in self.active():
            if one == owner:
                with contextlib.suppress(CorruptRecordError):
                    batch = self._read_batch(owner, batch_id)
                    if batch is not None and batch.input_file_id == file_id:
                        return batch_id
        return None

    def tidy(self) -> None:
        """Removes what killed processes have left of uploads, and files that have expired."""
        for folder in self.root.glob("*/files"):
            owner = folder.parent.name
            for part in folder.glob("*.part"):
                with contextlib.suppress(OSError), open(part, "rb+", buffering=0) as lock:
                    if time.time() - part.stat().st_mtime > _NEW_SECONDS:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        _remove_part(part)
            for path in folder.glob("*.json"):
                with contextlib.suppress(OSError, CorruptRecordError, APIError):
                    if (record := _read(path, FileRecord)) is not None and record.is_expired:
                        self.delete_file(owner, path.stem)

    # Batches

    def _batch_path(self, owner: str, batch_id: str) -> Path:
        return self._folder(owner, "batches") / f"{batch_id}.json"

    def active(self) -> list[tuple[str, str]]:
        """Owners and ids of the batches that have not ended, the oldest first."""
        pairs = (name.partition(".") for name in os.listdir(self.root / _ACTIVE))
        return sorted(((owner, batch_id) for owner, _, batch_id in pairs), key=lambda pair: pair[1])

    def create_batch(self, owner: str, batch: BatchRecord, most: int) -> None:
        """Puts a new batch on the disk. Raises APIError: 404 without its input, 400 for an input of another purpose,
        429 if the owner has `most` batches that have not ended."""
        with self._locked(owner):
            record = self.file(owner, batch.input_file_id, "input_file_id")
            if record.purpose != INPUT:
                text = f"the purpose of {record.id} is {record.purpose!r}; the input of a batch must have {INPUT!r}"
                raise APIError(400, text, param="input_file_id")
            if sum(one == owner for one, _ in self.active()) >= most:
                text = f"{most} batches have not ended yet; wait for one, or cancel one (--max-batches-in-progress)"
                raise APIError(429, text, code="too_many_batches", headers={"Retry-After": "60"})
            (self.root / _ACTIVE / f"{owner}.{batch.id}").touch(mode=0o600)
            sync_folder(self.root / _ACTIVE)
            _write(self._batch_path(owner, batch.id), batch)

    def batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Raises APIError (404) if the owner has no such batch."""
        found = self._read_batch(owner, batch_id) if BATCH_ID.fullmatch(batch_id) else None
        if found is None:
            raise APIError(404, f"there is no batch {batch_id[:80]!r}", code="batch_not_found")
        return self._with_wish(owner, found)

    def batches(self, owner: str, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """At most `limit` batches behind `after`, the newest first, and whether there are more."""
        folder = self._folder(owner, "batches")
        names = [name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json")]
        found, more = _page(folder, names, BatchRecord, after, limit, True, lambda batch: True)
        return [self._with_wish(owner, batch) for batch in found], more

    def _with_wish(self, owner: str, batch: BatchRecord) -> BatchRecord:
        if not batch.has_ended and (wish := self.cancel_wish(owner, batch.id)) is not None:
            batch.cancelling_at = wish
            if batch.status != "finalizing":
                batch.status = "cancelling"
        return batch

    def save_batch(self, owner: str, batch: BatchRecord) -> None:
        _write(self._batch_path(owner, batch.id), batch)

    def wish_cancelled(self, owner: str, batch_id: str) -> None:
        """Tells the process that runs a batch to cancel it."""
        path = self._batch_path(owner, batch_id).with_suffix(".cancel")
        if not path.exists():
            path.touch(mode=0o600)
            sync_folder(path.parent)

    def cancel_wish(self, owner: str, batch_id: str) -> int | None:
        """Since when somebody wants the batch cancelled, in seconds since the epoch."""
        try:
            return int(self._batch_path(owner, batch_id).with_suffix(".cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def lines(self, owner: str, batch_id: str, kind: str) -> FileIO:
        """The batch's lines of the kind "output" or "errors", to be appended to."""
        return open(self._batch_path(owner, batch_id).with_suffix(f".{kind}"), "ab+", buffering=0, opener=_private)

    def publish(self, owner: str, batch: BatchRecord, kind: str, file_id: str) -> None:
        """Makes the batch's lines of a kind a file. Has no effect the second time."""
        lines = self._batch_path(owner, batch.id).with_suffix(f".{kind}")
        with contextlib.suppress(FileNotFoundError):
            now = int(time.time())
            expiry = batch.output_expires_after
            record = FileRecord(
                id=file_id,
                bytes=lines.stat().st_size,
                created_at=now,
                expires_at=None if expiry is None else now + expiry.seconds,
                filename=f"{batch.id}_{kind}.jsonl",
                purpose=OUTPUT,
            )
            self.put_file(owner, record, lines)

    def has_lines(self, owner: str, batch_id: str, kind: str) -> bool:
        """Whether a batch has lines of a kind that are no file yet."""
        path = self._batch_path(owner, batch_id).with_suffix(f".{kind}")
        return path.exists() and path.stat().st_size > 0

    def claim(self, owner: str, batch_id: str) -> Claim | None:
        """A batch that nobody else runs until the claim is given up; None if another process runs it, or if it has
        ended. Raises CorruptRecordError if what is known of it cannot be read."""
        marker = self.root / _ACTIVE / f"{owner}.{batch_id}"
        try:
            lock = FileIO(marker, "rb+")
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            batch = self._read_batch(owner, batch_id)
            if batch is None:  # it is being created
                with self._locked(owner):
                    batch = self._read_batch(owner, batch_id)
            if batch is not None and not batch.has_ended:
                return Claim(lock, owner, batch)
            self._forget(owner, batch_id)
        except BlockingIOError:
            pass
        except BaseException:
            lock.close()
            raise
        lock.close()
        return None

    def give_up(self, claim: Claim) -> None:
        """Lets others run the batch, unless it has ended."""
        try:
            if claim.batch.has_ended:
                self._forget(claim.owner, claim.batch.id)
        finally:
            claim.lock.close()

    def _read_batch(self, owner: str, batch_id: str) -> BatchRecord | None:
        return _read(self._batch_path(owner, batch_id), BatchRecord)

    def _forget(self, owner: str, batch_id: str) -> None:
        """Removes what only an unfinished batch needs."""
        for suffix in (".cancel", ".output", ".errors"):  # what they hold is in files
            self._batch_path(owner, batch_id).with_suffix(suffix).unlink(missing_ok=True)
        (self.root / _ACTIVE / f"{owner}.{batch_id}").unlink(missing_ok=True)
        sync_folder(self.root / _ACTIVE)


@dataclass
class Claim:
    """A batch that this process runs. `lock`: an open file, whose lock ends with the process."""

    lock: FileIO
    owner: str
    batch: BatchRecord


class Upload:
    """A file that arrives. Without `finish`, `close` removes it."""

    def __init__(self, store: FileStore, owner: str):
        self._store = store
        self._owner = owner
        self.id = new_id("file-")
        self._path = store.path(owner, f"{self.id}.part")
        self._file = FileIO(self._path, "xb", opener=_private)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.size = 0

    def write(self, data: bytes) -> None:
        """Raises APIError (413) for a file that is too large, or for which the owner has no room, and OSError."""
        self.size += len(data)
        if self.size > self._store.longest:
            raise too_large(self._store.longest)
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        if self.size // _LOOK_BYTES > (self.size - len(data)) // _LOOK_BYTES:
            self._store.check_room(self._owner, 0)

    def finish(self, filename: str, purpose: str, expires_after: int | None) -> FileRecord:
        """Puts the file on the disk as one of the owner's. `expires_after`: seconds."""
        self._store.check_room(self._owner, 0)
        os.fsync(self._file.fileno())
        now = int(time.time())
        expires = None if expires_after is None else now + expires_after
        record = FileRecord(
            id=self.id, bytes=self.size, created_at=now, expires_at=expires, filename=filename, purpose=purpose
        )
        self._store.put_file(self._owner, record, self._path)
        return record

    def close(self) -> None:
        _remove_part(self._path)
        self._file.close()


def too_large(longest: int) -> APIError:
    text = f"the file has more than the {longest} bytes that a file may have (--max-file-bytes)"
    return APIError(413, text, param="file", code="file_too_large")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _remove_part(part: Path) -> None:
    """Removes an upload that was not finished, if there is one, and what is known of it."""
    if part.exists():
        part.with_suffix(".json").unlink(missing_ok=True)
        part.unlink(missing_ok=True)


def _read(path: Path, kind: type[Record]) -> Record | None:
    """The record in a JSON file; None if there is no file. Raises CorruptRecordError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptRecordError(f"{path} cannot be read: {error}; restore it, or remove it") from None


def _write(path: Path, record: FileRecord | BatchRecord) -> None:
    """Replaces a JSON file by another one, which is on the disk when this returns."""
    new = path.with_name(f"{path.name}.new")
    with open(new, "wb", opener=_private) as file:
        file.write(msgspec.json.encode(record))
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_folder(path.parent)


def _page(
    folder: Path,
    names: list[str],
    kind: type[Record],
    after: str | None,
    limit: int,
    newest_first: bool,
    wanted: Callable[[Record], bool],
) -> tuple[list[Record], bool]:
    """At most `limit` of the wanted records behind the id `after`, and whether there are more. Records that cannot be
    read are left out, and logged."""
    names.sort(reverse=newest_first)
    found: list[Record] = []
    for name in names:
        if after is not None and (name >= after if newest_first else name <= after):
            continue
        try:
            record = _read(folder / f"{name}.json", kind)
        except CorruptRecordError as error:
            log.error("%s", error)
            continue
        if record is not None and wanted(record):
            if len(found) == limit:
                return found, True
            found.append(record)
    return found, False
