"""Reads a model's tokenizer from tokenizer.json and its companions, tokenizer.model, tekken.json or a GGUF file.

tokenizer.model is a sentencepiece model (github.com/google/sentencepiece, sentencepiece_model.proto), whose pieces,
scores and types a GGUF file has too; tekken.json is Mistral's byte-level vocabulary by ranks, as of tiktoken. Both are
converted to the metadata of a GGUF file, from which `gguf_tokenizer` makes a tokenizer.
"""

from __future__ import annotations

import base64
import inspect
import json
import re
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import models

from jaxserve.checkpoints.files import read_bytes, read_json, read_text
from jaxserve.checkpoints.gguf import known_gguf
from jaxserve.checkpoints.hub import BUNDLE
from jaxserve.text.gguf_tokenizer import CONTROL, UNKNOWN, USER_DEFINED, make_tokenizer

READABLE = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "tokenizer.model")
KEPT = "kept_tokenizer.json"  # beside a bundle's model: a tokenizer as transformers had read it
_KEPT_VALUES = ("bos_token", "bos_token_id", "eos_token_id", "unk_token_id", "all_special_ids", "chat_template")
_ROLES = {"bos": 1, "eos": 2, "unknown": 0, "padding": -1}  # sentencepiece's default ids
_SPEC = {"unknown": 40, "bos": 41, "eos": 42, "padding": 43}  # fields of TrainerSpec
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # a line of a tiktoken file
_TEKKEN_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)  # for files that do not list them
_TEKKEN_EDGES = {"bos": "<s>", "eos": "</s>"}


def read_tokenizer(path: Path) -> Any:
    """A transformers tokenizer from a folder or a GGUF file; no code of the folder runs. Raises ValueError for missing
    files, and any exception of the parsers for damaged ones."""
    folder = path if path.is_dir() else path.parent
    if (folder.parent / BUNDLE).is_file() and (kept := KeptTokenizer.read(folder / KEPT)) is not None:
        return kept
    return _read_with_transformers(path)


def _read_with_transformers(path: Path) -> Any:
    if path.suffix == ".gguf":
        return make_tokenizer(known_gguf(path).metadata)
    if not any((path / name).exists() for name in ("tokenizer.json", "vocab.json", "vocab.txt")):
        if (tekken := path / "tekken.json").exists():
            return _from_tekken(tekken)
        if pieces := sorted(path.glob("tokenizer.model*")):  # Mistral appends a version: tokenizer.model.v3
            return _from_sentencepiece(pieces[-1])
        if tiktoken := sorted(path.glob("*.tiktoken")):
            raise ValueError(_tiktoken(tiktoken[0]))
        raise ValueError(
            f"it has none of {', '.join(READABLE)}. Save the tokenizer there (AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(...) of transformers), or name a model that has it with --tokenizer"
        )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        backend.no_truncation()  # tokenizer.json may hold the lengths to which a trainer cut or padded its texts
        backend.no_padding()
    settings = _settings(path)
    tokenizer.init_kwargs["add_eos_token"] = settings.get("add_eos_token")  # transformers 5 drops it
    tokenizer.init_kwargs["fim_tokens"] = _fim_tokens(settings)
    return tokenizer


