"""Prompts of models that embed or score."""

import json

import pytest
import tiny_models
from tokenizers import Tokenizer, processors

from jaxserve.text.score_prompt import adds_special_tokens, cut, ended, joined, texts_of
from jaxserve.text.tokenizer import load_tokenizer

EOS = 2


def tokenizer_with(folder, template=False, **settings):
    tiny_models.build_tokenizer(folder, 512)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    (folder / "special_tokens_map.json").unlink()
    if template:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", EOS)]
        )
        backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.mark.parametrize("template", [False, True])
def test_the_end_of_a_text(template, tmp_path):
    """By the tokenizer's own rules (Qwen3-Embedding), by `add_eos_token` (e5-mistral), or by both: one end."""
    tokenizer = tokenizer_with(tmp_path, template, add_eos_token=True, eos_token="</s>")
    plain = tokenizer.encode("the sea", add_special_tokens=False)
    assert ended(tokenizer, tokenizer.encode("the sea")) == [*plain, EOS]
    assert cut(tokenizer, [*plain, EOS], 3) == [*plain[:2], EOS]
    assert cut(tokenizer, plain, 3) == plain[:3]


def test_without_settings_nothing_is_added(tmp_path):
    tokenizer = tokenizer_with(tmp_path)
    assert ended(tokenizer, [7, 8]) == [7, 8]


def test_the_reranker_prompt_is_that_of_its_card(tmp_path):
    """The parts are encoded one by one, as in the model card of Qwen3-Reranker."""
    tokenizer = tokenizer_with(tmp_path)
    (body,) = texts_of("qwen3", "which sea?", "The sea is blue.")
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    assert body == f"<Instruct>: {instruction}\n<Query>: which sea?\n<Document>: The sea is blue."
    assert not adds_special_tokens("qwen3")
    ids = joined(tokenizer, "qwen3", [tokenizer.encode(body, add_special_tokens=False)])
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == before + body + after
    assert texts_of("qwen3", "a", "b", "Find it")[0].startswith("<Instruct>: Find it\n")
    short = joined(tokenizer, "qwen3", [tokenizer.encode(body, add_special_tokens=False)], most=len(ids) - 5)
    end = tokenizer.encode(after, add_special_tokens=False)
    assert len(short) == len(ids) - 5
    assert short[-len(end) :] == end


def test_plain_pairs_are_one_text_after_the_other(tmp_path):
    tokenizer = tokenizer_with(tmp_path, template=True)
    pair = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("which sea?", "The sea.").ids
    parts = [tokenizer.encode(text) for text in texts_of("plain", "which sea?", "The sea.")]
    assert joined(tokenizer, "plain", parts) == pair
