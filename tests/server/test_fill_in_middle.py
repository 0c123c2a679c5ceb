"""`suffix` of /v1/completions: prompts with the markers of models that fill in the middle."""

from __future__ import annotations

import json

import gguf
import gguf_files
import pytest
import tokenizers_for_tests as kinds
from serving import running_server

from jaxserve.text.fill_in_middle import FillInMiddle
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from jaxserve.text.tokenizer_files import KeptTokenizer
from jaxserve.types import InvalidRequestError

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>"]
CODE = {"prompt": "def main():\n", "suffix": " # stop here"}


def with_tokens(folder, tokens: list[str]) -> Tokenizer:
    kinds.save_byte_level(folder)
    kinds.add_special_tokens(folder, tokens)
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("prompt", "ends"),
    [
        ("<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>", ["<|endoftext|>", "<|fim_pad|>"]),
        ("<fim_prefix>A<fim_suffix>B<fim_middle>", ["<|endoftext|>"]),
        ("<fim-prefix>A<fim-suffix>B<fim-middle>", ["<|endoftext|>"]),
        ("<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>", ["<|endoftext|>"]),
        ("<|code_prefix|>A<|code_suffix|>B<|code_middle|>", ["<|endoftext|>"]),
        ("[SUFFIX]B[PREFIX]A", ["<|endoftext|>"]),
        ("<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>", ["<|endoftext|>", "<|file_separator|>"]),  # CodeGemma
        ("<fim_prefix>A<fim_suffix>B<fim_middle>", ["<|endoftext|>", "<fim_pad>", "<file_sep>"]),  # StarCoder2, Granite
    ],
)
def test_forms(tmp_path, prompt, ends):
    """The forms as the models' cards show them."""
    markers = [text for text in prompt.replace("A", "\n").replace("B", "\n").split("\n") if text]
    tokenizer = with_tokens(tmp_path, [*markers, *ends[1:]])
    middle = FillInMiddle(tokenizer)
    texts = ["x = '", "'\n  y"]
    built = middle.prompt(*(tokenizer.encode(text, add_special_tokens=False) for text in texts))
    assert tokenizer.decode(built, skip_special_tokens=False) == prompt.replace("A", texts[0]).replace("B", texts[1])
    assert [tokenizer.token_bytes(end).decode() for end in middle.end_ids] == ends
    assert middle.lead == ""


