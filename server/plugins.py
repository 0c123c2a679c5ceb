"""Finds the modules of a package by name, so that a new format is a new file."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def names(package: str) -> list[str]:
    """The modules in a package; none of them is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__))


def choices(package: str) -> list[str]:
    """What a flag may name: a module in the package, or a choice that `find` knows besides."""
    return ["auto", "none", *names(package)]


def find(package: str, choice: str, template: str | None) -> ModuleType | None:
    """The module named `choice`; for "auto" the first that `matches` the chat template; for "none" no module."""
    if choice == "auto":
        modules = (importlib.import_module(f"{package}.{name}") for name in names(package))
        return next((module for module in modules if module.matches(template or "")), None)
    return None if choice == "none" else importlib.import_module(f"{package}.{choice}")
