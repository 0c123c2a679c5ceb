"""Every limit on what one request may ask for. The checks and /openapi.json both read them from here.

Limits that an operator sets are in `jaxserve.config` and `jaxserve.server.http.settings`;
`jaxserve.server.http.request_limits` enforces those on a request's cost."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

# A request's parameters.
MAX_LOGPROBS = 20  # the compiled step always computes this many alternatives, so that no request makes it compile again
MAX_N = 128  # completions of one prompt
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_STOP_TOKENS = 16  # stop token ids per request, end-of-sequence ids included
MAX_LOGIT_BIAS = 512
MAX_ALLOWED_TOKENS = 2**17
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_WORDS = 128  # bad words as text; each becomes two token sequences
MAX_WORD_LENGTH = 256  # characters of one of them
MAX_INT = 2**31 - 1
BACKGROUND = MAX_INT  # the priority of requests that step aside for all others, such as those of batches
MAX_SEED = 2**63 - 1
MAX_NAME_LENGTH = 256  # characters of a cache salt

# Grammars of outputs.
MAX_GRAMMAR = 2**18  # characters of a grammar
MAX_GRAMMAR_PARTS = 2 * MAX_GRAMMAR  # characters of all parts of a grammar
MAX_GRAMMAR_NESTING = 64
MAX_CHOICES = 1024

# Numbers of items in a request.
MAX_PROMPTS = 1024
MAX_COMPLETIONS = 1024  # of all prompts together; the default of --max-completions-per-request
MAX_MESSAGES = 4096
MAX_CALLS = 4096  # tool calls in one message
MAX_TOOLS = 512
MAX_ITEMS = 4096  # input items of a request to /v1/responses
MAX_DETOKENIZED = 2**20  # token ids

# The JSON of a request's body, whatever the fields.
MAX_SCHEMA = 2**18  # bytes of each field that holds a JSON schema or another free form
MAX_NESTING = 72  # levels of brackets; a schema may take 64 of them
MAX_CONTAINERS = 2**17  # objects and lists
MAX_STRINGS = 2**19  # keys and values
SMALL_BODY = 2**16  # bytes; a body up to this size is always accepted

# The server's work for one request or one key at a time.
MAX_HELD_LOGPROBS = 2**22  # log-probabilities, alternatives included, of an answer that is not streamed
MAX_WAITING_TEXT = 2**26  # bytes of one key's bodies whose texts wait for a thread
BODIES = 8  # unfinished bodies together may take this many times the longest body's bytes
DEFAULT_WAITING = 8192  # completions in the queue
WAITING_PER_SLOT = 32  # the same for each slot, where that is more

# Ranges of a request's parameters, as types: msgspec checks them, and /openapi.json states them.
Count = Annotated[int, Meta(ge=1, le=MAX_N)]
Temperature = Annotated[float, Meta(ge=0, le=10)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LengthPenalty = Annotated[float, Meta(ge=-10, le=10)]
Seed = Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_INT)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
MAX_IMAGE_PIXELS = 16 * 2**20  # of a picture as it is sent, unless the operator allows others
