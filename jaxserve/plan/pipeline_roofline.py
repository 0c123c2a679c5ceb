"""The time of steps that pass through the stages of a pipeline, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.plan.roofline import Roofline, StepTime


class PipelineRoofline:
    """Reckons the time of steps with the rooflines of the stages, in their order. Running sequences take turns in as
    many groups as there are stages (`scheduling.micro_batches`), so that a stage works on one group while the next
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
