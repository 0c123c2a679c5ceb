"""API keys: who may call, and how many calls of theirs may run at a time."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers


@dataclass(frozen=True)
class ApiKey:
    """A key, a name for messages, how many completions may run under it at a time (None: any number), and the lowest
    priority that its requests may have; lower ones are served first."""

    key: str
    name: str = ""
    max_concurrency: int | None = None
    min_priority: int = 0

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.key.encode()).digest()


def read_keys(path: str | Path) -> list[ApiKey]:
    """Keys of a file with lines `key [name] [max-concurrency] [min-priority]`; the third may be `-` for any number.
    Blank lines and those that begin with # are skipped.

    Raises ValueError, naming the line but not the key, for anything else, and OSError.
    """
    keys = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        key, name, limit, priority = (*words, *("", "-", "0")[len(words) - 1 :])[:4]
        if len(words) > 4 or not re.fullmatch(r"-|0*[1-9]\d{0,8}", limit) or not re.fullmatch(r"-?\d{1,9}", priority):
            raise ValueError(
                f"{path}:{number}: a line must be 'key [name] [max-concurrency] [min-priority]', the third at least 1 "
                "or -, the last a number"
            )
        keys.append(ApiKey(key, name, None if limit == "-" else int(limit), int(priority)))
    if not keys:
        raise ValueError(f"{path} holds no API key")
    return keys


def given_key(headers: Headers) -> str | None:
    """The key that a request brings, as a bearer or, as Anthropic's clients send it, in x-api-key."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


def find_key(keys: Sequence[ApiKey], headers: Headers) -> ApiKey | None:
    """The one of `keys` that a request brings. All are compared, by digests, so that the time tells nothing of any."""
    digest = hashlib.sha256((given_key(headers) or "").encode()).digest()
    found = [key for key in keys if hmac.compare_digest(digest, key.digest)]
    return found[0] if found else None
