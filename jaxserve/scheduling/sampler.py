"""The kinds of compiled samplers, and which of them a sequence needs."""

from __future__ import annotations

from enum import IntEnum

from jaxserve.types import SamplingParams


class Sampler(IntEnum):
    """What a compiled step can do for its rows. Each kind also does what the kinds before it do, with equal results."""

    NONE = -1  # samples nothing and computes no logits
    GREEDY = 0  # the most likely token
    PLAIN = 1  # samples at a temperature
    FILTERED = 2  # top-k, top-p and min-p
    FULL = 3  # penalties, bias, min_tokens and log-probabilities
    ANY = 4  # all of these, chosen at run time

    @classmethod
    def of(cls, params: SamplingParams) -> Sampler:
        """The least capable kind for these parameters. Sequences with a mask are left to `steps.sample_deferred`."""
        if params.has_mask:
            return cls.GREEDY
        if params.has_penalties or params.logit_bias or params.min_tokens or params.logprobs is not None:
            return cls.FULL
        if params.greedy:
            return cls.GREEDY
        return cls.FILTERED if params.top_k > 0 or params.top_p < 1 or params.min_p > 0 else cls.PLAIN
