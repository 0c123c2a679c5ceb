"""Small tokenizers of the three kinds there are: byte-level BPE, sentencepiece with byte fallback, word pieces."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from jaxserve.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello there!",
    "Grüße aus Köln: naïve café, 你好世界, こんにちは, emoji 😀👍🏽 and more 😀.",
    "def main():\n    return 'text' + str(42)  # stop here",
] * 3
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'clown' %}{{ raise_exception('no clowns') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _wrap(backend: Backend, **options: object) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **options))


def byte_level_backend(vocab_size: int = 400) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return backend


def byte_level(chat_template: str | None = TEMPLATE, bos: bool = False) -> Tokenizer:
    backend = byte_level_backend()
    options = {"eos_token": "<|endoftext|>", "chat_template": chat_template}
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
        options["bos_token"] = "<|im_start|>"
    return _wrap(backend, **options)


def sentencepiece_like() -> Tokenizer:
    """BPE over pieces with a visible space, every byte as a fallback token, and a decoder that strips one space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "\u2581"]
    alphabet = sorted({c for text in CORPUS for c in text if c.isascii() and c not in " \n"})
    words = ["\u2581the", "\u2581Hello", "\u2581world", "lo", "\u2581dog", "\u2581\u2581"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *alphabet, *(w for w in words)])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def unigram() -> Tokenizer:
    """Unigram with Metaspace, as T5-like models have it."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend, eos_token="</s>", unk_token="<unk>")


def word_pieces() -> Tokenizer:
    vocabulary = {piece: i for i, piece in enumerate(["[UNK]", "hello", "wor", "##ld", "##s", "dog", ".", "the"])}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return _wrap(backend, unk_token="[UNK]")


# With tools and reasoning, in the format of Hermes and Qwen3.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }} answer with "
    '<tool_call>{"name": n, "arguments": a}</tool_call> {# <think> </think> #}<|im_end|>\n{% endif %}'
    "{% for m in messages %}{% if m.role == 'clown' %}{{ raise_exception('no clowns') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.id }} {{ call.function.name }} {{ call.function.arguments.city }}]"
    "{% endfor %}{% if m.tool_call_id %}[for {{ m.tool_call_id }}]{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


def save_byte_level(folder: Path, template: str = TEMPLATE) -> None:
    """Writes a tokenizer folder that `load_tokenizer` reads."""
    from transformers import PreTrainedTokenizerFast

    hf = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), eos_token="<|endoftext|>", chat_template=template
    )
    hf.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2], "temperature": 0.5, "top_k": 7}')


def add_special_tokens(folder: Path, tokens: list[str]) -> None:
    """Adds special tokens to a saved tokenizer."""
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(folder)
    hf.add_special_tokens({"additional_special_tokens": tokens})
    hf.save_pretrained(folder)
