"""A chat template that the operator gives, instead of the model's own."""

from __future__ import annotations

from pathlib import Path


def read_chat_template(given: str) -> str:
    """The source of a chat template: the text of the file `given`, or `given` itself where it is a template.

    Raises ValueError, naming it, for a file that cannot be read, and for what is not valid as a template.
    """
    source = given
    if not set(given) & set("{}\n"):  # which are in every template, and hardly in a path
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
