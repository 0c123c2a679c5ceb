"""Detokenizer, stop strings and output assembly.

Rows of the API: "nothing is emitted while the tail is an incomplete character; recover when the bytes never become
valid", "hold back what could still become a match; flush at finish; the match that completes first wins, ties by list
order", "no text after a stop".
"""

from __future__ import annotations

import itertools

import pytest
import tokenizers_for_tests as kinds
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text.detokenizer import ChoiceDelta, Detokenizer, OutputProcessor, StopMatcher, StopStrings
from jaxserve.types import Request, SamplingParams, SequenceUpdate, TokenLogprob

BYTE_LEVEL = kinds.byte_level()
SENTENCEPIECE = kinds.sentencepiece_like()
UNIGRAM = kinds.unigram()
WORD_PIECES = kinds.word_pieces()
ALL = [BYTE_LEVEL, SENTENCEPIECE, UNIGRAM, WORD_PIECES]
ids_of_kind = {id(t): st.lists(st.integers(0, t.vocab_size - 1), max_size=40) for t in ALL}


def stream(tokenizer, ids, **options) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, UNIGRAM, WORD_PIECES], ids=["byte", "unigram", "wordpiece"])
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_any_ids_stream_to_what_they_decode_to(tokenizer, skip, data):
    ids = data.draw(ids_of_kind[id(tokenizer)])
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip)


@given(text=st.text(max_size=40))
def test_text_survives_byte_level_streaming(text):
    pieces = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text), skip_special_tokens=False)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(text=st.text(max_size=40).map(lambda text: text.replace("\x00", "")))
def test_text_survives_byte_fallback_streaming(text):
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
    pieces = stream(SENTENCEPIECE, ids, skip_special_tokens=False)
    assert "".join(pieces) == SENTENCEPIECE.decode(ids, skip_special_tokens=False)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(data=st.lists(st.integers(0, 255), max_size=30))
def test_byte_fallback_replaces_invalid_bytes_only(data):
    pieces = stream(SENTENCEPIECE, [3 + value for value in data])
    assert "".join(pieces) == bytes(data).decode(errors="replace")


@given(prompt=st.text(max_size=10), text=st.text(alphabet="abc the Hello", max_size=20))
def test_output_continues_the_prompt(prompt, text):
    for tokenizer in (SENTENCEPIECE, UNIGRAM):
        head = tokenizer.encode(prompt + "x", add_special_tokens=False)
        tail = tokenizer.encode(text, add_special_tokens=False)
        joined = "".join(stream(tokenizer, tail, prompt_token_ids=head, skip_special_tokens=False))
        whole = tokenizer.decode([*head, *tail], skip_special_tokens=False)
        assert whole == tokenizer.decode(head, skip_special_tokens=False) + joined


def test_broken_characters_are_not_held_for_long():
    byte = {BYTE_LEVEL.token_bytes(i): i for i in range(BYTE_LEVEL.vocab_size)}
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert [detokenizer.push(byte[bytes([b])]) for b in b"\xf0\x9f\x98"] == ["", "", ""]
    assert detokenizer.push(byte[b"\x80"]) == "😀"
    for _ in range(5):
        assert len(detokenizer.push(byte[b"\xff"])) == 1
    assert detokenizer.push(byte[b"\xe4"]) == ""
    assert detokenizer.push(byte[b"a"]) == "\ufffda"
    assert detokenizer.push(byte[b"\xe4"]) == ""
    assert detokenizer.flush() == "\ufffd"


# stop strings


def brute_force(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30)),
    include=st.booleans(),
)
def test_stop_strings_agree_with_brute_force(text, stops, cuts, include):
    matcher = StopMatcher(StopStrings(stops), include)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = ""
    matched = None
    for start, end in itertools.pairwise(bounds):
        piece, matched = matcher.push(text[start:end])
        shown += piece
        assert brute_force(text, stops, include)[0].startswith(shown)
        if matched:
            break
    if matched is None:
        shown += matcher.flush()
    assert (shown, matched) == brute_force(text, stops, include)


def test_only_possible_beginnings_are_held():
    matcher = StopMatcher(StopStrings(["\n\nUser:"]))
    assert matcher.push("Hello\n") == ("Hello", None)
    assert matcher.push("\nUs") == ("", None)
    assert matcher.push("ing") == ("\n\nUsing", None)


# whole requests


