"""Small engines for tests, and a way to run requests through one to the end."""

from collections import defaultdict
from dataclasses import dataclass, field

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.execution.step_shape import StepShape
from jaxserve.types import FinishReason, Grammar, Request, SamplingParams, TokenLogprob


def make_engine(
    folder, *, tokens: int = 64, rows: int = 4, decode_steps: bool = True, static_steps: bool | None = None, **config
) -> Engine:
    """An engine with at most two buckets, which compiles fast: decodes of `rows`, mixed steps of `tokens`."""
    config = {"max_num_seqs": rows, "max_num_batched_tokens": tokens, "kv_pages": 200, **config}
    engine = Engine.load(EngineConfig(model=str(folder), **config), progress=False, static_steps=static_steps)
    page_size = engine.page_size
    three = engine.shapes[0].three_positions
    engine.shapes = [StepShape.of(tokens, rows, page_size, decode_only=False, scored=True, three_positions=three)]
    if decode_steps:
        engine.shapes.insert(0, StepShape.of(rows, rows, page_size, decode_only=True, three_positions=three))
    return engine


@dataclass
class Completion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    num_cached: int = 0


def request(request_id: str, prompt, **params) -> Request:
    params = {"temperature": 0.0, "ignore_eos": True, **params}
    return Request(request_id=request_id, prompt_token_ids=[int(t) for t in prompt], params=SamplingParams(**params))


def bound(request_id: str, grammar: Grammar, prompt=(7, 8, 9), **params) -> Request:
    """A request with a grammar, sampled from a flat distribution."""
    params = {"temperature": 1.5, "max_tokens": 300, "seed": 11, "ignore_eos": False, **params}
    return request(request_id, prompt, grammar=grammar, **params)


def run_all(engine: Engine, *requests: Request) -> dict[tuple[str, int], Completion]:
    """All completions of the requests."""
    for one in requests:
        engine.add_request(one)
    return drain(engine)


def drain(engine: Engine, *, check: bool = True) -> dict[tuple[str, int], Completion]:
    """Steps until no work is left; checks the invariants after every step."""
    results: dict[tuple[str, int], Completion] = defaultdict(Completion)
    for _ in range(100_000):
        if not engine.has_work:
            break
        for update in engine.step():
            completion = results[update.request_id, update.index]
            assert completion.finish_reason is None, "an update after the last one"
            completion.token_ids += update.token_ids
            completion.logprobs += update.logprobs or []
            completion.prompt_logprobs = completion.prompt_logprobs or update.prompt_logprobs
            completion.finish_reason = update.finish_reason
            completion.stop_token = update.stop_token
            completion.num_cached += update.num_cached_tokens
        if check:
            engine.scheduler.check_integrity()
    assert not engine.has_work
    assert engine.blocks.num_used == 0
    return dict(results)


def generate(engine: Engine, *requests: Request) -> list[Completion]:
    """The first completion of each request, in order."""
    for one in requests:
        engine.add_request(one)
    results = drain(engine)
    return [results[one.request_id, 0] for one in requests]


def fail_at(call: int, stage) -> None:
    """Lets the last stage of a pipeline fail once, in this call of `step`."""
    calls = 0
    step = stage.step

    def failing(*args):
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("a device failed")
        return step(*args)

    stage.step = failing
