"""How far a long task is: lines of the log, or a bar on a terminal."""

import io
import logging
import os
import sys
import termios
import threading
from concurrent.futures import Future

import pytest

from jaxserve.checkpoints import progress
from jaxserve.checkpoints.progress import Progress, show_done


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def on_a_terminal(monkeypatch):
    """What is written to standard error from now on, which is a terminal."""
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    return sys.stderr


def test_what_is_a_terminal(monkeypatch):
    """Not a file, nor a terminal without a size."""
    assert not progress.on_terminal()
    ours, other = os.openpty()
    with open(other, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert not progress.on_terminal()
        termios.tcsetwinsize(ours, (40, 110))
        assert progress.on_terminal()
    os.close(ours)


def test_lines_of_the_log(lines, monkeypatch):
    """One at the beginning, one each few seconds, also while nothing is done, and one at the end."""
    monkeypatch.setattr(progress, "SECONDS", 0.02)
    several = threading.Event()
    monkeypatch.setattr(progress.log, "handlers", [Calling(lambda: len(lines()) > 3 and several.set())])
    with Progress("compiling programs", 3, more=lambda: "1 read from the cache") as task:
        task.update()
        assert several.wait(60)
        task.update(2)
    told = lines()
    assert told[0] == "compiling programs: 0 of 3, 1 read from the cache"
    assert set(told[1:-1]) <= {f"compiling programs: {n} of 3, 1 read from the cache" for n in (0, 1, 3)}
    assert told[-1] == "compiling programs: 3 of 3, 1 read from the cache"
    assert len(told) >= 4


class Calling(logging.Handler):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def emit(self, record):
        self._function()


def test_seldom_lines_and_bytes(lines):
    with Progress("loading weights", 16_060_522_240, in_bytes=True) as task:
        task.update(16_060_522_240)
    assert lines() == ["loading weights: 0.00B of 16.1GB", "loading weights: 16.1GB of 16.1GB"]


def test_nothing_is_told_of_nothing(lines, monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    for shown, total in ((False, 3), (True, 0)):
        with Progress("loading weights", total, shown=shown) as task:
            task.update(total)
    assert lines() == []
    assert terminal.getvalue() == ""


def test_a_bar_on_a_terminal(lines, monkeypatch):
    """It vanishes at the end. Lines of the log do not stand beside it."""
    terminal = on_a_terminal(monkeypatch)
    before = list(logging.getLogger().handlers)
    shown = logging.StreamHandler(terminal)
    monkeypatch.setattr(logging.getLogger(), "handlers", [*before, shown])
    with Progress("checking kernels", 8) as task:
        task.update(2)
        task._bar.refresh()
        logging.getLogger("jaxserve.x").warning("a line")
    written = terminal.getvalue()
    assert "checking kernels:  25%" in written
    assert "2 of 8" in written
    line = next(line for line in written.split("\n") if "a line" in line)
    assert line.split("\r")[-1].strip() == "a line", "the bar is cleared before"
    assert written.split("\r")[-1].strip() == "", "and at the end"
    assert logging.getLogger().handlers == [*before, shown]
    assert lines() == ["a line"]


def test_errors_count_as_done(lines):
    done = Future()
    failed = Future()
    done.set_result(None)
    failed.set_exception(ValueError())
    show_done("checking kernels", [done, failed], shown=True)
    assert lines()[-1] == "checking kernels: 2 of 2"
