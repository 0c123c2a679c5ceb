"""The offline API, on a tiny model with a real tokenizer."""

import json
import math
import shutil
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import tiny_models

from jaxserve import LLM, SamplingParams, jax_pools
from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.config import ConfigError
from jaxserve.engine.engine import Engine
from jaxserve.execution.step_shape import StepShape
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import InvalidRequestError

CASE = "qwen2_tied"  # generation_config.json recommends temperature 0.7, top_k 20 and top_p 0.8
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
TEXT = "all happy families"
ROWS = 4
TOKENS = 64


@pytest.fixture(scope="module")
def shared_llm(model_folders):
    llm = LLM(model_folders(CASE), max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, kv_pages=200, max_model_len=256)
    # one bucket for each kind of step, to compile little
    size = llm.engine.page_size
    mixed = StepShape.of(TOKENS, ROWS, size, decode_only=False, scored=True)
    decode = StepShape.of(ROWS, ROWS, size, decode_only=True)
    llm.engine.shapes = [mixed, decode]
    return llm


@pytest.fixture
def llm(shared_llm):
    """After each test nothing may run, and every page must be free."""
    yield shared_llm
    while shared_llm.engine.has_work:  # steps of completions that have ended since
        assert not len(shared_llm.engine.step())
    assert shared_llm.engine.blocks.num_used == 0
    stats = shared_llm.engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert not shared_llm._inboxes


def one(results):
    (result,) = results
    (output,) = result.outputs
    return output


def greedy(**changes):
    return msgspec.structs.replace(GREEDY, **changes)


@pytest.fixture(scope="module")
def answer(shared_llm):
    """The continuation of TEXT."""
    output = one(shared_llm.generate(TEXT, GREEDY, progress=False))
    assert len(set(output.token_ids)) > 8
    return output


# Prompts


@pytest.mark.slow
def test_a_prompt_in_all_its_forms(llm, answer):
    ids = llm.tokenizer.encode(TEXT)
    forms = [TEXT, ids, tuple(ids), np.asarray(ids, np.int32), {"prompt": TEXT}, {"prompt_token_ids": ids}]
    forms += [{"prompt": "shown", "prompt_token_ids": [np.int64(token) for token in ids]}]
    results = llm.generate(forms, GREEDY, progress=False)
    assert [result.prompt for result in results] == [TEXT, None, None, None, TEXT, None, "shown"]
    assert all(result.prompt_token_ids == ids and result.finished for result in results)
    assert [result.outputs[0].text for result in results] == [answer.text] * len(forms)
    for form in forms:  # each as a single prompt, not in a list
        assert one(llm.generate(form, GREEDY, progress=False)).token_ids == answer.token_ids


def test_text_is_the_tokens_decoded(llm, answer):
    assert answer.text == llm.tokenizer.decode(answer.token_ids)
    assert (answer.finish_reason, answer.stop_reason, answer.logprobs) == ("length", None, None)
    assert answer.cumulative_logprob is None


def test_results_are_in_the_order_of_the_prompts(llm):
    prompts = [f"{word} {i}" for i, word in enumerate(["a", "longer prompt " * 9, "b", "see", "dee " * 5, "e"])]
    params = [greedy(max_tokens=3 + 5 * (i % 3)) for i in range(len(prompts))]
    results = llm.generate(prompts, params, progress=False)
    assert [result.prompt for result in results] == prompts
    assert [len(result.outputs[0].token_ids) for result in results] == [3, 8, 13, 3, 8, 13]
    alone = [one(llm.generate(p, own, progress=False)).token_ids for p, own in zip(prompts, params, strict=True)]
    assert [result.outputs[0].token_ids for result in results] == alone


def test_sleep_and_new_weights(llm, answer, model_folders):
    compiled = llm.engine.runner.num_executables
    llm.sleep(level=2)
    llm.wake_up()
    llm.sleep()
    llm.update_weights(model_folders(CASE))
    llm.update_weights((name, tensor.read()) for name, tensor in read_folder(model_folders(CASE)).items())
    assert llm.generate(TEXT, GREEDY, progress=False)[0].outputs[0].token_ids == answer.token_ids
    assert llm.engine.runner.num_executables == compiled


def test_no_prompts(llm):
    assert llm.generate([], GREEDY) == llm.chat([], GREEDY) == []


def test_prefixes_are_reused(llm):
    prompt = llm.tokenizer.encode("once upon a time " * 10)
    llm.generate(prompt, GREEDY, progress=False)
    (again,) = llm.generate(prompt, GREEDY, progress=False)
    assert again.num_cached_tokens == (len(prompt) - 1) // 16 * 16 > 0


