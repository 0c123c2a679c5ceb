"""Ends work in Python that takes too long."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class OutOfTimeError(BaseException):
    """Raised inside a thread whose work took too long; a BaseException, so that no `except Exception` catches it."""


def within_time(work: Callable[[], T], seconds: float) -> T:
    """Calls `work`, and raises OutOfTimeError in this thread, between two bytecodes, after `seconds`."""
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    finished = False

    def interrupt() -> None:
        with lock:
            if not finished:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(OutOfTimeError))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        return work()
    finally:
        timer.cancel()
        with lock:  # from here on the timer cannot fire
            finished = True
