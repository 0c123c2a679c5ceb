"""Seed-OSS: <seed:think>…</seed:think>. With a budget of no tokens the prompt opens the reasoning, and a remark."""

from __future__ import annotations

from jaxserve.server.reasoning import Splitter, ends_inside

OPENING = "<seed:think>"
CLOSING = "</seed:think>"
REMARK = "<seed:cot_budget_reflect>"


class SeedSplitter(Splitter):
    openings = (OPENING,)
    closings = (CLOSING,)


def matches(template: str) -> bool:
    return OPENING in template


def splitter(prompt: str) -> Splitter:
    return SeedSplitter(inside=ends_inside(prompt.rstrip().removesuffix(REMARK), OPENING, CLOSING) is True)
