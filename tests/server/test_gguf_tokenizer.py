"""Tokenizers out of GGUF files: the same ids, text and special tokens as the tokenizers that were written into them."""

import itertools
import json
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import pytest
import tokenizers_for_tests as kinds
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text.generation_defaults import GenerationDefaults
from jaxserve.text.gguf_tokenizer import _PRE_TOKENIZERS, make_tokenizer
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer

DEMO = Path(__file__).parents[2] / "checkpoints" / "demo"
TEXTS = [
    "",
    " ",
    "Hello world, hello there!",
    "  two  spaces and\ttabs\n\n\nlines \r\n end  ",
    "It's 1234567 o'clock, WE'LL see; x1y22z333",
    "naïve café 你好世界 こんにちは 😀👍🏽 e\u0301 \u00a0 \u2003 \u200b ½ ٣",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <tool>call</tool>  <tool> <|im_start",
    "def main():\n\treturn {'a': [1, 2.5e-3]}  # \\ stop",
]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def same(ours: Tokenizer, theirs: Tokenizer):
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, text
            assert ours.decode(ids, special) == theirs.decode(ids, special)
    for token in range(theirs.vocab_size):
        assert ours.token_bytes(token) == theirs.token_bytes(token)
        assert ours.raw_bytes(token) == theirs.raw_bytes(token)
    assert ours.vocab_size == theirs.vocab_size
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.special_ids == theirs.special_ids
    assert ours.render_chat(MESSAGES) == theirs.render_chat(MESSAGES)


def test_the_demo_model(tmp_path):
    ours = load_tokenizer(gguf_files.write_gguf(DEMO, tmp_path / "demo.gguf"))
    theirs = load_tokenizer(DEMO)
    same(ours, theirs)
    assert ours.eos_token_ids == theirs.eos_token_ids
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")
    assert ours.encode(text) == theirs.encode(text)


def test_a_tokenizer_with_tokens_that_are_not_special(tmp_path):
    kinds.save_byte_level(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
    gguf_files.add_tokenizer(writer, tmp_path)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 7)
    ours = load_tokenizer(gguf_files.write(writer, tmp_path / "vocab.gguf"))
    same(ours, load_tokenizer(tmp_path))
    assert ours.generation_defaults == GenerationDefaults(temperature=0.5, top_k=7, eos_token_ids=(0, 2))


def byte_level(**changes):
    """The metadata of a byte-level tokenizer."""
    state = kinds.byte_level_backend()
    ids = state.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [" ".join(merge) for merge in json.loads(state.to_str())["model"]["merges"]]
    plain = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": np.array([3, 3, 3] + [1] * (len(tokens) - 4) + [4], np.int32),
        "merges": merges,
        "eos_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": x for key, x in (plain | changes).items() if x is not None}


@pytest.mark.parametrize("pre", _PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text(pre):
    tokenizer = Tokenizer(make_tokenizer(byte_level(pre=pre)))
    for text in TEXTS:
        if "e\u0301" not in text:  # which some compose
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), False) == text