# Sampling


def test_completions_of_one_prompt(llm):
    params = SamplingParams(n=6, temperature=1.5, seed=3, max_tokens=8, ignore_eos=True)
    (result,) = llm.generate(TEXT, params, progress=False)
    assert [output.index for output in result.outputs] == list(range(6))
    assert len({tuple(output.token_ids) for output in result.outputs}) == 6
    (again,) = llm.generate(TEXT, params, progress=False)
    assert again.outputs == result.outputs


def test_the_models_recommendations_are_the_defaults(llm):
    params = llm.default_params()
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.7, 20, 0.8, 16)
    (result,) = llm.generate(TEXT, progress=False)
    assert 1 <= len(result.outputs[0].token_ids) <= 16


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_from_the_middle(llm, answer, include):
    stop = answer.text[9:12]
    place = answer.text.index(stop)
    output = one(llm.generate(TEXT, greedy(stop=(stop,), include_stop_str_in_output=include), progress=False))
    assert output.text == answer.text[: place + (len(stop) if include else 0)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == answer.token_ids[: len(output.token_ids)] != answer.token_ids


def test_stop_token(llm, answer):
    token = answer.token_ids[6]
    place = answer.token_ids.index(token)
    output = one(llm.generate(TEXT, greedy(stop_token_ids=(token,)), progress=False))
    assert (output.finish_reason, output.stop_reason) == ("stop", token)
    assert output.token_ids == answer.token_ids[: place + 1]
    assert output.text == llm.tokenizer.decode(answer.token_ids[:place])


def test_end_of_sequence(llm):
    eos = llm.engine.eos_token_ids[0]
    output = one(llm.generate(TEXT, greedy(ignore_eos=False, logit_bias={eos: 100.0}), progress=False))
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == ([eos], "", "stop", None)


# Logprobs


def test_log_probabilities_of_named_tokens(llm, answer):
    most_likely = one(llm.generate(TEXT, greedy(logprobs=20), progress=False)).logprobs
    named = [token for token, _ in most_likely[0].top[15:2:-3]]
    output = one(llm.generate(TEXT, greedy(logprob_token_ids=named), progress=False))
    assert output.token_ids == answer.token_ids
    assert [token for token, _ in output.logprobs[0].top] == named
    assert [value for _, value in output.logprobs[0].top] == [dict(most_likely[0].top)[token] for token in named]
    assert [token for token, _ in output.logprobs[-1].top] == named
    for fields in ({"logprob_token_ids": [10**6]}, {"logprob_token_ids": list(range(21))}):
        with pytest.raises(InvalidRequestError, match="logprob_token_ids"):
            llm.generate(TEXT, greedy(**fields), progress=False)


def test_logprobs_and_prompt_logprobs_agree(llm, answer):
    output = one(llm.generate(TEXT, greedy(logprobs=3), progress=False))
    assert [entry.token_id for entry in output.logprobs] == output.token_ids == answer.token_ids
    for entry in output.logprobs:  # greedy takes the most likely token
        assert entry.rank == 1
        assert entry.top[0] == (entry.token_id, entry.logprob)
        assert len(entry.top) == 3
        assert entry.top == sorted(entry.top, key=lambda pair: -pair[1])
        assert sum(math.exp(logprob) for _, logprob in entry.top) <= 1 + 1e-5
    assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in output.logprobs))

    prompt = llm.tokenizer.encode(TEXT) + output.token_ids
    (scored,) = llm.generate(prompt, greedy(max_tokens=0, prompt_logprobs=3), progress=False)
    assert scored.prompt_logprobs[0] is None
    assert [entry.token_id for entry in scored.prompt_logprobs[1:]] == prompt[1:]
    for a, b in zip(scored.prompt_logprobs[-len(output.token_ids) :], output.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert [token for token, _ in a.top] == [token for token, _ in b.top]


def test_all_logprobs_sum_to_one(llm):
    """Over the whole vocabulary: each token is scored as the last one of a prompt."""
    ids = llm.tokenizer.encode(TEXT)
    vocab = llm.engine.vocab_size
    params = greedy(max_tokens=0, prompt_logprobs=0)
    results = llm.generate([ids + [token] for token in range(vocab)], params, progress=False)
    assert sum(math.exp(result.prompt_logprobs[-1].logprob) for result in results) == pytest.approx(1, abs=1e-4)


def test_scoring_alone(llm):
    (result,) = llm.generate(TEXT, greedy(max_tokens=0, prompt_logprobs=0), progress=False)
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    (output,) = result.outputs
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
    assert result.finished


# Chat

HELLO = [{"role": "user", "content": "hello there"}]


def test_chat_is_the_template_continued(llm):
    (result,) = llm.chat(HELLO, GREEDY, progress=False)
    assert result.prompt == "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
    assert result.prompt_token_ids == llm.tokenizer.encode(result.prompt, add_special_tokens=False)
    assert one([result]).token_ids == one(llm.generate(result.prompt_token_ids, GREEDY, progress=False)).token_ids


def test_chat_with_several_conversations(llm):
    other = [{"role": "system", "content": "be brief"}, *HELLO]
    results = llm.chat([HELLO, other], GREEDY, progress=False)
    alone = [llm.chat(each, GREEDY, progress=False)[0] for each in (HELLO, other)]
    assert [result.prompt for result in results] == [result.prompt for result in alone]
    assert [one([result]).text for result in results] == [one([result]).text for result in alone]


def test_chat_passes_settings_to_the_template(llm):
    (result,) = llm.chat(HELLO, GREEDY, progress=False, add_generation_prompt=False)
    assert result.prompt == "<|im_start|>user\nhello there<|im_end|>\n"


@pytest.mark.parametrize("wrong", [[HELLO, []], [HELLO, "hello"], [HELLO, [5]], [HELLO, None]], ids=repr)
def test_conversations_that_are_none(llm, wrong):
    with pytest.raises(InvalidRequestError, match=r"conversation 1: a conversation must be a list of"):
        llm.chat(wrong, GREEDY)


@pytest.mark.parametrize("wrong", ["hello", 5, None], ids=repr)
def test_messages_of_another_type(llm, wrong):
    with pytest.raises(InvalidRequestError, match="conversation 0: a conversation must be a list of"):
        llm.chat(wrong, GREEDY)


# Stream


def test_stream_adds_up_to_the_whole(llm, answer):
    deltas = list(llm.stream(TEXT, GREEDY))
    assert len(deltas) > 1, "several tokens may come at a time"
    assert "".join(delta.text for delta in deltas) == answer.text
    assert [token for delta in deltas for token in delta.token_ids] == answer.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_a_stream_that_is_left_frees_its_pages(llm):
    stream = llm.stream(TEXT, greedy(max_tokens=200))
    next(stream)
    assert llm.engine.blocks.num_used > 0
    stream.close()
    assert llm.engine.blocks.num_used == 0
    for _ in llm.stream(TEXT, greedy(max_tokens=200)):
        break


def test_an_open_stream_and_another_request(llm, answer):
    """An open stream and another request do not get each other's tokens."""
    stream = llm.stream(TEXT, GREEDY)
    other = llm.stream("something else", GREEDY)
    deltas = [next(stream), next(other)]
    assert one(llm.generate(TEXT, GREEDY, progress=False)).text == answer.text
    rest = list(stream)
    assert "".join(delta.text for delta in [deltas[0], *rest]) == answer.text
    whole = one(llm.generate("something else", GREEDY, progress=False)).text
    assert deltas[1].text + "".join(delta.text for delta in other) == whole


def test_streams_report_mistakes_before_the_first_step(llm):
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        llm.stream("", GREEDY)


# Mistakes


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([5] * 256, "maximum context length is 256 tokens"),
        ([5, 512], r"token id 512 is outside the vocabulary \[0, 512\)"),
        ([5, -1], "token id -1 is outside"),
        ([5, 10**30], "is outside the vocabulary"),
        ([5, 1.5], "a prompt must be a string"),
        ([5, True], "a prompt must be a string"),
        ([5, "x"], "a prompt must be a string"),
        ([[5]], "a prompt must be a string"),
        (None, "a prompt must be a string"),
        (5.0, "a prompt must be a string"),
        (b"bytes", "a prompt must be a string"),
        (np.ones((2, 2), int), "a prompt must be a string"),
        ({}, "a prompt must be a string"),
        ({"prompt": 5}, "a prompt must be a string"),
        ({"prompt_token_ids": "abc"}, "a prompt must be a string"),
        ({"prompt_token_ids": [1.5]}, "a prompt must be a string"),
        ({"prompt": 5, "prompt_token_ids": [5]}, "a prompt must be a string"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_wrong_prompt_is_named_and_nothing_runs(llm, wrong, message):
    before = llm.engine.stats().steps
    with pytest.raises(InvalidRequestError, match=f"^prompt 1: .*{message}") as caught:
        llm.generate([TEXT, wrong, ""], GREEDY)
    assert caught.value.param == "prompt"
    assert not llm.engine.has_work
    assert llm.engine.stats().steps == before


@pytest.mark.parametrize("wrong", [None, 5, b"bytes", {5: 6}.keys()], ids=repr)
def test_prompts_of_another_type(llm, wrong):
    with pytest.raises(InvalidRequestError, match="prompts must be a prompt or a list of prompts"):
        llm.generate(wrong, GREEDY)


def test_wrong_sampling_params(llm):
    with pytest.raises(InvalidRequestError, match="2 prompts, but 1 sampling parameters"):
        llm.generate([TEXT, TEXT], [GREEDY])
    with pytest.raises(InvalidRequestError, match=r"prompt 1: expected SamplingParams, got \{"):
        llm.generate([TEXT, TEXT], [GREEDY, {"n": 2}])
    with pytest.raises(InvalidRequestError, match="prompt 1: logit_bias: token id 600 is outside the vocabulary"):
        llm.generate([TEXT, TEXT], [GREEDY, greedy(logit_bias={600: 1.0})])
    many = greedy(ignore_eos=False, stop_token_ids=tuple(range(10, 26)))
    with pytest.raises(InvalidRequestError, match="prompt 0: stop_token_ids"):
        llm.generate(TEXT, many)


def test_a_full_queue_leaves_nothing_behind(llm, monkeypatch):
    added = []
    add = llm.engine.add_request

    def full_after_two(request):
        if len(added) == 2:
            raise RuntimeError("full")
        added.append(add(request))

    monkeypatch.setattr(llm.engine, "add_request", full_after_two)
    with pytest.raises(RuntimeError, match="full"):
        llm.generate([TEXT] * 3, GREEDY, progress=False)
    assert not llm.engine.scheduler.has_work


# The rest


@pytest.mark.parametrize("progress", [True, False])
def test_progress_bar(llm, capsys, progress):
    llm.generate([TEXT, TEXT], greedy(max_tokens=2), progress=progress)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("generating: 100%" in captured.err and "2/2" in captured.err) == progress
    assert bool(captured.err) == progress


def test_models_that_cannot_be_loaded(tmp_path, model_folders):
    with pytest.raises(ValueError, match="no such model: 'nowhere'"):
        LLM("nowhere")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        LLM(tmp_path)
    with pytest.raises(ValueError, match="page_size must be"):
        LLM(model_folders(CASE), page_size=17)
    folder = shutil.copytree(model_folders(CASE), tmp_path / "copy")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": "hot"}))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        LLM(folder)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"gpu_memory_utilization": 2.0}, "memory_utilization must be in"),
        ({"block_size": 17, "dtype": "half"}, "page_size must be 8"),
        ({"dtype": "quarter"}, "dtype must be"),
    ],
)
def test_settings_by_the_names_of_vllm(setting, message):
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **setting)


