"""How many KV pages an engine has: what weights, slots and the compiled programs leave of the memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import ways
from jaxserve.execution import memory
from jaxserve.execution.kv_cache import CacheLayout
from jaxserve.execution.memory import Budget, Needs
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.steps import StepShape

log = logging.getLogger(__name__)

LOGITS = 6.5  # arrays of logits that sampling holds at a time (compiled for an H200: 826 MB for 256 rows of 128,256)
GUESSED_CODE = 2**27
UNUSED = 1 / 64  # of the cache, that a guess may leave unused


class Sizing:
    """Chooses the pages of a runner's cache.

    A step is compiled for one number of pages, and only then its needs are known. So the pages are chosen up to three
    times: by a guess; then, where the guess was not good, by what the largest programs need and an allowance for the
    code of the others (`begin`); and where all programs together turn out to need more than that, once more, by what
    they need (`finish`). All three ask `ModelRunner.needs`, `Budget.holds` and `memory.plan_pages`.

    Attributes:
      longest: request in tokens that fits the pages.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        one_page: CacheLayout,
        budget: Budget,
        shapes: Sequence[StepShape],
        longest: int,
    ):
        self._config, self._runner, self._one_page, self._shapes = config, runner, one_page, shapes
        self.budget, self.longest = budget, longest

    def begin(self) -> None:
        """Chooses the pages before the programs are compiled; of these only the largest, and those on accelerators."""
        if not self.budget.counts_programs or self._config.kv_pages is not None:
            self._choose(Needs())
            return
        guess = max(self._fitting(self._guess()), 2)
        self._plan(guess)
        self._runner.compile(self._runner.largest(self._shapes))
        needs = self._runner.needs(self._shapes)
        enough = guess * self._one_page.page_size > self.longest
        if not (enough and self._holds(needs) and self._fitting(needs) <= guess * (1 + UNUSED)):
            self._choose(needs)

    def finish(self, shapes: Sequence[StepShape]) -> bool:
        """Compares all programs' needs with the memory once they are compiled. Where these are more than `begin` had
        allowed for, fewer pages are chosen, and what depends on their number is compiled again; the result says so.

        Raises ConfigError where it does not fit.
        """
        runner, changed = self._runner, False
        needs = runner.needs(shapes)
        if self.budget.counts_programs and self._config.kv_pages is None and not self._holds(needs):
            before = runner.layout.num_pages
            self._choose(needs)
            runner.compile(runner.names(shapes))
            needs, changed = runner.needs(shapes), True
            log.info(
                "the programs need more memory than expected: %d KV pages, not %d", runner.layout.num_pages, before
            )
        log.info("%s", self.budget.describe(needs, self._cache_bytes))
        self.budget.check(needs, self._cache_bytes)
        return changed

    def _choose(self, needs: Needs) -> None:
        """Plans the runner for as many pages as these needs leave room for. Raises ConfigError where they are few."""
        page = self._one_page.page_size, self._page_bytes
        pages, self.longest = memory.plan_pages(self._config, self.longest, *page, self.budget, needs)
        self._plan(pages)

    def _plan(self, pages: int) -> None:
        layout = replace(self._one_page, num_pages=pages)
        self._runner.set_cache_size(layout, -(-self.longest // layout.page_size))

    def _fitting(self, needs: Needs) -> int:
        page = self._one_page.page_size, self._page_bytes
        return memory.fitting_pages(self._config, self.longest, *page, self.budget, needs)

    def _guess(self) -> Needs:
        """By the sizes of the largest arrays in a step."""
        model, dtype = self._runner.model.config, self._runner.model.dtype
        rows, tokens = max(s.rows for s in self._shapes), max(s.tokens for s in self._shapes)
        widest = max(layer.mlp.size for layer in model.layers)
        width = 4 * model.hidden_size + 3 * widest // ways(self._runner.mesh, "mlp")
        arrays = tokens * width * dtype.itemsize
        results = memory.STEPS_IN_FLIGHT * tokens * model.hidden_size * dtype.itemsize
        return Needs(max(arrays, int(LOGITS * rows * 4 * model.vocab_size)), results, GUESSED_CODE)

    def _holds(self, needs: Needs) -> bool:
        return self.budget.holds(needs, self._cache_bytes)

    @property
    def _page_bytes(self) -> int:
        """On each device."""
        return self._one_page.page_bytes // ways(self._runner.mesh, "kv_heads")

    @property
    def _cache_bytes(self) -> int:
        """On each device."""
        return self._runner.layout.num_pages * self._page_bytes
