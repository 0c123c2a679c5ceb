"""Finds the modules of a package by name, so that adding a format takes only a new file."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def names(package: str) -> list[str]:
    """The names of a package's modules, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__))


def choices(package: str) -> list[str]:
    """The values of a flag that selects a module: those that `find` takes."""
    return ["auto", "none", *names(package)]


def find(package: str, choice: str, template: str | None) -> ModuleType | None:
    """The module named `choice`; for "auto" the first module whose `matches` accepts the template; for "none" None."""
    if choice == "auto":
        modules = (importlib.import_module(f"{package}.{name}") for name in names(package))
        return next((module for module in modules if module.matches(template or "")), None)
    return None if choice == "none" else importlib.import_module(f"{package}.{choice}")
