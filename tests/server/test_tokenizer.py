"""Tokenizer: exact bytes, special tokens, chat templates and generation defaults."""

from __future__ import annotations

import random
import threading
import time

import pytest
import tokenizers_for_tests as kinds
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.text import tokenizer as module
from jaxserve.text.generation_defaults import GenerationDefaults
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer, token_strings
from jaxserve.types import InvalidRequestError

TEXTS = ["Hello world", " two  spaces", "naïve café 😀👍🏽", "你好世界\n", "a\tb <|im_end|> c <tool>d"]


@pytest.fixture(scope="module")
def byte_level():
    return kinds.byte_level()


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_byte_level_tokens_add_up_to_the_text(byte_level, text):
    ids = byte_level.encode(text)
    assert b"".join(map(byte_level.token_bytes, ids)).decode() == text
    assert byte_level.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["Hello world", "the dog é😀", "x  y"])
def test_bytes_of_sentencepiece_tokens_add_up_to_the_text(text):
    tokenizer = kinds.sentencepiece_like()
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " " + text
    assert tokenizer.decode(ids) == text


def test_bytes_of_word_pieces_and_unknown_ids():
    tokenizer = kinds.word_pieces()
    assert tokenizer.token_bytes(3) == b"ld"
    assert tokenizer.token_bytes(10_000) == b""


def test_token_strings_write_broken_characters_as_bytes(byte_level):
    ids = byte_level.encode("é")
    if len(ids) == 1:
        ids = byte_level.encode("\u0107")
    assert token_strings(byte_level, ids)[0].startswith("bytes:\\xc")


def test_no_second_bos():
    tokenizer = kinds.byte_level(bos=True)
    assert tokenizer.encode("Hello")[0] == tokenizer.bos_token_id
    assert tokenizer.encode("<|im_start|>Hello").count(tokenizer.bos_token_id) == 1
    assert tokenizer.encode("<|im_start|>Hello", add_special_tokens=False).count(tokenizer.bos_token_id) == 1


def test_chat_template(byte_level):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = byte_level.render_chat(messages)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    continued = byte_level.render_chat(
        [*messages, {"role": "assistant", "content": "Well"}], continue_final_message=True
    )
    assert continued.endswith("<|im_start|>assistant\nWell")


def test_template_errors_are_the_requests_fault(byte_level):
    with pytest.raises(InvalidRequestError, match="no clowns"):
        byte_level.render_chat([{"role": "clown", "content": "Hi"}])
    with pytest.raises(InvalidRequestError, match="at least one message"):
        byte_level.render_chat([])
    with pytest.raises(InvalidRequestError, match="no chat template"):
        kinds.byte_level(chat_template=None).render_chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "template",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages.__class__.__base__.__subclasses__() }}"],
)
def test_template_runs_in_the_immutable_sandbox(template):
    tokenizer = kinds.byte_level(chat_template=template)
    with pytest.raises(InvalidRequestError, match="refused"):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])


def test_endless_template_is_stopped(monkeypatch):
    monkeypatch.setattr(module, "TEMPLATE_SECONDS", 0.2)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="did not finish"):
        kinds.byte_level(chat_template=loops).render_chat([{"role": "user", "content": "Hi"}])


