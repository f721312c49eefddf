"""A function of ours in the place of another package's, wherever its modules hold it by name; and what that has to check.

TRL, verl and NeMo-RL each ask one function of theirs for log-probabilities. ``Function`` puts another there, and back.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from cce_dist.integrations.options import Options

_log = logging.getLogger("cce_dist").warning


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of another package: the name in the module that defines it.

    Args:
        module: "verl.utils.kernel.linear_cross_entropy", say; the package is the part before the first dot.
        name: Under which other modules of the package may have imported it, too.
        known: Versions that the adapter was written for, as a message says them.
    """

    module: str
    name: str
    known: str

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def home(self) -> Any:
        """Return the module, imported. Raises ImportError."""
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            raise ImportError(f"cce_dist needs {self.known}, and cannot import {self.module}: {error}") from error

    def replace(self, ours: Any) -> None:
        """Put ``ours`` in the function's place. Modules that are imported later take it from the first."""
        ours.cce_original = getattr(self.home(), self.name)
        self._swap(ours.cce_original, ours)

    def restore(self) -> None:
        """Undo ``replace``, if it was done."""
        ours: Any = getattr(sys.modules.get(self.module), self.name, None)
        if hasattr(ours, "cce_original"):
            self._swap(ours, ours.cce_original)

    def _swap(self, old: Any, new: Any) -> None:
        for path, module in list(sys.modules.items()):
            if path.partition(".")[0] == self.package and vars(module).get(self.name) is old:
                setattr(module, self.name, new)

    def require(self, what: str, found: Iterable[str], wanted: tuple[str, ...]) -> None:
        """Raise RuntimeError unless names are those of the versions that are known; ``what`` begins the sentence."""
        if tuple(found) != wanted:
            version = getattr(sys.modules.get(self.package), "__version__", "this version")
            raise RuntimeError(
                f"cce_dist knows {self.known}: there {what} {', '.join(wanted)}; in {version} {', '.join(found) or 'nothing'}"
            )


@functools.cache
def say_once(line: str) -> None:
    """Say once, on the first rank, that a function of ours is in use."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log(f"cce_dist: {line}")


def call_options(backend: str, workspace_bytes: int | None) -> dict[str, Any]:
    """Return the options of ``install`` as arguments of ``linear_log_probs``. Raises ValueError on a value out of range."""
    given = {"backend": backend, "workspace_bytes": workspace_bytes}
    Options.read(given, spell=str)
    return given


def parameters_of(function: Callable | None) -> tuple[str, ...]:
    """Return the names of a function's parameters; none where there is no function."""
    return () if function is None else tuple(inspect.signature(function).parameters)
