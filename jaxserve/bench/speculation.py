"""What speculative decoding gained in a run: differences of a server's metrics or of an engine's counters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxserve.scheduling.stats import EngineStats

_SAMPLE = re.compile(r"^\w+:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total(?:\{.*\})? (\S+)$", re.M)


@dataclass(frozen=True)
class Checks:
    """drafts: rows whose proposals were checked. proposed: tokens that were proposed for them. accepted: of these,
    tokens that were kept."""

    drafts: float = 0.0
    proposed: float = 0.0
    accepted: float = 0.0

    @classmethod
    def of_metrics(cls, text: str) -> Checks:
        """The counters in Prometheus's text format, by vLLM's names, summed over labels; 0 if they are not there."""
        sums = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
        for name, value in _SAMPLE.findall(text):
            sums[name] += float(value)
        return cls(*sums.values())

    @classmethod
    def of_stats(cls, stats: EngineStats) -> Checks:
        return cls(stats.spec_drafts, stats.spec_proposed, stats.spec_accepted)

    def summary(self, before: Checks) -> dict[str, float]:
        """What happened since `before`; nothing if no proposal was checked. The mean accepted length includes the token
        that each check samples anyway, as vLLM reports it."""
        drafts = self.drafts - before.drafts
        proposed = self.proposed - before.proposed
        if drafts <= 0 or proposed <= 0:
            return {}
        accepted = self.accepted - before.accepted
        return {"mean_accepted_length": 1 + accepted / drafts, "proposals_kept_percent": 100 * accepted / proposed}
