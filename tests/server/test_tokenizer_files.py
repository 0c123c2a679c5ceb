"""Folders whose tokenizer is a sentencepiece model or Mistral's tekken.json, and those that have none to be read."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf_files
import pytest
import regex
import tiktoken
import tokenizers_for_tests as kinds
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.checkpoints.hub import BUNDLE
from jaxserve.text.gguf_tokenizer import _GPT4O, _SEED
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.text.tokenizer_files import KEPT, KeptTokenizer

ROOT = Path(__file__).parents[2]

GOLDENS = Path(__file__).parents[1] / "goldens" / "tokenizers"
EXPECTED = json.loads((GOLDENS / "expected.json").read_text(encoding="utf-8"))
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def folder(tmp_path):
    """A function that makes a folder of a sentencepiece model and of other files."""

    def make(kind="bpe", name="tokenizer.model", **files):
        shutil.copy(GOLDENS / f"{kind}.model", tmp_path / name)
        for stem, content in files.items():
            (tmp_path / f"{stem}.json").write_text(json.dumps(content))
        return tmp_path

    return make


@pytest.mark.parametrize("kind", EXPECTED)
def test_sentencepiece_models_are_read_as_by_their_own_package(kind, folder):
    tokenizer = load_tokenizer(folder(kind, tokenizer_config={"legacy": False}))
    assert tokenizer.vocab_size == EXPECTED[kind]["size"]
    for (text, ids), decoded in zip(EXPECTED[kind]["ids"], EXPECTED[kind]["decoded"], strict=True):
        if (kind == "bpe" and text.startswith(" ")) or (kind == "unigram" and "<tool>" in text):
            continue  # transformers takes the first space for the one that it would add, or adds one to each part
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == [1, *ids]
        if kind == "bpe":  # whose bytes make up for what no piece has
            assert tokenizer.decode(ids) == decoded


def test_without_any_settings(folder):
    tokenizer = load_tokenizer(folder(name="tokenizer.model.v3"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.chat_template is None
    for text, ids in EXPECTED["bpe"]["ids"]:
        if "<tool>" not in text:  # behind which transformers' old way puts a space
            assert tokenizer.encode(text) == [1, *ids], text
    assert tokenizer.raw_bytes(tokenizer.encode("😀")[2]) == "😀".encode()[:1]


def test_settings_beside_the_model(folder):
    size = EXPECTED["bpe"]["size"]
    added = {
        "1": {"content": "<s>", "special": True},
        str(size): {"content": "<|im_start|>", "special": True},
        str(size + 2): {"content": "<think>", "special": False},
    }
    config = {
        "add_bos_token": False,
        "add_eos_token": True,
        "added_tokens_decoder": added,
        "eos_token": {"content": "<|im_start|>"},
        "chat_template": kinds.TEMPLATE,
    }
    tokenizer = load_tokenizer(folder(tokenizer_config=config, added_tokens={"<think>": size + 2}))
    assert tokenizer.vocab_size == size + 3
    assert tokenizer.eos_token_ids == (size,)
    assert tokenizer.encode("<think>")[-2:] == [size + 2, size]
    assert size in tokenizer.special_ids
    assert size + 2 not in tokenizer.special_ids
    assert tokenizer.render_chat(MESSAGES) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    (folder() / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert load_tokenizer(folder()).render_chat(MESSAGES) == "Hi!"


def test_tokenizer_json_comes_first(folder):
    path = folder()
    kinds.save_byte_level(path)
    assert load_tokenizer(path).raw_bytes(5) is not None
    assert load_tokenizer(path).vocab_size != EXPECTED["bpe"]["size"]


def test_an_added_token_with_the_id_of_another(folder):
    with pytest.raises(ValueError, match=r"the added token '<x>' has the id 300, which is that of"):
        load_tokenizer(folder(added_tokens={"<x>": 300}))


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 6000), at=st.integers(0, 6000), value=st.integers(0, 255))
def test_broken_models_are_refused(cut, at, value, tmp_path_factory):
    data = bytearray((GOLDENS / "bpe.model").read_bytes())
    data[at % len(data)] = value
    path = tmp_path_factory.getbasetemp() / "broken" / "tokenizer.model"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data[: len(data) - cut])
    with contextlib.suppress(ValueError):
        load_tokenizer(path.parent).encode("Hello")


# tekken


def tekken(folder, **changes):
    """Bytes, and words of two letters and more by rank. Returns the ranks."""
    words = [bytes([i]) for i in range(256)]
    words += [word.encode() for word in ("he", "ll", "hell", "hello", " w", "or", "ld", " wor", " world", "é", "12")]
    vocabulary = [{"rank": i, "token_bytes": base64.b64encode(word).decode()} for i, word in enumerate(words)]
    config = {"pattern": PATTERN, "num_vocab_tokens": len(words), "default_vocab_size": len(words) + 19,
              "default_num_special_tokens": 20, "version": "v3"}  # fmt: skip
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocabulary} | changes))
    return dict(zip(words[:-1], range(len(words) - 1), strict=True))  # the vocabulary leaves out the last


PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Our tokenizer, and tiktoken's of the same ranks."""
    ranks = tekken(folder := tmp_path_factory.mktemp("tekken"))
    return load_tokenizer(folder), tiktoken.Encoding("x", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


@settings(max_examples=200, deadline=None)
@given(text=st.text("helo wrdLD é12\n你"))
def test_tekken_as_tiktoken(text, both):
    tokenizer, reference = both
    assert tokenizer.vocab_size == reference.max_token_value + 21
    assert tokenizer.encode(text) == [1, *(20 + i for i in reference.encode_ordinary(text))]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_of_tekken(tmp_path):
    tekken(tmp_path)
    old = load_tokenizer(tmp_path)
    assert old.encode("[INST]hello[/INST]", add_special_tokens=False) == [3, 20 + 256 + 3, 4]
    names = ("<unk>", "<s>", "</s>", "[THINK]")
    tekken(tmp_path, special_tokens=[{"rank": i, "token_str": text} for i, text in enumerate(names)])
    new = load_tokenizer(tmp_path)
    assert new.encode("[THINK]", add_special_tokens=False) == [3]
    assert new.encode("<SPECIAL_19>", add_special_tokens=False) == [19]
    assert new.special_ids == frozenset(range(20))
    assert new.eos_token_ids == (2,)


# What cannot be read


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"none of tokenizer\.json, .*tokenizer\.model.*name a model that has it with --tokenizer"),
        ({"qwen.tiktoken": "IQ== 0\n"}, r"qwen\.tiktoken is a vocabulary of tiktoken.*--tokenizer"),
        ({"tokenizer.model": "IQ== 0\nIg== 1\n"}, r"tokenizer\.model is a vocabulary of tiktoken"),
        ({"tokenizer.model": "nothing of the kind"}, r"tokenizer\.model is no sentencepiece model"),
        ({"tokenizer.model": ""}, r"tokenizer\.model has the kind 1|no sentencepiece model"),
        ({"tekken.json": "{}"}, r"tekken\.json is no vocabulary of Mistral's tekken"),
        ({"tekken.json": "["}, r"tekken\.json is no vocabulary of Mistral's tekken"),
    ],
)
def test_what_is_missing_is_named(files, message, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"no usable tokenizer in {tmp_path}: .*{message}"):
        load_tokenizer(tmp_path)


