"""How much memory models take, computed in a process of its own: the API server imports no JAX."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from jaxserve import entry
from jaxserve.config import EngineConfig
from jaxserve.server.process.engine_process import end_with_parent, watch_parent

log = logging.getLogger("jaxserve.server")


class Question(msgspec.Struct):
    """A model whose memory is asked for. `config` holds the fields of EngineConfig, `given` the bytes that the operator
    gives the model; None: what it needs."""

    config: dict[str, Any]
    given: int | None = None


class Questions(msgspec.Struct):
    """The line of JSON that the parent writes to standard input. most: bytes of each device that all models may take;
    None: what `share.total_memory` says."""

    models: list[Question]
    most: int | None = None


class Memory(msgspec.Struct):
    """The first line of the answer: the platform, and the bytes of each device that all models may take."""

    platform: str
    most: int


class Answer(msgspec.Struct):
    """A line of the answer for each model.

    Attributes:
      text: what `total` bytes consist of, in words.
      utilization: the share of a GPU's memory; 0 on CPU.
      error: why the model cannot be served; None: it can.
      too_large: because it does not fit.
    """

    total: int = 0
    pages: int = 0
    longest: int = 0
    text: str = ""
    utilization: float = 0.0
    error: str | None = None
    too_large: bool = False


def size(count: float) -> str:
    """A number of bytes for people to read."""
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"


async def ask(
    models: Sequence[tuple[EngineConfig, int | None]], most: int | None
) -> AsyncGenerator[Memory | Answer, None]:
    """Yields the memory, then an answer for each model, as they come. Raises OSError if the process fails."""
    process = await asyncio.create_subprocess_exec(
        *entry.command("jaxserve.server.models.sizing"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=entry.child_environment() | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        questions = Questions([Question(asdict(config), given) for config, given in models], most)
        process.stdin.write(msgspec.json.encode(questions) + b"\n")
        kinds: list[type[Memory] | type[Answer]] = [Memory, *[Answer] * len(models)]
        for kind in kinds:
            if not (line := await process.stdout.readline()):
                raise OSError("the process that computes the memory of models has ended; the log says why")
            yield msgspec.json.decode(line, type=kind)
    finally:
        process.stdin.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


def main() -> None:
    """Answers one line of questions."""
    end_with_parent()
    questions = msgspec.json.decode(sys.stdin.buffer.readline(), type=Questions)
    watch_parent()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print do not disturb
    from jaxserve.plan.share import TooLargeError, share_of, total_memory

    configs = [EngineConfig(**question.config) for question in questions.models]  # type: ignore[arg-type]
    platform, total = total_memory(configs[0])
    most = questions.most or int(total * configs[0].memory_utilization)
    answers.write(msgspec.json.encode(Memory(platform, most)) + b"\n")
    for config, question in zip(configs, questions.models, strict=True):
        try:
            share = share_of(config, most, question.given)
            utilization = 0.0 if platform == "cpu" else share.utilization(total)
            answer = Answer(share.total, share.pages, share.longest, share.describe(), utilization)
        except Exception as error:
            if not isinstance(error, ValueError | OSError):
                log.exception("the memory of %s could not be computed", config.model)
            answer = Answer(error=str(error) or type(error).__name__, too_large=isinstance(error, TooLargeError))
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # skips the interpreter's shutdown, which would wait for threads
