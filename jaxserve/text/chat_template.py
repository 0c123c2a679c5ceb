"""Reads the operator's chat template, which replaces the model's own."""

from __future__ import annotations

from pathlib import Path


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
