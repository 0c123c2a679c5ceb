"""The time of a step by a roofline model (Williams et al. 2009): what it reads, multiplies, exchanges and launches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.devices.layouts import device_bytes
from jaxserve.devices.targets import rates
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.execution.cost import BANDWIDTH_SHARE, CALL_SECONDS, FLOAT32_SHARE, MATMUL_SHARE
from jaxserve.models.quantized import STACKS
from jaxserve.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    LatentAttentionSpec,
    PooledChoiceSpec,
    RecurrentSpec,
)
from jaxserve.pallas_kernels.types import has_scale
from jaxserve.plan.deployment import Deployment

# Bytes per second that a device sends to the others, by parts of a device_kind; the first match counts. From NVIDIA's
# data sheets (NVLink, PCIe) and Google Cloud's pages on TPU versions, as of late 2026; half of what both ways give.
LINKS = {"B200": 900e9, "H200": 450e9, "H100": 450e9, "A100": 300e9, "v6 lite": 224e9, "v5 lite": 100e9,
         "TPU v5": 300e9, "TPU7x": 300e9}  # fmt: skip
OTHER_LINK = 25e9
LINK_SECONDS = 1e-5  # start of a collective; assumed
LAUNCH_SECONDS = 2.5e-6  # of a kernel on a GPU; assumed
# Launches of a decode step that is not compiled, on a GPU: of a layer of Llama compiled for one H200 and for eight, of
# what experts add to a layer of Mixtral, and outside of layers.
LAYER_LAUNCHES = 9
SHARED_LAYER_LAUNCHES = 12
MIXTURE_LAUNCHES = 15
OTHER_LAUNCHES = 50
CPU_BANDWIDTH = 1e10  # of an unmeasured CPU
CPU_MATMUL = 5e10  # of an unmeasured CPU
SUMS = 2  # all-reduces of a layer


@dataclass(frozen=True)
class Constants:
    """The rates of one device that the model multiplies with.

    Attributes:
      bandwidth: bytes of memory per second.
      matmul: floating-point operations per second in products.
      call, layer, launch: seconds per call of a step, per layer beside its work, and per launch of a kernel. Measured
        seconds of a layer contain its launches.
      link, link_start: bytes per second to other devices, and seconds until a collective starts.
      overlaps: reading the weights and multiplying go on at the same time; on CPUs they add up.
      cache: bytes of cached keys and values that attention reads per second; None: as fast as `bandwidth`.
      source: "data sheet", "assumed" or "measured".
      when: the day of the measurement.
    """

    bandwidth: float
    matmul: float
    call: float = CALL_SECONDS
    launch: float = LAUNCH_SECONDS
    link: float = OTHER_LINK
    link_start: float = LINK_SECONDS
    overlaps: bool = True
    source: str = "data sheet"
    layer: float = 0.0
    cache: float | None = None
    when: str = ""

    @classmethod
    def of(cls, deployment: Deployment) -> Constants:
        """By the device's data sheet, at the shares of it that `execution.cost` reckons with."""
        device = deployment.device
        if device.platform == "cpu":
            return cls(CPU_BANDWIDTH, CPU_MATMUL, overlaps=False, source="assumed")
        speed = rates(device)
        short = np.dtype(deployment.plan.dtype).itemsize == 2
        link = next((value for kind, value in LINKS.items() if kind in device.device_kind), OTHER_LINK)
        rate = speed.matmul * (MATMUL_SHARE if short else FLOAT32_SHARE)
        return cls(speed.bandwidth * BANDWIDTH_SHARE, rate, link=link)


class Work(NamedTuple):
    """What a step does on one device: bytes of weights that it reads, floating-point operations in products with them,
    cached bytes that it reads, and operations of attention."""

    weights: float
    products: float
    cached: float
    attended: float