def test_arguments_by_the_names_of_vllm(llm, capfd, monkeypatch):
    llm.generate(TEXT, GREEDY, use_tqdm=False)
    assert not capfd.readouterr().err
    llm.generate(TEXT, GREEDY, use_tqdm=True)
    assert "generating" in capfd.readouterr().err
    variables = []
    render = llm.tokenizer.render_chat
    monkeypatch.setattr(
        llm.tokenizer, "render_chat", lambda messages, **given: variables.append(given) or render(messages, **given)
    )
    llm.chat(HELLO, GREEDY, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})
    llm.chat(HELLO, GREEDY, progress=False, enable_thinking=False)
    assert variables == [{"enable_thinking": False}] * 2


@pytest.mark.slow
def test_dummy_weights_need_only_a_config(tmp_path):
    config = tiny_models.CASES["llama3_gqa"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(str(tmp_path), load_format="dummy", kv_pages=20, max_model_len=128)
    (output,) = llm.generate("né", SamplingParams(max_tokens=3, ignore_eos=True), progress=False)
    assert output.prompt_token_ids == list("né".encode())
    assert len(output.outputs[0].token_ids) == 3
    with pytest.raises(ValueError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("started", [True, False])
def test_on_a_gpu(model_folders, monkeypatch, started):
    """All programs are compiled before the first request: XLA:GPU needs memory for it, which a full cache leaves not.
    JAX reserves as much memory as for a server, if it has not reserved any."""
    compiled = []
    reserved = []
    monkeypatch.setattr("jaxserve.offline.jax", SimpleNamespace(default_backend=lambda: "gpu"))
    monkeypatch.setattr("jaxserve.offline.has_started", lambda: started)
    monkeypatch.setattr(jax_pools, "reserve", reserved.append)
    monkeypatch.setattr(Engine, "compile", lambda self: compiled.append(self))
    llm = LLM(model_folders(CASE), max_num_seqs=ROWS, kv_pages=200, max_model_len=256, memory_utilization=0.8)
    assert compiled == [llm.engine]
    assert reserved == ([] if started else [0.8])