class KeptTokenizer:
    """A tokenizer of a bundle, which is used without importing transformers: that takes half of an API server's start.

    Has what `Tokenizer` asks of a tokenizer of transformers, as transformers had read it when the bundle was made. Only
    chat templates need transformers, which is imported at the first one or by `warm`.
    """

    bos_token: str | None
    chat_template: Any

    def __init__(self, values: dict[str, Any]):
        for name in (*_KEPT_VALUES, "class_name", "options"):
            setattr(self, name, values[name])
        self.init_kwargs = {name: values.get(name) for name in ("add_eos_token", "fim_tokens")}
        self.backend_tokenizer = Backend.from_str(values["backend"])
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()
        self._size = values["size"]
        self._special = values["special_tokens_map"]
        self._lock = threading.Lock()
        self._renderer: Any = None

    @classmethod
    def read(cls, file: Path) -> KeptTokenizer | None:
        """The tokenizer in `file`; None if there is none, or if another version of transformers read it."""
        if not file.is_file():
            return None
        values = json.loads(file.read_bytes())
        return cls(values) if values["transformers"] == version("transformers") else None

    @staticmethod
    def write(file: Path, path: Path) -> None:
        """Keeps the tokenizer at `path`, unless it has something of its own that only Python knows."""
        from transformers import PreTrainedTokenizerBase

        whole = _read_with_transformers(path)
        backend = getattr(whole, "backend_tokenizer", None)
        special = whole.special_tokens_map
        if backend is None or type(whole).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            return
        try:
            text = backend.to_str()
            same = Backend.from_str(text).to_str() == text
        except Exception:  # parts in Python
            return
        added = backend.get_added_tokens_decoder().keys()
        if same and added == whole.added_tokens_decoder.keys() and _renderer(special).special_tokens_map == special:
            values = {name: getattr(whole, name) for name in _KEPT_VALUES}
            values |= {"transformers": version("transformers"), "class_name": type(whole).__name__, "backend": text}
            values |= {"size": len(whole), "add_eos_token": bool(whole.init_kwargs.get("add_eos_token"))}
            values |= {"special_tokens_map": special, "fim_tokens": whole.init_kwargs.get("fim_tokens")}
            values["options"] = list(inspect.signature(whole.apply_chat_template).parameters)
            file.write_text(json.dumps(values))

    def __len__(self) -> int:
        return self._size

    def warm(self) -> Any:
        """A tokenizer of transformers that renders templates as this one's would."""
        with self._lock:
            if self._renderer is None:
                self._renderer = _renderer(self._special)
            return self._renderer

    def apply_chat_template(self, conversation: list[dict[str, Any]], **variables: object) -> Any:
        """As transformers' method, whose other arguments and the template's variables are `variables`."""
        renderer = self.warm()
        renderer.chat_template = self.chat_template
        return renderer.apply_chat_template(conversation, **variables)


def _renderer(special: dict[str, str]) -> Any:
    """A tokenizer of transformers with these special tokens, of which templates may write some, and no vocabulary."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE()), **special)


def _tiktoken(path: Path) -> str:
    return (
        f"{path.name} is a vocabulary of tiktoken, which does not say how it splits words. Save it as tokenizer.json "
        "(save_pretrained of transformers), or name a model that has that with --tokenizer"
    )


# Settings in other files.


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of special_tokens_map.json, tokenizer_config.json and chat_template.jinja; tokens are plain text."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path := folder / name).is_file():
            found = read_json(path)
            if not isinstance(found, dict):
                raise ValueError(f"{name} must hold a JSON object")
            settings |= found
    for name in ("bos", "eos", "unk", "pad"):
        token = settings.get(f"{name}_token")
        settings[f"{name}_token"] = token.get("content") if isinstance(token, dict) else token
    if (path := folder / "chat_template.jinja").is_file():
        settings["chat_template"] = read_text(path)
    return settings


def _fim_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """The tokens for filling in the middle that the settings name, by role, as Code Llama's do."""
    found = {}
    for role in ("prefix", "suffix", "middle"):
        token = settings.get(f"fim_{role}_token", settings.get(f"{role}_token"))
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[role] = text
    return found


