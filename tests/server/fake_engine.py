"""Stand-ins for the engine, chosen by `engine_class`: they repeat the prompt, token after token, without a model."""

from __future__ import annotations

import json
import logging
import os
import time
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import msgspec

from jaxserve.adapters.registry import Registry
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.scheduling.block_manager import hash_pages
from jaxserve.scheduling.engine_stats import EngineStats
from jaxserve.scheduling.page_snapshot import PoolSnapshot
from jaxserve.server.chat.generation import LONG_PROMPT
from jaxserve.types import InvalidRequestError, QueueFullError, Request, SequenceUpdate, StepOutput, TokenLogprob


class ParrotEngine:
    """Completion i of a prompt p continues with p[0], p[1], …, p[0], … and then stops by its max_tokens or stop tokens.

    Every token has log-probability -0.5 and the alternatives 10 (-0.25), the token itself (-0.5), 11 (-inf).
    """

    step_seconds = 0.0
    compiling = False

    def __init__(self, config: EngineConfig):
        self.model_folder = Path(config.model)
        path = self.model_folder / "config.json"
        self.vocab_size = json.loads(path.read_text())["vocab_size"] if path.is_file() else 1000
        self.max_model_len = config.max_model_len or 256
        self.eos_token_ids = (0, 2)
        self.page_size = config.page_size or 16
        self._config = config
        self._running: dict[tuple[str, int], tuple[Request, int]] = {}
        self._paused: set[str] = set()
        self._stats = EngineStats(pages_total=100)

    @classmethod
    def load(cls, config: EngineConfig):
        return cls(config)

    def compile(self) -> None:
        pass

    def add_request(self, request: Request) -> None:
        if len(request.prompt_token_ids) >= self.max_model_len:
            raise InvalidRequestError("too long for the engine", "prompt", "context_length_exceeded")
        if self._config.max_waiting is not None and len(self._running) >= self._config.max_waiting:
            raise QueueFullError("too many requests")
        for index in range(request.params.n):
            self._running[request.request_id, index] = (request, 0)
        self._stats.prompt_tokens += len(request.prompt_token_ids)

    def add_requests(self, requests: list[Request]) -> None:
        try:
            for request in requests:
                self.add_request(request)
        except Exception:
            for request in requests:
                self.abort(request.request_id)
            raise

    def abort(self, request_id: str, index: int | None = None) -> None:
        for key in list(self._running):
            if key[0] == request_id and index in (None, key[1]):
                del self._running[key]

    @property
    def has_work(self) -> bool:
        return any(request_id not in self._paused for request_id, _ in self._running)

    def pause(self, request_id: str, paused: bool) -> None:
        (self._paused.add if paused else self._paused.discard)(request_id)

    def step(self) -> StepOutput:
        time.sleep(self.step_seconds)
        self._stats.steps += 1
        return StepOutput(updates=[self._advance(key) for key in list(self._running) if key[0] not in self._paused])

    def _advance(self, key: tuple[str, int]) -> SequenceUpdate:
        request, done = self._running[key]
        prompt = request.prompt_token_ids
        params = request.params
        update = SequenceUpdate(*key, token_ids=[], num_cached_tokens=1)
        if params.prompt_logprobs is not None and done == 0 and key[1] == 0:
            update.prompt_logprobs = [None, *(self._logprob(token, params.prompt_logprobs) for token in prompt[1:])]
        if params.max_tokens != 0:
            token = prompt[done % len(prompt)]
            done += 1
            update.token_ids = [token]
            self._stats.generation_tokens += 1
            if params.logprobs is not None:
                update.logprobs = [self._logprob(token, params.logprobs)]
            if done > params.min_tokens:
                if token in self.eos_token_ids and not params.ignore_eos:
                    update.finish_reason = "stop"
                elif token in params.stop_token_ids:
                    update.finish_reason = "stop"
                    update.stop_token = token
        room = self.max_model_len - len(prompt)
        if update.finish_reason is None and done >= (
            room if params.max_tokens is None else min(params.max_tokens, room)
        ):
            update.finish_reason = "length"
        self._running[key] = (request, done)
        if update.finish_reason is not None:
            del self._running[key]
        return update

    def _logprob(self, token: int, count: int) -> TokenLogprob:
        return TokenLogprob(token, -0.5, 2, [(10, -0.25), (token, -0.5), (11, float("-inf"))][:count])

    def profile(self, steps: int) -> None:
        pass

    def idle(self) -> bool:
        return False

    def reset_prefix_cache(self) -> None:
        pass

    def pool(self) -> PoolSnapshot:
        return PoolSnapshot(pages=100, cells=[0] * 100)

    def stats(self) -> EngineStats:
        self._stats.num_running = len(self._running)
        self._stats.pages_used = len(self._running)
        return self._stats


