"""What operators and clients may say about the chat template: another one, and its variables.

`Tokenizer.render_chat` renders it. How conversations are rewritten for particular templates is in
`jaxserve.server.chat.histories`, and whether requests may bring a template in `ServerState.check_template`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.types import InvalidRequestError

# Parameters that rendering sets itself, so clients cannot use them as the template's variables.
TEMPLATE_INPUTS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations",
        "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
        "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
TEMPLATE_SECONDS = 5.0  # longest time of rendering a chat template


def check_variables(given: Mapping[str, Any], field: str) -> None:
    """Raises InvalidRequestError if one of the variables in `field` is set by the rendering itself. Any others are
    allowed, because templates run in a sandbox and for a limited time."""
    if taken := given.keys() & TEMPLATE_INPUTS:
        raise InvalidRequestError(f"{field} must not hold {min(taken)}, which is no variable of a template", field)


def read_chat_template(given: str) -> str:
    """The source of a chat template: the text of the file `given`, or `given` itself if it is a template.

    Raises ValueError, naming it, for an unreadable file and for an invalid template.
    """
    source = given
    if not set(given) & set("{}\n"):  # every template has one of these, and hardly any path
        try:
            source = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"the chat template {given!r} cannot be read: {error}") from None
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(source)
    except TemplateError as error:
        raise ValueError(f"the chat template {given[:200]!r} is not valid: {error}") from None
    return source
