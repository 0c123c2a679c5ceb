"""Finds the modules of a package by name, so that adding a format takes only a new file."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

# Names that vLLM has for the same formats, by package.
ALIASES = {
    "jaxserve.server.tools.parsers": {
        "cohere_command3": "cohere", "cohere_command4": "cohere", "ernie45": "hermes", "granite4": "hermes",
        "functiongemma": "gemma", "gemma4": "gemma", "glm47": "glm45", "gpt_oss": "harmony", "openai": "harmony",
        "llama4_json": "llama3_json", "phi4_mini_json": "phi4", "qwen3_xml": "qwen3_coder",
    },
    "jaxserve.server.reasoning": {
        "cohere_command3": "cohere", "cohere_command4": "cohere", "deepseek_v3": "deepseek_r1", "glm47": "glm45",
        "gpt_oss": "harmony", "minimax_m2": "qwen3", "olmo3": "qwen3", "openai_gptoss": "harmony",
    },
}  # fmt: skip


def names(package: str) -> list[str]:
    """The names of a package's modules, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__))


def choices(package: str) -> list[str]:
    """The values of a flag that selects a module: those that `find` takes."""
    return ["auto", "none", *names(package), *sorted(ALIASES.get(package, ()))]


def find(package: str, choice: str, template: str | None) -> ModuleType | None:
    """The module named `choice`; for "auto" the first module whose `matches` accepts the template; for "none" None."""
    if choice == "auto":
        modules = (importlib.import_module(f"{package}.{name}") for name in names(package))
        return next((module for module in modules if module.matches(template or "")), None)
    return None if choice == "none" else importlib.import_module(f"{package}.{ALIASES[package].get(choice, choice)}")
