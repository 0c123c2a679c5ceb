"""The tokenizer that a GGUF file carries, as transformers' own class.

Metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Supported are byte-level BPE ("gpt2"),
for which the file only names the pre-tokenizer, sentencepiece's BPE ("llama"), whose merges follow from the tokens'
scores, and the same with merges in the file ("gemma4"). The pre-tokenizers' patterns are those of the models' own
tokenizer.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

NORMAL = 1  # token types
UNKNOWN = 2  # token types
CONTROL = 3  # token types
USER_DEFINED = 4  # token types
UNUSED = 5  # token types
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' names -> the file's
_SPACE = "\u2581"  # sentencepiece's character for a space
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = (  # marks belong to the letters before them
    rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (  # words may be joined by spaces
    rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = f"{_ENGLISH}?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI = (  # Chinese characters stand apart
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?(?:(?!\p{{Han}}){_UPPER})*(?:(?!\p{{Han}}){_LOWER})+{_SUFFIX}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?(?:(?!\p{{Han}}){_UPPER})+(?:(?!\p{{Han}}){_LOWER})*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_JAIS2 = _LLAMA3.removesuffix(r"|\s+(?!\S)|\s+")  # spaces in powers of two
_JAIS2 += "".join(rf"|\s{{{2**i}}}(?!\S)" for i in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s"
_SEED = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# The list of letters in DeepSeek LLM's pattern.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK = (
    "[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKS_APART = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_ASIAN = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # digits in threes, from the last one on


class _Pre(NamedTuple):
    """A pre-tokenizer. Each pattern splits the pieces that the patterns before it made. With `ignore_merges`, a whole
    word that is a token needs no merges."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_KINDS = {
    # For older files, which do not name the pre-tokenizer; as in llama.cpp.
    _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): ("", "default"),
    _Pre((_GPT2,)): ("gpt-2", "trillion", "phi-2", "olmo", "mpt", "exaone4", "mellum", "granite-docling"),
    _Pre((r"\p{N}", _GPT2)): ("smollm", "starcoder", "refact", "minerva-7b", "codeshell", "exaone", "mellum2"),
    _Pre((r"\p{N}", _GPT2), nfc=True): ("command-r",),
    _Pre((_LLAMA3,), ignore_merges=True, add_bos=True): (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
    ),
    _Pre((_LLAMA3,)): ("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"),
    _Pre((_QWEN2,), nfc=True): ("qwen2", "deepseek-r1-qwen", "megrez", "kormo"),
    _Pre((_QWEN2,)): ("hunyuan", "solar-open"),
    _Pre((r"[^\n]+|\n+", _QWEN2)): ("laguna",),
    _Pre((_QWEN35,), nfc=True): ("qwen35",),
    _Pre((_EXAONE_MOE,)): ("exaone-moe",),
    _Pre((_THREES, _ASIAN, _DEEPSEEK3)): ("afmoe",),
    _Pre((_TEKKEN,), ignore_merges=True, add_bos=True): ("tekken",),
    _Pre(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")): ("deepseek-coder",),
    _Pre(_DEEPSEEK): ("deepseek-llm",),
    _Pre((_SEED,)): ("seed-coder",),
    _Pre((_KIMI,)): ("kimi-k2",),
    _Pre((_JAIS2,)): ("jais-2",),
    _Pre((" ?[^(\\s|.,!?…。，、।۔،)]+",)): ("bloom",),
    _Pre((_MARKS_APART, _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")), ignore_merges=True): ("youtu",),
    _Pre((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O), nfc=True): ("tiny_aya", "cohere2moe"),
    _Pre((_GPT4O,)): ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    _Pre((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)): ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
}
# Metadata keys of the tokens for filling in the middle, without "tokenizer.ggml." and "_token_id"; older ones last.
_FIM_KEYS = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "repo": ("fim_rep",),
    "file": ("fim_sep",),
}
_PRE_TOKENIZERS = {name: pre for pre, names in _KINDS.items() for name in names}


def make_tokenizer(metadata: Mapping[str, Any], patterns: tuple[str, ...] | None = None) -> Any:
    """A transformers tokenizer from a file's metadata. `patterns` are its pre-tokenizer's; None: the metadata names it.
    Raises ValueError with the metadata's key."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = _Vocabulary(metadata, patterns)
    makers: dict[str, Callable[[_Vocabulary], Backend]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
        "t5": _sentencepiece,
        "gemma4": _characters,
    }
    kind = vocabulary.take("model", "")
    if kind not in makers:
        raise ValueError(f"tokenizer.ggml.model {kind!r:.80} is not supported (only {', '.join(makers)})")
    backend = makers[kind](vocabulary)
    backend.add_tokens(vocabulary.added())
    roles = {role: vocabulary.special(role) for role in _ROLES}
    edges = {role: roles[role] for role in ("bos", "eos") if vocabulary.adds(role) and roles[role]}
    if edges:
        backend.post_processor = processors.TemplateProcessing(
            single=[x for x in (edges.get("bos"), "$A", edges.get("eos")) if x],
            special_tokens=[(token, vocabulary.ids[token]) for token in edges.values()],
        )
    named = {f"{role}_token": token for role, token in roles.items() if token}
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_chat_template(metadata),
        clean_up_tokenization_spaces=False,
        **named,
    )
    made.init_kwargs["fim_tokens"] = vocabulary.fim_tokens()
    return made


def recommended_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The file's recommended sampling parameters, under the names of `GenerationDefaults`."""
    names = {
        "temperature": "temp",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
    }
    found = {name: metadata.get(f"general.sampling.{key}") for name, key in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or all by name if the file has several."""
    key = "tokenizer.chat_template"
    default = metadata.get(key)
    named = {k[len(key) + 1 :]: x for k, x in metadata.items() if k.startswith(key + ".")}
    return {"default": default, **named} if default and named else default


class _Vocabulary:
    """tokens and types: by id. ids: token -> id, the lowest if several ids have the same text."""

    def __init__(self, metadata: Mapping[str, Any], patterns: tuple[str, ...] | None = None):
        self.metadata = metadata
        self.patterns = patterns
        self.tokens: list[str] = self.take("tokens", [])
        if not self.tokens or not all(isinstance(token, str) for token in self.tokens):
            raise ValueError("there are no tokenizer.ggml.tokens")
        self.types: list[int] = self.numbers("token_type", NORMAL)
        self.ids = {
            token: i
            for i, (token, kind) in reversed(list(enumerate(zip(self.tokens, self.types, strict=True))))
            if token and kind != UNUSED  # unused tokens only pad the vocabulary
        }
        self.pre = _Pre(())

    def take(self, key: str, default: Any) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if type(value) is not type(default):
            raise ValueError(f"tokenizer.ggml.{key} must be {type(default).__name__}, got {value!r:.80}")
        return value

    def numbers(self, key: str, default: int) -> list:
        """One number per token."""
        values = self.metadata.get(f"tokenizer.ggml.{key}")
        if values is None:
            return [default] * len(self.tokens)
        if not hasattr(values, "tolist") or len(values) != len(self.tokens):
            raise ValueError(f"tokenizer.ggml.{key} must hold a number for each of {len(self.tokens)} tokens")
        return values.tolist()

    def special(self, role: str) -> str | None:
        """The token of a role such as "bos"; None if the file names none."""
        token = self.metadata.get(f"tokenizer.ggml.{_ROLES[role]}_token_id")
        if token is None:
            return None
        if type(token) is not int or not 0 <= token < len(self.tokens):
            raise ValueError(f"the {role} token {token!r:.80} is none of {len(self.tokens)} tokens")
        return self.tokens[token] or None

    def fim_tokens(self) -> dict[str, str]:
        """The tokens for filling in the middle that the file names, by role; see `Tokenizer.fim_tokens`."""
        found: dict[str, str] = {}
        for role, keys in _FIM_KEYS.items():
            for key in keys:
                token = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
                if type(token) is int and 0 <= token < len(self.tokens):
                    found.setdefault(role, self.tokens[token])
        return found

    def adds(self, role: str) -> bool:
        sentencepiece = self.take("model", "") in ("llama", "t5", "gemma4")
        return self.take(f"add_{role}_token", role == "bos" and (sentencepiece or self.pre.add_bos))

    def added(self) -> list[AddedToken]:
        """Tokens that are found in a text before it is split and merged."""
        kinds = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
        return [
            AddedToken(token, special=kinds[kind], normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if token and kind in kinds
        ]


def _byte_level(vocabulary: _Vocabulary) -> Backend:
    name = vocabulary.take("pre", "")
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(filter(None, _PRE_TOKENIZERS))
        raise ValueError(f"tokenizer.ggml.pre {name!r:.80} is not supported (only {known})")
    pre = vocabulary.pre = _PRE_TOKENIZERS[name]
    if vocabulary.patterns is not None:
        pre = pre._replace(patterns=vocabulary.patterns)
    backend = Backend(models.BPE(vocabulary.ids, _merges(vocabulary), ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Pairs of tokens that merge into a third.

    A pair whose result is no token, and whose texts are in no other merge, is left out. llama.cpp splits such a result
    into bytes again, so the merge has no effect. (A file without merges has such a pair, as GGUF's writer rejects empty
    lists.)
    """
    merges = [tuple(merge.split(" ")) for merge in vocabulary.take("merges", [])]
    strange = [merge for merge in merges if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.ids.keys()]
    uses = Counter(text for merge in merges for text in {*merge, "".join(merge)}) if strange else Counter()
    for merge in strange:
        texts = {*merge, "".join(merge)}
        if len(merge) != 2 or "".join(merge) in vocabulary.ids or any(uses[text] > 1 for text in texts):
            raise ValueError(f"tokenizer.ggml.merges has {' '.join(merge)!r:.80}, which are not two tokens and a third")
    left_out = set(strange)
    return [(merge[0], merge[1]) for merge in merges if merge not in left_out]


def _sentencepiece(vocabulary: _Vocabulary) -> Backend:
    unknown = vocabulary.special("unk") or next(
        (token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == UNKNOWN), None
    )
    if vocabulary.take("model", "") == "t5":
        pieces = list(zip(vocabulary.tokens, map(float, vocabulary.numbers("scores", 0)), strict=True))
        place = vocabulary.ids[unknown] if unknown else None
        backend = Backend(models.Unigram(pieces, place, byte_fallback="<0x00>" in vocabulary.ids))
    else:
        merges = _merges_by_score(vocabulary)
        backend = Backend(models.BPE(vocabulary.ids, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    prefix = vocabulary.take("add_space_prefix", True)
    steps = _cleaning(vocabulary)
    if prefix and vocabulary.take("prefix_once", False):  # not a key of GGUF: stands for transformers' `legacy: false`
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        steps += [*([normalizers.Prepend(_SPACE)] if prefix else []), normalizers.Replace(" ", _SPACE)]
    backend.normalizer = normalizers.Sequence(steps)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return backend


def _characters(vocabulary: _Vocabulary) -> Backend:
    """BPE of characters. Lines are no further split, and newlines that are a token together need no merges."""
    merges = _merges(vocabulary)
    unknown = vocabulary.special("unk")
    backend = Backend(
        models.BPE(vocabulary.ids, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown, ignore_merges=True)
    )
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _cleaning(vocabulary: _Vocabulary) -> list[normalizers.Normalizer]:
    """Sentencepiece's normalization of a text."""
    charsmap = vocabulary.metadata.get("tokenizer.ggml.precompiled_charsmap", b"")
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(bytes(charsmap))] if len(charsmap) else []
    if vocabulary.take("remove_extra_whitespaces", False):
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    return steps


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Sentencepiece's merges: every pair of tokens that forms a third, ordered by that token's score, the best first.

    Ties are ordered as in transformers' conversion, by the parts' lengths and then by their ids.
    """
    scores = vocabulary.numbers("scores", 0)
    ids = {token: i for token, i in vocabulary.ids.items() if vocabulary.types[i] == NORMAL}
    merges = [
        (-scores[i], -cut, cut - len(token), i, ids[token[:cut]], ids[token[cut:]])
        for token, i in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for *_, left, right in sorted(merges)]
