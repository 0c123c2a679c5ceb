"""Requests and their results, as the server's API server process, the engine and the offline API share them.

Everything here is plain data and crosses the process boundary as msgpack (see `jaxserve.server.ipc.engine_server`).
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Iterator, Sized
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from jaxserve import limits

_SMALLEST = 2.0**-126  # normal float32; devices take numbers below it for zero
NO_PENALTY_ROW = 0  # shared row of token counts on the device, for all sequences without penalties; never read

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json", "json_object", "regex", "choice", "lark"]


class InvalidRequestError(ValueError):
    """A request with an invalid value. `param` names the field, where there is one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class EngineDeadError(RuntimeError):
    """The engine has stopped and will produce nothing more."""


class QueueFullError(RuntimeError):
    """The queue is full; the same request may be accepted later."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form of a whole output.

    Attributes:
      kind: "json": a JSON schema; "json_object": any JSON object; "regex"; "choice": one of several strings; "lark": a
        context-free grammar in the notation of Lark or GBNF.
      value: for each kind: the schema as JSON; nothing; the expression; the strings as a JSON list; the grammar.
      parts: other grammars by name, to which a "lark" grammar refers as `@name`.
      marks: texts by name that may be single tokens of the model, for a "lark" grammar. A mark named `m` defines three
        rules: `m` is the mark, `until_m` is any text that ends with its first mark, and `no_m` is any text without a
        mark. Such texts may be empty.
      field: the field of the client's request that holds the grammar, for errors.
      origin: the grammar's name in errors.
      is_lenient: of a schema, what cannot be enforced is left out, and the log tells this.
      is_loose: where this part is a schema that cannot be compiled, it is taken as lenient or, if that is of no use,
        only its `type` is enforced.
    """

    kind: GrammarKind
    value: str = ""
    parts: tuple[tuple[str, Grammar], ...] = ()
    marks: tuple[tuple[str, str], ...] = ()
    field: str = "grammar"
    origin: str = "the grammar"
    is_lenient: bool = False
    is_loose: bool = False

    def __post_init__(self) -> None:
        if self.kind not in (kinds := typing.get_args(GrammarKind)):
            raise self._error(f"a grammar's kind must be one of {', '.join(kinds)}, got {self.kind!r}")
        if not isinstance(self.value, str) or len(self.value) > limits.MAX_GRAMMAR:
            raise self._error(f"a grammar must be a string of at most {limits.MAX_GRAMMAR} characters")
        if sum(len(part.value) for _, part in self.parts) > limits.MAX_GRAMMAR_PARTS:
            raise self._error(
                f"the parts of a grammar must have at most {limits.MAX_GRAMMAR_PARTS} characters together"
            )
        if self.kind in ("json", "choice"):
            try:
                value = msgspec.json.decode(self.value)
            except (ValueError, RecursionError) as error:
                raise self._error(f"the {self.kind} grammar is not valid JSON: {error}") from None
            self._check_json(value)
        elif self.kind != "json_object" and not self.value:
            raise self._error(f"the {self.kind} grammar is empty")

    def _error(self, message: str) -> InvalidRequestError:
        return InvalidRequestError(message, self.field)

    def _check_json(self, value: object) -> None:
        if self.kind == "choice":
            if not isinstance(value, list) or not all(isinstance(choice, str) and choice for choice in value):
                raise self._error("choice must be a list of strings that are not empty")
            if not 0 < len(value) <= limits.MAX_CHOICES:
                raise self._error(f"choice must hold 1 to {limits.MAX_CHOICES} strings, got {len(value)}")
        elif not isinstance(value, dict | bool):
            raise self._error("a JSON schema must be an object, true or false")
        level = [value] if isinstance(value, dict | list) else []
        for _ in range(limits.MAX_GRAMMAR_NESTING):
            nodes = [
                node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)
            ]
            level = [child for children in nodes for child in children]
        if any(isinstance(node, dict | list) for node in level):
            raise self._error(f"the JSON schema is nested deeper than {limits.MAX_GRAMMAR_NESTING} levels")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to continue a prompt.

    Attributes:
      n: how many completions of one prompt (1 to 128).
      temperature: 0 is greedy; otherwise logits are divided by it. In [0, 10].
      top_k: keep the k most likely tokens; 0 or -1 keeps all.
      top_p: keep the smallest set of most likely tokens whose probability reaches top_p, in [0, 1]; 0 is greedy.
      min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
      repetition_penalty: > 0; logits of tokens seen in prompt or output are divided (if positive) or multiplied by it.
      presence_penalty: in [-2, 2], subtracted from the logits of tokens in the output.
      frequency_penalty: in [-2, 2], subtracted from a token's logit once for each of its occurrences in the output.
      logit_bias: token id -> number that is added to its logit, clamped to [-100, 100].
      seed: the same seed gives the same tokens, whatever else the engine runs; None derives one from the engine's seed.
      allowed_token_ids: only these tokens are sampled (at most 131,072); list the end-of-sequence tokens too if needed.
      bad_words: sequences of token ids that the output never contains (at most 256 of at most 64 tokens).
      stop: strings (at most 64) that end the output; they are cut off unless include_stop_str_in_output.
      stop_token_ids: token ids that end the output, besides the model's own (at most 16 together).
      ignore_eos: continue after the model's own end-of-sequence tokens.
      min_tokens: no end-of-sequence or stop token is sampled before this many output tokens.
      max_tokens: at most this many output tokens; None: up to the model's context length; 0 only scores the prompt.
      logprobs: number of alternatives (0 to 20) to report beside each output token; None reports no log-probabilities.
      logprob_token_ids: these tokens (at most 20) are the alternatives, instead of the most likely ones; `logprobs`
        then is their number.
      prompt_logprobs: as logprobs, for each prompt token but the first.
      skip_special_tokens: leave special tokens out of the text.
      use_beam_search: return the n most likely outputs that a search with n beams finds, the best first; temperature,
        top_k, top_p, min_p and seed have no effect.
      length_penalty: in [-10, 10]; beam search ranks outputs by log-probability / length ** length_penalty.
      grammar: form of the output, unless a limit or stop string cuts it. Ends the output where nothing can follow.
    """

    n: limits.Count = 1
    temperature: limits.Temperature = 1.0
    top_k: limits.TopK = 0
    top_p: limits.Fraction = 1.0
    min_p: limits.Fraction = 0.0
    repetition_penalty: limits.RepetitionPenalty = 1.0
    presence_penalty: limits.Penalty = 0.0
    frequency_penalty: limits.Penalty = 0.0
    logit_bias: dict[int, float] | None = None
    seed: limits.Seed | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: limits.Tokens = 0
    max_tokens: limits.Tokens | None = 16
    logprobs: limits.NumLogprobs | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: limits.NumLogprobs | None = None
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    use_beam_search: bool = False
    length_penalty: limits.LengthPenalty = 1.0

    def __post_init__(self) -> None:
        self._make_tuples()
        for name, (meta, is_int, optional) in _RANGES.items():
            value = getattr(self, name)
            if not (optional and value is None):
                _check_number(name, value, meta, is_int)
        check_min_tokens(self.min_tokens, self.max_tokens)
        if self.max_tokens == 0 and self.n > 1:
            raise InvalidRequestError(f"max_tokens 0 only scores the prompt, so n must be 1, got {self.n}", "n")
        if self.allowed_token_ids or self.bad_words:
            self._check_words()
        if self.stop or self.stop_token_ids:
            self._check_stop()
        if self.logit_bias:
            msgspec.structs.force_setattr(self, "logit_bias", _clamped(self.logit_bias))
        if self.logprob_token_ids:
            self._check_named()
        if self.use_beam_search:
            self._check_beam_search()

    def _make_tuples(self) -> None:
        """Callers may pass any sequences, None for an empty one, and a single stop string."""
        values: dict[str, Iterable[Any]] = {"stop": (self.stop,) if isinstance(self.stop, str) else self.stop}
        values |= {name: getattr(self, name) for name in ("stop_token_ids", "allowed_token_ids")}
        values["logprob_token_ids"] = dict.fromkeys(self.logprob_token_ids or ())
        values["bad_words"] = map(tuple, self.bad_words or ())
        for name, value in values.items():
            msgspec.structs.force_setattr(self, name, tuple(value or ()))

    def _check_words(self) -> None:
        _check_size("allowed_token_ids", self.allowed_token_ids, limits.MAX_ALLOWED_TOKENS, "ids")
        _check_size("bad_words", self.bad_words, limits.MAX_BAD_WORDS, "sequences")
        _check_ids("allowed_token_ids", self.allowed_token_ids)
        for word in self.bad_words:
            if not word:
                raise InvalidRequestError("bad_words must hold sequences that are not empty", "bad_words")
            _check_size("bad_words", word, limits.MAX_BAD_WORD_TOKENS, "tokens in one sequence")
            _check_ids("bad_words", word)

    def _check_stop(self) -> None:
        _check_size("stop", self.stop, limits.MAX_STOP_STRINGS, "strings")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"stop must hold non-empty strings, got {text!r}", "stop")
        _check_size("stop_token_ids", self.stop_token_ids, limits.MAX_STOP_TOKENS, "ids")
        _check_ids("stop_token_ids", self.stop_token_ids)

    def _check_named(self) -> None:
        _check_size("logprob_token_ids", self.logprob_token_ids, limits.MAX_LOGPROBS, "ids")
        _check_ids("logprob_token_ids", self.logprob_token_ids)
        msgspec.structs.force_setattr(self, "logprobs", len(self.logprob_token_ids))

    def _check_beam_search(self) -> None:
        """Beam search ranks by the model's own probabilities, so nothing may change these."""
        defaults = SamplingParams()
        names = ["grammar", "logit_bias", "min_tokens", "prompt_logprobs", "logprob_token_ids"]
        names += ["repetition_penalty", "presence_penalty", "frequency_penalty"]
        for name in names:
            if getattr(self, name) != getattr(defaults, name):
                field = self.grammar.field if name == "grammar" and self.grammar else name
                raise InvalidRequestError(f"{field} cannot be combined with use_beam_search", field)
        if self.max_tokens == 0:
            raise InvalidRequestError("use_beam_search needs max_tokens of 1 or more", "max_tokens")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_p < _SMALLEST

    @property
    def has_mask(self) -> bool:
        """Whether the host masks tokens before sampling; for that it must know all earlier tokens."""
        return self.grammar is not None or bool(self.allowed_token_ids or self.bad_words)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Area(NamedTuple):
    """Which features of a picture's tiles show the picture, see `images.area`.

    across: tiles of a row.
    top, left, height, width: the part of the grid of all features that is no padding.
    rows, columns: features into which these are mixed.
    """

    across: int
    top: int
    left: int
    height: int
    width: int
    rows: int
    columns: int


