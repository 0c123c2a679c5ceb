"""Requests per second of trivially short answers with one and with several API servers, and what the processes used.

    python benchmarks/api_servers.py --counts 1,2 --seconds 10

The engine is the tests' stand-in that repeats the prompt, so that API servers and clients are all that costs anything.
A request asks for one token over a connection that stays open. Prints a line for each number of API servers: requests
per second, and the seconds of processor time per second of all API servers, of the engine and of the clients."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "server")]
BODY = json.dumps({"model": "test-model", "prompt": [50, 51], "max_tokens": 1}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
REQUEST += b"%d\r\n\r\n%b" % (len(BODY), BODY)


async def client(port: int, end: float) -> int:
    """Sends requests one after the other until `end`; returns how many were answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answered = 0
    while time.monotonic() < end:
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        answered += 1
    writer.close()
    return answered


async def load(port: int, clients: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    return sum(await asyncio.gather(*(client(port, end) for _ in range(clients))))


def processor_seconds(pid: int) -> float:
    """Of a process, from /proc (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(count: int, clients: int, seconds: float) -> dict[str, float]:
    from serving import DEMO, running_server, wait_until

    log = Path(tempfile.mkdtemp()) / "log"
    with running_server(DEMO, log, engine="ParrotEngine", api_server_count=count, access_log=False) as server:
        wait_until(lambda: log.read_text().count("ready: ") == count, 60)
        pid = server.process.pid
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        engine = next(child for child in children if "engine_process" in Path(f"/proc/{child}/cmdline").read_text())
        api_servers = [pid, *(child for child in children if child != engine)]
        asyncio.run(load(server.port, clients, 1.0))
        groups = {"API servers": api_servers, "engine": [engine], "clients": [os.getpid()]}
        before = {name: sum(map(processor_seconds, group)) for name, group in groups.items()}
        begin = time.monotonic()
        answered = asyncio.run(load(server.port, clients, seconds))
        took = time.monotonic() - begin
        used = {name: sum(map(processor_seconds, group)) for name, group in groups.items()}
    return {"requests/s": answered / took} | {name: (used[name] - before[name]) / took for name in groups}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", default="1,2", help="numbers of API servers, with commas between them")
    parser.add_argument("--clients", type=int, default=32, help="connections, each with one request at a time")
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    for count in map(int, args.counts.split(",")):
        result = measure(count, args.clients, args.seconds)
        print(f"{count} API server(s):", ", ".join(f"{name} {value:.2f}" for name, value in result.items()), flush=True)


if __name__ == "__main__":
    main()