def test_load(tmp_path):
    kinds.save_byte_level(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == (0, 2)
    assert {0, 1, 2} <= tokenizer.special_ids
    assert tokenizer.generation_defaults == GenerationDefaults(temperature=0.5, top_k=7, eos_token_ids=(0, 2))
    assert tokenizer.decode(tokenizer.encode("Grüße")) == "Grüße"


def test_recommended_sampling_of_another_source(tmp_path):
    """Tokens that end a sequence are the model's whatever the source."""
    kinds.save_byte_level(model := tmp_path / "model")
    for none in ("none", "vllm"):
        assert load_tokenizer(model, generation_config=none).generation_defaults == GenerationDefaults(
            eos_token_ids=(0, 2)
        )
    (other := tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=f"auto, none or a folder with generation_config.json, got {other}"):
        load_tokenizer(model, generation_config=str(other))
    (other / "generation_config.json").write_text('{"top_p": 0.25, "eos_token_id": 9}')
    tokenizer = load_tokenizer(model, generation_config=str(other))
    assert tokenizer.generation_defaults == GenerationDefaults(top_p=0.25, eos_token_ids=(0, 2))
    assert tokenizer.eos_token_ids == (0, 2)


def test_recommended_sampling_that_is_overridden(tmp_path):
    kinds.save_byte_level(tmp_path)  # recommends temperature 0.5 and top_k 7
    for source, others in (("auto", {"top_k": 7}), ("none", {})):
        tokenizer = load_tokenizer(tmp_path, generation_config=source, override_generation_config={"temperature": 0.25})
        expected = GenerationDefaults(temperature=0.25, eos_token_ids=(0, 2), **others)
        assert tokenizer.generation_defaults == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"temperature": "hot"}, "Expected `float \\| null`, got `str` - at `\\$.temperature`"),
        ({"top_p": 1.5}, r"Expected `float` <= 1.0 - at `\$.top_p`"),
        ({"eos_token_ids": [1]}, "it may have temperature, .*, repetition_penalty, got eos_token_ids"),
        ([], "must be an object of sampling parameters, got \\[\\]"),
    ],
)
def test_overrides_that_cannot_be(override, message):
    with pytest.raises(ConfigError, match=f"override_generation_config.*{message}"):
        EngineConfig(model="demo", override_generation_config=override)


def test_load_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
    for wrong in ('{"temperature": "hot"}', '{"temperature": -1}', '{"top_p": 1.5}', '{"min_p": NaN}'):
        (tmp_path / "generation_config.json").write_text(wrong)
        with pytest.raises(ValueError, match=r"generation_config\.json"):
            GenerationDefaults.load(tmp_path)


def test_lengths_of_a_trainer_do_not_count(tmp_path):
    """tokenizer.json keeps the truncation and padding with which a model was trained."""
    text = "the dog jumps over the lazy dog"
    kinds.save_byte_level(tmp_path)
    whole = load_tokenizer(tmp_path).encode(text)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(text) == whole
    assert len(whole) > 3


@pytest.mark.parametrize("kind", [kinds.byte_level, kinds.sentencepiece_like, kinds.unigram, kinds.word_pieces])
def test_fewest_tokens_is_no_more_than_there_are(kind):
    tokenizer = kind()
    rng = random.Random(0)
    for unit in (*TEXTS, "the dog", "a", " ", "Zz", "<|im_end|>", "0.", "\n"):
        for text in (unit, unit * 300, "".join(rng.choices(unit, k=500))):
            assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_letters_tell_more_than_the_length():
    """A token may be many spaces; of letters it holds few."""
    backend = kinds.byte_level_backend()
    backend.add_tokens([" " * 128])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.longest_token == 128
    assert tokenizer.fewest_tokens(" " * 12_800) == 100
    assert tokenizer.fewest_tokens("a" * 12_800) > 1000
    assert tokenizer.fewest_tokens("\u00e9" * 12_800) == 100  # of which a normalizer could make anything


@pytest.mark.slow
def test_long_texts_let_other_threads_go_on(byte_level):
    """The plain call keeps Python's lock until it is done, and with it the event loop."""
    text = " ".join(random.Random(0).choices(["the", "dog", "Zurich", "naïve", "0.75", "\n\n"], k=300_000))
    ids: list[int] = []
    thread = threading.Thread(target=lambda: ids.extend(byte_level.encode(text)))
    begin = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
        time.sleep(0.001)
    assert longest < 0.5 * (time.perf_counter() - begin)
    assert ids == byte_level._backend.encode(text).ids