def words(pre, text):
    """What the pre-tokenizer makes of a text, as text."""
    backend = make_tokenizer(byte_level(pre=pre)).backend_tokenizer
    return [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I'll pay  1234!\n\n x", ["I", "'ll", " pay", " ", " 1234", "!", "\n\n", " x"]),
        ("smollm", "12 ab3", ["1", "2", " ab", "3"]),
        ("llama-bpe", "I'LL pay 12345!\n\n x", ["I", "'LL", " pay", " ", "123", "45", "!\n\n", " x"]),
        ("qwen2", "pay 123!\r\n(x", ["pay", " ", "1", "2", "3", "!\r\n", "(x"]),
        ("qwen35", "e\u0323\u0301a 12!\r\n(x", ["e\u0323\u0301a", " ", "1", "2", "!\r\n", "(x"]),
        ("exaone-moe", "one or two 12!\r\n(x", ["one or two", " ", "1", "2", "!\r", "\n", "(x"]),
        ("afmoe", "pay 1234567!", ["pay", " ", "1", "234", "567", "!"]),
        ("hunyuan", "e\u0323a 12", ["e", "\u0323a", " ", "1", "2"]),
        ("tekken", "HelloWorld 12 a/\nB", ["Hello", "World", " ", "1", "2", " a", "/\n", "B"]),
        ("deepseek-coder", "ab, 12你好\n", ["ab", ",", " ", "1", "2", "你好", "\n"]),
        ("deepseek-v3", "ab, 1234你好.x", ["ab", ",", " ", "123", "4", "你好", ".x"]),
        ("deepseek-llm", "Ab, 12你好\n x", ["Ab", ",", " ", "1", "2", "你好", "\n", " x"]),
        ("gpt-4o", "HelloWorld's 1234 a/\nB", ["Hello", "World's", " ", "123", "4", " a", "/\n", "B"]),
        ("seed-coder", "I'LL pay 12!\n x", ["I", "'LL", " pay", " ", "1", "2", "!", "\n", " x"]),
        ("chatglm-bpe", "I'LL pay 12345!\n\n x", ["I", "'LL", " pay", " ", "123", "45", "!\n\n", " x"]),
        ("command-r", "12 ab3", ["1", "2", " ab", "3"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("kimi-k2", "Hello你好World's 1234!", ["Hello", "你好", "World's", " ", "123", "4", "!"]),
        ("jais-2", "a      b", ["a", "    ", " ", " b"]),
        ("bloom", "one, two.  x", ["one", ",", " two", ". ", " x"]),
        ("laguna", "x  \n y", ["x", "  ", "\n", " y"]),
        ("tiny_aya", "pay 1234567!", ["pay", " ", "1", "234", "567", "!"]),
        ("youtu", "a。b 12", ["a", "。", "b", " ", "1", "2"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(pre, text, expected):
    assert words(pre, text) == expected


@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, None])
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_tokens_at_the_edges(bos, eos, pre):
    metadata = byte_level(pre=pre, bos_token_id=1, add_bos_token=bos, add_eos_token=eos)
    tokenizer = Tokenizer(make_tokenizer(metadata))
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    begins = pre == "llama-bpe" if bos is None else bos
    assert tokenizer.encode("Hello") == [1] * begins + plain + [0] * bool(eos)
    assert tokenizer.encode("<|im_start|>Hello")[:2] == [1, plain[0]]


def test_whole_words_need_no_merges_for_llama_3():
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"][-2] = "zqzqzq"
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:50]
    whole = len(metadata["tokenizer.ggml.tokens"]) - 2
    assert Tokenizer(make_tokenizer(metadata | {"tokenizer.ggml.pre": "llama-bpe"})).encode("zqzqzq") == [whole]
    assert len(Tokenizer(make_tokenizer(metadata)).encode("zqzqzq")) > 1


def test_several_chat_templates():
    metadata = byte_level() | {"tokenizer.chat_template": kinds.TEMPLATE, "tokenizer.chat_template.tool_use": "tools!"}
    tokenizer = Tokenizer(make_tokenizer(metadata))
    assert tokenizer.chat_template == kinds.TEMPLATE
    assert tokenizer.render_chat(MESSAGES).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert tokenizer.render_chat(MESSAGES, tools=[tool]) == "tools!"


# Sentencepiece

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]


def sentencepiece(pieces, scores, **changes):
    tokens = [*PIECES, *pieces]
    plain = {
        "model": "llama",
        "tokens": tokens,
        "token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces), np.int32),
        "scores": np.array([0.0] * len(PIECES) + list(scores), np.float32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": x for key, x in (plain | changes).items()}


def merge_by_score(text, pieces, scores):
    """Sentencepiece's BPE: of neighbours that make a piece together, the best scored are joined, left ones first."""
    known = dict(zip(pieces, scores, strict=True))
    symbols = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        joined = [(-known[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in known]
        if not joined:
            break
        _, i = min(joined)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids = {piece: len(PIECES) + i for i, piece in enumerate(pieces)}
    return [i for s in symbols for i in ([ids[s]] if s in ids else [3 + byte for byte in s.encode()])]


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.text("ab\u2581é", min_size=2, max_size=5), max_size=30, unique=True),
    texts=st.lists(st.text("ab é\n", min_size=1, max_size=20), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_merges_by_score(pieces, texts, seed):
    pieces = ["\u2581", "a", "b", *pieces]  # é and the newline are bytes, where no piece holds them
    scores = -np.random.default_rng(seed).permutation(len(pieces)).astype(float)
    tokenizer = Tokenizer(make_tokenizer(sentencepiece(pieces, scores)))
    for text in texts:
        if not any("é" in piece for piece in pieces):
            assert tokenizer.encode(text) == [1, *merge_by_score(text, pieces, scores)]
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_of_sentencepiece():
    metadata = sentencepiece(["\u2581", "a", "\u2581a", "<tool>"], [-1, -2, -3, 0])
    metadata["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = Tokenizer(make_tokenizer(metadata))
    a = len(PIECES) + 2
    tool = len(PIECES) + 3
    assert tokenizer.encode("a<tool>a</s>") == [1, a, tool, a, 2]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([1, a, tool, 2]) == "a<tool>"
    assert tokenizer.raw_bytes(3 + 0xFF) == b"\xff"
    bare = Tokenizer(make_tokenizer(metadata | {"tokenizer.ggml.add_space_prefix": False}))
    assert bare.encode("a", add_special_tokens=False) == [a - 1]
    assert bare.decode([a]) == " a"


def test_merges_of_characters():
    """Gemma 4's: lines are not split, newlines that are a token together stay one, and other characters are bytes."""
    pieces = ["\n", "\n\n", "\u2581", "a", "b", "ab", "\u2581ab", "<tool>"]
    metadata = sentencepiece(pieces, [0] * len(pieces), model="gemma4", merges=["a b", "\u2581 ab"])
    metadata["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = Tokenizer(make_tokenizer(metadata))
    text = "ab ab\n\n a\n\n\n<tool>bé"
    found = tokenizer.encode(text)
    spoken = ["ab", "\u2581ab", "\n\n", "\u2581", "a", "\n", "\n", "\n", "<tool>", "b"]
    assert found == [1, *(len(PIECES) + pieces.index(piece) for piece in spoken), 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(found) == text


def test_a_merge_that_makes_no_token_is_left_out():
    """As llama.cpp does; where other merges have its texts, too, they might come out otherwise, and it is refused."""
    metadata = byte_level()
    merges = metadata["tokenizer.ggml.merges"]
    assert not {"ß", "ßÿ"} & {text for merge in merges for text in merge.split(" ")}
    more = Tokenizer(make_tokenizer(metadata | {"tokenizer.ggml.merges": ["ß ÿ", *merges]}))
    plain = Tokenizer(make_tokenizer(metadata))
    for text in ("hello world", "naïve ßÿ", "\u00df\u00ff"):
        assert more.encode(text, add_special_tokens=False) == plain.encode(text, add_special_tokens=False)


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"tokenizer.ggml.model 'bert' is not supported \(only gpt2, llama, t5, gemma4\)"),
        ({"model": 5}, "tokenizer.ggml.model must be str, got 5"),
        ({"pre": "poro-chat"}, r"tokenizer.ggml.pre 'poro-chat' is not supported \(only default, gpt-2, .*tekken"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens must be list"),
        ({"token_type": np.ones(3, np.int32)}, "token_type must hold a number for each of"),
        ({"token_type": "x"}, "token_type must hold a number for each of"),
        ({"merges": ["a b c"]}, "merges has 'a b c'"),
        ({"merges": ["a ß", "a b"]}, "merges has 'a ß'"),
        ({"bos_token_id": 10**6}, "the bos token 1000000 is none of"),
        ({"eos_token_id": "x"}, "the eos token 'x' is none of"),
        ({"add_bos_token": "yes"}, "add_bos_token must be bool"),
    ],
    ids=str,
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        make_tokenizer(byte_level(**changes))


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "vocab.gguf"
    with pytest.raises(ValueError, match=f"no usable tokenizer in {path}: .* cannot be read"):
        load_tokenizer(path)
    writer = gguf.GGUFWriter(path, "llama")
    gguf_files.write(writer, path)
    with pytest.raises(ValueError, match=rf"no usable tokenizer in {path}: there are no tokenizer\.ggml\.tokens"):
        load_tokenizer(path)