def request(ids=(), **params) -> Request:
    return Request(request_id="r", prompt_token_ids=list(ids) or [5], params=SamplingParams(**params))


def run(processor: OutputProcessor, ids: list[int], chunk: int = 1, end=("length", None)) -> list[ChoiceDelta]:
    deltas = []
    for start in range(0, len(ids), chunk):
        piece = ids[start : start + chunk]
        last = start + chunk >= len(ids)
        update = SequenceUpdate(
            "r",
            0,
            piece,
            finish_reason=end[0] if last else None,
            stop_token=end[1] if last else None,
            logprobs=[TokenLogprob(token, -1.0, 1, []) for token in piece],
        )
        delta = processor.process(update)
        if delta is not None:
            deltas.append(delta)
    return deltas


def whole(deltas: list[ChoiceDelta]) -> ChoiceDelta:
    total = deltas[0]
    for delta in deltas[1:]:
        total.extend(delta)
    return total


@given(text=st.text(min_size=1, max_size=40), chunk=st.integers(1, 7))
def test_any_chunking_gives_the_same_completion(text, chunk):
    ids = BYTE_LEVEL.encode(text)
    processor = OutputProcessor(BYTE_LEVEL, request(skip_special_tokens=False))
    deltas = run(processor, ids, chunk)
    assert all(delta.text or delta.finish_reason for delta in deltas)
    total = whole(deltas)
    assert total.text == text
    assert total.token_ids == ids
    assert [entry.token_id for entry in total.logprobs] == ids
    assert len(total.text_offsets) == len(ids)
    assert total.finish_reason == "length"
    assert processor.finished
    assert processor.num_output_tokens == len(ids)


@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize("include", [True, False])
def test_stop_string_ends_the_completion(chunk, include):
    ids = BYTE_LEVEL.encode("The quick brown fox jumps over the lazy dog")
    processor = OutputProcessor(BYTE_LEVEL, request(stop=("fox", "brown f"), include_stop_str_in_output=include))
    deltas = run(processor, ids, chunk)
    total = whole(deltas)
    assert total.text == ("The quick brown f" if include else "The quick ")
    assert (total.finish_reason, total.stop_reason) == ("stop", "brown f")
    assert total.abort or chunk == 100
    assert BYTE_LEVEL.decode(total.token_ids).startswith("The quick brown f")
    assert processor.num_output_tokens == len(total.token_ids) < len(ids)
    assert processor.process(SequenceUpdate("r", 0, [9], "length")) is None


def test_end_tokens_have_no_text():
    text = BYTE_LEVEL.encode("Hello")
    stop = BYTE_LEVEL.encode("!")
    total = whole(run(OutputProcessor(BYTE_LEVEL, request()), [*text, 0], end=("stop", None)))
    assert (total.text, total.finish_reason, total.stop_reason) == ("Hello", "stop", None)
    total = whole(run(OutputProcessor(BYTE_LEVEL, request()), [*text, *stop], end=("stop", stop[0])))
    assert (total.text, total.stop_reason) == ("Hello", stop[0])
    processor = OutputProcessor(BYTE_LEVEL, request(include_stop_str_in_output=True))
    assert whole(run(processor, [*text, *stop], end=("stop", stop[0]))).text == "Hello!"


def test_stop_strings_wait_for_min_tokens():
    ids = [BYTE_LEVEL.encode("a")[0]] * 6
    total = whole(run(OutputProcessor(BYTE_LEVEL, request(stop=("a",), min_tokens=3)), ids))
    assert total.text == "aaa"
    assert len(total.token_ids) == 4


def test_held_text_is_flushed_at_the_end():
    ids = BYTE_LEVEL.encode("Hello sto")
    deltas = run(OutputProcessor(BYTE_LEVEL, request(stop=("stop",))), ids)
    assert whole(deltas).text == "Hello sto"


def test_completions_are_kept_apart():
    processor = OutputProcessor(BYTE_LEVEL, request(n=2))
    a = BYTE_LEVEL.encode("a")[0]
    b = BYTE_LEVEL.encode("b")[0]
    assert processor.process(SequenceUpdate("r", 0, [a], num_cached_tokens=3)).text == "a"
    assert processor.process(SequenceUpdate("r", 1, [b], "length")).text == "b"
    assert not processor.finished
    assert processor.process(SequenceUpdate("r", 0, [], "error", error="broken")).error == "broken"
    assert processor.finished
    assert processor.num_output_tokens == 2
    assert processor.num_cached_tokens == 3
