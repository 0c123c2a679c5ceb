"""Lower tiers for the simulation: contents of pages on the simulated device, threads that run when told, and files that
may be lost or damaged."""

from collections import deque
from concurrent.futures import Executor, Future
from random import Random

import numpy as np
from jax import ShapeDtypeStruct
from null_device import Device


class Contents(np.ndarray):
    """Contents of pages, object [pages, page_size], as an array on its way from the devices."""

    def copy_to_host_async(self) -> None:
        pass


class Layout:
    """As `CacheLayout`: a page has one array with a cell per token."""

    copy_sizes = (1, 3)
    page_bytes = 2**24

    def __init__(self, page_size: int):
        self._page_size = page_size

    def contents(self, mesh: None, count: int) -> list[ShapeDtypeStruct]:
        cells = ShapeDtypeStruct((count, self._page_size), np.float32)
        object.__setattr__(cells, "dtype", np.dtype(object))
        return [cells]


class PageRunner:
    """As `ModelRunner`, for copies of pages."""

    mesh = None

    def __init__(self, device: Device):
        self.layout = Layout(device.blocks.page_size)
        self._device = device

    def read_pages(self, pages: list[int]) -> list[tuple[int, list[Contents]]]:
        calls = [pages[at : at + 3] for at in range(0, len(pages), 3)]
        return [(len(some), [self._snapshot(some)]) for some in calls]

    def _snapshot(self, pages: list[int]) -> Contents:
        array = np.empty((3, len(self._device.memory[0])), object)
        for i, page in enumerate(pages):
            assert page != 0
            for j, cell in enumerate(self._device.memory[page]):
                array[i, j] = cell
        return array.view(Contents)

    def write_pages(self, pages: list[int], contents: list[np.ndarray]) -> None:
        for i, page in enumerate(pages):
            assert page != 0
            self._device.memory[page] = contents[0][i].tolist()
        self._device.events["loaded"] += len(pages)


class LateThread(Executor):
    """Runs its calls in their order, some of them each time it is told to."""

    def __init__(self, random: Random):
        self._random, self._calls = random, deque()

    def submit(self, function, /, *arguments) -> Future:
        self._calls.append((future := Future(), function, arguments))
        return future

    def run(self) -> None:
        for _ in range(min(self._random.choice((0, 1, 4)), len(self._calls))):
            future, function, arguments = self._calls.popleft()
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)


class UnreliableFiles:
    """As `PageFiles`: some files are lost, or damaged, which their digests tell."""

    bytes = evictions = damaged = 0

    def __init__(self, random: Random):
        self._random = random
        self._pages = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def touch(self, key: bytes) -> None:
        pass

    def write(self, key: bytes, page: list[np.ndarray]) -> bool:
        self._pages[key] = [array.copy() for array in page]
        return True

    def read(self, key: bytes) -> list[np.ndarray] | None:
        if self._random.random() < 0.2:
            self._pages.pop(key, None)
        return self._pages.get(key)

    def clear(self) -> None:
        self._pages.clear()