class StepTime(NamedTuple):
    """Seconds of a step's parts, and what it does on one device. In a pipeline, sequences wait for other groups."""

    weights: float
    products: float
    attention: float
    communication: float
    overhead: float
    total: float
    bytes: float
    flops: float
    waiting: float = 0.0


def assumed_launches(deployment: Deployment) -> int:
    """Launches of a decode step, by the number of layers; 0 where nothing is launched."""
    if deployment.device.platform in ("cpu", "tpu"):
        return 0
    layers = deployment.plan.model.layers
    each = LAYER_LAUNCHES if deployment.devices == deployment.groups else SHARED_LAYER_LAUNCHES
    mixtures = sum(layer.experts is not None for layer in layers)
    return each * len(layers) + MIXTURE_LAUNCHES * mixtures + OTHER_LAUNCHES


class Weights(NamedTuple):
    """What steps read and multiply with. Bytes are those on one device, operations those on all devices of a group.

    Attributes:
      dense_bytes, expert_bytes: read in each step, and read if a token of the step chooses the expert.
      token_flops, head_flops: of each token, and of each row that is sampled.
    """

    dense_bytes: float
    expert_bytes: float
    token_flops: float
    head_flops: float

    @classmethod
    def of(cls, params: Mapping[str, Any], head: str | None, share: float) -> Weights:
        """head: the path of the output head. share: of all experts, that a token chooses."""
        dense = experts = token = last = 0.0
        for path, w in params.items():
            stored = sum(map(device_bytes, jax.tree.leaves(w)))
            size = math.prod(w.shape)
            if path.endswith(STACKS):
                experts += stored
                token += 2 * size * share
            elif path == head:
                dense += stored
                last += 2 * size
            elif not path.endswith("embed/table"):  # of which steps read rows only
                dense += stored
                token += 2 * size if len(w.shape) == 2 else 0
        return cls(dense, experts, token, last)


def _head(plan: ModelPlan) -> str | None:
    """The path of the output head; None: these layers are followed by others."""
    stage: Any = plan.decoder.stage
    if stage is not None and not stage.is_last:
        return None
    return "embed/table" if plan.model.tie_embeddings else "head/kernel"


