"""The cost of a step on an accelerator: the longer of reading the weights and computing the tokens, as in the roofline
model (Williams et al. 2009). Sizes of buckets, batches and chunks of prompts follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.devices.targets import rates
from jaxserve.execution.memory import bytes_by_dtype
from jaxserve.models.spec import ModelConfig
from jaxserve.pallas_kernels.types import BlockArray, PanelArray, QuantArray

# of the data sheet; an H200 reached 4.3 of 4.8 TB/s and 790 of 989 TFLOP/s
BANDWIDTH_SHARE = 0.9
MATMUL_SHARE = 0.8
FLOAT32_SHARE = 1 / 12  # share of the 16-bit matmul rate for products in true float32
CALL_SECONDS = 2e-4  # seconds per call for launches and the gaps between them; assumed, not measured
LINK = 50e9  # bytes per second from host memory to a device: PCIe 5.0 x16 has 63 GB/s; assumed, not measured
CONTEXT = 2048  # cached tokens that a prompt's token is assumed to attend to
FEW = 16  # minimum of tokens of a bucket for steps with prompts
CPU_PREFILL_CHUNK = 32  # the time of a step on CPU is proportional to its tokens
FREE = 1.1  # a step that costs up to this factor more than the smallest one counts as equally fast
NEWEST = 0.2  # weight of the newest step in the average of `MeasuredChunk`
OUTLIER = 2.0  # a step counts as at most so much faster or slower than the average, as the host may have been paused


@dataclass(frozen=True)
class StepCost:
    """The time of a step on the devices that share it, in seconds.

    Attributes:
      weights: seconds for reading the weights once, or for copying those that are in host memory, whichever is longer.
      token: seconds for the products of one token with the weights; padding costs as much.
      attention: seconds for the attention of a prompt's token to CONTEXT cached ones; padding costs nothing.
    """

    weights: float
    token: float
    attention: float = 0.0

    @classmethod
    def of(
        cls, params: Any, model: ModelConfig, device: Any, devices: int, compute: Any, streamed: int = 0
    ) -> StepCost | None:
        """The cost for a model's parameters (or their shapes), sharded over `devices` devices like `device`, with
        activations of dtype `compute`. Each step copies `streamed` bytes of them from host memory to each device. None
        on CPU: CPUs differ too much, and buckets were chosen by measurement."""
        if device.platform == "cpu":
            return None
        speed = rates(device)
        looked_up = {"per_layer"} | ({"embed"} if "head" in params else set())
        read = {name: part for name, part in params.items() if name not in looked_up}
        stored = sum(bytes_by_dtype(read).values())
        layers = [part for name, part in params.items() if name.startswith("layers_")]
        matrices = [w for w in jax.tree.leaves(layers, is_leaf=_is_quantized) if len(w.shape) == 2]
        attention = 4 * model.num_layers * model.num_heads * model.head_dim * min(CONTEXT, model.max_position)
        products = 2 * sum(math.prod(w.shape) for w in matrices)
        rate = devices * speed.matmul * (MATMUL_SHARE if np.dtype(compute).itemsize == 2 else FLOAT32_SHARE)
        reading = max(stored / (speed.bandwidth * BANDWIDTH_SHARE), streamed / LINK)
        return cls(reading, products / rate, attention / rate)

    def __call__(self, tokens: int) -> float:
        """Seconds of one call with `tokens` tokens, padding included."""
        return CALL_SECONDS + max(self.weights, tokens * self.token)

    def chunk(self, goal: float) -> int:
        """Tokens of a step that computes prompts while others decode: as many as fit `goal` seconds. If reading the
        weights takes longer than that, as many as cost little more than reading the weights. The result has three
        significant bits and is at least FEW.
        """
        allowed = max(goal, FREE * self(1)) - CALL_SECONDS
        tokens = int(allowed / (self.token + self.attention))
        step = 1 << max(tokens.bit_length() - 3, 0)
        return max(tokens // step * step, FEW)


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QuantArray | BlockArray | PanelArray)


def prefill_chunk(config: EngineConfig, cost: StepCost | None) -> int:
    """The most tokens of a step that computes prompts while others decode. `cost`: of an accelerator's steps. For most
    engines, `MeasuredChunk` replaces it after the first steps."""
    if config.prefill_chunk is not None:
        return config.prefill_chunk
    return CPU_PREFILL_CHUNK if cost is None else cost.chunk(config.latency_goal(on_cpu=False))


class MeasuredChunk:
    """The size of steps that compute prompts while others decode: what fits the latency goal by the time that these
    steps take on this machine. They also read the cache of the rows that decode, which `StepCost` does not know.

    Attributes:
      tokens: of the next such step, prompts and decodes; always those of a bucket.
      least: tokens that prompts get of it at least: an eighth of the estimated chunk.
      slowdown: how many times as long as estimated these steps take, a recent average.
    """

    def __init__(self, cost: StepCost, goal: float, sizes: Sequence[int]):
        """goal: seconds of a step. sizes: tokens of the buckets for prompts, ascending."""
        self._cost = cost
        self._goal = goal
        self._sizes = sizes
        self.tokens, self.least, self.slowdown = cost.chunk(goal), -(-cost.chunk(goal) // 8), 1.0

    @classmethod
    def of(cls, config: EngineConfig, cost: StepCost | None, sizes: Sequence[int]) -> MeasuredChunk | None:
        """None where the chunk stays as it is: on CPU, with a chunk that was asked for, and in pipelines, where the
        time between two results is not that of a step."""
        if cost is None or config.prefill_chunk is not None:
            return None
        return None if config.pipeline_parallel_size > 1 else cls(cost, config.latency_goal(on_cpu=False), sizes)

    def estimate(self, sizes: Sequence[int], counts: np.ndarray, groups: int = 1) -> float | None:
        """Seconds of a step by data sheet: calls of these sizes, in tokens, for rows of `counts` tokens, which are
        shared out over groups of devices. None for a step without prompts or without decodes."""
        prompts = counts[counts > 1]
        if len(prompts) in (0, len(counts)):
            return None
        return sum(map(self._cost, sizes)) + int(prompts.sum()) / groups * self._cost.attention

    def took(self, seconds: float, estimated: float) -> None:
        """Notes the time of a step of which `estimate` was not None."""
        newest = min(max(seconds / estimated, self.slowdown / OUTLIER), self.slowdown * OUTLIER)
        self.slowdown += NEWEST * (newest - self.slowdown)
        allowed = FREE * max(self._goal / self.slowdown, FREE * self._cost(1))
        fitting = [size for size in self._sizes if self._cost(size) + size * self._cost.attention <= allowed]
        free = next((size for size in self._sizes if size >= self._cost.chunk(0.0)), self._sizes[-1])
        self.tokens = max([free, *fitting])
