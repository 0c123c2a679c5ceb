"""Where a step's time goes: histograms of its phases, and traces of a few steps for JAX's profiler.

Phases, by the host's clock:

  schedule   choosing the rows and giving them pages
  upload     packing them and dispatching the compiled step, which takes the buffer along
  device     from then on, or from the end of the step before, until the tokens are here
  commit     taking them in
  mask       finding what grammars allow next, and dispatching the draw, while the devices run a step
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import jax

from jaxserve.scheduling.stats import Histogram

log = logging.getLogger(__name__)

MOST_STEPS = 10_000  # in one trace, which is kept in memory until it is written
PHASES = ("schedule", "upload", "device", "commit", "mask")


class Timeline:
    """Belongs to the engine's thread.

    Attributes:
      seconds: of each phase.
      folder: where traces go; None: no traces.
    """

    def __init__(self, folder: str | None):
        self.folder = folder
        self.seconds = {phase: Histogram.of_seconds() for phase in PHASES}
        self._steps_to_trace = 0
        self._tracing = False

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what runs inside, and names it in traces."""
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            yield
        self.seconds[name].observe(time.perf_counter() - start)

    def trace(self, steps: int) -> None:
        """Captures a trace of the next `steps` steps; one that is under way goes on for so many more, up to MOST_STEPS
        in all."""
        self._steps_to_trace = min(self._steps_to_trace + steps, MOST_STEPS)

    def begin_step(self) -> None:
        if self._steps_to_trace and not self._tracing and self.folder is not None:
            try:
                jax.profiler.start_trace(self.folder)
                self._tracing = True
            except Exception as error:  # whatever is wrong with a trace must not reach the step
                self._steps_to_trace = 0
                log.error("no trace was begun in %s: %s", self.folder, error)

    def end_step(self) -> None:
        if not self._tracing:
            return
        self._steps_to_trace -= 1
        if self._steps_to_trace <= 0:
            self._steps_to_trace, self._tracing = 0, False
            try:
                jax.profiler.stop_trace()
                log.info("wrote a trace to %s", self.folder)
            except Exception as error:  # a full disk, say
                log.error("no trace was written to %s: %s", self.folder, error)
