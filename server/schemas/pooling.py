"""Bodies of requests for embeddings and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jaxserve import limits
from jaxserve.server.schemas.common import CacheSalt, Priority, Prompt, RequestId, Truncation, check_range, prompts_of
from jaxserve.types import InvalidRequestError

Text = Annotated[str, Meta(min_length=1)]
Texts = Text | Annotated[list[Text], Meta(min_length=1, max_length=limits.MAX_PROMPTS)]
Instruction = Annotated[str, Meta(min_length=1, max_length=2**16)]


class PoolingFields(msgspec.Struct, kw_only=True):
    """The fields that these bodies have in common."""

    model: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["right"] | None = None  # the end of a text is cut off
    priority: Priority | None = None
    request_id: RequestId | None = None
    cache_salt: CacheSalt | None = None

    def check(self) -> None:
        """Raises InvalidRequestError, naming the field, for errors that can be found without the model."""
        check_range("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, limits.MAX_INT, excluded=0)


class EmbeddingRequest(PoolingFields, kw_only=True):
    """Body of /v1/embeddings. `dimensions`: as many leading numbers, scaled to length 1."""

    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=limits.MAX_INT, description="At most the model's own")] | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """The inputs, one entry each. Raises InvalidRequestError for an empty or mixed list."""
        return prompts_of(self.input, "input")


class ScoreRequest(PoolingFields, kw_only=True):
    """Body of /v1/score: one text with each of several, or lists of equal length, pair by pair."""

    text_1: Texts
    text_2: Texts
    instruction: Instruction | None = None
    use_activation: bool = True

    def pairs(self) -> list[tuple[str, str]]:
        """Raises InvalidRequestError for lists of different lengths."""
        first, second = (_as_list(texts) for texts in (self.text_1, self.text_2))
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequestError(
                f"text_1 has {len(first)} texts and text_2 has {len(second)}; give one text, or lists of equal length",
                "text_1",
            )
        return list(zip(first, second, strict=True))


class Document(msgspec.Struct):
    text: Text


class RerankRequest(PoolingFields, kw_only=True):
    """Body of /v1/rerank and /v2/rerank. `return_documents`: by default on /v1/rerank and not on /v2/rerank."""

    query: Text
    documents: Annotated[list[Text | Document], Meta(min_length=1, max_length=limits.MAX_PROMPTS)]
    top_n: Annotated[int, Meta(ge=0, le=limits.MAX_INT, description="0: all documents")] | None = None
    return_documents: bool | None = None
    instruction: Instruction | None = None
    use_activation: bool = True

    def texts(self) -> list[str]:
        return [document.text if isinstance(document, Document) else document for document in self.documents]


def _as_list(texts: str | Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)
