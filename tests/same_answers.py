"""Requests that use what sampling can do, answered by an engine with an option and by one without it."""

import numpy as np
from engines import drain, generate, make_engine, request

PROMPTS = [list(range(5 + i, 25 + 13 * i)) for i in range(4)] + [[7, 8, 9] * 10, [5]]


def requests():
    """Requests that use what sampling can do."""
    shared = PROMPTS[3]
    return [
        *(request(str(i), prompt, max_tokens=12) for i, prompt in enumerate(PROMPTS)),
        request("seeded", shared, max_tokens=9, temperature=0.9, seed=3, top_p=0.9),
        request("several", shared, max_tokens=6, temperature=1.0, seed=4, n=3),
        request("penalties", PROMPTS[0], max_tokens=12, repetition_penalty=1.3, presence_penalty=0.5),
        request("scores", PROMPTS[1], max_tokens=5, logprobs=3, prompt_logprobs=2),
        request("stops", PROMPTS[0], max_tokens=30, temperature=1.5, seed=5, stop_token_ids=list(range(0, 256, 17))),
        request("allowed", PROMPTS[2], max_tokens=7, allowed_token_ids=[11, 12, 13, 14]),
    ]


def answers(engine):
    for one in requests():
        engine.add_request(one)
    found = drain(engine)
    again = generate(engine, request("again", PROMPTS[3], max_tokens=4))[0]  # from the prefix cache
    tokens = {name: (one.token_ids, one.finish_reason) for name, one in found.items()}
    scores = [score.logprob for score in found["scores", 0].logprobs]
    return tokens | {("again", 0): again.token_ids}, scores, again.num_cached


def check_equal(folder, options, others, *, reuses=True):
    """`reuses`: a prefix stays cached until a later request asks for it."""
    alone = answers(make_engine(folder, **others))
    engine = make_engine(folder, **others, **options)
    made = answers(engine)
    assert made[0] == alone[0]
    np.testing.assert_allclose(made[1], alone[1], atol=1e-5)
    assert made[2] > 0 or not reuses
    return engine
