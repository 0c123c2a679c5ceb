"""The encoder on the devices: its weights, and a program for each of a few numbers of patches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from jaxserve.devices import layouts
from jaxserve.devices.command_buffers import compiler_options
from jaxserve.devices.mesh import replicated
from jaxserve.execution.image_packing import Frame, pack
from jaxserve.execution.memory import Needs
from jaxserve.execution.signatures import Signature
from jaxserve.models.vision.encoder import ImageEncoder, Patches, encode
from jaxserve.scheduling.image_prompts import EncoderJob

FEWEST = 256  # rows of patches of the smallest program
GROWTH = 4  # how many times as many the next program takes


class EncoderRunner:
    """Computes features of pictures and writes them to rows of an array of the runner's slots.

    Attributes:
      sizes: the numbers of rows of patches for which there are programs, in ascending order.
      rows: of the array of features.
      on_done: called in a thread with the seconds from a call of the encoder to its results.
    """

    def __init__(self, encoder: ImageEncoder, params: Any, mesh: Mesh, *, fewest: int, most: int, rows: int):
        """`fewest`, `most`: rows of the frames that go through the smallest program, and through the largest."""
        self.encoder = encoder
        self.mesh = mesh
        self.params = params
        self.rows = rows
        self.sizes = list(sizes_for(fewest, most, encoder.config.joined))
        self.compile_seconds = 0.0
        self.on_done: Callable[[float], None] = lambda seconds: None
        self._waiter = ThreadPoolExecutor(1, "encoder")
        self.executables: dict[int, Compiled] = {}

    @property
    def rows_shape(self) -> tuple[int, int]:
        return self.rows, self.encoder.config.width

    @property
    def written_shape(self) -> tuple[int, int]:
        """Of the array to which the programs write features."""
        return self.rows_shape

    @property
    def programs(self) -> list[int]:
        """Each by its number of rows."""
        return self.sizes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters on each device."""
        return sum(layouts.device_bytes(x) for x in jax.tree.leaves(self.params))

    @property
    def rows_bytes(self) -> int:
        """Bytes of the array of features on each device."""
        return math.prod(self.rows_shape) * np.dtype(self.encoder.dtype).itemsize

    @property
    def needs(self) -> Needs:
        """The memory that the programs need, if the largest is compiled. Their results are written to the slots."""
        compiled: dict[int, Any] = {size: one.memory_analysis() for size, one in self.executables.items()}
        missing = len(self.sizes) - len(compiled)
        pending = [max(one.generated_code_size_in_bytes for one in compiled.values())] * missing if compiled else []
        return replace(Needs.of(list(compiled.values()), pending), results=0)

    def compile(self) -> None:
        """Compiles the programs."""
        for size in self.programs:
            self._get(size)

    def compile_largest(self) -> None:
        self._get(self.sizes[-1])

    def encode(self, images: jax.Array, jobs: Sequence[EncoderJob]) -> jax.Array:
        """Computes the features of pictures and writes them to their rows of `images`, which is donated. Returns the
        new array at once; the devices may still be computing it."""
        for some in self._batches(jobs):
            count = sum(map(self._rows, some))
            size = next(size for size in self.sizes if size >= count)
            patches, targets = pack(self.encoder.config, some, size, self.written_shape[0])
            start = time.perf_counter()
            images, done = self._get(size)(self.params, images, patches, targets, np.int32(count))
            self._waiter.submit(self._wait, done, start)
        return images

    def _wait(self, done: jax.Array, start: float) -> None:
        done.block_until_ready()
        self.on_done(time.perf_counter() - start)

    def _rows(self, frame: Frame) -> int:
        return len(frame.patches) + self.encoder.config.further

    def _batches(self, jobs: Sequence[EncoderJob]) -> Iterator[list[Frame]]:
        """Frames that go together through the largest program, or a smaller one."""
        batch: list[Frame] = []
        count = 0
        for frame in (frame for job in jobs for frame in frames_of(job)):
            if batch and count + self._rows(frame) > self.sizes[-1]:
                yield batch
                batch = []
                count = 0
            batch.append(frame)
            count += self._rows(frame)
        if batch:
            yield batch

    def _get(self, size: int) -> Compiled:
        if size not in self.executables:
            start = time.perf_counter()
            self.executables[size] = self.lower(size).compile(compiler_options=compiler_options(self.mesh))
            self.compile_seconds += time.perf_counter() - start
        return self.executables[size]

    def lower(self, size: int) -> jax.stages.Lowered:
        """Traces and lowers the program for so many patches, for which shapes suffice."""
        function, donated, arguments, results = self.signature(size)
        precision = "highest" if self.encoder.dtype == jnp.float32 else "default"
        with jax.default_matmul_precision(precision), jax.set_mesh(self.mesh):
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=results, keep_unused=True)
            return jitted.trace(*arguments).lower()

    @property
    def signatures(self) -> dict[str, Signature]:
        """Of all programs, by their names."""
        made = [self.signature(size) for size in self.programs]
        return {one.function.__name__: one for one in made}

    @property
    def compiled(self) -> dict[str, Compiled]:
        """All programs by the names of `signatures`. They must have been compiled."""
        return {name: self.executables[size] for name, size in zip(self.signatures, self.programs, strict=True)}

    @compiled.setter
    def compiled(self, given: Mapping[str, Compiled]) -> None:
        self.executables = {size: given[name] for name, size in zip(self.signatures, self.programs, strict=True)}

    def signature(self, size: int) -> Signature:
        """Describes the program for so many patches."""
        encoder = self.encoder
        everywhere = replicated(self.mesh)

        def like(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", everywhere))

        def program(
            params: Any, images: jax.Array, patches: Patches, targets: jax.Array, count: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            features = encode(encoder, params, patches, count)
            return images.at[targets].set(features.astype(images.dtype), mode="drop"), features[0, 0]

        program.__name__ = f"encode_{size}"
        patches, targets = pack(encoder.config, [], size, self.written_shape[0])
        images = jax.ShapeDtypeStruct(self.written_shape, encoder.dtype, sharding=everywhere)
        arguments = jax.tree.map(like, (self.params, images, patches, targets, np.int32(0)))
        return Signature(program, (1,), arguments, everywhere)


def frames_of(job: EncoderJob) -> list[Frame]:
    count, rows, columns = job.image.grid
    patches = np.frombuffer(job.image.patches, np.uint8).reshape(count, rows * columns, -1)
    return [
        Frame(own, (rows, columns), targets) for own, targets in zip(patches, np.split(job.rows, count), strict=True)
    ]


def sizes_for(fewest: int, most: int, joined: int) -> Iterator[int]:
    """The numbers of rows for which there are programs, each GROWTH times as many as the one before. They are multiples
    of `joined`."""
    step = max(FEWEST // joined, 1) * joined
    size = -(-fewest // step) * step
    while size < most:
        yield size
        size = size * GROWTH
    yield -(-most // step) * step
