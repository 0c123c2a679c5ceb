"""Files of requests in the OpenAI batch format: in shards, and the answers of all shards in one file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path


class ShardError(ValueError):
    """Files that do not fit together. The message names the file and the request."""


def split(requests: Path, shards: Sequence[Path]) -> None:
    """Deals the lines of a file out to shards in turns. Raises ShardError if two lines have one custom_id, or one has
    none: their answers could not be told apart."""
    lines = [line for line in requests.read_text().splitlines() if line.strip()]
    _ids(requests, lines)
    for i, shard in enumerate(shards):
        shard.write_text("".join(line + "\n" for line in lines[i :: len(shards)]))


def merge(requests: Path, answers: Iterable[Path], output: Path) -> list[str]:
    """Writes the answers in the order of the requests, and returns the custom_ids that have none yet.

    A shard's last line may be cut off, because its VM was lost or still writes; it does not count. Raises ShardError
    for answers to requests that the file does not have, and for a request with two different answers.
    """
    wanted = _ids(requests, [line for line in requests.read_text().splitlines() if line.strip()])
    found: dict[str, str] = {}
    for path in answers:
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith("\n"):
                continue
            name = json.loads(line)["custom_id"]
            if name not in wanted:
                raise ShardError(f"{path} answers {name!r}, which {requests} does not ask")
            if found.setdefault(name, line) != line:
                raise ShardError(f"{path} has another answer to {name!r} than a file before it")
    whole = output.with_name(output.name + ".part")
    whole.write_text("".join(found[name] for name in wanted if name in found))
    whole.replace(output)
    return [name for name in wanted if name not in found]


def _ids(path: Path, lines: Sequence[str]) -> dict[str, None]:
    """The custom_ids of a file's lines, in their order."""
    ids: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        try:
            name = json.loads(line)["custom_id"]
        except (ValueError, KeyError, TypeError):
            raise ShardError(f"{path}, line {number}: no JSON object with a custom_id") from None
        if name in ids:
            raise ShardError(f"{path}, line {number}: custom_id {name!r} was there before")
        ids[name] = None
    return ids
