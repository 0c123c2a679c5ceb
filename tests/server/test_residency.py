"""Which models are in memory: `jaxserve.server.models.residency`, without processes and with a clock of its own."""

from __future__ import annotations

import math
from random import Random

import pytest

from jaxserve.server.models.residency import PATIENCE_SECONDS, SETTLE_SECONDS, Action, Residency


def residency(budget: int = 100, **sizes: int) -> Residency:
    made = Residency({"host": budget})
    for name, size in sizes.items():
        made.add(name, ["host"]).size = size
    return made


def start(models: Residency, name: str, now: float) -> None:
    """Has a request start a model and end at once."""
    assert not models.ask(name, now)
    assert Action("start", name) in models.plan(now)
    models.started(name, now)
    models.ended(name, now)


def test_the_least_recently_used_model_is_stopped_for_another():
    models = residency(a=40, b=40, c=40)
    start(models, "a", 0)
    start(models, "b", 1)
    assert models.ask("a", 2)
    models.ended("a", 2)
    assert not models.ask("c", 3)
    assert models.plan(3) == [Action("stop", "b")]
    assert models.plan(3) == []  # its memory is not free before its process has ended
    models.stopped("b")
    assert models.plan(3) == [Action("start", "c")]
    models.check_integrity()


def test_no_more_models_are_stopped_than_needed():
    models = residency(a=10, b=60, c=60)
    start(models, "a", 0)
    start(models, "b", 1)
    assert not models.ask("c", 3)
    assert models.plan(3) == [Action("stop", "b")]


def test_a_model_with_requests_stays_and_later_gives_way_without_losing_them():
    models = residency(a=60, b=60)
    start(models, "a", 0)
    assert models.ask("a", 1)
    assert not models.ask("b", 1)
    assert models.plan(1) == []
    late = 1 + PATIENCE_SECONDS
    assert models.due(1) == late
    assert models.plan(late) == []
    assert not models.ask("a", late), "a new request waits for the next start"
    models.ended("a", late)
    assert models.plan(late) == []
    assert models.plan(late + SETTLE_SECONDS) == [Action("stop", "a")]
    models.stopped("a")
    assert models.plan(late) == [Action("start", "b")]
    models.started("b", late)
    models.ended("b", late)
    assert models.plan(late + SETTLE_SECONDS) == [Action("stop", "b")], "the request for a has waited for it"


def test_models_without_requests_are_stopped_after_their_time():
    models = residency(a=10, b=10)
    models.places["a"].keep_alive = 30
    start(models, "a", 0)
    start(models, "b", 0)
    assert models.due(0) == 30
    assert models.plan(29) == []
    assert models.plan(30) == [Action("stop", "a")]
    assert models.due(30) == math.inf


def test_pinned_models_are_not_stopped_and_leave_less_room():
    models = Residency({"host": 100})
    models.add("pinned", ["host"], pinned=True, keep_alive=0).size = 60
    models.add("small", ["host"]).size = 40
    models.add("large", ["host"]).size = 41
    models.want("pinned", 0)
    assert models.plan(0) == [Action("start", "pinned")]
    models.started("pinned", 0)
    assert models.room("large") == 40
    assert not models.ask("large", 1)
    assert models.plan(1) == [Action("refuse", "large")]
    assert not models.ask("small", 1)
    assert models.plan(1) == [Action("start", "small")]
    assert models.plan(1000) == []
    models.check_integrity()


def test_a_model_that_waits_is_not_overtaken_by_smaller_ones_of_its_devices():
    models = Residency({"0": 100, "1": 100})
    for name, devices, size in (("a", "0", 60), ("large", "01", 80), ("small", "0", 30), ("other", "1", 30)):
        models.add(name, devices).size = size
    start(models, "a", 0)
    assert models.ask("a", 1)
    for name in ("large", "small", "other"):
        assert not models.ask(name, 1)
    assert models.plan(1) == []
    models.ended("a", 2)
    assert models.plan(3) == [Action("stop", "a")]
    models.stopped("a")
    assert models.plan(3) == [Action("start", "large")]


def test_unload_answers_the_requests_that_came_before():
    models = residency(a=10)
    assert not models.ask("a", 0)
    models.plan(0)
    models.unload("a")
    models.started("a", 1)
    assert not models.ask("a", 1)
    assert models.plan(1) == []
    models.ended("a", 1)
    assert models.plan(2) == [Action("stop", "a")]
    models.stopped("a")
    assert models.plan(2) == [Action("start", "a")], "for the request that came later"


@pytest.mark.parametrize("seed", range(30))
def test_random_requests_starts_stops_and_deaths(seed):
    random = Random(seed)
    models = Residency({"0": 100, "1": 100})
    for i in range(8):
        devices = random.choice(["0", "1", "01"])
        keep_alive = random.choice([0, 3, 50, math.inf])
        place = models.add(f"m{i}", devices, pinned=i == 0, keep_alive=keep_alive)
        place.size = 30 if i == 0 else random.randint(10, 70)
    names = list(models.places)
    now = 0.0
    waiting = dict.fromkeys(names, 0)
    running = dict.fromkeys(names, 0)
    starting: list[str] = []
    stopping: list[str] = []

    def follow() -> None:
        for kind, name in models.plan(now):
            if kind == "refuse":
                assert models.places[name].size > models.room(name)
                waiting[name] = 0
                continue
            assert kind == "start" or not running[name]
            (starting if kind == "start" else stopping).append(name)
        models.check_integrity()

    def end_a_start(fails: bool) -> None:
        name = starting.pop(random.randrange(len(starting)))
        if fails:
            models.failed(name)
        else:
            models.started(name, now)
            running[name] += waiting[name]
        waiting[name] = 0

    def end_a_request() -> None:
        name = random.choice([name for name in names if running[name]])
        running[name] -= 1
        models.ended(name, now)

    for _ in range(1000):
        now += random.choice([0, 0.05, 1, 10])
        match random.randrange(9):
            case 0 | 1 | 2:
                name = random.choice(names)
                (running if models.ask(name, now) else waiting)[name] += 1
            case 3 if any(waiting.values()):
                name = random.choice([name for name in names if waiting[name]])
                waiting[name] -= 1
                models.give_up(name)
            case 4 | 5 if any(running.values()):
                end_a_request()
            case 6 if starting:
                end_a_start(fails=random.random() < 0.2)
            case 7 if stopping:
                models.stopped(stopping.pop())
            case 8:
                name = random.choice(names)
                if random.random() < 0.5:
                    models.unload(name)
                elif random.random() < 0.5:
                    models.want(name, now)
                elif models.places[name].state in ("ready", "leaving"):
                    models.died(name)
                    stopping.append(name)
        models.check_integrity()
        follow()

    for _ in range(1000):  # every request that waits is answered at last
        now += 1
        if any(running.values()):
            end_a_request()
        if starting:
            end_a_start(fails=False)
        if stopping:
            models.stopped(stopping.pop())
        follow()
    assert not any(waiting.values())
    assert not any(running.values())
    assert not starting
    assert not stopping
