"""200 requests of every kind through the official client, of which 20 leave midway: nothing is lost or leaked."""

from __future__ import annotations

import asyncio
import random

import pytest
from serving import DEMO, wait_until

MODEL = "test-model"
PROMPTS = [
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\nclass Reader:\n",
    "for i in range(",
    "# Copyright (c)\nimport re\n\ndef match(pattern, text):\n" * 3,
]
LEAVERS = 20
TOTAL = 200

pytestmark = pytest.mark.skipif(not DEMO.is_dir(), reason="the bundled model is missing")


def options(i: int) -> dict:
    """The i-th request's parameters: repeatable, whatever runs beside it."""
    kinds = (
        {"temperature": 0},
        {"temperature": 0.9, "seed": i, "top_p": 0.9},
        {"temperature": 1.2, "seed": i, "n": 3, "presence_penalty": 0.5},
        {"temperature": 0, "stop": ["\n\n", "self"], "logit_bias": {"13": -5}},
        {"temperature": 0.7, "seed": i, "extra_body": {"top_k": 20, "ignore_eos": True, "repetition_penalty": 1.2}},
    )
    return {"max_tokens": 8 + (i * 7) % 24, **kinds[i % len(kinds)]}


async def answer(client, i: int, stream: bool) -> list[str]:
    """The texts of the i-th request's choices; the even ones are chats."""
    prompt = PROMPTS[i % len(PROMPTS)]
    if i % 2 == 0:
        messages = [{"role": "user", "content": prompt}]
        call = client.chat.completions.create(model=MODEL, messages=messages, stream=stream, **options(i))
    else:
        call = client.completions.create(model=MODEL, prompt=prompt, stream=stream, **options(i))
    result = await call
    texts: dict[int, str] = {}
    if not stream:
        for choice in result.choices:
            texts[choice.index] = choice.message.content if i % 2 == 0 else choice.text
    else:
        async for chunk in result:
            for choice in chunk.choices:
                piece = choice.delta.content if i % 2 == 0 else choice.text
                texts[choice.index] = texts.get(choice.index, "") + (piece or "")
    return [texts[index] for index in sorted(texts)]


async def leave_midway(client, i: int) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt=PROMPTS[i % 4], stream=True, max_tokens=100, extra_body={"ignore_eos": True}, n=1 + i % 3
    )
    async for _ in stream:
        break
    await stream.close()


@pytest.mark.slow
def test_mixed_requests(demo_server):
    async def run() -> tuple[list[list[str]], list[list[str]]]:
        async with demo_server.openai_async(timeout=240) as client:
            work = [leave_midway(client, i) for i in range(LEAVERS)]
            work += [answer(client, i, stream=i % 3 != 0) for i in range(TOTAL - LEAVERS)]
            order = list(range(TOTAL))
            random.Random(0).shuffle(order)
            results = await asyncio.gather(*(work[i] for i in order))
            crowded = [text for _, text in sorted(zip(order, results, strict=True), key=lambda pair: pair[0])][LEAVERS:]
            alone = [await answer(client, i, stream=i % 3 == 0) for i in range(0, TOTAL - LEAVERS, 9)]
            return crowded, alone

    crowded, alone = asyncio.run(run())
    assert len(crowded) == TOTAL - LEAVERS
    assert crowded[::9] == alone, "an answer depends on what ran beside it, or on being streamed"
    assert any(any(texts) for texts in crowded)
    wait_until(lambda: demo_server.metric("num_requests_running") == demo_server.metric("num_requests_waiting") == 0)
    assert demo_server.metric("kv_cache_usage_perc") == 0
    assert demo_server.metric("num_preemptions_total") > 0, "the load was meant to exhaust the pages"
    assert demo_server.status("/health") == 200
