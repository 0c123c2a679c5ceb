"""Files and batches as OpenAI's API shows them, and as they are kept on disk."""

from __future__ import annotations

import os
import re
import secrets
import time
from typing import Any, Literal, get_args

import msgspec

FILE_ID = re.compile(r"file-[0-9a-f]{24}", re.ASCII)
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}", re.ASCII)
INPUT = "batch"  # purposes of files
OUTPUT = "batch_output"

Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]  # fmt: skip
Outcome = Literal["completed", "failed", "expired", "cancelled"]
ENDED = get_args(Outcome)


def new_id(prefix: str) -> str:
    """An id that no other object has. Later ids follow in alphabetical order."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(6)}"


class FileRecord(msgspec.Struct, kw_only=True):
    """https://platform.openai.com/docs/api-reference/files/object"""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None

    @property
    def is_expired(self) -> bool:
        return self.expires_at is not None and time.time() >= self.expires_at


class BatchErrorRecord(msgspec.Struct):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchErrorRecord]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    """completed: lines of the output file; failed: lines of the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class OutputExpiry(msgspec.Struct):
    """The `output_expires_after` of a batch."""

    anchor: Literal["created_at"]
    seconds: int


class BatchRecord(msgspec.Struct, kw_only=True):
    """https://platform.openai.com/docs/api-reference/batch/object

    What is kept for later and not shown: `outcome` is the status with which the batch ends, known before its files are
    made, and `output_expires_after` is for these.
    """

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None
    outcome: Outcome | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def become(self, status: Status) -> None:
        """Sets the status, and the time of its beginning if it has none."""
        self.status = status
        if status != "validating" and getattr(self, name := f"{status}_at") is None:
            setattr(self, name, int(time.time()))

    def shown(self) -> dict[str, Any]:
        """The batch as clients see it: its files are named once they are complete."""
        fields = msgspec.structs.asdict(self)
        del fields["output_expires_after"], fields["outcome"]
        if not self.has_ended:
            fields["output_file_id"] = fields["error_file_id"] = None
        return fields


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Puts the names in a folder on the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