def _added(folder: Path, settings: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    """Added tokens: id -> (text, whether it is special)."""
    path = folder / "added_tokens.json"
    found = {}
    if path.is_file():
        found = {i: (text, True) for text, i in read_json(path).items()}
    for i, token in (settings.get("added_tokens_decoder") or {}).items():
        found[int(i)] = (token["content"], bool(token.get("special", False)))
    return found


def _templates(settings: dict[str, Any]) -> dict[str, str]:
    """The chat templates as metadata of a GGUF file."""
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        found = {entry["name"]: entry["template"] for entry in template}
        others = {f"tokenizer.chat_template.{name}": text for name, text in found.items() if name != "default"}
        return others | ({"tokenizer.chat_template": found["default"]} if "default" in found else {})
    return {"tokenizer.chat_template": template} if template else {}


# sentencepiece


def _from_sentencepiece(path: Path) -> Any:
    data = read_bytes(path, None)
    if _TIKTOKEN.match(data):
        raise ValueError(_tiktoken(path))
    try:
        model = list(_fields(data))
        pieces = [dict(_fields(value)) for field, value in model if field == 1]
        trainer, normalizer = ({} | dict(_fields(dict(model).get(field, b""))) for field in (2, 3))
        tokens = [piece[1].decode() for piece in pieces]
        scores = [float(np.frombuffer(piece.get(2, bytes(4)), "<f4")[0]) for piece in pieces]
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{path.name} is no sentencepiece model") from error
    kinds = {1: "t5", 2: "llama"}
    if trainer.get(3, 1) not in kinds or not tokens:
        raise ValueError(f"{path.name} has the kind {trainer.get(3, 1)}; unigram (1) and BPE (2) are read")
    types = [piece.get(3, 1) for piece in pieces]
    settings = _settings(path.parent)
    _add(_added(path.parent, settings), tokens, types, scores)
    ids = {role: _signed(trainer.get(field, _ROLES[role])) for role, field in _SPEC.items()}
    for role, name in {"unknown": "unk", "bos": "bos", "eos": "eos", "padding": "pad"}.items():
        if settings[f"{name}_token"] in tokens:
            ids[role] = tokens.index(settings[f"{name}_token"])
    metadata = {
        "model": kinds[trainer.get(3, 1)],
        "tokens": tokens,
        "token_type": np.array(types, np.int32),
        "scores": np.array(scores, np.float32),
        **{f"{role}_token_id": i for role, i in ids.items() if 0 <= i < len(tokens)},
        "add_bos_token": bool(settings.get("add_bos_token", True)) and ids["bos"] >= 0,
        "add_eos_token": bool(settings.get("add_eos_token", False)),
        "add_space_prefix": bool(settings.get("add_prefix_space", normalizer.get(3, 1))),
        "remove_extra_whitespaces": bool(normalizer.get(4, 1)),
        "precompiled_charsmap": normalizer.get(2, b""),
        "prefix_once": settings.get("legacy") is False and not normalizer.get(4, 1),
    }
    return make_tokenizer({f"tokenizer.ggml.{key}": x for key, x in metadata.items()} | _templates(settings))


def _add(added: dict[int, tuple[str, bool]], tokens: list[str], types: list[int], scores: list[float]) -> None:
    """Appends added tokens, filling gaps of ids with unused ones; an existing token only changes its type."""
    for i in sorted(added):
        text, special = added[i]
        for gap in range(len(tokens), i + 1):
            tokens.append(text if gap == i else f"<unused_{gap}>")
            types.append(CONTROL)
            scores.append(0.0)
        if tokens[i] != text:
            raise ValueError(f"the added token {text!r} has the id {i}, which is that of {tokens[i]!r}")
        if types[i] != UNKNOWN:
            types[i] = CONTROL if special else USER_DEFINED


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer message: (field number, integer or bytes). Raises IndexError or ValueError for
    invalid data."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        elif kind in (1, 2, 5):
            size, at = _varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
            part = data[at : at + size]
            at = at + size
            if at > len(data):
                raise ValueError("truncated")
            yield key >> 3, part
        else:
            raise ValueError(f"wire type {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError("a number of more than ten bytes")


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


# tekken


def _from_tekken(path: Path) -> Any:
    try:
        data = json.loads(read_text(path, None))
        config = data["config"]
        count = config["default_num_special_tokens"]
        size = config["default_vocab_size"]
        names = [token["token_str"] for token in data.get("special_tokens") or ()] or _TEKKEN_SPECIAL.split()
        ranked = sorted(data["vocab"], key=lambda token: token["rank"])[: size - count]
        words = [base64.b64decode(token["token_bytes"]) for token in ranked]
        pattern = config["pattern"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path.name} is no vocabulary of Mistral's tekken: {error!r:.200}") from error
    names += [f"<SPECIAL_{i}>" for i in range(len(names), count)]
    letter = {value: char for char, value in byte_level_alphabet().items()}
    tokens = ["".join(map(letter.__getitem__, word)) for word in words]
    settings = _settings(path.parent)
    metadata = {
        "model": "gpt2",
        "pre": "tekken",
        "tokens": names + tokens,
        "token_type": np.array([CONTROL] * len(names) + [1] * len(tokens), np.int32),
        "merges": [f"{left} {right}" for left, right in _merges(tokens)],
        **{f"{role}_token_id": names.index(text) for role, text in _TEKKEN_EDGES.items() if text in names},
        "add_bos_token": True,
    }
    return make_tokenizer(
        {f"tokenizer.ggml.{key}": x for key, x in metadata.items()} | _templates(settings), patterns=(pattern,)
    )


def _merges(tokens: list[str]) -> Iterator[tuple[str, str]]:
    """The merges that tiktoken's ranks imply: every pair of tokens that forms a third, ordered by that token's rank."""
    known = set(tokens)
    for token in tokens:
        for cut in range(1, len(token)):
            if token[:cut] in known and token[cut:] in known:
                yield token[:cut], token[cut:]


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte: visible Latin-1 stands for itself, and U+0100, U+0101, … for the other bytes in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(value): value for value in visible}
    hidden = [value for value in range(256) if value not in set(visible)]
    return alphabet | {chr(0x100 + i): value for i, value in enumerate(hidden)}
