"""Answers a file of requests in the OpenAI batch format, through the handlers of the HTTP endpoints.

Each line of the input is {"custom_id", "method": "POST", "url", "body"}. Each line of the output is {"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error"}, in the order in which the requests end. A request with a
URL that a batch does not take gets an error as its answer. A killed run leaves whole lines, of which the last may be
cut short. The next run removes such a line, then answers the requests that have no answer yet.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from io import FileIO
from pathlib import Path

import msgspec
from tqdm import tqdm

from jaxserve import __version__
from jaxserve.config import EngineConfig
from jaxserve.server.batches.answers import AnswerFile, NotAnswersError, answer_line, recover
from jaxserve.server.batches.asking import Asker, Places, answer_all
from jaxserve.server.batches.lines import BatchError, BatchLine, digest_of, lines_but, read_lines
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.http.state import ServerState
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.ipc.run_engine import DEFAULT_ENGINE
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.process.app import batch_app
from jaxserve.server.process.engine_process import EngineProcess
from jaxserve.server.process.fingerprint import fingerprint
from jaxserve.server.process.supervisor import Supervisor
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import EngineDeadError

_AHEAD = 2  # requests in flight per sequence that the engine can run, so that the engine never waits for one
_ITS_MODEL = {"model": msgspec.Raw(b"null")}  # whatever model a request names


def answer_file(config: EngineConfig, source: Path, target: Path, engine_class: str = DEFAULT_ENGINE) -> int:
    """Answers all requests of `source` that `target` does not answer yet; returns the process's exit code.

    An invalid request gets its error as its answer. Raises BatchError for a file that is not a batch.
    """
    if target.resolve() == source.resolve():
        raise BatchError(f"input and output are the same file: {source}")
    asked = check_input(source)
    with open(target, "ab+", buffering=0) as output:
        done = recover_output(output, source, target, asked)
        if not (left := len(asked) - len(done)):
            print(f"all {len(asked)} requests are answered in {target}", file=sys.stderr)
            return 0
        if done:
            print(f"{len(done)} of {len(asked)} requests are answered already; {left} to go", file=sys.stderr)
        # no limit on the queue: a request that is turned away would never be answered
        config = dataclasses.replace(config, max_waiting=None, max_waiting_tokens=None, prompts_first=True)
        with EngineProcess(config, engine_class) as engine:
            try:
                asyncio.run(_answer_all(config, engine, source, output, done, left))
            except (EngineDeadError, OSError, ExceptionGroup) as error:
                if not isinstance(first := _first(error), EngineDeadError | OSError):
                    raise
                print(f"jaxserve: {first}", file=sys.stderr)
                return 1
    return 0


def model_of(source: Path) -> str:
    """The one model that all requests of a file name. Raises BatchError if they name none or several."""
    names = {msgspec.json.decode(line.body.get("model", b"null")) for line in read_lines(source)}
    if len(names) == 1 and isinstance(name := names.pop(), str):
        return name
    listed = ", ".join(sorted(map(repr, names))[:5]) or "none"
    raise BatchError(f"{source}: the requests must name one model, or --model must; they name {listed}")


def check_input(source: Path) -> set[bytes]:
    """The digests of the input's custom_ids, read before a model is loaded. Raises BatchError if one occurs twice."""
    seen: set[bytes] = set()
    for line in read_lines(source):
        if (digest := line.digest) in seen:
            raise BatchError(f"{source}: custom_id {line.custom_id!r} stands on several lines; each must be unique")
        seen.add(digest)
    return seen


def recover_output(output: FileIO, source: Path, target: Path, asked: set[bytes]) -> set[bytes]:
    """The digests of the custom_ids that the output answers. Removes a last line that a killed run left unfinished.

    Raises BatchError and leaves the file as it is if it holds anything but answers to `source`.
    """
    done: set[bytes] = set()

    def take(custom_id: str) -> None:
        if (digest := digest_of(custom_id)) not in asked:
            raise BatchError(f"{target} answers {custom_id!r}, which {source} does not ask: not its output")
        done.add(digest)

    try:
        recover(output, take)
    except NotAnswersError as error:
        raise BatchError(f"{target} is not the output of a batch: {error.found!r}") from None
    return done


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def _answer_all(
    config: EngineConfig, engine: EngineProcess, source: Path, file: FileIO, done: set[bytes], left: int
) -> None:
    """Answers the `left` requests of `source` whose digests are not in `done`."""
    client = EngineClient()
    output = AnswerFile(file)
    dummy = config.load_format == "dummy"
    settings = ServerSettings(model_names=(config.model,), access_log=False)
    state = ServerState(settings, client, Metrics(settings.model_name))
    supervisor = Supervisor(client, engine, restarts=settings.engine_restarts, watchdog=settings.watchdog_seconds)
    try:
        await client.connect(engine.socket_path, engine.runs)
        info = await client.wait_ready()
        state.tokenizer = tokenizer = await state.off_loop(
            lambda: load_tokenizer(
                info.model_folder,
                source=info.tokenizer_folder,
                placeholder=dummy,
                generation_config=config.generation_config,
                override_generation_config=config.override_generation_config,
            )
        )
        state.fingerprint = await state.off_loop(
            lambda: fingerprint(info, config, __version__, tokenizer.chat_template)
        )
        asker = Asker(batch_app(state), client, {}, _ITS_MODEL)
        places = [Places(_AHEAD * config.max_num_seqs)]
        with tqdm(total=left, desc="answering", unit="request") as bar:

            async def take(line: BatchLine, status: int, body: bytes) -> None:
                await output.append(answer_line(line.custom_id, status, body))
                bar.update()

            async def watch() -> None:
                try:
                    await supervisor.run()
                except EngineDeadError as error:
                    raise EngineDeadError(f"{error}; run the same command again to go on") from None

            async with asyncio.TaskGroup() as group:
                watching = group.create_task(watch())
                await answer_all(lines_but(source, done), asker, places, take)
                watching.cancel()
    finally:
        output.close()
        await client.close(drain=True)
        state.text_threads.executor.shutdown(wait=False, cancel_futures=True)
        if state.images is not None:
            state.images.close()
