"""What an engine takes: all of a request or nothing, its parameters checked once, priorities where they are on."""

from array import array
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from engines import make_engine
from engines import request as engine_request

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine.admission import Admission
from jaxserve.engine.constraints import Constraints
from jaxserve.limits import BACKGROUND
from jaxserve.scheduling.beam import Beams
from jaxserve.scheduling.block_manager import BlockManager
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.server.ipc.messages import MAX_FRAME, Submit, decode_api_server_message, to_frame
from jaxserve.types import InvalidRequestError, QueueFullError, Request, SamplingParams


@pytest.fixture
def scheduler() -> Scheduler:
    blocks = BlockManager(40, 4, prefix_caching=False)
    return Scheduler(blocks, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)


def admission(scheduler, vocab_size=1000, **config) -> Admission:
    model = SimpleNamespace(vocab_size=vocab_size, eos_token_ids=(0,), vision=None)
    constraints = Constraints(SimpleNamespace(vocab_size=vocab_size))
    beams = Beams(scheduler, (0,))
    return Admission(EngineConfig(model="m", **config), model, 100, scheduler, constraints, beams)


def requests(count=1, prompt=(1, 2, 3), **params) -> list[Request]:
    shared = SamplingParams(**params)
    return [Request(request_id=f"r{i}", prompt_token_ids=list(prompt), params=shared) for i in range(count)]


def fill(scheduler, more: list[Request]) -> None:
    for arrival, request in enumerate(more):
        scheduler.add(Sequence(request, 0, 0, 5, frozenset(), arrival))


def test_what_requests_share_travels_once_and_is_checked_by_the_front(monkeypatch):
    """1,024 prompts with 131,072 allowed tokens were 1,024 messages of half a megabyte, each checked for itself."""
    params = SamplingParams(allowed_token_ids=(999,) * 2**17, logit_bias={5: 200.0}, stop="x", logprob_token_ids=[3])
    given = [Request(request_id=f"r{i}", prompt_token_ids=[1], params=params) for i in range(1024)]
    frame = to_frame(Submit.of(given))
    assert len(frame) < MAX_FRAME // 200
    checks = []
    check = SamplingParams._check_words
    monkeypatch.setattr(SamplingParams, "_check_words", lambda self: (checks.append(1), check(self)))
    taken = decode_api_server_message(frame[4:]).requests("7/")
    assert not checks
    assert msgspec.structs.asdict(taken[0].params) == msgspec.structs.asdict(params)
    assert isinstance(taken[0].params, SamplingParams)
    assert [request.request_id for request in taken] == [f"7/r{i}" for i in range(1024)]
    assert len({id(request.params) for request in taken}) == 1
    assert [list(request.prompt_token_ids) for request in taken] == [[1]] * 1024


def test_prompts_travel_as_arrays():
    """As lists, 200 waiting prompts of 131,072 tokens made each full garbage collection take 180 ms."""
    given = [
        Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(), page_hashes=hashes)
        for name, prompt, hashes in [("a", [0, 1, 70_000], b"x" * 32), ("b", [5] * 1000, b""), ("c", [], b"")]
    ]
    frame = to_frame(Submit.of(given))
    assert len(frame) < 4 * 1003 + 500
    taken = decode_api_server_message(frame[4:]).requests("0/")
    assert all(isinstance(request.prompt_token_ids, array) for request in taken)
    assert [list(one.prompt_token_ids) for one in taken] == [one.prompt_token_ids for one in given]
    assert [one.page_hashes for one in taken] == [one.page_hashes for one in given]
    assert [one.prompt_token_ids for one in given] == [[0, 1, 70_000], [5] * 1000, []], "the front keeps its own"
    seq = Sequence(taken[0], 0, 0, 5, frozenset(), 1)
    assert np.shares_memory(seq.prompt, np.frombuffer(taken[0].prompt_token_ids, np.int32))


def test_shared_parameters_are_looked_at_once(scheduler, monkeypatch):
    looked = []
    own = Admission._check_params
    monkeypatch.setattr(Admission, "_check_params", lambda self, params: (looked.append(1), own(self, params))[1])
    assert admission(scheduler).check(requests(500, allowed_token_ids=(5,) * 1000, stop_token_ids=(9,))) == (0, 9)
    assert len(looked) == 1


