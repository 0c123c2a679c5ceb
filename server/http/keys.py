"""API keys: who may call, with how many completions at a time and at which priority."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line reads the type of a key without loading the server's libraries
    from starlette.datastructures import Headers

log = logging.getLogger("jaxserve.server")


@dataclass(frozen=True)
class ApiKey:
    """One API key.

    Attributes:
      name: stands for the key in the access log.
      max_concurrency: most completions that may run under the key at a time; None: no limit.
      min_priority: lowest priority number that its requests may have; lower numbers are served first.
      models: names of the models that it may use; None: all.

    Raises ValueError for an empty key, which every client could send.
    """

    key: str = field(repr=False)
    name: str = ""
    max_concurrency: int | None = None
    min_priority: int = 0
    models: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.key.strip():
            raise ValueError("a key is empty, which would let everybody in")

    def may_use(self, names: Iterable[str]) -> bool:
        """Whether it may use a model that has these names."""
        return self.models is None or not set(self.models).isdisjoint(names)

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.key.encode()).digest()


def read_keys(path: str | Path) -> list[ApiKey]:
    """The keys in a file of lines `key [name] [max-concurrency] [min-priority] [models]`; max-concurrency `-` means no
    limit, models are separated by commas. Blank lines and lines that begin with # are skipped.

    Raises ValueError for any other line, naming its number but not the key, and OSError.
    """
    keys = []
    for number, line in enumerate(_read_secret(path).splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        key, name, limit, priority, models = (*words, *("", "-", "0", "")[len(words) - 1 :])[:5]
        names = tuple(filter(None, models.split(","))) if models not in ("", "-") else None
        numbers = re.fullmatch(r"-|0*[1-9]\d{0,8}", limit) and re.fullmatch(r"-?\d{1,9}", priority)
        if len(words) > 5 or names == () or not numbers:
            raise ValueError(
                f"{path}:{number}: a line must be 'key [name] [max-concurrency] [min-priority] [models]', the third at "
                "least 1 or -, the fourth a number, the last names with commas between them"
            )
        keys.append(ApiKey(key, name, None if limit == "-" else int(limit), int(priority), names))
    if not keys:
        raise ValueError(f"{path} holds no API key")
    return keys


def read_key(path: str | Path) -> str:
    """The one key that a file holds. Raises ValueError if it does not hold exactly one, and OSError."""
    words = _read_secret(path).split()
    if len(words) != 1:
        raise ValueError(f"{path} must hold one key, and holds {len(words)}")
    return words[0]


def _read_secret(path: str | Path) -> str:
    path = Path(path)
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("%s holds keys, and other users of this machine may open it; `chmod 600` keeps them out", path)
    return path.read_text(encoding="utf-8")


def given_key(headers: Headers) -> str | None:
    """The key in a request's headers: a bearer token, or x-api-key, which Anthropic's clients send."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


def find_key(keys: Sequence[ApiKey], headers: Headers) -> ApiKey | None:
    """The member of `keys` that a request carries. Compares digests with all of them, so that timing reveals nothing
    about a key."""
    digest = hashlib.sha256((given_key(headers) or "").encode()).digest()
    found = [key for key in keys if hmac.compare_digest(digest, key.digest)]
    return found[0] if found else None