class Roofline:
    """Reckons the time of steps of a deployment. Groups of devices run a step together, each with its own sequences;
    tokens and rows are those of one group, and all groups are taken to have as many.

    Args:
      launches: of a step, as the compiler says; None: they are assumed.
    """

    num_stages = 1

    def __init__(self, deployment: Deployment, constants: Constants, launches: int | None = None):
        self.constants = constants
        self._launches = assumed_launches(deployment) if launches is None else launches
        plan = deployment.plan
        model = deployment.plan.model
        params = deployment.params
        self.groups = deployment.groups
        self._each = deployment.devices // deployment.groups
        self._hidden = model.hidden_size
        self.layers = model.num_layers
        self._mixtures = sum(layer.experts is not None for layer in model.layers)
        self._itemsize = np.dtype(plan.dtype).itemsize
        experts = next((layer.experts for layer in model.layers if layer.experts is not None), None)
        self._unused = 1.0 - (experts.router.top_k / experts.count if experts is not None else 0.0)
        self.weights = Weights.of(params, _head(plan), 1.0 - self._unused)
        specs = [spec for spec in model.specs if not isinstance(spec, RecurrentSpec)]
        layout = plan.one_page
        # For each window, how many layers see so far: by the parts of pages that they read, and by their heads' sizes.
        self._parts = defaultdict[int, float](float)
        self._sizes = defaultdict[int, float](float)
        for one in specs:
            window = _sight(one)
            self._parts[window] += 1 / layout.kind.fit(one, plan.decoder.kv_heads)
            self._sizes[window] += one.head_dim / specs[0].head_dim
        self._row_bytes = layout.device_page_bytes(plan.mesh) / layout.groups.depth / layout.page_size
        spec = model.attention
        width = 2 * spec.head_dim
        self._indexers = 0.0  # layers that compare the keys of all cached tokens
        self._key_bytes = self._compare_flops = 0
        compared = 0  # numbers of the keys that are compared
        if isinstance(spec, LatentAttentionSpec):
            width = 2 * spec.rank + spec.rope_dim
            if (indexer := spec.indexer) is not None:
                self._indexers = sum(one.chooses for one in specs if isinstance(one, LatentAttentionSpec))
                compared = indexer.dim
                self._compare_flops = 2 * indexer.heads * indexer.dim
        elif blocks := [layer.blocks for layer in model.layers if layer.blocks is not None]:
            # A key of a whole block counts as a part of a layer.
            self._indexers = sum(1 / one.size if isinstance(one, PooledChoiceSpec) else 1 for one in blocks)
            compared = blocks[0].dim
            self._compare_flops = 2 * getattr(blocks[0], "heads", spec.num_kv_heads) * compared
        self._key_bytes = compared * (2 if has_scale(layout.dtype) else layout.dtype.itemsize)
        self._row_bytes -= self._key_bytes
        self._pair_flops = 2 * spec.num_heads * width

    def work(self, tokens: int, rows: int, contexts: Any, counts: Any = 1) -> Work:
        """What `step` does, for the same arguments."""
        cached, attended = self._attention(np.asarray(contexts, float), np.asarray(counts, float))
        weights = self.weights
        used = weights.dense_bytes + weights.expert_bytes * (1 - self._unused ** (tokens * self.groups))
        flops = (tokens * weights.token_flops + rows * weights.head_flops) / self._each
        return Work(used, flops, cached, attended)

    def step(self, tokens: int, rows: int, contexts: Any, counts: Any = 1) -> StepTime:
        """The time of a step of `tokens` tokens, padding included, that samples `rows` tokens. contexts, counts [rows]:
        of each sequence the tokens that its last token sees, and how many of them the step computes."""
        c = self.constants
        work = self.work(tokens, rows, contexts, counts)
        weights = work.weights / c.bandwidth
        products = work.products / c.matmul
        attention = max(work.cached / (c.cache or c.bandwidth), work.attended / c.matmul)
        sent = self._communication(tokens)
        overhead = c.call + self.layers * c.layer + self._launches * c.launch
        total = (max(weights, products) if c.overlaps else weights + products) + attention + sent + overhead
        done = work.weights + work.cached, work.products + work.attended
        return StepTime(weights, products, attention, sent, overhead, total, *done)

    def stage_seconds(self, tokens: int, rows: int, contexts: Any, counts: Any = 1) -> list[float]:
        """The seconds of `step` in each stage, of which there is one."""
        return [self.step(tokens, rows, contexts, counts).total]

    def decode(self, batch: int, context: int) -> StepTime:
        """The step in which each of `batch` sequences of all groups gains a token: its total is the TPOT."""
        rows = -(-batch // self.groups)
        return self.step(rows, rows, np.full(rows, context))

    def _attention(self, contexts: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
        """(bytes of the cache that a device reads, operations of a device) over all layers. Every device compares all
        keys of indexers."""
        middle = contexts - (counts - 1) / 2  # tokens that a token sees on average
        read = sum(n * np.minimum(contexts, window + counts - 1).sum() for window, n in self._parts.items())
        pairs = sum(n * (np.minimum(middle, window) * counts).sum() for window, n in self._sizes.items())
        keys = self._indexers * contexts.sum() * self._key_bytes
        compared = self._indexers * (middle * counts).sum() * self._compare_flops
        return float(read * self._row_bytes + keys), float(pairs * self._pair_flops / self._each + compared)

    def _communication(self, tokens: int) -> float:
        """Seconds of a step's collectives: in a group of several devices two sums a layer, and between groups, for each
        mixture, a gather of all tokens before it and a scatter of its results."""
        within = SUMS * self.layers * self._exchange(tokens, self._each)
        return within + self._mixtures * self._exchange(tokens * self.groups, self.groups)

    def hand_over(self, tokens: int) -> float:
        """Seconds until the next stage of a pipeline has the hidden states of these tokens."""
        return self.constants.link_start + tokens * self._hidden * self._itemsize / self.constants.link

    def _exchange(self, tokens: int, devices: int) -> float:
        """Seconds of a sum of the hidden states of these tokens over devices, or of their gather and scatter."""
        c = self.constants
        if devices == 1:
            return 0.0
        return c.link_start + 2 * (devices - 1) / devices * tokens * self._hidden * self._itemsize / c.link


def _sight(spec: AttentionSpec | LatentAttentionSpec | CompressedAttentionSpec) -> int:
    """The most tokens that a token of a layer sees. Compressed entries are not counted."""
    if isinstance(spec, LatentAttentionSpec):
        return 2**40 if spec.indexer is None else spec.indexer.top_k
    if isinstance(spec, AttentionSpec) and spec.blocks is not None:
        return spec.blocks.tokens
    return spec.window or getattr(spec, "chunk", None) or 2**40


def prompt_seconds(roofline: Any, tokens: int, most: int) -> float:
    """Seconds until the first token of a prompt that runs alone, in steps of at most `most` tokens: the TTFT.
    roofline: a `Roofline` or a `PipelineRoofline`."""
    free = [0.0] * roofline.num_stages
    ended = 0.0
    for at in range(0, tokens, most):
        count = min(most, tokens - at)
        ended = pass_through(free, 0.0, roofline.stage_seconds(count, 1, [at + count], [count]))
    return ended


def pass_through(free: list[float], begin: float, seconds: Sequence[float]) -> float:
    """When a step ends that begins at a time and takes these seconds in each stage. free: when each stage has finished
    its steps so far; this adds the step to them."""
    for stage, taken in enumerate(seconds):
        begin = free[stage] = max(begin, free[stage]) + taken
    return begin


# The time of steps that pass through the stages of a pipeline, one after the other.


class PipelineRoofline:
    """Reckons the time of steps with the rooflines of the stages, in their order. Running sequences take turns in as
    many groups as there are stages (`row_choice.MicroBatches`), so that a stage works on one group while the next
    stage works on the group before."""

    def __init__(self, stages: Sequence[Roofline]):
        self._stages = stages

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    def stage_seconds(self, tokens: int, rows: int, contexts: Any, counts: Any = 1) -> list[float]:
        """The seconds of `Roofline.step` in each stage, until the next one has what it computed."""
        return [one.total for one in self._times(tokens, rows, contexts, counts)]

    def decode(self, batch: int, context: int) -> StepTime:
        """Each of `batch` sequences gains a token. A group's next step begins when its tokens have left the last stage,
        and when the slowest stage has computed all other groups. The total is the longer of the two, of which waiting
        is what exceeds the first. Other parts are sums over the stages. Bytes and operations are those of all groups
        on the devices that have the most."""
        each = -(-batch // self._stages[0].groups)  # of a group of devices with its own sequences
        groups = min(each, self.num_stages)
        rows = -(-each // groups)
        times = self._times(rows, rows, np.full(rows, context), 1)
        parts = StepTime(*map(sum, zip(*times, strict=True)))
        total = max(parts.total, groups * max(one.total for one in times))
        most = groups * max(one.bytes for one in times), groups * max(one.flops for one in times)
        return parts._replace(total=total, bytes=most[0], flops=most[1], waiting=total - parts.total)

    def _times(self, tokens: int, rows: int, contexts: Any, counts: Any) -> list[StepTime]:
        times = []
        for number, stage in enumerate(self._stages):
            one = stage.step(tokens, rows, contexts, counts)
            sent = stage.hand_over(tokens) if number + 1 < self.num_stages else stage.constants.link_start
            times.append(one._replace(communication=one.communication + sent, total=one.total + sent))
        return times