class VideoTokens(msgspec.Struct, frozen=True):
    """How the tokens of a model's videos are written and numbered. In a prompt, features of frames have the places of
    pictures' (`ImageTokens.token`).

    Attributes:
      token: the id of the token that stands for a video in the prompts of chat templates.
      processor: transformers' processor of such videos; `images.videos` says what it does.
      per_second: positions of a second, where frames follow each other without a text; 0: a position each.
    """

    token: int
    processor: str
    per_second: float = 0.0


class ImageTokens(msgspec.Struct, frozen=True):
    """How the tokens of a model's pictures are found and numbered.

    Attributes:
      token: the id of tokens in whose place features stand.
      patch: side of a patch in pixels.
      side: side of the square of patches that become one feature.
      has_three_positions: see `scheduling.image_prompts`; False: tokens of pictures are numbered as text is.
      layout: which tokens stand around them, see `images.layouts`.
      texts: role in this layout -> text of a token.
      most_tiles: about so many tiles have as many features as a picture's area at most, see `Area`; 0: there are none.
      placeholder: the id or the text of the token that stands for a picture in prompts; None: it is `token`.
      around: ids of the tokens before and behind a picture's; (): there are none.
      newlines: so many stand before and behind these.
      fixed: side in pixels of all pictures, which are square; 0: pictures have any shape.
      whole: all tokens of a picture are computed in one step, because they see each other in both directions.
      video: of videos; None: the model sees none.
    """

    token: int
    patch: int
    side: int
    has_three_positions: bool = False
    layout: str = "plain"
    texts: dict[str, str] = {}
    most_tiles: int = 0
    placeholder: int | str | None = None
    around: tuple[int, ...] = ()
    newlines: int = 0
    fixed: int = 0
    whole: bool = False
    video: VideoTokens | None = None


