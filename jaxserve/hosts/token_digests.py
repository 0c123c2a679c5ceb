"""Digests of the tokens that devices have sampled. Each host reads its own devices' copies of them."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

EVERY = 64  # calls that sample, between two digests


class TokenDigests:
    """Digests what `add` gets, on a thread of its own, as reading an array waits for the devices.

    found: called on this thread every EVERY calls, with the number of calls so far and the digest of all their tokens.
    failed: called once if tokens cannot be read, because their step failed on the devices.
    """

    def __init__(self, found: Callable[[int, bytes], None], failed: Callable[[str], None]):
        self._found = found
        self._failed = failed
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="digests", daemon=True).start()

    def add(self, tokens: Any) -> None:
        """Tokens as an array that the devices may still be computing."""
        self._queue.put(tokens)

    def _run(self) -> None:
        digest = hashlib.blake2b(digest_size=16)
        count = 0
        while True:
            try:
                digest.update(np.asarray(self._queue.get()).tobytes())
            except Exception as error:  # whatever the devices' runtime raises
                self._failed(f"a step failed on the devices: {error}")
                return
            count += 1
            if count % EVERY == 0:
                self._found(count, digest.digest())
