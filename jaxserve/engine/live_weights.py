"""What happens to the weights of an engine: put aside while it sleeps, and replaced by others of the same model.

Programs stay compiled through all of this: they take weights as arguments, and new ones have the shapes, dtypes and
places of the old ones. There must be no requests meanwhile.

On several hosts, all make each change. New weights are read in two steps, which the other hosts answer: first all look
at the files, which must be the same everywhere, and then all read them. So a host that cannot read them, or that finds
others, changes nothing anywhere. What follows does not fail for reasons that a caller could mend; if it does fail on a
host, the replica ends.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxserve import heap
from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.held_weights import HeldWeights
from jaxserve.engine.page_fingerprint import weights_digest
from jaxserve.execution.runner import ModelRunner
from jaxserve.hosts.first_host import FirstHost
from jaxserve.hosts.identity import difference
from jaxserve.speculation.speculator import Speculator
from jaxserve.types import InvalidRequestError

log = logging.getLogger(__name__)


class OfWeights(Protocol):
    """The parts of an engine that change with its weights."""

    config: EngineConfig
    runner: ModelRunner
    hosts: FirstHost | None
    speculator: Speculator | None

    @property
    def has_work(self) -> bool: ...
    def reset_prefix_cache(self) -> None: ...


class Weights:
    """The weights of an engine's model and of its draft.

    Attributes:
      version: how often the weights were replaced.
      level: how deeply the engine sleeps; 0: it is awake. 1: weights are in host memory. 2: they are dropped.
    """

    def __init__(self, engine: OfWeights, held: HeldWeights, draft: ModelRunner | None):
        self._engine = engine
        self._held = held
        self._runners = [engine.runner] if draft is None else [engine.runner, draft]
        self._folder: str | None = None  # of the latest update; None: there was none
        self._from_files = True  # False: the latest update was from arrays
        self.version = self.level = 0

    def sleep(self, level: int = 1) -> None:
        """Frees the devices' memory of weights, cache and slots, until `wake_up`. Level 1 keeps the weights in host
        memory, level 2 reads them from their files again. Cached pages are forgotten, in lower tiers too. An engine
        that sleeps already sleeps on as it does.

        Raises InvalidRequestError for another level and while there are requests.
        """
        self.check_sleep(level)
        self._require_rest("sleep")
        if not self.level:
            self._everywhere(lambda: self._put_aside(level))

    def check_sleep(self, level: int) -> None:
        """Raises InvalidRequestError where `sleep` is not possible, requests aside."""
        if level not in (1, 2):
            raise InvalidRequestError(f"level must be 1 or 2, got {level!r}", "level")
        if level == 2 and not self._from_files:
            text = "level must be 1 after an update from arrays: level 2 reads the weights from their files again"
            raise InvalidRequestError(text, "level")

    def wake_up(self) -> None:
        """Ends `sleep`. Raises CheckpointError or ConfigError for files that cannot be read any more; then the engine
        sleeps on."""
        if self.level == 2:
            self._replace(self._folder)
        elif self.level:
            self._everywhere(lambda: self._wake(self._held.bring_back))

    def update(self, source: Path | Mapping[str, Any]) -> str:
        """Replaces the weights and wakes an engine that sleeps. Cached pages are forgotten. The devices hold the old
        and the new weights meanwhile, unless the engine sleeps.

        source: a folder or file with the same model, at the same place on all hosts; or a mapping from the names of a
        checkpoint's tensors to arrays in floats, each of which is asked for when it is brought to the devices. Returns
        a digest of the files; "" for arrays.

        Raises InvalidRequestError while there are requests, and CheckpointError or ConfigError for weights that cannot
        be used. Then nothing has changed, but cached pages may be forgotten.
        """
        start = time.perf_counter()
        self._require_rest("update")
        self.check_update(source)
        digest = weights_digest(source) if isinstance(source, Path) else ""
        self._replace(str(source) if isinstance(source, Path) else source)
        self._folder, self._from_files = (str(source), True) if isinstance(source, Path) else (None, False)
        self.version += 1
        name = source if isinstance(source, Path) else "given arrays"
        log.info("replaced the weights by those of %s in %.1f s", name, time.perf_counter() - start)
        return digest

    def check_update(self, source: Path | Mapping[str, Any]) -> None:
        """Raises ConfigError, CheckpointError or InvalidRequestError where `update` is not possible, as far as that is
        known without requests, without other hosts and before weights are read."""
        config = self._engine.config
        if config.kv_offload_dir is not None:
            raise ConfigError("kv_offload_dir must be None to replace weights: its files belong to those of the start")
        if config.load_format == "dummy":
            raise ConfigError("load_format must be auto to replace weights; dummy weights are random")
        if isinstance(source, Path):
            self._held.check_model(source)
        elif self._engine.hosts is not None:
            raise ConfigError("arrays replace only weights of one host: give a folder that all hosts can read")
        elif self._held.files.reader is not None:
            raise ConfigError("arrays replace only weights that were read as floats; give a folder instead")

    def _replace(self, source: str | Mapping[str, Any] | None) -> None:
        """Reads weights on all hosts, and then replaces those that are there; an engine that sleeps wakes up. None: the
        files of the start."""
        try:
            if self._engine.hosts is not None:
                assert source is None or isinstance(source, str)
                folder = source
                self._asked(lambda: self._held.check(folder))
            if not self.level:
                self._engine.reset_prefix_cache()
            self._asked(lambda: self._held.read(source))
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # what was read would stay in memory with them
            self._held.drop()
            raise
        self._everywhere(lambda: self._wake(self._held.take) if self.level else self._held.take())

    def _put_aside(self, level: int) -> None:
        self._engine.reset_prefix_cache()
        self._held.keep(level)
        for runner in self._runners:
            runner.release()
        self.level = level
        heap.trim()

    def _wake(self, bring: Callable[[], None]) -> None:
        bring()
        for runner in self._runners:
            runner.allocate()
        if self._engine.speculator is not None:
            self._engine.speculator.restore()
        self.level = 0

    def _asked(self, call: Callable[[], dict[str, str] | None]) -> None:
        """Makes a call that the other hosts repeat and answer. Raises the error of a host that could not do it, or that
        found something else than this one."""
        answers = {}
        try:
            mine = call() or {}
        finally:  # after an error the others are waited for, too
            if self._engine.hosts is not None:
                answers = self._engine.hosts.answers()
        for host, (found, why_not) in answers.items():
            if why_not := why_not or difference(mine, found):
                raise CheckpointError(f"{host} cannot take the new weights: {why_not}")

    def _everywhere(self, change: Callable[[], None]) -> None:
        """Makes a change on all hosts and waits for it. The replica ends if it fails on one of several hosts."""
        hosts = self._engine.hosts
        try:
            change()
        except Exception as error:
            if hosts is not None:
                hosts.fail(f"the first host's weights could not be changed: {error}")
            raise
        if hosts is not None:
            hosts.wait_idle()

    def _require_rest(self, call: str) -> None:
        if self._engine.has_work:
            raise InvalidRequestError(f"{call} needs an engine without requests; some are unfinished")
