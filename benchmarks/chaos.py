"""Kills and stops a server's processes, and fills a batch's disk, repeatedly and under load.

  python benchmarks/chaos.py                   50 rounds, and one in which the engine is stopped for three minutes
  python benchmarks/chaos.py --rounds 4 --no-long

It starts `jaxserve serve demo` with clients that never pause, and restarts it when it ends, as systemd would.
Each round does one thing: it kills the engine (SIGKILL), kills the API server, stops the engine (SIGSTOP), or answers a
batch file onto a disk that becomes full and then has room again. The expected completions are computed beforehand by
the engine in this process.

No accepted request may be lost silently: each answer is exact, or an error that asks to retry (503 with Retry-After, or
an error in the stream), or a broken connection if the API server was killed. A retry gets the exact answer. After each
round nothing may run or wait, no KV page may be in use, and there must be one API server, one engine and one folder of
temporary files. Prints a table in Markdown; --json FILE keeps the figures. Exits with 1 if any check failed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from abuse_client import Case, make_cases
from serving import ROOT, Server

from jaxserve.bench import startup
from jaxserve.bench.client import Client, HTTPError, run
from jaxserve.config import EngineConfig

CONFIG = EngineConfig(model="demo", max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1024, kv_pages=1024)
KINDS = ("engine killed", "front killed", "engine stopped", "full disk")
ORDER = [*KINDS[:3], *KINDS[:3], *KINDS]  # order of the rounds, repeated
PATIENCE = 300.0  # seconds after which a request counts as hanging


@dataclass
class Row:
    """The results of the rounds of one kind. `bad` must be empty. Seconds are from the strike to the first exact answer
    to a request that was sent after it."""

    kind: str
    rounds: int = 0
    good: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    recovery: list[float] = field(default_factory=list)
    pages: float = 0.0


class Service:
    """`jaxserve serve demo`, restarted when it ends, with a separate folder for temporary files."""

    def __init__(self, folder: Path, flags: Sequence[str]):
        self.port = startup.free_port()
        self.starts = 0
        self.stopping = False
        self.folder = folder
        address = ["--port", str(self.port), "--forbid-compile", "--no-access-log", "--engine-restarts", "1000"]
        self._command = [sys.executable, "-m", "jaxserve", "serve", "demo", *address, *startup.engine_flags(CONFIG)]
        self._command += flags
        self._env = environment() | {"TMPDIR": str(folder)}
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.process = subprocess.Popen(self._command, env=self._env, stdout=subprocess.DEVNULL)

    async def keep(self) -> None:
        """Restarts the server whenever it has ended."""
        while not self.stopping:
            if self.process.poll() is not None:
                self.start()
            await asyncio.sleep(0.1)

    def engines(self) -> list[int]:
        """The process ids of the API server's children."""
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
            return [int(pid) for pid in text.split()]
        return []

    async def until_ready(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while await asyncio.to_thread(startup.status, self.port, "/ready") != 200:
                await asyncio.sleep(0.1)

    def stop(self) -> int:
        self.stopping = True
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Load:
    """Clients that send requests without pause while `may_go` is set."""

    def __init__(self, service: Service, cases: Sequence[Case]):
        self._service, self._cases = service, itertools.cycle(cases)
        self.row = Row("")
        self.may_go = asyncio.Event()
        self.num_running = 0
        self.exact: list[tuple[float, float]] = []  # times of each exact answer of the round: sent, received

    async def work(self, client: Client) -> None:
        while True:
            await self.may_go.wait()
            self.num_running += 1
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._insist(client, next(self._cases))
            except TimeoutError:
                self.row.bad["never answered"] += 1
            finally:
                self.num_running -= 1

    async def _insist(self, client: Client, case: Case) -> None:
        """Retries until there is an exact answer."""
        while True:
            sent = time.perf_counter()
            starts = self._service.starts
            outcome = await self._ask(client, case)
            if outcome == "exact":
                self.exact.append((sent, time.perf_counter()))
                self.row.good["exact"] += 1
                return
            fine = outcome.startswith("told") or outcome == "not there"  # the request was not accepted
            fine = fine or (outcome.startswith("broken") and await self._api_server_ends(starts))
            (self.row.good if fine else self.row.bad)[outcome] += 1
            await asyncio.sleep(0.1)

    async def _api_server_ends(self, starts: int) -> bool:
        """Whether the API server of start number `starts` has ended, or ends within seconds: its connections close
        before its parent is notified."""
        for _ in range(100):
            if self._service.starts != starts or self._service.process.poll() is not None:
                return True
            if await asyncio.to_thread(startup.status, self._service.port, "/health") is None:
                return True  # the API server is not running
            await asyncio.sleep(0.1)
        return False

    async def _ask(self, client: Client, case: Case) -> str:
        events: list[bytes] = []
        stream = random.random() < 0.5
        try:
            body = case.body(stream=stream)
            answer = await client.request("POST", "/v1/completions", body, lambda at, data: events.append(data))
        except HTTPError as error:
            return "not there" if str(error).startswith("cannot connect") else "broken: cut off"
        except OSError as error:
            return f"broken: {type(error).__name__}"
        if answer.status == 503:
            return "told: 503" if "retry-after" in answer.headers else "503 without Retry-After"
        if answer.status != 200:
            return f"{answer.status}"
        if not stream:
            return "exact" if json.loads(answer.body)["choices"][0]["text"] == case.text else "another text"
        if not events or events[-1] != b"[DONE]":
            return "silently cut off"
        chunks = [json.loads(event) for event in events[:-1]]
        if chunks and "error" in chunks[-1]:
            return "told: an error in the stream" if "again" in chunks[-1]["error"]["message"] else "another error"
        return "exact" if "".join(chunk["choices"][0]["text"] for chunk in chunks) == case.text else "another text"


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


async def strike(kind: str, service: Service) -> None:
    """Kills or stops the process that `kind` names."""
    match kind:
        case "front killed":
            service.process.kill()
        case "engine killed":
            os.kill(service.engines()[0], signal.SIGKILL)
        case "engine stopped":
            os.kill(service.engines()[0], signal.SIGSTOP)


async def blow(kind: str, service: Service, load: Load) -> None:
    """One round: strikes under load, and waits until every client has an answer to a later request."""
    row = load.row
    load.exact.clear()
    await asyncio.sleep(random.uniform(0.5, 2.0))
    now = time.perf_counter()
    await strike(kind, service)
    async with asyncio.timeout(PATIENCE):
        while not (after := [came for sent, came in load.exact if sent > now]):
            await asyncio.sleep(0.05)
    row.recovery.append(min(after) - now)


async def settle(service: Service, load: Load, server: Server) -> None:
    """Lets every client finish its request; then checks that the server is idle."""
    row = load.row
    load.may_go.clear()
    async with asyncio.timeout(PATIENCE):
        while load.num_running:
            await asyncio.sleep(0.05)
        await server.idle()
    pages = await server.metric("kv_cache_usage_perc")
    row.pages = max(row.pages, pages)
    if pages:
        row.bad["pages in use"] += 1
    if len(engines := service.engines()) != 1:
        row.bad[f"{len(engines)} engines"] += 1
    if len(folders := list(service.folder.glob("jaxserve-*"))) != 1:
        row.bad[f"{len(folders)} folders"] += 1
    load.may_go.set()


# The disk.


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """Mounts a file system of `size` bytes at `folder`; yields False if this user may not."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


async def full_disk(load: Load, cases: Sequence[Case]) -> None:
    """A batch whose output does not fit at first, and then does: each request is answered exactly once."""
    row = load.row
    size = 16 * 2**10
    lines = {
        f"{i}": (case, {"model": "demo", "prompt": case.prompt, "max_tokens": case.max_tokens, "temperature": 0})
        for i, case in enumerate(itertools.islice(itertools.cycle(cases), 60))
    }
    with tempfile.TemporaryDirectory() as base:
        disk = Path(base, "disk")
        source = Path(base, "in.jsonl")
        disk.mkdir()
        text = [
            json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})
            for name, (_, body) in lines.items()
        ]
        source.write_text("\n".join(text) + "\n")
        with small_disk(disk, size) as mounted:
            target = disk / "out.jsonl"
            first, message = await _batch(source, target, None if mounted else size)
            now = time.perf_counter()
            kept = target.read_bytes().count(b"\n")
            expected = "No space left" if mounted else "File too large"
            if first != 1 or expected not in message or "Traceback" in message or not 0 < kept < len(lines):
                row.bad[f"exit code {first} of a full disk"] += 1
                print(message, file=sys.stderr)
            if mounted:
                subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
            second, message = await _batch(source, target, None)
            row.recovery.append(time.perf_counter() - now)
            answers = [json.loads(line) for line in target.read_bytes().splitlines()]
        said = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in answers}
        if second != 0 or len(answers) != len(lines):
            row.bad[f"exit code {second}, {len(answers)} answers"] += 1
        for name, (case, _) in lines.items():
            exact = said.get(name) == case.text
            (row.good if exact else row.bad)["batch: exact" if exact else "batch: another text, or none"] += 1


async def _batch(source: Path, target: Path, limit: int | None) -> tuple[int, str]:
    """Runs `jaxserve batch`; `limit` is the longest file in bytes that it may write."""

    def work() -> tuple[int, str]:
        command = [sys.executable, "-m", "jaxserve", "batch", str(source), str(target), "--model", "demo"]
        limits = None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        flags = startup.engine_flags(CONFIG)
        done = subprocess.run([*command, *flags], env=environment(), capture_output=True, text=True, preexec_fn=limits)
        return done.returncode, done.stderr

    return await asyncio.to_thread(work)


# All rounds.


async def scenario(args: argparse.Namespace, cases: Sequence[Case], folder: Path) -> list[Row]:
    service = Service(folder, ["--watchdog-seconds", str(args.watchdog_seconds)])
    keeper = asyncio.create_task(service.keep())
    rows = {kind: Row(kind) for kind in KINDS}
    load = Load(service, cases)
    try:
        await service.until_ready()
        with contextlib.closing(Client(f"http://127.0.0.1:{service.port}")) as client:
            workers = [asyncio.create_task(load.work(client)) for _ in range(args.clients)]
            server = Server(client, "demo", None, None)  # type: ignore[arg-type]
            load.may_go.set()
            for i in range(args.rounds):
                kind = ORDER[i % len(ORDER)] if args.rounds > len(KINDS) else KINDS[i]
                load.row = row = rows[kind]
                row.rounds += 1
                await (full_disk(load, cases) if kind == "full disk" else blow(kind, service, load))
                await settle(service, load, server)
                print(f"{i + 1}: {kind}, {row.recovery[-1]:.1f} s, {dict(row.bad) or 'fine'}", file=sys.stderr)
            for worker in workers:
                worker.cancel()
    finally:
        keeper.cancel()
        if code := service.stop():
            print(f"the server exited with {code}", file=sys.stderr)
            rows[KINDS[0]].bad[f"exit code {code}"] += 1
    if left := list(folder.iterdir()):
        rows[KINDS[0]].bad[f"{len(left)} folders left"] += 1
    return [row for row in rows.values() if row.rounds]


async def long_stop(args: argparse.Namespace, cases: Sequence[Case], folder: Path) -> list[Row]:
    """One round with the default watchdog, and an engine that is stopped for three minutes."""
    service = Service(folder, [])
    keeper = asyncio.create_task(service.keep())
    load = Load(service, cases)
    load.row = row = Row("engine stopped, watchdog of 120 s", 1)
    try:
        await service.until_ready()
        with contextlib.closing(Client(f"http://127.0.0.1:{service.port}")) as client:
            workers = [asyncio.create_task(load.work(client)) for _ in range(args.clients)]
            load.may_go.set()
            (engine,) = service.engines()
            stopped = time.perf_counter()
            await blow("engine stopped", service, load)
            await asyncio.sleep(max(180 - (time.perf_counter() - stopped), 0))
            with contextlib.suppress(ProcessLookupError):  # expected: the watchdog has ended it
                os.kill(engine, signal.SIGCONT)
                row.bad["the engine was left"] += 1
            await settle(service, load, Server(client, "demo", None, None))  # type: ignore[arg-type]
            for worker in workers:
                worker.cancel()
    finally:
        keeper.cancel()
        service.stop()
    return [row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--watchdog-seconds", type=float, default=8.0, help="default: %(default)s")
    parser.add_argument("--no-long", dest="long", action="store_false", help="not the round of three minutes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    random.seed(0)
    cases = make_cases(CONFIG, 48)
    rows = []
    for part in (scenario, *([long_stop] if args.long else [])):
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            rows += run(part(args, cases, Path(folder)))
    print("| what | rounds | outcomes | seconds to the first right answer: median, most | pages at the end |")
    print("|---|---|---|---|---|")
    for row in rows:
        outcomes = ", ".join(f"{count:,} {what}" for what, count in sorted((row.good + row.bad).items()))
        times = sorted(row.recovery)
        middle = times[len(times) // 2]
        most = times[-1]
        print(f"| {row.kind} | {row.rounds} | {outcomes} | {middle:.1f}, {most:.1f} | {row.pages:g} |")
    if args.json:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=1))
    sys.exit(1 if any(row.bad for row in rows) else 0)


if __name__ == "__main__":
    main()
