"""Text <-> token ids, exact token bytes, and chat templates.

A thin layer over `transformers.AutoTokenizer`, which never runs code from a model's folder here. `transformers` takes
long to import, so it is imported when the first tokenizer is loaded.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import re
import string
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from jaxserve.text.chat_template import TEMPLATE_INPUTS, TEMPLATE_SECONDS
from jaxserve.text.generation_defaults import GenerationDefaults, generation_defaults
from jaxserve.text.tokenizer_files import byte_level_alphabet
from jaxserve.types import InvalidRequestError

_LONG_TEXT = 1000  # characters from which encoding takes longer than the overhead of a batch
_LETTERS = re.compile("[A-Za-z]+")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPIECE_SPACE = "\u2581"  # sentencepiece's character for a space


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads.

    Attributes: vocab_size: number of token ids, added tokens included (a model's own vocabulary may be padded beyond
      it). bos_token_id: id that opens a sequence, or None. eos_token_ids: ids that end a sequence, of the tokenizer and
      generation_config.json together, and gpt-oss's own. special_ids: ids that `skip_special_tokens` leaves out of
      decoded text. generation_defaults: sampling parameters of requests that name none. template_defaults: variables of
      the chat template for conversations that do not set them; the server's API server fills
        them in.
      escape_special_tokens: encode special tokens in the text of users and tools as text (see `foreign_text`).
      longest_token: most characters of one token; None if an unknown token can stand for any number of them.
      fim_tokens: texts of the tokens that the model's files name for filling in the middle, by role: prefix, suffix,
        middle, pad, repo, file (see `fill_in_middle`).
    """

    def __init__(self, hf_tokenizer: Any, generation_defaults: GenerationDefaults | None = None):
        self._hf = hf_tokenizer
        self.escape_special_tokens = False
        self.template_defaults: dict[str, Any] = {}
        self._backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        self.generation_defaults = generation_defaults or GenerationDefaults()
        self.vocab_size: int = len(hf_tokenizer)
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        self.adds_eos = bool(hf_tokenizer.init_kwargs.get("add_eos_token"))  # see `score_prompt.ended`
        own_eos = [] if hf_tokenizer.eos_token_id is None else [hf_tokenizer.eos_token_id]
        self.fim_tokens: dict[str, str] = hf_tokenizer.init_kwargs.get("fim_tokens") or {}
        added = hf_tokenizer.added_tokens_decoder
        ends = [*own_eos, *self.generation_defaults.eos_token_ids, *_answer_ends(added)]
        self.eos_token_ids = tuple(dict.fromkeys(ends))
        self.special_ids = frozenset(hf_tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
        self._added = {i: token.content for i, token in added.items()}
        steps = _decoder_steps(self._backend)
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds
        pieces = self._backend.get_vocab() if self._backend and (self._byte_level or self._byte_fallback) else ()
        self.longest_token: int | None = max(map(len, pieces), default=None)
        self._most_letters = max((len(piece) - len(_LETTERS.sub("", piece)) for piece in pieces), default=None)
        # Parameters of this version of transformers, in case TEMPLATE_INPUTS lacks a new one.
        options = getattr(hf_tokenizer, "options", None)  # of a KeptTokenizer
        options = options or inspect.signature(hf_tokenizer.apply_chat_template).parameters
        self._renderer_options = {*options} - {"documents"}
        self._continuation = next((step["prefix"] for step in steps if step["type"] == "WordPiece"), None)
        self._char_bytes = byte_level_alphabet() if self._byte_level else {}
        self._bytes: dict[int, bytes] = {}

    @property
    def class_name(self) -> str:
        return getattr(self._hf, "class_name", type(self._hf).__name__)  # a KeptTokenizer tells it

    def warm(self) -> None:
        """Imports what chat templates need, unless that is there already."""
        if (warm := getattr(self._hf, "warm", None)) is not None:  # of a KeptTokenizer
            warm()

    # text <-> ids

    def fewest_tokens(self, text: str) -> int:
        """A fast lower bound of the number of tokens of `text`; 0 if none is known. Computed from its length, and from
        its letters, of which a token has far fewer than of spaces."""
        if not self.longest_token:
            return 0
        fewest = len(text) // self.longest_token
        if self._most_letters and text.isascii():  # no normalization removes letters of ASCII text
            data = text.encode()
            letters = len(data) - len(data.translate(None, string.ascii_letters.encode()))
            fewest = max(fewest, letters // self._most_letters)
        return fewest

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Text that already begins with the BOS token gets no second one."""
        if self._backend is not None and len(text) > _LONG_TEXT:  # only encoding a batch releases Python's lock
            ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        elif self._backend is not None:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self._hf.encode(text, add_special_tokens=add_special_tokens)
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos] and text.startswith(self._hf.bos_token):
            return ids[1:]
        return ids

    def encode_separated(self, text: str, separators: Sequence[int], add_special_tokens: bool) -> list[int]:
        """Token ids of a text without its separators: the characters at these ascending positions.

        Raises InvalidRequestError if the tokenizer joins a separator's neighbours to a special token all the same.
        """
        if not separators:
            return self.encode(text, add_special_tokens)
        if self._backend is None:
            raise InvalidRequestError("the prompt holds special tokens, which this tokenizer cannot take as plain text")
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        places = set(separators)
        ids = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if end - start > 1 and token in self._marker_ids and not places.isdisjoint(range(start, end)):
                raise InvalidRequestError("the prompt holds special tokens, which this tokenizer cannot take as text")
            if not (end - start == 1 and start in places):
                ids.append(token)
        return ids

    def token_of(self, text: str) -> int:
        """As `token_id`. Raises InvalidRequestError if there is none."""
        if (found := self.token_id(text)) is None:
            raise InvalidRequestError(f"the tokenizer has no token {text!r}, which pictures need")
        return found

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """Texts of the tokens with a special meaning: special tokens, and added tokens that the chat template writes,
        such as those around tool calls."""
        return tuple(sorted({self._added[i] for i in self._marker_ids}, key=len, reverse=True))

    @cached_property
    def special_texts(self) -> frozenset[str]:
        return frozenset(text for i, text in self._added.items() if i in self.special_ids)

    @cached_property
    def _marker_ids(self) -> frozenset[int]:
        """Ids of the markers, without the unknown token."""
        template = self.chat_template or ""
        unknown = self._hf.unk_token_id
        added = ((i, text) for i, text in self._added.items() if len(text) > 1 and not text.isspace() and i != unknown)
        return frozenset(i for i, text in added if i in self.special_ids or text in template)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids` as one piece; ids outside the vocabulary decode to nothing, broken UTF-8 to U+FFFD."""
        if self._backend is not None:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self._hf.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes inside a text; empty for an id outside the vocabulary."""
        cached = self._bytes.get(token_id)
        if cached is None:
            cached = self._bytes[token_id] = self._find_bytes(token_id)
        return cached

    def raw_bytes(self, token_id: int) -> bytes | None:
        """The token's bytes if they do not depend on its neighbours, else None (see `jaxserve.text.detokenizer`)."""
        if self._byte_level or (self._byte_fallback and _BYTE_TOKEN.fullmatch(self._piece(token_id) or "")):
            return self.token_bytes(token_id)
        return None

    def token_id(self, text: str) -> int | None:
        """The id of the token that stands for exactly this text, in the vocabulary's own spelling; None without one."""
        if self._backend is not None:
            return self._backend.token_to_id(text)
        return next((i for i, added in self._added.items() if added == text), None)

    def _piece(self, token_id: int) -> str | None:
        if self._backend is not None:
            return self._backend.id_to_token(token_id)
        return self._hf.convert_ids_to_tokens(token_id) if 0 <= token_id < self.vocab_size else None

    def _find_bytes(self, token_id: int) -> bytes:
        if (content := self._added.get(token_id)) is not None:
            return content.encode()
        piece = self._piece(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            mapped = [self._char_bytes.get(char) for char in piece]
            return piece.encode() if None in mapped else bytes(value for value in mapped if value is not None)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        if self._continuation is not None:
            return piece.removeprefix(self._continuation).encode()
        return piece.replace(_SPIECE_SPACE, " ").encode()

    def with_eos(self, stop_token_ids: Iterable[int], known: Iterable[int]) -> tuple[int, ...]:
        """Stop tokens and the tokenizer's end-of-sequence ids, except those that the engine knows (`known`)."""
        given = tuple(stop_token_ids)
        return (*given, *(token for token in self.eos_token_ids if token not in {*known, *given}))

    # chat

    @property
    def chat_template(self) -> str | None:
        """The source of the (default) template; None if there is none."""
        template = self._hf.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @chat_template.setter
    def chat_template(self, source: str) -> None:
        self._hf.chat_template = source

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation, by `chat_template` or else the model's template; `kwargs` are its
        variables.

        Renders in the calling thread, in Jinja's immutable sandbox, for at most TEMPLATE_SECONDS. The text already
        contains the template's special tokens: encode it with `add_special_tokens=False`.

        Raises:
          InvalidRequestError: the model has no template, or the template rejects these messages.
        """
        if chat_template is None and self.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template, so it cannot hold a conversation; use /v1/completions", "messages"
            )
        if not messages:
            raise InvalidRequestError("messages must hold at least one message", "messages")

        if taken := kwargs.keys() & (TEMPLATE_INPUTS | self._renderer_options):
            raise InvalidRequestError(f"{min(taken)} cannot be a variable of a chat template", "chat_template_kwargs")

        def render() -> str:
            return self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tokenize=False,
                **kwargs,
            )

        self.warm()
        try:
            return within_time(render, TEMPLATE_SECONDS)
        except OutOfTimeError:
            raise InvalidRequestError(
                f"the chat template did not finish within {TEMPLATE_SECONDS:g} s", "messages"
            ) from None
        except Exception as error:  # a template is a program that may raise anything about these messages
            raise InvalidRequestError(f"the chat template refused the messages: {error}", "messages") from error


def _answer_ends(added: Mapping[int, Any]) -> list[int]:
    """Ids of the tokens that end gpt-oss's answers, and its calls, whatever the configuration says."""
    ids = {token.content: i for i, token in added.items()}
    return [ids["<|return|>"], ids["<|call|>"]] if {"<|channel|>", "<|return|>", "<|call|>"} <= ids.keys() else []


def load_tokenizer(
    folder: str | Path,
    *,
    source: str | Path | None = None,
    placeholder: bool = False,
    chat_template: str | None = None,
    generation_config: str = "auto",
    override_generation_config: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """Loads the tokenizer of a model's folder or GGUF file, or the one at `source`. Raises ValueError with the
    path if there is no usable tokenizer.

    With `placeholder`, a folder without tokenizer files (as for dummy weights) gets a tokenizer with a byte per token.
    `chat_template` is the source of a template that replaces the model's own. `generation_config` and
    `override_generation_config` tell where recommended sampling parameters come from (`EngineConfig`).
    """
    folder = Path(folder)
    hf_tokenizer = _load(folder, Path(source or folder), placeholder)
    defaults = generation_defaults(folder, generation_config, override_generation_config)
    tokenizer = Tokenizer(hf_tokenizer, defaults)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _load(folder: Path, source: Path, placeholder: bool) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would warn that torch is missing
    from jaxserve.text.tokenizer_files import READABLE, read_tokenizer

    if placeholder and source.is_dir() and not any((source / name).exists() for name in READABLE):
        return _placeholder(folder)
    try:
        return read_tokenizer(source)
    except Exception as error:  # many kinds, from many parsers
        raise ValueError(f"no usable tokenizer in {source}: {error}") from error


def _placeholder(folder: Path) -> Any:
    """Bytes as the first 256 tokens; the rest of the vocabulary decodes to "<id>"."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    vocab = {char: value for char, value in byte_level_alphabet().items() if value < size}
    vocab |= {f"<{i}>": i for i in range(len(vocab), size)}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _decoder_steps(backend: Any) -> list[dict[str, Any]]:
    """The backend's decoder as a flat list of its JSON descriptions."""
    if backend is None or backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def token_strings(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """Each token as text; tokens that are not whole characters are written `bytes:\\xe4\\xbd`, as in OpenAI's API."""
    strings = []
    for token in ids:
        data = tokenizer.token_bytes(token)
        try:
            strings.append(data.decode())
        except UnicodeDecodeError:
            strings.append("bytes:" + "".join(f"\\x{value:02x}" for value in data))
    return strings


T = TypeVar("T")


class OutOfTimeError(BaseException):
    """Raised inside a thread whose work took too long; a BaseException, so that no `except Exception` catches it."""


def within_time(work: Callable[[], T], seconds: float) -> T:
    """Calls `work`, and raises OutOfTimeError in this thread, between two bytecodes, after `seconds`."""
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    finished = False

    def interrupt() -> None:
        with lock:
            if not finished:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(OutOfTimeError))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        return work()
    finally:
        timer.cancel()
        with lock:  # from here on the timer cannot fire
            finished = True
