"""What an engine has its devices do, as messages: another runner that runs them gets the same tokens."""

import msgspec
import numpy as np
import pytest
from engines import drain, make_engine, request

from jaxserve.execution import runner_commands

pytestmark = pytest.mark.compiles

CASE = "tp_gqa"


def served(engine):
    """Answers to requests of many kinds, and the tokens of each step as the devices gave them."""
    prompts = [np.random.default_rng(i).integers(5, 300, 9 + 17 * i).tolist() for i in range(6)]
    wishes = [
        {"max_tokens": 12},
        {"max_tokens": 9, "temperature": 0.8, "seed": 5, "top_p": 0.9},
        {"max_tokens": 7, "presence_penalty": 0.7, "logprobs": 2},
        {"max_tokens": 5, "prompt_logprobs": 1},
        {"max_tokens": 6, "n": 3, "temperature": 1.0, "seed": 3},
        {"max_tokens": 8, "allowed_token_ids": list(range(20, 60))},
    ]
    for i, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
        engine.add_request(request(f"r{i}", prompt, **wish))
    return {key: completion.token_ids for key, completion in drain(engine).items()}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_log_gives_the_same_tokens_elsewhere(devices, model_folders):
    settings = {"rows": 4, "tokens": 48, "kv_pages": 60, "page_size": 8, "tensor_parallel_size": devices}
    first, second = (make_engine(model_folders(CASE), **settings) for _ in range(2))
    log = []
    drawn = []
    first.runner.listener = lambda command: log.append(runner_commands.encode(command))
    step = first.runner.step

    def spy(program, packed):
        sampled, hidden = step(program, packed)
        drawn.append(sampled.tokens)
        return sampled, hidden

    first.runner.step = spy
    assert len(served(first)) == 8
    kinds = set()
    again = []
    for message in log:
        command = runner_commands.decode(message)
        kinds.add(type(command).__name__)
        result = second.runner.run(command)
        if isinstance(command, runner_commands.Step):
            again.append(result[0].tokens)
    assert kinds >= {"Step", "SetSlots", "CountTokens", "SampleDeferred", "CopyPages", "ScorePrompt"}
    assert len(again) == len(drawn) > 10
    for one, other in zip(drawn, again, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_message_comes_back_as_it_was():
    entries = np.arange(12, dtype=np.int32).reshape(3, 4)[:, 1:]
    command = runner_commands.decode(runner_commands.encode(runner_commands.UpdateTables([(1, 2)], entries)))
    assert command.copies == [(1, 2)]
    np.testing.assert_array_equal(command.entries, entries)
    assert command.entries.dtype == np.int32


@pytest.mark.parametrize("message", [b"", b"\x81\xa4type\xa3Nap", b"\xc1"])
def test_what_is_no_command(message):
    with pytest.raises(msgspec.DecodeError):
        runner_commands.decode(message)
