"""A process of `jaxserve serve` that ends with the Ray worker that started it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from jaxserve import entry

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_KEPT_LINES = 20


class ServeProcess:
    """Runs `jaxserve serve` with these arguments. Its log goes to this process's standard error."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()):
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process = subprocess.Popen(
            entry.command("jaxserve.ray.child", str(os.getpid()), "serve", *arguments),
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._copy_log, name="log", daemon=True).start()

    def _copy_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last.append(line)
            sys.stderr.write(line)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    @property
    def last_lines(self) -> str:
        """The end of its log, which says why it ended."""
        return "".join(self._last)

    async def stop(self, seconds: float) -> None:
        """Ends the process: in order within these seconds, else at once."""
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


def main() -> None:
    """`child.py PARENT COMMAND…`: runs a command of jaxserve that Linux kills when the parent's thread ends."""
    parent = int(sys.argv.pop(1))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        return
    runpy.run_module("jaxserve", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
