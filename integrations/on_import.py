"""Run a function once another package is imported, however early or late that happens."""

from __future__ import annotations

import functools
import importlib.abc
import logging
import sys
from collections.abc import Callable
from typing import Any


def on_import(name: str, act: Callable[[Any], None]) -> None:
    """Call ``act(module)`` when the package ``name`` has been imported, at once if it is there already.

    Nothing is imported for it. An error of ``act`` is logged, and does not disturb the import.
    """
    if name in sys.modules:
        _act(act, sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(importlib.abc.MetaPathFinder):
    """Find one package as the other finders do, and have its loader call a function afterwards."""

    def __init__(self, name: str, act: Callable[[Any], None]) -> None:
        self.name, self.act = name, act

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in finders)), None)
        loader: Any = getattr(spec, "loader", None)
        if loader is not None:
            loader.exec_module = functools.partial(self.execute, loader.exec_module)
        return spec

    def execute(self, exec_module: Callable[[Any], None], module: Any) -> None:
        exec_module(module)
        _act(self.act, module)


def _act(act: Callable[[Any], None], module: Any) -> None:
    try:
        act(module)
    except Exception as error:
        logging.getLogger("cce_dist").warning("cce_dist: cannot watch %s: %s", module.__name__, error)