def test_code_llama(tmp_path):
    """Sentencepiece puts a space before each text. The suffix has none, and the prompt begins with BOS."""
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    backend = kinds.sentencepiece_like()._backend
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("▁<PRE>", "▁<SUF>", "▁<MID>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer = Tokenizer(hf)
    middle = FillInMiddle(tokenizer)
    prefix, suffix = (tokenizer.encode(text, False) for text in ("dog", f"{middle.lead}lo world"))
    pieces = [backend.id_to_token(i) for i in middle.prompt(prefix, suffix)]
    assert "".join(pieces) == "<s>▁<PRE>▁dog▁<SUF>lo▁world▁<MID>"


NAMED = {"prefix": "(PRE)", "suffix": "(SUF)", "middle": "(MID)"}


def check_named(tokenizer: Tokenizer, ends: list[str]) -> None:
    middle = FillInMiddle(tokenizer)
    ids = (tokenizer.encode(text, add_special_tokens=False) for text in ("a", "b"))
    assert tokenizer.decode(middle.prompt(*ids), skip_special_tokens=False) == "(PRE)a(SUF)b(MID)"
    assert [tokenizer.token_bytes(end).decode() for end in middle.end_ids] == ends


def test_markers_that_settings_name(tmp_path):
    """As those of Code Llama do; kept in bundles."""
    with_tokens(tmp_path, [*NAMED.values(), "<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {f"{role}_token": text for role, text in NAMED.items()}
    path.write_text(json.dumps(settings | {"middle_token": {"content": "(MID)", "special": True}}))
    check_named(load_tokenizer(tmp_path), ["<|endoftext|>"])
    KeptTokenizer.write(tmp_path / "kept.json", tmp_path)
    check_named(Tokenizer(KeptTokenizer.read(tmp_path / "kept.json")), ["<|endoftext|>"])


@pytest.mark.parametrize("old", [False, True])
def test_markers_that_a_gguf_file_names(tmp_path, old):
    tokenizer = with_tokens(tmp_path, [*NAMED.values(), "(PAD)", "(SEP)"])
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
    gguf_files.add_tokenizer(writer, tmp_path)
    keys = ("prefix", "suffix", "middle") if old else ("fim_pre", "fim_suf", "fim_mid")
    named = dict(zip(keys, NAMED.values(), strict=True)) | {"fim_pad": "(PAD)", "fim_sep": "(SEP)"}
    for key, text in named.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", tokenizer.token_id(text))
    writer.add_uint32("tokenizer.ggml.fim_rep_token_id", 10**6)  # no token
    check_named(load_tokenizer(gguf_files.write(writer, tmp_path / "vocab.gguf")), ["<|endoftext|>", "(PAD)", "(SEP)"])


def test_a_part_of_the_markers(tmp_path):
    tokenizer = with_tokens(tmp_path, ["<fim_prefix>", "<fim_suffix>"])
    with pytest.raises(InvalidRequestError, match="none of the known markers"):
        FillInMiddle(tokenizer)


def test_other_files(tmp_path):
    """They come first, behind the BOS token, each after the model's marker for a file if it has one."""
    tokenizer = with_tokens(tmp_path, ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"])
    files = [tokenizer.encode(text) for text in ("one", "two")]
    built = FillInMiddle(tokenizer).prompt(tokenizer.encode("a"), tokenizer.encode("b"), files)
    text = tokenizer.decode(built, skip_special_tokens=False)
    assert text == "<file_sep>one<file_sep>two<file_sep><fim_prefix>a<fim_suffix>b<fim_middle>"


@pytest.mark.parametrize(
    ("form", "markers"),
    [
        (  # Qwen2.5-Coder, and what llama.cpp's page says of /infill
            "<|repo_name|>myproject\n<|file_sep|>one<|file_sep|>two<|file_sep|>filename\n"
            "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
            ["<|repo_name|>", *QWEN[:3], QWEN[4]],
        ),
        (  # StarCoder2
            "<repo_name>myproject\n<file_sep>one<file_sep>two<file_sep><fim_prefix>filename\na<fim_suffix>b<fim_middle>",
            ["<repo_name>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"],
        ),
        (  # StarCoder, Granite
            "<reponame>myproject\n<filename>one<filename>two<filename>filename\n<fim_prefix>a<fim_suffix>b<fim_middle>",
            ["<reponame>", "<filename>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
        ),
        (  # CodeGemma
            "<|file_separator|>one<|file_separator|>two<|file_separator|><|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
            [*QWEN[:3], "<|file_separator|>"],
        ),
        ("onetwo[SUFFIX]b[PREFIX]a", ["[SUFFIX]", "[PREFIX]"]),  # Codestral
    ],
)
def test_repositories(tmp_path, form, markers):
    """Where the tokenizer has markers for files, each has one; the repository and the file have names where the model
    has a marker for the former."""
    tokenizer = with_tokens(tmp_path, markers)
    middle = FillInMiddle(tokenizer)
    a, b, *files = (tokenizer.encode(text, add_special_tokens=False) for text in ("a", "b", "one", "two"))
    assert tokenizer.decode(middle.prompt(a, b, files), skip_special_tokens=False) == form
    alone = tokenizer.decode(middle.prompt(a, b), skip_special_tokens=False)
    assert form.replace("filename\n", "").endswith(alone)
    assert "one" not in alone


def test_no_markers():
    with pytest.raises(InvalidRequestError, match="none of the known markers") as error:
        FillInMiddle(kinds.byte_level())
    assert error.value.param == "suffix"


@pytest.fixture(scope="module")
def filling(tmp_path_factory):
    """A server that repeats prompts, of a model with Qwen's markers."""
    folder = tmp_path_factory.mktemp("coder")
    tokenizer = with_tokens(folder, QWEN)
    with running_server(folder, folder / "server.log", engine="ParrotEngine") as server:
        yield server, tokenizer


def test_completions(filling):
    """Through the official client, whole and streamed, several prompts at once, and an empty prefix."""
    server, tokenizer = filling
    client = server.openai()
    wanted = "<|fim_prefix|>def main():\n<|fim_suffix|> # stop here<|fim_middle|>"
    extra = {"extra_body": {"return_token_ids": True}}
    answer = client.completions.create(model="test-model", max_tokens=4, **CODE, **extra)
    ids = answer.choices[0].prompt_token_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == wanted
    assert answer.usage.prompt_tokens == len(ids)
    chunks = list(client.completions.create(model="test-model", max_tokens=4, stream=True, **CODE, **extra))
    assert chunks[0].choices[0].prompt_token_ids == ids
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    several = client.completions.create(model="test-model", prompt=["", "a"], suffix="b", max_tokens=1, **extra)
    texts = [tokenizer.decode(choice.prompt_token_ids, skip_special_tokens=False) for choice in several.choices]
    assert texts == [f"<|fim_prefix|>{prefix}<|fim_suffix|>b<|fim_middle|>" for prefix in ("", "a")]


def test_ends_with_the_middle(filling):
    """Padding and the next file end a middle, but no other completion. The engine repeats what the prefix holds."""
    server, _ = filling
    http = server.http()
    body = {"prompt": "abc<|file_sep|>def", "max_tokens": 30, "temperature": 0}
    choice = http.post("/v1/completions", json=body | {"suffix": "z"}).json()["choices"][0]
    assert (choice["finish_reason"], choice["text"]) == ("stop", "abc")
    assert http.post("/v1/completions", json=body).json()["choices"][0]["finish_reason"] == "length"
    ignored = http.post("/v1/completions", json=body | {"suffix": "z", "ignore_eos": True}).json()["choices"][0]
    assert ignored["finish_reason"] == "length"


def test_in_the_document(filling, http):
    """/openapi.json allows a suffix where the tokenizer has markers; the other server's has none."""
    suffixes = [
        server.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]["suffix"]
        for server in (filling[0].http(), http)
    ]
    assert suffixes[0]["type"] == ["string", "null"]
    assert suffixes[1]["enum"] == [None, ""]


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("echo", {"echo": True}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 5}),
        ("prompt", {"prompt": [1, 2]}),
        ("suffix", {"suffix": ["a"]}),
    ],
)
def test_refused(filling, param, body):
    answer = filling[0].http().post("/v1/completions", json=CODE | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert filling[0].http().post("/v1/completions", json=CODE | body | {"suffix": ""}).status_code == 200