@pytest.mark.parametrize("word", [(), (1,) * 65])
def test_bad_words_of_no_or_many_tokens(word):
    with pytest.raises(InvalidRequestError, match="bad_words") as error:
        SamplingParams(bad_words=(word,))
    assert error.value.param == "bad_words"


@pytest.mark.parametrize("name", ["allowed_token_ids", "bad_words", "logit_bias", "stop_token_ids"])
def test_ids_outside_the_vocabulary(scheduler, name):
    for token, right in ((999, True), (1000, False)):
        value = {"bad_words": ((1, token),), "logit_bias": {token: 1.0}}.get(name, (1, token))
        if right:
            admission(scheduler).check(requests(**{name: value}))
        else:
            with pytest.raises(InvalidRequestError, match=f"{name}: token id 1000 is outside") as caught:
                admission(scheduler).check(requests(**{name: value}))
            assert caught.value.param == name


def test_types_of_ids_are_still_checked():
    for wrong in ((1, True), (1, 2.0), (1, "2"), (-1,), (2**31,)):
        with pytest.raises(InvalidRequestError, match="allowed_token_ids must be"):
            SamplingParams(allowed_token_ids=wrong)


def test_one_bad_prompt_refuses_them_all(scheduler):
    some = requests(3)
    some[2].prompt_token_ids = [1] * 200
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        admission(scheduler).check(some)


def test_the_queue_counts_completions(scheduler):
    """Not requests: one of them may ask for 128."""
    one = admission(scheduler, max_waiting=100)
    one.check_queue(requests(50, n=128))  # it would wait alone
    fill(scheduler, requests(3, n=30))
    assert scheduler.waiting.num_completions == 90
    one.check_queue(requests(1, n=10))
    with pytest.raises(QueueFullError, match="90 completions are waiting, of at most 100"):
        one.check_queue(requests(1, n=11))
    with pytest.raises(QueueFullError):
        one.check_queue(requests(11))
    admission(scheduler).check_queue(requests(1000, n=128))  # offline there is no limit


def test_the_default_limit_of_a_server():
    """In proportion to what it can run at a time."""
    assert EngineConfig(model="m").queue_limit == 8192
    assert EngineConfig(model="m", max_num_seqs=2048).queue_limit == 65_536


def test_scheduling_policies():
    assert EngineConfig(model="m").scheduling_policy == "fcfs"
    with pytest.raises(ConfigError, match="scheduling_policy must be one of fcfs, priority"):
        EngineConfig(model="m", scheduling_policy="fair")


def test_aborted_requests_count_for_nothing(model_folders):
    """Behind one that waits, thousands come and go; then both limits hold as if they had never been there. Without
    priorities, those of batches are behind all others nevertheless."""
    engine = make_engine(model_folders("tp_gqa"), max_waiting=4, max_waiting_tokens=100)
    engine.add_request(engine_request("waits", range(5, 65)))
    for i in range(10_000):
        engine.add_request(engine_request(f"goes-{i}", [5] * 30))
        engine.abort(f"goes-{i}")
    assert engine.num_waiting == len(list(engine.scheduler.waiting)) == 1
    engine.add_request(engine_request("second", [5] * 30))
    with pytest.raises(QueueFullError, match="90 tokens"):
        engine.add_request(engine_request("third", [5] * 30))
    engine.abort("second")
    for i in range(3):
        engine.add_request(engine_request(f"short-{i}", [5] * 3))
    with pytest.raises(QueueFullError, match="4 completions"):
        engine.add_request(engine_request("fifth", [5] * 3))
    for priority in (7, BACKGROUND):
        engine.abort(f"short-{min(priority, 8) - 7}")
        engine.add_request(msgspec.structs.replace(engine_request(f"p{priority}", [5] * 3), priority=priority))
    priorities = {seq.request_id: seq.order[0] for seq in engine.scheduler.waiting}
    assert priorities == {"waits": 0, "short-2": 0, "p7": 0, f"p{BACKGROUND}": BACKGROUND}


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_most_alternatives(scheduler, name):
    assert admission(scheduler, max_logprobs=3).check(requests(**{name: 3})) == (0,)
    with pytest.raises(InvalidRequestError, match=f"{name} is 4; this server gives at most 3"):
        admission(scheduler, max_logprobs=3).check(requests(**{name: 4}))
    with pytest.raises(ConfigError, match="max_logprobs must be between 0 and 20, got 21"):
        admission(scheduler, max_logprobs=21)
