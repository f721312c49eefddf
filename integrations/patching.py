"""Replace functions of other packages, and attributes of objects, and undo it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from cce_dist.integrations.options import ScoreOptions

# A level below WARNING is dropped unless somebody configures logging, and the lines are there to be seen.
log = logging.getLogger("cce_dist").warning


@dataclasses.dataclass(frozen=True)
class Place:
    """A function of another package. It is replaced in every module of the package that has imported it by name."""

    module: str  # that defines the function: "verl.utils.kernel.linear_cross_entropy"
    name: str  # of the function; for a method its class comes first: "SFTTrainer.__init__"

    def put(self, ours: Any) -> None:
        """Replace the function. An earlier replacement must be uninstalled."""
        ours.cce_original = _found(importlib.import_module(self.module), self.name)
        self._swap(ours.cce_original, ours)

    def wrap(self, ours: Callable) -> None:
        """Have a call of the function call ``ours`` with the package's own function before the arguments."""
        self.uninstall()
        theirs = _found(importlib.import_module(self.module), self.name)

        @functools.wraps(theirs)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return ours(theirs, *args, **kwargs)

        self.put(wrapper)

    def uninstall(self) -> None:
        """Undo ``put`` or ``wrap``; nothing happens where it was not called."""
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
        known: Versions of the package that the adapter was written for, as an error names them.
        make: Called with the options, returns the replacement, whose parameters the function must have.
        parameters: Further names of the module and the parameters that they must have (fields for a class, () for anything).
            An entry for the function itself overrides the replacement's parameters.
        ours: In place of ``make``: what ``wrap`` takes. With ``**given`` the function may have any parameters.
    """

    known: str
    make: Callable[[ScoreOptions], Callable] | None = None
    parameters: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    ours: Any = None

    def install(self, options: ScoreOptions) -> None:
        try:
            home = importlib.import_module(self.module)
        except ImportError as error:
            raise ImportError(f"cce_dist needs {self.known}, and cannot import {self.module}: {error}") from error
        ours = functools.partial(self.ours, None) if self.make is None else self.make(options)
        own = inspect.signature(ours).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
        for name, wanted in {self.name: () if takes_any else tuple(own), **self.parameters}.items():
            found = _found(home, name)
            names = tuple(inspect.signature(found).parameters) if callable(found) and wanted else ()
            if names != wanted:
                version = getattr(sys.modules.get(self.package), "__version__", "this version")
                raise RuntimeError(
                    f"cce_dist knows {self.known}: there {name} takes {', '.join(wanted)}; in {version} "
                    f"{', '.join(names) or 'nothing'}"
                )
        if self.make is None:
            self.wrap(self.ours)
        else:
            self.put(ours)


def install_all(patches: Sequence[Patch], options: dict[str, Any]) -> None:
    """Install all of the patches or none. A second call changes the options of the first.

    Args:
        patches: The patches of one adapter.
        options: ``backend``, ``workspace_bytes`` and ``batch_invariant``, as in ``linear_log_probs``.

    Raises:
        ImportError, RuntimeError: The package is missing; or a function does not have the known parameters.
        ValueError: An option is unknown or not allowed.
    """
    for key in options:
        if key.startswith("filter"):  # upstream gradients of a policy have both signs
            raise ValueError(f"{key}: log-probabilities have no filter")
    chosen = ScoreOptions.read(options, spell=str)
    uninstall_all(patches)
    try:
        for patch in patches:
            patch.install(chosen)
    except Exception:
        uninstall_all(patches)
        raise


def uninstall_all(places: Iterable[Place]) -> None:
    for place in places:
        place.uninstall()


def _found(home: Any, name: str) -> Any:
    """Return the attribute of a module by a name that may have dots, or None."""
    for part in name.split("."):
        home = getattr(home, part, None)
    return home


@contextlib.contextmanager
def attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Give an object or a class other attributes in a block."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


@functools.cache
def say_once(line: str) -> None:
    """Log a line on the first rank, once in a process."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        log(f"cce_dist: {line}")