class Image(msgspec.Struct, frozen=True):
    """A processed picture in a prompt.

    Attributes:
      first: the place in the prompt of the first token in whose place one of its features stands.
      count: tokens in whose place its features stand: those with the model's `image_token` from `first` on.
      grid: frames, rows and columns of its patches.
      patches: uint8 [patches, numbers of a patch], as the model's processing makes them before they are scaled.
      digest: identifies the picture's contents and its processing, 32 bytes.
      area: for models that have such.
      later: of a frame of a video that follows another one without a text between them, by how much the first of its
        three positions exceeds that of the video's first frame; None: it is no such frame.
    """

    first: int
    count: int
    grid: tuple[int, int, int]
    patches: bytes
    digest: bytes
    area: Area | None = None
    later: int | None = None

    @property
    def num_patches(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One prompt with its parameters, as it is submitted to the engine.

    Attributes:
      prompt_token_ids: in a server's engine it is an array of the type "i", see `ipc.messages.Submit`.
      priority: lower values are served first; ties go by arrival.
      cache_salt: requests share pages of the prefix cache only if their salts are equal.
      streams: a client reads the tokens as they are generated.
      tenant: on whose behalf; the queue is shared fairly between tenants. Offline all requests have the same.
      page_hashes: hashes of the prompt's full pages, 32 bytes each, if the submitter has computed them
        (`block_manager.hash_pages`). For a long prompt this saves the engine's loop milliseconds.
      pools: the prompt's embedding or score is wanted, and no tokens: max_tokens is 0.
      adapter, adapter_digest: name and digest of the LoRA adapter to use; "" for the model itself.
      images: pictures, in the order of their places.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    streams: bool = False
    tenant: str = ""
    page_hashes: bytes = b""
    pools: bool = False
    adapter: str = ""
    adapter_digest: str = ""
    images: list[Image] = []


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """Log-probability of one token under the raw distribution (before temperature, penalties and bias).

    `rank` is 1 for the most likely token; `top` lists (token id, log-probability), most likely first. `accepted`: the
    token was proposed by speculative decoding, and kept.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    accepted: bool = False


class SequenceUpdate(msgspec.Struct, array_like=True, gc=False):
    """What one engine step added to one completion.

    An update of completion 0 without tokens and finish_reason reports that the request's grammar is compiled.

    Attributes:
      index: which of the request's n completions.
      token_ids: new tokens; a token that ended the completion is the last one.
      stop_token: the token that ended the completion, if it is of the request's stop_token_ids.
      prompt_logprobs, num_cached_tokens, queue_seconds: set in the first update of completion 0 that has tokens:
        log-probabilities of the prompt (None for its first token) if the request asks for them, prompt tokens found in
        the prefix cache, and time in the queue.
      error, error_param: for finish_reason "error": the reason, and the request's field that caused it, if any.
      complete: the grammar ended the completion, as nothing could follow.
      pooled: of a request that pools, its result in little-endian float32.
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_param: str | None = None
    complete: bool = False
    queue_seconds: float = 0.0
    pooled: bytes | None = None


class StepOutput(msgspec.Struct, array_like=True, gc=False):
    """What one engine step added to the running completions; iterating over it yields SequenceUpdates.

    Completions that only gained tokens, by far the most, are columns: the i-th entries of `request_ids`, `indices` and
    `tokens` belong together. All others are `updates`.
    """

    request_ids: list[str] = []
    indices: list[int] = []
    tokens: list[list[int]] = []
    updates: list[SequenceUpdate] = []

    def __len__(self) -> int:
        return len(self.request_ids) + len(self.updates)

    def __iter__(self) -> Iterator[SequenceUpdate]:
        yield from map(SequenceUpdate, self.request_ids, self.indices, self.tokens)
        yield from self.updates

    def of(self, prefix: str) -> StepOutput:
        """The part for requests whose ids begin with `prefix`, which is removed from the ids."""
        mine = [i for i, request_id in enumerate(self.request_ids) if request_id.startswith(prefix)]
        ids = self.request_ids
        indices = self.indices
        tokens = self.tokens
        if len(mine) < len(ids):
            ids = [ids[i] for i in mine]
            indices = [indices[i] for i in mine]
            tokens = [tokens[i] for i in mine]
        updates = [update for update in self.updates if update.request_id.startswith(prefix)]
        for update in updates:
            update.request_id = update.request_id.removeprefix(prefix)
        return StepOutput([request_id.removeprefix(prefix) for request_id in ids], indices, tokens, updates)

    def extend(self, other: StepOutput) -> None:
        self.request_ids += other.request_ids
        self.indices += other.indices
        self.tokens += other.tokens
        self.updates += other.updates


def _ranges() -> dict[str, tuple[Meta, bool, bool]]:
    """For each field of SamplingParams with a range: the range, whether it must be an integer, and may be None."""
    ranges = {}
    for name, hint in typing.get_type_hints(SamplingParams, include_extras=True).items():
        options = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
        if typing.get_origin(options[0]) is Annotated:
            kind, meta = typing.get_args(options[0])
            ranges[name] = (meta, kind is int, len(options) > 1)
    return ranges


_RANGES = _ranges()


def check_min_tokens(least: int, most: int | None) -> None:
    """Raises InvalidRequestError if an output must have more tokens than it may have; None: there is no limit."""
    if most is not None and least > most:
        raise InvalidRequestError(f"min_tokens ({least}) must not exceed max_tokens ({most})", "min_tokens")


def _clamped(logit_bias: dict[int, float]) -> dict[int, float]:
    """Biases in [-100, 100]. Raises InvalidRequestError for what is none, or for too many."""
    _check_size("logit_bias", logit_bias, limits.MAX_LOGIT_BIAS, "entries")
    clamped = {}
    for token, bias in logit_bias.items():
        _check_int("logit_bias", token, 0, 2**31 - 1)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not math.isfinite(bias):
            raise InvalidRequestError(f"logit_bias[{token}] must be a finite number, got {bias!r}", "logit_bias")
        clamped[token] = min(100.0, max(-100.0, float(bias)))
    return clamped


def _check_number(name: str, value: object, meta: Meta, is_int: bool) -> None:
    low = meta.ge if meta.gt is None else meta.gt
    high = meta.le
    low_open = meta.gt is not None
    assert low is not None
    assert high is not None
    if is_int:
        _check_int(name, value, int(low), int(high))
    elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a finite number, got {value!r}", name)
    elif not low <= value <= high or (low_open and value == low):
        raise InvalidRequestError(f"{name} must be in {'(' if low_open else '['}{low}, {high}], got {value}", name)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}", name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}", name)


def _check_ids(name: str, tokens: tuple[int, ...]) -> None:
    """Lists may be long, so built-in functions check them first; the loop only finds the first wrong id."""
    if tokens and (set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= 2**31):
        for token in tokens:
            _check_int(name, token, 0, 2**31 - 1)


def _check_size(name: str, values: Sized, most: int, what: str) -> None:
    if len(values) > most:
        raise InvalidRequestError(f"{name} has {len(values)} {what}; at most {most} are allowed", name)
