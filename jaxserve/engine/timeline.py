"""Times of a step's phases as histograms, and traces of steps by JAX's profiler.

Phases, by the host's clock:

  schedule   choosing the rows and giving them pages
  upload     packing the rows and dispatching the compiled step
  device     from the dispatch, or the end of the step before, until the tokens are on the host
  commit     adding the tokens to their sequences
  adapters   uploading LoRA adapters, where they are served
  mask       computing the masks of deferred rows and dispatching their sampling, while the devices run a step
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

import jax

from jaxserve.scheduling.engine_stats import Histogram

log = logging.getLogger(__name__)

MOST_STEPS = 10_000  # most steps of one trace, which is in memory until it is written
PHASES = ("schedule", "upload", "device", "commit", "mask")


class Timeline:
    """Measures the phases of one engine's steps. Used by the engine's thread only.

    Attributes:
      seconds: phase -> histogram of its times.
      folder: where traces are written; None: there are no traces.
    """

    def __init__(self, folder: str | None):
        self.folder = folder
        self.seconds = {phase: Histogram.of_seconds() for phase in PHASES}
        self._steps_to_trace = 0
        self._tracing = False

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block inside and names it in traces."""
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            yield
        self.seconds.setdefault(name, Histogram.of_seconds()).observe(time.perf_counter() - start)

    def observer_of(self, phase: str) -> Callable[[float], None]:
        """Takes times of a phase that another thread measures."""
        return self.seconds.setdefault(phase, Histogram.of_seconds()).observe

    def trace(self, steps: int) -> None:
        """Traces the next `steps` steps. A trace under way is extended by them, to at most MOST_STEPS."""
        self._steps_to_trace = min(self._steps_to_trace + steps, MOST_STEPS)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step, which is traced if it is to be."""
        if self._steps_to_trace and not self._tracing and self.folder is not None:
            try:
                jax.profiler.start_trace(self.folder)
                self._tracing = True
            except Exception as error:  # a failing trace must not fail the step
                self._steps_to_trace = 0
                log.error("no trace was begun in %s: %s", self.folder, error)
        yield
        if not self._tracing:
            return
        self._steps_to_trace -= 1
        if self._steps_to_trace <= 0:
            self._steps_to_trace = 0
            self._tracing = False
            try:
                jax.profiler.stop_trace()
                log.info("wrote a trace to %s", self.folder)
            except Exception as error:  # a full disk, for example
                log.error("no trace was written to %s: %s", self.folder, error)
