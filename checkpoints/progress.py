"""How far a long task is: a bar on a terminal, and elsewhere lines in the log."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from types import TracebackType
from typing import Any

from tqdm import tqdm

log = logging.getLogger("jaxserve.progress")

SECONDS = 10.0  # between two lines of the log
COUNTS = "{l_bar}{bar}| {n_fmt} of {total_fmt} [{elapsed}{postfix}]"  # a bar without a rate


class Progress:
    """Tells how much of a task is done, while this context lasts; from several threads, if need be. On a terminal a bar
    does, which vanishes at the end. Elsewhere the log gets a line at the beginning, every SECONDS, and at the end.

    Args:
      what: the task, such as "loading weights".
      total: how much there is to do.
      shown: False: nothing is told.
      in_bytes: `total` is a number of bytes.
      more: gives what a line says beside the numbers.
    """

    def __init__(
        self, what: str, total: int, *, shown: bool = True, in_bytes: bool = False, more: Callable[[], str] = str
    ):
        self._what = what
        self._total = total
        self._in_bytes = in_bytes
        self._more = more
        self._shown = shown and total > 0
        self._done = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._bar: tqdm | None = None
        self._clearing: logging.Handler | None = None

    def __enter__(self) -> Progress:
        if self._shown and on_terminal():
            kind: Any = {"unit": "B", "unit_scale": True} if self._in_bytes else {"bar_format": COUNTS}
            self._bar = tqdm(total=self._total, desc=self._what, leave=False, **kind)
            self._clearing = _Clearing(self._bar)
            logging.getLogger().handlers.insert(0, self._clearing)
        elif self._shown:
            log.info("%s", str(self))  # handlers may format it later
            threading.Thread(target=self._tell, name="progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._bar is not None and self._clearing is not None:
            logging.getLogger().removeHandler(self._clearing)
            self._bar.close()
        elif self._shown:
            log.info("%s", str(self))

    def update(self, count: int = 1) -> None:
        """So much more is done."""
        with self._lock:
            self._done += count
            if self._bar is not None:
                self._bar.set_postfix_str(self._more(), refresh=False)
                self._bar.update(count)

    def _tell(self) -> None:
        while not self._ended.wait(SECONDS):
            log.info("%s", str(self))

    def __str__(self) -> str:
        done, total = (tqdm.format_sizeof(n, "B") if self._in_bytes else str(n) for n in (self._done, self._total))
        more = self._more()
        return f"{self._what}: {done} of {total}" + (f", {more}" if more else "")


def on_terminal() -> bool:
    """Whether standard error is a terminal that has a size. Those of containers may have none, and show no bar."""
    try:
        return sys.stderr.isatty() and min(os.get_terminal_size(sys.stderr.fileno())) > 0
    except OSError:
        return False


class _Clearing(logging.Handler):
    """Clears a bar before the next handler writes a line of the log where it is."""

    def __init__(self, bar: tqdm):
        super().__init__()
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        self._bar.clear()


def show_done(what: str, results: Sequence[Future], *, shown: bool) -> None:
    """Waits for these results, also for those that are errors, and tells how many there are."""
    with Progress(what, len(results), shown=shown) as progress:
        for _ in as_completed(results):
            progress.update()
