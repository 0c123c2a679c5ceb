"""Tokens and text: tokenizers, chat templates, and turning tokens into text as they come (`detokenizer`)."""
