"""The installer under TRL, verl and NeMo-RL: a function of ours in the place of another package's, and back.

Other modules of the package may have imported that function by name, so ``Patch`` replaces it in all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist

from cce_dist.integrations.options import ScoreOptions

_log = logging.getLogger("cce_dist").warning


@dataclasses.dataclass(frozen=True)
class Patch:
    """One function of another package, and what replaces it.

    Args:
        module: The module that defines the function, "verl.utils.kernel.linear_cross_entropy" say.
        name: The function's name; of a method with its class, "LossPostProcessor.__call__".
        known: Versions that the adapter was written for, as a message says them.
        make: Called with the options, returns the replacement; the function has the replacement's parameters.
        parameters: What other names of the module take, or this one if not those; () is anything. Classes take their fields.
    """

    module: str
    name: str
    known: str
    make: Callable[[ScoreOptions], Callable]
    parameters: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def install(
        self, *, backend: str = "auto", workspace_bytes: int | None = None, batch_invariant: bool = False
    ) -> None:
        """Have the package take its log-probabilities from hidden states. A second call changes the options of the first.

        Args:
            backend, workspace_bytes, batch_invariant: As in ``linear_log_probs``.

        Raises:
            ImportError, RuntimeError: The package is missing; or its function is another than the one that is known here.
            ValueError: A value is not allowed.
        """
        given = {"backend": backend, "workspace_bytes": workspace_bytes, "batch_invariant": batch_invariant}
        options = ScoreOptions.read(given, spell=str)
        self.uninstall()
        try:
            home = importlib.import_module(self.module)
        except ImportError as error:
            raise ImportError(f"cce_dist needs {self.known}, and cannot import {self.module}: {error}") from error
        ours: Any = self.make(options)
        self._check(home, {self.name: tuple(inspect.signature(ours).parameters), **self.parameters})
        ours.cce_original = _found(home, self.name)
        self._swap(ours.cce_original, ours)

    def uninstall(self) -> None:
        """Undo ``install``; nothing happens where it was not called."""
        ours = _found(sys.modules.get(self.module), self.name)
        if hasattr(ours, "cce_original"):
            self._swap(ours, ours.cce_original)

    def _check(self, home: Any, parameters: Mapping[str, tuple[str, ...]]) -> None:
        for name, wanted in parameters.items():
            found = _found(home, name)
            names = tuple(inspect.signature(found).parameters) if callable(found) and wanted else ()
            if names != wanted:
                version = getattr(sys.modules.get(self._package), "__version__", "this version")
                raise RuntimeError(
                    f"cce_dist knows {self.known}: there {name} takes {', '.join(wanted)}; in {version} "
                    f"{', '.join(names) or 'nothing'}"
                )

    @property
    def _package(self) -> str:
        return self.module.partition(".")[0]

    def _swap(self, old: Any, new: Any) -> None:
        owner, _, name = self.name.rpartition(".")
        if owner:
            setattr(_found(sys.modules[self.module], owner), name, new)
            return
        # Modules that are imported later take the name from the module that defines it.
        for path, module in list(sys.modules.items()):
            if path.partition(".")[0] == self._package and getattr(module, "__dict__", {}).get(self.name) is old:
                setattr(module, self.name, new)


def install_all(patches: Iterable[Patch], **options: Any) -> None:
    """Install patches as ``Patch.install`` does, all of them or none."""
    patches = tuple(patches)
    uninstall_all(patches)
    try:
        for patch in patches:
            patch.install(**options)
    except Exception:
        uninstall_all(patches)
        raise


def uninstall_all(patches: Iterable[Patch]) -> None:
    for patch in patches:
        patch.uninstall()


def _found(home: Any, name: str) -> Any:
    """Return what a module has by a name, with dots or without; None where it has nothing."""
    for part in name.split("."):
        home = getattr(home, part, None)
    return home


@functools.cache
def say_once(line: str) -> None:
    """Say once, on the first rank, that a function of ours is in use."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log(f"cce_dist: {line}")
