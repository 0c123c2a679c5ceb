"""What `jax.experimental.transfer` does when something goes wrong, on CPU: see docs/disaggregation.md.

python benchmarks/transfer_faults.py [FAULT ...] [--json benchmarks/results/transfer-faults.json]

Each fault happens to processes of its own on 127.0.0.1: one offers arrays, one pulls them. Prints what was seen, as
JSON; --json puts it into a file under the version of JAX, beside what other versions did. Takes about two minutes, and
needs nothing but JAX and Linux.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import datetime
import json
import os
import queue
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer

BLOCKED_SECONDS = 40.0  # without an answer
LIMIT_SECONDS = 10.0
LIMITS = "none", "without a zone", "with a zone"  # of a time limit, which the interface takes as a datetime
MIB = 2**20
STRANGERS = 32  # connections, each of which might get the number that is asked for
UNKNOWN = 999  # a number under which nothing is offered


# The processes that use JAX


def memory(field: str = "VmRSS") -> int:
    """MiB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) // 1024


def most_from_now() -> int:
    """MiB of this process now. VmHWM will be the most from now on."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory()


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def start_server(raw: bool) -> Any:
    client = jax.devices()[0].client
    return transfer.start_transfer_server(client, "127.0.0.1:0", ["127.0.0.1:0"], use_raw_buffers=raw)


def deadline(kind: str) -> dict[str, datetime.datetime]:
    """A time limit of LIMIT_SECONDS, or none, as an argument of `pull` and `await_pull`."""
    if kind == "none":
        return {}
    now = datetime.datetime.now(datetime.UTC if kind == "with a zone" else None)
    return {"timeout": now + datetime.timedelta(seconds=LIMIT_SECONDS)}


def offer(uuid: int, mib: float = 1, count: int = 1, limit: str = "none", raw: bool = False) -> None:
    """Offers `count` arrays, under `uuid` and the numbers after it, and forgets them."""
    server = start_server(raw)
    jnp.arange(8, dtype=jnp.int32).block_until_ready()  # XLA's own memory
    before = memory()
    for i in range(count):
        values = jnp.arange(int(mib * MIB / 4), dtype=jnp.int32).block_until_ready()
        server.await_pull(uuid + i, [values], **deadline(limit))
    del values
    after = most_from_now()
    say(address=server.address())
    for line in sys.stdin:
        if line == "offer more\n":
            server.await_pull(uuid + count, [jnp.zeros(1)])
            time.sleep(1.0)
        say(grew=memory() - before, most=memory("VmHWM") - after)


def pull(address: str, uuid: int, mib: float = 1, limit: str = "none", raw: bool = False) -> None:
    connection = start_server(raw).connect(address)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    kind = jax.ShapeDtypeStruct((int(mib * MIB / 4),), jnp.int32, sharding=sharding)
    before = most_from_now()
    say(connected=True)
    start = time.perf_counter()
    try:
        (values,) = connection.pull(uuid, [kind], **deadline(limit))
        values.block_until_ready()
        seconds = time.perf_counter() - start
        most = memory("VmHWM") - before
        say(right=bool((np.asarray(values) == np.arange(len(values))).all()), seconds=round(seconds, 2), most=most)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}"[:160], seconds=round(time.perf_counter() - start, 2))
    sys.stdin.readline()


# The processes seen from here


class Process:
    def __init__(self, role: Callable[..., None], **options: Any):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--as", role.__name__, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=lambda: [self._lines.put(line) for line in self.process.stdout], daemon=True).start()

    def hear(self, seconds: float = 60.0) -> dict[str, Any]:
        """What it says next, or how it ended, or that it is blocked."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                return json.loads(self._lines.get(timeout=0.1))
            if (code := self.process.poll()) is not None and self._lines.empty():
                return {"ended": signal.Signals(-code).name if code < 0 else f"exit status {code}"}
        return {"blocked_for_seconds": seconds}

    def ask(self, what: str = "memory") -> dict[str, Any]:
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Processes(contextlib.ExitStack):
    """Ends the processes that it started."""

    def start(self, role: Callable[..., None], **options: Any) -> Process:
        process = Process(role, **options)
        self.callback(process.kill)
        return process

    def offer(self, uuid: int, **options: Any) -> tuple[Process, str]:
        process = self.start(offer, uuid=uuid, **options)
        return process, process.hear()["address"]

    def pull(self, address: str, uuid: int, **options: Any) -> Process:
        """A process that has connected."""
        process = self.start(pull, address=address, uuid=uuid, **options)
        process.hear()
        return process


def frame(message: bytes) -> bytes:
    return len(message).to_bytes(4, "little") + message


def receive(connection: socket.socket, size: int) -> bytes:
    connection.settimeout(5.0)
    data = bytearray()
    with contextlib.suppress(TimeoutError):
        while len(data) < size and (part := connection.recv(2**16)):
            data += part
    return bytes(data)


def tcp(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 10.0)


# The faults


def copies(run: Processes) -> dict[str, Any]:
    """No fault: 512 MiB are pulled. MiB beside the array that both ends used at most, without and with raw buffers."""
    seen = {}
    for raw in (False, True):
        server, address = run.offer(7, mib=512, raw=raw)
        heard = run.pull(address, 7, mib=512, raw=raw).hear()
        beside = {"offering": server.ask()["most"], "pulling": heard["most"] - 512}
        rate = round(512 * MIB / 1e6 / heard["seconds"])
        seen[f"use_raw_buffers={raw}"] = {"right": heard["right"], "mb_per_second": rate, **beside}
    return seen


