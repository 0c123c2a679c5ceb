"""Structured output: compiles grammars, and tells which tokens they allow."""
