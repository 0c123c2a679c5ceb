"""The engines: each is started for a load, warmed up, measured and stopped, or reports why it cannot run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jaxserve import entry
from jaxserve.bench import startup
from jaxserve.bench.client import Client, run
from jaxserve.bench.prompts import Prompt
from jaxserve.bench.serve import Sender, Target, first_model, run_load
from jaxserve.bench.stats import RequestRecord
from peers.files import NoFile, write_gguf
from peers.memory import resident
from peers.model import tokens_of

HERE = Path(__file__).resolve().parent
START_SECONDS = 600.0


@dataclass(frozen=True)
class PeerLoad:
    """What an engine is asked: lists of token ids, `concurrency` at a time (the check alone).

    Attributes:
      model: the folder in Hugging Face format, beside which the same weights come to lie as GGUF; or a GGUF file.
      threads: how many an engine may use, where it has to be told.
      output_len, warmup_len, check_len: tokens asked for each of `prompts`, `warmup` and `check`.
      check: prompts whose greedy answers are compared between engines; may be empty.
      tokenizer: the folder that ours takes it from; None: the model's own.
    """

    model: Path
    threads: int
    concurrency: int
    output_len: int
    prompts: list[list[int]]
    warmup: list[list[int]]
    check: list[list[int]] = field(default_factory=list)
    warmup_len: int = 16
    check_len: int = 64
    tokenizer: Path | None = None

    @property
    def gguf(self) -> Path:
        """The file that llama.cpp reads."""
        return self.model if self.is_file else self.model.with_name(f"{self.model.name}.gguf")

    @property
    def is_file(self) -> bool:
        return self.model.suffix == ".gguf"


@dataclass
class Outcome:
    """What an engine made of a load.

    Attributes:
      check: the greedy tokens of each check prompt.
      gaps: how much likelier, in nats, each of those tokens was than the runner-up, where the engine says.
      seconds: from the start of the process to the end of the measurement.
      memory: what a server held after the load, as `memory.resident` says.
    """

    records: list[RequestRecord]
    check: list[list[int]]
    gaps: list[list[float]] = field(default_factory=list)
    versions: str = ""
    seconds: float = 0.0
    memory: dict[str, float] | None = None


class EngineFailed(RuntimeError):  # noqa: N818
    """An engine did not start, or did not answer."""


class PeerEngine(Protocol):
    """An engine, with its name in the table."""

    name: str

    def absent(self) -> str | None:
        """None if it is on this machine, else the reason why not."""

    def measure(self, load: PeerLoad) -> Outcome:
        """Raises EngineFailed."""


# Servers


@dataclass(frozen=True)
class Jaxserve:
    """Ours, over HTTP, with what its defaults are; `flags` are added to `jaxserve serve`."""

    flags: Sequence[str] = ()
    name: str = "jaxserve"

    def absent(self) -> str | None:
        return None

    def measure(self, load: PeerLoad) -> Outcome:
        port = startup.free_port()
        tokenizer = ["--tokenizer", str(load.tokenizer)] if load.tokenizer else []
        command = entry.command("jaxserve", "serve", str(load.model), "--port", str(port), *tokenizer, *self.flags)
        with _server(command, dict(os.environ), port, "/ready") as process:
            outcome = run(_drive(port, load, gaps=True))
            outcome.memory = resident(process)
        return outcome


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp's server, one slot for each request under way; its cache in `kv`: f32 as ours, or its own f16."""

    server: Path | None
    gguf_python: str | None
    flash: str = "off"
    flags: Sequence[str] = ()
    kv: str = "f32"

    @property
    def name(self) -> str:
        return "llama.cpp" + (", flash attention" if self.flash == "on" else "")

    def absent(self) -> str | None:
        if self.server is None:
            return "no path given with --llama-server"
        if not os.access(self.server, os.X_OK):
            return f"{self.server} is no program"
        return None

    def measure(self, load: PeerLoad) -> Outcome:
        if not load.is_file:
            try:
                write_gguf(load.model, load.gguf, self.gguf_python or sys.executable)
            except NoFile as error:
                raise EngineFailed(str(error)) from None
        port = startup.free_port()
        longest = max(len(p) for p in [*load.prompts, *load.check]) + max(load.output_len, load.check_len)
        slot = -(-longest // 256) * 256 if longest % 256 else longest
        settings: dict[str, Any] = {
            "-m": load.gguf,
            "--port": port,
            "-t": load.threads,
            "-tb": load.threads,
            "-np": load.concurrency,
            "-c": load.concurrency * slot,
            "-ctk": self.kv,
            "-ctv": self.kv,
            "-fa": self.flash,
            "--cache-ram": 0,  # no prompt is repeated
        }
        command = [str(self.server), *(str(part) for pair in settings.items() for part in pair), *self.flags]
        with _server(command, dict(os.environ), port, "/health") as process:
            outcome = run(_drive(port, load, gaps=False))
            outcome.memory = resident(process)
        outcome.versions = _run([str(self.server), "--version"]).stdout.split("\n")[0]
        return outcome


@contextlib.contextmanager
def _server(command: Sequence[str], env: dict[str, str], port: int, ready: str) -> Iterator[int]:
    """A server that is ready, and stopped at the end; the number of its process."""
    with startup.server_process(command, env) as (process, log):
        deadline = time.monotonic() + START_SECONDS
        while startup.status(port, ready) != 200:
            if process.poll() is not None:
                raise EngineFailed(f"the server ended before it was ready: {_end(log.text())}")
            if time.monotonic() > deadline:
                raise EngineFailed(f"the server was not ready within {START_SECONDS:g} s")
            time.sleep(0.05)
        yield process.pid


async def _drive(port: int, load: PeerLoad, *, gaps: bool) -> Outcome:
    """Warm-up, check and load on the server at `port`; `gaps` asks for those, in a form that only ours has."""
    with contextlib.closing(Client(f"http://127.0.0.1:{port}")) as client:
        target = Target(url=client.url, model=await first_model(client), ignore_eos=True)
        sender = Sender(target, client)

        async def run(prompts: Sequence[list[int]], output_len: int) -> list[RequestRecord]:
            bodies = [target.body(Prompt(prompt, output_len)) for prompt in prompts]
            clock = time.perf_counter()
            records = await run_load(
                lambda i: sender.send(bodies[i], clock, len(prompts[i])), [0.0] * len(bodies), load.concurrency
            )
            if error := next((record.error for record in records if record.error), None):
                raise EngineFailed(f"a request failed: {error}")
            return records

        await run(load.warmup, load.warmup_len)
        answers = [await _greedy(client, target, prompt, load.check_len, gaps) for prompt in load.check]
        records = await run(load.prompts, load.output_len)
    return Outcome(records, [tokens for tokens, _ in answers], [each for _, each in answers])


async def _greedy(
    client: Client, target: Target, prompt: list[int], output_len: int, gaps: bool
) -> tuple[list[int], list[float]]:
    """The greedy answer, and with `gaps` how far each token was ahead of the next, in nats."""
    body: dict[str, Any] = {"model": target.model, "prompt": prompt, "max_tokens": output_len, "temperature": 0}
    body |= {"ignore_eos": True} | ({"logprobs": 2} if gaps else {})
    response = await client.request("POST", target.path, json.dumps(body).encode())
    if response.status != 200:
        raise EngineFailed(f"HTTP {response.status}: {_end(response.body.decode(errors='replace'))}")
    choice = json.loads(response.body)["choices"][0]
    ahead = []
    for top in choice["logprobs"]["top_logprobs"] if gaps else ():
        best, second = sorted(top.values(), reverse=True)[:2]
        ahead.append(best - second)
    return tokens_of(choice["text"]), ahead


# Libraries


@dataclass(frozen=True)
class Transformers:
    """transformers in another Python, without HTTP. `kind` is static (batches) or continuous."""

    python: str | None
    kind: str

    @property
    def name(self) -> str:
        return f"transformers, {self.kind} batching"

    def absent(self) -> str | None:
        if self.python is None:
            return "no Python given with --torch-python"
        needs = "import torch; from transformers import ContinuousBatchingConfig"
        if not Path(self.python).is_file():
            return f"there is no {self.python}"
        run = _run([self.python, "-c", needs])
        return f"{self.python} cannot be used: {_end(run.stdout)}" if run.returncode else None

    def measure(self, load: PeerLoad) -> Outcome:
        if load.is_file:
            raise EngineFailed("it is not given GGUF files")
        with tempfile.TemporaryDirectory() as folder:
            request = Path(folder, "load.json")
            result = Path(folder, "result.json")
            request.write_text(json.dumps(asdict(load) | {"model": str(load.model), "tokenizer": None}))
            run = _run([str(self.python), str(HERE / "torch_engine.py"), self.kind, str(request), str(result)])
            if run.returncode or not result.is_file():
                raise EngineFailed(f"the process ended: {_end(run.stdout)}")
            document = json.loads(result.read_text())
        records = [
            RequestRecord(
                start=row["start"],
                end=row["end"],
                input_tokens=len(prompt),
                output_tokens=len(row["arrivals"]),
                arrivals=row["arrivals"],
                last=row["arrivals"][-1],
            )
            for row, prompt in zip(document["requests"], load.prompts, strict=True)
        ]
        return Outcome(records, document["check"], versions=document["versions"])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _end(text: str) -> str:
    """The last lines of an output."""
    return "\n".join(text.rstrip().splitlines()[-5:])
