"""Measures while the other processes of a run stand still.

A run is several processes that one driver started on one machine: most of them compile, and now and then one measures
something that needs the processor's cores and the accelerator for itself. `alone` stops the others meanwhile (SIGSTOP)
and lets them go on afterwards (SIGCONT). With a lock that compilers hold as well, a measurement would wait for the
longest compilation under way while cores run empty, or without end behind a chain of them.

The environment variable JAXSERVE_RUN names the run's folder. Without it nothing is stopped. Needs POSIX signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

RUN = "JAXSERVE_RUN"
SETTLE = 0.05  # seconds for what the others have sent to the accelerator
_own = threading.RLock()  # one thread of a process holds the run's lock
_holds = False


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A context in which all other processes of the run stand still, except those of this process's group. Contexts
    may be nested. Processes that are started in it must not have RUN in their environment if they may enter it, too."""
    with held() as run:
        if run is None:
            yield
            return
        try:
            run.send(signal.SIGSTOP)
            time.sleep(SETTLE)
            yield
        finally:
            run.send(signal.SIGCONT)


@contextlib.contextmanager
def held() -> Iterator[Run | None]:
    """A context in which no other process of the run measures. So a process may have another lock here and is not
    stopped with it. Yields the run, or None if there is none or this process is in such a context already."""
    global _holds
    folder = os.environ.get(RUN)
    with _own:
        if not folder or _holds:
            yield None
            return
        run = Run(Path(folder))
        with run.locked():
            _holds = True
            try:
                yield run
            finally:
                _holds = False


class Run:
    """A run's processes. Its folder has a lock, which whoever measures holds and writes its group into, and the numbers
    of all process groups."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        import fcntl

        with (self.folder / "lock").open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.truncate(0)
            lock.write(f"{os.getpgrp()} {time.time()}")
            lock.flush()
            yield

    @contextlib.contextmanager
    def idle(self) -> Iterator[bool]:
        """For the driver: whether nobody measures. If so, nobody begins to in this context."""
        import fcntl

        with (self.folder / "lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def measuring(self) -> tuple[int, float]:
        """For the driver, if `idle` is False: the group that measures, and since when by time.time()."""
        group, _, since = (self.folder / "lock").read_text().partition(" ")
        return (int(group), float(since)) if since else (0, time.time())  # it is about to be written

    def set_groups(self, groups: Collection[int]) -> None:
        """For the driver, while the run is idle: sets the process groups, and lets all go on. A process that ended
        while it measured has left the others stopped."""
        (self.folder / "groups").write_text(" ".join(map(str, groups)))
        self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to all process groups but this process's own."""
        path = self.folder / "groups"
        for group in map(int, path.read_text().split() if path.exists() else ()):
            if group != os.getpgrp():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, number)