def test_the_tokenizer_of_another_model(folder, tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    (model / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 7}')
    tokenizer = load_tokenizer(model, source=folder())
    assert tokenizer.vocab_size == EXPECTED["bpe"]["size"]
    assert tokenizer.generation_defaults.temperature == 0.6
    assert tokenizer.eos_token_ids == (2, 7)
    demo = Path(__file__).parents[2] / "checkpoints" / "demo"
    file = gguf_files.write_gguf(demo, model / "demo.gguf")
    assert load_tokenizer(folder(), source=file).vocab_size == load_tokenizer(demo).vocab_size


# The patterns that GGUF files name

O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SEED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(("ours", "published"), [(_GPT4O, O200K), (_SEED, SEED)])
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("aBcD'sS lL123½ \n\r\t/.,(Çéö你ʼ😀\u0301\u2003_")))
def test_patterns_split_as_the_published_ones(ours, published, text):
    assert regex.findall(ours, text) == regex.findall(published, text)


KEPT_TEXTS = ["Hello <|im_start|> world", " naïve 你好 😀\n\n\tx1y22", "<tool> a<sep>b", "", "x" * 2000]
WITHOUT_TRANSFORMERS = """
import sys
from pathlib import Path
from jaxserve.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer(Path(sys.argv[1]))
print(tokenizer.encode("Hello"), "transformers" in sys.modules)
tokenizer.render_chat([{"role": "user", "content": "Hi"}])
print("transformers" in sys.modules)
"""


@pytest.mark.parametrize("kind", ["demo", "byte_level", "bpe", "unigram"])
def test_a_kept_tokenizer_is_the_one_that_transformers_read(kind, tmp_path):
    """That of a bundle, in every way in which it is used."""
    model = tmp_path / "model"
    model.mkdir()
    if kind == "demo":
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(ROOT / "checkpoints" / "demo" / name, model)
    elif kind == "byte_level":
        kinds.save_byte_level(model)
        kinds.add_special_tokens(model, ["<special>"])
    else:
        shutil.copy(GOLDENS / f"{kind}.model", model / "tokenizer.model")
        settings = {"legacy": False, "add_eos_token": True, "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
    KeptTokenizer.write(model / KEPT, model)
    whole = load_tokenizer(model)
    assert not isinstance(whole._hf, KeptTokenizer), "this is no bundle"
    (tmp_path / BUNDLE).touch()
    kept = load_tokenizer(model)
    assert isinstance(kept._hf, KeptTokenizer)
    for text in KEPT_TEXTS:
        for special in (True, False):
            assert kept.encode(text, special) == whole.encode(text, special)
            assert kept.decode(whole.encode(text), special) == whole.decode(whole.encode(text), special)
    assert [kept.token_bytes(i) for i in range(kept.vocab_size)] == [
        whole.token_bytes(i) for i in range(whole.vocab_size)
    ]
    names = ("vocab_size", "bos_token_id", "eos_token_ids", "special_ids", "adds_eos", "longest_token", "class_name",
             "markers", "special_texts", "chat_template", "_renderer_options", "_marker_ids")  # fmt: skip
    assert {name: getattr(kept, name) for name in names} == {name: getattr(whole, name) for name in names}
    assert kept.render_chat(MESSAGES) == whole.render_chat(MESSAGES)
    kept.chat_template = "{{ messages | length }}!"
    assert kept.render_chat(MESSAGES) == "1!"
    values = json.loads((model / KEPT).read_text())
    (model / KEPT).write_text(json.dumps(values | {"transformers": "0.1"}))
    assert not isinstance(load_tokenizer(model)._hf, KeptTokenizer), "transformers may read it in another way now"


@pytest.mark.slow
def test_a_kept_tokenizer_needs_transformers_only_for_chats(tmp_path):
    shutil.copytree(ROOT / "checkpoints" / "demo", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / BUNDLE).touch()
    KeptTokenizer.write(tmp_path / "model" / KEPT, tmp_path / "model")
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS, str(tmp_path / "model")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ids = load_tokenizer(ROOT / "checkpoints" / "demo").encode("Hello")
    assert done.stdout.splitlines() == [f"{ids} False", "True"]