class CachingEngine(ParrotEngine):
    """Says that a prompt was cached where the same came before under the same salt."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self._seen: set[tuple[str | None, tuple[int, ...]]] = set()
        self._hits: dict[str, int] = {}

    def add_request(self, request: Request) -> None:
        key = (request.cache_salt, tuple(request.prompt_token_ids))
        self._hits[request.request_id] = len(key[1]) if key in self._seen else 0
        self._seen.add(key)
        super().add_request(request)

    def _advance(self, key: tuple[str, int]) -> SequenceUpdate:
        update = super()._advance(key)
        update.num_cached_tokens = self._hits[key[0]]
        return update

    def reset_prefix_cache(self) -> None:
        self._seen.clear()


class ScriptEngine(ParrotEngine):
    """Says what stands between the last SAY( and )SAY of the prompt, and stops with an end-of-sequence token.

    SAYSLOWLY( makes it take 20 ms a token. What follows |THEN| is for a prompt in which the reasoning has been closed.
    """

    def __init__(self, config: EngineConfig):
        from tokenizers import Tokenizer

        super().__init__(config)
        self._tokenizer = Tokenizer.from_file(str(self.model_folder / "tokenizer.json"))
        self._script: dict[str, list[int]] = {}

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        last, _, answer = prompt.rpartition(")SAY")
        mark = max(last.rfind("SAY("), last.rfind("SAYSLOWLY("))
        text = last[last.index("(", mark) + 1 :] if mark >= 0 else ""
        is_closed = "</think>" in answer or answer.count("<|start|>assistant") > 1
        text = text.split("|THEN|")[-1 if is_closed else 0]
        self._script[request.request_id] = [*self._tokenizer.encode(text, add_special_tokens=False).ids, 2]
        self.step_seconds = 0.02 if "SAYSLOWLY(" in prompt else 0.0

    def _advance(self, key: tuple[str, int]) -> SequenceUpdate:
        request, done = self._running[key]
        script = msgspec.structs.replace(request, prompt_token_ids=self._script[key[0]])
        self._running[key] = (script, done)
        update = super()._advance(key)
        if key in self._running:
            self._running[key] = (request, done + 1)
        return update


class SlowEngine(ParrotEngine):
    """20 ms a step."""

    step_seconds = 0.02


class QueueEngine(SlowEngine):
    """Serves one completion at a time, in the order in which they came."""

    def step(self) -> StepOutput:
        time.sleep(self.step_seconds)
        return StepOutput(updates=[self._advance(next(iter(self._running)))])


class SlowLoadingEngine(ParrotEngine):
    @classmethod
    def load(cls, config: EngineConfig):
        time.sleep(2.0)
        return cls(config)


class BrokenConfigEngine(ParrotEngine):
    @classmethod
    def load(cls, config: EngineConfig):
        raise ConfigError("max_model_len of 5 is too small; set it to 10 or more")


class MarkedEngine(SlowEngine):
    """Where a prompt begins with 66, the process ends by itself; with 67, the step never ends; with 68, the step takes
    nine seconds, which it says are spent compiling. Once a file named `broken` is in the model's folder, none loads."""

    @classmethod
    def load(cls, config: EngineConfig):
        if (Path(config.model) / "broken").exists():
            raise ConfigError("the model is broken")
        return cls(config)

    def step(self) -> StepOutput:
        match {request.prompt_token_ids[0] for request, _ in self._running.values()} & {66, 67, 68}:
            case marks if 66 in marks:
                os._exit(3)
            case marks if 67 in marks:
                time.sleep(1000)
            case marks if 68 in marks:
                self.compiling = True
                time.sleep(9)
                self.compiling = False
                for key, (request, done) in self._running.items():
                    self._running[key] = msgspec.structs.replace(request, prompt_token_ids=[50, 51]), done
        return super().step()


class NumberedEngine(ParrotEngine):
    """Answers with the token 100 + N if its model's folder is called NAME-N, at 5 ms a token. Where a prompt begins
    with 66, the process ends by itself. While there is a file `hang` in the folder, it does not get ready."""

    step_seconds = 0.005

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self._number = 100 + int(self.model_folder.name.rpartition("-")[2])
        logging.getLogger("jaxserve.engine").info("this is number %d", self._number)

    @classmethod
    def load(cls, config: EngineConfig):
        while (Path(config.model) / "hang").exists():
            time.sleep(0.05)
        return super().load(config)

    def add_request(self, request: Request) -> None:
        if request.prompt_token_ids[0] == 66:
            os._exit(3)
        same = [self._number] * len(request.prompt_token_ids)
        super().add_request(msgspec.structs.replace(request, prompt_token_ids=same))


class FailingEngine(ParrotEngine):
    """Fails at the tenth token of anything; refuses prompts of three tokens with an unexpected exception."""

    step_seconds = 0.01

    def add_request(self, request: Request) -> None:
        if len(request.prompt_token_ids) == 3:
            raise KeyError("unexpected")
        super().add_request(request)

    def step(self) -> StepOutput:
        if any(done >= 9 for _, done in self._running.values()):
            raise RuntimeError("device lost")
        return super().step()


class Weights:
    """Weights that are a number: how often they were replaced."""

    def __init__(self):
        self.level = 0
        self.version = 0

    def check_sleep(self, level: int) -> None:
        pass

    def sleep(self, level: int) -> None:
        self.level = level

    def wake_up(self) -> None:
        self.level = 0

    def check_update(self, path: Path) -> None:
        if not (path / "model.safetensors").exists():
            raise CheckpointError(f"{path} has no weights")

    def update(self, path: Path) -> str:
        self.version += 1
        self.level = 0
        return f"{path.name} {self.version}"


class ChangingEngine(ParrotEngine):
    """Repeats the prompt backwards for a request with an adapter, which is a file of any JSON; new weights begin so
    many tokens later as there were updates."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.weights = Weights()
        self.adapters = SimpleNamespace(registry=Registry(self._read, 4))

    @staticmethod
    def _read(path: Path, name: str) -> SimpleNamespace:
        data = (path / "adapter_config.json").read_bytes()
        json.loads(data)
        return SimpleNamespace(name=name, digest=sha256(data).digest())

    def add_request(self, request: Request) -> None:
        prompt = request.prompt_token_ids[:: -1 if request.adapter else 1]
        begin = self.weights.version % len(prompt)
        super().add_request(msgspec.structs.replace(request, prompt_token_ids=prompt[begin:] + prompt[:begin]))


class HashingEngine(ParrotEngine):
    """Takes long prompts only with the hashes of their pages."""

    def add_request(self, request: Request) -> None:
        expected = b""
        if len(request.prompt_token_ids) >= LONG_PROMPT:
            expected = hash_pages(request.prompt_token_ids, request.cache_salt, self.page_size)
        if request.page_hashes != expected:
            raise InvalidRequestError("these are not the hashes of the prompt's pages", "prompt")
        super().add_request(request)
