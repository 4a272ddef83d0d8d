"""Packages that only some data need."""

from __future__ import annotations

import importlib
from typing import Any


def require(name: str, needed_by: str) -> Any:
    """The module of an optional package, or an error that says how to get it.

    Example:
        >>> require("no_such_package", "This")
        Traceback (most recent call last):
        ModuleNotFoundError: This needs the package no_such_package: pip install 'flowattn[data]'.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{needed_by} needs the package {package}: pip install 'flowattn[data]'.", name=error.name
        ) from None
