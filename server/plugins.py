"""Finds the modules of a package by name, so that adding a format takes only a new file."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

# Names that vLLM has for the same formats, and those of SGLang where they differ, by package.
ALIASES = {
    "jaxserve.server.tools.parsers": {
        "cohere_command3": "cohere", "cohere_command4": "cohere", "ernie45": "hermes", "granite4": "hermes",
        "functiongemma": "gemma", "glm47": "glm45", "gpt_oss": "harmony", "openai": "harmony",
        "hy_v4": "hy_v3", "jamba": "hunyuan_a13b", "ling3": "glm45", "llama4_json": "llama3_json",
        "phi4_mini_json": "phi4", "poolside_v1": "glm45", "qwen3_xml": "qwen3_coder", "step3p5": "qwen3_coder",
        "apertus2509": "apertus", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31",
        "deepseekv32": "deepseek_v32", "deepseekv4": "deepseek_v4", "glm": "glm45", "gpt-oss": "harmony",
        "hunyuan": "hy_v3", "llama3": "llama3_json", "minimax-m2": "minimax_m2", "qwen": "hermes",
        "qwen25": "hermes", "trinity": "hermes",
    },
    "jaxserve.server.reasoning": {
        "cohere_command3": "cohere", "cohere_command4": "cohere", "deepseek_v3": "deepseek_r1",
        "deepseek_v4": "deepseek_r1", "glm47": "glm45", "gpt_oss": "harmony", "hy_v4": "hy_v3",
        "mimo": "qwen3", "minimax_m2": "qwen3", "nemotron_v3": "nemotron", "olmo3": "qwen3",
        "openai_gptoss": "harmony", "poolside_v1": "qwen3", "step3": "qwen3", "step3p5": "qwen3",
        "apertus2509": "apertus", "deepseek-r1": "deepseek_r1", "deepseek-v3": "deepseek_r1",
        "deepseek-v4": "deepseek_r1", "gpt-oss": "harmony", "hunyuan": "hy_v3", "minimax": "qwen3",
        "nemotron_3": "nemotron", "qwen3-thinking": "qwen3",
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