def lost_peer(run: Processes) -> dict[str, Any]:
    """The offering process is killed; what the pulling one does, by when that happens."""
    seen = {}
    server, address = run.offer(7)
    server.kill()
    seen["before the control connection"] = run.pull(address, 7).hear(BLOCKED_SECONDS)

    server, address = run.offer(7)
    with socket.create_server(("127.0.0.1", 0)) as relay:
        puller = run.start(pull, address=f"127.0.0.1:{relay.getsockname()[1]}", uuid=7)
        near, _ = relay.accept()
        with near, tcp(address) as far:
            far.sendall(near.recv(4096))
            answer = far.recv(4096)
            server.kill()
            near.sendall(answer)  # names the port for the data, where nobody listens any more
            puller.hear()
            seen["between the control and the data connection"] = puller.hear(BLOCKED_SECONDS)

    server, address = run.offer(7)
    puller = run.pull(address, UNKNOWN)
    time.sleep(2)
    server.kill()
    seen["while it waits for data"] = puller.hear(BLOCKED_SECONDS)
    return seen


def stranger(run: Processes) -> dict[str, Any]:
    """A process that does not know the random number of an offer reads its data, instead of the process that pulls it.

    Its control connection asks for nothing but a port for data, and is told the number of the next data connection. The
    victim's has the number after it. One silent data connection holds up the whole server, so that the stranger's
    connections come before the victim's.
    """
    uuid = secrets.randbits(63)
    mib = 0.5
    _, address = run.offer(uuid, mib=mib)
    with tcp(address) as control, contextlib.ExitStack() as stack:
        control.sendall(frame(b"\x1a\x00"))  # Protocol Buffers: field 3, empty: asks for a place for data
        found = re.search(rb"([0-9.:]+)\x1a\x01(.)", control.recv(4096), re.DOTALL)
        data_address = found[1].decode()
        number = found[2][0]
        silent, *others = (stack.enter_context(tcp(data_address)) for _ in range(1 + STRANGERS))
        for one in others:
            one.sendall((number + 1).to_bytes(8, "little"))
        victim = run.pull(address, uuid, mib=mib)
        held_up = victim.hear(5)
        silent.close()
        expected = array.array("i", range(int(mib * MIB / 4))).tobytes()
        read = []
        for one in others:
            with contextlib.suppress(ConnectionError):
                read.append(receive(one, len(expected)))
        return {
            "number of the first data connection": number,
            "pull while a silent data connection is open": held_up,
            "strangers with the data": sum(data == expected for data in read),
            "pull": victim.hear(10),
        }


def zero_bytes(run: Processes) -> dict[str, Any]:
    """Four zero bytes, an empty message, are sent to the port of the offering process."""
    server, address = run.offer(7)
    with tcp(address) as connection:
        connection.sendall(frame(b""))
        return {"offering": server.hear(10)}


def time_limits(run: Processes) -> dict[str, Any]:
    """Pulls of what is not offered, with a time limit of ten seconds and without; then a pull of something else."""
    _, address = run.offer(7)
    pullers = {f"limit: {kind}": run.pull(address, UNKNOWN, limit=kind) for kind in LIMITS}
    seen = {}
    with ThreadPoolExecutor(len(pullers)) as pool:
        for when, seconds in (("by itself", BLOCKED_SECONDS), ("after another pull", 5.0)):
            heard = pool.map(lambda puller, seconds=seconds: puller.hear(seconds), pullers.values())
            seen[when] = dict(zip(pullers, heard, strict=True))
            run.pull(address, 7)
    return seen


def memory_kept(run: Processes) -> dict[str, Any]:
    """MiB more that a process has 15 s after four offers of 128 MiB, to which it keeps no reference; and then
    after another offer."""
    servers = {f"not pulled, limit: {kind}": run.offer(7, mib=128, count=4, limit=kind)[0] for kind in LIMITS}
    servers["pulled"], address = run.offer(7, mib=128, count=4)
    for i in range(4):
        run.pull(address, 7 + i, mib=128).hear()
    time.sleep(15)
    orders = {"by itself": "memory", "after another offer": "offer more"}
    return {when: {name: server.ask(what)["grew"] for name, server in servers.items()} for when, what in orders.items()}


ROLES = {role.__name__: role for role in (offer, pull)}
FAULTS = {fault.__name__: fault for fault in (copies, lost_peer, stranger, zero_bytes, time_limits, memory_kept)}


def main() -> None:
    if sys.argv[1:2] == ["--as"]:
        ROLES[sys.argv[2]](**json.loads(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seen = {}
    for name in args.faults or FAULTS:
        with Processes() as run:
            seen[name] = {"tried": " ".join(FAULTS[name].__doc__.split("\n\n")[0].split()), "seen": FAULTS[name](run)}
        print(json.dumps({name: seen[name]}, indent=1), flush=True)
    if args.json:
        kept = json.loads(args.json.read_text()) if args.json.exists() else {}
        kept[f"jax {jax.__version__}"] = seen
        args.json.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
