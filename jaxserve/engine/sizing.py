"""Chooses the number of KV pages: they fill the memory that weights, slots and compiled programs leave."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxserve.checkpoints.progress import Progress
from jaxserve.config import EngineConfig
from jaxserve.devices import compile_cache
from jaxserve.devices.mesh import num_shards
from jaxserve.execution import memory
from jaxserve.execution.kv_cache import CacheLayout
from jaxserve.execution.memory import Budget, Needs
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.spec import MLPSpec

log = logging.getLogger(__name__)

LOGITS = 6.5  # arrays of logits that sampling holds at once (compiled for an H200: 826 MB for 256 rows of 128,256)
GUESSED_CODE = 2**27
UNUSED = 1 / 64  # part of the cache that a guess may leave unused


class Sized(NamedTuple):
    """A model on the devices, and the layout of its cache with a single page."""

    runner: ModelRunner
    one_page: CacheLayout


def compile_all(runner: Any, names: Sequence[Any], what: str, *, shown: bool) -> None:
    """`runner.compile`, and tells how many of these programs are done, and how many came from the cache."""
    counter = compile_cache.of_this_process()
    before = counter.cache_hits

    def from_cache() -> str:
        hits = counter.cache_hits - before
        return f"{hits} read from the cache" if hits else ""

    with Progress(what, len(names), shown=shown, more=from_cache) as progress:
        runner.compile(names, progress.update)


class Sizing:
    """Chooses the pages of the caches of a model and of its draft model, which have equally many.

    A step is compiled for one number of pages, and its memory needs are known only after it is compiled. So the number
    is chosen up to three times. `begin` guesses it and compiles the largest programs and a few that tell how much code
    the others have at most. If their needs do not fit the guess, it chooses again. `finish` chooses a last time if all
    programs together need more than that.

    Attributes:
      longest: tokens of the longest request that fits the pages.
    """

    def __init__(
        self,
        config: EngineConfig,
        models: Sequence[Sized],
        budget: Budget,
        shapes: Sequence[StepShape],
        longest: int,
        *,
        progress: bool = False,
    ):
        """models: the model that is served, then its draft model if there is one. progress: tells how many programs are
        compiled."""
        self._config = config
        self._models = models
        self._shapes = shapes
        self._progress = progress
        self._runner, self._one_page = models[0]
        self.budget = budget
        self.longest = longest

    def begin(self) -> None:
        """Chooses the pages. On accelerators this compiles some programs; all others are compiled later."""
        if not self.budget.counts_programs or self._config.kv_pages is not None:
            self._choose(Needs())
            return
        guess = max(self._fitting(self.guess()), 2)
        self._set_pages(guess)
        for runner, _ in self._models:
            compile_all(runner, runner.largest(self._shapes), "compiling the largest programs", shown=self._progress)
        needs = self._needs(self._shapes)
        enough = guess > self._pages_of_longest
        if not (enough and self._holds(needs) and self._fitting(needs) <= guess * (1 + UNUSED)):
            self._choose(needs)

    def finish(self, shapes: Sequence[StepShape]) -> bool:
        """Compares the needs of all programs, which must be compiled, with the memory. If they exceed the allowance of
        `begin`, this chooses fewer pages, compiles the programs that depend on their number again, and returns True.

        Raises ConfigError if the model does not fit.
        """
        runner = self._runner
        changed = False
        needs = self._needs(shapes)
        if self.budget.counts_programs and self._config.kv_pages is None and not self._holds(needs):
            before = runner.layout.num_pages
            self._choose(needs)
            for one, _ in self._models:
                compile_all(one, one.names(shapes), "compiling programs again", shown=self._progress)
            needs = self._needs(shapes)
            changed = True
            log.info(
                "the programs need more memory than expected: %d KV pages, not %d", runner.layout.num_pages, before
            )
        log.info("%s", self.budget.describe(needs, self._cache_bytes))
        self.budget.check(needs, self._cache_bytes)
        return changed

    def _choose(self, needs: Needs) -> None:
        """Sets as many pages as these needs leave room for. Raises ConfigError if they are too few."""
        page = self._one_page.page_size, self._page_bytes
        windows = self._one_page.groups.windows
        pages, self.longest = memory.plan_pages(self._config, self.longest, *page, self.budget, needs, windows)
        self._set_pages(pages)

    def _set_pages(self, pages: int) -> None:
        for runner, one_page in self._models:
            runner.set_pages(pages, -(-self.longest // one_page.page_size))

    def _fitting(self, needs: Needs) -> int:
        return memory.fitting_pages(self._config, self._pages_of_longest, self._page_bytes, self.budget, needs)

    def guess(self) -> Needs:
        """Needs estimated from the largest arrays of a step."""
        model = self._runner.model.config
        dtype = self._runner.model.dtype
        rows = max(s.rows for s in self._shapes)
        tokens = max(s.tokens for s in self._shapes)
        width = max(map(self._width, model.mlps), default=8 * model.hidden_size)  # a model may have no MLP
        arrays = tokens * width * dtype.itemsize
        logits = int(LOGITS * rows * 4 * model.vocab_size / num_shards(self._runner.mesh, "vocab"))
        results = memory.STEPS_IN_FLIGHT * tokens * model.hidden_size * dtype.itemsize
        return Needs(max(arrays, logits), results, GUESSED_CODE)

    def _width(self, mlp: MLPSpec) -> int:
        """About as many numbers of a token exist at once in a layer, with this MLP."""
        hidden = self._runner.model.config.hidden_size
        size = mlp.size // num_shards(self._runner.mesh, "mlp")
        if mlp.experts is None:
            return 4 * hidden + 3 * size
        return 4 * hidden + mlp.experts.router.top_k * (2 * hidden + 4 * size)

    def _needs(self, shapes: Sequence[StepShape]) -> Needs:
        """The needs of the programs of all models, which run one after the other."""
        return sum((runner.needs(shapes) for runner, _ in self._models), Needs())

    def _holds(self, needs: Needs) -> bool:
        return self.budget.holds(needs, self._cache_bytes)

    @property
    def _pages_of_longest(self) -> int:
        windows = self._one_page.groups.windows
        return memory.pages_of_longest(self._config, self.longest, self._one_page.page_size, windows)

    @property
    def _page_bytes(self) -> int:
        """Bytes of a page of all caches on each device."""
        return sum(one_page.device_page_bytes(runner.mesh) for runner, one_page in self._models)

    @property
    def _cache_bytes(self) -> int:
        """Bytes of the caches on each device."""
        return self._runner.layout.num_pages * self._page_bytes
