"""Bytes per second of KV pages between a prefill and a decode server over 127.0.0.1, without engines.

python benchmarks/page_link.py [--pages 256] [--rounds 5]

A process sends pages of random bytes as a prefill server does, through `PageListener`; this one receives them through
`PrefillServer` and copies them to their places. Pages are those of a Llama of 8 billion parameters: 16 tokens, 2 MiB in
bfloat16, four to a frame. Prints the median and best rate, and the processor time of each end for a GB.
"""

from __future__ import annotations

import argparse
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np

from jaxserve.hosts.channel import MAX_FRAME
from jaxserve.roles import messages
from jaxserve.roles.messages import KEY_BYTES
from jaxserve.roles.page_listener import Contents, Export, PageListener, listen
from jaxserve.roles.prefill_server import PrefillServer, Transfer

SECRET = b"a secret of the benchmark"
LAYERS = 32  # of a page
SHAPE = (2, 8, 16, 128)  # of a page
FRAME = 4  # pages
PAGE_BYTES = 2 * LAYERS * int(np.prod(SHAPE))


def keys(count: int) -> list[bytes]:
    return [i.to_bytes(KEY_BYTES, "little") for i in range(count)]


def send(address: str) -> None:
    """Serves until it is killed; the contents are the same for each frame."""
    pages = np.random.default_rng(0).integers(0, 2**16, (FRAME, LAYERS, *SHAPE), np.uint16)

    def begin(export: Export) -> None:
        count = len(export.ask.wanted) // 4
        for at in range(0, count, FRAME):
            places = list(range(at, min(at + FRAME, count)))
            export.put(Contents(places, b"".join(keys(count)[at : at + FRAME]), [pages]))
        export.end()

    PageListener(listen(address), SECRET, {}, begin, lambda: None, lambda: 0, MAX_FRAME)
    for _ in sys.stdin:
        print(cpu_seconds(), flush=True)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def receive(server: PrefillServer, memory: np.ndarray, woken: threading.Event) -> float:
    """Receives pages for all places of `memory`. Returns seconds."""

    def store(place: int, data: memoryview) -> None:
        memory[place] = np.frombuffer(data, memory.dtype).reshape(memory.shape[1:])

    places: Sequence[int] = range(len(memory))
    ask = messages.Ask(tokens=b"", wanted=np.arange(len(memory), dtype=np.int32).tobytes(), page_hashes=b"")
    transfer = Transfer(ask, keys(len(memory)), places, store, PAGE_BYTES, 60.0)
    start = time.perf_counter()
    server.submit(transfer)
    while not transfer.over:
        woken.wait(0.01)
        woken.clear()
    assert transfer.error is None, transfer.error
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--listen", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.listen:
        send(args.listen)
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    sender = subprocess.Popen(
        [sys.executable, __file__, f"--listen={address}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def both() -> np.ndarray:
        """Processor time so far."""
        print(file=sender.stdin, flush=True)
        return np.asarray([float(sender.stdout.readline()), cpu_seconds()])

    try:
        woken = threading.Event()
        before = both()  # it listens
        server = PrefillServer(address, SECRET, {}, woken.set)
        memory = np.ones((args.pages, LAYERS, *SHAPE), np.uint16)
        receive(server, memory, woken)
        before = both()
        rates = memory.nbytes / 1e6 / np.asarray([receive(server, memory, woken) for _ in range(args.rounds)])
        seconds = (both() - before) / (memory.nbytes * args.rounds / 1e9)
    finally:
        sender.kill()
        sender.wait()
    print(f"{np.median(rates):.0f} MB/s, at best {rates.max():.0f}; seconds of a processor for a GB: "
          f"sending {seconds[0]:.2f}, receiving {seconds[1]:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
