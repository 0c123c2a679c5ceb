"""The body of POST /v1/batches."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from jaxserve.server.http.file_records import OutputExpiry
from jaxserve.types import InvalidRequestError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST = 30 * 86_400  # seconds of a completion window

# The endpoints that answer requests of batches.
URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")


class BatchRequest(msgspec.Struct, kw_only=True):
    """A batch that is to be created."""

    input_file_id: str
    endpoint: Annotated[str, Meta(extra_json_schema={"enum": list(URLS)})]
    completion_window: Annotated[
        str, Meta(pattern=r"^[1-9][0-9]{0,6}[smhd]$", description="For example 24h; at most 30 days")
    ]
    metadata: (
        Annotated[
            dict[
                Annotated[str, Meta(max_length=64)],
                Annotated[str, Meta(max_length=512)],
            ],
            Meta(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: OutputExpiry | None = None

    def check(self) -> None:
        """Raises InvalidRequestError for an endpoint that batches do not have."""
        if self.endpoint not in URLS:
            raise InvalidRequestError(f"endpoint must be {', '.join(URLS)}, got {self.endpoint[:128]!r}", "endpoint")

    @property
    def seconds(self) -> int:
        """The completion window. Raises InvalidRequestError if it is too long."""
        found = re.fullmatch("([0-9]+)([smhd])", self.completion_window)
        assert found is not None  # by its pattern
        seconds = int(found[1]) * _UNITS[found[2]]
        if seconds > _LONGEST:
            raise InvalidRequestError(
                f"completion_window must be at most 30d, got {self.completion_window!r}", "completion_window"
            )
        return seconds
