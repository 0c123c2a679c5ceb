"""Which replica has the beginning of a prompt in its cache: prefix-aware routing with a bound on load. Without Ray."""

from __future__ import annotations

import hashlib
import math
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

BLOCK_BYTES = 64  # of a prompt's text as JSON: some 16 tokens, as many as a KV page has
MOST_BLOCKS = 512  # of one prompt; what follows does not matter for routing
_PLACED_BY = 8  # blocks whose digest places a new prompt
# What the keys and values of a prompt depend on, in the order in which chat templates write it.
_FIELDS = ("model", "cache_salt", "tools", "system", "instructions", "prompt", "input", "messages")


def prompt_blocks(body: bytes) -> tuple[bytes, ...]:
    """Digests of the beginnings of a request's prompt, one for each whole block of its text; () if it has none.

    Two requests share the first n digests if their prompts, models and cache salts agree in the first n blocks. The
    prompt may be text, token ids, messages or items; what cannot be read has no blocks.
    """
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ()
    if not isinstance(given, dict):
        return ()
    text = b"".join(msgspec.json.encode(given[name]) for name in _FIELDS if given.get(name) is not None)
    blocks = []
    digest = b""
    for end in range(BLOCK_BYTES, min(len(text), MOST_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        digest = hashlib.blake2b(digest + text[end - BLOCK_BYTES : end], digest_size=8).digest()
        blocks.append(digest)
    return tuple(blocks)


class PrefixTable:
    """The beginnings of recent prompts, and the names of the replicas that they went to.

    A prompt goes to the replica that has seen the longest beginning of it, the least loaded of several. A replica with
    `factor` times the mean load plus `slack` is passed over, as in consistent hashing with bounded loads
    (https://arxiv.org/abs/1608.01350). A prompt of which nobody has seen half goes to the least loaded replica: what it
    shares with others, such as a short system prompt, is soon everywhere. Of equally loaded ones a hash of the first
    blocks chooses, so that several tables agree.

    Attributes:
      factor, slack: the bound on a replica's load.
      capacity: most blocks that are remembered; the ones not seen for longest are forgotten.
    """

    def __init__(self, factor: float = 1.25, slack: int = 8, capacity: int = 2**18):
        self.factor = factor
        self.slack = slack
        self.capacity = capacity
        self._seen: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def choose(self, blocks: Sequence[bytes], loads: Mapping[str, int]) -> str:
        """The replica for a prompt. `loads`: the requests of each replica that may be chosen; not empty."""
        bound = self.factor * (sum(loads.values()) + 1) / len(loads) + self.slack
        free = {replica: load for replica, load in loads.items() if load + 1 <= math.ceil(bound)}
        for block in reversed(blocks[(len(blocks) - 1) // 2 :]):
            if holders := [replica for replica in self._seen.get(block, ()) if replica in free]:
                return min(holders, key=free.__getitem__)
        key = blocks[min(len(blocks), _PLACED_BY) - 1] if blocks else random.randbytes(8)
        return min(free, key=lambda replica: (free[replica], hashlib.blake2b(key + replica.encode()).digest()))

    def note(self, blocks: Sequence[bytes], replica: str) -> None:
        """The prompt with these blocks went to `replica`."""
        for block in reversed(blocks):  # the first block is the last to be forgotten
            others = (other for other in self._seen.pop(block, ()) if other != replica)
            self._seen[block] = (replica, *others)
        while len(self._seen) > self.capacity:
            self._seen.popitem(last=False)

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        for block, replicas in list(self._seen.items()):
            if replica in replicas:
                if left := tuple(other for other in replicas if other != replica):
                    self._seen[block] = left
                else:
                    del self._seen[block]

    def __len__(self) -> int:
        return len(self._seen)
