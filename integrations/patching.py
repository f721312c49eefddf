"""A function of ours in the place of another package's, and back: the installer under TRL, verl, NeMo-RL and torchtitan."""

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
class Place:
    """Where another package has a function. Its other modules may have imported it by name, so all of them get another.

    Args:
        module: The module that defines the function, "verl.utils.kernel.linear_cross_entropy" say.
        name: The function's name; a method's has its class before it, "SFTTrainer.__init__".
    """

    module: str
    name: str

    def put(self, ours: Any) -> Any:
        """Put a function of ours there, in place of the last one, and return the package's own."""
        self.uninstall()
        ours.cce_original = _found(importlib.import_module(self.module), self.name)
        self._swap(ours.cce_original, ours)
        return ours.cce_original

    def uninstall(self) -> None:
        """Undo ``put``; nothing happens where it was not called."""
        ours = _found(sys.modules.get(self.module), self.name)
        if hasattr(ours, "cce_original"):
            self._swap(ours, ours.cce_original)

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def _swap(self, old: Any, new: Any) -> None:
        owner, _, name = self.name.rpartition(".")
        if owner:
            setattr(_found(sys.modules[self.module], owner), name, new)
            return
        # Modules that are imported later take the name from the module that defines it.
        for path, module in list(sys.modules.items()):
            if path.partition(".")[0] == self.package and getattr(module, "__dict__", {}).get(name) is old:
                setattr(module, name, new)


@dataclasses.dataclass(frozen=True)
class Patch(Place):
    """One function of another package, and what replaces it.

    Args:
        known: Versions that the adapter was written for, as a message says them.
        make: Called with the options, returns the replacement; the function has the replacement's parameters.
        parameters: What other names of the module take, or this one if not those; () is anything. Classes take their fields.
    """

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
        ours = self.make(options)
        self._check(home, {self.name: tuple(inspect.signature(ours).parameters), **self.parameters})
        self.put(ours)

    def _check(self, home: Any, parameters: Mapping[str, tuple[str, ...]]) -> None:
        for name, wanted in parameters.items():
            found = _found(home, name)
            names = tuple(inspect.signature(found).parameters) if callable(found) and wanted else ()
            if names != wanted:
                version = getattr(sys.modules.get(self.package), "__version__", "this version")
                raise RuntimeError(
                    f"cce_dist knows {self.known}: there {name} takes {', '.join(wanted)}; in {version} "
                    f"{', '.join(names) or 'nothing'}"
                )


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


def uninstall_all(places: Iterable[Place]) -> None:
    for place in places:
        place.uninstall()


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
